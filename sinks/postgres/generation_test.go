package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// built begins a generation and makes its first commit.
func (d *database) built(t testing.TB, live projector.Checkpoint, generation int64, fs ...func(context.Context, *postgres.Tx) error) projector.Checkpoint {
	t.Helper()
	cp, err := d.sink.Begin(t.Context(), live, generation)
	must(t, err)
	next, err := commit(t, d.sink, cp, fs...)
	must(t, err)
	return next
}

// switched switches and gives both checkpoints as they are now.
func (d *database) switched(t testing.TB, from, to projector.Checkpoint) (retired, live projector.Checkpoint) {
	t.Helper()
	must(t, d.sink.Switch(t.Context(), from, to))
	return d.loaded(t, from.Generation), d.loaded(t, to.Generation)
}

func (d *database) loaded(t testing.TB, generation int64) projector.Checkpoint {
	t.Helper()
	cp, err := d.sink.Load(t.Context(), model, generation)
	must(t, err)
	return cp
}

// wantRebuildError checks that err is one, fatal, and says all of these.
func wantRebuildError(t testing.TB, s *postgres.Sink, err error, says ...string) {
	t.Helper()
	wantError(t, err, says...)
	if _, ok := errors.AsType[*projector.RebuildError](err); !ok {
		t.Errorf("no RebuildError: %v", err)
	}
	wantClass(t, s, err, projector.Fatal)
}

func line(a ...any) string { return strings.TrimSuffix(fmt.Sprintln(a...), "\n") }

var two = []count{{"open", 1}, {"done", 1}}

func TestBegin(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	cp, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	equal(t, "checkpoint", line(cp.Term, cp.Sequence, cp.Owner, cp.Generation, cp.Place, cp.Phase), "1 0 test 2 model$2 building")
	again, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	equal(t, "again", fmt.Sprint(again), fmt.Sprint(cp))
	cp, err = commit(t, d.sink, cp, counts.Create, add(counts, nil, two))
	must(t, err)
	equal(t, "building", d.rows(t, "select status, n from model$2.counts order by 1"), "done 1\nopen 1")
	again, err = d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	equal(t, "sequence", again.Sequence, cp.Sequence)
	// Only the term counts, since commits of the live generation go on.
	_, err = commit(t, d.sink, live, add(counts, nil, one))
	must(t, err)
	_, err = d.sink.Begin(t.Context(), live, 3)
	must(t, err)
	equal(t, "table", d.rows(t, "select generation, phase, place, sequence from tidemark.checkpoints order by 1"),
		"1 live model 2\n2 building model$2 1\n3 building model$3 0")

	all, err := d.sink.Acquire(t.Context(), model, "next")
	must(t, err)
	var text []string
	for _, cp := range all {
		text = append(text, line(cp.Generation, cp.Term, cp.Owner, cp.Sequence, cp.Phase))
	}
	equal(t, "acquired", strings.Join(text, ", "), "1 2 next 2 live, 2 2 next 1 building, 3 2 next 0 building")
	_, err = d.sink.Begin(t.Context(), live, 4)
	wantFenced(t, err)
	_, err = d.sink.Begin(t.Context(), live, 2)
	wantFenced(t, err)
	_, err = commit(t, d.sink, cp, add(counts, nil, one))
	wantFenced(t, err)
}

// Acquire waits behind a Begin, and takes the generation that it adds.
func TestAcquireDuringBegin(t *testing.T) {
	d := newDatabase(t)
	d.acquired(t, counts.Create)
	tx, err := d.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), `select from tidemark.checkpoints where generation = 1 for update`)
	must(t, err)
	_, err = tx.Exec(t.Context(), `insert into tidemark.checkpoints
select projection, 2, term, 0, owner, 'building', 'model$2', replace(replace(body, '"live"', '"building"'), '"generation":{"$numberLong":"1"}', '"generation":{"$numberLong":"2"}')
from tidemark.checkpoints`)
	must(t, err)
	result := make(chan error, 1)
	go func() {
		all, err := d.sink.Acquire(t.Context(), model, "next")
		if err == nil && (len(all) != 2 || all[1].Term != 2) {
			err = fmt.Errorf("acquired %v", all)
		}
		result <- err
	}()
	waitFor(t, d, `select exists (select from pg_locks where not granted)`)
	must(t, tx.Commit(t.Context()))
	must(t, <-result)
	equal(t, "terms", d.text(t, "select string_agg(term::text, ' ') from tidemark.checkpoints"), "2 2")
}

