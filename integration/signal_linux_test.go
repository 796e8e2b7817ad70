package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

func init() { roles["orders"] = func(ctx context.Context) error { return inChild(keepOrders(ctx)) } }

// keepOrders is a process that keeps a model of the orders in some place, until a signal
// ends it, as the example does.
func keepOrders(ctx context.Context) func(childSetup, *mongo.Database, *pgxpool.Pool) error {
	return func(s childSetup, db *mongo.Database, pool *pgxpool.Pool) error {
		ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
		context.AfterFunc(ctx, stop)
		var seen int64 // the handler's calls up to the last commit
		fault.Global.OnReach(func(p fault.Point) {
			if p != fault.CommitSend || s.Freeze == "" {
				return
			}
			calls := handled.Load()
			if calls == seen {
				return // a commit of the position alone, of which PostgreSQL has nothing yet
			}
			seen = calls
			if _, err := os.Stat(s.Freeze); err == nil {
				_ = os.Rename(s.Freeze, s.Freeze+" done")
				select {}
			}
		})
		var model orderModel = &postgresModel{way: pool}
		if s.Place != inPostgres {
			client, err := mongo.Connect(options.Client().ApplyURI(s.Sink))
			if err != nil {
				return err
			}
			model = &mongoModel{way: client.Database(s.Model)}
		}
		r, err := model.runner(db, projector.Options{
			Start: projector.FromNow(), StopTimeout: stopTimeout, BatchChanges: 100, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		})
		if err != nil {
			return err
		}
		err = r.Run(ctx)
		fmt.Println("ENDED", err)
		return err
	}
}

// child starts the process.
func (c *kept) child(freeze string) *child {
	c.t.Helper()
	s := childSetup{MongoDB: c.uri, Database: c.db.Name(), Place: c.place, Sink: c.sinkURI, Freeze: freeze}
	switch m := c.model.(type) {
	case *postgresModel:
		s.Postgres = c.sinkURI
	case *mongoModel:
		s.Model = m.way.Name()
	}
	return startChild(c.t, "orders", s)
}

// committed waits for n more commits of a process.
func (c *kept) committed(p *child, n int64) {
	c.t.Helper()
	sequence := func() int64 {
		now, err := c.model.checkpoint(c.t.Context())
		if err != nil { // there is no table yet
			return 0
		}
		return now.Sequence
	}
	enough := sequence() + n
	until(c.t, time.Minute, "the process commits", func() bool { p.alive(c.t); return sequence() >= enough })
}

// SIGTERM and SIGINT end a process in the middle of its work alike: without an error, soon,
// and the next one goes on where it was. ConduitIO/conduit#2519: only SIGINT was handled.
func TestCancelBySignal(t *testing.T) {
	t.Parallel()
	everyPlace(t, func(t *testing.T, p place) {
		c := keep(t, p, keeping{})
		first := c.child("")
		c.committed(first, 1) // where it begins
		c.write()
		for round := range effort.Rounds(6) {
			sig := []syscall.Signal{syscall.SIGTERM, syscall.SIGINT}[round%2]
			c.committed(first, 3)
			began := time.Now()
			must(t, first.Process.Signal(sig))
			out := first.end(t, time.Minute)
			took := time.Since(began) // with the race detector, whose programs linger for a second
			if !first.ProcessState.Success() || took > stopTimeout+stopMargin {
				t.Errorf("after %s, %s: %s\n%s", sig, took, first.ProcessState, out)
			}
			t.Logf("%s: ended in %s by %s", sig, took.Round(time.Millisecond), first.ProcessState)
			first = c.child("")
		}
		c.committed(first, 1)
		must(t, first.Process.Signal(syscall.SIGTERM))
		first.end(t, time.Minute)
		g := c.start(projector.Options{})
		c.exact(g)
		g.stop()
	})
}

// killedInside is a place whose last owner was killed by SIGKILL inside its transaction.
// In PostgreSQL it takes more to be in the way, since a process's end ends its
// connections: the machine has gone down without a word.
func killedInside(t *testing.T, p place) *kept {
	c := keep(t, p, keeping{proxied: p == inPostgres})
	freeze := filepath.Join(t.TempDir(), "freeze")
	owner := c.child(freeze)
	c.committed(owner, 1)
	c.step(50)
	c.committed(owner, 1)
	must(t, os.WriteFile(freeze, nil, 0o600))
	c.nudge()
	until(t, time.Minute, "the owner is in the middle of a commit", func() bool {
		owner.alive(t)
		_, err := os.Stat(freeze + " done")
		return err == nil
	})
	if m, ok := c.model.(*postgresModel); ok {
		const open = `select count(*) from pg_stat_activity where datname = current_database() and state = 'idle in transaction'`
		if n := selectOne[int](t, m.pool, open); n != 1 {
			t.Fatalf("the owner is in the middle of a commit, and %d transactions are open", n)
		}
	}
	if c.toSink != nil {
		c.toSink.HideEnds()
	}
	owner.kill()
	return c
}

// successor is what goes on: by connections of its own.
func (c *kept) successor(limit time.Duration) *running {
	c.t.Helper()
	if m, ok := c.model.(*postgresModel); ok {
		m.way = m.pool
	}
	o := c.options(projector.Options{ConnectTimeout: limit})
	r, err := c.model.runner(c.way, o)
	must(c.t, err)
	return run(c.t, r)
}

// What a process leaves behind that was killed inside its transaction holds its successor
// up for seconds, not until the server ends transactions.
func TestSinkKilledClient(t *testing.T) {
	everyPlace(t, func(t *testing.T, p place) {
		c := killedInside(t, p)
		began := time.Now()
		g := c.successor(30 * time.Second)
		c.catchUp(g)
		took := time.Since(began)
		if took > takeoverLimit {
			t.Errorf("the successor was held up for %s", took)
		}
		c.exact(g)
		t.Logf("the successor was level after %s", took.Round(time.Millisecond))
	})
}

func TestSinkKilledClientControl(t *testing.T) {
	everySinkOfPlaces(t, func(t *testing.T, p place) {
		c := killedInside(t, p)
		enable := fault.Global.Disable(fault.EndBlockers)
		defer enable()
		g := c.successor(takeoverLimit + time.Second)
		err := g.wait(time.Minute)
		var connect *projector.ConnectError
		if !errors.As(err, &connect) {
			t.Fatalf("the successor was not held up for %s; it ended with %v", takeoverLimit+time.Second, err)
		}
		t.Logf("with the guard off: %v", err)
		enable() // or what is left behind would be in the way of cleaning up
		c.catchUp(c.successor(30 * time.Second))
	})
}
