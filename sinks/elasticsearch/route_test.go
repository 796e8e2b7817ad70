package elasticsearch_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

type routed struct {
	Region string `row:"region"`
	N      int64  `row:"n"`
}

var byRegion = elasticsearch.Index[routed]{
	Name: "places", Routes: []string{"eu", "us", "asia"}, Route: func(r routed) string { return r.Region },
}

// TestRoutes: a document moves between the indices of its routes, and is deleted, though
// a removal doesn't know where it is.
func TestRoutes(t *testing.T) {
	moves := func(t *testing.T) (*cluster, func(want string)) {
		c := newCluster(t)
		cp := c.acquired(t, byRegion.Create)
		step := func(remove, rows []projector.Row[routed]) {
			cp = mustCommit(t, c.sink, cp, put(byRegion, remove, rows))
		}
		step(nil, list(of("a", 1, routed{"eu", 1}), of("b", 1, routed{"us", 1})))
		step(nil, list(of("a", 2, routed{"us", 2})))
		step(nil, list(of("a", 3, routed{"asia", 3}), of("b", 3, routed{"eu", 3})))
		return c, func(want string) {
			t.Helper()
			equal(t, "all", c.rows(t, "places"), want)
		}
	}
	c, all := moves(t)
	all(`a {"region":"asia","n":3}` + "\n" + `b {"region":"eu","n":3}`)
	equal(t, "eu", c.rows(t, "places-eu"), `b {"region":"eu","n":3}`)
	equal(t, "us", c.rows(t, "places-us"), "")
	cp := c.acquired(t)
	cp = mustCommit(t, c.sink, cp, put(byRegion, list(gone[routed]("a", 4)), nil))
	all(`b {"region":"eu","n":3}`)
	// A late write into a route that the document has left, or that it was never in.
	cp = mustCommit(t, c.sink, cp, put(byRegion, nil, list(of("a", 2, routed{"us", 2}), of("b", 1, routed{"us", 1}), of("a", 1, routed{"eu", 1}))))
	all(`b {"region":"eu","n":3}`)
	// Several moves and a removal in one commit.
	cp = mustCommit(t, c.sink, cp,
		put(byRegion, nil, list(of("a", 5, routed{"eu", 5}), of("b", 5, routed{"us", 5}))),
		put(byRegion, list(gone[routed]("b", 6)), list(of("a", 6, routed{"us", 6}))))
	all(`a {"region":"us","n":6}`)

	_, err := commit(t, c.sink, cp, put(byRegion, nil, list(of("a", 7, routed{"mars", 7}))))
	wantClass(t, c.sink, err, projector.Poison)
	wantError(t, err, `"mars"`, `"asia"`, `document "a"`)

	t.Run("control", func(t *testing.T) {
		disable(t, fault.RouteDelete)
		c, _ := moves(t)
		equal(t, "us", c.rows(t, "places-us"), `a {"region":"us","n":2}`+"\n"+`b {"region":"us","n":1}`)
	})
}

// TestRoutesBuilding: while a rebuild fills them, the indices of routes forget deletions
// soon, unless the user has said how soon; readers never see one like that.
func TestRoutesBuilding(t *testing.T) {
	c := newCluster(t)
	own := byRegion
	own.Name, own.Settings = "own", `{"gc_deletes": "60s"}`
	keeps := func(when, want string) {
		t.Helper()
		var found map[string]struct {
			Settings map[string]string `json:"settings"`
		}
		must(t, c.ask(t.Context(), http.MethodGet, c.prefix+"model-g2-*/_settings/index.gc_deletes?flat_settings=true", nil, &found))
		var all []string
		for index, f := range found {
			all = append(all, strings.TrimPrefix(c.short(index), "model-g2-")+"="+f.Settings["index.gc_deletes"])
		}
		equal(t, when, sorted(all), want)
	}
	live := c.acquired(t, byRegion.Create)
	shadow, err := c.sink.Begin(t.Context(), live, 2)
	must(t, err)
	shadow = mustCommit(t, c.sink, shadow, byRegion.Create, own.Create, things.Create)
	keeps("building", "own-asia=60s own-eu=60s own-us=60s places-asia=60000ms places-eu=60000ms places-us=60000ms things=1h")
	must(t, c.sink.Switch(t.Context(), live, shadow))
	keeps("live", "own-asia=60s own-eu=60s own-us=60s places-asia=1h places-eu=1h places-us=1h things=1h")
}

