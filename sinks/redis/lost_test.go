package redis_test

import (
	"context"
	"errors"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// reset is a checkpoint after prev with which a rebuild by reset begins.
func reset(prev projector.Checkpoint) projector.Checkpoint {
	next := following(prev)
	next.Rebuild = &projector.Rebuild{Mode: projector.Reset, Began: time.UnixMilli(1_700_000_000_000 + next.Sequence)}
	return next
}

// emptied clears what effect writes.
var emptied = all(counts.Clear, tickets.Clear, aliases.Clear, queue((*redis.Tx).Clear))

// A model that is damaged while it is rebuilt in its own place can be rebuilt once more.
func TestDamagedWithinRebuild(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, create, effect(t, 1))
	first := reset(cp)
	must(t, d.sink.Commit(t.Context(), cp, first, all(emptied, effect(t, 1))))
	must(t, d.Del(t.Context(), "{model}:g1:counts:open").Err())
	_, err := commit(t, d.sink, first, effect(t, 2))
	wantDamaged(t, err)
	again := take(t, d.sink, "next")
	second := reset(again)
	second.Rebuild.Began = second.Rebuild.Began.Add(time.Minute)
	must(t, d.sink.Commit(t.Context(), again, second, all(emptied, effect(t, 1))))
	committed(t, d.sink, second, effect(t, 2))
	d.shows(t, 2)
}

// many is a put of n tickets.
func many(t testing.TB, n int) apply {
	rows := make([]projector.Row[ticket], n)
	for i := range rows {
		rows[i] = projector.Row[ticket]{Owner: value(t, i), Row: &ticket{Title: "x"}}
	}
	return put(tickets, nil, rows)
}

// stray is how many keys begin with this.
func (d *database) stray(t testing.TB, beginning string) int {
	t.Helper()
	n := 0
	keys := d.Scan(t.Context(), 0, "", 1000).Iterator()
	for keys.Next(t.Context()) {
		if len(keys.Val()) >= len(beginning) && keys.Val()[:len(beginning)] == beginning {
			n++
		}
	}
	must(t, keys.Err())
	return n
}

// The rows of a lost index are removed by the rebuild that begins: else they would be found
// when they are added to, and be seen by who reads them by their keys.
func TestResetAfterLostIndex(t *testing.T) {
	lost := func(t *testing.T) (*database, projector.Checkpoint, error) {
		d := newDatabase(t)
		d.acquired(t, create, effect(t, 1), add(counts, nil, []count{{"closed", 1}}))
		must(t, d.Set(t.Context(), "{model}:g11:counts:closed", "another's", 0).Err())
		must(t, d.Del(t.Context(), "{model}:g1:counts").Err())
		cp := take(t, d.sink, "next")
		next := reset(cp)
		must(t, d.sink.Commit(t.Context(), cp, next, all(emptied, effect(t, 1))))
		equal(t, "another's", d.stray(t, "{model}:g11:"), 1)
		n := d.stray(t, "{model}:g1:counts:")
		_, err := commit(t, d.sink, next, effect(t, 2), add(counts, nil, []count{{"closed", 1}}))
		if err == nil {
			equal(t, "rows after the reset", n, 1)
		}
		return d, next, err
	}
	d, _, err := lost(t)
	must(t, err)
	equal(t, "rows", d.rows(t, "counts"), "closed: contributions=1 n=1 status=closed\nopen: contributions=2 n=2 status=open")
	t.Run("control", func(t *testing.T) {
		disable(t, fault.RemoveStray)
		_, _, err := lost(t)
		wantDamaged(t, err)
	})
}

