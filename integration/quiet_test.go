package integration_test

import (
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// smallOplog is a source whose oplog rolls within seconds.
func smallOplog(t *testing.T) *things {
	m := throwaway(t, serve.MongodOptions{
		OplogMB: 8, SyncDelay: 1,
		Params: map[string]string{"expiredChangeStreamPreImageRemovalJobSleepSecs": "1"},
	})
	return newThingsOn(t, sourceOn(t, m.URI()), pool(t))
}

// A collection that nobody writes to, beside busy ones, keeps its place: the position
// of the quiet stream is stored as the oplog rolls on. (CASES B06, B01: a position that
// is only saved when an event matches ages out of the oplog.)
func TestQuietCollectionKeepsItsPlace(t *testing.T) {
	f := smallOplog(t)
	down := func() *running {
		g := run(t, f.runner(mirror("quiet"), projector.Options{IdleInterval: 50 * time.Millisecond}))
		f.add(1)
		g.level(f.db)
		roll(t, f.db, operationTime(t, f.db))
		return g
	}
	g := down()
	before := f.checkpoint("quiet").Position.Token
	until(t, 30*time.Second, "the idle position is stored", func() bool {
		return string(f.checkpoint("quiet").Position.Token) != string(before)
	})
	g.stop()
	g = f.run(mirror("quiet"))
	f.add(1)
	g.level(f.db)
	f.same("quiet")
	if n := g.Status().StreamsOpened; n != 1 {
		t.Errorf("%d streams were opened", n)
	}
	g.stop()

	t.Run("control without "+string(fault.IdlePosition), func(t *testing.T) {
		without(t, fault.IdlePosition)
		down().stop()
		ends[*projector.HistoryLostError](t, f.run(mirror("quiet")))
	})
}

// A runner that is down for longer than the oplog lasts gets an error with both
// positions, and never starts from now. (CASES B03, B04, B05: a 286 that is swallowed,
// a token that is thrown away.)
func TestQuietlyLostHistoryIsTold(t *testing.T) {
	f := smallOplog(t)
	g := f.run(mirror("quiet"))
	f.add(5)
	g.level(f.db)
	g.stop()
	at, before := f.checkpoint("quiet").Position, f.stored("quiet")
	f.add(10)
	roll(t, f.db, operationTime(t, f.db))
	for range 2 {
		opened := opens(t)
		g = f.run(mirror("quiet"))
		lost(t, f, g, ends[*projector.HistoryLostError](t, g), at)
		if n := opened(); n > 5 {
			t.Errorf("the stream was opened %d times", n)
		}
	}
	if now := f.stored("quiet"); now != before {
		t.Errorf("the checkpoint has changed from %v to %v", before, now)
	}
	if n := len(f.rows("quiet")); n != 5 {
		t.Errorf("there are %d rows, not the 5 from before", n)
	}
}

// lost checks what a HistoryLostError says.
func lost(t *testing.T, f *things, g *running, err *projector.HistoryLostError, at projector.Position) {
	t.Helper()
	if err.Stored.String() != at.String() {
		t.Errorf("it names the stored position %s, not %s", err.Stored, at)
	}
	if !err.Oldest.After(at.Time) || err.Source.Before(err.Oldest) {
		t.Errorf("stored %s, oldest %v, source %v", at, err.Oldest, err.Source)
	}
	if !errors.Is(err, projector.ErrHistoryLost) || err.Code == 0 {
		t.Errorf("it is no ErrHistoryLost, or has no code: %d", err.Code)
	}
	if s := g.Status(); s.State != projector.Ended || s.Err == nil {
		t.Errorf("the status says %s, %v", s.State, s.Err)
	}
}

// The same in the middle of a stream, when the sink was away for too long: what was
// read is committed, then the error comes.
func TestQuietlyLostHistoryMidStream(t *testing.T) {
	f := smallOplog(t)
	opened := opens(t)
	sink, p := proxied(t, postgresDSN(t))
	f.pool = p
	g := run(t, f.runner(mirror("quiet"), projector.Options{BufferBytes: 64 << 10}))
	f.add(1)
	g.level(f.db)
	sink.ToServer.HoldAfter(0) // the sink hangs
	pad := string(make([]byte, 8<<10))
	for i := 0; i < 4500; i += 500 { // more than one reply of the stream and than the oplog hold
		var docs []any
		for j := range 500 {
			docs = append(docs, bson.D{{Key: "_id", Value: 1000 + i + j}, {Key: "pad", Value: pad}})
		}
		_, err := f.coll().InsertMany(t.Context(), docs)
		must(t, err)
	}
	roll(t, f.db, operationTime(t, f.db))
	sink.ToServer.Pass()
	err := ends[*projector.HistoryLostError](t, g)
	if n := opened(); n > 5 {
		t.Errorf("the stream was opened %d times", n)
	}
	at := f.checkpoint("quiet").Position
	if err.Stored.String() != at.String() {
		t.Errorf("it names the position %s, the checkpoint %s", err.Stored, at)
	}
	// Exactly the documents up to the position are in the model.
	rows := f.rows("quiet")
	for i := range len(rows) - 1 {
		if _, ok := rows[projector.KeyText(raw(t, int32(1000+i)))]; !ok { //nolint:gosec // few
			t.Fatalf("of %d rows number %d is missing", len(rows), i)
		}
	}
	before := f.stored("quiet")
	again := ends[*projector.HistoryLostError](t, f.run(mirror("quiet")))
	if again.Stored.String() != at.String() || f.stored("quiet") != before {
		t.Errorf("a restart finds %s, not %s", again.Stored, at)
	}
}

func raw(t testing.TB, v any) bson.RawValue {
	t.Helper()
	kind, b, err := bson.MarshalValue(v)
	must(t, err)
	return bson.RawValue{Type: kind, Value: b}
}

// Pre-images expire by the server's setting, and are not recorded while images are
// switched off: either is an error that names the document, and nothing after it is
// applied. (CASES B21: a missing pre-image that drifts without a word.)
func TestQuietlyLostImageIsTold(t *testing.T) {
	collMod := func(f *things, on bool) {
		must(f.t, f.db.RunCommand(f.t.Context(), bson.D{
			{Key: "collMod", Value: "things"},
			{Key: "changeStreamPreAndPostImages", Value: bson.D{{Key: "enabled", Value: on}}},
		}).Err())
	}
	update := func(f *things, id int64) {
		_, err := f.coll().UpdateByID(f.t.Context(), id, add("n", 1))
		must(f.t, err)
	}
	for name, lose := range map[string]func(*things){
		"expired": func(f *things) {
			update(f, 3)
			admin(f.t, f.db, bson.D{{Key: "setClusterParameter", Value: bson.D{{Key: "changeStreamOptions", Value: bson.D{
				{Key: "preAndPostImages", Value: bson.D{{Key: "expireAfterSeconds", Value: 1}}},
			}}}}})
			images := f.db.Client().Database("config").Collection("system.preimages")
			until(f.t, 60*time.Second, "the pre-images expire", func() bool {
				n, err := images.CountDocuments(f.t.Context(), bson.D{})
				must(f.t, err)
				return n == 0
			})
		},
		"switched off for a while": func(f *things) {
			collMod(f, false)
			update(f, 3)
			collMod(f, true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := smallOplog(t)
			g := f.run(mirror("quiet"))
			f.add(5)
			g.level(f.db)
			g.stop()
			f.add(2) // inserts need no image of before
			lose(f)
			f.add(2)
			want := f.documents()
			for range 2 {
				err := ends[*projector.ImageLostError](t, f.run(mirror("quiet")))
				if err.Key != "3" || err.Image != "post-image" || err.Namespace.Collection != "things" || !errors.Is(err, projector.ErrHistoryLost) {
					t.Errorf("it says %+v", err)
				}
			}
			rows := f.rows("quiet")
			if len(rows) != 7 || rows["3"] == want["3"] {
				t.Errorf("there are %d rows, not the 7 up to the update, whose row is %+v", len(rows), rows["3"])
			}
			g = f.run(rollupOf("quiet_sums"))
			if err := ends[*projector.ImageLostError](t, g); err.Image != "pre-image" {
				t.Errorf("a rollup misses the %s", err.Image)
			}
		})
	}
}
