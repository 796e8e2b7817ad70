package projector

import (
	"testing"
	"testing/synctest"
	"time"
)

// Of a backlog, changes wait for more as long as the last commit took; nothing else does.
func TestBacklogIsGathered(t *testing.T) {
	many := func(n int, more bool) *chunk { return &chunk{changes: make([]change, n), more: more} }
	for _, test := range []struct {
		name   string
		first  *chunk
		second *chunk // comes 100 ms later
		took   time.Duration
		build  *build
		want   int
		waited time.Duration
	}{
		{"level", many(3, false), many(3, false), time.Second, nil, 3, 0},
		{"backlog", many(3, true), many(3, false), time.Second, nil, 6, 100 * time.Millisecond},
		{"enough for a commit", many(10, true), many(3, false), time.Second, nil, 10, 0},
		{"a quick commit before", many(3, true), many(3, false), 50 * time.Millisecond, nil, 3, 50 * time.Millisecond},
		{"nothing comes", many(3, true), nil, 400 * time.Millisecond, nil, 3, 400 * time.Millisecond},
		{"a slow commit before", many(3, true), nil, time.Minute, nil, 3, maxGather},
		{"no commit before", many(3, true), many(3, false), 0, nil, 3, 0},
		{"the stream ends", many(3, true), &chunk{err: errCursorClosed}, time.Second, nil, 3, 100 * time.Millisecond},
		{"a quiet stream", many(3, true), &chunk{empty: true}, time.Second, nil, 3, 100 * time.Millisecond},
		{"a rebuild has chunks to copy", many(3, true), many(3, false), time.Second, new(build), 3, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStream(nil, nil, nil, nil, nil, 1<<20)
				c := &committer{stream: s, status: &status{}, took: test.took, build: test.build}
				q := newQueue()
				s.chunks <- test.first
				if test.second != nil {
					time.AfterFunc(100*time.Millisecond, func() { s.chunks <- test.second })
				}
				begin := time.Now()
				if err := c.take(t.Context(), q, limits{changes: 10, bytes: 1 << 20}); err != nil {
					t.Fatal(err)
				}
				if len(q.changes) != test.want || time.Since(begin) != test.waited {
					t.Errorf("%d changes after %s, want %d after %s", len(q.changes), time.Since(begin), test.want, test.waited)
				}
			})
		})
	}
}
