package integration_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
)

// told is what OnProgress was told, and when.
type told struct {
	mu  sync.Mutex
	all []projector.Progress
	at  []time.Time
}

func (o *told) progress(p projector.Progress) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all, o.at = append(o.all, p), append(o.at, time.Now())
}

func (o *told) list() ([]projector.Progress, []time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all, o.at
}

// monotonic demands that rows never fall, and that Done comes once, at the end.
func (o *told) monotonic(t *testing.T, mode projector.Mode, cause string, documents int64) {
	t.Helper()
	all, _ := o.list()
	var rows int64
	for i, p := range all {
		if p.Rows < rows || p.Estimate < p.Rows {
			t.Errorf("after %d documents: %+v", rows, p)
		}
		rows = p.Rows
		if p.Done != (i == len(all)-1) {
			t.Errorf("number %d of %d: %+v", i+1, len(all), p)
		}
		if p.Mode != mode || p.Cause != cause || p.Began.UnixMilli() != all[0].Began.UnixMilli() {
			t.Errorf("number %d is of another rebuild: %+v, not %s %q of %s", i+1, p, mode, cause, all[0].Began)
		}
		if p.Done != (p.Collection == "") && p.Rows < documents {
			t.Errorf("collection %q in %+v", p.Collection, p)
		}
	}
	if rows != documents {
		t.Errorf("%d documents were reported, not %d", rows, documents)
	}
}

// idle waits until no rebuild is under way, which those hear first who wait for its model.
func idle(g *running) {
	g.t.Helper()
	until(g.t, 30*time.Second, "the rebuild has ended", func() bool { return g.Status().Rebuild == nil })
}

// What is told of a rebuild never falls, and ends with Done; after a stop in the middle it
// goes on where it was.
func TestProgressNeverFalls(t *testing.T) {
	inBothSinks(t, func(t *testing.T, p place) {
		r := shared(t, p, 400)
		for _, mode := range []projector.Mode{projector.Shadow, projector.Reset} {
			name := "first load"
			told := new(told)
			o := projector.Options{Reconcile: reconcile.Snapshot{Mode: mode, ChunkRows: 40, OnProgress: told.progress}}
			held := holdAt(t, fault.ChunkRead, 3)
			if mode == projector.Reset { // of a model that is there
				r.begun()
				name = "by hand"
				held = holdAt(t, fault.ChunkRead, 3)
			}
			g := r.start(o)
			if mode == projector.Reset {
				go func() { _ = g.Rebuild(context.WithoutCancel(t.Context())) }()
			}
			held.wait()
			if b := g.Status().Rebuild; b == nil || b.Rows != 120 || b.Estimate < 400 || b.Collection != "orders" || b.Cause != name || b.Done {
				t.Errorf("%s: the status has %+v", mode, b)
			}
			g.cancel()
			held.release()
			must(t, g.wait(30*time.Second))
			before, _ := told.list()
			stopped := before[len(before)-1].Rows
			g = r.start(o)
			r.exact(g)
			g.stop()
			told.monotonic(t, mode, name, 400)
			after, _ := told.list()
			if first := after[len(before)]; first.Rows < stopped || first.Rows < 120 {
				t.Errorf("%s: after the stop at %d it began with %+v", mode, stopped, first)
			}
		}
	})
}

// State tells whether readers have a model that is kept up to date while it is rebuilt.
func TestProgressStates(t *testing.T) {
	inBothSinks(t, func(t *testing.T, p place) {
		r := shared(t, p, 200)
		held := holdAt(t, fault.ChunkRead, 1)
		g := r.rebuilding()
		demand := func(when string, state projector.RunState, rebuild bool) {
			t.Helper()
			if s := g.Status(); s.State != state || (s.Rebuild != nil) != rebuild {
				t.Errorf("%s: %s, rebuild %+v, %v", when, s.State, s.Rebuild, s.Err)
			}
		}
		held.wait()
		demand("first load", projector.Rebuilding, true)
		held.release()
		r.exact(g)
		idle(g)
		demand("after it", projector.Running, false)

		byHand := func(mode projector.Mode, state projector.RunState) {
			t.Helper()
			g.stop()
			g = r.start(projector.Options{Reconcile: reconcile.Snapshot{Mode: mode, ChunkRows: 40}})
			r.exact(g)
			held := holdAt(t, fault.ChunkRead, 1)
			result := make(chan error, 1)
			go func() { result <- g.Rebuild(t.Context()) }()
			held.wait()
			demand(string(mode), state, true)
			if mode == projector.Shadow {
				r.step(20)
				r.exact(g) // the old one goes on
			}
			held.release()
			must(t, <-result)
			idle(g)
			r.exact(g)
			demand(string(mode)+", after it", projector.Running, false)
		}
		byHand(projector.Shadow, projector.Running)
		byHand(projector.Reset, projector.Rebuilding)
		g.stop()
		if s := g.Status(); s.State != projector.Ended || s.Rebuild != nil {
			t.Errorf("ended: %s, rebuild %+v", s.State, s.Rebuild)
		}
	})
}

