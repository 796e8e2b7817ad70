package integration_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// A write made right after a start, within the second that the start's time is from, is
// waited for: the starting point is not taken for the write's own time.
func TestWaitForAWriteRightAfterTheStart(t *testing.T) {
	for range effort.Rounds(10) {
		f := newThings(t)
		g := f.run(mirror("early"))
		g.level(f.db)
		written, err := projector.Written(t.Context(), f.db, func(ctx context.Context) error {
			_, err := f.coll().InsertOne(ctx, bson.D{{Key: "_id", Value: "early"}, {Key: "name", Value: "a"}})
			return err
		})
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		must(t, g.WaitFor(ctx, written))
		cancel()
		if rows := f.rows("early"); len(rows) != 1 {
			t.Fatalf("the wait for %v ended at %s with %d rows", written, g.Status().Checkpoint.Position, len(rows))
		}
		g.stop()
	}
}

// Who waits for a projection that has ended learns why, and does not wait for ever.
func TestWaitForEndsWithTheRun(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("ended"))
	g.level(f.db)
	waited := make(chan error, 1)
	go func() { waited <- g.WaitFor(t.Context(), bson.Timestamp{T: 1<<32 - 1}) }()
	must(t, f.coll().Drop(t.Context()))
	if err := <-waited; err == nil || !strings.Contains(err.Error(), "replaced or removed") {
		t.Errorf("the wait ended with %v", err)
	}
	ends[*projector.ReplacedError](t, g)
}

type tagged struct {
	Tags map[string]int64 `bson:"tags"`
}

// counts ranges over a map, so the order of its rows is another each time.
func (t tagged) counts() (rows []sumRow) {
	for name, n := range t.Tags {
		rows = append(rows, sumRow{name, n})
	}
	return rows
}

// double is counts after a change that should have raised Version.
func (t tagged) double() []sumRow {
	rows := t.counts()
	for i := range rows {
		rows[i].N *= 2
	}
	return rows
}

// A function that was changed under the same Version is noticed at the next start; one
// whose rows come in another order each time has not changed.
func TestStartNoticesAChangedFunction(t *testing.T) {
	f := newThings(t)
	with := func(counts func(tagged) []sumRow) *running {
		return f.run(postgres.Projection{Name: "tags", Version: 1, Bindings: postgres.Bindings{
			projector.Rollup("things", counts, postgres.Table[sumRow]{Name: "sums"}),
		}})
	}
	g := with(tagged.counts)
	g.level(f.db)
	for i := range 3 {
		_, err := f.coll().InsertOne(t.Context(), bson.D{{Key: "_id", Value: i}, {Key: "tags", Value: bson.D{{Key: "a", Value: 1}, {Key: "b", Value: 2}, {Key: "c", Value: 3}}}})
		must(t, err)
	}
	until(t, time.Minute, "samples of the documents that came after the start", func() bool {
		_, err := f.coll().UpdateByID(t.Context(), 0, set("other", time.Now()))
		must(t, err)
		g.level(f.db)
		return len(f.checkpoint("tags").Samples) == 3
	})
	for range 5 {
		g.level(f.db)
		g.stop()
		g = with(tagged.counts)
		_, err := f.coll().UpdateByID(t.Context(), 0, set("other", time.Now())) // something to commit
		must(t, err)
	}
	g.level(f.db)
	g.stop()
	// The first document has changed since its sample was taken, the others have not.
	err := ends[*projector.MismatchError](t, with(tagged.double))
	if !strings.Contains(err.Error(), "make something else") {
		t.Error(err)
	}
}

// A row type that was changed under the same Version is noticed at the start, too.
func TestStartNoticesAChangedRowType(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("rows"))
	g.level(f.db)
	g.stop()
	type wider struct {
		Name string `row:"name"`
		More string `row:"more"`
	}
	err := ends[*projector.MismatchError](t, f.run(postgres.Projection{Name: "rows", Version: 1, Bindings: postgres.Bindings{
		projector.Mirror("things", func(t thing) (wider, bool) { return wider{Name: t.Name}, true }, postgres.Table[wider]{Name: "things"}),
	}}))
	if !strings.Contains(err.Error(), "more text") {
		t.Error(err)
	}
}

// The deadline of Run's own context is no time limit for the stream.
func TestRunWithADeadline(t *testing.T) {
	f := newThings(t)
	r := f.runner(mirror("deadline"), projector.Options{Start: projector.FromNow()})
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	written, err := projector.Written(ctx, f.db, func(ctx context.Context) error {
		_, err := f.coll().UpdateByID(ctx, "none", set("n", 1))
		return err
	})
	must(t, err)
	must(t, r.WaitFor(ctx, written))
	f.add(3)
	must(t, r.WaitFor(ctx, operationTime(t, f.db)))
	f.same("deadline")
	if s := r.Status(); s.Retries > 0 {
		t.Errorf("%d retries: %v", s.Retries, s.Err)
	}
	cancel()
	must(t, <-ended)
}

// A start at a time to come is refused: it would leave out what happens until then.
func TestStartAtATimeToCome(t *testing.T) {
	f := newThings(t)
	at := operationTime(t, f.db)
	at.T += 3600
	ends[*projector.ConfigError](t, run(t, f.runner(mirror("later"), projector.Options{Start: projector.FromTime(at)})))
}
