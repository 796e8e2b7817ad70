package integration_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// takeoverLimit is how long a new owner may be held up by a frozen one.
const takeoverLimit = 5 * time.Second

// takeover is a projection whose owner is frozen in the middle of a commit.
type takeover struct {
	*counting
	style  style
	ambush *ambush
	old    *running
	held   func() // lets the frozen owner go on
}

// takeOver starts a second owner, which must be level soon, with the hits of the
// frozen one's commit and 100 more, and then lets the first one go on.
func (o *takeover) takeOver() (next *running, took time.Duration) {
	o.t.Helper()
	began := time.Now()
	next = run(o.t, o.runner(o.style.projection(), o.pool, projector.Options{}))
	next.level(o.db)
	took = time.Since(began)
	for range 100 {
		o.insert("later", 1)
	}
	next.level(o.db)
	return next, took
}

// wakes lets the old owner go on and shows what becomes of it: nothing of it is
// written, and it ends with a FencedError.
func (o *takeover) wakes(next *running, took time.Duration) {
	o.t.Helper()
	sequence := o.sequence()
	o.held()
	err := o.old.wait(30 * time.Second)
	var fenced *projector.FencedError
	if !errors.As(err, &fenced) {
		o.t.Fatalf("the old owner ended with %v", err)
	}
	if fenced.Theirs <= fenced.Term || fenced.Owner != next.Status().Checkpoint.Owner {
		o.t.Errorf("it is fenced by %q with term %d, its own was %d", fenced.Owner, fenced.Theirs, fenced.Term)
	}
	if took > takeoverLimit {
		o.t.Errorf("the new owner was held up for %s", took)
	}
	o.insert("last", 1)
	next.level(o.db)
	if now := o.sequence(); now <= sequence {
		o.t.Errorf("the checkpoint's sequence went from %d to %d", sequence, now)
	}
	if diff := o.difference(); diff != "" {
		o.t.Errorf("the old owner has written after its successor (-source +model):\n%s", diff)
	}
	o.t.Logf("taken over in %s; then the old owner: %v", took.Round(time.Millisecond), err)
}

// frozenBefore freezes an owner before it sends the COMMIT.
func frozenBefore(t *testing.T, s style) *takeover {
	t.Helper()
	c := newCounting(t)
	a := newAmbush(t)
	o := &takeover{counting: c, style: s, ambush: a}
	o.old = c.begun(run(t, c.runner(s.projection(), poolOn(t, c.dsn), projector.Options{})))
	c.warm(o.old)
	f := a.freeze(t, fault.CommitSend)
	o.held = f.thaw
	c.insert("frozen", 10)
	wait(t, "the owner is at its COMMIT", f.arrived)
	return o
}

// frozenInside freezes an owner when a part of what it sends has come to the server:
// of its last round trip, or of a COPY.
func frozenInside(t *testing.T, s style, part float64) *takeover {
	t.Helper()
	c := newCounting(t)
	a := newAmbush(t)
	proxy, pool := proxied(t, c.dsn)
	o := &takeover{counting: c, style: s, ambush: a, held: proxy.ToServer.Pass}
	o.old = c.begun(run(t, c.runner(s.projection(), pool, projector.Options{})))
	t.Cleanup(proxy.ToServer.Pass) // before the runner is waited for
	c.warm(o.old)

	// Once without a fault, to know how many bytes there are.
	point, page, n := fault.CommitSend, "frozen #", 300
	if s == copied {
		point, page, n = fault.HandlerBegin, "copied", 10
	}
	var before int64
	a.at(point, func() { before = proxy.ToServer.Passed() })
	c.insert(page, n)
	o.old.level(c.db)
	size := proxy.ToServer.Passed() - before

	held := make(chan struct{})
	there := int64(float64(size) * part)
	a.at(point, func() { proxy.ToServer.HoldAfter(there); close(held) })
	c.insert(page, n)
	wait(t, "the owner is at the point", held)
	wait(t, "bytes are held", proxy.ToServer.Reached())
	t.Logf("held after %d of about %d bytes", there, size)
	return o
}

// An owner that is frozen between its handler and its COMMIT, while another takes
// over, never writes again. Reports of the kind: johanhaleby/occurrent#665 and #661 (a
// fencing number computed and never used), percona/percona-clustersync-mongodb PR#249,
// commanded/commanded-ecto-projections PR#49.
func TestFenceBeforeCommit(t *testing.T) {
	for _, s := range []style{queued, opened} {
		t.Run(string(s), func(t *testing.T) {
			o := frozenBefore(t, s)
			next, took := o.takeOver()
			o.wakes(next, took)
		})
	}
}

