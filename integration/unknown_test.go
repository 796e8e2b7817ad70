package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/integration/internal/chaos"
	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// unreliable is a projection of the hits whose connection fails in its commits.
type unreliable struct {
	*counting
	ambush *ambush
	proxy  *chaos.Proxy
	run    *running
}

func newUnreliable(t *testing.T, p postgres.Projection) *unreliable {
	t.Helper()
	return newUnreliableOn(t, newCounting(t), p, 20*time.Second)
}

func newUnreliableOn(t *testing.T, c *counting, p postgres.Projection, commitTimeout time.Duration) *unreliable {
	t.Helper()
	u := &unreliable{counting: c, ambush: newAmbush(t)}
	proxy, pool := proxied(t, c.dsn)
	u.proxy = proxy
	u.run = c.begun(run(t, c.runner(p, pool, projector.Options{CommitTimeout: commitTimeout})))
	c.warm(u.run)
	return u
}

// change changes the hits at random; it is one commit or a few.
func (u *unreliable) change(n int) {
	u.t.Helper()
	u.insert("a #", 20)
	u.insert("b", 3)
	_, err := u.db.Collection("hits").UpdateMany(u.t.Context(), bson.D{{Key: "n", Value: bson.D{{Key: "$mod", Value: bson.A{7, n % 7}}}}}, add("n", int64(n)))
	if err == nil {
		_, err = u.db.Collection("hits").DeleteMany(u.t.Context(), bson.D{{Key: "n", Value: bson.D{{Key: "$mod", Value: bson.A{11, n % 11}}}}})
	}
	if err != nil {
		u.t.Fatal(err)
	}
}

// exact waits for the model and compares it.
func (u *unreliable) exact() {
	u.t.Helper()
	u.run.level(u.db)
	if diff := u.difference(); diff != "" {
		u.t.Fatalf("the model differs from the source (-source +model):\n%s", diff)
	}
}

// beforeServer cuts the connection when n bytes of the last round trip have passed.
// Met reports whether it has come to that.
func (u *unreliable) beforeServer(n int64) (met func() bool) {
	var reached atomic.Pointer[<-chan struct{}]
	u.ambush.at(fault.CommitSend, func() {
		u.proxy.ToServer.CutAfter(n)
		c := u.proxy.ToServer.Reached()
		reached.Store(&c)
	})
	return func() bool {
		c := reached.Load()
		if c == nil {
			return false
		}
		select {
		case <-*c:
			return true
		default:
			return false
		}
	}
}

// afterServer lets the commit take effect and cuts the connection when n bytes of the
// answer have passed. Met reports whether it has come to that.
func (u *unreliable) afterServer(n int64) (met func() bool) {
	var cut atomic.Bool
	u.ambush.at(fault.CommitSend, func() {
		u.proxy.ToClient.HoldAfter(n)
		before := u.run.Status().Checkpoint.Sequence
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			for now := before; now == before && ctx.Err() == nil; {
				_ = u.pool.QueryRow(ctx, "select sequence from tidemark.checkpoints where projection = 'hits'").Scan(&now)
				cut.Store(now != before)
			}
			u.proxy.Cut()
			u.proxy.ToClient.Pass()
		}()
	})
	return cut.Load
}

// The connection is lost in the last round trip, again and again: before the server
// has got the COMMIT, in the middle, and after it has carried it out. The stored
// checkpoint tells which it was, and the counts are exact. Reports of the kind:
// ExtendDB/extenddb PR#343, anyproto/any-sync-coordinator PR#129,
// sboesebeck/morphium PR#184, propeller-heads/tycho PR#1424.
func TestCommitUnknown(t *testing.T) {
	// How much of a last round trip may pass: the opened style's is a COMMIT alone.
	for s, size := range map[style]int64{queued: 600, opened: 20} {
		t.Run(string(s), func(t *testing.T) {
			rng := seeded(t)
			u := newUnreliable(t, s.projection())
			var before, middle, after int
			for round := range effort.Rounds(45) {
				var met func() bool
				count := &before
				switch round % 3 {
				case 0:
					met = u.beforeServer(0)
				case 1:
					met, count = u.beforeServer(1+rng.Int64N(size)), &middle
				default:
					met, count = u.afterServer(rng.Int64N(20)), &after
				}
				u.change(round)
				u.exact()
				if met() {
					*count++
				} else {
					t.Errorf("round %d: no fault was met", round)
				}
			}
			status := u.run.Status()
			t.Logf("%d connections cut before the COMMIT, %d in the middle of the last round trip, %d after the COMMIT took effect; %d retries, %d commits",
				before, middle, after, status.Retries, status.Commits)
			if status.Retries == 0 {
				t.Error("no commit was tried again")
			}
		})
	}
}

