package mongodb_test

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// resetting is a runner that rebuilds its model in mode Reset.
func (d *database) resetting(t *testing.T, version int) *projector.Runner {
	t.Helper()
	runner, err := projector.New(d.Database, d.sink, mongodb.Projection{
		Name: model, Version: version, Bindings: mongodb.Bindings{
			projector.Mirror("orders", func(o order) (note, bool) { return note{int64(len(o.Status))}, true }, notes),
		},
	}, projector.Options{Reconcile: reconcile.Snapshot{Mode: projector.Reset}, IdleInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	return runner
}

// A model that is too large for one commit is emptied in several. Where that is interrupted
// the next start goes on with it.
func TestResetInPortions(t *testing.T) {
	const many = 25_000
	d := newDatabase(t)
	must(t, d.CreateCollection(t.Context(), "orders", options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}})))
	orders := d.Collection("orders")
	var docs []any
	for i := range many {
		docs = append(docs, bson.D{{Key: "_id", Value: i}, {Key: "status", Value: "new"}})
	}
	_, err := orders.InsertMany(t.Context(), docs)
	must(t, err)
	run := func(version int, commits int64) {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		runner, ended := d.resetting(t, version), make(chan error, 1)
		var done atomic.Int64
		fault.Global.OnReach(func(p fault.Point) {
			if p == fault.CommitDone && done.Add(1) == commits {
				stop()
			}
		})
		defer fault.Global.OnReach(nil)
		go func() { ended <- runner.Run(ctx) }()
		for began := time.Now(); runner.Status().State != projector.Running && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
			if time.Since(began) > time.Minute {
				t.Fatalf("it does not come to that: %+v", runner.Status())
			}
		}
		stop()
		must(t, <-ended)
	}
	run(1, 0)
	equal(t, "rows", d.count(t, "notes"), many)
	_, err = orders.DeleteMany(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$gte", Value: 10}}}})
	must(t, err)

	// The first commit stores that there is a rebuild, the next ones empty the model.
	for left := int64(many); left > 0; {
		run(2, 2)
		was := left
		left = d.count(t, "notes")
		equal(t, "removed", was-left, min(was, 10_000))
		cp := d.load(t, 1)
		if cp.Rebuild == nil || len(cp.Rebuild.Read) > 0 {
			t.Fatalf("the rebuild has gone on: %+v", cp.Rebuild)
		}
	}
	run(2, 0)
	equal(t, "rows", d.count(t, "notes"), 10)
	equal(t, "version", d.load(t, 1).Version, 2)
	if cp := d.load(t, 1); cp.Rebuild != nil {
		t.Errorf("the rebuild has not ended: %+v", cp.Rebuild)
	}
}

// Of a commit that has nothing to be halved, and runs into its time limit again and again,
// Status says what to do.
func TestCommitThatCantBeMadeSmaller(t *testing.T) {
	d := newDatabase(t, mongodb.TimeLimit(300*time.Millisecond))
	must(t, d.CreateCollection(t.Context(), "orders", options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}})))
	runner, err := projector.New(d.Database, d.sink, mongodb.Projection{
		Name: model, Version: 1,
		Bindings: mongodb.Bindings{projector.Rollup("orders", order.Counts, counts)},
		Setup: func(ctx context.Context, _ *mongodb.Tx) error {
			<-ctx.Done()
			return ctx.Err()
		},
	}, projector.Options{Reconcile: reconcile.Snapshot{}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(ctx) }()
	var s projector.Status
	for began := time.Now(); s.Retries < 2 && time.Since(began) < time.Minute; time.Sleep(10 * time.Millisecond) {
		s = runner.Status()
	}
	stop()
	must(t, <-ended)
	equal(t, "state", s.State, projector.Retrying)
	wantError(t, s.Err, "can't be made smaller", "Options.CommitTimeout (1m0s)", "the sink's own")
}
