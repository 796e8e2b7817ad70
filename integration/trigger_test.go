package integration_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// shared is a recovery on the servers that all tests share.
func shared(t *testing.T, p place, documents int) *recovery {
	t.Helper()
	uri, err := serve.MongoDB(t.Context())
	must(t, err)
	return newRecovery(t, uri, p, documents)
}

// inBothSinks runs a test over PostgreSQL and another database of MongoDB.
func inBothSinks(t *testing.T, test func(t *testing.T, p place)) {
	for _, p := range []place{inMongoDB, inPostgres} {
		t.Run(string(p), func(t *testing.T) { test(t, p) })
	}
}

// inOneSink runs a test over the one named, and for the full figures over the other too.
func inOneSink(t *testing.T, first place, test func(t *testing.T, p place)) {
	sinks := []place{inMongoDB, inPostgres}
	if first == inPostgres {
		slices.Reverse(sinks)
	}
	for _, p := range sinks[:effort.Rounds(2)] {
		t.Run(string(p), func(t *testing.T) { test(t, p) })
	}
}

// noticed is a context that tells when somebody waits for its end.
type noticed struct {
	context.Context
	once   *sync.Once
	waited chan struct{}
}

func newNoticed(ctx context.Context) noticed {
	return noticed{ctx, new(sync.Once), make(chan struct{})}
}

func (n noticed) Done() <-chan struct{} {
	n.once.Do(func() { close(n.waited) })
	return n.Context.Done()
}

// Who asks for a rebuild when one has caught up with the source gets another: its model shows
// already, and who has waited for that may not know that the first one has not returned yet.
func TestTriggerOnceItHasCaughtUp(t *testing.T) {
	inBothSinks(t, func(t *testing.T, p place) {
		r := shared(t, p, 50)
		var g *running
		begun, asked := 0, make(chan error, 1)
		source := &meddling{Snapshot: reconcile.Snapshot{Mode: projector.Reset}}
		source.before = func(from projector.Range) error {
			if from.After.IsZero() {
				begun++
			}
			return nil
		}
		source.report = func(p projector.Progress) {
			if p.Done && begun == 2 {
				ctx := newNoticed(context.Background())
				go func() { asked <- g.Rebuild(ctx) }()
				wait(t, "the caller waits", ctx.waited)
			}
		}
		g = r.start(projector.Options{Reconcile: source})
		r.exact(g)
		idle(g)
		must(t, g.Rebuild(t.Context()))
		must(t, <-asked)
		r.exact(g)
		g.stop()
		if begun != 3 {
			t.Errorf("%d rebuilds were made of two that were asked for, and the first load", begun)
		}
	})
}

// Callers that want a rebuild while one is under way get that one; one whose context ends
// does not end it; a rollback can't go on beside it. (CASES B40: two rebuilds that fight.)
func TestTriggerOneRebuildForAllCallers(t *testing.T) {
	inBothSinks(t, func(t *testing.T, p place) {
		r := shared(t, p, 200)
		g := r.rebuilding()
		r.exact(g)
		generation := r.stored().Generation
		held := holdAt(t, fault.ChunkRead, 1)
		results := make(chan error, 4)
		for i := range 4 {
			ctx := newNoticed(t.Context())
			go func() { results <- g.Rebuild(ctx) }()
			wait(t, "the caller waits", ctx.waited)
			if i == 0 {
				held.wait()
			}
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if err := g.Rebuild(gone); !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that has ended: %v", err)
		}
		if err := g.Rollback(t.Context()); err == nil {
			t.Error("a rollback went on beside a rebuild")
		}
		r.step(20)
		held.release()
		for range 4 {
			must(t, <-results)
		}
		r.exact(g)
		r.live(generation + 1)
		g.stop()
	})
}