func TestSwitch(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create, add(counts, nil, one))
	next := d.built(t, live, 2, counts.Create, add(counts, nil, two))
	next.Version = 7
	retired, now := d.switched(t, live, next)
	equal(t, "retired", line(retired.Generation, retired.Place, retired.Phase, retired.Sequence), line(1, "model$1", projector.Retired, live.Sequence+1))
	equal(t, "live", line(now.Generation, now.Place, now.Phase, now.Sequence, now.Version), line(2, model, projector.Live, next.Sequence+1, 7))
	equal(t, "rows", d.rows(t, "select status, n from model.counts order by 1"), "done 1\nopen 1")
	equal(t, "old rows", d.rows(t, "select status, n from model$1.counts order by 1"), "open 1")
	equal(t, "table", d.rows(t, "select generation, phase, place from tidemark.checkpoints order by 1"), "1 retired model$1\n2 live model")

	// Both go on, on connections that have prepared statements of before; and back.
	for range 3 {
		var err error
		retired, err = commit(t, d.sink, retired, add(counts, nil, one))
		must(t, err)
		now, err = commit(t, d.sink, now, add(counts, nil, one))
		must(t, err)
	}
	now, retired = d.switched(t, now, retired)
	equal(t, "rows", d.rows(t, "select status, n from model.counts order by 1"), "open 4")
	equal(t, "rows of 2", d.rows(t, "select status, n from model$2.counts order by 1"), "done 1\nopen 4")
	_, err := commit(t, d.sink, retired, add(counts, nil, one))
	must(t, err)
	_, err = commit(t, d.sink, now, add(counts, nil, one))
	must(t, err)
}

// Each checkpoint of a switch is compared, by term and by sequence.
func TestSwitchFenced(t *testing.T) {
	for name, c := range map[string]struct {
		guard fault.Guard
		spoil func(t *testing.T, d *database, from, to projector.Checkpoint)
	}{
		"term": {fault.FenceTerm, func(t *testing.T, d *database, _, _ projector.Checkpoint) {
			_, err := d.sink.Acquire(t.Context(), model, "next")
			must(t, err)
		}},
		"owner": {fault.FenceTerm, func(t *testing.T, d *database, _, _ projector.Checkpoint) {
			d.exec(t, "update tidemark.checkpoints set owner = 'another' where generation = 2")
		}},
		"sequence of from": {fault.FenceSequence, func(t *testing.T, d *database, from, _ projector.Checkpoint) {
			_, err := commit(t, d.sink, from, add(counts, nil, one))
			must(t, err)
		}},
		"sequence of to": {fault.FenceSequence, func(t *testing.T, d *database, _, to projector.Checkpoint) {
			_, err := commit(t, d.sink, to, add(counts, nil, one))
			must(t, err)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			withAndWithout(t, c.guard, func(t *testing.T) bool {
				d := newDatabase(t)
				from := d.acquired(t, counts.Create)
				to := d.built(t, from, 2, counts.Create)
				c.spoil(t, d, from, to)
				before := d.rows(t, "select c::text from tidemark.checkpoints c order by 1")
				err := d.sink.Switch(t.Context(), from, to)
				if err != nil {
					wantFenced(t, err)
					equal(t, "checkpoints", d.rows(t, "select c::text from tidemark.checkpoints c order by 1"), before)
				}
				return err != nil
			})
		})
	}
	t.Run("gone", func(t *testing.T) {
		d := newDatabase(t)
		from := d.acquired(t, counts.Create)
		to := d.built(t, from, 2, counts.Create)
		must(t, d.sink.Discard(t.Context(), to))
		wantFenced(t, d.sink.Switch(t.Context(), from, to))
	})
	t.Run("repeated", func(t *testing.T) {
		d := newDatabase(t)
		from := d.acquired(t, counts.Create)
		to := d.built(t, from, 2, counts.Create)
		must(t, d.sink.Switch(t.Context(), from, to))
		wantFenced(t, d.sink.Switch(t.Context(), from, to))
	})
}

