package mongodb_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

type text struct {
	Text string `row:"text"`
}

var texts = mongodb.Collection[text]{Name: "texts"}

func texted(t *testing.T, id any, size int) projector.Row[text] {
	return projector.Row[text]{Owner: value(t, id), Row: &text{strings.Repeat("x", size)}}
}

func load[R any](c mongodb.Collection[R], rows []projector.Row[R]) func(context.Context, *mongodb.Tx) error {
	return func(ctx context.Context, tx *mongodb.Tx) error { return c.Load(ctx, tx, rows) }
}

// However small or large the rows are, the commands that they are cut into have all of
// them, once.
func TestRowsOfAllSizes(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, texts.Create)
	sizes := map[string][]int{
		"small": make([]int, max(20_000, effort.Values(30_000))), // two commands at least
		"one":   {600 << 10},
		"mixed": {0, 300 << 10, 300 << 10, 0, 4 << 20, 0, 600 << 10, 600 << 10, 1, 512 << 10},
		"most":  {1, 16<<20 - 100, 1},
	}
	for name, list := range sizes {
		for _, way := range []string{"put", "load"} {
			rows, bytes := make([]projector.Row[text], len(list)), 0
			for i, size := range list {
				rows[i] = texted(t, i, size)
				bytes += size
			}
			write := put(texts, nil, rows)
			if way == "load" {
				write = load(texts, rows)
			}
			next, err := commit(t, d.sink, cp, texts.Clear, write)
			for range 5 { // a small cache makes the server refuse a large transaction now and then
				if err == nil || d.sink.Classify(err) != projector.Transient {
					break
				}
				cp = d.load(t, 1)
				next, err = commit(t, d.sink, cp, texts.Clear, write)
			}
			must(t, err)
			cp = next
			cur, err := d.Collection("model.texts").Aggregate(t.Context(), mongo.Pipeline{{{Key: "$group", Value: bson.D{
				{Key: "_id", Value: nil},
				{Key: "rows", Value: bson.D{{Key: "$sum", Value: 1}}},
				{Key: "bytes", Value: bson.D{{Key: "$sum", Value: bson.D{{Key: "$strLenBytes", Value: "$text"}}}}},
			}}}})
			must(t, err)
			var found []struct{ Rows, Bytes int }
			must(t, cur.All(t.Context(), &found))
			equal(t, name+" "+way, fmt.Sprint(found), fmt.Sprintf("[{%d %d}]", len(list), bytes))
		}
	}
}

// A row that is refused after others were sent takes them with it, also where the handler
// goes on.
func TestRefusedHalfWay(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, texts.Create)
	bad := projector.Row[text]{Owner: value(t, 0), Row: &text{"\xff"}}
	rows := []projector.Row[text]{bad, texted(t, 1, 300<<10), texted(t, 2, 300<<10), texted(t, 3, 300<<10)}
	_, err := commit(t, d.sink, cp, func(ctx context.Context, tx *mongodb.Tx) error {
		_ = texts.Put(ctx, tx, nil, rows) // from the last to the first
		return nil
	})
	wantError(t, err, "not valid UTF-8", "the handler returned no error")
	wantClass(t, d.sink, err, projector.Poison)
	equal(t, "rows", d.rows(t, "texts"), "")
	for _, f := range []func(context.Context, *mongodb.Tx) error{
		put(texts, nil, []projector.Row[text]{texted(t, 1, 16<<20)}),
		load(texts, []projector.Row[text]{texted(t, 1, 17<<20)}),
		load(texts, []projector.Row[text]{texted(t, 1, 1), texted(t, 1, 1)}),
	} {
		_, err = commit(t, d.sink, cp, f)
		wantError(t, err, `collection "texts"`)
		wantClass(t, d.sink, err, projector.Poison)
	}
	_, err = commit(t, d.sink, cp, load(texts, []projector.Row[text]{texted(t, 1, 1), texted(t, bson.D{{Key: "a", Value: 1}}, 1)}))
	must(t, err)
	equal(t, "rows", d.rows(t, "texts"), `{"_id":1,"text":"x"}`+"\n"+`{"_id":{"a":1},"text":"x"}`)
}
