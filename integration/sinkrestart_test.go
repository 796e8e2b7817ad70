package integration_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// everyPlace runs a test in every place.
func everyPlace(t *testing.T, f func(*testing.T, place)) {
	for _, p := range places {
		t.Run(string(p), func(t *testing.T) { f(t, p) })
	}
}

// everySinkOfPlaces is for what a sink does alike wherever its model is: over every place,
// or in less effort over one of those in MongoDB.
func everySinkOfPlaces(t *testing.T, f func(*testing.T, place)) {
	left := rand.IntN(2)
	for i, p := range places {
		if i == 0 || effort.Rounds(2) == 2 || i == 1+left {
			t.Run(string(p), func(t *testing.T) { f(t, p) })
		}
	}
}

// The sink is stopped, and killed, in the middle of commits, among them such as take
// effect without an answer. Reports of the kind: propeller-heads/tycho PR#1424,
// ExtendDB/extenddb PR#343, anyproto/any-sync-coordinator PR#129.
func TestSinkRestart(t *testing.T) {
	everyPlace(t, func(t *testing.T, p place) {
		c := keep(t, p, keeping{own: true, proxied: true})
		a := newAmbush(t)
		g := c.start(projector.Options{BatchChanges: 200})
		c.write()
		n, unknown := effort.Rounds(6), 0
		for round := range n {
			ended := make(chan error, 1)
			met := func() bool { return false }
			switch round % 3 {
			case 0: // a moment after the COMMIT was sent, or before the server has got it
				later := time.Duration(c.rng.Int64N(int64(3 * time.Millisecond)))
				a.at(fault.CommitSend, func() { time.AfterFunc(later, func() { ended <- c.server.Kill() }) })
			case 1:
				met = c.unanswered(a, func() { ended <- c.server.Kill() })
			default:
				a.at(fault.HandlerEnd, func() { go func() { ended <- c.server.Stop() }() })
			}
			select {
			case err := <-ended:
				must(t, err)
			case <-time.After(2 * time.Minute):
				t.Fatalf("round %d: no commit to stop the server in: %+v", round, g.Status())
			}
			until(t, time.Minute, "the runner says that it retries", func() bool {
				c.alive(g)
				return g.Status().State == projector.Retrying
			})
			must(t, c.server.Restart(t.Context()))
			c.commits(g, 3)
			if met() {
				unknown++
			}
			if round%3 == 2 || round == n-1 {
				c.exact(g)
			}
		}
		st := g.Status()
		t.Logf("%d restarts, %d of them after a commit took effect; %d changes, %d commits, %d retries; %d steps of the writer, %d failed",
			n, unknown, st.Changes, st.Commits, st.Retries, c.steps.Load(), c.failed.Load())
		if unknown == 0 && n >= 6 { // by chance, in a few
			t.Error("no commit took effect without an answer")
		}
		g.stop()
	})
}

// Who takes a lost answer for a failure, and compares no sequence, applies a commit twice
// over the restart.
func TestSinkRestartControl(t *testing.T) {
	everySinkOfPlaces(t, func(t *testing.T, p place) {
		without(t, fault.ReadBack, fault.FenceSequence)
		// A sink of MongoDB sends the COMMIT again for as long as the time limit lets it.
		c := keep(t, p, keeping{own: true, proxied: true, opts: []mongodb.Option{mongodb.TimeLimit(2 * time.Second)}})
		a := newAmbush(t)
		g := c.start(projector.Options{})
		c.step(50)
		c.exact(g)
		ended := make(chan error, 1)
		before := g.Status().Retries
		met := c.unanswered(a, func() { ended <- c.server.Kill() })
		c.nudge()
		must(t, <-ended)
		until(t, time.Minute, "the commit is given up", func() bool {
			st := g.Status()
			return st.Retries > before && st.Doing == "commit to the sink"
		})
		must(t, c.server.Restart(t.Context()))
		if !met() {
			t.Fatal("no commit took effect without an answer")
		}
		c.inexact(g)
	})
}

// setBack makes a copy of the sink's data, lets do change the model, and puts the copy
// in its place while the runner runs.
func (c *kept) setBack(do func()) {
	c.t.Helper()
	dir, err := os.MkdirTemp(os.Getenv("TIDEMARK_DATA"), "tidemark-copy-") // where the data is
	must(c.t, err)
	defer os.RemoveAll(dir)
	earlier := filepath.Join(dir, "earlier")
	must(c.t, c.server.Stop())
	must(c.t, c.data.CopyData(earlier))
	must(c.t, c.server.Restart(c.t.Context()))
	do()
	must(c.t, c.server.Stop())
	must(c.t, c.data.RestoreData(earlier))
	must(c.t, c.server.Restart(c.t.Context()))
}