// What others have given to the tables outlives the switch, and a right that was revoked
// doesn't come back.
func TestSwitchCarriesOver(t *testing.T) {
	d := newDatabase(t)
	reader, other, owner := d.newRole(t), d.newRole(t), d.newRole(t)
	setup := func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, `create table events (id bigserial primary key, "Odd ""name" text); create view totals as select count(*) from counts; create table only_old ()`)
		return err
	}
	live := d.acquired(t, counts.Create, setup)
	for _, sql := range []string{
		"grant usage on schema model to " + reader + "; grant usage, create on schema model to " + other + " with grant option",
		"grant select on model.counts to " + reader,
		"grant select, insert on model.counts to " + other + " with grant option",
		"grant select on model.totals to public",
		`grant update ("Odd ""name") on model.events to ` + reader,
		"grant usage on sequence model.events_id_seq to " + reader,
		"alter default privileges in schema model grant select on tables to " + reader,
		"alter table model.counts owner to " + owner,
		"comment on schema model is 'it''s ours'",
		"comment on table model.counts is 'per \"status\"'",
		"comment on view model.totals is 'all'",
		`comment on column model.events."Odd ""name" is 'odd'`,
	} {
		d.exec(t, sql)
	}
	const given = `
select * from (
	select relname::text, relowner::regrole::text, grantee::regrole::text, privilege_type, is_grantable::text, '' as col
	from pg_class c, aclexplode(relacl) where relnamespace = 'SCHEMA'::regnamespace and grantee <> relowner
	union all
	select '', nspowner::regrole::text, grantee::regrole::text, privilege_type, is_grantable::text, ''
	from pg_namespace, aclexplode(nspacl) where oid = 'SCHEMA'::regnamespace and grantee <> nspowner
	union all
	select attrelid::regclass::text, '', grantee::regrole::text, privilege_type, is_grantable::text, attname
	from pg_attribute a join pg_class c on c.oid = attrelid, aclexplode(attacl) where relnamespace = 'SCHEMA'::regnamespace
	union all
	select relname, relowner::regrole::text, obj_description(oid, 'pg_class'), '', '', '' from pg_class where relnamespace = 'SCHEMA'::regnamespace and relkind in ('r', 'v')
	union all
	select '', obj_description('SCHEMA'::regnamespace, 'pg_namespace'), '', '', '', ''
	union all
	select relname, col_description(attrelid, attnum), '', '', '', attname
	from pg_attribute a join pg_class c on c.oid = attrelid where relnamespace = 'SCHEMA'::regnamespace and attnum > 0 and relkind = 'r'
	union all
	select defaclobjtype::text, defaclrole::regrole::text, grantee::regrole::text, privilege_type, '', ''
	from pg_default_acl, aclexplode(defaclacl) where defaclnamespace = 'SCHEMA'::regnamespace
) x where relname not in ('only_old', 'only_new') and col <> 'more' order by relname, x::text`
	of := func(schema string) string { return d.rows(t, strings.ReplaceAll(given, "SCHEMA", schema)) }
	setup2 := func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, `create table events (id bigserial primary key, "Odd ""name" text, more int); create view totals as select count(*) from counts; create table only_new ()`)
		return err
	}
	want := of("model")
	for _, s := range []string{"it's ours", "all", "odd", "per"} {
		if !strings.Contains(want, s) {
			t.Fatalf("the query does not see %q:\n%s", s, want)
		}
	}
	next := d.built(t, live, 2, counts.Create, setup2)
	retired, now := d.switched(t, live, next)
	got := of("model")
	equal(t, "what was given", got, want)

	d.exec(t, "revoke select on model.counts from "+reader)
	d.exec(t, "revoke update (\"Odd \"\"name\") on model.events from "+reader)
	d.exec(t, "comment on table model.counts is null")
	want = of("model")
	d.switched(t, now, retired)
	equal(t, "what was given, going back", of("model"), want)
}

