// The command services starts the servers that tidemark's tests and demos need and leaves them running.
//
//	go run ./integration/services up [mongodb] [postgres] [redis] [elasticsearch]
//	eval "$(go run ./integration/services env)"
//	go run ./integration/services down
//
// Without names it means all four. Each comes from its environment variable (MONGODB_URI, POSTGRES_DSN, REDIS_URL,
// ELASTICSEARCH_URL) when set, else from Docker when an engine answers, else it is a native server that is downloaded
// once and kept in the user's cache folder. The package serve does the work and is for tests and demos to import.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

const usage = "usage: services up|down|env [mongodb] [postgres] [redis] [elasticsearch]"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := do(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "services:", err)
		os.Exit(1)
	}
}

func do(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no command; %s", usage)
	}
	switch command, names := args[0], args[1:]; command {
	case "up":
		return serve.Up(ctx, names...)
	case "down":
		return serve.Down(ctx, names...)
	case "env":
		lines, err := serve.Env(ctx, names...)
		for _, line := range lines {
			fmt.Println(line)
		}
		if err == nil && len(lines) == 0 {
			err = errors.New("no server is up; start some with: go run ./integration/services up")
		}
		return err
	default:
		return fmt.Errorf("no command %q; %s", command, usage)
	}
}
