package mongodb_test

import (
	"testing"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

func TestFence(t *testing.T) {
	d := newDatabase(t)
	first := d.acquired(t)
	second, err := commit(t, d.sink, first, inc("a"))
	must(t, err)

	_, err = commit(t, d.sink, first, inc("a"))
	wantFenced(t, err)
	wantError(t, err, "another commit follows term 1, sequence 1")

	taken, err := acquire(t.Context(), d.other(t), "other")
	must(t, err)
	equal(t, "term", taken.Term, 2)
	equal(t, "sequence", taken.Sequence, second.Sequence)
	_, err = commit(t, d.sink, second, inc("a"))
	wantFenced(t, err)
	wantError(t, err, "other holds term 2")
	wantFenced(t, d.sink.Try(t.Context(), second, inc("a")))
	equal(t, "rows", d.rows(t, "numbers"), `{"_id":"a","n":1}`)

	// The controls: without the comparison each of them writes.
	for _, g := range []struct {
		guard fault.Guard
		prev  func(projector.Checkpoint) projector.Checkpoint
	}{
		{fault.FenceSequence, func(c projector.Checkpoint) projector.Checkpoint { c.Sequence--; return c }},
		{fault.FenceTerm, func(c projector.Checkpoint) projector.Checkpoint { c.Term--; return c }},
		{fault.FenceRaises, func(c projector.Checkpoint) projector.Checkpoint { c.Sequence--; return c }},
	} {
		now, err := d.sink.Load(t.Context(), model, 1)
		must(t, err)
		_, err = commit(t, d.sink, g.prev(now), inc(string(g.guard)))
		wantFenced(t, err)
		restore := fault.Global.Disable(g.guard)
		_, err = commit(t, d.sink, g.prev(now), inc(string(g.guard)))
		restore()
		if err != nil {
			t.Errorf("without %s: %v", g.guard, err)
		}
	}
	equal(t, "rows", d.rows(t, "numbers"), `{"_id":"a","n":1}
{"_id":"fence.raises","n":1}
{"_id":"fence.sequence","n":1}
{"_id":"fence.term","n":1}`)
}
