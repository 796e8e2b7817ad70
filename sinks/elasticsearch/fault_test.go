package elasticsearch_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// TestZombie: the bulk request of a superseded owner arrives after the new one has
// committed later changes of the same documents.
func TestZombie(t *testing.T) {
	zombie := func(t *testing.T) string {
		c := newCluster(t)
		p, frozen := c.behind(t)
		cp := mustCommit(t, frozen, acquire(t, frozen, "frozen"), things.Create)
		cp = mustCommit(t, frozen, cp, put(things, nil, list(of("removed", 1, thing{"removed", 1}))))
		arrived, thaw := make(chan struct{}, 2), make(chan struct{})
		p.on(func(w http.ResponseWriter, r *http.Request, body []byte) bool {
			if isBulk(r) {
				arrived <- struct{}{} // of each lane there may be one
				<-thaw
			}
			return false
		})
		result := make(chan error, 1)
		old := all(put(things, nil, list(of("changed", 2, thing{"changed", 2}))), put(things, nil, list(of("removed", 2, thing{"removed", 2}))))
		go func() { result <- frozen.Commit(t.Context(), cp, following(cp), old) }()
		<-arrived
		next := acquire(t, c.sink, "next")
		next = mustCommit(t, c.sink, next, old)
		next = mustCommit(t, c.sink, next, put(things, nil, list(of("changed", 3, thing{"changed", 3}))))
		mustCommit(t, c.sink, next, put(things, list(gone[thing]("removed", 4)), nil))
		p.on(nil)
		close(thaw)
		wantFenced(t, <-result)
		return c.rows(t, "things")
	}
	equal(t, "rows", zombie(t), `changed {"name":"changed","n":3}`)
	t.Run("control", func(t *testing.T) {
		disable(t, fault.RowVersion)
		if rows := zombie(t); rows == `changed {"name":"changed","n":3}` {
			t.Error("without versions the late request does no harm")
		}
	})
}

// TestFenceBetweenBulks: an owner that was superseded in the middle of a batch does not
// send the rest of it.
func TestFenceBetweenBulks(t *testing.T) {
	late := func(t *testing.T) (requests int64, err error) {
		c := newCluster(t)
		p, old := c.behind(t)
		cp := mustCommit(t, old, acquire(t, old, "old"), things.Create)
		var sent atomic.Int64
		taken := make(chan struct{})
		p.on(func(w http.ResponseWriter, r *http.Request, body []byte) bool {
			if isBulk(r) {
				if sent.Add(1) == 1 {
					acquire(t, c.sink, "next")
					time.Sleep(300 * time.Millisecond) // the last look at the checkpoint is old then
					close(taken)
				}
				<-taken
			}
			return false
		})
		_, err = commit(t, old, cp, put(things, nil, manyThings(25_000, -1)))
		return sent.Load(), err
	}
	requests, err := late(t)
	wantFenced(t, err)
	if requests > 2 { // one of each lane
		t.Errorf("a superseded owner has sent %d requests", requests)
	}
	t.Run("control", func(t *testing.T) {
		disable(t, fault.FenceTerm)
		if requests, _ := late(t); requests <= 2 {
			t.Error("without the fence the rest is not sent either")
		}
	})
}

// TestOlderCheckpoint: the checkpoint was put back, and history comes again, in other
// batches. The rows are the same in the end.
func TestOlderCheckpoint(t *testing.T) {
	c := newCluster(t)
	cp := c.acquired(t, things.Create)
	start := cp
	history := []apply{
		put(things, nil, list(of("a", 1, thing{"a", 1}), of("b", 1, thing{"b", 1}))),
		put(things, nil, list(of("a", 2, thing{"a", 2}))),
		put(things, list(gone[thing]("a", 3)), list(of("c", 3, thing{"c", 1}))),
		put(things, list(gone[thing]("b", 4)), nil),
		put(things, nil, list(of("a", 5, thing{"a", 5}))),
		put(things, list(gone[thing]("c", 6)), nil),
	}
	for _, h := range history {
		cp = mustCommit(t, c.sink, cp, h)
	}
	const want = `a {"name":"a","n":5}`
	equal(t, "rows", c.rows(t, "things"), want)
	for n := range history {
		cp = start
		must(t, c.restore(t, cp))
		mustCommit(t, c.sink, cp, history...)
		equal(t, "rows after all of it in one batch", c.rows(t, "things"), want)
		must(t, c.restore(t, cp))
		cp = mustCommit(t, c.sink, cp, history[:n]...)
		for _, h := range history[n:] {
			cp = mustCommit(t, c.sink, cp, h)
		}
		equal(t, "rows", c.rows(t, "things"), want)
	}
	// A process that dies in the middle of it leaves nothing that is older than it was.
	died := func(t *testing.T) string {
		must(t, c.restore(t, start))
		mustCommit(t, c.sink, start, history[0])
		return c.rows(t, "things")
	}
	equal(t, "rows", died(t), want)
	t.Run("control", func(t *testing.T) {
		disable(t, fault.RowVersion)
		if died(t) == want {
			t.Error("without versions a replay does no harm")
		}
	})
}