// Indexes that people have made on the live tables are made on the new ones as well, before
// these are filled.
func TestIndexesCarryOver(t *testing.T) {
	d := newDatabase(t)
	const made = `select indexdef from pg_indexes where schemaname = 'model' order by indexname`
	live := d.acquired(t, orders.Create, put(orders, nil, someOrders(3, "new")), run("create table old (a int, b int)"), run("create index old_b on old (b)"))
	for _, sql := range []string{
		`create index "by ON total" on model.orders (total desc) where status <> 'USING x'`,
		"create unique index on model.orders (customer, lower(note))",
		"create index on model.old (a)",
		"create index on model.old ((a + b))",
	} {
		d.exec(t, sql)
	}
	want := d.rows(t, made)
	next := d.built(t, live, 2, orders.Create, run("create table old (b int)"), run("create index on old (b)"))
	d.switched(t, live, next)
	want = strings.Join(slices.DeleteFunc(strings.Split(want, "\n"), func(s string) bool { return strings.Contains(s, "model.old") }), "\n")
	got := strings.Join(slices.DeleteFunc(strings.Split(d.rows(t, made), "\n"), func(s string) bool { return strings.Contains(s, "model.old") }), "\n")
	equal(t, "indexes", got, want)
	equal(t, "indexes of the other", d.text(t, "select string_agg(indexdef, ' ') from pg_indexes where schemaname = 'model' and tablename = 'old'"),
		"CREATE INDEX old_b_idx ON model.old USING btree (b)")
}

// An index that the new table can't have is refused before anything is filled.
func TestIndexThatDoesNotFit(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, run("create table t (n int[])"))
	d.exec(t, "create index mine on model.t using gin (n)")
	begun, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	_, err = commit(t, d.sink, begun, run("create table t (n int)"))
	wantRebuildError(t, d.sink, err, "create index mine", "drop it there", "42704")
	d.exec(t, "drop index model.mine")
	_, err = commit(t, d.sink, begun, run("create table t (n int)"))
	must(t, err)
}

func (d *database) newRole(t testing.TB) string {
	t.Helper()
	name := fmt.Sprintf("tidemark_reader_%d", databases.Add(1))
	d.exec(t, fmt.Sprintf("create role %s login", name))
	t.Cleanup(func() { // before the database goes
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		_, err := d.Exec(ctx, fmt.Sprintf("reassign owned by %s to current_user; drop owned by %[1]s; drop role %[1]s", name))
		must(t, err)
	})
	return name
}

// A reader that polls, by a prepared statement, sees all of one generation and then all of
// the other, while both are committed to. A switch waits for no reader, and no reader for it.
func TestReadersDuringSwitch(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create, add(counts, nil, []count{{"a", 1}, {"b", 1}}))
	next := d.built(t, live, 2, counts.Create, add(counts, nil, []count{{"a", 100}, {"b", 100}}))
	reader := d.reader(t, pgx.ReadCommitted)
	equal(t, "sum before", sum(t, reader), "2")
	ctx, stop := context.WithCancel(t.Context())
	polled := make(chan error, 1)
	go func() { polled <- poll(ctx, d.Pool) }()
	for i := range 40 {
		if i == 20 {
			live, next = d.switched(t, live, next)
		}
		result := make(chan error, 1)
		go func() {
			result <- d.sink.Commit(t.Context(), next, following(next), add(counts, nil, []count{{"a", 1}, {"b", 1}}))
		}()
		must(t, d.sink.Commit(t.Context(), live, following(live), add(counts, nil, []count{{"a", 1}, {"b", 1}})))
		must(t, <-result)
		live, next = following(live), following(next)
	}
	stop()
	must(t, <-polled)
	equal(t, "sum after", d.text(t, countsN), "280")
}