// A network that breaks, again and again, leads to none.
func TestTriggerNotByTheNetwork(t *testing.T) {
	inOneSink(t, inMongoDB, func(t *testing.T, p place) {
		r := shared(t, p, 100)
		uri, err := serve.MongoDB(t.Context())
		must(t, err)
		proxy, through := throughProxy(t, uri)
		r.way = r.opened.client(t, through).Database(r.db.Name())
		g := r.rebuilding()
		r.exact(g)
		generation := r.stored().Generation
		for range 5 {
			before := g.Status().Retries
			proxy.Cut()
			r.step(10)
			until(t, 30*time.Second, "a cut is noticed", func() bool {
				if g.Status().Retries > before {
					return true
				}
				proxy.Cut() // between two requests it would just be another connection
				return false
			})
			r.exact(g)
			if s := g.Status(); s.Rebuild != nil {
				t.Fatalf("it rebuilds: %+v", s.Rebuild)
			}
		}
		r.live(generation)
		g.stop()
	})
}

// overthrow replaces or removes the collection as a whole.
type overthrow struct {
	name string
	do   func(r *recovery)
}

// fresh is a collection beside, of 3 orders.
func (r *recovery) fresh(images bool) {
	r.Helper()
	if images {
		withImages(r, r.db, "fresh")
	}
	_, err := r.db.Collection("fresh").InsertMany(r.Context(), r.writer.many(3))
	must(r, err)
}

func (r *recovery) rename(from, to string) {
	r.Helper()
	admin(r, r.db, bson.D{{Key: "renameCollection", Value: r.db.Name() + "." + from}, {Key: "to", Value: r.db.Name() + "." + to}, {Key: "dropTarget", Value: true}})
}

func (r *recovery) images(on bool) {
	r.Helper()
	must(r, r.db.RunCommand(r.Context(), bson.D{
		{Key: "collMod", Value: "orders"}, {Key: "changeStreamPreAndPostImages", Value: bson.D{{Key: "enabled", Value: on}}},
	}).Err())
}

var overthrows = []overthrow{
	{"dropped and created again", func(r *recovery) {
		must(r, r.writer.orders.Drop(r.Context()))
		createOrders(r, r.db)
		r.insert(3)
	}},
	{"dropped", func(r *recovery) { must(r, r.writer.orders.Drop(r.Context())) }},
	{"renamed away", func(r *recovery) { r.rename("orders", "old") }},
	{"renamed away, and another created", func(r *recovery) {
		r.rename("orders", "old")
		createOrders(r, r.db)
		r.insert(3)
	}},
	{"renamed onto", func(r *recovery) { r.fresh(true); r.rename("fresh", "orders") }},
	{"database dropped, and created again", func(r *recovery) {
		must(r, r.db.Drop(r.Context()))
		createOrders(r, r.db)
		r.insert(3)
	}},
	{"images switched off for a while", func(r *recovery) {
		r.images(false)
		_, err := r.writer.orders.UpdateMany(r.Context(), bson.D{}, add("amount", 5))
		must(r, err)
		r.images(true)
		r.insert(3)
	}},
	{"out", func(r *recovery) {
		r.fresh(false)
		_, err := r.db.Collection("fresh").Aggregate(r.Context(), bson.A{bson.D{{Key: "$out", Value: "orders"}}})
		must(r, err)
	}},
}

// A collection that is dropped, renamed or replaced as a whole, while the runner is down
// and while it runs: the model is rebuilt by itself and is what the source has then.
// (CASES B14, B15.)
func TestTriggerReplaced(t *testing.T) {
	for i, o := range overthrows {
		for j := range effort.Rounds(2) {
			down, p := (i+j)%2 == 0, []place{inMongoDB, inPostgres}[(i/2+j)%2]
			name := o.name + " while it runs, " + string(p)
			if down {
				name = o.name + " while down, " + string(p)
			}
			t.Run(name, func(t *testing.T) {
				r := shared(t, p, 5)
				g := r.rebuilding()
				r.exact(g)
				generation := r.stored().Generation
				if down {
					g.stop()
				}
				o.do(r)
				if down {
					g = r.rebuilding()
				}
				// The collection's last state comes by the rebuild, or by the stream after it.
				until(t, 30*time.Second, "the model is rebuilt", func() bool {
					select {
					case <-g.done:
						t.Fatalf("the runner ended with %v", g.err)
					default:
					}
					return r.stored().Generation > generation
				})
				r.exact(g)
				g.stop()
				r.same()
			})
		}
	}
}

