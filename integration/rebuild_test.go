package integration_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
)

// rebuilder is a model of the orders that is rebuilt while the source is written to.
type rebuilder struct {
	*testing.T
	rng    *rand.Rand
	db     *mongo.Database
	model  orderModel
	writer *orderWriter
}

func newRebuilder(t *testing.T, p place, documents int) *rebuilder {
	t.Helper()
	r := &rebuilder{T: t, rng: seeded(t), db: source(t)}
	createOrders(t, r.db)
	r.writer = newOrderWriter(r.db, rand.New(rand.NewPCG(r.rng.Uint64(), 1)))
	r.writer.keep = int64(max(400, documents))
	for documents > 0 {
		n := min(documents, 10_000)
		_, err := r.writer.orders.InsertMany(t.Context(), r.writer.many(n))
		must(t, err)
		documents -= n
	}
	switch p {
	case inPostgres:
		pool := pool(t)
		r.model = &postgresModel{t: t, pool: pool, way: pool}
	case inMongoDB:
		db := r.db.Client().Database(unique("sink_"))
		t.Cleanup(func() { _ = db.Drop(context.Background()) })
		r.model = &mongoModel{t: t, db: db, way: db}
	case inSource:
		r.model = &mongoModel{t: t, db: r.db, way: r.db}
	case inRedis:
		r.model = newRedisModel(t)
	case inElasticsearch:
		r.model = newElasticModel(t)
	}
	return r
}

func (r *rebuilder) start(o projector.Options) *running {
	r.Helper()
	if o.Reconcile == nil {
		o.Reconcile = reconcile.Snapshot{ChunkRows: 2000}
	}
	if o.Logger == nil {
		o.Logger = quiet()
	}
	runner, err := r.model.runner(r.db, o)
	must(r, err)
	return run(r, runner)
}

// write changes the source until the function that it returns is called.
func (r *rebuilder) write() (stop func()) {
	var ended atomic.Bool // a step is not cut off: the server might go on with it
	var wg sync.WaitGroup
	wg.Go(func() {
		for !ended.Load() {
			if err := r.writer.step(context.Background()); err != nil {
				r.Errorf("write: %v", err)
				return
			}
			breathe()
		}
	})
	stop = sync.OnceFunc(func() { ended.Store(true); wg.Wait() })
	r.Cleanup(stop)
	return stop
}

// difference compares the model with the source, once it has caught up.
func (r *rebuilder) difference(g *running) string {
	r.Helper()
	g.level(r.db)
	rows, _, err := r.model.rows()
	must(r, err)
	return cmp.Diff(computed(r, r.db), rows)
}

func (r *rebuilder) exact(g *running) {
	r.Helper()
	if diff := r.difference(g); diff != "" {
		r.Fatalf("the model differs from the source (-source +model):\n%.3000s", diff)
	}
}

func TestRebuildFirst(t *testing.T) {
	t.Parallel()
	documents := 2 * effort.Values(10_000)
	for _, p := range append([]place{inSource}, everySink...) {
		t.Run(string(p), func(t *testing.T) {
			r := newRebuilder(t, p, documents)
			stop := r.write()
			g := r.start(projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: documents / 10}})
			g.level(r.db)
			stop()
			r.exact(g)
			stop = r.write()
			began := time.Now()
			must(t, g.Rebuild(t.Context()))
			t.Logf("rebuilt in %s", time.Since(began))
			stop()
			r.exact(g)
		})
	}
}

// A document that a rebuild can't apply stops it. Once the document is mended the rebuild
// goes on from where it stood: it reads it as it is now.
func TestRebuildGoesOnOnceADocumentIsMended(t *testing.T) {
	r := newRebuilder(t, inPostgres, 200)
	bad := bson.D{{Key: "_id", Value: int64(150)}}
	_, err := r.writer.orders.UpdateOne(t.Context(), bad, bson.D{{Key: "$set", Value: bson.D{{Key: "amount", Value: "many"}}}})
	must(t, err)
	o := projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: 20}}
	poison := ends[*projector.PoisonError](t, r.start(o))
	if poison.Key != "150" || poison.Op != projector.Snapshot {
		t.Fatalf("it was stopped by the %s of %s", poison.Op, poison.Key)
	}
	_, err = r.writer.orders.UpdateOne(t.Context(), bad, bson.D{{Key: "$set", Value: bson.D{{Key: "amount", Value: int64(7)}}}})
	must(t, err)
	r.exact(r.start(o))
}
