package integration_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/integration/internal/chaos"
	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// badNetworks are what is done to the network between the runner and a server, each
// until it has shown.
var badNetworks = []struct {
	name string
	do   func(c *kept, g *running, p *chaos.Proxy)
}{
	{"hangs", func(c *kept, g *running, p *chaos.Proxy) {
		before := g.Status().Retries
		p.ToServer.HoldAfter(c.rng.Int64N(2000))
		p.ToClient.HoldAfter(c.rng.Int64N(2000))
		until(c.t, time.Minute, "the runner gives up waiting", func() bool { c.alive(g); return g.Status().Retries > before })
		p.ToServer.Pass()
		p.ToClient.Pass()
	}},
	{"hangs one way", func(c *kept, g *running, p *chaos.Proxy) {
		before := g.Status().Retries
		p.ToClient.HoldAfter(c.rng.Int64N(2000))
		until(c.t, time.Minute, "the runner gives up waiting", func() bool { c.alive(g); return g.Status().Retries > before })
		p.ToClient.Pass()
	}},
	{"drops", func(c *kept, g *running, p *chaos.Proxy) {
		for range 5 {
			lane := p.ToServer
			if c.rng.IntN(2) == 0 {
				lane = p.ToClient
			}
			lane.CutAfter(c.rng.Int64N(3000))
			wait(c.t, "a connection is cut", lane.Reached())
		}
	}},
	{"resets", func(c *kept, g *running, p *chaos.Proxy) {
		for range 5 {
			if c.rng.IntN(2) == 0 {
				p.Reset()
			} else {
				p.Cut()
			}
			c.goOn(1 + c.rng.Int64N(20))
		}
	}},
	{"trickles", func(c *kept, g *running, p *chaos.Proxy) {
		before := p.ToClient.Passed()
		p.ToClient.Trickle(2, 200*time.Millisecond)
		until(c.t, time.Minute, "some bytes come through", func() bool { return p.ToClient.Passed() > before+10 })
		p.ToClient.Delay(0)
	}},
	{"is slow", func(c *kept, g *running, p *chaos.Proxy) {
		p.ToServer.Delay(20 * time.Millisecond)
		p.ToClient.Delay(20 * time.Millisecond)
		c.goOn(200)
		c.commits(g, 3)
		p.ToServer.Delay(0)
		p.ToClient.Delay(0)
	}},
}

// The network to the source and to the sink hangs, breaks, trickles and lags, in the
// middle of whatever there is: the runner goes on by itself, and the model is exact.
// Report of the kind: propeller-heads/tycho PR#1424. What servers answer in the middle of
// a handler and at the COMMIT (40001, 40P01, 57P01, a backend that is ended) is
// TestCommitUnknown… for PostgreSQL and TestNetworkServerErrors for MongoDB.
func TestNetwork(t *testing.T) {
	t.Parallel()
	everyPlace(t, func(t *testing.T, p place) {
		c := keep(t, p, keeping{own: p == inSource, proxied: true})
		g := c.start(projector.Options{BatchChanges: 200, CommitTimeout: 2 * time.Second})
		c.write()
		order := c.rng.Perm(len(badNetworks))
		for round := range effort.Rounds(6) {
			bad := badNetworks[order[round%len(order)]]
			for side, proxy := range map[string]*chaos.Proxy{"source": c.toSource, "sink": c.toSink} {
				before, began := g.Status(), time.Now()
				bad.do(c, g, proxy)
				shown := time.Since(began)
				c.commits(g, 2)
				c.exact(g)
				st := g.Status()
				t.Logf("round %d: the network to the %s %s for %s: %d retries, %d streams opened, exact after %s", round+1, side, bad.name,
					shown.Round(time.Millisecond), st.Retries-before.Retries, st.StreamsOpened-before.StreamsOpened, time.Since(began).Round(time.Millisecond))
			}
		}
		t.Logf("%d changes, %d commits; heap in use %d MB", g.Status().Changes, g.Status().Commits, heapInUse()>>20)
		g.stop()
	})
}

// Commits take effect, and the connection breaks before the answer: again and again
// with everything on, and once with nothing to tell them from failures.
func TestNetworkLostAnswers(t *testing.T) {
	everyPlace(t, func(t *testing.T, p place) {
		c := keep(t, p, keeping{own: p == inSource, proxied: true})
		a := newAmbush(t)
		g := c.start(projector.Options{CommitTimeout: 5 * time.Second})
		for range effort.Rounds(6) {
			met := c.unanswered(a, func() {})
			c.step(20)
			c.nudge() // the steps may have changed nothing
			until(t, 2*time.Minute, "a commit is not answered", met)
			c.exact(g)
		}
		t.Logf("%d commits, %d retries", g.Status().Commits, g.Status().Retries)
		g.stop()
	})
}

