package integration_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/order/ordertest"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// identified are documents with _ids of every type, mirrored.
type identified struct {
	*things
	rng  *rand.Rand
	keys []bson.RawValue
	ints []int64 // _ids of which a replacement changes the type
	in   *mongo.Database
}

func newIdentified(t *testing.T, p place) *identified {
	t.Helper()
	f := &identified{things: newThings(t), rng: seeded(t), keys: everyKey(t)}
	for range 500 * effort.Rounds(6) {
		f.keys = append(f.keys, ordertest.Value(f.rng))
	}
	for n := range int64(20) {
		f.ints = append(f.ints, 1_000_000+n*n*n)
	}
	if p != inPostgres {
		f.in = f.db.Client().Database(unique("model_"))
		t.Cleanup(func() { _ = f.in.Drop(context.Background()) })
	}
	for _, k := range f.keys {
		if f.rng.IntN(2) == 0 {
			f.ok(f.insert(k))
		}
	}
	for _, n := range f.ints {
		f.ok(f.insert(raw(t, n)))
	}
	return f
}

// ok is for a write that may find an equal _id, of another type say.
func (f *identified) ok(err error) {
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		f.t.Errorf("write: %v", err)
	}
}

func (f *identified) insert(k bson.RawValue) error {
	_, err := f.coll().InsertOne(context.Background(), bson.D{{Key: "_id", Value: k}, {Key: "name", Value: k.Type.String()}, {Key: "n", Value: f.rng.Int64()}})
	return err
}

// step changes a document.
func (f *identified) step() (err error) {
	ctx, k := context.Background(), f.keys[f.rng.IntN(len(f.keys))]
	id := bson.D{{Key: "_id", Value: bson.D{{Key: "$eq", Value: k}}}}
	switch f.rng.IntN(8) {
	case 0, 1:
		return f.insert(k)
	case 2:
		_, err = f.coll().DeleteOne(ctx, id)
	case 3:
		n := f.ints[f.rng.IntN(len(f.ints))]
		_, err = f.coll().ReplaceOne(ctx, bson.D{{Key: "_id", Value: n}}, bson.D{{Key: "_id", Value: []any{int32(n), n, float64(n)}[f.rng.IntN(3)]}, {Key: "n", Value: f.rng.Int64()}})
	default:
		_, err = f.coll().UpdateOne(ctx, id, set("n", f.rng.Int64()))
	}
	return err
}

func (f *identified) start(r projector.Reconciler) *running {
	f.t.Helper()
	return run(f.t, f.mirrored(projector.Options{Reconcile: r, Logger: quiet()}))
}

func (f *identified) mirrored(o projector.Options) *projector.Runner {
	f.t.Helper()
	var r *projector.Runner
	var err error
	if f.in == nil {
		r, err = projector.New(f.db, postgres.New(f.pool), mirror("identified"), o)
	} else {
		r, err = projector.New(f.db, mongodb.New(f.in), mongodb.Projection{Name: "identified", Version: 1, Bindings: mongodb.Bindings{
			projector.Mirror("things", thing.row, mongodb.Collection[thingRow]{Name: "things"}),
		}}, o)
	}
	must(f.t, err)
	return r
}

func (f *identified) model() map[string]thingRow {
	f.t.Helper()
	if f.in == nil {
		return f.rows("identified")
	}
	live, err := mongodb.Live(f.t.Context(), f.in, "identified", "things")
	must(f.t, err)
	cur, err := live.Find(f.t.Context(), bson.D{})
	must(f.t, err)
	var all []struct {
		ID     bson.RawValue `bson:"_id"`
		Name   string
		N, Pad int64
	}
	must(f.t, cur.All(f.t.Context(), &all))
	rows := map[string]thingRow{}
	for _, r := range all {
		rows[projector.KeyText(r.ID)] = thingRow{r.Name, r.N, r.Pad}
	}
	return rows
}

// Documents with _ids of every type, hard to put in order, are copied again and again while
// they are inserted, changed and deleted on both sides of each chunk's end: the server and
// the rebuild must agree about what is beyond it.
func TestRebuildLiveIDs(t *testing.T) {
	t.Parallel()
	for _, p := range []place{inPostgres, inMongoDB} {
		t.Run(string(p), func(t *testing.T) {
			f := newIdentified(t, p)
			chunks := 0
			g := f.start(&meddling{Snapshot: reconcile.Snapshot{ChunkRows: 50}, after: func(projector.Range, *projector.Documents) {
				chunks++
				for range 20 {
					f.ok(f.step())
				}
			}})
			n := max(2, effort.Rounds(10))
			for round := range n {
				must(t, g.Rebuild(t.Context())) // the first one is under way already
				g.level(f.db)
				if diff := cmp.Diff(f.documents(), f.model()); diff != "" {
					t.Fatalf("round %d: the model differs from the source (-source +model):\n%.3000s", round+1, diff)
				}
			}
			t.Logf("%d rebuilds of %d documents in %d chunks, %d changes meanwhile", n, len(f.model()), chunks, 20*chunks)
			g.stop()
		})
	}
}

// plainly reads chunks by a plain $gt, which compares within one type only.
type plainly struct{ rows int64 }

func (p plainly) Begin() (projector.Mode, projector.Reader) { return projector.Shadow, p }
func (plainly) Due() time.Time                              { return time.Time{} }
func (plainly) Report(projector.Progress)                   {}

func (p plainly) Read(ctx context.Context, from projector.Range) (docs projector.Documents, err error) {
	filter := bson.D{}
	if !from.After.IsZero() {
		filter = bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: from.After}}}}
	}
	cur, err := from.Collection.Find(ctx, filter, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}).SetLimit(p.rows))
	if err == nil {
		err = cur.All(ctx, &docs.Docs)
	}
	docs.Done = int64(len(docs.Docs)) < p.rows
	return docs, err
}

// The control: chunks that are read plainly end with the type that the first ends with.
func TestRebuildLiveIDsControl(t *testing.T) {
	f := newIdentified(t, inMongoDB)
	f.start(plainly{50}).level(f.db)
	if have, want := len(f.model()), len(f.documents()); have == want {
		t.Errorf("all of %d documents are there: the test proves nothing", want)
	} else {
		t.Logf("%d of %d documents are there", have, want)
	}
}