// Control: without the filter's to.coll a replacement goes unnoticed, and the model goes
// on with rows of documents that are gone.
func TestTriggerReplacedControl(t *testing.T) {
	without(t, fault.RenameTarget)
	r := shared(t, inMongoDB, 5)
	g := r.rebuilding()
	r.exact(g)
	generation := r.stored().Generation
	r.fresh(true)
	r.rename("fresh", "orders")
	g.level(r.db)
	if cmp.Equal(r.wanted(), r.rows()) || r.stored().Generation != generation {
		t.Error("it is noticed even so: the guard guards nothing")
	}
	g.stop()
}

// Five documents, the collection dropped and created again, three more: three rows,
// without a restart. (CASES B14)
func TestTriggerThreeRowsAfterADrop(t *testing.T) {
	inOneSink(t, inPostgres, func(t *testing.T, p place) {
		r := shared(t, p, 5)
		g := r.rebuilding()
		r.exact(g)
		must(t, r.writer.orders.Drop(t.Context()))
		createOrders(t, r.db)
		r.insert(3)
		until(t, 30*time.Second, "the rows of old are gone", func() bool {
			g.level(r.db)
			return cmp.Equal(r.wanted(), r.rows())
		})
		if n := len(computed(t, r.db).Mirror); len(r.rows().Mirror) != n {
			t.Errorf("there are %d rows, not %d", len(r.rows().Mirror), n)
		}
		g.stop()
	})
}

// A database dropped under two collections, of which one comes back with four documents:
// 4 and 0. (CASES B15)
func TestTriggerDatabaseOfTwoCollections(t *testing.T) {
	db := source(t)
	withImages(t, db, "kept", "lost")
	sink := db.Client().Database(unique("sink_"))
	t.Cleanup(func() { _ = sink.Drop(context.Background()) })
	two := mongodb.Projection{Name: "two", Version: 1, Bindings: mongodb.Bindings{
		projector.Mirror("kept", thing.row, mongodb.Collection[thingRow]{Name: "kept"}),
		projector.Mirror("lost", thing.row, mongodb.Collection[thingRow]{Name: "lost"}),
	}}
	fill := func(name string, n int) {
		t.Helper()
		var docs []any
		for i := range n {
			docs = append(docs, bson.D{{Key: "_id", Value: int64(i)}, {Key: "name", Value: "x"}, {Key: "n", Value: int64(i)}})
		}
		_, err := db.Collection(name).InsertMany(t.Context(), docs)
		must(t, err)
	}
	count := func(name string) int64 {
		t.Helper()
		live, err := mongodb.Live(t.Context(), sink, "two", name)
		must(t, err)
		n, err := live.CountDocuments(t.Context(), bson.D{})
		must(t, err)
		return n
	}
	fill("kept", 7)
	fill("lost", 5)
	runner, err := projector.New(db, mongodb.New(sink), two, projector.Options{Reconcile: small, Logger: quiet()})
	must(t, err)
	g := run(t, runner)
	g.level(db)
	if a, b := count("kept"), count("lost"); a != 7 || b != 5 {
		t.Fatalf("there are %d and %d rows", a, b)
	}
	must(t, db.Drop(t.Context()))
	withImages(t, db, "kept")
	fill("kept", 4)
	until(t, 30*time.Second, "the model is rebuilt", func() bool { g.level(db); return count("kept") == 4 && count("lost") == 0 })
	g.stop()
}

