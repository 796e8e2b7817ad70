package mongodb_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// Sweeping reads each row about once, however many commits it takes: also those that stay,
// and whatever types the _ids have. A sweep that is rolled back, or another rebuild, leaves
// nothing out.
func TestSweepReadsRowsOnce(t *testing.T) {
	const rows, limit = 600, 50
	d := newDatabase(t)
	noted := func(i int) projector.Row[note] {
		owner := any(i)
		switch i % 3 {
		case 1:
			owner = fmt.Sprint(i)
		case 2:
			owner = bson.D{{Key: "a", Value: i}}
		}
		return projector.Row[note]{Owner: value(t, owner), Row: &note{int64(i)}}
	}
	var all, kept []projector.Row[note]
	for i := range rows {
		all = append(all, noted(i))
		if i%2 == 0 {
			kept = append(kept, noted(i))
		}
	}
	cp := d.acquired(t, notes.Create, put(notes, nil, all))
	for mark := range int64(2) {
		cp.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: 1 + mark, Began: time.UnixMilli(1 + mark), Cause: "test"}
		var err error
		cp, err = commit(t, d.sink, cp, put(notes, nil, kept))
		must(t, err)
		before := d.count(t, "notes")
		must(t, d.RunCommand(t.Context(), bson.D{{Key: "profile", Value: 2}}).Err())
		for removed := limit; removed > 0; {
			sweep := func(ctx context.Context, tx *mongodb.Tx) (err error) {
				removed, err = notes.Sweep(ctx, tx, limit)
				return err
			}
			must(t, d.sink.Try(t.Context(), cp, sweep))
			cp, err = commit(t, d.sink, cp, sweep)
			must(t, err)
		}
		must(t, d.RunCommand(t.Context(), bson.D{{Key: "profile", Value: 0}}).Err())
		equal(t, "rows", d.count(t, "notes"), int64(len(kept)))
		if examined := d.examined(t, "notes"); examined > 3*before { // each in a trial and in a commit, and those between two commits again
			t.Errorf("mark %d: %d documents were looked at, of %d", cp.Rebuild.Mark, examined, before)
		}
		must(t, d.Collection("system.profile").Drop(t.Context()))
		kept = kept[:len(kept)/2]
	}
}

func (d *database) count(t *testing.T, collection string) int64 {
	t.Helper()
	n, err := d.Collection(model+"."+collection).CountDocuments(t.Context(), bson.D{})
	must(t, err)
	return n
}

// examined is how many documents the profiled searches have looked at.
func (d *database) examined(t *testing.T, collection string) (n int64) {
	t.Helper()
	cur, err := d.Collection("system.profile").Find(t.Context(), bson.D{{Key: "ns", Value: d.Name() + "." + model + "." + collection}, {Key: "op", Value: bson.D{{Key: "$in", Value: bson.A{"query", "getmore"}}}}})
	must(t, err)
	var found []struct {
		N int64 `bson:"docsExamined"`
	}
	must(t, cur.All(t.Context(), &found))
	for _, f := range found {
		n += f.N
	}
	return n
}
