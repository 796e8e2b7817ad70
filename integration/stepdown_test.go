package integration_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// shaken is a replica set of three that is written to, and a model of it in every place.
type shaken struct {
	*ordering
	set    *serve.Mongod
	kept   []*kept
	runs   []*running
	stored map[place]projector.Checkpoint // the last ones seen
	opens  atomic.Int64                   // attempts to open a stream
}

// shakenSet is the replica set of all these tests, since it takes seconds to start. Each
// leaves it whole.
var shakenSet = sync.OnceValues(func() (*serve.Mongod, error) {
	return serve.StartMongod(context.Background(), serve.MongodOptions{Members: 3, CacheGB: 0.25})
})

func newShaken(t *testing.T, of ...place) *shaken {
	t.Helper()
	set, err := shakenSet()
	must(t, err)
	s := &shaken{ordering: newOrdering(t, set.URI()), set: set, stored: map[place]projector.Checkpoint{}}
	for _, p := range of {
		c := keepOf(t, s.ordering, p, keeping{})
		s.kept = append(s.kept, c)
		s.runs = append(s.runs, c.start(projector.Options{BatchChanges: 500}))
	}
	return s
}

// goesOn waits until the writer writes and every model moves.
func (s *shaken) goesOn() {
	s.t.Helper()
	s.ordering.goOn(20)
	for i, c := range s.kept {
		c.commits(s.runs[i], 2)
	}
	// What a majority has is not rolled back, so no model ever goes back.
	for i, c := range s.kept {
		now := s.runs[i].Status().Checkpoint
		if was := s.stored[c.place]; now.Sequence < was.Sequence || now.Position.Time.Before(was.Position.Time) {
			s.t.Fatalf("%s: the checkpoint went back from sequence %d, %s to %d, %s", c.place, was.Sequence, was.Position, now.Sequence, now.Position)
		}
		s.stored[c.place] = now
	}
}

func (s *shaken) exact() {
	s.t.Helper()
	for i, c := range s.kept {
		c.exact(s.runs[i])
	}
}

// term is the replica set's, one more with each election.
func (s *shaken) term() (term int64) {
	s.t.Helper()
	until(s.t, time.Minute, "the replica set tells its term", func() bool {
		reply, err := s.db.Client().Database("admin").RunCommand(s.t.Context(), bson.D{{Key: "replSetGetStatus", Value: 1}}).Raw()
		if err == nil {
			term, _ = reply.Lookup("term").AsInt64OK()
		}
		return err == nil
	})
	return term
}

// stepDown makes the primary step down, by force every other time.
func (s *shaken) stepDown(force bool) {
	s.t.Helper()
	before := s.term()
	until(s.t, time.Minute, "the primary steps down", func() bool {
		err := s.db.Client().Database("admin").RunCommand(s.t.Context(), bson.D{
			{Key: "replSetStepDown", Value: 2}, {Key: "secondaryCatchUpPeriodSecs", Value: 1}, {Key: "force", Value: force},
		}).Err()
		return err == nil || s.term() > before
	})
	_, err := s.set.Primary(s.t.Context())
	must(s.t, err)
}

// The primary steps down again and again, is killed and started again, and then the
// whole set is gone for a minute: no projection ends, each says that it retries, none
// hammers the servers, and every one is exact afterwards. Reports of the kind:
// mongodb/node-mongodb-native PR#4653, Automattic/mongoose#6799 and
// zookzook/elixir-mongodb-driver#267 (no server for 30 s taken for fatal),
// yougov/mongo-connector#572 (good rows deleted after a failover).
func TestStepdown(t *testing.T) {
	s := newShaken(t, places...)
	fault.Global.OnReach(func(p fault.Point) {
		if p == fault.StreamOpen {
			s.opens.Add(1)
		}
	})
	t.Cleanup(func() { fault.Global.OnReach(nil) })
	s.write()
	first := s.term()
	n := effort.Rounds(20)
	for round := range n {
		s.stepDown(round%2 == 0)
		s.goesOn()
	}
	if now := s.term(); now < first+int64(n) {
		t.Errorf("%d elections in %d rounds", now-first, n)
	}
	s.exact()
	s.report("%d times stepped down", n)

	kills := effort.Rounds(6)
	for range kills {
		primary, err := s.set.Primary(t.Context())
		must(t, err)
		must(t, primary.Kill())
		s.goesOn() // with two of three
		must(t, primary.Restart(t.Context()))
	}
	s.exact()
	s.report("the primary killed %d times", kills)

	s.outage(time.Duration(effort.Rounds(60)) * time.Second)
	s.goesOn()
	s.exact()
	s.report("back from an outage")
	for i, c := range s.kept {
		c.alive(s.runs[i])
		s.runs[i].stop()
	}
}

func (s *shaken) report(format string, args ...any) {
	s.t.Helper()
	s.t.Logf(format, args...)
	for i, c := range s.kept {
		st := s.runs[i].Status()
		s.t.Logf("  %s: %d changes, %d commits, %d retries, %d streams opened", c.place, st.Changes, st.Commits, st.Retries, st.StreamsOpened)
	}
	s.t.Logf("  %d steps of the writer, %d failed; heap in use %d MB", s.steps.Load(), s.failed.Load(), heapInUse()>>20)
}