// The same with any part of the last round trip at the server, which then waits for
// the rest of it with the checkpoint's row locked: a state that none of PostgreSQL's
// timeouts ends.
func TestFenceInPipeline(t *testing.T) {
	parts := []float64{0, 0.05, 0.3, 0.5, 0.8, 0.99}
	if effort.Rounds(2) < 2 { // both ends, and something between
		parts = []float64{0, parts[1+rand.IntN(4)], 0.99}
	}
	for _, part := range parts {
		t.Run(fmt.Sprintf("%.0f%%", part*100), func(t *testing.T) {
			o := frozenInside(t, queued, part)
			next, took := o.takeOver()
			o.wakes(next, took)
		})
	}
}

// The same with half of a COPY at the server.
func TestFenceInCopy(t *testing.T) {
	o := frozenInside(t, copied, 0.5)
	next, took := o.takeOver()
	o.wakes(next, took)
	copies := selectOne[int64](t, o.pool, "select count(*) from hits.copies")
	if want := int64(20 * copyRows); copies != want {
		t.Errorf("%d rows were copied, not %d", copies, want)
	}
}

// A new owner that has taken the term, and committed nothing yet, is enough.
func TestFenceByTermAlone(t *testing.T) {
	o := frozenBefore(t, queued)
	before := o.sequence()
	committing := o.ambush.freeze(t, fault.CommitBegin)
	defer committing.thaw()
	next := run(t, o.runner(o.style.projection(), o.pool, projector.Options{}))
	wait(t, "the new owner is at its first commit", committing.arrived)
	o.held()
	if err := o.old.wait(30 * time.Second); !errors.Is(err, projector.ErrFenced) {
		t.Fatalf("the old owner ended with %v", err)
	}
	if now := o.sequence(); now != before {
		t.Errorf("the old owner has committed: the sequence was %d and is %d", before, now)
	}
	committing.thaw()
	next.level(o.db)
	if diff := o.difference(); diff != "" {
		t.Errorf("the model differs from the source (-source +model):\n%s", diff)
	}
}

// Without the comparison of the term the old owner still writes.
func TestFenceControlByTermAlone(t *testing.T) {
	defer fault.Global.Disable(fault.FenceTerm)()
	o := frozenBefore(t, queued)
	before := o.sequence()
	committing := o.ambush.freeze(t, fault.CommitBegin)
	defer committing.thaw()
	run(t, o.runner(o.style.projection(), o.pool, projector.Options{}))
	wait(t, "the new owner is at its first commit", committing.arrived)
	o.held()
	until(t, 20*time.Second, "the old owner writes with the guard off", func() bool { return o.sequence() != before })
}

// Without the comparison of term and sequence the old owner's commit is applied over
// its successor's.
func TestFenceControl(t *testing.T) {
	defer fault.Global.Disable(fault.FenceTerm, fault.FenceSequence)()
	o := frozenBefore(t, queued)
	next, _ := o.takeOver()
	next.stop() // or it would be overrun in its turn
	o.zombieWrites()
}

// Where the fence matches no row but does not raise, the COMMIT sent along with it
// commits the old owner's writes.
func TestFenceControlSilent(t *testing.T) {
	defer fault.Global.Disable(fault.FenceRaises)()
	o := frozenInside(t, queued, 0)
	next, _ := o.takeOver()
	next.stop()
	o.zombieWrites()
}

// zombieWrites lets the old owner go on and expects its writes in the model.
func (o *takeover) zombieWrites() {
	o.t.Helper()
	if diff := o.difference(); diff != "" {
		o.t.Fatalf("the successor's model is wrong by itself (-source +model):\n%s", diff)
	}
	o.held()
	var diff string
	until(o.t, 20*time.Second, "the old owner's writes show with the guard off", func() bool {
		diff = o.difference()
		return diff != ""
	})
	if !strings.Contains(diff, "frozen") {
		o.t.Errorf("unexpected difference (-source +model):\n%s", diff)
	}
	o.t.Logf("with the guard off the old owner's writes show")
}

// A new owner that ends nobody is held up for as long as the old one is frozen.
func TestFenceControlBlocked(t *testing.T) {
	defer fault.Global.Disable(fault.EndBlockers)()
	const limit = takeoverLimit + time.Second
	next := map[string]*running{}
	for name, o := range map[string]*takeover{
		"half a round trip": frozenInside(t, queued, 0.8),
		"half a COPY":       frozenInside(t, copied, 0.5),
	} { // both at once: what it takes is to wait
		next[name] = run(t, o.runner(o.style.projection(), o.pool, projector.Options{ConnectTimeout: limit}))
	}
	for name, next := range next {
		err := next.wait(limit + 10*time.Second)
		var connect *projector.ConnectError
		if !errors.As(err, &connect) {
			t.Errorf("%s: the new owner was not held up for %s; it ended with %v", name, limit, err)
		}
		t.Logf("%s, with the guard off: %v", name, err)
	}
}
