package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

type handler = func(context.Context, *postgres.Tx) error

// run is a handler that executes a text at once.
func run(sql string, args ...any) handler {
	return func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	}
}

// Queued and immediate statements happen in the order in which they were written.
func TestOrder(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, run("create table log (n serial, what text); create table seen (what text)"))
	_, err := commit(t, d.sink, cp, func(ctx context.Context, tx *postgres.Tx) error {
		tx.Queue("insert into log (what) values ($1)", "queued 1")
		tx.Queue("insert into log (what) values ($1)", "queued 2")
		if _, err := tx.Exec(ctx, "insert into log (what) values (@what)", pgx.NamedArgs{"what": "exec"}); err != nil {
			return err
		}
		tx.Queue("insert into log (what) values (@what)", pgx.NamedArgs{"what": "queued 3"})
		n, err := tx.CopyFrom(ctx, pgx.Identifier{"log"}, []string{"what"}, pgx.CopyFromRows([][]any{{"copy 1"}, {"copy 2"}}))
		if err != nil || n != 2 {
			return fmt.Errorf("copied %d: %w", n, err)
		}
		tx.Queue("insert into log (what) values ($1)", "queued 4")
		rows, err := tx.Query(ctx, "select what from log where n > $1 order by n", 0)
		if err != nil {
			return err
		}
		seen, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		var last string
		if err := tx.QueryRow(ctx, "select what from log order by n desc limit 1").Scan(&last); err != nil {
			return err
		}
		tx.Queue("insert into seen values ($1)", strings.Join(append(seen, last), ", "))
		tx.Queue("insert into log (what) values ('last')")
		return nil
	})
	must(t, err)
	equal(t, "seen", d.text(t, "select what from model.seen"), "queued 1, queued 2, exec, queued 3, copy 1, copy 2, queued 4, queued 4")
	equal(t, "last", d.text(t, "select what from model.log order by n desc limit 1"), "last")
}

