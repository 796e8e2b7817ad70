package elasticsearch_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// lose removes the index of the checkpoints.
func (c *cluster) lose(t testing.TB) {
	t.Helper()
	must(t, c.ask(t.Context(), http.MethodDelete, c.prefix+"tidemark-checkpoints", nil, nil))
}

// document is a projection's document of checkpoints, and puts it back.
func (c *cluster) document(t testing.TB) (restore func()) {
	t.Helper()
	path := c.prefix + "tidemark-checkpoints/_doc/" + model
	var doc struct {
		Source map[string]any `json:"_source"`
	}
	must(t, c.ask(t.Context(), http.MethodGet, path, nil, &doc))
	return func() { must(t, c.ask(t.Context(), http.MethodPut, path, doc.Source, nil)) }
}

// TestLostCheckpoints: where the checkpoints are gone the model is built again, in indices
// of its own: with another source cluster, whose times are lower, and without what that one
// doesn't have. Until then readers see the old model.
func TestLostCheckpoints(t *testing.T) {
	again := func(t *testing.T) string {
		c := newCluster(t)
		cp := c.acquired(t, things.Create)
		mustCommit(t, c.sink, cp, put(things, nil, list(of("a", 9, thing{"old", 1}), of("b", 9, thing{"old", 2}))))
		c.lose(t)
		cp = acquire(t, c.sink, "test")
		equal(t, "sequence", cp.Sequence, 0)
		equal(t, "documents until it is built", strings.Count(c.rows(t, "things"), "old"), 2)
		mustCommit(t, c.sink, cp, things.Create, put(things, nil, list(of("a", 3, thing{"new", 3}))))
		return c.rows(t, "things")
	}
	equal(t, "rows", again(t), `a {"name":"new","n":3}`)
	t.Run("control", func(t *testing.T) {
		disable(t, fault.IndexNames)
		equal(t, "rows", again(t), `a {"name":"old","n":1}`+"\n"+`b {"name":"old","n":2}`)
	})
}

// TestDiscardAfterLoss: a place may be called as one that readers still see.
func TestDiscardAfterLoss(t *testing.T) {
	c := newCluster(t)
	live, shadow := c.built(t, c.sink)
	must(t, c.sink.Switch(t.Context(), live, shadow))
	c.lose(t)
	cp := acquire(t, c.sink, "test")
	again, err := c.sink.Begin(t.Context(), cp, 2)
	must(t, err)
	equal(t, "place", again.Place, shadow.Place)
	again = mustCommit(t, c.sink, again, things.Create)
	must(t, c.sink.Discard(t.Context(), again))
	equal(t, "rows", c.rows(t, "things"), `new {"name":"new","n":2}`)
}

// TestRestoredCheckpoints: where the checkpoints are put back to before a switch, the
// aliases go back, too; or readers would see a model that nobody writes to.
func TestRestoredCheckpoints(t *testing.T) {
	restored := func(t *testing.T) string {
		c := newCluster(t)
		live, shadow := c.built(t, c.sink)
		restore := c.document(t)
		must(t, c.sink.Switch(t.Context(), live, shadow))
		restore()
		acquire(t, c.sink, "test")
		return c.aliases(t, c.prefix+"model-things")
	}
	equal(t, "things", restored(t), "model-g1-things")
	t.Run("control", func(t *testing.T) {
		disable(t, fault.AliasFollow)
		equal(t, "things", restored(t), "model-g2-things")
	})
}

// TestLateSettle: who has read that a switch is pending, and goes on when it has been
// carried out and taken back, leaves the aliases where they are.
func TestLateSettle(t *testing.T) {
	c := newCluster(t)
	live, shadow := c.built(t, c.sink)
	p, late := c.behind(t)
	arrived, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	p.on(func(_ http.ResponseWriter, r *http.Request, _ []byte) bool {
		if strings.HasSuffix(r.URL.Path, "-g*/_alias") {
			once.Do(func() {
				close(arrived)
				<-release
			})
		}
		return false
	})
	result := make(chan error, 1)
	go func() { result <- late.Switch(t.Context(), live, shadow) }() // stored; the aliases are not moved
	<-arrived
	all, err := c.sink.Acquire(t.Context(), model, "next") // moves them
	must(t, err)
	must(t, c.sink.Switch(t.Context(), all[1], all[0]))
	close(release)
	must(t, <-result)
	equal(t, "things", c.aliases(t, c.prefix+"model-things"), "model-g1-things")
}

// TestSwitchToNothing: an index that is gone when readers are to see it is named, at once.
func TestSwitchToNothing(t *testing.T) {
	c := newCluster(t)
	p, sink := c.behind(t)
	live, shadow := c.built(t, sink)
	p.on(func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		if r.URL.Path == "/_aliases" {
			cut(w)
			return true
		}
		return false
	})
	wantClass(t, sink, sink.Switch(t.Context(), live, shadow), projector.Transient)
	index := c.index(t, "model-g2-things")
	must(t, c.ask(t.Context(), http.MethodDelete, index, nil, nil))
	var requests atomic.Int64
	p.on(func(http.ResponseWriter, *http.Request, []byte) bool {
		requests.Add(1)
		return false
	})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err := sink.Acquire(ctx, model, "next")
	wantClass(t, sink, err, projector.Fatal)
	wantError(t, err, index, "snapshot")
	if requests.Load() > 20 {
		t.Errorf("%d requests to find that out", requests.Load())
	}
	equal(t, "things", c.aliases(t, c.prefix+"model-things"), "model-g1-things")
}

// TestCheckpointsGoneDuringCommit: the server makes an index for the checkpoint, with a
// mapping that it guesses, and then refuses to store it. It does not stay.
func TestCheckpointsGoneDuringCommit(t *testing.T) {
	c := newCluster(t)
	live, shadow := c.built(t, c.sink)
	fault.Global.OnReach(func(at fault.Point) {
		if at == fault.CommitSend {
			c.lose(t)
		}
	})
	_, err := commit(t, c.sink, live, put(things, nil, manyThings(1, -1)))
	fault.Global.OnReach(nil)
	wantFenced(t, err)
	dynamic := func() string {
		var found map[string]struct {
			Mappings struct{ Dynamic string } `json:"mappings"`
		}
		must(t, c.ask(t.Context(), http.MethodGet, c.prefix+"tidemark-checkpoints/_mapping", nil, &found))
		return found[c.prefix+"tidemark-checkpoints"].Mappings.Dynamic
	}
	equal(t, "dynamic, guessed", dynamic(), "")
	wantFenced(t, c.sink.Switch(t.Context(), live, shadow))
	_, err = c.sink.Begin(t.Context(), live, 3)
	wantFenced(t, err)
	acquire(t, c.sink, "next")
	equal(t, "dynamic", dynamic(), "strict")

	c.lose(t)
	must(t, c.ask(t.Context(), http.MethodPut, c.prefix+"tidemark-checkpoints/_doc/other", map[string]any{"a": 1}, nil))
	_, err = c.sink.Acquire(t.Context(), model, "next")
	wantClass(t, c.sink, err, projector.Fatal)
	wantError(t, err, "tidemark-checkpoints", "1 documents", "Prefix")
}