// TestManyIndices: lists of indices that are too long for one request are sent in parts.
func TestManyIndices(t *testing.T) {
	c := newCluster(t)
	long := elasticsearch.Index[routed]{Name: "places_" + strings.Repeat("x", 33), Route: func(routed) string { return "" }}
	for i := range 40 {
		long.Routes = append(long.Routes, fmt.Sprintf("r%d_%s", i, strings.Repeat("y", 30)))
	}
	live := c.acquired(t)
	shadow, err := c.sink.Begin(t.Context(), live, 2)
	must(t, err)
	shadow = mustCommit(t, c.sink, shadow, long.Create)
	must(t, c.sink.Switch(t.Context(), live, shadow))
	must(t, c.sink.Refresh(t.Context(), model))
	live.Sequence++
	shadow.Sequence++
	must(t, c.sink.Switch(t.Context(), shadow, live))
	must(t, c.sink.Discard(t.Context(), shadow))
	equal(t, "indices", c.indices(t), "tidemark-checkpoints")
}

// TestSwappedKeys: a source transaction that is applied in parts has two documents swap
// their keys. The second part's removal of the old key meets the first part's new row.
func TestSwappedKeys(t *testing.T) {
	row := func(owner string, version int64, shelf string, n int64) projector.Row[slot] {
		return of(owner, version, slot{shelf, "1", n})
	}
	swap := func(t *testing.T) string {
		c := newCluster(t)
		cp := c.acquired(t, slots.Create)
		cp = mustCommit(t, c.sink, cp, put(slots, nil, list(row("a", 1, "x", 1), row("b", 1, "y", 2), row("c", 1, "u", 3))))
		part := following(cp)
		part.Open = true
		must(t, c.sink.Commit(t.Context(), cp, part, put(slots,
			list(row("a", 2, "x", 1), row("c", 2, "u", 3)), list(row("a", 2, "y", 1), row("c", 2, "v", 3)))))
		second := put(slots, list(row("b", 2, "y", 2), row("c", 2, "v", 3)), list(row("b", 2, "x", 2), row("c", 2, "w", 3)))
		must(t, c.sink.Try(t.Context(), part, second))
		end := following(part)
		end.Open = false
		must(t, c.sink.Commit(t.Context(), part, end, second))
		return c.rows(t, "slots")
	}
	const (
		w = `w|1 {"shelf":"w","slot":"1","n":3,"tm_owner":"c"}` + "\n"
		x = `x|1 {"shelf":"x","slot":"1","n":2,"tm_owner":"b"}`
		y = `y|1 {"shelf":"y","slot":"1","n":1,"tm_owner":"a"}`
	)
	equal(t, "rows", swap(t), w+x+"\n"+y)
	t.Run("control", func(t *testing.T) {
		disable(t, fault.KeyOwners)
		equal(t, "rows", swap(t), w+x)
	})
}

type slot struct {
	Shelf string `row:"shelf,key"`
	Slot  string `row:"slot,key"`
	N     int64  `row:"n"`
}

var slots = elasticsearch.Index[slot]{Name: "slots"}

// TestIDs: what the ids of documents are.
func TestIDs(t *testing.T) {
	c := newCluster(t)
	cp := c.acquired(t, slots.Create, things.Create)
	long := string(make([]byte, 600))
	mustCommit(t, c.sink, cp,
		put(slots, nil, list(of(7, 1, slot{"a|b", `c\`, 1}), of("x", 1, slot{"", "", 2}))),
		put(things, nil, list(of("", 1, thing{"", 1}), of("sha256:", 1, thing{"", 2}), of(long, 1, thing{"", 3}))))
	equal(t, "keyed", c.rows(t, "slots"), `a\|b|c\\ {"shelf":"a|b","slot":"c\\","n":1,"tm_owner":"7"}`+"\n"+`| {"shelf":"","slot":"","n":2,"tm_owner":"x"}`)
	hits, err := c.hits(t.Context(), c.sink.Alias(model, "things"))
	must(t, err)
	for _, h := range hits {
		if h.ID != `""` && len(h.ID) != len("sha256:")+64 {
			t.Errorf("id %q", h.ID)
		}
	}
	equal(t, "mirrored", len(hits), 3)
}
