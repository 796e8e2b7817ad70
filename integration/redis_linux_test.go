package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// Readers go on while a model is rebuilt again and again, of which the old generation is
// gone at once. They see one generation at a time, whole, and never one that is older than
// before; who walks through all rows may be told to begin again, and is never shown a part.
func TestRedisReaderAcrossTheSwitch(t *testing.T) {
	t.Parallel()
	db := source(t)
	documents := 500 * effort.Rounds(4)
	w := newLiveWriters(t, db, seeded(t), documents)
	m := newRedisModel(t)
	r, err := m.runner(db, projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: documents / 4}, KeepRetired: -1, Logger: quiet()})
	must(t, err)
	g := run(t, r)
	g.level(db)
	w.write(t)
	readers := poll(t, m.glimpse)
	discarded := 0
	rows := poll(t, func(ctx context.Context) (glimpse, error) {
		seen := glimpse{Generation: 1, Purses: [2]int64{purseSum, purseSum}}
		one, err := redisTotals.Get(ctx, m.own, orderPlace, "fixed")
		if err != nil {
			return seen, err
		}
		if one[0] != nil {
			seen.Fixed[1] = one[0].Orders
		}
		all := map[int64]bool{} // a row may come twice
		err = redisMirror.All(ctx, m.own, orderPlace, func(_ string, row mirrored) error {
			all[row.ID] = row.Group == "fixed"
			return nil
		})
		for _, fixed := range all {
			if fixed {
				seen.Fixed[0]++
			}
		}
		if err != nil && strings.Contains(err.Error(), "discarded while it was read") {
			discarded++
		}
		return seen, err
	})
	until(t, time.Minute, "the model is read", func() bool { return readers.reads() > 0 && rows.reads() > 0 })
	place, err := redis.Live(t.Context(), m.own, orderPlace)
	must(t, err)
	for range max(3, effort.Rounds(20)) {
		must(t, g.Rebuild(t.Context()))
		before := rows.reads()
		until(t, time.Minute, "the model is read", func() bool { return rows.reads() > before })
	}
	readers.stop()
	rows.stop()
	t.Logf("%d reads of %d generations by a script, %d of all rows, of which %d had to begin again", readers.seen, len(readers.generations), rows.seen, discarded)
	for _, p := range []*polling{readers, rows} {
		for _, b := range p.broken {
			t.Errorf("a reader saw a model that never was: %s", b)
		}
		if p.failed > 0 && (p == readers || p.failed != discarded) {
			t.Errorf("%d reads failed, the last with %v", p.failed, p.err)
		}
	}
	if len(readers.generations) < 3 {
		t.Errorf("only %d generations were seen", len(readers.generations))
	}
	g.stop()

	// The control: who asks for the place, and for the row a while later, finds nothing.
	_, err = m.own.HGet(t.Context(), fmt.Sprint(place, ":totals:fixed"), "orders").Int64()
	if !errors.Is(err, goredis.Nil) {
		t.Errorf("the first generation is still there (%v): the readers prove nothing", err)
	}
}
