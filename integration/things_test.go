package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// The model of the tests about the source and about bad input: things, mirrored.

type thing struct {
	ID   bson.RawValue `bson:"_id"`
	Name string        `bson:"name"`
	N    int64         `bson:"n"`
	Pad  string        `bson:"pad,omitempty"`
}

type thingRow struct {
	Name string `row:"name"`
	N    int64  `row:"n"`
	Pad  int64  `row:"pad"` // its length
}

func (t thing) row() (thingRow, bool) { return thingRow{t.Name, t.N, int64(len(t.Pad))}, true }

// mirror is a projection of things, one row for each.
func mirror(name string, opts ...projector.MirrorOption) postgres.Projection {
	return postgres.Projection{Name: name, Version: 1, Bindings: postgres.Bindings{
		projector.Mirror("things", thing.row, postgres.Table[thingRow]{Name: "things"}, opts...),
	}}
}

// things is a source and a sink of their own for one test.
type things struct {
	t    *testing.T
	db   *mongo.Database
	pool *pgxpool.Pool
	from bson.Timestamp // before everything written through add
}

// newThings creates the collection, with images, on the shared servers.
func newThings(t *testing.T) *things { return newThingsOn(t, source(t), pool(t)) }

func newThingsOn(t *testing.T, db *mongo.Database, pool *pgxpool.Pool) *things {
	t.Helper()
	withImages(t, db, "things")
	from := operationTime(t, db)
	return &things{t, db, pool, bson.Timestamp{T: from.T, I: from.I + 1}}
}

func (f *things) coll() *mongo.Collection { return f.db.Collection("things") }

// add inserts n documents, numbered on from those that are there.
func (f *things) add(n int) {
	f.t.Helper()
	have, err := f.coll().CountDocuments(f.t.Context(), bson.D{})
	must(f.t, err)
	var docs []any
	for i := range n {
		docs = append(docs, bson.D{{Key: "_id", Value: have + int64(i)}, {Key: "name", Value: fmt.Sprintf("thing %d", i)}, {Key: "n", Value: int64(i)}})
	}
	_, err = f.coll().InsertMany(f.t.Context(), docs)
	must(f.t, err)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// runner makes a runner of p that starts before everything written, unless o says
// otherwise.
func (f *things) runner(p postgres.Projection, o projector.Options) *projector.Runner {
	f.t.Helper()
	if o.Start == (projector.Start{}) {
		o.Start = projector.FromTime(f.from)
	}
	o.Logger = quiet()
	r, err := projector.New(f.db, postgres.New(f.pool), p, o)
	must(f.t, err)
	return r
}

func (f *things) run(p postgres.Projection) *running {
	f.t.Helper()
	return run(f.t, f.runner(p, projector.Options{}))
}

// documents is what the rows should be, by text form of the _id.
func (f *things) documents() map[string]thingRow {
	f.t.Helper()
	cur, err := f.coll().Find(f.t.Context(), bson.D{})
	must(f.t, err)
	var docs []thing
	must(f.t, cur.All(f.t.Context(), &docs))
	rows := map[string]thingRow{}
	for _, d := range docs {
		rows[projector.KeyText(d.ID)], _ = d.row()
	}
	return rows
}

// rows is what they are.
func (f *things) rows(projection string) map[string]thingRow {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), "select _id, name, n, pad from "+projection+".things")
	must(f.t, err)
	defer rows.Close()
	all := map[string]thingRow{}
	for rows.Next() {
		var id string
		var r thingRow
		must(f.t, rows.Scan(&id, &r.Name, &r.N, &r.Pad))
		all[id] = r
	}
	must(f.t, rows.Err())
	return all
}

// same fails the test where rows and documents differ.
func (f *things) same(projection string) {
	f.t.Helper()
	if diff := cmp.Diff(f.documents(), f.rows(projection)); diff != "" {
		f.t.Errorf("documents (-) and rows (+) differ:\n%.2000s", diff)
	}
}

// storedCheckpoint is a checkpoint as it lies in the sink.
type storedCheckpoint struct {
	Sequence int64
	Body     string
}

func (f *things) stored(projection string) storedCheckpoint {
	f.t.Helper()
	var s storedCheckpoint
	err := f.pool.QueryRow(f.t.Context(), "select sequence, body from tidemark.checkpoints where projection = $1 and phase = 'live'", projection).Scan(&s.Sequence, &s.Body)
	must(f.t, err)
	return s
}

func (f *things) checkpoint(projection string) projector.Checkpoint {
	f.t.Helper()
	c, err := projector.DecodeCheckpoint(projection, []byte(f.stored(projection).Body))
	must(f.t, err)
	return c
}

// ends waits for the runner's end and demands an error of type E.
func ends[E error](t testing.TB, g *running) E {
	t.Helper()
	err := g.wait(30 * time.Second)
	e, ok := errors.AsType[E](err)
	if !ok {
		t.Fatalf("the runner ended with %T: %v", err, err)
	}
	t.Logf("%T after %d stream opens: %.400v", e, g.Status().StreamsOpened, e)
	return e
}

// throwaway is a MongoDB of the test's own.
func throwaway(t testing.TB, o serve.MongodOptions) *serve.Mongod {
	t.Helper()
	m, err := serve.StartMongod(t.Context(), o)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	return m
}

// opens counts attempts to open a change stream, until the test ends.
func opens(t testing.TB) func() int {
	c := make(chan struct{}, 10_000)
	fault.Global.OnReach(func(p fault.Point) {
		if p == fault.StreamOpen {
			select {
			case c <- struct{}{}:
			default:
			}
		}
	})
	t.Cleanup(func() { fault.Global.OnReach(nil) })
	return func() int { return len(c) }
}

// without switches guards off for the rest of the test.
func without(t testing.TB, guards ...fault.Guard) { t.Cleanup(fault.Global.Disable(guards...)) }

// admin runs a command on the database admin.
func admin(t testing.TB, db *mongo.Database, command bson.D) {
	t.Helper()
	must(t, db.Client().Database("admin").RunCommand(t.Context(), command).Err())
}

// oplogStart is the time of the oplog's oldest entry.
func oplogStart(t testing.TB, db *mongo.Database) bson.Timestamp {
	t.Helper()
	var first struct{ TS bson.Timestamp }
	must(t, db.Client().Database("local").Collection("oplog.rs").FindOne(t.Context(), bson.D{}).Decode(&first))
	return first.TS
}

// roll writes elsewhere until the oplog no longer has t.
func roll(t testing.TB, db *mongo.Database, past bson.Timestamp) {
	t.Helper()
	other := db.Client().Database(db.Name() + "_busy").Collection("noise")
	t.Cleanup(func() { _ = other.Database().Drop(context.Background()) })
	noise := bson.D{{Key: "pad", Value: string(make([]byte, 1<<20))}}
	until(t, 60*time.Second, "the oplog rolls", func() bool {
		if start := oplogStart(t, db); start.After(past) {
			return true
		}
		_, err := other.InsertOne(t.Context(), noise)
		must(t, err)
		return false
	})
	must(t, other.Drop(t.Context()))
}

type sumRow struct {
	Name string `row:"name,key"`
	N    int64  `row:"n,sum"`
}

func (t thing) sums() []sumRow { return []sumRow{{t.Name, t.N}} }

// rollupOf is a projection that needs both images.
func rollupOf(name string) postgres.Projection {
	return postgres.Projection{Name: name, Version: 1, Bindings: postgres.Bindings{
		projector.Rollup("things", thing.sums, postgres.Table[sumRow]{Name: "sums"}),
	}}
}
