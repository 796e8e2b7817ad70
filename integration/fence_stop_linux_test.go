package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func init() { roles["stopped"] = func(ctx context.Context) error { return inChild(runHits(ctx)) } }

// runHits is the process that is stopped: it follows the hits and stops itself before
// the COMMIT of the hits that are marked, in the style that Style says.
func runHits(ctx context.Context) func(childSetup, *mongo.Database, *pgxpool.Pool) error {
	return func(s childSetup, db *mongo.Database, pool *pgxpool.Pool) error {
		var marked atomic.Bool
		fault.Global.OnReach(func(at fault.Point) {
			if at == fault.CommitSend && marked.CompareAndSwap(true, false) {
				// To this very thread: with another one to take the signal, this one would
				// go on for a moment, and could send the COMMIT.
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				_ = syscall.Tgkill(os.Getpid(), syscall.Gettid(), syscall.SIGSTOP)
			}
		})
		p := watched(s.Style, func(page string) {
			if page == "frozen" {
				marked.Store(true)
			}
		})
		r, err := projector.New(db, postgres.New(pool), p, projector.Options{Start: projector.FromNow(), Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
		if err != nil {
			return err
		}
		err = r.Run(ctx)
		var fenced *projector.FencedError
		if errors.As(err, &fenced) {
			fmt.Printf("FENCED by term %d\n", fenced.Theirs)
			return nil
		}
		return fmt.Errorf("the runner ended with %w", err)
	}
}

// watched is the projection of a style that tells, besides, whose hits it is given.
func watched(s style, page func(string)) postgres.Projection {
	p := s.projection()
	p.Bindings = append(p.Bindings, projector.On("hits", projector.Each(func(_ context.Context, _ *postgres.Tx, c projector.State[hit]) error {
		if c.After != nil {
			page(c.After.Page)
		}
		return nil
	})))
	return p
}

// A whole process is stopped by SIGSTOP before its COMMIT, for longer than another one
// needs to take over and to work; when it is continued it writes nothing, and ends.
// percona/percona-clustersync-mongodb PR#249: a frozen node wrote its position back.
func TestFenceStoppedProcess(t *testing.T) {
	uri, err := serve.MongoDB(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []style{queued, opened} {
		t.Run(string(s), func(t *testing.T) {
			c := newCounting(t)
			child := startChild(t, "stopped", childSetup{MongoDB: uri, Database: c.db.Name(), Postgres: c.dsn, Style: s})
			commits := func(n int64) func() bool {
				return func() bool {
					child.alive(t)
					found, err := checkpoints(t.Context(), c.pool)
					return err == nil && found["hits"].Sequence >= n
				}
			}
			until(t, time.Minute, "the child begins", commits(1))
			for n := range int64(3) {
				c.insert("warm", 3)
				until(t, time.Minute, "the child commits", commits(n+2))
			}
			before := c.sequence()
			c.insert("frozen", 10)
			until(t, time.Minute, "the child has stopped", child.stopped)
			open := selectOne[int](t, c.pool, `select count(*) from pg_stat_activity where datname = current_database() and state = 'idle in transaction'`)
			if want := map[style]int{queued: 0, opened: 1}[s]; c.sequence() != before || open != want {
				t.Fatalf("the child has not stopped before its COMMIT: the sequence was %d and is %d, %d transactions are open", before, c.sequence(), open)
			}

			began := time.Now()
			next := run(t, c.runner(watched(s, func(string) {}), c.pool, projector.Options{}))
			next.level(c.db)
			took := time.Since(began)
			for range 100 {
				c.insert("later", 1)
			}
			next.level(c.db)
			sequence := c.sequence()
			if err := child.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			out := child.end(t, time.Minute)
			if !strings.Contains(out, "FENCED by term 2") || !child.ProcessState.Success() {
				t.Errorf("the stopped process ended by %s:\n%s", child.ProcessState, out)
			}
			if took > takeoverLimit {
				t.Errorf("the new owner was held up for %s", took)
			}
			c.insert("last", 1)
			next.level(c.db)
			if now := c.sequence(); now <= sequence {
				t.Errorf("the checkpoint's sequence went from %d to %d", sequence, now)
			}
			if diff := c.difference(); diff != "" {
				t.Errorf("the stopped process has written after its successor (-source +model):\n%s", diff)
			}
			t.Logf("taken over in %s", took.Round(time.Millisecond))
		})
	}
}
