package projector

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// Waits grow from about firstBackoff to at most lastBackoff, and begin anew after a
// success. (CASES B01: ten attempts a second against a token that is dead for good.)
func TestBackoffGrowsAndStartsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b backoff
		wait := func() time.Duration {
			start := time.Now()
			if err := b.wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			return time.Since(start)
		}
		for i := range 200 {
			limit := min(lastBackoff, firstBackoff<<min(i, 16))
			if d := wait(); d < limit/2 || d > limit {
				t.Fatalf("wait %d took %s, not between %s and %s", i, d, limit/2, limit)
			}
		}
		b.reset()
		if d := wait(); d > firstBackoff {
			t.Errorf("the first wait after a success took %s", d)
		}
	})
}

func TestBackoffEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := backoff{failures: 1000}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		start := time.Now()
		if err := b.wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if d := time.Since(start); d != time.Millisecond {
			t.Errorf("it took %s to notice", d)
		}
	})
}
