package redis_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// effect is a commit's number in a sum, a row and a handler's own key: after n commits all
// three have it.
func effect(t testing.TB, n int64) apply {
	return all(
		add(counts, nil, []count{{"open", 1}}),
		put(tickets, nil, []projector.Row[ticket]{{Owner: value(t, "t"), Row: &ticket{Title: fmt.Sprint(n)}}}),
		queue(func(tx *redis.Tx) { tx.Hash("totals").Add("n", 1) }),
	)
}

// shows checks that the model is what n commits by effect have made.
func (d *database) shows(t testing.TB, n int64) {
	t.Helper()
	equal(t, "the sum", d.rows(t, "counts"), fmt.Sprintf("open: contributions=%d n=%d status=open", n, n))
	equal(t, "the row", d.rows(t, "tickets"), fmt.Sprintf("t: title=%d", n))
	total, err := d.HGet(t.Context(), "{model}:g1:on:totals", "n").Int64()
	must(t, err)
	equal(t, "the handler's key", total, n)
}

// create makes the targets, as the first commit does.
var create = all(counts.Create, tickets.Create, aliases.Create)

// A server that dies loses at most its last second, rows and checkpoint alike: what is
// there after its restart is some commit, whole.
func TestServerKilled(t *testing.T) {
	s, d := throwaway(t, map[string]string{"appendfsync": "everysec"})
	cp := d.acquired(t, create)
	base := cp.Sequence
	for range 3 {
		stop := time.Now().Add(300 * time.Millisecond)
		time.AfterFunc(150*time.Millisecond, func() { _ = s.Kill() })
		var err error
		var next projector.Checkpoint
		for err == nil && time.Now().Before(stop) {
			if next, err = commit(t, d.sink, cp, effect(t, cp.Sequence-base+1)); err == nil {
				cp = next
			}
		}
		wantError(t, err)
		wantClass(t, d.sink, err, projector.Transient)
		must(t, s.Restart(t.Context()))
		stored, err := d.sink.Load(t.Context(), model, 1)
		must(t, err)
		if stored.Sequence > next.Sequence || stored.Sequence < base {
			t.Fatalf("sequence %d is stored, %d was the last that was tried", stored.Sequence, next.Sequence)
		}
		t.Logf("%d commits, the last answered was %d", stored.Sequence-base, cp.Sequence-base)
		cp = stored
		d.shows(t, cp.Sequence-base)
	}
}

