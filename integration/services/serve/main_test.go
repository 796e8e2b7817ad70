package serve_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

// role is the environment variable by which a test runs this binary again as a program of its own.
const role = "SERVE_TEST_ROLE"

func TestMain(m *testing.M) {
	if r := os.Getenv(role); r != "" {
		if err := roles[r](context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if err := serve.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var roles = map[string]func(context.Context) error{
	"parent": func(ctx context.Context) error { return beParent(ctx, false) },
	"pauser": func(ctx context.Context) error { return beParent(ctx, true) },
	"up":     func(ctx context.Context) error { return serve.Up(ctx, "redis") },
}

// beParent starts servers, prints their process ids as JSON and waits to be killed.
func beParent(ctx context.Context, pause bool) error {
	mongod, err := serve.StartMongod(ctx, serve.MongodOptions{})
	if err != nil {
		return err
	}
	postgres, err := serve.StartPostgres(ctx, serve.PostgresOptions{})
	if err != nil {
		return err
	}
	redis, err := serve.StartRedis(ctx, serve.RedisOptions{})
	if err != nil {
		return err
	}
	if pause {
		if err := postgres.Pause(); err != nil {
			return err
		}
	}
	pids := []int{mongod.Members[0].PID(), postgres.PID(), redis.PID()}
	if err := json.NewEncoder(os.Stdout).Encode(pids); err != nil {
		return err
	}
	select {}
}

// again is this binary in another role.
func again(t *testing.T, as string, env ...string) *exec.Cmd {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(append(os.Environ(), role+"="+as), env...)
	cmd.Stderr = os.Stderr
	return cmd
}