// outage takes the whole set down for a time.
func (s *shaken) outage(length time.Duration) {
	s.t.Helper()
	must(s.t, s.set.Kill())
	opens, began := s.opens.Load(), time.Now()
	over := time.After(length)
	for i, c := range s.kept {
		until(s.t, 30*time.Second, "the runner says that it retries", func() bool {
			c.alive(s.runs[i])
			return s.runs[i].Status().State == projector.Retrying
		})
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for waiting := true; waiting; {
		for i, c := range s.kept {
			c.alive(s.runs[i])
			if st := s.runs[i].Status(); st.State != projector.Retrying || st.Err == nil {
				s.t.Fatalf("%s: in the outage its state is %s, with error %v", c.place, st.State, st.Err)
			}
		}
		select {
		case <-over:
			waiting = false
		case <-tick.C:
		}
	}
	opened := s.opens.Load() - opens
	if most := int64(len(s.kept)) * attempts(time.Since(began)); opened > most {
		s.t.Errorf("%d attempts to open a stream in %s; the backoff allows %d", opened, time.Since(began), most)
	}
	s.t.Logf("down for %s: %d attempts of %d runners to open a stream", time.Since(began).Round(time.Second), opened, len(s.kept))
	must(s.t, s.set.Restart(s.t.Context()))
}

// attempts is how many the backoff allows in a time: it waits for at least half of 50 ms,
// twice that and so on, at most half of 10 s.
func attempts(length time.Duration) (n int64) {
	for wait := 25 * time.Millisecond; length > 0; n++ {
		length -= wait
		wait = min(2*wait, 5*time.Second)
	}
	return n + 1
}

// reopened makes changes between the end of a stream and its reopening, which is where a
// consumer loses them that goes on from wherever the source is by then.
func reopened(t *testing.T) (*kept, *running) {
	s := newShaken(t, inPostgres)
	c, g := s.kept[0], s.runs[0]
	s.step(50)
	c.exact(g)
	a := newAmbush(t)
	gone := a.freeze(t, fault.StreamReopens)
	until(t, time.Minute, "the stream has ended", func() bool {
		s.stepDown(true)
		select {
		case <-gone.arrived:
			return true
		case <-time.After(3 * time.Second): // the same one was elected again, and its cursor lives on
			return false
		}
	})
	s.steps.Store(0)
	until(t, time.Minute, "the source is changed again", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.writer.step(t.Context()) == nil {
			s.steps.Add(1)
		}
		return s.steps.Load() >= 50
	})
	gone.thaw()
	return c, g
}

func TestStepdownChangesBeforeTheReopening(t *testing.T) {
	c, g := reopened(t)
	c.exact(g)
}

// Without the position of the last event read, they are lost.
func TestStepdownControl(t *testing.T) {
	without(t, fault.StreamResume)
	c, g := reopened(t)
	// The stream is open again, so what comes now is seen.
	until(t, time.Minute, "the stream is open again", func() bool { return ended(g) || g.Status().StreamsOpened > 1 })
	c.inexact(g)
}

func ended(g *running) bool {
	select {
	case <-g.done:
		return true
	default:
		return false
	}
}

// A change that a primary has accepted and no majority has is rolled back when it loses
// the set. It never shows in a model, and nothing is subtracted for it afterwards.
func TestStepdownRollback(t *testing.T) {
	t.Parallel()
	s := newShaken(t, places...)
	s.step(50)
	s.exact()
	primary, err := s.set.Primary(t.Context())
	must(t, err)
	var others []*serve.Process
	for _, m := range s.set.Members {
		if m != primary {
			others = append(others, m)
		}
	}
	direct := dedicated(t, "mongodb://"+primary.Addr()+"/?directConnection=true").Database(s.db.Name())
	lone := direct.Collection("orders", options.Collection().SetWriteConcern(writeconcern.W1()))
	for _, m := range others { // the primary does not know for another two seconds that it is alone
		must(t, m.Kill())
	}
	for n := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := lone.InsertOne(ctx, order{ID: int64(1_000_000 + n), Group: "rolled back", State: "paid", Amount: 1})
		cancel()
		must(t, err)
	}
	must(t, primary.Kill())
	for _, m := range others {
		must(t, m.Restart(t.Context()))
	}
	_, err = s.set.Primary(t.Context())
	must(t, err)
	s.write()
	s.goesOn()
	must(t, primary.Restart(t.Context())) // it rolls back
	s.goesOn()
	s.exact()
	for _, c := range s.kept {
		got, _, err := c.model.rows()
		must(t, err)
		if _, there := got.Totals["rolled back"]; there {
			t.Errorf("%s: what was rolled back is in the model", c.place)
		}
	}
	if n, err := s.db.Collection("orders").CountDocuments(t.Context(), bson.D{{Key: "group", Value: "rolled back"}}); err != nil || n != 0 {
		t.Errorf("%d documents were not rolled back, %v", n, err)
	}
}