// A collection that comes back without images ends the runner with an error that says what
// to run; once that is done, the model is rebuilt.
func TestTriggerWithoutImages(t *testing.T) {
	for _, down := range []bool{true, false} {
		t.Run(map[bool]string{true: "while down", false: "while it runs"}[down], func(t *testing.T) {
			r := shared(t, inMongoDB, 5)
			g := r.rebuilding()
			r.exact(g)
			if down {
				g.stop()
			}
			r.fresh(false)
			r.rename("fresh", "orders")
			if down {
				g = r.rebuilding()
			}
			err := ends[*projector.ConfigError](t, g)
			if !strings.Contains(err.Error(), `db.runCommand({collMod: "orders", changeStreamPreAndPostImages: {enabled: true}})`) {
				t.Errorf("it does not say what to run: %v", err)
			}
			r.images(true)
			g = r.rebuilding()
			r.exact(g)
			g.stop()
		})
	}
}

// Who does not want the model rebuilt after a replacement gets the error instead.
func TestTriggerStopOnReplace(t *testing.T) {
	for _, down := range []bool{true, false} {
		t.Run(map[bool]string{true: "while down", false: "while it runs"}[down], func(t *testing.T) {
			r := shared(t, inMongoDB, 5)
			stopping := projector.Options{Reconcile: small, StopOnReplace: true}
			g := r.start(stopping)
			r.exact(g)
			if down {
				g.stop()
			}
			before, rows := r.stored(), r.rows()
			overthrows[0].do(r)
			if down {
				g = r.start(stopping)
			}
			ends[*projector.ReplacedError](t, g)
			r.untouched(before, rows)
			g = r.rebuilding() // on second thoughts
			r.exact(g)
			g.stop()
		})
	}
}

// A raised Version has the model rebuilt by the new code, while readers have the old one;
// the old code refuses to run then, and changes nothing.
func TestTriggerVersion(t *testing.T) {
	inBothSinks(t, func(t *testing.T, p place) {
		r := shared(t, p, 50)
		old, rows := r.begun()
		r.step(20)

		r.shape = shape{worth: 3} // another code under the same Version
		mismatch := ends[*projector.MismatchError](t, r.rebuilding())
		if mismatch.Rebuild {
			t.Errorf("it would be rebuilt: %v", mismatch)
		}
		r.shape = shape{rowsOnly: true} // other bindings
		ends[*projector.MismatchError](t, r.rebuilding())
		r.shape = shape{}
		r.untouched(old, rows)

		r.shape = shape{version: 2, worth: 3}
		g := r.rebuilding()
		r.exact(g)
		if now := r.stored(); now.Generation != old.Generation+1 || now.Version != 2 {
			t.Errorf("the checkpoint is of generation %d, version %d", now.Generation, now.Version)
		}
		g.stop()
		now, rows := r.stored(), r.rows()

		r.shape = shape{}
		mismatch = ends[*projector.MismatchError](t, r.rebuilding())
		if mismatch.Rebuild {
			t.Errorf("an older version would rebuild: %v", mismatch)
		}
		r.shape = shape{version: 2, worth: 3}
		r.untouched(now, rows)

		r.shape = shape{version: 3, rowsOnly: true} // other bindings, and the Version says so
		g = r.rebuilding()
		r.exact(g)
		r.live(old.Generation + 2)
		g.stop()

		r.shape = shape{version: 4} // without a reconciler
		ends[*projector.MismatchError](t, r.start(projector.Options{Start: projector.FromNow()}))
		r.live(old.Generation + 2)
	})
}

// Another replica set under the same names is another source. Its times say nothing about
// those of the first, which is ahead here.
func TestTriggerOtherReplicaSet(t *testing.T) {
	uri := throwaway(t, serve.MongodOptions{}).URI()
	r := shared(t, inMongoDB, 20)
	other := client(t, uri).Database(r.db.Name())
	createOrders(t, other)
	writer := newOrderWriter(other, r.writer.rng)
	writer.next = 1000
	_, err := writer.orders.InsertMany(t.Context(), writer.many(7))
	must(t, err)
	r.step(5)
	old, _ := r.begun()
	r.db, r.way, r.writer = other, r.opened.client(t, uri).Database(r.db.Name()), writer
	g := r.rebuilding()
	r.exact(g)
	r.live(old.Generation + 1)
	r.step(5)
	r.exact(g)
	g.stop()
}

