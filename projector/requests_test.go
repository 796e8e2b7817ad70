package projector

import (
	"errors"
	"testing"
	"testing/synctest"
)

// Run goes on from what the sink holds (after a failover, say) while a job is under way,
// or has just caught up, or none is: nobody waits for a job that does not come, and who has
// asked since a job had caught up is not given that job.
func TestRequestsInterrupted(t *testing.T) {
	failed := errors.New("interrupted")
	for _, c := range []struct {
		name  string
		until func(q *requests, ask func())
		asks  []error // what they are told; nil: what the next job is
	}{
		{"while none is under way", func(_ *requests, ask func()) { ask() }, []error{nil}},
		{"when one was taken, and not begun", func(q *requests, ask func()) { ask(); <-q.wanted() }, []error{failed}},
		{"while one is under way", func(q *requests, ask func()) { ask(); q.begin(false); ask() }, []error{failed, failed}},
		{"when one has caught up", func(q *requests, ask func()) { ask(); q.begin(false); q.ending(); ask() }, []error{failed, failed}},
		{"when one has caught up that nobody asked for", func(q *requests, ask func()) { q.begin(false); q.ending(); ask() }, []error{failed}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var q requests
				var told []chan error
				c.until(&q, func() {
					result := make(chan error, 1)
					told = append(told, result)
					go func() { result <- q.wait(t.Context(), false) }()
					synctest.Wait()
				})
				q.interrupted(failed)
				synctest.Wait()
				q.begin(false)
				q.ending()
				q.done(nil)
				synctest.Wait()
				for i, want := range c.asks {
					select {
					case err := <-told[i]:
						if err != want {
							t.Errorf("who asked as number %d is told %v, want %v", i+1, err, want)
						}
					default:
						t.Errorf("who asked as number %d waits for ever", i+1)
					}
				}
			})
		})
	}
}
