package serve

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// RedisOptions says how StartRedis starts a server. The zero value is the server's defaults with an append-only file
// and without snapshots, so that what was written outlives a kill as far as appendfsync, by default every second, says.
type RedisOptions struct {
	// Params are configuration directives, such as {"appendfsync": "always"}.
	Params map[string]string

	home string // see Process.home
}

// RedisServer is one native Redis server.
type RedisServer struct {
	*Process
}

// StartRedis starts a throwaway Redis server and returns when it answers. ctx bounds the start only. End it by
// RedisServer.Close, or Close.
func StartRedis(ctx context.Context, o RedisOptions) (*RedisServer, error) {
	s, err := startRedis(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("start Redis: %w", err)
	}
	return s, nil
}

// URL is the server's connection string.
func (s *RedisServer) URL() string { return "redis://" + s.Addr() + "/0" }

func startRedis(ctx context.Context, o RedisOptions) (*RedisServer, error) {
	program, err := fetchRedis(ctx)
	if err != nil {
		return nil, err
	}
	p, err := newProcess("redis-server", o.home)
	if err != nil {
		return nil, err
	}
	s := &RedisServer{Process: p}
	p.args = func(port int) []string {
		args := []string{
			program, "--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", p.dataPath(),
			"--appendonly", "yes", "--save", "", "--daemonize", "no",
		}
		for name, value := range o.Params {
			args = append(args, "--"+name, value)
		}
		return args
	}
	p.ready = func(ctx context.Context) error { return pingRedis(ctx, p.Addr(), o.Params["requirepass"]) }
	err = os.Mkdir(p.dataPath(), 0o700)
	if err == nil {
		err = p.launch(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func fetchRedis(ctx context.Context) (string, error) {
	if runtime.GOOS != "linux" {
		return "", errors.New("a native Redis needs Linux: start Docker or set REDIS_URL")
	}
	if path, err := exec.LookPath("redis-server"); err == nil {
		return path, nil
	}
	if err := installDebian(ctx, "redis-server"); err != nil {
		return "", err
	}
	return exec.LookPath("redis-server")
}

// pingRedis returns nil when the server has loaded its data and answers.
func pingRedis(ctx context.Context, addr, password string) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	commands, answers := "PING\r\n", []string{"+PONG"}
	if password != "" {
		commands, answers = "AUTH "+password+"\r\nPING\r\n", []string{"+OK", "+PONG"}
	}
	if _, err := conn.Write([]byte(commands)); err != nil {
		return err
	}
	r := bufio.NewReader(conn)
	for _, want := range answers {
		line, err := r.ReadString('\n')
		if err != nil {
			return err
		}
		if line = strings.TrimSpace(line); line != want {
			return fmt.Errorf("redis answered %q", line)
		}
	}
	return nil
}
