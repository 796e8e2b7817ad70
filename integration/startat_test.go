package integration_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// insertedAt is the cluster time of a document's insert, as the oplog has it.
func insertedAt(f *things, id any) bson.Timestamp {
	f.t.Helper()
	var entry struct{ TS bson.Timestamp }
	err := f.db.Client().Database("local").Collection("oplog.rs").
		FindOne(f.t.Context(), bson.D{{Key: "ns", Value: f.db.Name() + ".things"}, {Key: "op", Value: "i"}, {Key: "o._id", Value: id}}).Decode(&entry)
	must(f.t, err)
	return entry.TS
}

// FromTime is inclusive: the change of that very time is the first one.
func TestStartAtATime(t *testing.T) {
	f := newThings(t)
	for range 3 {
		f.add(1)
	}
	second := insertedAt(f, int64(1))
	for name, at := range map[string]bson.Timestamp{"at": second, "after": {T: second.T, I: second.I + 1}} {
		g := run(t, f.runner(mirror(name), projector.Options{Start: projector.FromTime(at)}))
		g.level(f.db)
		want := map[string]int{"at": 2, "after": 1}[name]
		if rows := f.rows(name); len(rows) != want || rows["2"] != f.documents()["2"] {
			t.Errorf("%s: there are %d rows, not the last %d", name, len(rows), want)
		}
		g.stop()
	}
	// A start has no effect on a projection that has a checkpoint.
	g := run(t, f.runner(mirror("after"), projector.Options{Start: projector.FromTime(second)}))
	g.level(f.db)
	if rows := f.rows("after"); len(rows) != 1 {
		t.Errorf("with another start there are %d rows", len(rows))
	}
	g.stop()
}

// FromNow leaves out what was there before Run, and misses nothing that is written while
// it starts or later. (CASES B31: a position taken after the scan; here, after the open.)
func TestStartAtNow(t *testing.T) {
	f := newThings(t)
	coll := f.coll()
	for range effort.Rounds(10) {
		must(t, coll.Drop(t.Context()))
		withImages(t, f.db, "things")
		f.add(100)
		last := atomic.Int64{}
		last.Store(99)
		end, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			for {
				select {
				case <-end:
					ended <- nil
					return
				default:
				}
				n := last.Load() + 1
				if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: n}, {Key: "name", Value: "x"}, {Key: "n", Value: n}}); err != nil {
					ended <- err
					return
				}
				last.Store(n)
			}
		}()
		name := unique("now_")
		before := last.Load()
		g := run(t, f.runner(mirror(name), projector.Options{Start: projector.FromNow()}))
		until(t, 30e9, "the runner has begun", func() bool { return g.Status().State == projector.Running })
		begun := last.Load()
		until(t, 30e9, "more is written", func() bool { return last.Load() > begun+20 })
		close(end)
		must(t, <-ended)
		g.level(f.db)
		rows := f.rows(name)
		first := last.Load() + 1 - int64(len(rows))
		if first < before+1 {
			t.Errorf("the rows begin with %d, though %d was there before", first, before)
		}
		if first > begun+2 { // the one begun before, the one after it
			t.Errorf("the rows begin with %d, though it ran at %d", first, begun)
		}
		for n := first; n <= last.Load(); n++ {
			if _, ok := rows[projector.KeyText(raw(t, n))]; !ok {
				t.Fatalf("%d is missing between %d and %d", n, first, last.Load())
			}
		}
		g.stop()
	}
}

// There is no default start, since either would be wrong for somebody.
func TestStartAtNothingIsRefused(t *testing.T) {
	f := newThings(t)
	_, err := projector.New(f.db, postgres.New(f.pool), mirror("nothing"), projector.Options{})
	var config *projector.ConfigError
	if !errors.As(err, &config) || len(config.Faults) != 1 {
		t.Fatalf("got %v", err)
	}
	for _, word := range []string{"Options.Start", "FromNow", "FromTime"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not mention %s", err, word)
		}
	}
}

// A time that the oplog no longer has is history lost, not a start from what there is.
func TestStartAtATimeThatIsGone(t *testing.T) {
	f := smallOplog(t)
	f.add(1)
	roll(t, f.db, operationTime(t, f.db))
	g := f.run(mirror("gone"))
	err := ends[*projector.HistoryLostError](t, g)
	if err.Stored.Time != f.from || !err.Oldest.After(f.from) {
		t.Errorf("it says %+v", err)
	}
}