// It is done in steps, before the commit, and noted: who dies in between leaves a model that
// says that it is damaged, and who is not the owner any more removes nothing.
func TestResetAfterLostIndexInSteps(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, create, many(t, 5000), effect(t, 1))
	must(t, d.Del(t.Context(), "{model}:g1:tickets").Err())
	ctx, cancel := context.WithCancel(t.Context())
	at(t, fault.GenerationStep, cancel)
	err := d.sink.Commit(ctx, cp, reset(cp), all(emptied, effect(t, 1)))
	wantClass(t, d.sink, err, projector.Transient)
	left := d.stray(t, "{model}:g1:tickets:")
	if left == 0 || left > 5000 {
		t.Errorf("%d rows are left after a step", left)
	}
	_, err = commit(t, d.sink, cp) // that touches no row
	wantDamaged(t, err)

	var usurper projector.Checkpoint
	at(t, fault.GenerationStep, func() {
		usurper = take(t, d.sink, "usurper")
		left = d.stray(t, "{model}:g1:tickets:")
	})
	wantFenced(t, d.sink.Commit(t.Context(), cp, reset(cp), all(emptied, effect(t, 1))))
	equal(t, "rows left", d.stray(t, "{model}:g1:tickets:"), left)

	next := reset(usurper)
	must(t, d.sink.Commit(t.Context(), usurper, next, all(emptied, effect(t, 1))))
	equal(t, "rows left", d.stray(t, "{model}:g1:tickets:"), 1)
	committed(t, d.sink, next, effect(t, 2))
	d.shows(t, 2)
}

