package integration_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// stopTimeout is the runners' in these tests, and stopMargin what Run may take beyond it:
// the servers are given a second each to take leave of.
const (
	stopTimeout = time.Second
	stopMargin  = 3 * time.Second
)

// cancelPoints are where a run is cancelled.
var cancelPoints = []fault.Point{
	fault.StreamOpen, fault.CommitBegin, fault.HandlerBegin, fault.HandlerEnd, fault.CommitSend, fault.CommitAnswer, fault.CommitDone,
}

// leftovers are the goroutines of this library that are still there.
func leftovers() (left []string) {
	buf := make([]byte, 4<<20)
	buf = buf[:runtime.Stack(buf, true)]
	for g := range strings.SplitSeq(string(buf), "\n\n") {
		for _, of := range []string{"tidemark/projector.", "tidemark/sinks/"} {
			if strings.Contains(g, of) {
				left = append(left, g)
				break
			}
		}
	}
	return left
}

// endsWithin demands that a run that was cancelled at a time ends in time, without an
// error and without leaving anything behind.
func (c *kept) endsWithin(g *running, cancelled time.Time, limit time.Duration) time.Duration {
	c.t.Helper()
	err := g.wait(limit + 20*time.Second)
	took := time.Since(cancelled)
	if err != nil {
		c.t.Fatalf("%s: a run that was cancelled ended with %v", c.place, err)
	}
	if took > limit {
		c.t.Errorf("%s: a run that was cancelled took %s to end", c.place, took)
	}
	if left := leftovers(); len(left) > 0 {
		// A goroutine that has done its work may not be gone yet.
		until(c.t, 10*time.Second, "every goroutine has ended:\n"+strings.Join(left, "\n\n"), func() bool { return len(leftovers()) == 0 })
	}
	return took
}

// A run is cancelled at random points, in every second round with a sink that does not
// answer from there on: Run returns soon and without an error, leaves no goroutine, and
// the next one goes on where it was. Reports of the kind: ConduitIO/conduit#2519,
// practo/tipoca-stream#135 (killed in mid-batch, or hanging in a retry until it is).
func TestCancel(t *testing.T) {
	everyPlace(t, func(t *testing.T, p place) {
		c := keep(t, p, keeping{own: true})
		o := projector.Options{BatchChanges: 100, StopTimeout: stopTimeout}
		begun := c.start(o)
		c.step(20)
		c.exact(begun)
		begun.stop()
		c.write()
		var slowest time.Duration
		at := map[string]int{}
		n := max(2, effort.Rounds(20))
		for round := range n {
			target := cancelPoints[c.rng.IntN(len(cancelPoints))]
			skip, blocks := c.rng.IntN(30), round%2 == 1
			if target == fault.StreamOpen {
				skip = c.rng.IntN(2) // one to see whether it may, one to follow
			}
			type event struct {
				when time.Time
				err  error
			}
			reached := make(chan event, 1)
			var once sync.Once
			var mu sync.Mutex
			var g *running
			started := make(chan struct{})
			fault.Global.OnReach(func(p fault.Point) {
				mu.Lock()
				skip--
				now := p == target && skip < 0
				mu.Unlock()
				if !now {
					return
				}
				once.Do(func() {
					<-started
					var err error
					if blocks {
						err = c.server.Pause()
					}
					g.cancel()
					reached <- event{time.Now(), err}
				})
			})
			r, err := c.model.runner(c.way, c.options(o))
			must(t, err)
			g = run(t, r)
			close(started)
			var e event
			select {
			case e = <-reached:
			case <-time.After(time.Minute):
				t.Fatalf("the run has not come to %s: %+v", target, g.Status())
			}
			must(t, e.err)
			took := c.endsWithin(g, e.when, stopTimeout+stopMargin)
			slowest = max(slowest, took)
			fault.Global.OnReach(nil)
			must(t, c.server.Resume())
			what := fmt.Sprintf("%s, sink blocked: %t", target, blocks)
			at[what]++
			t.Logf("round %d: cancelled at %s; it took %s", round+1, what, took.Round(time.Millisecond))

			if round%4 == 3 || round == n-1 {
				g = c.start(o)
				c.exact(g)
				g.stop()
			}
		}
		t.Cleanup(func() { fault.Global.OnReach(nil) })
		keys := make([]string, 0, len(at))
		for k, n := range at {
			keys = append(keys, fmt.Sprintf("%s: %d", k, n))
		}
		slices.Sort(keys)
		t.Logf("the slowest end took %s\n%s", slowest.Round(time.Millisecond), strings.Join(keys, "\n"))
	})
}

