package redis_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// build adds a generation with rows and makes it live.
func (d *database) build(t testing.TB, live projector.Checkpoint, rows apply) (now, old projector.Checkpoint) {
	t.Helper()
	next, err := d.sink.Begin(t.Context(), live, live.Generation+1)
	must(t, err)
	next = committed(t, d.sink, next, create, rows)
	must(t, d.sink.Switch(t.Context(), live, next))
	now, err = d.sink.Load(t.Context(), model, next.Generation)
	must(t, err)
	old, err = d.sink.Load(t.Context(), model, live.Generation)
	must(t, err)
	return now, old
}

// Readers that read several rows see those of one generation, and of one commit, while
// generations are switched and discarded under them.
func TestReadersAcrossSwitches(t *testing.T) {
	d := newDatabase(t)
	rows := func(n int) apply {
		var put []projector.Row[ticket]
		for _, owner := range []string{"a", "b", "c"} {
			put = append(put, projector.Row[ticket]{Owner: value(t, owner), Row: &ticket{Title: fmt.Sprint(n)}})
		}
		return func(ctx context.Context, tx *redis.Tx) error { return tickets.Put(ctx, tx, nil, put) }
	}
	live := d.acquired(t, create, rows(0))
	client := d.connect(t)
	stop, result := make(chan struct{}), make(chan error, 1)
	go func() {
		reads, last := 0, -1
		for {
			select {
			case <-stop:
				if last < 25 {
					result <- fmt.Errorf("the last title read was %d, after %d reads", last, reads)
				}
				close(result)
				return
			default:
			}
			found, err := tickets.Get(context.Background(), client, model, "a", "b", "c")
			if err != nil {
				result <- err
				return
			}
			var titles []int
			for _, r := range found {
				n := -1
				if r != nil {
					_, err = fmt.Sscan(r.Title, &n)
				}
				titles = append(titles, n)
			}
			if reads++; err != nil || titles[0] != titles[1] || titles[1] != titles[2] || titles[0] < last {
				result <- fmt.Errorf("read the titles %d after %d (%w)", titles, last, err)
				return
			}
			last = titles[0]
		}
	}()
	for n := 1; n <= 30; n += 2 {
		var old projector.Checkpoint
		live, old = d.build(t, live, rows(n))
		live = committed(t, d.sink, live, rows(n+1))
		must(t, d.sink.Discard(t.Context(), old))
	}
	for range 1000 { // until the reader has come near the end
		found, err := tickets.Get(t.Context(), client, model, "a")
		must(t, err)
		equal(t, "title", found[0].Title, "30")
	}
	close(stop)
	for err := range result {
		t.Error(err)
	}
	equal(t, "generation", live.Generation, 16)
	keys, err := d.Keys(t.Context(), "*").Result()
	must(t, err)
	equal(t, "keys", len(keys), 3+1+3) // generations, live, one checkpoint; index and rows; nothing of the old ones
	// The control: a reader that asks for the pointer first finds nothing any more.
	place, err := redis.Live(t.Context(), client, model)
	must(t, err)
	_, old := d.build(t, live, rows(31))
	must(t, d.sink.Discard(t.Context(), old))
	equal(t, "the row by a pointer of before", client.Exists(t.Context(), place+":tickets:a").Val(), 0)
}

// A reader of all rows is told when they go under it.
func TestAllOfDiscarded(t *testing.T) {
	d := newDatabase(t)
	var put []projector.Row[ticket]
	for i := range 1000 {
		put = append(put, projector.Row[ticket]{Owner: value(t, i), Row: &ticket{Title: "x"}})
	}
	live := d.acquired(t, create, func(ctx context.Context, tx *redis.Tx) error { return tickets.Put(ctx, tx, nil, put) })
	seen := map[string]bool{}
	must(t, tickets.All(t.Context(), d.Client, model, func(key string, _ ticket) error { seen[key] = true; return nil }))
	equal(t, "rows", len(seen), 1000)
	err := tickets.All(t.Context(), d.Client, model, func(string, ticket) error {
		if live.Generation == 1 {
			var old projector.Checkpoint
			live, old = d.build(t, live, all())
			must(t, d.sink.Discard(t.Context(), old))
		}
		return nil
	})
	wantError(t, err, "discarded while it was read")
	n, err := d.DBSize(t.Context()).Result()
	must(t, err)
	equal(t, "keys", n, 3)
	cause := errors.New("enough")
	committed(t, d.sink, live, func(ctx context.Context, tx *redis.Tx) error { return tickets.Put(ctx, tx, nil, put) })
	equal(t, "error", tickets.All(t.Context(), d.Client, model, func(string, ticket) error { return cause }), cause)
}

// Rows go in steps, and the checkpoint last: a reader of all rows is told from the first
// step on, and is never given what is left.
func TestAllOfHalfDiscarded(t *testing.T) {
	d := newDatabase(t)
	var put []projector.Row[ticket]
	for i := range 3000 {
		put = append(put, projector.Row[ticket]{Owner: value(t, i), Row: &ticket{Title: "x"}})
	}
	live := d.acquired(t, create, func(ctx context.Context, tx *redis.Tx) error { return tickets.Put(ctx, tx, nil, put) })
	half, release, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	at(t, fault.GenerationStep, func() { close(half); <-release })
	err := tickets.All(t.Context(), d.Client, model, func(string, ticket) error {
		if live.Generation == 1 {
			var old projector.Checkpoint
			live, old = d.build(t, live, all())
			go func() { ended <- d.sink.Discard(context.WithoutCancel(t.Context()), old) }()
			<-half
		}
		return nil
	})
	close(release)
	must(t, <-ended)
	wantError(t, err, "discarded while it was read")
}

func TestReadErrors(t *testing.T) {
	d := newDatabase(t)
	_, err := redis.Live(t.Context(), d.Client, "nobody")
	wantError(t, err, "no model", "nobody")
	_, err = redis.Read(t.Context(), d.Client, "nobody", "x", "y")
	wantError(t, err, "no model", "nobody")
	_, err = tickets.Key(ticket{})
	wantError(t, err, "projector.KeyText")
	d.acquired(t, create, effect(t, 1))
	_, err = redis.Hash[sale]{Name: "counts"}.Get(t.Context(), d.Client, model, "open")
	wantError(t, err, `row "open"`, `field "shop" is missing`)
}
