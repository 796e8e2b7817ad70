package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// freezing is a connection whose client freezes in the middle of a write, as under
// SIGSTOP: half is sent, the rest once it thaws.
type freezing struct {
	net.Conn
	f *freezer
}

type freezer struct {
	on     atomic.Bool
	frozen chan struct{} // closed when a connection is frozen
	thaw   chan struct{}
}

func newFreezer() *freezer {
	return &freezer{frozen: make(chan struct{}), thaw: make(chan struct{})}
}

func (c freezing) Write(b []byte) (int, error) {
	if !c.f.on.CompareAndSwap(true, false) {
		return c.Conn.Write(b)
	}
	n, err := c.Conn.Write(b[:len(b)/2])
	if err != nil {
		return n, err
	}
	close(c.f.frozen)
	<-c.f.thaw
	m, err := c.Conn.Write(b[n:])
	return n + m, err
}

// frozenCommit starts a commit that freezes with half of its last round trip sent, the
// row of the checkpoint locked. The result comes once f is thawed.
func frozenCommit(t *testing.T, d *database, f *freezer, cp projector.Checkpoint) <-chan error {
	t.Helper()
	sink := postgres.New(d.pool(t, through(func(c net.Conn) net.Conn { return freezing{c, f} })))
	handler := func(ctx context.Context, tx *postgres.Tx) error {
		for range 100 {
			tx.Queue("update counts set n = n + $1", 1)
		}
		return nil
	}
	must(t, sink.Try(t.Context(), cp, handler)) // prepares
	// The commit's own statement is not prepared by Try.
	warm, err := commit(t, sink, cp)
	must(t, err)
	result := make(chan error, 1)
	atCommit(t, func() { f.on.Store(true) })
	go func() {
		next := following(warm)
		result <- sink.Commit(context.Background(), warm, next, handler)
	}()
	select {
	case <-f.frozen:
	case err := <-result:
		t.Fatalf("not frozen: %v", err)
	}
	fault.Global.OnReach(nil)
	waitFor(t, d, `select exists (select from pg_locks where relation = 'tidemark.checkpoints'::regclass and mode = 'RowExclusiveLock')`)
	return result
}

func waitFor(t *testing.T, d *database, sql string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if d.text(t, sql) == "true" {
			return
		}
	}
	t.Fatalf("not within 10 s: %s", sql)
}

// soon bounds a takeover.
func soon(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A frozen owner doesn't hold up the next one.
func TestFrozen(t *testing.T) {
	withAndWithoutEach(t, fault.EndBlockers, map[string]func(*testing.T) bool{
		"pipeline": frozenPipeline, "copy": frozenCopy, "generation": frozenGeneration,
	})
}

// An owner that is frozen in the middle of a pipeline writes nothing when it wakes up.
func frozenPipeline(t *testing.T) bool {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, one))
	f := newFreezer()
	result := frozenCommit(t, d, f, cp)
	t.Parallel()
	now, err := acquire(soon(t, 4*time.Second), d.sink, model, "next")
	close(f.thaw)
	late := <-result
	if err != nil {
		must(t, late)
		return false
	}
	wantError(t, late)
	wantClass(t, d.sink, late, projector.Transient)
	equal(t, "term", now.Term, cp.Term+1)
	equal(t, "sum", d.text(t, countsN), "1")
	return true
}

// The same by Load, as after a lost answer.
func TestFrozenPipelineAndLoad(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, one))
	f := newFreezer()
	result := frozenCommit(t, d, f, cp)
	t.Parallel()
	stored, err := d.sink.Load(soon(t, 4*time.Second), model, 1)
	must(t, err)
	close(f.thaw)
	wantError(t, <-result)
	equal(t, "sequence", stored.Sequence, cp.Sequence+1)
	equal(t, "sum", d.text(t, countsN), "1")
}

// Many may take over at once: only the frozen one is ended, not those that wait.
func TestTakeoverInCrowd(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, one))
	f := newFreezer()
	result := frozenCommit(t, d, f, cp)
	t.Parallel()
	const n = 6
	terms := make(chan int64, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			now, err := acquire(soon(t, 10*time.Second), d.sink, model, fmt.Sprint("crowd ", i))
			if err != nil {
				t.Error(err)
			}
			terms <- now.Term
		})
	}
	wg.Wait()
	close(f.thaw)
	wantError(t, <-result)
	seen := map[int64]bool{}
	for range n {
		seen[<-terms] = true
	}
	equal(t, "different terms", len(seen), n)
	equal(t, "term", d.text(t, "select term from tidemark.checkpoints"), fmt.Sprint(cp.Term+n))
}