// Transactions that were open during a switch, as PostgreSQL 15 has it: one that has read
// the model goes on reading the same tables; one that comes to it afterwards reads the new
// ones, as they were at its snapshot.
func TestOpenTransactionsDuringSwitch(t *testing.T) {
	for _, c := range []struct {
		level   pgx.TxIsoLevel
		read    bool
		want    string
		because string
	}{
		{pgx.ReadCommitted, true, "1", "it holds a lock on the old table, by which the name is not looked up again"},
		{pgx.ReadCommitted, false, "7", "each statement has a snapshot of its own"},
		{pgx.RepeatableRead, true, "1", "it holds a lock on the old table"},
		{pgx.RepeatableRead, false, "3", "the new table had this much at the snapshot"},
	} {
		t.Run(fmt.Sprintf("%s/%t", c.level, c.read), func(t *testing.T) {
			d := newDatabase(t)
			live := d.acquired(t, counts.Create, add(counts, nil, one))
			next := d.built(t, live, 2, counts.Create, add(counts, nil, []count{{"open", 3}}))
			reader := d.reader(t, c.level)
			if c.read {
				equal(t, "sum before", sum(t, reader), "1")
			} else {
				_, err := reader.Exec(t.Context(), "select 1")
				must(t, err)
			}
			next, err := commit(t, d.sink, next, add(counts, nil, []count{{"open", 4}}))
			must(t, err)
			d.switched(t, live, next)
			equal(t, "sum after, since "+c.because, sum(t, reader), c.want)
			must(t, reader.Rollback(t.Context()))
			equal(t, "sum in the next transaction", sum(t, d.reader(t, c.level)), "7")
		})
	}
}

// A statement looks up its tables one by one: the switch may come in between.
func TestJoinDuringSwitch(t *testing.T) {
	d := newDatabase(t)
	setup := func(generation int) func(context.Context, *postgres.Tx) error {
		return run(fmt.Sprintf("create table a as select %d as n; create table b as select %[1]d as n", generation))
	}
	live := d.acquired(t, setup(1))
	next := d.built(t, live, 2, setup(2))
	blocker := d.reader(t, pgx.ReadCommitted)
	_, err := blocker.Exec(t.Context(), "lock table model.b")
	must(t, err)
	read := make(chan string, 1)
	go func() {
		var s string
		if err := d.QueryRow(t.Context(), "select a.n || ' ' || b.n from model.a, model.b").Scan(&s); err != nil {
			s = err.Error()
		}
		read <- s
	}()
	waitFor(t, d, `select exists (select from pg_locks where not granted)`)
	d.switched(t, live, next)
	must(t, blocker.Rollback(t.Context()))
	equal(t, "generations", <-read, "1 2")
}

// reader begins a transaction on a connection.
func (d *database) reader(t *testing.T, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := d.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		if err := tx.Rollback(ctx); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
			t.Error(err)
		}
	})
	return tx
}

func sum(t *testing.T, tx pgx.Tx) (s string) {
	t.Helper()
	must(t, tx.QueryRow(t.Context(), "select sum(n)::text from model.counts").Scan(&s))
	return s
}

