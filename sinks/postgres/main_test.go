package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func TestMain(m *testing.M) {
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

// database is a database of the test's own.
type database struct {
	*pgxpool.Pool
	sink *postgres.Sink
	dsn  string
}

var databases atomic.Int64

func newDatabase(t testing.TB, opts ...postgres.Option) *database {
	t.Helper()
	dsn, err := serve.Postgres(t.Context())
	must(t, err)
	admin, err := pgx.Connect(t.Context(), dsn)
	must(t, err)
	defer func() { must(t, admin.Close(t.Context())) }()
	name := fmt.Sprintf("tidemark_test_%d_%d", os.Getpid(), databases.Add(1))
	_, err = admin.Exec(t.Context(), "create database "+name)
	must(t, err)
	config, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	config.ConnConfig.Database = name
	config.MaxConns = 16
	d := &database{dsn: dsn}
	d.Pool, err = pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	d.sink = postgres.New(d.Pool, opts...)
	t.Cleanup(func() {
		d.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		admin, err := pgx.Connect(ctx, dsn)
		must(t, err)
		_, err = admin.Exec(ctx, "drop database "+name+" with (force)")
		must(t, err)
		must(t, admin.Close(ctx))
	})
	return d
}

// pool opens another pool to the same database, changed by f.
func (d *database) pool(t testing.TB, f func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config := d.Config()
	f(config)
	p, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

// through sends a pool's connections through f.
func through(f func(net.Conn) net.Conn) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return f(conn), nil
		}
	}
}

// text runs a query of one value, as text.
func (d *database) text(t testing.TB, sql string, args ...any) string {
	t.Helper()
	var s *string
	must(t, d.QueryRow(t.Context(), "select ("+sql+")::text", args...).Scan(&s))
	if s == nil {
		return "<null>"
	}
	return *s
}

// rows is a query's result, a line each.
func (d *database) rows(t testing.TB, sql string) string {
	t.Helper()
	rows, err := d.Query(t.Context(), sql)
	must(t, err)
	lines, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (string, error) {
		v, err := r.Values()
		return strings.TrimSuffix(fmt.Sprintln(v...), "\n"), err
	})
	must(t, err)
	return strings.Join(lines, "\n")
}

func (d *database) exec(t testing.TB, sql string) {
	t.Helper()
	_, err := d.Exec(t.Context(), sql)
	must(t, err)
}

// acquired takes the term, and commits setup first where nothing is committed yet.
func (d *database) acquired(t testing.TB, setup ...func(context.Context, *postgres.Tx) error) projector.Checkpoint {
	t.Helper()
	cp, err := acquire(t.Context(), d.sink, model, "test")
	must(t, err)
	if cp.Sequence > 0 {
		return cp
	}
	next, err := commit(t, d.sink, cp, setup...)
	must(t, err)
	return next
}

// acquire takes the term, and gives the live generation.
func acquire(ctx context.Context, s *postgres.Sink, projection, owner string) (projector.Checkpoint, error) {
	all, err := s.Acquire(ctx, projection, owner)
	for _, cp := range all {
		if cp.Phase == projector.Live {
			return cp, err
		}
	}
	return projector.Checkpoint{}, err
}

// commit applies fs in the commit after prev.
func commit(t testing.TB, s *postgres.Sink, prev projector.Checkpoint, fs ...func(context.Context, *postgres.Tx) error) (projector.Checkpoint, error) {
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

func all(fs ...func(context.Context, *postgres.Tx) error) func(context.Context, *postgres.Tx) error {
	return func(ctx context.Context, tx *postgres.Tx) error {
		for _, f := range fs {
			if err := f(ctx, tx); err != nil {
				return err
			}
		}
		return nil
	}
}

// queue is a handler that queues one statement.
func queue(sql string, args ...any) func(context.Context, *postgres.Tx) error {
	return func(_ context.Context, tx *postgres.Tx) error {
		tx.Queue(sql, args...)
		return nil
	}
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

func wantClass(t testing.TB, s *postgres.Sink, err error, want projector.Class) {
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
