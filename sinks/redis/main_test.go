package redis_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// silent keeps the client's log of lost connections out of the tests' output.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func TestMain(m *testing.M) {
	goredis.SetLogger(silent{})
	code := m.Run()
	if err := serve.Close(); err != nil {
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

// server is the one of all tests that leave it running. Each takes a database of it.
var server = sync.OnceValues(func() (*serve.RedisServer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return serve.StartRedis(ctx, serve.RedisOptions{Params: map[string]string{"databases": "10000"}})
})

var lastDatabase atomic.Int64

// database is a database of the test's own, and a sink on it.
type database struct {
	*goredis.Client
	sink *redis.Sink
	addr string
	db   int
}

func newDatabase(t testing.TB, opts ...redis.Option) *database {
	t.Helper()
	s, err := server()
	must(t, err)
	return databaseOn(t, s, int(lastDatabase.Add(1)), opts...)
}

// throwaway is a server of the test's own.
func throwaway(t testing.TB, params map[string]string, opts ...redis.Option) (*serve.RedisServer, *database) {
	t.Helper()
	s, err := serve.StartRedis(t.Context(), serve.RedisOptions{Params: params})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s, databaseOn(t, s, 0, opts...)
}

func databaseOn(t testing.TB, s *serve.RedisServer, db int, opts ...redis.Option) *database {
	d := &database{addr: s.Addr(), db: db}
	d.Client = d.connect(t)
	d.sink = redis.New(d.Client, opts...)
	return d
}

// cleaner is what a test and a check have.
type cleaner interface{ Cleanup(func()) }

// connect is another client, as another process would have it.
func (d *database) connect(t cleaner, more ...func(*goredis.Options)) *goredis.Client {
	o := &goredis.Options{Addr: d.addr, DB: d.db, ContextTimeoutEnabled: true}
	for _, f := range more {
		f(o)
	}
	c := goredis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// rows are the rows of a target in the first generation, sorted by key, a line each.
func (d *database) rows(t testing.TB, target string) string {
	t.Helper()
	return d.rowsIn(t, "{model}:g1", target)
}

func (d *database) rowsIn(t testing.TB, place, target string) string {
	t.Helper()
	index, err := d.HGetAll(t.Context(), place+":"+target).Result()
	must(t, err)
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(index)) {
		row, err := d.HGetAll(t.Context(), place+":"+target+":"+key).Result()
		must(t, err)
		var fields []string
		for _, f := range slices.Sorted(maps.Keys(row)) {
			fields = append(fields, f+"="+row[f])
		}
		lines = append(lines, key+": "+strings.Join(fields, " "))
	}
	return strings.Join(lines, "\n")
}

// take is Acquire of a projection that has one generation.
func take(t testing.TB, s *redis.Sink, owner string) projector.Checkpoint {
	t.Helper()
	all, err := s.Acquire(t.Context(), model, owner)
	must(t, err)
	equal(t, "generations", len(all), 1)
	return all[0]
}

// acquired takes the term, and commits setup first where nothing is committed yet.
func (d *database) acquired(t testing.TB, setup ...apply) projector.Checkpoint {
	t.Helper()
	cp := take(t, d.sink, "test")
	if cp.Sequence > 0 {
		return cp
	}
	next, err := commit(t, d.sink, cp, setup...)
	must(t, err)
	return next
}

type apply = func(context.Context, *redis.Tx) error

// commit applies fs in the commit after prev.
func commit(t testing.TB, s *redis.Sink, prev projector.Checkpoint, fs ...apply) (projector.Checkpoint, error) {
	t.Helper()
	next := following(prev)
	return next, s.Commit(t.Context(), prev, next, all(fs...))
}

// committed is commit that must succeed.
func committed(t testing.TB, s *redis.Sink, prev projector.Checkpoint, fs ...apply) projector.Checkpoint {
	t.Helper()
	next, err := commit(t, s, prev, fs...)
	must(t, err)
	return next
}

func following(prev projector.Checkpoint) projector.Checkpoint {
	next := prev
	next.Sequence++
	next.Position.Time = bson.Timestamp{T: 1_700_000_000, I: uint32(next.Sequence)}
	return next
}

func all(fs ...apply) apply {
	return func(ctx context.Context, tx *redis.Tx) error {
		for _, f := range fs {
			if err := f(ctx, tx); err != nil {
				return err
			}
		}
		return nil
	}
}

func add[R any](h redis.Hash[R], minus, plus []R) apply {
	return func(ctx context.Context, tx *redis.Tx) error { return h.Add(ctx, tx, minus, plus) }
}

func put[R any](h redis.Hash[R], remove, put []projector.Row[R]) apply {
	return func(ctx context.Context, tx *redis.Tx) error { return h.Put(ctx, tx, remove, put) }
}

func queue(f func(*redis.Tx)) apply {
	return func(_ context.Context, tx *redis.Tx) error {
		f(tx)
		return nil
	}
}

func value(t testing.TB, v any) bson.RawValue {
	t.Helper()
	typ, b, err := bson.MarshalValue(v)
	must(t, err)
	return bson.RawValue{Type: typ, Value: b}
}

// The row types of the package's own tests.
type (
	count struct {
		Status string `row:"status,key"`
		N      int64  `row:"n,sum"`
	}
	ticket struct {
		Title string  `row:"title"`
		Note  *string `row:"note"`
	}
	alias struct {
		Name string `row:"name,key"`
		Of   string `row:"of"`
	}
)

var (
	counts  = redis.Hash[count]{Name: "counts"}
	tickets = redis.Hash[ticket]{Name: "tickets"}
	aliases = redis.Hash[alias]{Name: "aliases"}
)

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

func wantClass(t testing.TB, s *redis.Sink, err error, want projector.Class) {
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

func wantDamaged(t testing.TB, err error) {
	t.Helper()
	if _, ok := errors.AsType[*redis.DamagedError](err); !ok || !errors.Is(err, projector.ErrHistoryLost) {
		t.Fatalf("not damaged: %v", err)
	}
}

// disable switches guards off for the rest of the test.
func disable(t testing.TB, g ...fault.Guard) { t.Cleanup(fault.Global.Disable(g...)) }
