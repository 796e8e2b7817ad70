package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

func TestMain(m *testing.M) {
	if uri := os.Getenv(victimVariable); uri != "" {
		victim(uri)
	}
	code := m.Run()
	if err := errors.Join(closeClients(), serve.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const model = "model" // the projection of most tests

// server is the one of all tests. It takes failCommand, and ends open transactions
// only after 60 s, so that a test sees who else does.
var server = sync.OnceValues(func() (*serve.Mongod, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return serve.StartMongod(ctx, serve.MongodOptions{Params: map[string]string{"enableTestCommands": "1"}})
})

var shared struct {
	sync.Mutex
	*mongo.Client
}

func closeClients() error {
	if shared.Client == nil {
		return nil
	}
	return shared.Disconnect(context.Background())
}

// client is the one of all tests.
func client(uri string) (_ *mongo.Client, err error) {
	shared.Lock()
	defer shared.Unlock()
	if shared.Client == nil {
		shared.Client, err = connect(uri)
	}
	return shared.Client, err
}

func connect(uri string) (*mongo.Client, error) {
	return mongo.Connect(options.Client().ApplyURI(uri))
}

// database is a database of the test's own, and a sink on it.
type database struct {
	*mongo.Database
	sink *mongodb.Sink
	uri  string
}

func newDatabase(t testing.TB, opts ...mongodb.Option) *database {
	t.Helper()
	m, err := server()
	must(t, err)
	all, err := client(m.URI())
	must(t, err)
	db := all.Database("tm_" + bson.NewObjectID().Hex()[8:])
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		must(t, db.Drop(ctx))
	})
	return &database{db, mongodb.New(db, opts...), m.URI()}
}

// other is another sink on the same database, through a client of its own, as another
// process would have it.
func (d *database) other(t testing.TB) *mongodb.Sink {
	t.Helper()
	client, err := connect(d.uri)
	must(t, err)
	t.Cleanup(func() { must(t, client.Disconnect(context.Background())) })
	return mongodb.New(client.Database(d.Name()))
}

// rows are the documents of a collection of the model, sorted by _id, a line each.
func (d *database) rows(t testing.TB, collection string) string {
	t.Helper()
	cur, err := d.Collection(model+"."+collection).Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	must(t, err)
	var lines []string
	for cur.Next(t.Context()) {
		b, err := bson.MarshalExtJSON(cur.Current, false, false)
		must(t, err)
		lines = append(lines, string(b))
	}
	must(t, cur.Err())
	return strings.Join(lines, "\n")
}

// stored is the checkpoint's document.
func (d *database) stored(t testing.TB) bson.Raw {
	t.Helper()
	r, err := d.Collection("tidemark.checkpoints").FindOne(t.Context(), bson.D{{Key: "_id", Value: model}}).Raw()
	must(t, err)
	return r
}

// fail makes the server's next statements of these names fail, until the test's end.
func (d *database) fail(t testing.TB, times int, data bson.D, commands ...string) {
	t.Helper()
	admin := d.Client().Database("admin")
	data = append(bson.D{{Key: "failCommands", Value: commands}}, data...)
	must(t, admin.RunCommand(t.Context(), bson.D{
		{Key: "configureFailPoint", Value: "failCommand"},
		{Key: "mode", Value: bson.D{{Key: "times", Value: times}}},
		{Key: "data", Value: data},
	}).Err())
	t.Cleanup(func() {
		must(t, admin.RunCommand(context.Background(), bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}}).Err())
	})
}

// acquired takes the term, and commits setup first where nothing is committed yet.
func (d *database) acquired(t testing.TB, setup ...func(context.Context, *mongodb.Tx) error) projector.Checkpoint {
	t.Helper()
	cp, err := acquire(t.Context(), d.sink, "test")
	must(t, err)
	if cp.Sequence > 0 {
		return cp
	}
	next, err := commit(t, d.sink, cp, setup...)
	must(t, err)
	return next
}

// acquire takes the term where the live generation is the first, or is alone.
func acquire(ctx context.Context, s *mongodb.Sink, owner string) (projector.Checkpoint, error) {
	all, err := s.Acquire(ctx, model, owner)
	if err != nil {
		return projector.Checkpoint{}, err
	}
	return all[0], nil
}

// commit applies fs in the commit after prev.
func commit(t testing.TB, s *mongodb.Sink, prev projector.Checkpoint, fs ...func(context.Context, *mongodb.Tx) error) (projector.Checkpoint, error) {
	t.Helper()
	next := following(prev)
	return next, s.Commit(t.Context(), prev, next, all(fs...))
}

func following(prev projector.Checkpoint) projector.Checkpoint {
	next := prev
	next.Sequence++
	next.Position.Time = bson.Timestamp{T: 1_700_000_000, I: uint32(next.Sequence)}
	return next
}

func all(fs ...func(context.Context, *mongodb.Tx) error) func(context.Context, *mongodb.Tx) error {
	return func(ctx context.Context, tx *mongodb.Tx) error {
		for _, f := range fs {
			if err := f(ctx, tx); err != nil {
				return err
			}
		}
		return nil
	}
}

// inc is a handler that counts in a document.
func inc(id string) func(context.Context, *mongodb.Tx) error {
	return func(_ context.Context, tx *mongodb.Tx) error {
		tx.Collection("numbers").Queue(mongo.NewUpdateOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: id}}).SetUpdate(bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: 1}}}}))
		return nil
	}
}

func add[R any](c mongodb.Collection[R], minus, plus []R) func(context.Context, *mongodb.Tx) error {
	return func(ctx context.Context, tx *mongodb.Tx) error { return c.Add(ctx, tx, minus, plus) }
}

func put[R any](c mongodb.Collection[R], remove, put []projector.Row[R]) func(context.Context, *mongodb.Tx) error {
	return func(ctx context.Context, tx *mongodb.Tx) error { return c.Put(ctx, tx, remove, put) }
}

func value(t testing.TB, v any) bson.RawValue {
	t.Helper()
	if v == nil {
		return bson.RawValue{Type: bson.TypeNull}
	}
	typ, b, err := bson.MarshalValue(v)
	must(t, err)
	return bson.RawValue{Type: typ, Value: b}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %v\nwant %v", what, got, want)
	}
}

// wantError checks that err is there and says all of these.
func wantError(t testing.TB, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one that says %q", says)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("error does not say %q: %v", s, err)
		}
	}
}

func wantClass(t testing.TB, s *mongodb.Sink, err error, want projector.Class) {
	t.Helper()
	if got := s.Classify(err); got != want {
		t.Errorf("class %v, want %v, of: %v", got, want, err)
	}
}

func wantFenced(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, projector.ErrFenced) {
		t.Fatalf("not fenced: %v", err)
	}
}

// disable switches guards off for the rest of the test.
func disable(t testing.TB, g ...fault.Guard) { t.Cleanup(fault.Global.Disable(g...)) }