// RowsPerSecond is kept to within a tenth, over the whole and over its second half. Time
// counts from the first chunk, which nothing holds up.
func TestProgressRate(t *testing.T) {
	const limit, documents = 2000, 6000
	r := shared(t, inMongoDB, documents)
	told := new(told)
	g := r.start(projector.Options{Reconcile: reconcile.Snapshot{RowsPerSecond: limit, OnProgress: told.progress}})
	r.exact(g)
	g.stop()
	all, at := told.list()
	rate := func(from, to int64) float64 {
		t.Helper()
		first := slices.IndexFunc(all, func(p projector.Progress) bool { return p.Rows >= from })
		last := slices.IndexFunc(all, func(p projector.Progress) bool { return p.Rows >= to })
		rows := float64(all[last].Rows - all[first].Rows)
		took := at[last].Sub(at[first])
		t.Logf("%.0f documents in %s", rows, took)
		return rows / took.Seconds()
	}
	for _, from := range []int64{1, documents / 2} {
		if per := rate(from, documents); per > 1.1*limit || per < 0.9*limit {
			t.Errorf("from %d: %.0f documents a second, of %d", from, per, limit)
		}
	}
}

// WaitFor holds while the model that readers see is being filled again, whatever it has
// reached before.
func TestProgressWaitFor(t *testing.T) {
	for i, mode := range []projector.Mode{projector.Reset, projector.InPlace} {
		p := []place{inMongoDB, inPostgres}[i]
		t.Run(string(mode)+" "+string(p), func(t *testing.T) {
			r := shared(t, p, 200)
			r.rowsOnly = mode == projector.InPlace
			g := r.start(projector.Options{Reconcile: reconcile.Snapshot{Mode: mode, ChunkRows: 40}})
			r.exact(g)
			idle(g)                        // or the call would be about the first load
			long := operationTime(t, r.db) // which the model has had
			held := holdAt(t, fault.ChunkRead, 1)
			rebuilt := make(chan error, 1)
			go func() { rebuilt <- g.Rebuild(t.Context()) }()
			held.wait()
			r.insert(10)
			ago := bson.Timestamp{T: long.T - 3600}
			var waiting []chan error
			for _, at := range []bson.Timestamp{ago, long, operationTime(t, r.db)} {
				ctx, done := newNoticed(t.Context()), make(chan error, 1)
				go func() { done <- g.WaitFor(ctx, at) }()
				select {
				case <-ctx.waited:
				case err := <-done:
					t.Fatalf("WaitFor(%v) of a model that is being filled returned %v", at, err)
				case <-time.After(30 * time.Second):
					t.Fatal("WaitFor does not come to wait")
				}
				waiting = append(waiting, done)
			}
			for _, done := range waiting {
				select {
				case err := <-done:
					t.Fatalf("WaitFor of a model that is being filled returned %v", err)
				default:
				}
			}
			held.release()
			for _, done := range waiting {
				must(t, <-done)
			}
			r.same()
			must(t, <-rebuilt)
			g.stop()
		})
	}
}

// Without the right to create schemas mode Shadow is refused, with an error that names the
// way out: mode Reset, which does with the schema that is there.
func TestProgressWithoutTheRightToCreateSchemas(t *testing.T) {
	r := shared(t, inPostgres, 100)
	role := unique("role_")
	for _, sql := range []string{
		"create role %[1]s login password 'secret'",
		"create schema tidemark authorization %[1]s",
		"create schema order_ledger authorization %[1]s",
	} {
		_, err := r.pool.Exec(t.Context(), fmt.Sprintf(sql, role))
		must(t, err)
	}
	t.Cleanup(func() {
		_, err := r.pool.Exec(context.Background(), fmt.Sprintf("drop owned by %[1]s cascade; drop role %[1]s", role))
		must(t, err)
	})
	u, err := url.Parse(r.pool.Config().ConnString())
	must(t, err)
	u.User = url.UserPassword(role, "secret")
	limited, err := pgxpool.New(t.Context(), u.String())
	must(t, err)
	t.Cleanup(limited.Close)
	all := r.pool
	r.pool = limited

	shadow := ends[*projector.RebuildError](t, r.start(projector.Options{Reconcile: small}))
	for _, words := range []string{"projector.Reset", "grant create on database"} {
		if !strings.Contains(shadow.Error(), words) {
			t.Errorf("%v does not mention %q", shadow, words)
		}
	}
	reset := projector.Options{Reconcile: reconcile.Snapshot{Mode: projector.Reset, ChunkRows: 40}}
	g := r.start(reset)
	r.exact(g)
	before := r.rows()
	must(t, g.Rebuild(t.Context()))
	r.exact(g)
	r.live(1)
	g.stop()

	// A model that is there goes on where a rebuild by hand is refused.
	g = r.rebuilding()
	r.exact(g)
	refused(t, g.Rebuild(t.Context()), "projector.Reset")
	r.step(20)
	r.exact(g)
	g.stop()
	if len(before.Mirror) == 0 {
		t.Error("the model is empty")
	}
	r.pool = all
}