// After a loss of power the append-only file ends anywhere, in the middle of a transaction
// too. The server leaves out a transaction that is not whole (seen on 7.0).
func TestPowerLost(t *testing.T) {
	s, d := throwaway(t, map[string]string{"appendfsync": "no"})
	cp := d.acquired(t, create)
	base := cp.Sequence
	for n := range int64(5) {
		cp = committed(t, d.sink, cp, effect(t, n+1))
	}
	must(t, s.Stop())
	data := filepath.Join(t.TempDir(), "data")
	must(t, s.CopyData(data))
	files, err := filepath.Glob(filepath.Join(data, "appendonlydir", "*.incr.aof"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	whole, err := os.ReadFile(files[0])
	must(t, err)
	last := strings.LastIndex(string(whole), "MULTI")
	seen := map[int64]bool{}
	for _, cut := range []int{len(whole), len(whole) - 3, len(whole) - 60, (len(whole) + last) / 2, last + 20, last} {
		must(t, os.WriteFile(files[0], whole[:cut], 0o600))
		must(t, s.RestoreData(data))
		must(t, s.Restart(t.Context()))
		stored, err := d.sink.Load(t.Context(), model, 1)
		must(t, err)
		d.shows(t, stored.Sequence-base)
		seen[stored.Sequence-base] = true
		must(t, s.Stop())
	}
	equal(t, "ends that were seen", len(seen), 2)
}

// line is a client's connection of which a test can lose what is sent and answered.
type line struct {
	net.Conn
	mu   *sync.Mutex
	hold *bool // what is written stays in held, and nothing is read
	deaf *bool // nothing is read
	held []byte
}

var errLost = errors.New("the line was lost")

func (l *line) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if *l.hold {
		l.held = append(l.held, b...)
		return len(b), nil
	}
	return l.Conn.Write(b)
}

func (l *line) Read(b []byte) (int, error) {
	l.mu.Lock()
	lost := *l.hold || *l.deaf
	l.mu.Unlock()
	if lost {
		return 0, errLost
	}
	return l.Conn.Read(b)
}

// Close leaves the connection open: the server is not to see that it is gone.
func (l *line) Close() error {
	if l.held == nil {
		return l.Conn.Close()
	}
	return nil
}

// lossy is a sink on a client with lines.
func (d *database) lossy(t *testing.T) (sink *redis.Sink, set func(hold, deaf bool), release func()) {
	var mu sync.Mutex
	var hold, deaf bool
	var lines []*line
	client := d.connect(t, func(o *goredis.Options) {
		o.MaxRetries = -1
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			l := &line{Conn: c, mu: &mu, hold: &hold, deaf: &deaf}
			lines = append(lines, l)
			return l, nil
		}
	})
	set = func(h, dd bool) {
		mu.Lock()
		defer mu.Unlock()
		hold, deaf = h, dd
	}
	release = func() {
		for _, l := range lines {
			if l.held != nil {
				_, err := l.Conn.Write(l.held)
				must(t, err)
				must(t, l.SetReadDeadline(time.Now().Add(time.Second)))
				_, _ = l.Conn.Read(make([]byte, 1)) // it has come to the server
				time.Sleep(20 * time.Millisecond)
				_ = l.Conn.Close()
			}
		}
	}
	return redis.New(client), set, release
}

// at runs f once, at a point.
func at(t testing.TB, p fault.Point, f func()) {
	var once sync.Once
	fault.Global.OnReach(func(q fault.Point) {
		if p == q {
			once.Do(f)
		}
	})
	t.Cleanup(func() { fault.Global.OnReach(nil) })
}

// The answer to EXEC is lost: Load tells that it has happened.
func TestAnswerLost(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, create)
	sink, set, _ := d.lossy(t)
	at(t, fault.CommitSend, func() { set(false, true) })
	next, err := commit(t, sink, cp, effect(t, 1))
	wantClass(t, sink, err, projector.Transient)
	stored, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "sequence", stored.Sequence, next.Sequence)
	d.shows(t, 1)
}

// An EXEC comes to the server after the Load that has looked for it, and before the retry:
// it must fail, since the retry would be the second time.
func TestExecLate(t *testing.T) {
	late := func(t *testing.T) (*database, error) {
		d := newDatabase(t)
		cp := d.acquired(t, create)
		sink, set, release := d.lossy(t)
		at(t, fault.CommitSend, func() { set(true, false) })
		_, err := commit(t, sink, cp, effect(t, 1))
		wantClass(t, sink, err, projector.Transient)
		stored, err := d.sink.Load(t.Context(), model, 1)
		must(t, err)
		equal(t, "sequence", stored.Sequence, cp.Sequence)
		release()
		_, err = commit(t, d.sink, cp, effect(t, 1))
		return d, err
	}
	d, err := late(t)
	must(t, err)
	d.shows(t, 1)
	t.Run("control", func(t *testing.T) {
		disable(t, fault.LoadTouches, fault.FenceSequence)
		d, err := late(t)
		must(t, err)
		equal(t, "the sum", d.rows(t, "counts"), "open: contributions=2 n=2 status=open")
	})
}

