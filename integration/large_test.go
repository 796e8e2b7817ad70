package integration_test

import (
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/internal/chaos"
	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// pad is a string of n megabytes and a bit, made of c.
func pad(c string, megabytes float64) string {
	return strings.Repeat(c, int(megabytes*(1<<20)))
}

// large writes a document of 9 MB, another 9 MB in its place, and five small ones.
func large(f *things) {
	f.t.Helper()
	_, err := f.coll().InsertOne(f.t.Context(), bson.D{{Key: "_id", Value: "big"}, {Key: "n", Value: 1}, {Key: "pad", Value: pad("a", 9)}})
	must(f.t, err)
	_, err = f.coll().ReplaceOne(f.t.Context(), bson.D{{Key: "_id", Value: "big"}}, bson.D{{Key: "n", Value: 2}, {Key: "pad", Value: pad("b", 9.5)}})
	must(f.t, err)
	f.add(5)
}

func largeOn(t *testing.T, version string) *things {
	m := throwaway(t, serve.MongodOptions{Version: version})
	if m.Version() != version {
		t.Skipf("MongoDB %s can't be had here", version)
	}
	return newThingsOn(t, sourceOn(t, m.URI()), pool(t))
}

// A change that exceeds 16 MB with its images is split by the server and applied; so is
// what follows it. (CASES B26: it counts as a passing failure, and the stream restarts at
// the same event for ever.)
func TestLargeChangesAreApplied(t *testing.T) {
	f := largeOn(t, "6.0.27")
	g, sums := f.run(mirror("large")), f.run(rollupOf("large_sums"))
	large(f)
	g.level(f.db)
	sums.level(f.db)
	f.same("large")
	if n := selectOne[int64](t, f.pool, "select n from large_sums.sums where name = ''"); n != 2 {
		t.Errorf("the sum of the large document is %d", n)
	}
	for _, r := range []*running{g, sums} {
		// The server is asked to split once one event has been too large.
		if s := r.Status(); s.StreamsOpened > 2 || s.Retries != 0 {
			t.Errorf("%d streams were opened, %d retries", s.StreamsOpened, s.Retries)
		}
		r.stop()
	}

	t.Run("control without "+string(fault.SplitEvents), func(t *testing.T) {
		without(t, fault.SplitEvents)
		ends[*projector.EventTooLargeError](t, run(t, f.runner(rollupOf("unsplit"), projector.Options{})))
	})
}

// A runner that ends between two fragments begins with the first again.
func TestLargeChangesSurviveAStopBetweenFragments(t *testing.T) {
	f := largeOn(t, "6.0.27")
	hosts := f.db.Client()
	var hello struct {
		Me string `bson:"me"`
	}
	must(t, hosts.Database("admin").RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&hello))
	proxy, err := chaos.NewProxy(hello.Me)
	must(t, err)
	t.Cleanup(func() { must(t, proxy.Close()) })
	through := url.URL{Scheme: "mongodb", Host: proxy.Addr(), Path: "/", RawQuery: "directConnection=true"}
	behind := *f
	behind.db = client(t, through.String()).Database(f.db.Name())

	p := rollupOf("large_sums")
	g := run(t, behind.runner(p, projector.Options{}))
	g.level(f.db)
	a := newAmbush(t)
	stopped := make(chan struct{})
	a.at(fault.StreamReopens, func() { g.cancel(); close(stopped) })
	// The insert (9 MB) and the first fragment of the replacement (9 MB) pass, the
	// second is cut off in its middle.
	proxy.ToClient.CutAfter(23 << 20)
	large(f)
	wait(t, "the second fragment is cut off", stopped)
	must(t, g.wait(30*time.Second))
	if n := selectOne[int64](t, f.pool, "select coalesce(sum(n), 0) from large_sums.sums"); n > 1 {
		t.Fatalf("the sum is %d: the replacement has passed whole", n)
	}
	g = f.run(p)
	g.level(f.db)
	if n := selectOne[int64](t, f.pool, "select n from large_sums.sums where name = ''"); n != 2 {
		t.Errorf("the sum of the large document is %d", n)
	}
	g.stop()
}

