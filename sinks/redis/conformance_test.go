package redis_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// TestConformance runs the checks beside each other: they wait more than they compute.
func TestConformance(t *testing.T) {
	for _, c := range sinktest.Checks(conformance(t)) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			c.Run(t)
		})
	}
}

// TestConformanceNotices: the suite finds the sink without its guards.
func TestConformanceNotices(t *testing.T) {
	for guard, name := range map[fault.Guard]string{
		fault.FenceTerm:     "fence/term",
		fault.FenceSequence: "fence/sequence",
		fault.FenceRaises:   "fence/term",
		fault.FenceWatch:    "fence/begun-before-the-takeover",
		fault.LoadTouches:   "load/waits-for-a-commit",
	} {
		t.Run(string(guard), func(t *testing.T) {
			disable(t, guard)
			found := false
			for _, c := range sinktest.Checks(conformance(t)) {
				if c.Name == name {
					found = len(c.Faults(t.Context())) > 0
				}
			}
			if !found {
				t.Errorf("without %s, %s finds nothing", guard, name)
			}
		})
	}
}

// conformance is the sink for the suite. Its databases live as long as t, or as the
// check where that is a test of its own.
func conformance(t *testing.T) sinktest.Subject[*redis.Tx] {
	return sinktest.Subject[*redis.Tx]{
		Rounds:   max(8, effort.Values(40)),
		Features: sinktest.Features{Transactions: true, Trials: true, LoadWaits: true, Adds: true, Keys: true, Owners: true, Values: true},
		Open: func(c sinktest.T) sinktest.Store[*redis.Tx] {
			tb := testing.TB(t)
			if own, ok := c.(testing.TB); ok {
				tb = own
			}
			return conformanceStore(newDatabase(tb))
		},
	}
}

func conformanceStore(d *database) sinktest.Store[*redis.Tx] {
	documents := redis.Hash[sinktest.Document]{Name: "documents"}
	numbers := redis.Hash[sinktest.Count]{Name: "counts"}
	checkpoint := func(projection string, generation int64) string {
		return fmt.Sprintf("{%s}:checkpoint:%d", projection, generation)
	}
	return sinktest.Store[*redis.Tx]{
		Sink: func(t sinktest.T) projector.Sink[*redis.Tx] { return redis.New(d.connect(t)) },
		Live: func(ctx context.Context, projection string) (string, error) {
			return redis.Live(ctx, d.Client, projection)
		},
		Documents: putting(d, documents),
		Counts: sinktest.Adding[*redis.Tx, sinktest.Count]{Target: numbers, Rows: func(ctx context.Context, place string) ([]sinktest.Sum[sinktest.Count], error) {
			return readAll(ctx, d, place, numbers.Name, func(r sinktest.Count, _, _ string, stored map[string]string) (sinktest.Sum[sinktest.Count], error) {
				n, err := strconv.ParseInt(stored["contributions"], 10, 64)
				return sinktest.Sum[sinktest.Count]{Row: r, Contributions: n}, err
			})
		}},
		Entries: putting(d, redis.Hash[sinktest.Entry]{Name: "entries"}),
		Keys:    putting(d, redis.Hash[sinktest.Keys]{Name: "keys"}),
		Values:  putting(d, redis.Hash[sinktest.Values]{Name: "values"}),
		Checkpoint: func(ctx context.Context, projection string, generation int64) ([]byte, error) {
			body, err := d.HGet(ctx, checkpoint(projection, generation), "body").Bytes()
			if errors.Is(err, goredis.Nil) {
				return nil, nil
			}
			return body, err
		},
		SetCheckpoint: func(ctx context.Context, projection string, generation int64, body []byte) error {
			return d.HSet(ctx, checkpoint(projection, generation), "body", body).Err()
		},
		Refused: []sinktest.Refusal[*redis.Tx]{
			{Name: "of a value, when it is queued", Write: queue(func(tx *redis.Tx) {
				tx.Hash("strict").Set("field", struct{}{})
			})},
			{Name: "of a sum, when it is added", Write: func(ctx context.Context, tx *redis.Tx) error {
				return numbers.Add(ctx, tx, nil, []sinktest.Count{{Region: "r", Total: math.MaxInt64}, {Region: "r", Total: 1}})
			}},
			{Name: "of a number, at the commit", Write: queue(func(tx *redis.Tx) {
				tx.String("strict").Add(math.MaxInt64).Add(1)
			})},
			{Name: "of a text that is no number, at the commit", Write: queue(func(tx *redis.Tx) {
				tx.Hash("strict").Set("field", "text").Add("field", 1)
			})},
		},
	}
}

func putting[R any](d *database, h redis.Hash[R]) sinktest.Putting[*redis.Tx, R] {
	return sinktest.Putting[*redis.Tx, R]{Target: h, Rows: func(ctx context.Context, place string) ([]sinktest.Kept[R], error) {
		return readAll(ctx, d, place, h.Name, func(r R, key, entry string, _ map[string]string) (sinktest.Kept[R], error) {
			_, owner, _ := strings.Cut(entry, " ")
			if owner == "" { // a Mirror's
				owner = key
			}
			return sinktest.Kept[R]{Row: r, Owner: owner}, nil
		})
	}}
}

// readAll decodes the rows of a place, and looks that there are no keys beside those of the
// index.
func readAll[R, S any](ctx context.Context, d *database, place, name string, with func(r R, key, entry string, stored map[string]string) (S, error)) (all []S, err error) {
	index, err := d.HGetAll(ctx, place+":"+name).Result()
	if err != nil {
		return nil, err
	}
	rows := map[string]*goredis.MapStringStringCmd{}
	for keys := range slices.Chunk(slices.Collect(maps.Keys(index)), 1000) {
		p := d.Pipeline()
		for _, key := range keys {
			rows[key] = p.HGetAll(ctx, place+":"+name+":"+key)
		}
		if _, err := p.Exec(ctx); err != nil {
			return nil, err
		}
	}
	for key, entry := range index {
		stored := rows[key].Val()
		r, err := redis.Decode[R](stored)
		if err != nil {
			return nil, fmt.Errorf("row %q: %w", key, err)
		}
		s, err := with(r, key, entry, stored)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	prefix := place + ":" + name + ":"
	keys, err := d.Keys(ctx, "*").Result()
	n := 0
	for _, k := range keys {
		if strings.HasPrefix(k, prefix) {
			n++
		}
	}
	if err == nil && n != len(all) {
		err = fmt.Errorf("%d keys begin with %q, and the index has %d", n, prefix, len(all))
	}
	return all, err
}