// The connection breaks between WATCH and EXEC. The client must not send the transaction
// again by another, which watches nothing.
func TestConnectionBreaksBeforeExec(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, create)
	other := d.connect(t)
	var usurper projector.Checkpoint
	at(t, fault.CommitSend, func() {
		must(t, other.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes").Err())
		usurper = take(t, redis.New(other), "usurper")
	})
	_, err := commit(t, d.sink, cp, effect(t, 1))
	wantError(t, err)
	wantClass(t, d.sink, err, projector.Transient)
	stored, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "term", stored.Term, usurper.Term)
	equal(t, "sequence", stored.Sequence, cp.Sequence)
	equal(t, "rows", d.rows(t, "counts"), "")
}

// All is gone, under a running owner and before the next one.
func TestFlushed(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, create, effect(t, 1))
	must(t, d.FlushDB(t.Context()).Err())
	_, err := commit(t, d.sink, cp, effect(t, 2))
	wantFenced(t, err)
	stored, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "term", stored.Term, 0)
	n, err := d.DBSize(t.Context()).Result()
	must(t, err)
	equal(t, "keys", n, 0)
	fresh := take(t, d.sink, "test")
	equal(t, "sequence", fresh.Sequence, 0)
	committed(t, d.sink, fresh, create, effect(t, 1))
	d.shows(t, 1)
}

// Parts are gone.
func TestPartsLost(t *testing.T) {
	number := func(tx *redis.Tx) { tx.String("number").Add(1) }
	for name, c := range map[string]struct {
		lose    string
		notices apply // nil: any commit, after an Acquire
	}{
		"a row that is added to":     {"{model}:g1:counts:open", add(counts, nil, []count{{"open", 1}})},
		"an index, by a commit":      {"{model}:g1:counts", add(counts, nil, []count{{"closed", 1}})},
		"an index, by the next":      {"{model}:g1:tickets", nil},
		"a row, by the next":         {"{model}:g1:tickets:t", nil},
		"an index of handlers' keys": {"{model}:g1:on", nil},
		"a handler's number":         {"{model}:g1:on:number", queue(number)},
		"a handler's, by the next":   {"{model}:g1:on:number", nil},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			cp := d.acquired(t, create, effect(t, 1), queue(number))
			must(t, d.Del(t.Context(), c.lose).Err())
			if c.notices == nil {
				cp, c.notices = take(t, d.sink, "next"), all()
			}
			_, err := commit(t, d.sink, cp, c.notices)
			wantDamaged(t, err)
			wantClass(t, d.sink, err, projector.Fatal)
			// It stays, until a rebuild takes over or begins here.
			_, err = commit(t, d.sink, cp)
			wantDamaged(t, err)
			wantDamaged(t, d.sink.Try(t.Context(), cp, all()))
			cp = take(t, d.sink, "again")
			_, err = commit(t, d.sink, cp)
			wantDamaged(t, err)
			reset := following(cp)
			reset.Rebuild = &projector.Rebuild{Mode: projector.Reset}
			must(t, d.sink.Commit(t.Context(), cp, reset, all(counts.Clear, tickets.Clear, aliases.Clear, queue((*redis.Tx).Clear), effect(t, 1))))
			d.shows(t, 1)
			done := following(reset)
			done.Rebuild = nil
			must(t, d.sink.Commit(t.Context(), reset, done, all()))
			committed(t, d.sink, take(t, d.sink, "last"), effect(t, 2))
			d.shows(t, 2)
		})
	}
	t.Run("control", func(t *testing.T) {
		disable(t, fault.CountRows)
		d := newDatabase(t)
		d.acquired(t, create, effect(t, 1), queue(number))
		must(t, d.Del(t.Context(), "{model}:g1:tickets", "{model}:g1:on:number").Err())
		committed(t, d.sink, take(t, d.sink, "next"), queue(number))
		equal(t, "number", d.Get(t.Context(), "{model}:g1:on:number").Val(), "1") // of 2
	})
}