// Handlers that can't be committed fail, say why, and leave nothing.
func TestHandlerFaults(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, run("create table t (n int primary key, v text)"))
	boom := errors.New("boom")
	var leaked *postgres.Tx
	for _, c := range []struct {
		name  string
		f     handler
		says  string
		class projector.Class
		is    error
	}{
		{"own error", all(queue("insert into t values ($1)", 1), func(context.Context, *postgres.Tx) error { return fmt.Errorf("why: %w", boom) }), "why: boom", projector.Poison, boom},
		{"poison in a queue", all(queue("insert into t values ($1)", 1), queue("insert into t values ($1)", 1), queue("insert into t values ($1)", 2)), "23505", projector.Poison, nil},
		{"poison now", all(run("insert into t values (1)"), run("insert into t values (1)")), "23505", projector.Poison, nil},
		{"wrapped", func(ctx context.Context, tx *postgres.Tx) error {
			return fmt.Errorf("my handler: %w", run("insert into missing values (1)")(ctx, tx))
		}, "my handler: ERROR: relation \"missing\" does not exist", projector.Fatal, nil},
		{"no such column", queue("insert into t (x) values ($1)", 1), "42703", projector.Fatal, nil},
		{"swallowed", func(ctx context.Context, tx *postgres.Tx) error {
			_ = run("insert into t values (1), (1)")(ctx, tx)
			return nil
		}, "the handler returned no error", projector.Poison, nil},
		{"swallowed deadlock", func(ctx context.Context, tx *postgres.Tx) error {
			_ = run("do $$ begin raise sqlstate '40P01'; end $$")(ctx, tx)
			return nil
		}, "the handler returned no error", projector.Transient, nil},
		{"hidden deadlock", func(ctx context.Context, tx *postgres.Tx) error {
			return fmt.Errorf("hidden: %v", run("do $$ begin raise sqlstate '40P01'; end $$")(ctx, tx))
		}, "hidden: ERROR", projector.Transient, nil},
		{"deadlock mended, then another error", func(ctx context.Context, tx *postgres.Tx) error {
			return errors.Join(run("savepoint s")(ctx, tx), ignore(run("do $$ begin raise sqlstate '40P01'; end $$")(ctx, tx)),
				run("rollback to s")(ctx, tx), boom)
		}, "boom", projector.Poison, boom},
		{"commit", run("commit"), "COMMIT is refused", projector.Fatal, nil},
		{"queued commit", all(queue("insert into t values (1)"), queue("-- done\n/* */ ; COMMIT and chain")), "COMMIT is refused", projector.Fatal, nil},
		{"rollback", run("  Rollback work"), "ROLLBACK is refused", projector.Fatal, nil},
		{"end", queue("end"), "END is refused", projector.Fatal, nil},
		{"begin", queue("begin"), "BEGIN is refused", projector.Fatal, nil},
		{"start", queue("start  transaction"), "START is refused", projector.Fatal, nil},
		{"prepare", queue("prepare transaction 'x'"), "PREPARE is refused", projector.Fatal, nil},
		{"open rows", func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.Query(ctx, "select generate_series(1, 10)")
			return err
		}, "rows of a query are still open", projector.Poison, nil},
		{"open rows before the next", func(ctx context.Context, tx *postgres.Tx) error {
			if _, err := tx.Query(ctx, "select generate_series(1, 10)"); err != nil {
				return err
			}
			return tx.QueryRow(ctx, "select 1").Scan(nil)
		}, "rows of a query are still open", projector.Poison, nil},
		{"wrong argument", queue("insert into t (v) values ($1)", make(chan string)), "argument 1: a Go chan string can't be encoded as text", projector.Poison, nil},
		{"wrong argument, ignored", func(ctx context.Context, tx *postgres.Tx) error {
			tx.Queue("insert into t (v) values ($1)", make(chan string))
			_ = run("insert into t values (7)")(ctx, tx)
			return nil
		}, "argument 1: a Go chan string", projector.Poison, nil},
		{"wrong argument now, ignored", func(ctx context.Context, tx *postgres.Tx) error {
			_ = run("insert into t values ($1)", []string{"a secret"})(ctx, tx)
			return nil
		}, "argument 1: a Go []string can't be encoded as int4", projector.Poison, nil},
		{"wrong argument in a query", func(ctx context.Context, tx *postgres.Tx) error {
			return tx.QueryRow(ctx, "select n from t where n = $1", []string{"a secret"}).Scan(nil)
		}, "argument 1: a Go []string can't be encoded as int4", projector.Poison, nil},
		{"no rows", func(ctx context.Context, tx *postgres.Tx) error {
			return tx.QueryRow(ctx, "select n from t").Scan(nil)
		}, "no rows", projector.Poison, pgx.ErrNoRows},
		{"too few arguments", queue("insert into t values ($1, $2)", 1), "it has 2 parameters, and 1 arguments", projector.Poison, nil},
		{"division", run("select 1/0"), "22012", projector.Poison, nil},
		{"leak", func(_ context.Context, tx *postgres.Tx) error {
			leaked = tx
			return boom
		}, "boom", projector.Poison, boom},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := commit(t, d.sink, cp, c.f)
			wantError(t, err, c.says)
			wantClass(t, d.sink, err, c.class)
			if strings.Contains(err.Error(), "a secret") {
				t.Errorf("a value is in the error: %v", err)
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v is lost in %v", c.is, err)
			}
			equal(t, "rows", d.text(t, "select count(*) from model.t"), "0")
			stored, err := d.sink.Load(t.Context(), model, 1)
			must(t, err)
			equal(t, "sequence", stored.Sequence, cp.Sequence)
		})
	}
	_, err := leaked.Exec(t.Context(), "select 1")
	wantError(t, err, "the transaction is over")
	leaked.Queue("insert into t values (1)")
	must(t, d.sink.Try(t.Context(), cp, all(run("savepoint s"), run("insert into t values (1)"), run("rollback to s"), queue("release savepoint s"))))
}

