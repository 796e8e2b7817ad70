package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
)

const module = "github.com/tidemark-go/tidemark"

// World is everything that a demo has started.
type World struct {
	Source *mongo.Database

	demo     Demo
	out      io.Writer
	dir      string // for the binaries and the projection's log
	servers  servers
	sinkName string
	sink     sink

	projection *exec.Cmd // nil: it does not run
	last       change    // the last one made
}

func (w *World) say(format string, args ...any) { fmt.Fprintf(w.out, "demo: "+format+"\n", args...) }

func (w *World) table() *tabwriter.Writer {
	return tabwriter.NewWriter(w.out, 0, 0, 3, ' ', tabwriter.AlignRight)
}

// close ends what runs and removes what was made.
func (w *World) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err := w.killProjection()
	if w.sink != nil {
		err = errors.Join(err, w.sink.close(ctx))
	}
	if w.Source != nil {
		err = errors.Join(err, w.Source.Drop(ctx), w.Source.Client().Disconnect(ctx))
	}
	if w.dir != "" {
		err = errors.Join(err, os.RemoveAll(w.dir))
	}
	return errors.Join(err, w.servers.close(ctx))
}

func (w *World) startServers(ctx context.Context) error {
	w.say("starting %s (the first time there is a download)", sinks[w.sinkName].servers)
	if err := w.servers.start(ctx, w.sinkName); err != nil {
		return err
	}
	client, err := mongo.Connect(options.Client().ApplyURI(w.servers.mongodb))
	if err != nil {
		return err
	}
	w.Source = client.Database(w.servers.name)
	w.sink, err = sinks[w.sinkName].open(ctx, w)
	return err
}

func (w *World) build(ctx context.Context) (err error) {
	if w.dir, err = os.MkdirTemp("", "tidemark-demo-"); err != nil {
		return err
	}
	w.say("building the projection and the generator")
	example := module + "/examples/" + w.demo.Example
	_, err = command(ctx, "go", "build", "-o", w.dir+string(filepath.Separator), example, example+"/generate")
	return err
}

// program is one of the two that were built, told of the servers by its environment.
func (w *World) program(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(w.dir, name), append([]string{"-database", w.servers.name}, args...)...)
	cmd.Env = append(os.Environ(), "MONGODB_URI="+w.servers.mongodb, "POSTGRES_DSN="+w.servers.postgres, "ELASTICSEARCH_URL="+w.servers.elasticsearch)
	cmd.WaitDelay = 5 * time.Second
	dieWithUs(cmd)
	return cmd
}

func output(cmd *exec.Cmd) (string, error) {
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path), err, text.String())
	}
	return strings.TrimSpace(text.String()), nil
}

// generating starts writes; end waits for them and says what was written.
func (w *World) generating(ctx context.Context, writes, seed int) (end func() error, err error) {
	var text bytes.Buffer
	cmd := w.program(ctx, "generate", "-writes", strconv.Itoa(writes), "-seed", strconv.Itoa(seed))
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() error {
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("generate: %w\n%s", err, text.String())
		}
		w.say("%s", strings.TrimSpace(text.String()))
		return nil
	}, nil
}

func (w *World) generate(ctx context.Context, writes, seed int) error {
	now, err := w.sourceTime(ctx)
	if err != nil {
		return err
	}
	stream, err := w.watch(ctx, projector.Position{Time: bson.Timestamp{T: now.T, I: now.I + 1}})
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close(context.WithoutCancel(ctx)) }()
	end, err := w.generating(ctx, writes, seed)
	if err != nil {
		return err
	}
	if err := end(); err != nil {
		return err
	}
	changes, err := w.read(ctx, stream, writes)
	if err != nil {
		return err
	}
	w.last = changes[writes-1]
	return nil
}

// example is the example's own command.
func (w *World) example(ctx context.Context, args ...string) *exec.Cmd {
	if len(w.demo.Sinks) > 1 {
		args = append(args, "-sink", w.sinkName)
	}
	if w.sinkName == "elasticsearch" {
		args = append(args, "-prefix", w.servers.prefix())
	}
	return w.program(ctx, w.demo.Example, args...)
}

// Show runs the example's own command with some arguments, and shows what it prints.
func (w *World) Show(ctx context.Context, args ...string) error {
	text, err := output(w.example(ctx, args...))
	if err == nil {
		w.say("%s %s\n%s", w.demo.Example, strings.Join(args, " "), text)
	}
	return err
}

// startProjection returns once the projection has taken its term, and has a model.
func (w *World) startProjection(ctx context.Context) error {
	before, err := w.sink.glance(ctx)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(w.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := w.example(context.WithoutCancel(ctx))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	w.projection = cmd
	err = until(ctx, 10*time.Millisecond, levelTimeout, func() (bool, error) {
		now, err := w.sink.glance(ctx)
		return now.Term > before.Term && now.Sequence > 0, err
	})
	if err != nil {
		return w.withLog(fmt.Errorf("the projection does not start: %w", err))
	}
	w.say("projection started, process %d, term %d", cmd.Process.Pid, before.Term+1)
	return nil
}

// killProjection ends it as a crash would; nil where it does not run.
func (w *World) killProjection() error {
	if w.projection == nil {
		return nil
	}
	cmd := w.projection
	w.projection = nil
	if err := cmd.Process.Kill(); err != nil {
		return w.withLog(fmt.Errorf("kill the projection: %w", err))
	}
	_ = cmd.Wait() // says that it was killed
	return nil
}

// stopProjection ends it as an operator would.
func (w *World) stopProjection(context.Context) error {
	cmd := w.projection
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	w.projection = nil
	select {
	case err := <-ended:
		if err != nil {
			return w.withLog(fmt.Errorf("the projection did not end well: %w", err))
		}
		w.say("projection stopped (SIGTERM)")
		return nil
	case <-time.After(20 * time.Second):
		err := w.withLog(errors.New("the projection does not end"))
		return errors.Join(err, cmd.Process.Kill())
	}
}

func (w *World) logPath() string { return filepath.Join(w.dir, "log") }

func (w *World) withLog(err error) error {
	text, _ := os.ReadFile(w.logPath())
	return fmt.Errorf("%w; its log:\n%s", err, text)
}

// logged is what the projection's log has last from one text up to another, "" if nothing.
func (w *World) logged(from, to string) string {
	text, _ := os.ReadFile(w.logPath())
	i := bytes.LastIndex(text, []byte(from))
	if i < 0 {
		return ""
	}
	said, _, _ := strings.Cut(string(text[i:]), to)
	return said
}

// until asks once per interval, for at most the time given.
func until(ctx context.Context, interval, limit time.Duration, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(interval):
		}
	}
}

// command runs a program of the machine's.
func command(ctx context.Context, name string, args ...string) (string, error) {
	text, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, text)
	}
	return strings.TrimSpace(string(text)), nil
}
