package redis_test

import (
	"math"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// Every command of a Tx, and what becomes of it.
func TestTx(t *testing.T) {
	d := newDatabase(t)
	ctx := t.Context()
	cp := d.acquired(t, queue(func(tx *redis.Tx) {
		tx.Hash("hash").Set("text", "a").Set("time", time.UnixMilli(0)).Set("flag", true).Add("n", 5).Add("n", -2).Remove("gone", "text").Set("f", 1.5)
		tx.String("string").Set("text")
		tx.String("number").Add(7).Add(1)
		tx.Set("set").Add("a", "b", 3).Remove("b")
		tx.SortedSet("top").Put("a", 2).Put("b", 1.5).Put("c", math.Inf(1)).Remove("c")
		tx.List("list").Push(1, 2, 3).Keep(2)
		tx.Stream("stream").Append("k", "v").Append("k", 2).Keep(10)
		tx.Hash("again").Set("a", 1)
		tx.Delete("again")
		tx.List("again").Push("now a list")
		tx.Outside().Stream("mail").Append("to", "ada")
		tx.Outside().String("n").Add(1)
	}))
	key := func(name string) string { return "{model}:g1:on:" + name }
	hash, err := d.HGetAll(ctx, key("hash")).Result()
	must(t, err)
	equal(t, "hash", len(hash), 4)
	equal(t, "n", hash["n"]+hash["time"]+hash["flag"]+hash["f"], "31970-01-01T00:00:00.000Ztrue1.5")
	equal(t, "string", d.Get(ctx, key("string")).Val(), "text")
	equal(t, "number", d.Get(ctx, key("number")).Val(), "8")
	equal(t, "set", d.SCard(ctx, key("set")).Val(), 2)
	equal(t, "top", d.ZRange(ctx, key("top"), 0, -1).Val()[0], "b")
	equal(t, "list", d.LIndex(ctx, key("list"), 0).Val(), "2")
	equal(t, "stream", d.XLen(ctx, key("stream")).Val(), 2)
	equal(t, "again", d.LIndex(ctx, key("again"), 0).Val(), "now a list")
	equal(t, "outside", d.XLen(ctx, "{model}:outside:mail").Val(), 1)
	equal(t, "index", d.HLen(ctx, "{model}:g1:on").Val(), 8)

	for name, c := range map[string]struct {
		f    func(*redis.Tx)
		says string
	}{
		"a sum that overflows":     {func(tx *redis.Tx) { tx.Hash("hash").Add("n", math.MaxInt64) }, "exceed"},
		"a sum of text":            {func(tx *redis.Tx) { tx.String("string").Add(1) }, "no int64"},
		"a sum of a padded number": {func(tx *redis.Tx) { tx.String("number").Set("007").Add(1) }, "no int64"},
		"a sum of nothing":         {func(tx *redis.Tx) { tx.Hash("hash").Set("n", "").Add("n", 1) }, "no int64"},
		"a score that is none":     {func(tx *redis.Tx) { tx.SortedSet("top").Put("a", math.NaN()) }, "not a number"},
		"a value of a wrong type":  {func(tx *redis.Tx) { tx.List("list").Push(map[string]int{}) }, "can't be stored"},
		"nil":                      {func(tx *redis.Tx) { tx.Set("set").Add(nil) }, "can't be stored"},
		"half an entry":            {func(tx *redis.Tx) { tx.Stream("stream").Append("k") }, "in turn"},
		"no name":                  {func(tx *redis.Tx) { tx.List("").Push(1) }, "no name"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, err := range []error{
				d.sink.Try(ctx, cp, queue(c.f)),
				d.sink.Commit(ctx, cp, following(cp), all(queue(func(tx *redis.Tx) { tx.String("beside").Add(1) }), queue(c.f))),
			} {
				wantError(t, err, c.says)
				wantClass(t, d.sink, err, projector.Poison)
			}
			equal(t, "written beside it", d.Exists(ctx, key("beside")).Val(), 0)
		})
	}
	_, err = commit(t, d.sink, cp, queue(func(tx *redis.Tx) { tx.List("hash").Push(1) }))
	wantError(t, err, `holds a hash where this library keeps a list`)

	var kept *redis.Tx
	cp = committed(t, d.sink, cp, queue(func(tx *redis.Tx) {
		kept = tx
		tx.Delete("hash")
		tx.List("list").Keep(0)
		tx.Delete("was never there")
	}))
	kept.String("late").Set("x") // without effect
	equal(t, "index", d.HLen(ctx, "{model}:g1:on").Val(), 6)

	cp = committed(t, d.sink, cp, queue(func(tx *redis.Tx) {
		tx.String("dropped").Set("with the others")
		tx.Clear()
		tx.Hash("number").Set("a", 1) // it was a string
	}))
	equal(t, "index", d.HLen(ctx, "{model}:g1:on").Val(), 1)
	equal(t, "outside", d.XLen(ctx, "{model}:outside:mail").Val(), 1)

	// A generation takes its own along when it is discarded.
	now, old := d.build(t, cp, queue(func(tx *redis.Tx) { tx.String("n").Add(1) }))
	must(t, d.sink.Discard(ctx, old))
	equal(t, "the old one's", d.Exists(ctx, key("number"), "{model}:g1:on").Val(), 0)
	equal(t, "the new one's", d.Get(ctx, now.Place+":on:n").Val(), "1")
	_, err = d.Get(ctx, "{model}:checkpoint:1").Result()
	equal(t, "the old checkpoint", err, error(goredis.Nil))
	err = d.sink.Discard(ctx, now)
	wantError(t, err, "readers see")
}