// The network swallows a commit, or its answer, without a word: CommitTimeout ends the
// wait. What was swallowed may still arrive while the commit is tried again.
func TestCommitUnknownSilence(t *testing.T) {
	for name, lane := range map[string]func(*chaos.Proxy) *chaos.Lane{
		"the commit": func(p *chaos.Proxy) *chaos.Lane { return p.ToServer },
		"the answer": func(p *chaos.Proxy) *chaos.Lane { return p.ToClient },
	} {
		t.Run(name, func(t *testing.T) {
			u := newUnreliableOn(t, newCounting(t), queued.projection(), time.Second)
			lane := lane(u.proxy)
			for round := range effort.Rounds(4) {
				before := u.run.Status().Retries
				u.ambush.at(fault.CommitSend, func() { lane.HoldAfter(0) })
				u.change(round)
				until(t, 30*time.Second, "the commit is given up", func() bool { return u.run.Status().Retries > before })
				lane.Pass()
				u.exact()
			}
		})
	}
}

// late keeps back a commit on its way to the server, but for n bytes, and breaks the
// connection for the client, which tries again. Deliver lets the first attempt arrive.
func (u *unreliable) late(n int64) (deliver func()) {
	u.t.Helper()
	stranded := make(chan struct{})
	u.ambush.at(fault.CommitSend, func() {
		u.proxy.ToServer.HoldAfter(n)
		reached := u.proxy.ToServer.Reached()
		go func() {
			<-reached
			deliver = u.proxy.Strand()
			close(stranded)
		}()
	})
	u.insert("late #", 300)
	wait(u.t, "a commit is on its way", stranded)
	return deliver
}

// A first attempt that is late arrives at the server after the second one has
// committed: it must find that it is late. The term is the same, so it is the sequence
// that tells. commanded/commanded-ecto-projections PR#49 and PR#52: two attempts both
// passed the check.
func TestCommitUnknownLateAttempt(t *testing.T) {
	u := newUnreliable(t, queued.projection())
	for range effort.Rounds(10) {
		deliver := u.late(0)
		u.exact()
		deliver()
		u.exact()
	}
	// With half of it at the server the first attempt holds the checkpoint's row; it is
	// ended, since a second attempt could wait for it for ever.
	deliver := u.late(8000)
	u.exact()
	deliver()
	u.exact()
	if u.run.Status().Retries == 0 {
		t.Error("no commit was tried again")
	}
}

// Without the comparison of the sequence both attempts are applied.
func TestCommitUnknownLateAttemptControl(t *testing.T) {
	defer fault.Global.Disable(fault.FenceSequence)()
	u := newUnreliable(t, queued.projection())
	deliver := u.late(0)
	u.exact()
	deliver()
	u.doubled("late")
}

// doubled expects the model to be wrong about a page.
func (u *unreliable) doubled(page string) {
	u.t.Helper()
	diff := u.difference()
	if !strings.Contains(diff, page) {
		u.t.Fatalf("with the guard off the model was to be wrong about %q (-source +model):\n%s", page, diff)
	}
	u.t.Logf("with the guard off the model is wrong: %d lines of difference", strings.Count(diff, "\n"))
}

// Whoever takes a lost answer for a failure, and compares no sequence, applies the
// commit a second time.
func TestCommitUnknownControl(t *testing.T) {
	defer fault.Global.Disable(fault.ReadBack, fault.FenceSequence)()
	for _, s := range []style{queued, opened} {
		t.Run(string(s), func(t *testing.T) {
			u := newUnreliable(t, s.projection())
			met := u.afterServer(0)
			u.insert("twice", 10)
			u.run.level(u.db)
			if !met() {
				t.Fatal("no fault was met")
			}
			u.doubled("twice")
		})
	}
}