// A position that is a split event's token is one to go on from, for a new runner too,
// which has not met a large event yet.
func TestLargeChangesAreResumedAfter(t *testing.T) {
	f := largeOn(t, "6.0.27")
	p := rollupOf("large_sums")
	g := run(t, f.runner(p, projector.Options{}))
	g.level(f.db)
	stopped := make(chan struct{})
	var once sync.Once
	fault.Global.OnReach(func(at fault.Point) {
		if at == fault.CommitDone && g.Status().Changes == 2 { // before an idle position can be stored
			once.Do(func() { g.cancel(); close(stopped) })
		}
	})
	t.Cleanup(func() { fault.Global.OnReach(nil) })
	_, err := f.coll().InsertOne(t.Context(), bson.D{{Key: "_id", Value: "big"}, {Key: "n", Value: 1}, {Key: "pad", Value: pad("a", 9)}})
	must(t, err)
	_, err = f.coll().ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: "big"}}, bson.D{{Key: "n", Value: 2}, {Key: "pad", Value: pad("b", 9.5)}})
	must(t, err)
	wait(t, "the large change is committed", stopped)
	must(t, g.wait(30*time.Second))
	_, err = f.coll().UpdateByID(t.Context(), "big", set("pad", ""))
	must(t, err)
	f.add(5)
	g = f.run(p)
	g.level(f.db)
	if got := selectAll[sumRow](t, f.pool, "select name, n from large_sums.sums where name = ''"); len(got) != 1 || got[0].N != 2 {
		t.Errorf("the sum of the large document is %v", got)
	}
	if s := g.Status(); s.StreamsOpened > 2 || s.Retries != 0 || s.Changes != 6 {
		t.Errorf("%d streams were opened, %d retries, %d changes", s.StreamsOpened, s.Retries, s.Changes)
	}
	g.stop()
}

// A server that can't split says so once; the stream is not opened over and over.
func TestLargeChangesEndOnServersThatCannotSplit(t *testing.T) {
	f := largeOn(t, "6.0.5")
	opened := opens(t)
	g := f.run(rollupOf("large_sums"))
	f.add(1)
	g.level(f.db)
	large(f)
	err := ends[*projector.EventTooLargeError](t, g)
	if n := opened(); n > 5 {
		t.Errorf("the stream was opened %d times", n)
	}
	if at := f.checkpoint("large_sums").Position; at.String() != err.After.String() {
		t.Errorf("it names %s, the checkpoint is at %s", err.After, at)
	}
	if n := selectOne[int64](t, f.pool, "select contributions from large_sums.sums where name = ''"); n != 1 {
		t.Errorf("the insert before it was not applied: %d", n)
	}
	t.Run("control without "+string(fault.TerminalCodes), func(t *testing.T) {
		without(t, fault.TerminalCodes)
		before := opened()
		g := f.run(rollupOf("large_sums"))
		until(t, 30*time.Second, "the stream is opened over and over", func() bool { return opened()-before > 7 })
		g.stop()
	})
}

// A document near 16 MB, updated in a collection without images: the update is there
// once, in updateDescription, and the document is looked up. (CASES B27.)
func TestLargeDocumentsAreLookedUp(t *testing.T) {
	f := plainThings(t, source(t), pool(t))
	g := f.run(mirror("large", projector.Lookup()))
	_, err := f.coll().InsertOne(t.Context(), bson.D{{Key: "_id", Value: "big"}, {Key: "pad", Value: pad("a", 15.9)}})
	must(t, err)
	_, err = f.coll().UpdateByID(t.Context(), "big", set("pad", pad("b", 15.9)))
	must(t, err)
	_, err = f.coll().UpdateByID(t.Context(), "big", set("n", 7))
	must(t, err)
	f.add(5)
	g.level(f.db)
	f.same("large")
	g.stop()
}

// plainThings is a collection that keeps no images.
func plainThings(t *testing.T, db *mongo.Database, pool *pgxpool.Pool) *things {
	t.Helper()
	must(t, db.CreateCollection(t.Context(), "things"))
	from := operationTime(t, db)
	return &things{t, db, pool, bson.Timestamp{T: from.T, I: from.I + 1}}
}