// A rebuild in place counts anew, and puts every row again.
func TestLostThenRebuiltInPlace(t *testing.T) {
	d := newDatabase(t)
	row := func(name string) []projector.Row[alias] {
		return []projector.Row[alias]{{Owner: value(t, name), Row: &alias{Name: name, Of: "x"}}}
	}
	d.acquired(t, create, put(aliases, nil, row("a")), put(aliases, nil, row("b")), put(aliases, nil, row("c")))
	must(t, d.Del(t.Context(), "{model}:g1:aliases").Err())
	cp := take(t, d.sink, "next")
	_, err := commit(t, d.sink, cp)
	wantDamaged(t, err)
	begun := following(cp)
	begun.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: 1}
	must(t, d.sink.Commit(t.Context(), cp, begun, aliases.Prepare))
	cp = committed(t, d.sink, begun, put(aliases, nil, row("a")))
	committed(t, d.sink, cp, put(aliases, nil, row("b")))
	equal(t, "rows", d.rows(t, "aliases"), "a: name=a of=x\nb: name=b of=x")
	equal(t, "the row that no index tells of", d.Exists(t.Context(), "{model}:g1:aliases:c").Val(), 0)
}

// What finds its way back by itself.
func TestPointersLost(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, create, effect(t, 1))
	must(t, d.Del(t.Context(), "{model}:generations").Err())
	again := take(t, d.sink, "next")
	equal(t, "generation", again.Generation, 1)
	equal(t, "sequence", again.Sequence, cp.Sequence)
	must(t, d.Del(t.Context(), "{model}:live").Err())
	committed(t, d.sink, again)
	place, err := redis.Live(t.Context(), d.Client, model)
	must(t, err)
	equal(t, "place", place, cp.Place)
	// The checkpoint of the live generation alone is lost: a new one begins beside what
	// is left, and takes nothing of it over.
	must(t, d.Del(t.Context(), "{model}:checkpoint:1").Err())
	taken, err := d.sink.Acquire(t.Context(), model, "next")
	must(t, err)
	equal(t, "generations", len(taken), 2)
	lost, fresh := taken[0], taken[1]
	equal(t, "phase", fresh.Phase, projector.Live)
	equal(t, "sequence", fresh.Sequence, 0)
	committed(t, d.sink, fresh, all(counts.Create, tickets.Create))
	equal(t, "left over", d.rowsIn(t, fresh.Place, "counts"), "")
	// What is left is given as a generation that nothing can be done with but discard it.
	equal(t, "the lost one", lost.Generation, cp.Generation)
	_, err = commit(t, d.sink, lost)
	wantDamaged(t, err)
	must(t, d.sink.Discard(t.Context(), lost))
	keys, err := d.Keys(t.Context(), "{model}:*").Result()
	must(t, err)
	equal(t, "keys", fmt.Sprint(slices.Sorted(slices.Values(keys))), "[{model}:checkpoint:2 {model}:generations {model}:live]")
}

// Memory is full: the transaction is refused as a whole, and goes through later.
func TestOutOfMemory(t *testing.T) {
	_, d := throwaway(t, map[string]string{"maxmemory-policy": "noeviction"})
	cp := d.acquired(t, create, effect(t, 1))
	must(t, d.ConfigSet(t.Context(), "maxmemory", "1").Err())
	_, err := commit(t, d.sink, cp, effect(t, 2))
	wantError(t, err, "OOM")
	wantClass(t, d.sink, err, projector.Transient)
	_, err = d.sink.Load(t.Context(), model, 1)
	wantClass(t, d.sink, err, projector.Transient)
	_, err = d.sink.Acquire(t.Context(), model, "next")
	wantClass(t, d.sink, err, projector.Transient)
	must(t, d.ConfigSet(t.Context(), "maxmemory", "0").Err())
	d.shows(t, 1)
	cp = committed(t, d.sink, cp, effect(t, 2))
	d.shows(t, 2)
	// It fills up between the first commands and EXEC.
	at(t, fault.CommitSend, func() { must(t, d.connect(t).ConfigSet(t.Context(), "maxmemory", "1").Err()) })
	_, err = commit(t, d.sink, cp, effect(t, 3))
	wantClass(t, d.sink, err, projector.Transient)
	must(t, d.ConfigSet(t.Context(), "maxmemory", "0").Err())
	d.shows(t, 2)
	committed(t, d.sink, cp, effect(t, 3))
	d.shows(t, 3)
}

