package postgres_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidemark-go/tidemark/projector"
)

// Load of the live generation is a live one's, also when a switch comes in between.
func TestLoadDuringSwitch(t *testing.T) {
	for _, commits := range []int64{0, 1} { // with none the old one is gone after the switch
		t.Run(fmt.Sprint(commits), func(t *testing.T) {
			d := newDatabase(t)
			live, err := acquire(t.Context(), d.sink, model, "test")
			must(t, err)
			if commits > 0 {
				live = d.acquired(t, counts.Create)
			}
			next := d.built(t, live, 2, counts.Create)
			blocker := d.reader(t, pgx.ReadCommitted)
			_, err = blocker.Exec(t.Context(), "select from tidemark.checkpoints where generation = 1 for update")
			must(t, err)
			switched := make(chan error, 1)
			go func() { switched <- d.sink.Switch(t.Context(), live, next) }()
			waitFor(t, d, "select count(*) = 1 from pg_locks where not granted")
			loaded := make(chan projector.Checkpoint, 1)
			go func() {
				cp, err := d.sink.Load(t.Context(), model, 0)
				if err != nil {
					t.Error(err)
				}
				loaded <- cp
			}()
			waitFor(t, d, "select count(*) = 2 from pg_locks where not granted")
			must(t, blocker.Rollback(t.Context()))
			must(t, <-switched)
			cp := <-loaded
			equal(t, "loaded", line(cp.Generation, cp.Phase, cp.Term), line(2, projector.Live, live.Term))
		})
	}
}

// Where there is no live one, Load comes to an end.
func TestLoadWithoutLive(t *testing.T) {
	d := newDatabase(t)
	unknown := func() {
		t.Helper()
		cp, err := d.sink.Load(t.Context(), model, 0)
		must(t, err)
		equal(t, "unknown", line(cp.Generation, cp.Phase, cp.Term), line(1, projector.Live, 0))
	}
	unknown()
	_, err := acquire(t.Context(), d.sink, "another", "test")
	must(t, err)
	unknown()
}