// The same in trouble: while the sink does not answer and a commit hangs, while the sink
// is gone and commits are tried again, and while the source is gone.
func TestCancelInTrouble(t *testing.T) {
	one := places[rand.IntN(len(places))]
	everyPlace(t, func(t *testing.T, p place) {
		limit := time.Duration(effort.Rounds(3)) * time.Second
		c := keep(t, p, keeping{own: true, proxied: true, opts: []mongodb.Option{mongodb.TimeLimit(limit)}})
		a := newAmbush(t)
		o := projector.Options{StopTimeout: stopTimeout, CommitTimeout: time.Minute}
		for _, trouble := range []struct {
			name   string
			begin  func(g *running)
			shown  func(g *running) bool
			finish func()
		}{
			{"the sink hangs", func(*running) { a.at(fault.HandlerBegin, func() { must(t, c.server.Pause()) }); c.nudge() }, nil, func() { must(t, c.server.Resume()) }},
			{
				"the sink is gone", func(*running) { a.at(fault.CommitSend, func() { must(t, c.server.Kill()) }); c.nudge() },
				func(g *running) bool { return g.Status().Retries >= int64(effort.Rounds(2)) }, func() { must(t, c.server.Restart(t.Context())) },
			},
			{
				"the network to the source hangs", func(*running) { c.toSource.ToClient.HoldAfter(0) },
				func(g *running) bool { return g.Status().Retries > 0 }, c.toSourcePass,
			},
			{
				"the network to the source hangs, not noticed yet", func(*running) { c.toSource.ToClient.HoldAfter(0) },
				func(*running) bool {
					select {
					case <-c.toSource.ToClient.Reached():
						return true
					default:
						return false
					}
				}, c.toSourcePass,
			},
		} {
			if effort.Rounds(2) < 2 && p != one && strings.Contains(trouble.name, "source") {
				continue // it's the same wherever the model is
			}
			g := c.start(o)
			c.step(20)
			c.exact(g)
			began := time.Now()
			trouble.begin(g)
			shown := trouble.shown
			if shown == nil {
				shown = func(*running) bool { a.mu.Lock(); defer a.mu.Unlock(); return a.do == nil }
			}
			until(t, time.Minute, "the trouble shows", func() bool { return shown(g) })
			visible := time.Since(began)
			g.cancel()
			took := c.endsWithin(g, time.Now(), stopTimeout+stopMargin)
			t.Logf("%s: cancelled after %s, ended in %s", trouble.name, visible.Round(time.Millisecond), took.Round(time.Millisecond))
			trouble.finish()
			next := time.Now()
			g = c.start(o)
			c.exact(g)
			g.stop()
			t.Logf("the next run is exact after %s", time.Since(next).Round(time.Millisecond))
		}
	})
}

func (c *kept) toSourcePass() {
	c.toSource.Cut()
	c.toSource.ToClient.Pass()
}

// It is StopTimeout that bounds the end: with a longer one, a sink that does not answer
// is waited for longer.
func TestCancelControl(t *testing.T) {
	everySinkOfPlaces(t, func(t *testing.T, p place) {
		c := keep(t, p, keeping{own: true})
		a := newAmbush(t)
		g := c.start(projector.Options{StopTimeout: 2 * (stopTimeout + stopMargin), CommitTimeout: time.Minute})
		c.step(20)
		c.exact(g)
		paused := make(chan error, 1)
		a.at(fault.CommitSend, func() { paused <- c.server.Pause() })
		c.nudge()
		must(t, <-paused)
		g.cancel()
		began := time.Now()
		select {
		case <-g.done:
			t.Errorf("it has ended after %s", time.Since(began))
		case <-time.After(stopTimeout + stopMargin):
		}
		must(t, c.server.Resume())
		must(t, g.wait(time.Minute))
	})
}

// lateAfterCancel cancels a run whose commit is on its way, lets another run follow, and
// delivers the commit then.
func lateAfterCancel(t *testing.T) (*kept, *running) {
	c := keep(t, inPostgres, keeping{proxied: true})
	// Queued, the whole commit is in the last round trip.
	one := c.model.(*postgresModel)
	queuedRunner := func() *running {
		p := orderLedger(nil)
		p.Bindings = append(append(append(p.Bindings, orderTotals.Bindings...), orderMirror.Bindings...), orderHandles.Bindings...)
		r, err := projector.New(c.way, postgres.New(one.way), p, c.options(projector.Options{StopTimeout: stopTimeout}))
		must(t, err)
		g := run(t, r)
		until(t, time.Minute, "the runner follows the source", func() bool { return g.Status().State == projector.Running })
		return g
	}
	a := newAmbush(t)
	g := queuedRunner()
	for range 3 { // with its statements prepared
		c.step(30)
		c.exact(g)
	}
	onItsWay := make(chan struct{})
	a.at(fault.CommitSend, func() {
		c.toSink.ToServer.HoldAfter(0)
		reached := c.toSink.ToServer.Reached()
		go func() { <-reached; close(onItsWay) }()
	})
	c.mu.Lock()
	_, err := c.writer.orders.InsertMany(t.Context(), c.writer.many(20))
	c.mu.Unlock()
	must(t, err)
	wait(t, "a commit is on its way", onItsWay)
	deliver := c.toSink.Strand()
	g.cancel()
	c.endsWithin(g, time.Now(), stopTimeout+stopMargin)
	g = queuedRunner()
	c.exact(g)
	deliver()
	return c, g
}

// A commit that was under way when the run was cancelled arrives when the next run has
// done its work already.
func TestCancelLateCommit(t *testing.T) {
	c, g := lateAfterCancel(t)
	c.exact(g)
}

// Without the comparison of term and sequence it is applied once more.
func TestCancelLateCommitControl(t *testing.T) {
	without(t, fault.FenceTerm, fault.FenceSequence)
	c, g := lateAfterCancel(t)
	c.inexact(g)
}