// Something else holds a key of the library's.
func TestForeignTypes(t *testing.T) {
	for key, write := range map[string]apply{
		"{model}:g1:tickets:u":      put(tickets, nil, []projector.Row[ticket]{{Owner: value(t, "u"), Row: &ticket{}}}),
		"{model}:g1:counts:waiting": add(counts, nil, []count{{"waiting", 1}}),
		"{model}:g1:aliases":        put(aliases, nil, []projector.Row[alias]{{Owner: value(t, "u"), Row: &alias{}}}),
		"{model}:g1:on:list":        queue(func(tx *redis.Tx) { tx.Hash("list").Set("a", 1) }),
		"{model}:outside:list":      queue(func(tx *redis.Tx) { tx.Outside().Hash("list").Set("a", 1) }),
	} {
		t.Run(key, func(t *testing.T) {
			d := newDatabase(t)
			cp := d.acquired(t, create, effect(t, 1))
			must(t, d.RPush(t.Context(), key, "foreign").Err())
			for _, err := range []error{
				d.sink.Try(t.Context(), cp, all(effect(t, 2), write)),
				d.sink.Commit(t.Context(), cp, following(cp), all(effect(t, 2), write)),
			} {
				wantError(t, err, key, "list", "move or delete")
				wantClass(t, d.sink, err, projector.Fatal)
			}
			d.shows(t, 1)
			if key == "{model}:g1:aliases" { // of an index, by all that asks it
				_, err := d.sink.Acquire(t.Context(), model, "next")
				wantError(t, err, key, "list", "move or delete")
				wantClass(t, d.sink, err, projector.Fatal)
				cp, err = d.sink.Load(t.Context(), model, 1)
				must(t, err)
				err = d.sink.Commit(t.Context(), cp, reset(cp), emptied)
				wantError(t, err, key, "list", "move or delete")
			}
			must(t, d.Del(t.Context(), key).Err())
			committed(t, d.sink, cp, effect(t, 2), write)
			total, err := d.HGet(t.Context(), "{model}:g1:on:totals", "n").Result()
			must(t, err)
			equal(t, "commits", total, "2")
		})
	}
}

// The control to TestForeignTypes, and what is left when a command fails inside of EXEC,
// since somebody writes between the check and it: the rest was carried out. That is said,
// and stays said.
func TestCommandFailsInExec(t *testing.T) {
	u := put(tickets, nil, []projector.Row[ticket]{{Owner: value(t, "u"), Row: &ticket{}}})
	check := func(t *testing.T, before func(d *database)) {
		d := newDatabase(t)
		cp := d.acquired(t, create, effect(t, 1))
		before(d)
		next, err := commit(t, d.sink, cp, effect(t, 2), u)
		wantDamaged(t, err)
		wantError(t, err, "WRONGTYPE")
		equal(t, "the sum", d.rows(t, "counts"), "open: contributions=2 n=2 status=open") // not rolled back
		_, err = commit(t, d.sink, next)
		wantDamaged(t, err)
		_, err = commit(t, d.sink, take(t, d.sink, "next"))
		wantDamaged(t, err)
	}
	foreign := func(d *database) { must(t, d.RPush(context.Background(), "{model}:g1:tickets:u", "foreign").Err()) }
	t.Run("without the check", func(t *testing.T) {
		disable(t, fault.CheckTypes)
		check(t, foreign)
	})
	t.Run("after the check", func(t *testing.T) {
		check(t, func(d *database) { at(t, fault.CommitSend, func() { foreign(d) }) })
	})
}