// blocked is a source of rows that never ends.
type blocked struct{ reached, release chan struct{} }

func (b *blocked) Next() bool {
	select {
	case <-b.reached:
	default:
		close(b.reached)
	}
	<-b.release
	return false
}
func (b *blocked) Values() ([]any, error) { return nil, nil }
func (b *blocked) Err() error             { return nil }

// The same for an owner that is frozen in the middle of a COPY.
func frozenCopy(t *testing.T) bool {
	t.Parallel()
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	b := &blocked{make(chan struct{}), make(chan struct{})}
	result := make(chan error, 1)
	go func() {
		result <- d.sink.Commit(context.Background(), cp, following(cp), func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"counts"}, []string{"status", "n", "contributions"}, b)
			return err
		})
	}()
	<-b.reached
	_, err := acquire(soon(t, 4*time.Second), d.sink, model, "next")
	close(b.release)
	late := <-result
	if err == nil {
		wantError(t, late)
		wantClass(t, d.sink, late, projector.Transient)
	}
	return err == nil
}

// An owner that is frozen between two round trips is ended by the server.
func TestIdleTimeout(t *testing.T) {
	disable(t, fault.EndBlockers)
	d := newDatabase(t, postgres.IdleTimeout(500*time.Millisecond))
	cp := d.acquired(t, counts.Create)
	frozen, thaw := make(chan struct{}), make(chan struct{})
	result := make(chan error, 1)
	go func() {
		result <- d.sink.Commit(context.Background(), cp, following(cp), func(ctx context.Context, tx *postgres.Tx) error {
			if _, err := tx.Exec(ctx, "select 1"); err != nil {
				return err
			}
			close(frozen)
			<-thaw
			return add(counts, nil, one)(ctx, tx)
		})
	}()
	<-frozen
	_, err := acquire(soon(t, 5*time.Second), d.sink, model, "next")
	close(thaw)
	late := <-result
	must(t, err)
	wantError(t, late)
	wantClass(t, d.sink, late, projector.Transient)
	equal(t, "sum", d.text(t, countsN), "0")
}

// The session's own timeouts don't keep a takeover from ending what blocks it.
func TestTakeoverUnderLockTimeout(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, one))
	f := newFreezer()
	result := frozenCommit(t, d, f, cp)
	t.Parallel()
	sink := postgres.New(d.pool(t, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["lock_timeout"] = "100ms"
		c.ConnConfig.RuntimeParams["statement_timeout"] = "100ms"
	}))
	_, err := acquire(soon(t, 5*time.Second), sink, model, "next")
	must(t, err)
	close(f.thaw)
	wantError(t, <-result)
}

// A role that may not end the blocker says so.
func TestTakeoverWithoutTheRight(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, one))
	role := d.role(t, "grant usage on schema tidemark to %s; grant select, insert, update, delete on tidemark.checkpoints to %[1]s")
	f := newFreezer()
	result := frozenCommit(t, d, f, cp)
	t.Parallel()
	_, err := acquire(soon(t, 4*time.Second), postgres.New(d.pool(t, role)), model, "next")
	wantError(t, err, "pg_signal_backend")
	close(f.thaw)
	must(t, <-result)
}

// role makes a role without rights, but for what grants gives it, and lets a pool use it.
func (d *database) role(t *testing.T, grants string) func(*pgxpool.Config) {
	t.Helper()
	name := d.Config().ConnConfig.Database + "_role"
	d.exec(t, fmt.Sprintf("create role %s login password 'secret-of-the-role'", name))
	if grants != "" {
		d.exec(t, fmt.Sprintf(grants, name))
	}
	t.Cleanup(func() {
		ctx := context.Background()
		_, err := d.Exec(ctx, fmt.Sprintf("drop owned by %s cascade; drop role %[1]s", name))
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return func(c *pgxpool.Config) {
		c.ConnConfig.User, c.ConnConfig.Password = name, "secret-of-the-role"
	}
}