// poll reads until ctx ends: both rows have always the same n, below 100 at first and
// then above, and n never goes back.
func poll(ctx context.Context, pool *pgxpool.Pool) error {
	conn, err := pool.Acquire(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	defer conn.Release()
	if _, err := conn.Conn().Prepare(context.WithoutCancel(ctx), "poll", "select min(n), max(n), count(*) from model.counts"); err != nil {
		return err
	}
	var lowest, seen int64
	for first := true; ctx.Err() == nil; first = false {
		var least, most, rows int64
		if err := conn.QueryRow(context.WithoutCancel(ctx), "poll").Scan(&least, &most, &rows); err != nil {
			return err
		}
		if least != most || rows != 2 || least < seen {
			return fmt.Errorf("a reader saw %d rows from %d to %d after %d", rows, least, most, seen)
		}
		if seen = least; first {
			lowest = least
		}
	}
	if lowest >= 100 || seen < 100 {
		return fmt.Errorf("the reader saw %d at first and %d at last, and so not both generations", lowest, seen)
	}
	return nil
}

// Whoever changes a schema's grants in the same instant costs a retry, after which the
// grant is carried over.
func TestGrantDuringSwitch(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	next := d.built(t, live, 2, counts.Create)
	granting := d.reader(t, pgx.ReadCommitted)
	_, err := granting.Exec(t.Context(), "grant usage on schema model to public")
	must(t, err)
	result := make(chan error, 1)
	go func() { result <- d.sink.Switch(t.Context(), live, next) }()
	waitFor(t, d, `select exists (select from pg_locks where not granted)`)
	must(t, granting.Commit(t.Context()))
	err = <-result
	wantError(t, err, "tuple concurrently updated")
	wantClass(t, d.sink, err, projector.Transient)
	must(t, d.sink.Switch(t.Context(), live, next))
	equal(t, "usage", d.text(t, "select count(*) from pg_namespace, aclexplode(nspacl) where nspname = 'model' and grantee = 0"), "1")
}

// An owner that is frozen in a commit of the generation that is being built doesn't hold
// up the next one either.
func frozenGeneration(t *testing.T) bool {
	t.Parallel()
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	next := d.built(t, live, 2, counts.Create)
	thaw, err := d.freeze(t.Context(), next)
	must(t, err)
	defer thaw()
	all, err := d.sink.Acquire(soon(t, 4*time.Second), model, "next")
	return err == nil && len(all) == 2 && all[1].Term == next.Term+1
}

// Commits of two generations don't wait for each other.
func TestCommitsBesideEachOther(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	next := d.built(t, live, 2, counts.Create)
	must(t, d.sink.Commit(t.Context(), live, following(live), func(ctx context.Context, tx *postgres.Tx) error {
		if _, err := tx.Exec(ctx, "insert into counts values ('a', 1, 1)"); err != nil {
			return err
		}
		return d.sink.Commit(soon(t, 5*time.Second), next, following(next), add(counts, nil, one))
	}))
}

// What would be lost, or in the way at the end, is refused at the beginning, by name.
func TestBeginRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		make string
		says []string
	}{
		"view":               {"create view public.upon as select * from model.counts", []string{"view public.upon"}},
		"view upon a view":   {"create schema s; create view model.v as select 1 as one; create view s.w as select one from model.v", []string{"view s.w", "view v"}},
		"materialized view":  {"create materialized view public.upon as select * from model.counts", []string{"materialized view public.upon"}},
		"view inside":        {"create view model.inside as select * from model.counts", []string{"view inside", "Setup"}},
		"foreign key":        {"create table public.far (s text references model.counts)", []string{"table constraint far_s_fkey on public.far"}},
		"row type":           {"create function public.f(model.counts) returns int language sql as 'select 1'", []string{"function public.f(model.counts)"}},
		"function body":      {"create function public.f() returns bigint language sql begin atomic select sum(n) from model.counts; end", []string{"function public.f()"}},
		"column of its type": {"create table public.far (c model.counts)", []string{"table column public.far.c"}},
		"partition":          {"create table public.far () inherits (model.counts)", []string{"table public.far"}},
		"rule":               {"create table public.far (s text); create rule r as on insert to public.far do also select * from model.counts", []string{"table public.far"}},
		"trigger": {
			"create function public.g() returns trigger language plpgsql as 'begin return new; end'; create trigger tg before insert on model.counts for each row execute function public.g()",
			[]string{"trigger tg on counts"},
		},
		"row security": {
			"alter table model.counts enable row level security; create policy mine on model.counts using (true)",
			[]string{"row level security of counts", "policy mine on counts"},
		},
		"publication":               {"create publication p for table model.counts", []string{"publication relation model.counts in publication p"}},
		"publication of the schema": {"create publication p for tables in schema model", []string{"publication namespace model in publication p"}},
		"two": {
			"create view public.upon as select * from model.counts; create view public.upon2 as select * from public.upon; create view public.upon3 as select * from model.counts",
			[]string{"view public.upon, view public.upon3"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			live := d.acquired(t, counts.Create)
			next := d.built(t, live, 2, counts.Create) // before it is there
			d.exec(t, c.make)
			_, err := d.sink.Begin(t.Context(), live, 3)
			wantRebuildError(t, d.sink, err, append(c.says, "projector.Reset", `"model"`)...)
			wantRebuildError(t, d.sink, d.sink.Switch(t.Context(), live, next), c.says...)
			equal(t, "generations", d.text(t, "select count(*) from tidemark.checkpoints"), "2")
		})
	}
}

