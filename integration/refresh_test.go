package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// The model of the tests of Refresh: what is thought of products, a row for each. It joins
// two collections, and a median can't be kept by adding and subtracting.

type product struct {
	ID   int64  `bson:"_id"`
	Name string `bson:"name"`
}

type review struct {
	ID      int64 `bson:"_id"`
	Product int64 `bson:"product"` // which may not be there
	Stars   int64 `bson:"stars"`
}

type rating struct {
	Name    string  `row:"name"`
	Reviews int64   `row:"reviews"`
	Average float64 `row:"average"`
	Median  float64 `row:"median"`
}

func (p product) keys() []int64 { return []int64{p.ID} }
func (r review) keys() []int64  { return []int64{r.Product} }

// rate is a product's row.
func rate(p product, stars []int64) rating {
	r := rating{Name: p.Name, Reviews: int64(len(stars))}
	if len(stars) == 0 {
		return r
	}
	sum := int64(0)
	for _, s := range stars {
		sum += s
	}
	slices.Sort(stars)
	n := len(stars)
	r.Average, r.Median = float64(sum)/float64(n), float64(stars[(n-1)/2]+stars[n/2])/2
	return r
}

// rated reads what the rows are made of: products, and their reviews.
func rated(ctx context.Context, src *mongo.Database, filter bson.D) (map[int64]rating, error) {
	cur, err := src.Collection("products").Aggregate(ctx, bson.A{
		bson.D{{Key: "$match", Value: filter}},
		bson.D{{Key: "$lookup", Value: bson.D{
			{Key: "from", Value: "reviews"}, {Key: "localField", Value: "_id"}, {Key: "foreignField", Value: "product"}, {Key: "as", Value: "reviews"},
		}}},
	})
	if err != nil {
		return nil, err
	}
	var found []struct {
		Product product  `bson:",inline"`
		Reviews []review `bson:"reviews"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return nil, err
	}
	rows := map[int64]rating{}
	for _, f := range found {
		var stars []int64
		for _, r := range f.Reviews {
			stars = append(stars, r.Stars)
		}
		rows[f.Product.ID] = rate(f.Product, stars)
	}
	return rows, nil
}

// shelf is a source of products and reviews, and a model of what is thought of them.
type shelf struct {
	*testing.T
	db   *mongo.Database
	rng  *rand.Rand
	pool *pgxpool.Pool   // of the sink, in PostgreSQL
	sink *mongo.Database // the sink, in MongoDB

	mode projector.Mode // of rebuilds; empty: Shadow

	// recompute is what is called; nil: rated.
	recompute func(ctx context.Context, src *mongo.Database, keys []int64) (map[int64]rating, error)

	mu    sync.Mutex
	asked [][]int64 // the keys of each call
	next  int64     // _id of the next document
}

func newShelf(t *testing.T, p place) *shelf { return newShelfOn(t, source(t), p) }

func newShelfOn(t *testing.T, db *mongo.Database, p place) *shelf {
	t.Helper()
	s := &shelf{T: t, db: db, rng: seeded(t), next: 1}
	withImages(t, db, "products", "reviews")
	_, err := db.Collection("reviews").Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "product", Value: 1}}})
	must(t, err)
	if p == inPostgres {
		s.pool = pool(t)
		return s
	}
	s.sink = source(t)
	return s
}

// ratings is the projection, for any sink.
func ratings[Tx any](s *shelf, into projector.Putter[Tx, rating]) projector.Projection[Tx] {
	return projector.Projection[Tx]{Name: "ratings", Version: 1, Bindings: []projector.Binding[Tx]{
		projector.Refresh(s.compute, into, projector.Touches("products", product.keys), projector.Touches("reviews", review.keys)),
	}}
}

func (s *shelf) compute(ctx context.Context, src *mongo.Database, keys []int64) (map[int64]rating, error) {
	s.mu.Lock()
	s.asked = append(s.asked, slices.Clone(keys))
	s.mu.Unlock()
	if s.recompute != nil {
		return s.recompute(ctx, src, keys)
	}
	return rated(ctx, src, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: keys}}}})
}

// calls are the keys of each call since the last time.
func (s *shelf) calls() [][]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.asked = nil }()
	return s.asked
}

func (s *shelf) start(o projector.Options) *running {
	s.Helper()
	o.Logger = quiet()
	o.Reconcile = reconcile.Snapshot{ChunkRows: 20, Mode: s.mode}
	var r *projector.Runner
	var err error
	if s.pool != nil {
		r, err = projector.New(s.db, postgres.New(s.pool), ratings(s, postgres.Table[rating]{Name: "products"}), o)
	} else {
		r, err = projector.New(s.db, mongodb.New(s.sink), ratings(s, mongodb.Collection[rating]{Name: "products"}), o)
	}
	must(s, err)
	return run(s, r)
}

// rows is the model.
func (s *shelf) rows() map[int64]rating {
	s.Helper()
	type line struct {
		ID              int64 `bson:"_id"`
		Name            string
		Reviews         int64
		Average, Median float64
	}
	var lines []line
	if s.pool != nil {
		lines = selectAll[line](s, s.pool, "select _id::bigint, name, reviews, average, median from ratings.products")
	} else {
		live, err := mongodb.Live(s.Context(), s.sink, "ratings", "products")
		must(s, err)
		lines = all[line](s, live)
	}
	got := map[int64]rating{}
	for _, l := range lines {
		got[l.ID] = rating{l.Name, l.Reviews, l.Average, l.Median}
	}
	return got
}

// difference compares the model with a fresh computation, by plain code from all documents.
func (s *shelf) difference() string {
	s.Helper()
	stars := map[int64][]int64{}
	for _, r := range all[review](s, s.db.Collection("reviews")) {
		stars[r.Product] = append(stars[r.Product], r.Stars)
	}
	want := map[int64]rating{}
	for _, p := range all[product](s, s.db.Collection("products")) {
		want[p.ID] = rate(p, stars[p.ID])
	}
	return cmp.Diff(want, s.rows())
}

// exact does so once the model has caught up.
func (s *shelf) exact(g *running) {
	s.Helper()
	g.level(s.db)
	if diff := s.difference(); diff != "" {
		s.Fatalf("the model differs from the source (-source +model):\n%.3000s", diff)
	}
}

// all reads a collection.
func all[T any](t testing.TB, coll *mongo.Collection) (docs []T) {
	t.Helper()
	cur, err := coll.Find(t.Context(), bson.D{})
	must(t, err)
	must(t, cur.All(t.Context(), &docs))
	return docs
}

const products = 40 // that reviews are about, whether they are there or not

func (s *shelf) product() int64 { return 1 + s.rng.Int64N(products) }

// some is a filter for one review, most often one that is there.
func (s *shelf) some() bson.D {
	return bson.D{{Key: "_id", Value: max(1, s.next-1-s.rng.Int64N(200))}}
}

// fill writes some products and reviews.
func (s *shelf) fill() {
	s.Helper()
	for id := int64(1); id <= products; id += 2 {
		_, err := s.db.Collection("products").InsertOne(s.Context(), product{id, fmt.Sprint("product ", id)})
		must(s, err)
	}
	for range 100 {
		must(s, s.insert(s.Context()))
	}
}

func (s *shelf) insert(ctx context.Context) error {
	id := s.next
	s.next++
	_, err := s.db.Collection("reviews").InsertOne(ctx, review{id, s.product(), 1 + s.rng.Int64N(5)})
	return err
}

// one makes one random change.
func (s *shelf) one(ctx context.Context) (err error) {
	reviews, all := s.db.Collection("reviews"), s.db.Collection("products")
	switch id := s.product(); s.rng.IntN(8) {
	case 0, 1:
		return s.insert(ctx)
	case 2: // to another product: two keys
		_, err = reviews.UpdateOne(ctx, s.some(), set("product", id))
	case 3:
		_, err = reviews.UpdateOne(ctx, s.some(), set("stars", 1+s.rng.Int64N(5)))
	case 4:
		_, err = reviews.DeleteOne(ctx, s.some())
	case 5:
		_, err = all.DeleteOne(ctx, bson.D{{Key: "_id", Value: id}})
	default:
		_, err = all.UpdateByID(ctx, id, set("name", fmt.Sprint("product ", s.rng.IntN(1000))), options.UpdateOne().SetUpsert(true))
	}
	return err
}

// step makes a random change, or several in one transaction.
func (s *shelf) step(ctx context.Context) error {
	if s.rng.IntN(5) > 0 {
		return s.one(ctx)
	}
	return inTransaction(ctx, s.db, func(ctx context.Context) error {
		for range 2 + s.rng.IntN(4) {
			if err := s.one(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *shelf) steps(n int) {
	s.Helper()
	for range n {
		must(s, s.step(s.Context()))
	}
}

// checkpoint is the live generation's.
func (s *shelf) checkpoint() projector.Checkpoint {
	s.Helper()
	if s.pool != nil {
		all, err := checkpoints(s.Context(), s.pool)
		must(s, err)
		return all["ratings"]
	}
	var found struct{ Body string }
	live := bson.D{{Key: "projection", Value: "ratings"}, {Key: "phase", Value: "live"}}
	must(s, s.sink.Collection("tidemark.checkpoints").FindOne(s.Context(), live).Decode(&found))
	c, err := projector.DecodeCheckpoint("ratings", []byte(found.Body))
	must(s, err)
	return c
}

// pending waits until so many keys wait in the checkpoint.
func (s *shelf) pending(n int) {
	s.Helper()
	until(s, 30*time.Second, fmt.Sprintf("%d keys wait", n), func() bool { return len(s.checkpoint().Pending) == n })
}

// everyHour is an interval that is not over before the test is.
var everyHour = projector.Options{RefreshInterval: time.Hour}

// A Refresh equals a fresh computation while products and reviews are changed, also in
// transactions; while it is stopped and started, with keys that wait in the checkpoint; and
// after a rebuild under writes.
func TestRefresh(t *testing.T) {
	for _, p := range []place{inPostgres, inMongoDB} {
		t.Run(string(p), func(t *testing.T) {
			s := newShelf(t, p)
			s.fill()
			g := s.start(projector.Options{})
			s.steps(100)
			s.exact(g)
			g.stop()

			waited := 0
			for range effort.Rounds(5) {
				o := projector.Options{RefreshInterval: time.Millisecond}
				if s.rng.IntN(2) == 0 || waited == 0 {
					o = everyHour
				}
				g = s.start(o)
				n := g.Status().Changes
				s.steps(50)
				until(t, 30*time.Second, "some changes are applied", func() bool { return g.Status().Changes > n+10 })
				g.stop() // while changes are on their way, and keys wait
				waited += len(s.checkpoint().Pending)
				s.steps(10)
			}
			if waited == 0 {
				t.Error("no key has waited in a checkpoint")
			}
			g = s.start(projector.Options{RefreshInterval: 10 * time.Millisecond})
			s.exact(g)

			stop := s.write()
			for range effort.Rounds(3) {
				must(t, g.Rebuild(t.Context()))
			}
			stop()
			s.exact(g)
			g.stop()
		})
	}
}

// A rebuild in the place of the live model computes every row, and removes the others.
func TestRefreshModes(t *testing.T) {
	for _, mode := range []projector.Mode{projector.Reset, projector.InPlace} {
		for _, p := range []place{inPostgres, inMongoDB} {
			t.Run(fmt.Sprint(mode, " ", p), func(t *testing.T) {
				s := newShelf(t, p)
				s.fill()
				g := s.start(projector.Options{})
				s.exact(g)
				g.stop()
				s.spoil()
				if s.difference() == "" {
					t.Fatal("the model is not spoilt")
				}
				s.mode = mode
				g = s.start(projector.Options{RefreshInterval: 10 * time.Millisecond})
				stop := s.write()
				must(t, g.Rebuild(t.Context()))
				stop()
				s.exact(g)
				g.stop()
			})
		}
	}
}

// spoil changes a row of the model, and adds one.
func (s *shelf) spoil() {
	s.Helper()
	if s.pool != nil {
		_, err := s.pool.Exec(s.Context(), "update ratings.products set average = -1 where _id = '1'")
		must(s, err)
		_, err = s.pool.Exec(s.Context(), "insert into ratings.products select (jsonb_populate_record(p, '{\"_id\": \"-1\"}')).* from ratings.products p where _id = '1'")
		must(s, err)
		return
	}
	live, err := mongodb.Live(s.Context(), s.sink, "ratings", "products")
	must(s, err)
	_, err = live.UpdateByID(s.Context(), 1, set("average", -1.0))
	must(s, err)
	_, err = live.InsertOne(s.Context(), bson.D{{Key: "_id", Value: int64(-1)}, {Key: "name", Value: "left over"}})
	must(s, err)
}

// write makes random changes until the function that it returns is called.
func (s *shelf) write() (stop func()) {
	var ended atomic.Bool // a step is not cut off: the server might go on with it
	var writing sync.WaitGroup
	writing.Go(func() {
		for !ended.Load() {
			if err := s.step(context.Background()); err != nil {
				s.Errorf("write: %v", err)
				return
			}
			breathe()
		}
	})
	stop = sync.OnceFunc(func() { ended.Store(true); writing.Wait() })
	s.Cleanup(stop)
	return stop
}

// Without the waiting keys in the checkpoint, a restart forgets them.
func TestRefreshNotices(t *testing.T) {
	for _, guarded := range []bool{true, false} {
		t.Run(fmt.Sprint("stored ", guarded), func(t *testing.T) {
			if !guarded {
				without(t, fault.RefreshPending)
			}
			s := newShelf(t, inPostgres)
			s.fill()
			g := s.start(everyHour)
			s.exact(g)
			before := g.Status().Changes
			for id := int64(1); id <= 5; id += 2 {
				_, err := s.db.Collection("products").UpdateByID(t.Context(), id, set("name", "another"))
				must(t, err)
			}
			until(t, 30*time.Second, "the changes are applied", func() bool { return g.Status().Changes == before+3 })
			g.stop()
			g = s.start(projector.Options{})
			g.level(s.db)
			if differs := s.difference() != ""; differs == guarded {
				t.Errorf("the model differs from the source: %t", differs)
			}
			g.stop()
		})
	}
}

// Keys that are touched together are recomputed once, by one call, however often and
// by whatever collection they were touched, and none else is; also where the call comes
// after a restart. Somebody who waits for the model does not wait for the interval.
func TestRefreshOnce(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprint("restart ", restart), func(t *testing.T) {
			s := newShelf(t, inPostgres)
			s.fill()
			g := s.start(everyHour)
			s.exact(g)
			s.calls()
			for n := range 20 {
				for _, id := range []int64{3, 5} {
					_, err := s.db.Collection("products").UpdateByID(t.Context(), id, set("name", fmt.Sprint("name ", n)))
					must(t, err)
				}
				_, err := s.db.Collection("reviews").InsertOne(t.Context(), review{int64(1000 + n), 7, 3})
				must(t, err)
			}
			// From the one product to another: both are touched.
			_, err := s.db.Collection("reviews").UpdateByID(t.Context(), 1000, set("product", 9))
			must(t, err)
			s.pending(4)
			if restart {
				g.stop()
				g = s.start(everyHour)
			}
			if calls := s.calls(); len(calls) > 0 {
				t.Fatalf("recomputed before the interval was over: %v", calls)
			}
			var passed atomic.Int64
			fault.Global.OnReach(func(p fault.Point) {
				if p == fault.Recompute {
					passed.Add(1)
				}
			})
			t.Cleanup(func() { fault.Global.OnReach(nil) })
			begun := time.Now()
			g.level(s.db)
			t.Logf("waited for %s", time.Since(begun))
			calls := s.calls()
			if len(calls) == 1 {
				slices.Sort(calls[0])
			}
			if diff := cmp.Diff([][]int64{{3, 5, 7, 9}}, calls); diff != "" || passed.Load() != 1 {
				t.Errorf("%d calls (-want +got):\n%s", passed.Load(), diff)
			}
			if c := s.checkpoint(); len(c.Pending) > 0 || !c.Settled {
				t.Errorf("%d keys still wait, settled %t", len(c.Pending), c.Settled)
			}
			s.exact(g)
			g.stop()
		})
	}
}

// The interval ends by itself.
func TestRefreshInterval(t *testing.T) {
	s := newShelf(t, inMongoDB)
	s.fill()
	g := s.start(projector.Options{RefreshInterval: 300 * time.Millisecond})
	s.exact(g)
	s.calls()
	_, err := s.db.Collection("products").UpdateByID(t.Context(), 3, set("name", "another"))
	must(t, err)
	until(t, 30*time.Second, "the row is recomputed", func() bool { return s.rows()[3].Name == "another" })
	if calls := s.calls(); len(calls) != 1 {
		t.Errorf("the calls %v", calls)
	}
	g.stop()
}

// What the function can't do ends Run with a RecomputeError, and nothing is lost: the keys
// wait until it is mended.
func TestRefreshFails(t *testing.T) {
	boom := errors.New("boom")
	for name, f := range map[string]func(map[int64]rating) (map[int64]rating, error){
		"an error":         func(map[int64]rating) (map[int64]rating, error) { return nil, boom },
		"a panic":          func(map[int64]rating) (map[int64]rating, error) { panic(boom) },
		"a key not asked":  func(rows map[int64]rating) (map[int64]rating, error) { rows[-1] = rating{}; return rows, nil },
		"a row not stored": func(map[int64]rating) (map[int64]rating, error) { return map[int64]rating{3: {Name: "\x00"}}, nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := newShelf(t, inPostgres)
			s.fill()
			g := s.start(projector.Options{})
			s.exact(g)
			g.stop()
			s.recompute = func(ctx context.Context, src *mongo.Database, keys []int64) (map[int64]rating, error) {
				rows, err := rated(ctx, src, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: keys}}}})
				if err != nil {
					return nil, err
				}
				return f(rows)
			}
			_, err := s.db.Collection("products").UpdateByID(t.Context(), 3, set("name", "another"))
			must(t, err)
			g = s.start(projector.Options{RefreshInterval: time.Millisecond})
			e := ends[*projector.RecomputeError](t, g)
			if e.Projection != "ratings" || e.Keys != 1 || e.Key != "3" {
				t.Errorf("the error is of %d keys, %s first, in %s", e.Keys, e.Key, e.Projection)
			}
			if name == "an error" && !errors.Is(e, boom) {
				t.Error("the error does not wrap the function's")
			}
			var panicked *projector.PanicError
			if name == "a panic" && !errors.As(e, &panicked) {
				t.Error("the error does not wrap a PanicError")
			}
			s.recompute = nil
			g = s.start(projector.Options{})
			s.exact(g)
			g.stop()
		})
	}
}

// A server that has forgotten how it was at the model's position gives the rows as of now:
// the model is then ahead of its position, and does not count as settled until that has
// come there.
func TestRefreshAhead(t *testing.T) {
	m := throwaway(t, serve.MongodOptions{Params: map[string]string{"minSnapshotHistoryWindowInSeconds": "1"}})
	s := newShelfOn(t, sourceOn(t, m.URI()), inPostgres)
	s.fill()
	g := s.start(everyHour)
	s.exact(g)
	for range effort.Rounds(5) {
		s.steps(20)
		until(t, 30*time.Second, "some keys wait", func() bool { return len(s.checkpoint().Pending) > 0 })
		s.calls()
		b := holdAt(t, fault.Recompute, 0)
		now := operationTime(t, s.db)
		waited := make(chan error, 1)
		go func() { waited <- g.WaitFor(t.Context(), now) }()
		b.wait()
		at := s.checkpoint().Position.Time
		s.steps(20) // in the rows, if they are of now, and still to come in the stream
		until(t, 30*time.Second, "the server has forgotten the position", func() bool { return s.forgotten(at) })
		b.release()
		must(t, <-waited)
		fault.Global.OnReach(nil)
		if n := len(s.calls()); n < 2 {
			t.Errorf("the rows were asked for %d times: the first time was not too late", n)
		}
		s.exact(g)
	}
	g.stop()
}

// forgotten writes elsewhere, and reports whether the server can't be read as of a time any
// more. (It forgets with writes only; seen on 6.0.)
func (s *shelf) forgotten(at bson.Timestamp) bool {
	s.Helper()
	_, err := s.db.Collection("others").InsertOne(s.Context(), bson.D{})
	must(s, err)
	sess, err := s.db.Client().StartSession(options.Session().SetSnapshot(true).SetSnapshotTime(at))
	must(s, err)
	defer sess.EndSession(s.Context())
	err = s.db.Collection("products").FindOne(mongo.NewSessionContext(s.Context(), sess), bson.D{}).Err()
	var refused mongo.CommandError
	return errors.As(err, &refused) && refused.Code == 239 // SnapshotTooOld
}
