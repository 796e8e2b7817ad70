package elasticsearch_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// built is a live generation and one that a rebuild has filled.
func (c *cluster) built(t testing.TB, s *elasticsearch.Sink) (live, shadow projector.Checkpoint) {
	t.Helper()
	live = mustCommit(t, s, acquire(t, s, "test"), things.Create, byRegion.Create)
	live = mustCommit(t, s, live, put(things, nil, list(of("old", 1, thing{"old", 1}))))
	shadow, err := s.Begin(t.Context(), live, 2)
	must(t, err)
	shadow = mustCommit(t, s, shadow, things.Create, byRegion.Create)
	return live, mustCommit(t, s, shadow, put(things, nil, list(of("new", 1, thing{"new", 2}))))
}

// TestAliases: readers see the live generation by the aliases, and only that; what
// somebody has added to its index comes along.
func TestAliases(t *testing.T) {
	c := newCluster(t)
	live, shadow := c.built(t, c.sink)
	equal(t, "things", c.aliases(t, c.prefix+"model-things"), "model-g1-things")
	equal(t, "places", c.aliases(t, c.prefix+"model-places"), "model-g1-places-asia model-g1-places-eu model-g1-places-us")
	equal(t, "places-eu", c.aliases(t, c.prefix+"model-places-eu"), "model-g1-places-eu")
	must(t, c.ask(t.Context(), http.MethodPost, "_aliases", map[string]any{"actions": []any{map[string]any{"add": map[string]any{
		"index": c.index(t, "model-g1-things"), "alias": c.prefix + "theirs", "filter": map[string]any{"term": map[string]any{"name": "new"}},
	}}}}, nil))

	must(t, c.sink.Switch(t.Context(), live, shadow))
	equal(t, "things", c.aliases(t, c.prefix+"model-things"), "model-g2-things")
	equal(t, "places", c.aliases(t, c.prefix+"model-places"), "model-g2-places-asia model-g2-places-eu model-g2-places-us")
	equal(t, "theirs", c.aliases(t, c.prefix+"theirs"), "model-g2-things")
	equal(t, "rows", c.in(t, c.prefix+"theirs"), `new {"name":"new","n":2}`)
	r, err := c.record(t.Context(), model)
	must(t, err)
	if r.Pending != nil {
		t.Errorf("still pending: %v", r.Pending)
	}
	live.Sequence++
	must(t, c.sink.Discard(t.Context(), live))
	equal(t, "indices", c.indices(t), "model-g2-places-asia model-g2-places-eu model-g2-places-us model-g2-things tidemark-checkpoints")
}

// TestSwitchCutOff: once the checkpoint says so, the aliases follow, whoever comes next;
// what was cut off before leaves all as it was.
func TestSwitchCutOff(t *testing.T) {
	for _, where := range []string{"at the checkpoint", "at the aliases", "after the aliases"} {
		t.Run(where, func(t *testing.T) {
			c := newCluster(t)
			p, sink := c.behind(t)
			live, shadow := c.built(t, sink)
			p.on(func(w http.ResponseWriter, r *http.Request, body []byte) bool {
				aliases := r.URL.Path == "/_aliases"
				if where == "at the checkpoint" && isCheckpoint(r) || where == "at the aliases" && aliases {
					cut(w)
					return true
				}
				if where == "after the aliases" && aliases {
					resp, err := p.pass(http.DefaultTransport, r, body)
					if err == nil {
						_ = resp.Body.Close()
					}
					cut(w)
					return true
				}
				return false
			})
			wantClass(t, sink, sink.Switch(t.Context(), live, shadow), projector.Transient)
			all, err := c.sink.Acquire(t.Context(), model, "next")
			must(t, err)
			want, phase := "model-g2-things", projector.Retired
			if where == "at the checkpoint" {
				want, phase = "model-g1-things", projector.Live
			}
			equal(t, "things", c.aliases(t, c.prefix+"model-things"), want)
			equal(t, "phase", all[0].Phase, phase)
			equal(t, "generations", len(all), 2)
		})
	}
}

// TestLateAliases: a request to change the aliases that is late by a switch is refused.
func TestLateAliases(t *testing.T) {
	late := func(t *testing.T) string {
		c := newCluster(t)
		p, sink := c.behind(t)
		var mu sync.Mutex
		var sent []string
		p.on(func(_ http.ResponseWriter, r *http.Request, body []byte) bool {
			if r.URL.Path == "/_aliases" {
				mu.Lock()
				defer mu.Unlock()
				sent = append(sent, string(body))
			}
			return false
		})
		live, shadow := c.built(t, sink)
		must(t, sink.Switch(t.Context(), live, shadow))
		live.Sequence++
		shadow.Sequence++
		must(t, sink.Switch(t.Context(), shadow, live)) // rolled back
		equal(t, "things", c.aliases(t, c.prefix+"model-things"), "model-g1-things")
		for _, body := range sent[:len(sent)-1] {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+"/_aliases", strings.NewReader(body))
			must(t, err)
			req.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(req)
			must(t, err)
			_ = resp.Body.Close()
		}
		return c.aliases(t, c.prefix+"model-things")
	}
	equal(t, "things", late(t), "model-g1-things")
	t.Run("control", func(t *testing.T) {
		disable(t, fault.AliasToken)
		if late(t) == "model-g1-things" {
			t.Error("without the token the late request does no harm")
		}
	})
}

// TestGenerationNumbersAgain: a number that is used again has other indices.
func TestGenerationNumbersAgain(t *testing.T) {
	c := newCluster(t)
	live, shadow := c.built(t, c.sink)
	must(t, c.sink.Discard(t.Context(), shadow))
	again, err := c.sink.Begin(t.Context(), live, 2)
	must(t, err)
	equal(t, "place", again.Place, c.prefix+"model-g2r3")
	mustCommit(t, c.sink, again, things.Create)
	equal(t, "write alias", c.aliases(t, c.index(t, "model-g2r3-things")+"-write"), "model-g2r3-things")
}

// TestClearFails: until the commit that clears, readers see what was there.
func TestClearFails(t *testing.T) {
	c := newCluster(t)
	p, sink := c.behind(t)
	cp := mustCommit(t, sink, acquire(t, sink, "test"), things.Create)
	cp = mustCommit(t, sink, cp, put(things, nil, list(of("a", 1, thing{"a", 1}))))
	before := c.indices(t)
	failing := errors.New("the cause")
	_, err := commit(t, sink, cp, put(things, nil, list(of("b", 1, thing{"b", 1}))), things.Clear, func(ctx context.Context, tx *elasticsearch.Tx) error { return failing })
	if !errors.Is(err, failing) {
		t.Errorf("want the handler's error, got %v", err)
	}
	equal(t, "indices", c.indices(t), before)
	p.on(func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		if isCheckpoint(r) {
			cut(w)
			return true
		}
		return false
	})
	_, err = commit(t, sink, cp, things.Clear, put(things, nil, list(of("b", 1, thing{"b", 1}))))
	wantClass(t, sink, err, projector.Transient)
	equal(t, "rows", c.rows(t, "things"), `a {"name":"a","n":1}`)
	p.on(nil)
	cp = mustCommit(t, sink, cp, things.Clear, put(things, nil, list(of("b", 1, thing{"b", 1}))))
	equal(t, "rows", c.rows(t, "things"), `b {"name":"b","n":1}`)
	mustCommit(t, sink, cp, put(things, nil, list(of("c", 1, thing{"c", 1}))))
	equal(t, "rows", c.rows(t, "things"), `b {"name":"b","n":1}`+"\n"+`c {"name":"c","n":1}`)
}
