package integration_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// where are the places that the sink has for the model's generations.
func (r *recovery) where() (all []string) {
	r.Helper()
	if r.place == inPostgres {
		for _, schema := range selectAll[struct{ Name string }](r, r.pool, `select nspname::text from pg_namespace where nspname like 'order\_ledger%'`) {
			all = append(all, schema.Name)
		}
		return all
	}
	names, err := r.sink.ListCollectionNames(r.Context(), bson.D{{Key: "name", Value: bson.D{{Key: "$regex", Value: "^order_ledger"}}}})
	must(r, err)
	for _, name := range names {
		if at := name[:strings.LastIndex(name, ".")]; !slices.Contains(all, at) {
			all = append(all, at)
		}
	}
	return all
}

// refused demands a RebuildError that says the words.
func refused(t *testing.T, err error, words ...string) {
	t.Helper()
	if _, ok := errors.AsType[*projector.RebuildError](err); !ok {
		t.Fatalf("got %v", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%v does not mention %q", err, w)
		}
	}
}

// Back and forth: each time the generation that was retired catches up and is live then,
// also after a restart, and the live one's rows are the source's at every moment.
func TestRollback(t *testing.T) {
	t.Parallel()
	inBothSinks(t, func(t *testing.T, p place) {
		r := shared(t, p, 200)
		g := r.rebuilding()
		r.exact(g)
		first := r.stored()
		must(t, g.Rebuild(t.Context()))
		second := r.stored()
		if second.Generation != first.Generation+1 {
			t.Fatalf("generation %d follows %d", second.Generation, first.Generation)
		}
		for i, want := range []int64{first.Generation, second.Generation, first.Generation} {
			r.step(50) // the retired one knows nothing of it
			r.exact(g)
			before := r.stored()
			if i == 1 {
				g.stop()
				g = r.rebuilding()
			}
			must(t, g.Rollback(t.Context()))
			now := r.stored()
			if now.Generation != want || now.Phase != projector.Live || now.Rebuild != nil {
				t.Fatalf("generation %d is %s, rebuild %v; want %d", now.Generation, now.Phase, now.Rebuild, want)
			}
			if now.Position.Time.Before(before.Position.Time) {
				t.Errorf("readers went back from %s to %s", before.Position, now.Position)
			}
			r.same() // at once: all was written before
			r.step(20)
			r.exact(g)
			if n := len(r.where()); n != 2 {
				t.Errorf("there are %d places: %v", n, r.where())
			}
		}
		g.stop()
	})
}

// What can't be gone back to is an error that says why, and the live model goes on.
func TestRollbackRefused(t *testing.T) {
	inOneSink(t, inMongoDB, func(t *testing.T, p place) {
		t.Run("nothing retired", func(t *testing.T) {
			r := shared(t, p, 50)
			g := r.rebuilding()
			r.exact(g)
			before := r.stored()
			refused(t, g.Rollback(t.Context()), "no retired generation", "Options.KeepRetired")
			r.step(20)
			r.exact(g)
			r.live(before.Generation)
			g.stop()
		})
		t.Run("of another version", func(t *testing.T) {
			r := shared(t, p, 50)
			before, _ := r.begun()
			r.shape = shape{version: 2, worth: 2}
			g := r.rebuilding()
			r.exact(g)
			refused(t, g.Rollback(t.Context()), "Version 1", "Version 2")
			r.step(20)
			r.exact(g)
			r.live(before.Generation + 1)
			g.stop()
		})
		t.Run("of a collection replaced since", func(t *testing.T) {
			r := shared(t, p, 50)
			before, _ := r.begun()
			overthrows[0].do(r)
			g := r.rebuilding()
			r.exact(g)
			refused(t, g.Rollback(t.Context()), "replaced")
			r.step(20)
			r.exact(g)
			r.live(before.Generation + 1)
			g.stop()
		})
	})
}

