package mongodb_test

import (
	"context"
	"fmt"
	"testing"
)

// Of a first generation a note is left. A Discard of it that was frozen, at any step, while
// someone else did its work, leaves alone what has got a name of the model's since.
func TestLateDiscardOfFirst(t *testing.T) {
	for step := 1; step <= 4; step++ {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			d := newDatabase(t)
			live, shadow := d.begun(t)
			_, first := d.switched(t, live, shadow)
			wake := pausedCall(t, step, func(ctx context.Context) (struct{}, error) { return none(d.sink.Discard(ctx, first)) })
			_, err := d.other(t).Acquire(t.Context(), model, "next")
			must(t, err)
			equal(t, "collections", d.names(t), "model.g2.counts tidemark.checkpoints")
			_, err = d.Collection("model.counts").InsertOne(t.Context(), id("theirs"))
			must(t, err)
			_, err = wake()
			must(t, err)
			equal(t, "rows", d.rows(t, "counts"), `{"_id":"theirs"}`)
		})
	}
}