// The server ends the connection's backend, at the handler's end with the transaction
// open and at the COMMIT.
func TestCommitUnknownBackendTerminated(t *testing.T) {
	u := newUnreliable(t, opened.projection())
	var ended atomic.Int64
	n := effort.Rounds(12)
	for round := range n {
		point := fault.HandlerEnd
		if round%2 == 1 {
			point = fault.CommitSend
		}
		u.ambush.at(point, func() {
			// The server's own workers, autovacuum's say, have transactions here too.
			var victims int64
			err := u.pool.QueryRow(context.Background(), `select count(*) from (
	select pg_terminate_backend(pid, 5000) from pg_stat_activity
	where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid() and xact_start is not null) ended`).Scan(&victims)
			if err != nil {
				t.Error(err)
			}
			ended.Add(victims)
		})
		u.change(round)
		u.exact()
	}
	status := u.run.Status()
	t.Logf("%d backends ended; %d retries", ended.Load(), status.Retries)
	if ended.Load() != int64(n) || status.Retries != int64(n) {
		t.Errorf("%d backends ended and %d retries in %d rounds", ended.Load(), status.Retries, n)
	}
}

// Passing failures that the server reports in the middle of a handler, wrapped by it,
// and in answer to the COMMIT, by a deferred constraint. propeller-heads/tycho PR#1424:
// a retry that knew deadlocks only.
func TestCommitUnknownServerErrors(t *testing.T) {
	for _, code := range []string{"40001", "40P01", "57P01", "55P03", "53300", "25006"} {
		t.Run(code, func(t *testing.T) {
			var atHandler, atCommit, raised atomic.Int64
			p := opened.projection()
			setup := p.Setup
			p.Setup = func(ctx context.Context, tx *postgres.Tx) error {
				err := setup(ctx, tx)
				if err == nil {
					_, err = tx.Exec(ctx, `create table traps (code text);
create function trap() returns trigger language plpgsql as $$ begin raise exception using errcode = new.code, message = 'for a test'; end $$;
create constraint trigger trap after insert on traps deferrable initially deferred for each row execute function trap()`)
				}
				return err
			}
			p.Bindings = append(p.Bindings, projector.On("hits", func(ctx context.Context, tx *postgres.Tx, _ []projector.Touch) error {
				if atCommit.Add(-1) >= 0 {
					raised.Add(1)
					tx.Queue("insert into traps values ($1)", code)
					return nil
				}
				if atHandler.Add(-1) < 0 {
					return nil
				}
				raised.Add(1)
				_, err := tx.Exec(ctx, "do $$ begin raise exception using errcode = '"+code+"', message = 'for a test'; end $$")
				var pg *pgconn.PgError
				if !errors.As(err, &pg) || pg.Code != code {
					t.Errorf("the server answered with %v", err)
				}
				return fmt.Errorf("a handler's words: %w", err)
			}))
			u := newUnreliable(t, p)
			rounds := effort.Rounds(2)
			for round := range rounds {
				atHandler.Store(2)
				atCommit.Store(2)
				u.change(round)
				u.exact()
			}
			status := u.run.Status()
			t.Logf("%d raised, half of them by the COMMIT; %d retries, %d commits", raised.Load(), status.Retries, status.Commits)
			if want := int64(4 * rounds); raised.Load() != want || status.Retries != want {
				t.Errorf("%d raised, %d retries", raised.Load(), status.Retries)
			}
		})
	}
}

// The whole server is killed by SIGKILL at the COMMIT, or a moment after it was sent,
// and comes back by crash recovery.
func TestCommitUnknownServerKilled(t *testing.T) {
	server, err := serve.StartPostgres(t.Context(), serve.PostgresOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	u := newUnreliableOn(t, newCountingOn(t, databaseOn(t, server.DSN())), queued.projection(), 20*time.Second)
	rng := seeded(t)
	for round := range effort.Rounds(8) {
		killed := make(chan error, 1)
		u.ambush.at(fault.CommitSend, func() {
			later := time.Duration(rng.Int64N(int64(3 * time.Millisecond)))
			if round%2 == 0 {
				killed <- server.Kill()
				return
			}
			time.AfterFunc(later, func() { killed <- server.Kill() })
		})
		u.change(round)
		select {
		case err = <-killed:
		case <-time.After(30 * time.Second):
			t.Fatal("no commit to kill the server in")
		}
		if err == nil {
			err = server.Restart(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		u.pool.Reset() // the test's own connections are gone as well
		u.exact()
	}
	status := u.run.Status()
	t.Logf("%d retries, %d commits", status.Retries, status.Commits)
	if status.Retries == 0 {
		t.Error("no commit was tried again")
	}
}