func ignore(error) error { return nil }

// A script that ends the transaction is noticed, with and without another begun.
func TestScriptEndsTransaction(t *testing.T) {
	for _, script := range []string{
		"insert into t values (1); commit",
		"insert into t values (1); commit; begin",
		"insert into t values (1); rollback; begin; insert into model.t values (2)",
	} {
		for _, after := range []handler{all(), queue("insert into t values ($1)", 3), run("insert into t values (4)")} {
			d := newDatabase(t)
			cp := d.acquired(t, run("create table t (n int)"))
			_, err := commit(t, d.sink, cp, run(script), after)
			wantError(t, err, "the handler has ended the transaction by itself")
			wantClass(t, d.sink, err, projector.Fatal)
		}
	}
}

// Nothing but the model's own schema is hit by an unqualified name.
func TestSearchPath(t *testing.T) {
	d := newDatabase(t)
	d.exec(t, "create table public.counts (status text, n int); create table public.others (n int)")
	one := postgres.New(d.pool(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "create temp table counts (status text, n int)")
			return err
		}
	}))
	cp := d.acquired(t, run("create table counts (status text, n int)"))
	cp, err := commit(t, one, cp, queue("insert into counts values ($1, $2)", "a", 1), run("insert into counts values ('b', 2)"))
	must(t, err)
	equal(t, "rows", d.text(t, "select count(*) from model.counts"), "2")
	_, err = commit(t, one, cp, queue("insert into others values ($1)", 1))
	wantError(t, err, "42P01")
	_, err = commit(t, one, cp, queue("insert into public.others values ($1)", 1))
	must(t, err)
	equal(t, "rows", d.text(t, "select count(*) from public.others"), "1")
}

// The same text in two models, whose tables have other types, on one connection; and
// in two generations of one model.
func TestStatementsOfGenerations(t *testing.T) {
	d := newDatabase(t)
	sink := postgres.New(d.pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 }))
	const insert, read = "insert into t values ($1)", "select v from t where v = $1"
	write := func(v any) handler {
		return func(ctx context.Context, tx *postgres.Tx) error {
			tx.Queue(insert, v)
			if _, err := tx.Exec(ctx, insert, v); err != nil {
				return err
			}
			rows, err := tx.Query(ctx, read, v)
			if err != nil {
				return err
			}
			got, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (any, error) {
				v, err := r.Values()
				return v[0], err
			})
			if err == nil && (len(got) < 2 || got[0] != v) {
				err = fmt.Errorf("read %v, want %v twice", got, v)
			}
			return err
		}
	}
	models := map[string]projector.Checkpoint{}
	start := func(name, typ string) {
		cp, err := acquire(t.Context(), sink, name, "me")
		must(t, err)
		models[name], err = commit(t, sink, cp, run("create table t (v "+typ+")"))
		must(t, err)
	}
	start("ints", "int")
	start("texts", "text")
	shadow, err := sink.Begin(t.Context(), models["ints"], 2)
	must(t, err)
	models["shadow"], err = commit(t, sink, shadow, run("create table t (v bool)"))
	must(t, err)
	for range 2 {
		for name, v := range map[string]any{"ints": int32(7), "texts": "a", "shadow": true} {
			models[name], err = commit(t, sink, models[name], write(v))
			must(t, err)
		}
	}
	// Each goes on under the other's name.
	must(t, sink.Switch(t.Context(), models["ints"], models["shadow"]))
	for generation, v := range map[int64]any{1: int32(7), 2: true} {
		cp, err := sink.Load(t.Context(), "ints", generation)
		must(t, err)
		_, err = commit(t, sink, cp, write(v))
		must(t, err)
	}
	equal(t, "old rows", d.text(t, "select count(*) from ints$1.t"), "6")
	equal(t, "rows", d.text(t, "select count(*) from ints.t"), "6")
}