// A name is no pattern.
func TestLostIndexOfOddName(t *testing.T) {
	d := newDatabase(t)
	const name = `a*[b]?\`
	taken, err := d.sink.Acquire(t.Context(), name, "test")
	must(t, err)
	cp := committed(t, d.sink, taken[0], create, effect(t, 1))
	must(t, d.Del(t.Context(), cp.Place+":counts").Err())
	must(t, d.sink.Commit(t.Context(), cp, reset(cp), emptied))
	equal(t, "rows left", d.stray(t, cp.Place+":counts:"), 0)
}

// Discard finds the rows of an index that was lost, and those of a generation of which the
// checkpoint was.
func TestDiscardLost(t *testing.T) {
	for _, lose := range []string{"{model}:g1:tickets", "{model}:checkpoint:1"} {
		t.Run(lose, func(t *testing.T) {
			discarded := func(t *testing.T) int {
				d := newDatabase(t)
				live, _ := d.build(t, d.acquired(t, create, many(t, 3000)), all())
				must(t, d.Del(t.Context(), lose).Err())
				all, err := d.sink.Acquire(t.Context(), model, "next")
				must(t, err)
				equal(t, "generations", len(all), 2)
				equal(t, "the live one", all[1].Generation, live.Generation)
				must(t, d.sink.Discard(t.Context(), all[0]))
				left := take(t, d.sink, "last")
				equal(t, "the one left", left.Generation, live.Generation)
				return d.stray(t, "{model}:g1:")
			}
			equal(t, "keys left", discarded(t), 0)
			t.Run("control", func(t *testing.T) {
				disable(t, fault.RemoveStray)
				equal(t, "keys left", discarded(t) >= 3000, true)
			})
		})
	}
}

// older is a row type that alias has come from.
type older struct {
	Name  string `row:"name,key"`
	Of    string `row:"of"`
	Until string `row:"until"`
}

// A rebuild in place leaves no column of an earlier row type.
func TestInPlaceOtherRowType(t *testing.T) {
	d := newDatabase(t)
	was := redis.Hash[older]{Name: "aliases"}
	cp := d.acquired(t, was.Create, put(was, nil, []projector.Row[older]{
		{Owner: value(t, "a"), Row: &older{"a", "x", "2026"}}, {Owner: value(t, "b"), Row: &older{"b", "x", "2026"}},
	}))
	begun := following(cp)
	begun.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: 1}
	row := func(of string) apply {
		return put(aliases, nil, []projector.Row[alias]{{Owner: value(t, "a"), Row: &alias{"a", of}}})
	}
	must(t, d.sink.Commit(t.Context(), cp, begun, all(aliases.Prepare, row("y"))))
	equal(t, "rows", d.rows(t, "aliases"), "a: name=a of=y\nb: name=b of=x until=2026")
	committed(t, d.sink, begun, row("z"))
	equal(t, "rows", d.rows(t, "aliases"), "a: name=a of=z\nb: name=b of=x until=2026")
}

// Who was frozen and reads what the next owner has written learns that there is a next one.
func TestFencedNotDamaged(t *testing.T) {
	frozen := func(t *testing.T) error {
		d := newDatabase(t)
		cp := d.acquired(t, create, effect(t, 1))
		return d.sink.Commit(t.Context(), cp, following(cp), all(effect(t, 2), func(context.Context, *redis.Tx) error {
			next := take(t, d.sink, "next")
			committed(t, d.sink, next, add(counts, []count{{"open", 1}}, []count{{"closed", 1}}))
			must(t, d.HDel(t.Context(), "{model}:g1:counts", "closed").Err()) // whatever it finds
			return nil
		}))
	}
	wantFenced(t, frozen(t))
	t.Run("control", func(t *testing.T) {
		disable(t, fault.FenceRaises)
		wantDamaged(t, frozen(t))
	})
}

// A server that has stopped answering does not hold a commit for ever that has found damage.
func TestDamageOfSilentServer(t *testing.T) {
	server, d := throwaway(t, nil)
	cp := d.acquired(t, create)
	ends := func(t *testing.T, limit time.Duration) (err error) {
		defer redis.SetDamageLimit(limit)()
		sink := redis.New(d.connect(t, func(o *goredis.Options) { o.ReadTimeout = -1 }))
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			ended <- sink.Commit(ctx, cp, following(cp), func(context.Context, *redis.Tx) error {
				return errors.Join(&redis.DamagedError{What: "a row is gone"}, server.Pause())
			})
		}()
		select {
		case err = <-ended:
			must(t, server.Resume())
		case <-time.After(3 * time.Second):
			must(t, server.Resume())
			<-ended
		}
		return err
	}
	wantClass(t, d.sink, ends(t, 100*time.Millisecond), projector.Transient)
	t.Run("control", func(t *testing.T) {
		equal(t, "ended by itself with", ends(t, time.Hour), nil)
	})
}

// A generation that has lost rows does not become the live one.
func TestSwitchToLost(t *testing.T) {
	switched := func(t *testing.T) (*database, error) {
		d := newDatabase(t)
		live := d.acquired(t, create, effect(t, 1))
		next, err := d.sink.Begin(t.Context(), live, 2)
		must(t, err)
		next = committed(t, d.sink, next, create, many(t, 10))
		must(t, d.Del(t.Context(), "{model}:g2:tickets:3").Err())
		return d, d.sink.Switch(t.Context(), live, next)
	}
	d, err := switched(t)
	wantDamaged(t, err)
	wantClass(t, d.sink, err, projector.Fatal)
	place, err := redis.Live(t.Context(), d.Client, model)
	must(t, err)
	equal(t, "the live one", place, "{model}:g1")
	t.Run("control", func(t *testing.T) {
		disable(t, fault.CountRows)
		_, err := switched(t)
		must(t, err)
	})
}

// Behind a connection that broke may be another server.
func TestServerCheckedAfterBreak(t *testing.T) {
	_, d := throwaway(t, nil)
	cp := d.acquired(t, create)
	for name, value := range map[string]string{"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"} {
		must(t, d.ConfigSet(t.Context(), name, value).Err())
	}
	_, err := d.sink.Load(t.Context(), model, 1) // for nothing has broken
	must(t, err)
	other := d.connect(t)
	at(t, fault.CommitSend, func() {
		must(t, other.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes").Err())
	})
	_, err = commit(t, d.sink, cp, effect(t, 1))
	wantClass(t, d.sink, err, projector.Transient)
	for range 2 {
		_, err = d.sink.Load(t.Context(), model, 1)
		wantError(t, err, "maxmemory-policy is allkeys-lru")
		wantClass(t, d.sink, err, projector.Fatal)
	}
	must(t, d.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
	_, err = d.sink.Load(t.Context(), model, 1)
	must(t, err)
}

// A client that may ask replicas is refused before any server is.
func TestReplicaReadsRefused(t *testing.T) {
	for _, o := range []goredis.ClusterOptions{{ReadOnly: true}, {RouteByLatency: true}, {RouteRandomly: true}} {
		o.Addrs = []string{"127.0.0.1:1"}
		client := goredis.NewClusterClient(&o)
		sink := redis.New(client, redis.TrustServer())
		_, err := sink.Acquire(t.Context(), model, "test")
		wantError(t, err, "ReadOnly", "replicas")
		wantClass(t, sink, err, projector.Fatal)
		must(t, client.Close())
	}
}
