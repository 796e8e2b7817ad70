package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func TestAcquireNew(t *testing.T) {
	d := newDatabase(t)
	unknown, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "term of an unknown projection", unknown.Term, 0)
	equal(t, "load has made the store", d.text(t, "select to_regclass('tidemark.checkpoints')"), "<null>")
	cp, err := acquire(t.Context(), d.sink, model, "me")
	must(t, err)
	want := projector.Checkpoint{
		Term: 1, Owner: "me", Format: projector.CheckpointFormat, Projection: model,
		Generation: 1, Place: model, Phase: projector.Live,
	}
	if diff := cmp.Diff(want, cp, cmpopts.EquateEmpty(), cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("first checkpoint: %s", diff)
	}
	unknown, err = d.sink.Load(t.Context(), "another", 1)
	must(t, err)
	equal(t, "term of an unknown projection", unknown.Term, 0)
	again, err := acquire(t.Context(), d.sink, model, "you")
	must(t, err)
	equal(t, "term", again.Term, 2)
	equal(t, "owner", again.Owner, "you")
	equal(t, "sequence", again.Sequence, 0)
}

// What a commit stores comes back as it was, byte for byte.
func TestCheckpointRoundTrip(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	token, err := bson.Marshal(bson.D{{Key: "_data", Value: "826570FF…\\ \"quoted\" 'single' é 日本"}})
	must(t, err)
	next := following(cp)
	next.Version = 3
	next.Position.Token = token
	next.Settled = true
	next.CommittedAt = time.Date(2026, 11, 29, 12, 0, 0, 1_000_000, time.UTC)
	next.Rebuild = &projector.Rebuild{Mode: projector.Shadow, Cause: "asked for", Read: []projector.Copied{
		{Collection: "tickets", Last: projector.StoredKey(id("z\\n")), Rows: 2, Done: true},
	}}
	next.Watch = projector.Watch{Database: "shop", Collections: []projector.Watched{{Name: "tickets", Before: true, Bindings: []string{"rollup into counts"}}}}
	must(t, d.sink.Commit(t.Context(), cp, next, all()))
	body, err := next.Encode()
	must(t, err)
	equal(t, "stored bytes", d.text(t, "select body from tidemark.checkpoints"), string(body))
	equal(t, "stored place", d.text(t, "select place from tidemark.checkpoints"), model)
	equal(t, "updated_at is now", d.text(t, "select clock_timestamp() - updated_at < interval '1 minute' from tidemark.checkpoints"), "true")
	loaded, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	if diff := cmp.Diff(next, loaded, cmpopts.EquateEmpty(), cmp.Comparer(bson.RawValue.Equal)); diff != "" {
		t.Errorf("loaded: %s", diff)
	}
	acquired, err := acquire(t.Context(), d.sink, model, "next")
	must(t, err)
	next.Term, next.Owner = next.Term+1, "next"
	if diff := cmp.Diff(next, acquired, cmpopts.EquateEmpty(), cmp.Comparer(bson.RawValue.Equal)); diff != "" {
		t.Errorf("acquired: %s", diff)
	}
}

// A checkpoint that can't be read is refused, and nothing about it changes.
func TestCheckpointRefused(t *testing.T) {
	for _, c := range []struct {
		name, body string
		is         error
	}{
		{"empty", "", &projector.CheckpointError{}},
		{"no JSON", "{]", &projector.CheckpointError{}},
		{"no format", "{}", &projector.CheckpointError{}},
		{"another projection's", "another", &projector.CheckpointError{}},
		{"newer", `{"format":{"$numberInt":"99"},"surprise":true}`, &projector.FormatError{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDatabase(t)
			cp := d.acquired(t, counts.Create)
			if c.body == "another" {
				other := cp
				other.Projection = "another"
				b, err := other.Encode()
				must(t, err)
				c.body = string(b)
			}
			_, err := d.Exec(t.Context(), "update tidemark.checkpoints set body = $1", c.body)
			must(t, err)
			before := d.text(t, "select c from tidemark.checkpoints c")
			check := func(err error) {
				t.Helper()
				wantClass(t, d.sink, err, projector.Fatal)
				var format *projector.FormatError
				var malformed *projector.CheckpointError
				if errors.As(err, &format) != strings.Contains(fmt.Sprintf("%T", c.is), "Format") || errors.As(err, &format) == errors.As(err, &malformed) {
					t.Errorf("error is %v, want a %T", err, c.is)
				}
				equal(t, "row", d.text(t, "select c from tidemark.checkpoints c"), before)
			}
			_, err = acquire(t.Context(), d.sink, model, "next")
			check(err)
			_, err = d.sink.Load(t.Context(), model, 1)
			check(err)
		})
	}
}