// A table that was altered under a prepared statement costs one retry.
func TestAlteredTable(t *testing.T) {
	for _, c := range []struct{ name, alter string }{
		{"type", "alter table model.t add x text"},
		{"deallocated", "select 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDatabase(t)
			pool := d.pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
			sink := postgres.New(pool)
			cp := d.acquired(t, run("create table t (n int)"))
			f := func(ctx context.Context, tx *postgres.Tx) error {
				tx.Queue("insert into t values ($1)", 1)
				rows, err := tx.Query(ctx, "select * from t where n = $1", 1)
				if err != nil {
					return err
				}
				_, err = pgx.CollectRows(rows, pgx.RowToMap)
				return err
			}
			cp, err := commit(t, sink, cp, f)
			must(t, err)
			if c.name == "type" {
				d.exec(t, c.alter)
			} else {
				_, err := pool.Exec(t.Context(), "deallocate all")
				must(t, err)
			}
			for attempt := 1; ; attempt++ {
				if _, err = commit(t, sink, cp, f); err == nil {
					equal(t, "attempts", attempt, 2)
					return
				}
				wantClass(t, sink, err, projector.Transient)
				if attempt > 3 {
					t.Fatal(err)
				}
			}
		})
	}
}

// A handler that builds its texts does not fill the server with them.
func TestManyStatements(t *testing.T) {
	d := newDatabase(t)
	pool := d.pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	sink := postgres.New(pool)
	cp := d.acquired(t, run("create table t (n int)"))
	for range 2 {
		var err error
		cp, err = commit(t, sink, cp, func(_ context.Context, tx *postgres.Tx) error {
			for i := range 600 {
				tx.Queue(fmt.Sprintf("insert into t values ($1 + %d)", i), 1)
			}
			return nil
		})
		must(t, err)
	}
	equal(t, "rows", d.text(t, "select count(*) from model.t"), "1200")
	var n int
	must(t, pool.QueryRow(t.Context(), "select count(*) from pg_prepared_statements").Scan(&n))
	if n > 260 {
		t.Errorf("%d statements are left on the server", n)
	}
}

// Two projections whose handlers lock a common table the wrong way round: one of them
// gets a deadlock, which is worth a retry, and in the end both are applied.
func TestDeadlock(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	d.exec(t, "create table public.common (n int primary key, v int); insert into public.common values (1, 0), (2, 0)")
	var wg sync.WaitGroup
	gate := map[bool]chan struct{}{true: make(chan struct{}), false: make(chan struct{})}
	var once sync.Map
	retries := make(chan struct{}, 10)
	for _, forward := range []bool{true, false} {
		wg.Go(func() {
			name := fmt.Sprint("deadlock_", forward)
			cp, err := acquire(t.Context(), d.sink, name, "me")
			if err != nil {
				t.Error(err)
				return
			}
			first, second := 1, 2
			if !forward {
				first, second = 2, 1
			}
			const update = "update public.common set v = v + 1 where n = $1"
			for {
				_, err := commit(t, d.sink, cp, run(update, first), func(context.Context, *postgres.Tx) error {
					if _, met := once.LoadOrStore(forward, true); !met {
						close(gate[forward])
						<-gate[!forward]
					}
					return nil
				}, queue(update, second))
				if err == nil {
					return
				}
				if d.sink.Classify(err) != projector.Transient || !strings.Contains(err.Error(), "40P01") {
					t.Errorf("error is %v", err)
					return
				}
				retries <- struct{}{}
			}
		})
	}
	wg.Wait()
	if len(retries) == 0 { // a retry can meet the other one's once more
		t.Error("there was no deadlock")
	}
	equal(t, "sum", d.text(t, "select sum(v) from public.common"), "4")
}
