package mongodb_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

type note struct {
	N int64 `row:"n"`
}

var notes = mongodb.Collection[note]{Name: "notes"}

// In a rebuild in place Put marks what it writes, and Sweep removes the rest, of either
// kind of collection, whatever the type of an _id.
func TestSweep(t *testing.T) {
	d := newDatabase(t)
	noted := func(owner any, n int64) projector.Row[note] {
		return projector.Row[note]{Owner: value(t, owner), Row: &note{n}}
	}
	row := func(owner any, sku string) projector.Row[line] {
		return projector.Row[line]{Owner: value(t, owner), Row: &line{sku, 1}}
	}
	cp := d.acquired(t, lines.Create, notes.Create,
		put(lines, nil, []projector.Row[line]{row(1, "a"), row(2, "b"), row(3, "c"), row(4, "d")}),
		put(notes, nil, []projector.Row[note]{noted(1, 1), noted("x", 1), noted(bson.D{{Key: "a", Value: 1}}, 1), noted(1.5, 1), noted(nil, 1), noted(time.UnixMilli(5), 1)}))
	_, err := commit(t, d.sink, cp, func(ctx context.Context, tx *mongodb.Tx) error {
		_, err := lines.Sweep(ctx, tx, 10)
		return err
	})
	wantError(t, err, "in a rebuild in place only")

	cp.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: 1, Began: time.UnixMilli(1), Cause: "test"}
	swept := func(limit int, before ...func(context.Context, *mongodb.Tx) error) (counts string) {
		t.Helper()
		cp, err = commit(t, d.sink, cp, all(before...), func(ctx context.Context, tx *mongodb.Tx) error {
			for _, c := range []projector.Sweeper[*mongodb.Tx]{lines, notes} {
				must(t, c.Prepare(ctx, tx))
				n, err := c.Sweep(ctx, tx, limit)
				must(t, err)
				left, err := c.Count(ctx, tx)
				must(t, err)
				counts += fmt.Sprintf("%d of %d ", n, int(left)+n)
			}
			return nil
		})
		must(t, err)
		return counts
	}
	cp, err = commit(t, d.sink, cp, put(lines, nil, []projector.Row[line]{row(2, "b"), row(5, "e")}),
		put(notes, nil, []projector.Row[note]{noted("x", 2)}))
	must(t, err)
	equal(t, "swept", swept(0), "0 of 5 0 of 6 ")
	equal(t, "swept", swept(2), "2 of 5 2 of 6 ")
	equal(t, "swept", swept(2), "1 of 3 2 of 4 ")
	equal(t, "swept", swept(2), "0 of 2 1 of 2 ")
	equal(t, "rows", d.rows(t, "notes"), `{"_id":"x","n":2,"_mark":1}`)
	equal(t, "rows", strings.Count(d.rows(t, "lines"), `"_mark":1`), 2)

	// A commit outside of a rebuild takes the mark off, and another rebuild has another.
	cp.Rebuild = nil
	cp, err = commit(t, d.sink, cp, put(lines, nil, []projector.Row[line]{row(2, "b")}))
	must(t, err)
	equal(t, "rows", strings.Count(d.rows(t, "lines"), `"_mark"`), 1)
	cp.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: 2, Began: time.UnixMilli(1), Cause: "test"}
	equal(t, "swept", swept(10, put(lines, nil, []projector.Row[line]{row(6, "f")})), "2 of 3 1 of 1 ")
	// A shadow is filled without marks.
	cp.Rebuild = &projector.Rebuild{Mode: projector.Shadow, Began: time.UnixMilli(1), Cause: "test"}
	_, err = commit(t, d.sink, cp, put(lines, nil, []projector.Row[line]{row(6, "f")}))
	must(t, err)
	equal(t, "rows", d.rows(t, "lines"), `{"_id":{"sku":"f"},"price":1,"_owner":6}`)
}