// A sink that is set back to an earlier state of itself while the runner runs, as by a
// restored backup or a failover to a standby that lags, is noticed by its checkpoint:
// the runner goes back to where that is, and applies again what was lost, once.
//
// MongoDB's driver has a limit here: a client takes no primary whose election is older
// than one it has seen. Where there was more than one election since the copy, the runner
// stays in Retrying (tried), and a new process, with a new client, goes on exactly.
func TestSinkSetBack(t *testing.T) {
	t.Parallel()
	all, first := effort.Rounds(2) == 2, rand.IntN(2) // in less effort each of the two meets one sink
	for i, p := range []place{inPostgres, inMongoDB} {
		if all || i == first {
			t.Run(string(p), func(t *testing.T) { setBackWhileItRuns(t, p) })
		}
		if all || i != first {
			t.Run(string(p)+" before the term", func(t *testing.T) { setBackBeforeTheTerm(t, p) })
		}
	}
	// Here the source goes back with its model. What the stream has read past that time
	// no longer exists, which its token tells; the model's checkpoint does exist.
	t.Run(string(inSource), func(t *testing.T) {
		c := keep(t, inSource, keeping{own: true})
		g := c.start(projector.Options{})
		c.step(100)
		c.exact(g)
		c.setBack(func() {
			c.step(100)
			c.exact(g)
		})
		c.step(10)
		select {
		case <-g.done:
			if !errors.Is(g.err, projector.ErrHistoryLost) {
				t.Fatalf("the runner ended with %v", g.err)
			}
			t.Logf("the runner has ended: %v", g.err)
			g = c.start(projector.Options{})
		case <-time.After(5 * time.Second):
			t.Logf("the runner goes on: %+v", g.Status())
		}
		c.exact(g)
		g.stop()
	})
}

func setBackWhileItRuns(t *testing.T, p place) {
	c := keep(t, p, keeping{own: true})
	g := c.start(projector.Options{BatchChanges: 200})
	for range (effort.Rounds(9) + 2) / 3 {
		c.step(100)
		c.exact(g)
		var lost projector.Checkpoint
		c.setBack(func() {
			c.step(100)
			c.exact(g)
			lost = g.Status().Checkpoint
		})
		now := c.stored()
		if now.Sequence >= lost.Sequence {
			t.Fatalf("the sink was not set back: it is at sequence %d, and was at %d", now.Sequence, lost.Sequence)
		}
		c.step(10)
		c.exact(g)
		if !c.log.says("starting again from it") {
			t.Error("the runner does not log that it starts again")
		}
		t.Logf("set back from sequence %d to %d, now %d", lost.Sequence, now.Sequence, g.Status().Checkpoint.Sequence)
	}
	g.stop()
}

func setBackBeforeTheTerm(t *testing.T, p place) {
	c := keep(t, p, keeping{own: true})
	g := c.start(projector.Options{})
	c.step(100)
	c.exact(g)
	c.setBack(func() {
		g.stop()
		g = c.start(projector.Options{})
		c.step(100)
		c.exact(g)
		if term := g.Status().Checkpoint.Term; term != 2 {
			t.Errorf("the second runner has term %d", term)
		}
	})
	now := c.stored()
	if now.Term != 1 {
		t.Errorf("the sink was not set back before the term: it has %d", now.Term)
	}
	c.step(10)
	c.exact(g)
	now = c.stored()
	if now.Term != 2 {
		t.Errorf("the runner has not taken the term again: it is %d", now.Term)
	}
	g.stop()
}

// Without the comparison of term and sequence, in the fence and after an error, the
// runner goes on as if nothing had been, and what was lost stays lost.
func TestSinkSetBackControl(t *testing.T) {
	for _, p := range []place{inPostgres, inMongoDB} {
		t.Run(string(p), func(t *testing.T) {
			without(t, fault.FenceTerm, fault.FenceSequence, fault.ReadBack)
			c := keep(t, p, keeping{own: true})
			g := c.start(projector.Options{})
			c.step(100)
			c.exact(g)
			c.setBack(func() {
				c.step(100)
				c.exact(g)
			})
			c.step(10)
			c.inexact(g)
		})
	}
}

// removed takes the checkpoint away from under a runner.
func removed(t *testing.T, p place) (*kept, *running) {
	c := keep(t, p, keeping{})
	g := c.start(projector.Options{})
	c.step(50)
	c.exact(g)
	must(t, c.model.forget())
	c.step(1)
	return c, g
}