func TestNetworkLostAnswersControl(t *testing.T) {
	everySinkOfPlaces(t, func(t *testing.T, p place) {
		without(t, fault.ReadBack, fault.FenceSequence)
		c := keep(t, p, keeping{own: p == inSource, proxied: true, opts: []mongodb.Option{mongodb.TimeLimit(2 * time.Second)}})
		a := newAmbush(t)
		g := c.start(projector.Options{})
		c.step(50)
		c.exact(g)
		before := g.Status().Retries
		// Nothing passes until the commit is given up: the COMMIT alone, sent again, would
		// be answered.
		met := c.unanswered(a, func() {
			c.toSink.Cut()
			for g.Status().Retries == before && c.t.Context().Err() == nil {
				time.Sleep(time.Millisecond)
			}
		})
		c.nudge()
		until(t, 2*time.Minute, "a commit is not answered", met)
		c.inexact(g)
	})
}

// What a server of MongoDB answers in the middle of a transaction and to its commit:
// write conflicts, elections, connections closed without an answer, a majority not
// reached in time (which leaves the commit in effect). sboesebeck/morphium PR#184:
// the label of a write conflict hidden by wrapping.
func TestNetworkServerErrors(t *testing.T) {
	closes := bson.E{Key: "closeConnection", Value: true}
	code := func(n int) bson.E { return bson.E{Key: "errorCode", Value: n} }
	concern := bson.E{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "for a test"}}}
	faults := []struct {
		name     string
		commands bson.A
		times    int
		data     bson.E
	}{
		{"write conflict in the handler", bson.A{"update"}, 3, code(112)},
		{"write conflict at the commit", bson.A{"commitTransaction"}, 2, code(112)},
		{"connection closed in the handler", bson.A{"update"}, 3, closes},
		{"connection closed at the commit", bson.A{"commitTransaction"}, 5, closes},
		{"shutdown at the commit", bson.A{"commitTransaction"}, 3, code(91)},
		{"no longer primary at the commit", bson.A{"commitTransaction"}, 3, code(10107)},
		{"interrupted at the commit", bson.A{"commitTransaction"}, 3, code(11602)},
		{"no majority for the commit", bson.A{"commitTransaction"}, 3, concern},
		{"no such transaction at the commit", bson.A{"commitTransaction"}, 1, code(251)},
		{"connection closed in the handler and at the read back", bson.A{"update", "findAndModify"}, 6, closes},
		{"connection closed in the stream", bson.A{"getMore", "aggregate"}, 3, closes},
	}
	t.Parallel()
	shared := rand.IntN(2) // which place has the first fault; in less effort each is met in one
	for i, p := range []place{inMongoDB, inSource} {
		t.Run(string(p), func(t *testing.T) {
			c := keep(t, p, keeping{own: true, mongod: serve.MongodOptions{Params: map[string]string{"enableTestCommands": "1"}}})
			server := client(t, c.sinkURI).Database("admin")
			// failing gives how often the fail point has been met before.
			failing := func(mode any, data ...bson.E) (count int) {
				t.Helper()
				cmd := bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: mode}}
				if len(data) > 0 {
					cmd = append(cmd, bson.E{Key: "data", Value: append(bson.D{{Key: "appName", Value: appName}}, data...)})
				}
				var reply struct{ Count int }
				must(t, server.RunCommand(t.Context(), cmd).Decode(&reply))
				return reply.Count
			}
			g := c.start(projector.Options{BatchChanges: 200})
			c.write()
			for round := range (effort.Rounds(6) + 2) / 3 {
				for j, f := range faults {
					if stream := f.commands[0] == "getMore"; p == inMongoDB && stream {
						continue // no stream on that server
					} else if effort.Rounds(2) < 2 && !stream && (i+j)%2 != shared {
						continue
					}
					before := g.Status()
					count := failing(bson.D{{Key: "times", Value: f.times}}, bson.E{Key: "failCommands", Value: f.commands}, f.data)
					must(t, server.RunCommand(t.Context(), bson.D{
						{Key: "waitForFailPoint", Value: "failCommand"}, {Key: "timesEntered", Value: count + f.times}, {Key: "maxTimeMS", Value: 60_000},
					}).Err())
					c.commits(g, 2)
					failing("off")
					c.exact(g)
					t.Logf("round %d: %s: %d retries", round+1, f.name, g.Status().Retries-before.Retries)
				}
			}
			g.stop()
		})
	}
}

// silent makes the stream's connection fall silent, and reports whether the runner has
// noticed within the limit. The driver's monitor can't: it has a connection of its own.
func silent(t *testing.T, limit time.Duration) bool {
	c := keep(t, inPostgres, keeping{proxied: true})
	g := c.start(projector.Options{SilenceTimeout: 500 * time.Millisecond})
	c.step(5)
	c.catchUp(g)
	muted := c.toSource.Mute("getMore")
	wait(t, "the stream's connection falls silent", muted)
	c.step(5)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	noticed := g.WaitFor(ctx, operationTime(t, c.db)) == nil
	if noticed {
		c.exact(g)
	}
	return noticed
}

func TestNetworkSilence(t *testing.T) {
	if !silent(t, 30*time.Second) {
		t.Error("a connection that has fallen silent is waited for")
	}
}

func TestNetworkSilenceControl(t *testing.T) {
	without(t, fault.StreamWatch)
	for range 3 { // on a machine that is too busy the driver may break the connection itself
		if !silent(t, 5*time.Second) {
			return
		}
	}
	t.Error("with the guard off the silence was noticed, too: the test proves nothing")
}