// A projection that declares NoRebuild is never rebuilt, and can't begin with a rebuild.
func TestTriggerNoRebuild(t *testing.T) {
	r := shared(t, inMongoDB, 0)
	r.noRebuild = true
	if _, err := r.runner(projector.Options{Reconcile: small}); !isConfig(err, "NoRebuild", "Options.Start") {
		t.Errorf("without a start: %v", err)
	}
	o := projector.Options{Reconcile: small, Start: projector.FromNow()}
	g := r.start(o)
	until(t, 30*time.Second, "it runs", func() bool { return g.Status().State == projector.Running })
	r.insert(10)
	r.exact(g)
	err := g.Rebuild(t.Context())
	if _, ok := errors.AsType[*projector.RebuildError](err); !ok || !strings.Contains(err.Error(), "NoRebuild") {
		t.Errorf("a rebuild by hand gives %v", err)
	}
	r.insert(10)
	r.exact(g) // it has gone on
	before, rows := r.stored(), r.rows()
	must(t, r.writer.orders.Drop(t.Context()))
	ends[*projector.ReplacedError](t, g)
	r.untouched(before, rows)
}

func isConfig(err error, words ...string) bool {
	_, ok := errors.AsType[*projector.ConfigError](err)
	for _, w := range words {
		ok = ok && strings.Contains(err.Error(), w)
	}
	return ok
}

// A first load is a rebuild, of an empty collection too, and of one that is not there: then
// one that is created later has its documents in the model.
func TestTriggerFirstLoad(t *testing.T) {
	inOneSink(t, inPostgres, func(t *testing.T, p place) {
		for name, documents := range map[string]int{"documents": 100, "empty": 0} {
			t.Run(name, func(t *testing.T) {
				r := shared(t, p, documents)
				g := r.rebuilding()
				r.exact(g)
				r.step(20)
				r.exact(g)
				g.stop()
				done := r.stored()
				g = r.rebuilding() // not once more (CASES B34)
				r.exact(g)
				r.live(done.Generation)
				g.stop()
			})
		}
	})
}

// There is no default.
func TestTriggerNothingSet(t *testing.T) {
	r := shared(t, inMongoDB, 0)
	if _, err := r.runner(projector.Options{}); !isConfig(err, "Options.Reconcile", "Options.Start", "reconcile.Snapshot", "FromNow", "FromTime") {
		t.Errorf("got %v", err)
	}
}

// lossyReader finds its documents' history lost, so many times.
type lossyReader struct {
	projector.Reader
	left *int
}

func (l lossyReader) Read(ctx context.Context, from projector.Range) (projector.Documents, error) {
	if *l.left > 0 {
		*l.left--
		return projector.Documents{}, mongo.CommandError{Code: 286, Message: "for a test"}
	}
	return l.Reader.Read(ctx, from)
}

type lossyReconciler struct {
	reconcile.Snapshot
	left *int
}

func (l lossyReconciler) Begin() (projector.Mode, projector.Reader) {
	mode, reader := l.Snapshot.Begin()
	return mode, lossyReader{reader, l.left}
}

// A rebuild by hand that loses what it needs starts over twice; the third time it is given
// up, and the live model, whose own stream is well, goes on.
func TestTriggerGivenUpByHand(t *testing.T) {
	inOneSink(t, inMongoDB, func(t *testing.T, p place) {
		r := shared(t, p, 100)
		left := 0
		g := r.start(projector.Options{Reconcile: lossyReconciler{small, &left}})
		r.exact(g)
		generation := r.stored().Generation
		left = 3
		err := g.Rebuild(t.Context())
		if _, ok := errors.AsType[*projector.RebuildError](err); !ok || !errors.Is(err, projector.ErrHistoryLost) {
			t.Fatalf("the rebuild ended with %v", err)
		}
		r.step(20)
		r.exact(g)
		r.live(generation)
		left = 2
		must(t, g.Rebuild(t.Context()))
		r.step(20)
		r.exact(g)
		g.stop()
	})
}