// A checkpoint that is removed while the runner runs ends it. Neither it nor the next
// one begins anew from now, which would leave out what lies between in silence.
func TestSinkCheckpointRemoved(t *testing.T) {
	t.Parallel()
	everyPlace(t, func(t *testing.T, p place) {
		c, g := removed(t, p)
		before, _, err := c.model.rows()
		must(t, err)
		ends[*projector.CheckpointError](t, g)
		c.step(10)
		r, err := c.model.runner(c.way, projector.Options{Start: projector.FromNow(), Logger: quiet()})
		must(t, err)
		ends[*projector.ConfigError](t, run(t, r))
		after, _, err := c.model.rows()
		must(t, err)
		if len(before.Mirror) != len(after.Mirror) {
			t.Errorf("the model went from %d to %d rows", len(before.Mirror), len(after.Mirror))
		}
	})
}

// Without the error of a fence that matches nothing the runner goes on, and its position
// is nowhere.
func TestSinkCheckpointRemovedControl(t *testing.T) {
	everyPlace(t, func(t *testing.T, p place) {
		without(t, fault.FenceRaises)
		c, g := removed(t, p)
		c.catchUp(g)
		now, err := c.model.checkpoint(t.Context())
		must(t, err)
		if now.Sequence != 0 {
			t.Errorf("there is a checkpoint with sequence %d", now.Sequence)
		}
	})
}

// backlogOf stops the network to the sink in a commit, and writes far more than the runner
// may keep. It gives how much was read from the source, and kept in memory.
func backlogOf(t *testing.T, p place, o projector.Options) (c *kept, g *running, written, read, held int64) {
	c = keep(t, p, keeping{own: p == inSource, proxied: true})
	a := newAmbush(t)
	g = c.start(o)
	c.step(50)
	c.exact(g)
	heap := int64(heapInUse())
	before := c.toSource.ToClient.Passed()
	held2 := make(chan struct{})
	a.at(fault.CommitSend, func() {
		c.toSink.ToClient.HoldAfter(0)
		close(held2)
	})
	c.step(1)
	wait(t, "a commit hangs", held2)
	pad := pad("x", 0.25)
	docs := make([]any, 4)
	for range 40 {
		for i := range docs {
			o := c.writer.fresh()
			docs[i] = bson.D{{Key: "_id", Value: o.ID}, {Key: "group", Value: o.Group}, {Key: "state", Value: o.State}, {Key: "amount", Value: o.Amount}, {Key: "pad", Value: pad}}
		}
		_, err := c.db.Collection("orders").InsertMany(t.Context(), docs)
		must(t, err)
		written += int64(len(docs) * len(pad))
	}
	docs = nil
	// Reading has come to rest when next to nothing has passed for a while; what passes
	// are the driver's questions how the server is.
	last, still := int64(-1), 0
	until(t, time.Minute, "reading comes to rest", func() bool {
		now := c.toSource.ToClient.Passed()
		if now-last > 64<<10 {
			last, still = now, 0
		}
		still++
		return still > 300
	})
	return c, g, written, c.toSource.ToClient.Passed() - before, int64(heapInUse()) - heap
}

// While the sink does not answer, reading stops and memory stays bounded, however much is
// written. Afterwards nothing is missing.
func TestSinkDownMemory(t *testing.T) {
	everySinkOfPlaces(t, func(t *testing.T, p place) {
		c, g, written, read, held := backlogOf(t, p, projector.Options{BufferBytes: 1 << 20, BatchBytes: 1 << 20, CommitTimeout: time.Minute})
		t.Logf("%d MB written, %d MB read from the source, %d MB more in use", written>>20, read>>20, held>>20)
		// A reply has at most 16 MB; it is decoded, and in the driver's buffer as well.
		if read > 18<<20 || held > 64<<20 {
			t.Errorf("%d MB were read from the source, %d MB are in use", read>>20, held>>20)
		}
		c.toSink.ToClient.Pass()
		c.exact(g)
		g.stop()
	})
}

// With a buffer that takes everything, everything is read.
func TestSinkDownMemoryControl(t *testing.T) {
	c, g, written, read, held := backlogOf(t, inPostgres, projector.Options{BufferBytes: 1 << 30, CommitTimeout: time.Minute})
	t.Logf("%d MB written, %d MB read from the source, %d MB more in use", written>>20, read>>20, held>>20)
	if read < written {
		t.Errorf("only %d MB of %d were read: what bounds the reading is not the buffer", read>>20, written>>20)
	}
	c.toSink.ToClient.Pass()
	c.exact(g)
	g.stop()
}