// A retired generation is removed when Options.KeepRetired is over, while the runner runs
// or at its next start; at once where it is negative; and when the next one is retired.
func TestRollbackKeepsAGenerationForSoLong(t *testing.T) {
	inOneSink(t, inPostgres, func(t *testing.T, p place) {
		r := shared(t, p, 50)
		g := r.start(projector.Options{Reconcile: small})
		r.exact(g)
		for range 3 {
			must(t, g.Rebuild(t.Context()))
		}
		// The one before the last is removed in passing.
		until(t, 30*time.Second, "two generations are left", func() bool { return len(r.where()) == 2 })
		g.stop()

		o := projector.Options{Reconcile: small, KeepRetired: time.Hour}
		g = r.start(o)
		r.exact(g)
		if n := len(r.where()); n != 2 {
			t.Errorf("there are %d places: %v", n, r.where())
		}
		g.stop()

		o.KeepRetired = 50 * time.Millisecond // over long since
		g = r.start(o)
		until(t, 30*time.Second, "one generation is left", func() bool { return len(r.where()) == 1 })
		r.exact(g)
		refused(t, g.Rollback(t.Context()), "Options.KeepRetired")
		must(t, g.Rebuild(t.Context()))
		until(t, 30*time.Second, "one generation is left", func() bool { return len(r.where()) == 1 })
		g.stop()

		o.KeepRetired = -1
		g = r.start(o)
		r.exact(g)
		must(t, g.Rebuild(t.Context()))
		until(t, 30*time.Second, "one generation is left", func() bool { return len(r.where()) == 1 })
		refused(t, g.Rollback(t.Context()), "Options.KeepRetired")
		r.step(20)
		r.exact(g)
		g.stop()
	})
}

// A rollback that a stop comes in the way of has not happened, or has: never half. Where it
// is known to have happened, who asked is told so: asking again would undo it.
func TestRollbackStopped(t *testing.T) {
	inOneSink(t, inMongoDB, func(t *testing.T, p place) {
		r := shared(t, p, 100)
		g := r.rebuilding()
		r.exact(g)
		must(t, g.Rebuild(t.Context()))
		for _, point := range []fault.Point{fault.SwitchBegin, fault.SwitchDone} {
			generation := r.stored().Generation
			r.step(50)
			r.exact(g)
			held := holdAt(t, point, 0)
			result := make(chan error, 1)
			go func() { result <- g.Rollback(context.WithoutCancel(t.Context())) }()
			held.wait()
			g.cancel()
			held.release()
			must(t, g.wait(30*time.Second))
			err := <-result
			now := r.stored().Generation
			t.Logf("%v: generation %d is live, and was %d; the rollback was told %v", point, now, generation, err)
			if err == nil && now == generation || err != nil && point == fault.SwitchDone {
				t.Error("that is not what has happened")
			}
			g = r.rebuilding()
			r.step(20)
			r.exact(g)
			r.live(now)
		}
		must(t, g.Rollback(t.Context()))
		r.exact(g)
		g.stop()
	})
}

// What was replaced can't be read at once, just after the switch: it is the one to go back
// to all the same.
func TestRollbackAfterFaultAtTheSwitch(t *testing.T) {
	uri := throwaway(t, serve.MongodOptions{Params: map[string]string{"enableTestCommands": "1"}}).URI()
	r := newRecovery(t, uri, inMongoDB, 50)
	r.sink = r.opened.client(t, uri).Database(unique("sink_"))
	r.model = &mongoModel{t: t, db: r.sink, way: r.sink}
	g := r.rebuilding()
	r.exact(g)
	generation := r.stored().Generation
	f, met := failingOn(t, uri), make(chan func(), 1)
	newAmbush(t).at(fault.SwitchDone, func() { met <- f.times(1, "findAndModify", code(112)) })
	must(t, g.Rebuild(t.Context()))
	(<-met)()
	r.live(generation + 1)
	r.step(20)
	r.exact(g)
	must(t, g.Rollback(t.Context()))
	r.live(generation)
	r.exact(g)
	g.stop()
}
