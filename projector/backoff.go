package projector

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 10 * time.Second
)

// backoff waits longer after every failure in a row, with jitter so that instances
// that failed together do not come back together. The zero value is ready.
type backoff struct{ failures int }

func (b *backoff) reset() { b.failures = 0 }

// wait returns early, with an error, when the context ends.
func (b *backoff) wait(ctx context.Context) error {
	limit := min(lastBackoff, firstBackoff<<min(b.failures, 16))
	b.failures++
	t := time.NewTimer(limit/2 + rand.N(limit/2))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
