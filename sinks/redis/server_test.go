package redis_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// A server that would lose rows in silence is refused at start, with what to do.
func TestServerRefused(t *testing.T) {
	_, d := throwaway(t, map[string]string{"appendonly": "no"})
	refused := func(s *redis.Sink, says ...string) {
		t.Helper()
		_, err := s.Acquire(t.Context(), model, "test")
		wantError(t, err, says...)
		wantClass(t, s, err, projector.Fatal)
	}
	accepted := func(s *redis.Sink) {
		t.Helper()
		_, err := s.Acquire(t.Context(), model, "test")
		must(t, err)
	}
	set := func(name, value string) { t.Helper(); must(t, d.ConfigSet(t.Context(), name, value).Err()) }

	refused(d.sink, "writes nothing to disk", "appendonly", "AllowVolatile")
	accepted(redis.New(d.Client, redis.AllowVolatile()))
	set("save", "60 1")
	accepted(d.sink)
	set("maxmemory", "100mb")
	for policy, ok := range map[string]bool{
		"noeviction": true, "volatile-lru": true, "volatile-ttl": true, "allkeys-lru": false, "allkeys-lfu": false, "allkeys-random": false,
	} {
		set("maxmemory-policy", policy)
		if ok {
			accepted(d.sink)
		} else {
			refused(d.sink, "maxmemory-policy is "+policy, "noeviction")
		}
	}
	set("save", "")
	set("maxmemory-policy", "allkeys-lru")
	refused(d.sink, "maxmemory-policy is allkeys-lru", "writes nothing to disk") // all faults at once
	set("maxmemory", "0")                                                        // never evicts
	accepted(redis.New(d.Client, redis.AllowVolatile()))

	// Users who may not ask.
	const password = "a-secret-word"
	keys := []any{"acl", "setuser", "app", "on", ">" + password, "~{model}:*", "+@all", "-config"}
	must(t, d.Do(t.Context(), keys...).Err())
	app := func(o *goredis.Options) { o.Username, o.Password = "app", password }
	refused(redis.New(d.connect(t, app)), "CONFIG GET", "AllowVolatile")
	set("appendonly", "yes")
	accepted(redis.New(d.connect(t, app))) // INFO has told
	must(t, d.Do(t.Context(), append(keys, "-info")...).Err())
	refused(redis.New(d.connect(t, app)), "INFO", "TrustServer")
	accepted(redis.New(d.connect(t, app), redis.TrustServer()))

	// Whoever may not write, or not log in, and no error that has the password.
	must(t, d.Do(t.Context(), "acl", "setuser", "app", "resetkeys", "~other:*").Err())
	refused(redis.New(d.connect(t, app), redis.TrustServer()), "NOPERM")
	wrong := redis.New(d.connect(t, func(o *goredis.Options) { o.Username, o.Password = "app", password+"2" }))
	_, err := wrong.Acquire(t.Context(), model, "test")
	wantClass(t, wrong, err, projector.Fatal)
	if strings.Contains(err.Error(), password) {
		t.Errorf("the password is in: %v", err)
	}
}

// A client that is closed, and a server that is not there.
func TestUnreachable(t *testing.T) {
	s, d := throwaway(t, nil)
	cp := d.acquired(t)
	closed := d.connect(t)
	must(t, closed.Close())
	_, err := redis.New(closed).Load(t.Context(), model, 1)
	wantClass(t, d.sink, err, projector.Fatal)
	must(t, s.Stop())
	calls := []func() error{
		func() error { _, err := d.sink.Acquire(t.Context(), model, "test"); return err },
		func() error { _, err := d.sink.Load(t.Context(), model, 1); return err },
		func() error { _, err := d.sink.Begin(t.Context(), cp, 2); return err },
		func() error { return d.sink.Commit(t.Context(), cp, following(cp), all()) },
		func() error { return d.sink.Discard(t.Context(), cp) },
	}
	errs := make([]error, len(calls))
	var wg sync.WaitGroup
	for i, call := range calls { // each tries for a while
		wg.Go(func() { errs[i] = call() })
	}
	wg.Wait()
	for _, err := range errs {
		wantError(t, err)
		wantClass(t, d.sink, err, projector.Transient)
	}
}

// TestCluster runs the conformance suite by a cluster's client on a cluster of one node,
// which refuses what touches two slots as one of many nodes does (seen on 7.0).
func TestCluster(t *testing.T) {
	_, d := throwaway(t, map[string]string{"cluster-enabled": "yes"})
	must(t, d.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	for { // the node takes a moment to find itself in order
		info, err := d.ClusterInfo(t.Context()).Result()
		must(t, err)
		if strings.Contains(info, "cluster_state:ok") {
			break
		}
	}
	cluster := func(t cleaner) *goredis.ClusterClient {
		c := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{d.addr}, ContextTimeoutEnabled: true})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	subject := conformance(t)
	subject.Rounds = 5
	subject.Open = func(c sinktest.T) sinktest.Store[*redis.Tx] {
		must(t, d.FlushAll(t.Context()).Err())
		store := conformanceStore(d)
		store.Sink = func(t sinktest.T) projector.Sink[*redis.Tx] { return redis.New(cluster(t)) }
		return store
	}
	sinktest.Run(t, subject)

	must(t, d.FlushAll(t.Context()).Err())
	c := cluster(t)
	d.sink = redis.New(c)
	d.acquired(t, create, effect(t, 1), add(counts, nil, []count{{"lost", 1}}), queue(func(tx *redis.Tx) { tx.Outside().Stream("mail").Append("a", 1) }))
	found, err := counts.Get(t.Context(), c, model, "open", "closed")
	must(t, err)
	equal(t, "open", *found[0], count{"open", 1})
	equal(t, "closed", found[1], nil)
	n := 0
	must(t, tickets.All(t.Context(), c, model, func(string, ticket) error { n++; return nil }))
	equal(t, "tickets", n, 1)
	must(t, d.Del(t.Context(), "{model}:g1:counts").Err())
	cp := take(t, d.sink, "next")
	must(t, d.sink.Commit(t.Context(), cp, reset(cp), all(emptied, effect(t, 1))))
	d.shows(t, 1)
	equal(t, "rows left", d.stray(t, "{model}:g1:counts:"), 1)
	other := redis.New(c)
	_, err = other.Acquire(t.Context(), "another", "test") // in another slot
	must(t, err)
}

// A server that is still reading its append-only file says that it has none: it is asked
// again, and not refused.
func TestServerThatLoads(t *testing.T) {
	s, d := throwaway(t, map[string]string{"key-load-delay": "500"}) // µs, and it looks up every 1024 keys
	d.acquired(t, create)
	for n := range 5 {
		pipe := d.Pipeline()
		for i := range 1000 {
			pipe.Set(t.Context(), fmt.Sprintf("other:%d", 1000*n+i), i, 0)
		}
		_, err := pipe.Exec(t.Context())
		must(t, err)
	}
	must(t, s.Kill())
	restarted := make(chan error, 1)
	go func() { restarted <- s.Restart(context.Background()) }()
	loading, sink := 0, redis.New(d.connect(t))
	for {
		_, err := sink.Acquire(t.Context(), model, "test")
		if err == nil {
			break
		}
		wantClass(t, sink, err, projector.Transient)
		if strings.Contains(err.Error(), "still reading") {
			loading++
		}
	}
	must(t, <-restarted)
	if loading == 0 {
		t.Error("it was never asked while it was reading")
	}
}