// restore puts an earlier checkpoint back.
func (c *cluster) restore(t testing.TB, cp projector.Checkpoint) error {
	t.Helper()
	var doc struct {
		Source map[string]any `json:"_source"`
	}
	path := c.prefix + "tidemark-checkpoints/_doc/" + cp.Projection
	must(t, c.ask(t.Context(), http.MethodGet, path, nil, &doc))
	body, err := cp.Encode()
	must(t, err)
	g := doc.Source["generations"].([]any)[0].(map[string]any)
	g["body"], g["sequence"] = string(body), cp.Sequence
	return c.ask(t.Context(), http.MethodPut, path, doc.Source, nil)
}

// TestServerKilled: the node dies by SIGKILL at the places of a commit. Nothing that was
// confirmed is lost, and the commit that was under way happens once it is tried again.
func TestServerKilled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	node, err := node() // other tests have left nothing on it
	must(t, err)
	c := clusterAt(t, node.URL())
	cp := c.acquired(t, things.Create)
	cp = mustCommit(t, c.sink, cp, put(things, nil, manyThings(500, -1)))
	cp = mustCommit(t, c.sink, cp, put(things, list(gone[thing]("d1", 6)), nil))
	for _, point := range []fault.Point{fault.CommitSend, "in the bulk request"} {
		write := put(things, nil, list(of("d2", 7, thing{"later", 7}), of("d3", 7, thing{"later", 7})))
		p := newProxy(t, node.URL(), (*httptest.Server).Start)
		sink := c.through(t, p.URL)
		var once atomic.Bool
		die := func() {
			if once.CompareAndSwap(false, true) {
				if err := node.Kill(); err != nil {
					t.Error(err)
				}
			}
		}
		if point == fault.CommitSend {
			fault.Global.OnReach(func(at fault.Point) {
				if at == point {
					die()
				}
			})
		} else {
			p.on(func(_ http.ResponseWriter, r *http.Request, _ []byte) bool {
				if isBulk(r) {
					time.AfterFunc(time.Millisecond, die)
				}
				return false
			})
		}
		next := following(cp)
		err := sink.Commit(ctx, cp, next, write)
		fault.Global.OnReach(nil)
		if err == nil { // by chance it was faster
			t.Log("the commit was faster than the kill")
			die()
		} else {
			wantClass(t, sink, err, projector.Transient)
		}
		for !once.Load() {
			time.Sleep(time.Millisecond)
		}
		must(t, node.Restart(ctx))
		c.await(t)
		stored, err := c.sink.Load(ctx, model, 1)
		must(t, err)
		if stored.Sequence == cp.Sequence {
			must(t, c.sink.Commit(ctx, cp, next, write))
		}
		cp = next
		rows := c.rows(t, "things")
		equal(t, "documents", strings.Count(rows, "\n")+1, 499)
		if !strings.Contains(rows, `d2 {"name":"later","n":7}`) || strings.Contains(rows, "d1 {") {
			t.Errorf("rows are wrong: %s", rows)
		}
	}
	// A restart forgets what was deleted once that is flushed: a write that is late by a
	// restart makes the document again (8.19). It is one of the bounds in the package's text.
	must(t, c.ask(ctx, http.MethodPost, c.sink.Alias(model, "things")+"/_flush", nil, nil))
	cp = mustCommit(t, c.sink, cp, put(things, list(gone[thing]("d4", 9)), nil))
	_, err = commit(t, c.sink, cp, put(things, nil, list(of("d4", 8, thing{"late", 8}))))
	must(t, err)
	if strings.Contains(c.rows(t, "things"), `"late"`) {
		t.Error("a late write has brought a document back")
	}
	if effort.Rounds(2) < 2 {
		return // what follows promises nothing
	}
	must(t, c.ask(ctx, http.MethodPost, c.sink.Alias(model, "things")+"/_flush", nil, nil))
	must(t, node.Restart(ctx))
	c.await(t)
	cp, err = c.sink.Load(ctx, model, 1)
	must(t, err)
	mustCommit(t, c.sink, cp, put(things, nil, list(of("d4", 8, thing{"late", 8}))))
	t.Logf("a write that is late by a restart brings a document back: %t", strings.Contains(c.rows(t, "things"), `"late"`))
}

// await waits until the indices can be used after a restart.
func (c *cluster) await(t testing.TB) {
	t.Helper()
	must(t, c.ask(t.Context(), http.MethodGet, "_cluster/health/"+c.prefix+"*?wait_for_status=yellow&timeout=60s", nil, nil))
}
