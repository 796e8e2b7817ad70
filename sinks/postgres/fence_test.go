package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

const countsN = `select coalesce(sum(n), 0) from model.counts`

var one = []count{{"open", 1}}

// withAndWithout runs f with all guards and without one of them; what it returns must
// be true only with.
func withAndWithout(t *testing.T, g fault.Guard, f func(*testing.T) bool) {
	t.Helper()
	t.Run("guarded", func(t *testing.T) {
		if !f(t) {
			t.Error("the promise is broken")
		}
	})
	t.Run("control", func(t *testing.T) {
		disable(t, g)
		if f(t) {
			t.Errorf("without %s nothing happens: the test proves nothing", g)
		}
	})
}

// withAndWithoutEach is withAndWithout for several that wait beside each other: each calls
// t.Parallel once it has set no hook any more.
func withAndWithoutEach(t *testing.T, g fault.Guard, fs map[string]func(*testing.T) bool) {
	t.Helper()
	each := func(want bool, failure string) func(*testing.T) {
		return func(t *testing.T) {
			if !want {
				disable(t, g)
			}
			for name, f := range fs {
				t.Run(name, func(t *testing.T) {
					if f(t) != want {
						t.Error(failure)
					}
				})
			}
		}
	}
	t.Run("guarded", each(true, "the promise is broken"))
	t.Run("control", each(false, fmt.Sprintf("without %s nothing happens: the test proves nothing", g)))
}

// An owner whose term is over writes nothing.
func TestFenceTerm(t *testing.T) {
	withAndWithout(t, fault.FenceTerm, func(t *testing.T) bool {
		d := newDatabase(t)
		cp := d.acquired(t, counts.Create)
		now, err := acquire(t.Context(), d.sink, model, "next")
		must(t, err)
		equal(t, "term", now.Term, cp.Term+1)
		_, err = commit(t, d.sink, cp, add(counts, nil, one))
		if err == nil {
			return false
		}
		wantFenced(t, err)
		var fenced *projector.FencedError
		if !errors.As(err, &fenced) || fenced.Term != cp.Term || fenced.Theirs != now.Term || fenced.Owner != "next" {
			t.Errorf("error has not who is in the way: %#v", fenced)
		}
		_, err = commit(t, d.sink, now, add(counts, nil, one))
		must(t, err)
		return d.text(t, countsN) == "1"
	})
}

// Two attempts at one commit, as after a lost answer, are applied once.
func TestFenceSequence(t *testing.T) {
	withAndWithout(t, fault.FenceSequence, func(t *testing.T) bool {
		d := newDatabase(t)
		cp := d.acquired(t, counts.Create)
		_, err := commit(t, d.sink, cp, add(counts, nil, one))
		must(t, err)
		_, err = commit(t, d.sink, cp, add(counts, nil, one))
		if err != nil {
			wantFenced(t, err)
		}
		return err != nil && d.text(t, countsN) == "1"
	})
}

// What is pipelined behind a fence that does not match is not committed.
func TestFenceRaises(t *testing.T) {
	withAndWithout(t, fault.FenceRaises, func(t *testing.T) bool {
		d := newDatabase(t)
		cp := d.acquired(t, counts.Create)
		_, err := acquire(t.Context(), d.sink, model, "next")
		must(t, err)
		_, err = commit(t, d.sink, cp, add(counts, nil, one))
		return err != nil && d.text(t, countsN) == "0"
	})
}

// A handler that writes at once meets the fence itself; whatever it makes of that, the
// commit is fenced.
func TestFenceInHandler(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	_, err := acquire(t.Context(), d.sink, model, "next")
	must(t, err)
	_, err = commit(t, d.sink, cp, func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, "insert into counts values ('a', 1, 1)")
		wantFenced(t, err)
		return errors.New("my own words")
	})
	wantFenced(t, err)
	equal(t, "sum", d.text(t, countsN), "0")
}

// A checkpoint that someone has removed is a fence as well.
func TestFenceWithoutCheckpoint(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	d.exec(t, "delete from tidemark.checkpoints")
	_, err := commit(t, d.sink, cp, add(counts, nil, one))
	wantFenced(t, err)
	wantError(t, err, "is gone")
}