// What Setup makes, it makes again.
func TestBeginAcceptsSetups(t *testing.T) {
	d := newDatabase(t)
	setup := func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, "create view inside as select * from counts; alter table counts enable row level security; create policy mine on counts using (true)")
		return err
	}
	live := d.acquired(t, counts.Create, setup)
	next := d.built(t, live, 2, counts.Create, setup)
	retired, now := d.switched(t, live, next)
	d.exec(t, "create function public.f() returns bigint language sql as 'select sum(n) from model.counts'")
	d.exec(t, "create temp view mine as select * from model.counts")
	d.exec(t, "create view model.late as select 1; create view model$1.late as select 1") // by hand, but in both
	d.switched(t, now, retired)
}

// Without the right to create schemas there is no shadow, and the error says what else.
func TestBeginWithoutTheRight(t *testing.T) {
	d := newDatabase(t)
	d.acquired(t, counts.Create)
	grants := "grant usage on schema tidemark to %s; grant select, insert, update, delete on tidemark.checkpoints to %[1]s"
	config := d.role(t, grants)
	sink := postgres.New(d.pool(t, config))
	live, err := acquire(t.Context(), sink, model, "me")
	must(t, err)
	_, err = sink.Begin(t.Context(), live, 2)
	wantRebuildError(t, sink, err, "projector.Reset", "grant create on database")
	d.exec(t, err.Error()[strings.Index(err.Error(), "grant create"):])
	_, err = sink.Begin(t.Context(), live, 2)
	wantRebuildError(t, sink, err, "projector.Reset", "alter schema \"model\" owner to")
	d.exec(t, err.Error()[strings.Index(err.Error(), "alter schema"):])
	next, err := sink.Begin(t.Context(), live, 2)
	must(t, err)
	next, err = commit(t, sink, next, counts.Create)
	must(t, err)
	must(t, sink.Switch(t.Context(), live, next))
	must(t, sink.Discard(t.Context(), func() projector.Checkpoint {
		cp, err := sink.Load(t.Context(), model, 1)
		must(t, err)
		return cp
	}()))
}