// Many projections may start on an empty database at once, and many instances of each.
func TestConcurrentCreators(t *testing.T) {
	d := newDatabase(t)
	var wg sync.WaitGroup
	const n = 12
	for i := range n {
		wg.Go(func() {
			name := fmt.Sprintf("model_%d", i/2)
			cp, err := acquire(t.Context(), d.sink, name, fmt.Sprint(i))
			if err != nil {
				t.Error(err)
				return
			}
			err = d.sink.Commit(t.Context(), cp, following(cp), all(counts.Create, add(counts, nil, one)))
			if err != nil && !errors.Is(err, projector.ErrFenced) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	equal(t, "projections", d.text(t, "select count(*) from tidemark.checkpoints"), fmt.Sprint(n/2))
	equal(t, "terms", d.text(t, "select min(term) || ' ' || max(term) from tidemark.checkpoints"), "2 2")
	equal(t, "models", d.text(t, "select count(*) from pg_tables where tablename = 'counts'"), fmt.Sprint(n/2))
}

// A role without the right to create is told what to run, and can run with only that.
func TestWithoutTheRightToCreate(t *testing.T) {
	d := newDatabase(t)
	role := d.role(t, "")
	sink := postgres.New(d.pool(t, role))
	_, err := acquire(t.Context(), sink, model, "me")
	wantError(t, err, "create schema tidemark", "create table tidemark.checkpoints", "grant select, insert, update, delete on tidemark.checkpoints")
	wantClass(t, sink, err, projector.Fatal)
	d.exec(t, between(t, err.Error(), "run\n", "\nERROR"))
	cp, err := acquire(t.Context(), sink, model, "me")
	must(t, err)

	_, err = commit(t, sink, cp, counts.Create)
	wantError(t, err, `create schema "model" authorization`)
	wantClass(t, sink, err, projector.Fatal)
	d.exec(t, between(t, err.Error(), "run\n", ";"))
	_, err = commit(t, sink, cp, counts.Create)
	must(t, err)
	if strings.Contains(fmt.Sprint(err), "secret") {
		t.Error("a password is in the error")
	}
}

func between(t *testing.T, s, from, to string) string {
	t.Helper()
	_, s, ok := strings.Cut(s, from)
	if !ok {
		t.Fatalf("%q is not in %q", from, s)
	}
	s, _, ok = strings.Cut(s, to)
	if !ok {
		t.Fatalf("%q is not in %q", to, s)
	}
	return s
}

func TestReservedNames(t *testing.T) {
	d := newDatabase(t)
	for _, name := range []string{"public", "tidemark", "pg_x", "information_schema"} {
		_, err := acquire(t.Context(), d.sink, name, "me")
		wantError(t, err, name, "choose another name")
		wantClass(t, d.sink, err, projector.Fatal)
	}
}

// The first commit refuses a model whose rows no checkpoint accounts for.
func TestRowsWithoutCheckpoint(t *testing.T) {
	d := newDatabase(t)
	d.acquired(t, counts.Create, add(counts, nil, one))
	d.exec(t, "delete from tidemark.checkpoints")
	cp, err := acquire(t.Context(), d.sink, model, "me")
	must(t, err)
	_, err = commit(t, d.sink, cp, counts.Create)
	wantError(t, err, "model.counts has rows", "drop schema")
	wantClass(t, d.sink, err, projector.Fatal)
	d.exec(t, "delete from model.counts")
	_, err = commit(t, d.sink, cp, counts.Create)
	must(t, err)
}

// Cancelling a commit that waits ends the call at once, and the pool goes on. Whether
// the commit happens is for Load to say.
func TestCancelCommit(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	blocker, err := d.Begin(t.Context())
	must(t, err)
	_, err = blocker.Exec(t.Context(), "select from tidemark.checkpoints for update")
	must(t, err)
	pool := d.pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	sink := postgres.New(pool)
	ctx, cancel := context.WithCancel(t.Context())
	timer := time.AfterFunc(300*time.Millisecond, cancel) // it waits for the row by then
	defer timer.Stop()
	started := time.Now()
	err = sink.Commit(ctx, cp, following(cp), add(counts, nil, one))
	if took := time.Since(started); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	must(t, blocker.Rollback(t.Context()))
	must(t, pool.Ping(t.Context()))
	stored, err := sink.Load(t.Context(), model, 1)
	must(t, err)
	// The server has the whole round trip; where the request to cancel it comes after
	// the row is free, the commit happens, and Load tells so.
	if stored.Sequence == cp.Sequence {
		_, err = commit(t, sink, cp, add(counts, nil, one))
		must(t, err)
	}
	equal(t, "sum", d.text(t, countsN), "1")
}

// Try tells what a commit would say, constraints checked at COMMIT included, and
// leaves nothing.
func TestTry(t *testing.T) {
	d := newDatabase(t)
	cp, err := acquire(t.Context(), d.sink, model, "me")
	must(t, err)
	must(t, d.sink.Try(t.Context(), cp, all(counts.Create, add(counts, nil, one))))
	equal(t, "schema", d.text(t, "select count(*) from pg_namespace where nspname = 'model'"), "0")
	cp = d.acquired(t, counts.Create, func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, `create table late (n int unique deferrable initially deferred)`)
		return err
	})
	must(t, d.sink.Try(t.Context(), cp, add(counts, nil, one)))
	err = d.sink.Try(t.Context(), cp, queue("insert into late values ($1), ($1)", 1))
	wantError(t, err, "23505")
	wantClass(t, d.sink, err, projector.Poison)
	equal(t, "rows", d.text(t, "select (select count(*) from model.counts) + (select count(*) from model.late)"), "0")
	stored, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "sequence", stored.Sequence, cp.Sequence)
	_, err = commit(t, d.sink, cp, queue("insert into late values ($1), ($1)", 1))
	wantError(t, err, "23505")
	_, err = commit(t, d.sink, cp, add(counts, nil, one))
	must(t, err)
	wantFenced(t, d.sink.Try(t.Context(), cp, all()))
}