// A handler's own division by zero is not the fence's.
func TestDivisionByZeroIsNoFence(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	for name, f := range map[string]func(context.Context, *postgres.Tx) error{
		"queued": queue("select 1 / $1::int", 0),
		"now": func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.Exec(ctx, "select 1 / 0")
			return err
		},
	} {
		_, err := commit(t, d.sink, cp, f)
		wantError(t, err, "22012")
		if errors.Is(err, projector.ErrFenced) {
			t.Errorf("%s: taken for the fence: %v", name, err)
		}
		wantClass(t, d.sink, err, projector.Poison)
	}
}

// lossy lets the answer to the next write get lost, or the write itself.
type lossy struct {
	net.Conn
	mode *atomic.Int32
}

const (
	pass int32 = iota
	loseAnswer
	loseWrite
)

func (l lossy) Write(b []byte) (int, error) {
	if l.mode.Load() == loseWrite {
		_ = l.Conn.Close()
		return 0, net.ErrClosed
	}
	return l.Conn.Write(b)
}

func (l lossy) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if l.mode.Load() == loseAnswer && err == nil { // the server is done
		_ = l.Conn.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// After a lost answer Load tells whether the commit has happened.
func TestLoadAfterLostAnswer(t *testing.T) {
	for _, c := range []struct {
		name  string
		mode  int32
		moved bool
	}{{"answer lost", loseAnswer, true}, {"commit lost", loseWrite, false}} {
		t.Run(c.name, func(t *testing.T) {
			d := newDatabase(t)
			var mode atomic.Int32
			sink := postgres.New(d.pool(t, through(func(c net.Conn) net.Conn { return lossy{c, &mode} })))
			cp := d.acquired(t, counts.Create)
			cp, err := commit(t, sink, cp, add(counts, nil, one)) // prepares
			must(t, err)
			atCommit(t, func() { mode.Store(c.mode) })
			next, err := commit(t, sink, cp, add(counts, nil, one))
			mode.Store(pass)
			fault.Global.OnReach(nil)
			wantError(t, err)
			wantClass(t, sink, err, projector.Transient)
			stored, err := sink.Load(t.Context(), model, 1)
			must(t, err)
			equal(t, "moved", stored.Sequence == next.Sequence, c.moved)
			equal(t, "unmoved", stored.Sequence == cp.Sequence, !c.moved)
			if _, err = commit(t, sink, cp, add(counts, nil, one)); c.moved {
				wantFenced(t, err)
			} else {
				must(t, err)
			}
			equal(t, "sum", d.text(t, countsN), "2")
		})
	}
}

// atCommit runs f when a commit is about to send its last round trip.
func atCommit(t *testing.T, f func()) {
	fault.Global.OnReach(func(p fault.Point) {
		if p == fault.CommitSend {
			f()
		}
	})
	t.Cleanup(func() { fault.Global.OnReach(nil) })
}

// counting counts round trips: changes from writing to reading.
type counting struct {
	net.Conn
	trips   *atomic.Int64
	writing *atomic.Bool
}

func (c counting) Write(b []byte) (int, error) {
	c.writing.Store(true)
	return c.Conn.Write(b)
}

func (c counting) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.writing.Swap(false) {
		c.trips.Add(1)
	}
	return n, err
}

// A batch whose handler only queues takes one round trip, once the connection knows
// the statements.
func TestOneRoundTrip(t *testing.T) {
	d := newDatabase(t)
	var trips atomic.Int64
	pool := d.pool(t, through(func(c net.Conn) net.Conn { return counting{c, &trips, new(atomic.Bool)} }))
	sink := postgres.New(pool)
	cp := d.acquired(t, counts.Create, orders.Create)
	rows := someOrders(20, "new")
	handler := []func(context.Context, *postgres.Tx) error{
		add(counts, []count{{"a", 1}}, []count{{"a", 1}, {"b", 1}}),
		add(counts, []count{{"b", 1}}, nil),
		put(orders, rows, rows),
		put(orders, rows, nil),
		queue("insert into counts values ($1, 1, 1) on conflict do nothing", "c"),
		queue("delete from counts where status = $1", "c"),
	}
	cp, err := commit(t, sink, cp, handler...)
	must(t, err)
	trips.Store(0)
	started := time.Now()
	for range 5 {
		cp, err = commit(t, sink, cp, handler...)
		must(t, err)
	}
	if time.Since(started) < time.Second { // else the pool pings
		equal(t, "round trips of 5 commits", trips.Load(), 5)
	}
}