// A first load is a rebuild whose old model is not there, or an empty schema.
func TestSwitchFromNothing(t *testing.T) {
	for name, prepare := range map[string]string{
		"nothing":  "",
		"a schema": "create schema model; comment on schema model is 'ours'; grant usage on schema model to public",
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			if prepare != "" {
				d.exec(t, prepare)
			}
			live, err := acquire(t.Context(), d.sink, model, "me")
			must(t, err)
			next := d.built(t, live, 2, counts.Create, add(counts, nil, one))
			must(t, d.sink.Switch(t.Context(), live, next))
			equal(t, "sum", d.text(t, countsN), "1")
			equal(t, "checkpoints", d.rows(t, "select generation, phase, place from tidemark.checkpoints"), "2 live model")
			equal(t, "schemas", d.text(t, "select count(*) from pg_namespace where nspname like 'model%'"), "1")
			if prepare != "" {
				equal(t, "comment", d.text(t, "obj_description('model'::regnamespace, 'pg_namespace')"), "ours")
				equal(t, "usage", d.text(t, "select count(*) from pg_namespace, aclexplode(nspacl) where nspname = 'model' and grantee = 0"), "1")
			}
			again := d.loaded(t, 2)
			equal(t, "phase", again.Phase, projector.Live)
			_, err = commit(t, d.sink, again, add(counts, nil, one))
			must(t, err)
			equal(t, "generation 1", d.loaded(t, 1).Term, 0)
		})
	}
	t.Run("a table", func(t *testing.T) {
		d := newDatabase(t)
		live, err := acquire(t.Context(), d.sink, model, "me")
		must(t, err)
		next := d.built(t, live, 2, counts.Create)
		d.exec(t, "create schema model; create table model.counts ()")
		_, err = d.sink.Begin(t.Context(), live, 3)
		wantRebuildError(t, d.sink, err, `schema "model" is there`, "projector.Reset")
		wantRebuildError(t, d.sink, d.sink.Switch(t.Context(), live, next), `schema "model" is there`)
	})
}

func TestDiscard(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	must(t, d.sink.Discard(t.Context(), projector.Checkpoint{Projection: "unknown", Generation: 1}))
	begun, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	must(t, d.sink.Discard(t.Context(), begun)) // it has no schema yet
	equal(t, "generation 2", d.loaded(t, 2).Term, 0)
	next := d.built(t, live, 3, counts.Create, add(counts, nil, one))
	_, err = commit(t, d.sink, next, add(counts, nil, one))
	must(t, err)
	must(t, d.sink.Discard(t.Context(), next)) // whatever the sequence
	must(t, d.sink.Discard(t.Context(), next))
	equal(t, "schemas", d.text(t, "select string_agg(nspname, ' ') from pg_namespace where nspname like 'model%'"), model)
	err = d.sink.Discard(t.Context(), live)
	wantError(t, err, "live")
	wantClass(t, d.sink, err, projector.Fatal)

	withAndWithout(t, fault.FenceTerm, func(t *testing.T) bool {
		d := newDatabase(t)
		live := d.acquired(t, counts.Create)
		next := d.built(t, live, 2, counts.Create)
		_, err := d.sink.Acquire(t.Context(), model, "next")
		must(t, err)
		if err = d.sink.Discard(t.Context(), next); err != nil {
			wantFenced(t, err)
		}
		return err != nil
	})
}

// A reader of the retired generation holds up its removal for a while only, and that is
// no failure for good.
func TestDiscardBehindReader(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	next := d.built(t, live, 2, counts.Create)
	reader, err := d.Pool.Begin(t.Context())
	must(t, err)
	_, err = reader.Exec(t.Context(), "select from model$2.counts")
	must(t, err)
	err = d.sink.Discard(soon(t, 20*time.Second), next)
	wantError(t, err, "55P03")
	wantClass(t, d.sink, err, projector.Transient)
	must(t, reader.Rollback(t.Context()))
	must(t, d.sink.Discard(t.Context(), next))
}

// A schema that is there without a checkpoint is dropped where all of it is ours.
func TestLeftover(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create)
	d.built(t, live, 2, counts.Create, add(counts, nil, one))
	d.exec(t, "delete from tidemark.checkpoints where generation = 2")
	d.exec(t, "create view public.upon as select * from model$2.counts")
	_, err := d.sink.Begin(t.Context(), live, 2)
	wantRebuildError(t, d.sink, err, "view public.upon", `drop schema "model$2" cascade`)
	d.exec(t, "drop view public.upon")
	_, err = d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	equal(t, "schemas", d.text(t, "select string_agg(nspname, ' ') from pg_namespace where nspname like 'model%'"), model)
}
