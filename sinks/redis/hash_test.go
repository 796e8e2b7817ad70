package redis_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

type sale struct {
	Shop    string    `row:"shop,key"`
	Day     time.Time `row:"day,key"`
	Revenue int64     `row:"revenue,sum"`
}

func TestCheck(t *testing.T) {
	type decimal struct {
		K string          `row:"k,key"`
		N bson.Decimal128 `row:"n,sum"`
	}
	wantError(t, redis.Hash[decimal]{Name: "x"}.Check(projector.FormRollup), `"n" can't be a sum`, "int64")
	type float struct {
		K string  `row:"k,key"`
		N float64 `row:"n,sum"`
	}
	wantError(t, redis.Hash[float]{Name: "x"}.Check(projector.FormRollup), "sums of floats")
	wantError(t, redis.Hash[count]{Name: "Upper"}.Check(projector.FormRollup), "bad hash name")
	wantError(t, redis.Hash[count]{Name: "on"}.Check(projector.FormRollup), "bad hash name", "handlers of On")
	wantError(t, counts.Check(projector.FormUpsert), "only a Rollup adds up")
	must(t, counts.Check(projector.FormRollup))
	must(t, tickets.Check(projector.FormMirror))
	must(t, aliases.Check(projector.FormUpsert))
	equal(t, "layout", counts.Layout(), "status text key, n int sum")
}

// What is where, for those who read without this library.
func TestStoredForm(t *testing.T) {
	d := newDatabase(t)
	sales := redis.Hash[sale]{Name: "sales"}
	type all3 struct {
		Maybe *string `row:"maybe"`
	}
	bare := redis.Hash[all3]{Name: "bare"}
	day := time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC)
	note := "n"
	cp := d.acquired(
		t, create, sales.Create, bare.Create,
		add(sales, nil, []sale{{"a|b%", day, 7}, {"a|b%", day, 5}}),
		put(tickets, nil, []projector.Row[ticket]{{Owner: value(t, 1.5), Row: &ticket{"t", &note}}}),
		put(aliases, nil, []projector.Row[alias]{{Owner: value(t, 7), Row: &alias{"x", "y"}}}),
		put(bare, nil, []projector.Row[all3]{{Owner: value(t, "b"), Row: &all3{}}}),
	)
	equal(t, "sales", d.rows(t, "sales"), "a%7Cb%25|2026-11-29T00:00:00.000Z: contributions=2 day=2026-11-29T00:00:00.000Z revenue=12 shop=a|b%")
	equal(t, "tickets", d.rows(t, "tickets"), "number(1.5): note=n title=t")
	equal(t, "aliases", d.rows(t, "aliases"), "x: name=x of=y")
	equal(t, "bare", d.rows(t, "bare"), "b: tm_row=1")
	key, err := sales.Key(sale{Shop: "a|b%", Day: day})
	must(t, err)
	found, err := sales.Get(t.Context(), d.Client, model, key, "nothing")
	must(t, err)
	equal(t, "found", fmt.Sprint(*found[0], found[1]), fmt.Sprint(sale{"a|b%", day, 12}, nil))
	// A field that becomes null goes.
	cp = committed(t, d.sink, cp, put(tickets, nil, []projector.Row[ticket]{{Owner: value(t, 1.5), Row: &ticket{"t", nil}}}))
	equal(t, "tickets", d.rows(t, "tickets"), "number(1.5): title=t")
	for key, want := range map[string]string{
		"{model}:live": "string", "{model}:generations": "set", "{model}:checkpoint:1": "hash", "{model}:g1:sales": "hash",
	} {
		is, err := d.Type(t.Context(), key).Result()
		must(t, err)
		equal(t, key, is, want)
	}
	rows, err := d.HGet(t.Context(), "{model}:checkpoint:1", "rows.aliases").Result()
	must(t, err)
	equal(t, "rows of aliases", rows, "1")
	committed(t, d.sink, cp, put(aliases, []projector.Row[alias]{{Owner: value(t, 7)}}, nil))
	equal(t, "aliases", d.rows(t, "aliases"), "")
}

// Rebuilt in place: what is not written again is swept.
func TestSweep(t *testing.T) {
	d := newDatabase(t)
	rows := func(from, to int) []projector.Row[alias] {
		var all []projector.Row[alias]
		for i := from; i < to; i++ {
			all = append(all, projector.Row[alias]{Owner: value(t, i), Row: &alias{Name: fmt.Sprint(i), Of: "x"}})
		}
		return all
	}
	cp := d.acquired(t, create, put(aliases, nil, rows(0, 3000)))
	next := following(cp)
	next.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: 5}
	must(t, d.sink.Commit(t.Context(), cp, next, all(aliases.Prepare, put(aliases, nil, rows(1000, 2000)), put(aliases, nil, rows(3000, 3010)))))
	total, calls := 0, 0
	for {
		cp = next
		next = following(cp)
		n := 0
		must(t, d.sink.Commit(t.Context(), cp, next, func(ctx context.Context, tx *redis.Tx) (err error) {
			n, err = aliases.Sweep(ctx, tx, 300)
			return err
		}))
		if n > 300 {
			t.Errorf("swept %d, limit 300", n)
		}
		if total, calls = total+n, calls+1; n == 0 {
			break
		}
	}
	equal(t, "swept", total, 2000)
	must(t, d.sink.Try(t.Context(), next, func(ctx context.Context, tx *redis.Tx) error {
		n, err := aliases.Count(ctx, tx)
		equal(t, "count", n, 1010)
		return err
	}))
	n, err := d.HLen(t.Context(), "{model}:g1:aliases").Result()
	must(t, err)
	equal(t, "rows", n, 1010)
	done := following(next)
	done.Rebuild = nil
	must(t, d.sink.Commit(t.Context(), next, done, all()))
	_, err = commit(t, d.sink, done, func(ctx context.Context, tx *redis.Tx) error { _, err := aliases.Sweep(ctx, tx, 1); return err })
	wantError(t, err, "rebuild in place")
}

// More rows than go into one command of any kind.
func TestLargeBatch(t *testing.T) {
	d := newDatabase(t)
	const n = 20_000
	var puts, gone []projector.Row[alias]
	var plus []count
	for i := range n {
		r := projector.Row[alias]{Owner: value(t, i), Row: &alias{Name: fmt.Sprint(i), Of: "x"}}
		puts, plus = append(puts, r), append(plus, count{fmt.Sprint(i), 1})
		if i%2 == 0 {
			gone = append(gone, r)
		}
	}
	cp := d.acquired(t, create, put(aliases, nil, puts), add(counts, nil, plus))
	cp = committed(t, d.sink, cp, put(aliases, gone, nil), add(counts, plus[:n/2], nil))
	for _, target := range []string{"aliases", "counts"} {
		left, err := d.HLen(t.Context(), "{model}:g1:"+target).Result()
		must(t, err)
		equal(t, target, left, n/2)
	}
	cp = committed(t, d.sink, cp, aliases.Clear, counts.Clear, add(counts, nil, []count{{"a", 1}}))
	equal(t, "counts", d.rows(t, "counts"), "a: contributions=1 n=1 status=a")
	committed(t, d.sink, cp, counts.Clear)
	size, err := d.DBSize(t.Context()).Result()
	must(t, err)
	equal(t, "keys", size, 3)
}
