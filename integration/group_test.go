package integration_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

var errUnwilling = errors.New("not this one")

// unwilling is a projection whose handler refuses the document with _id 3.
func unwilling(name string) postgres.Projection {
	return postgres.Projection{Name: name, Version: 1, Bindings: postgres.Bindings{
		projector.On("things", projector.Each(func(_ context.Context, _ *postgres.Tx, c projector.Touch) error {
			if projector.KeyText(c.Key) == "3" {
				return fmt.Errorf("refused: %w", errUnwilling)
			}
			return nil
		})),
	}}
}

// grouped runs runners as one Group.
type grouped struct {
	t      testing.TB
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

func runGroup(t testing.TB, g projector.Group) *grouped {
	ctx, cancel := context.WithCancel(context.Background())
	r := &grouped{t: t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.err = g.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-r.done })
	return r
}

// reaches waits until r's model has everything written so far.
func (g *grouped) reaches(f *things, r *projector.Runner) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 30*time.Second)
	defer cancel()
	if err := r.WaitFor(ctx, operationTime(g.t, f.db)); err != nil {
		g.t.Fatalf("%s: %v: %+v", r.Name(), err, r.Status())
	}
}

// Projections of a group have a fate of their own: one whose handler fails and one whose
// sink can't be reached leave the third level. (CASES B64: search is down, so the cache
// is stale too.)
func TestGroupKeepsTheOthersGoing(t *testing.T) {
	f := newThings(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	nowhere := *f
	nowhere.pool = poolOn(t, "postgres://postgres@"+closed.Addr().String()+"/none?sslmode=disable")
	must(t, closed.Close())

	well := f.runner(mirror("well"), projector.Options{})
	failing := f.runner(unwilling("failing"), projector.Options{})
	lonely := nowhere.runner(mirror("lonely"), projector.Options{ConnectTimeout: time.Second})
	g := runGroup(t, projector.Group{failing, lonely, well})
	f.add(10)
	until(t, 30*time.Second, "two of the three end", func() bool {
		return failing.Status().State == projector.Ended && lonely.Status().State == projector.Ended
	})
	var poison *projector.PoisonError
	if err := failing.Status().Err; !errors.As(err, &poison) || poison.Key != "3" {
		t.Errorf("one failed with %v", err)
	}
	f.add(10)
	g.reaches(f, well)
	f.same("well")
	select {
	case <-g.done:
		t.Fatalf("the group has ended while one runs: %v", g.err)
	default:
	}
	g.cancel()
	wait(t, "the group ends", g.done)
	var contact *projector.ConnectError
	if !errors.As(g.err, &contact) || contact.Server != "sink" || !errors.As(g.err, &poison) || !errors.Is(g.err, errUnwilling) {
		t.Errorf("the group ended with %v", g.err)
	}
	if err := well.Status().Err; err != nil {
		t.Errorf("the third ended with %v", err)
	}

	t.Run("control without "+string(fault.IsolateRunner), func(t *testing.T) {
		without(t, fault.IsolateRunner)
		well := f.runner(mirror("well"), projector.Options{})
		g := runGroup(t, projector.Group{f.runner(unwilling("failing"), projector.Options{}), well})
		wait(t, "one that fails takes the other with it", g.done)
		if well.Status().State != projector.Ended {
			t.Errorf("the other is %s", well.Status().State)
		}
	})
}

// A group of which every one fails ends by itself.
func TestGroupEndsWhenAllHave(t *testing.T) {
	f := newThings(t)
	f.add(5)
	g := runGroup(t, projector.Group{f.runner(unwilling("one"), projector.Options{}), f.runner(unwilling("two"), projector.Options{})})
	wait(t, "the group ends", g.done)
	joined, ok := g.err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != 2 {
		t.Errorf("the group ended with %v", g.err)
	}
}

// A sink that stops answering stops its own projections only, and they go on when it is
// back.
func TestGroupWithASinkThatHangs(t *testing.T) {
	f := newThings(t)
	s, err := serve.StartPostgres(t.Context(), serve.PostgresOptions{})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	other := *f
	other.pool = poolOn(t, s.DSN())
	well := f.runner(mirror("well"), projector.Options{})
	hanging := other.runner(mirror("hanging"), projector.Options{CommitTimeout: 500 * time.Millisecond})
	g := runGroup(t, projector.Group{hanging, well})
	f.add(1)
	g.reaches(f, well)
	g.reaches(f, hanging)
	must(t, s.Pause())
	for range 5 {
		f.add(10)
		g.reaches(f, well)
		f.same("well")
	}
	until(t, 30*time.Second, "the other retries", func() bool { return hanging.Status().State == projector.Retrying })
	if doing := hanging.Status().Doing; doing != "commit to the sink" {
		t.Errorf("it is doing %q", doing)
	}
	must(t, s.Resume())
	g.reaches(f, hanging)
	other.same("hanging")
	g.cancel()
	wait(t, "the group ends", g.done)
	must(t, g.err)
}
