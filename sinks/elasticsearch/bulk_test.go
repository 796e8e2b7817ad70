package elasticsearch_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

type thing struct {
	Name string `row:"name"`
	N    int64  `row:"n"`
}

var things = elasticsearch.Index[thing]{Name: "things", Mapping: `{"n": {"type": "short"}}`}

// manyThings are n documents; in one of them n is too large for the mapping.
func manyThings(n, bad int) (rows []projector.Row[thing]) {
	for i := range n {
		v := int64(i)
		if i == bad {
			v = 100_000
		}
		rows = append(rows, of(fmt.Sprint("d", i), 5, thing{"name", v}))
	}
	return rows
}

// TestBadDocument: of a thousand documents the server refuses one. The error names it,
// the others are written, and the checkpoint stays.
func TestBadDocument(t *testing.T) {
	c := newCluster(t)
	cp := c.acquired(t, things.Create)
	bad := put(things, nil, manyThings(1000, 617))
	check := func(err error) {
		t.Helper()
		wantClass(t, c.sink, err, projector.Poison)
		refused, ok := errors.AsType[*elasticsearch.DocumentError](err)
		if !ok || refused.ID != "d617" || refused.Index != "things" || refused.Type != "document_parsing_exception" {
			t.Errorf("want a DocumentError of d617, got %v", err)
		}
	}
	_, err := commit(t, c.sink, cp, bad)
	check(err)
	equal(t, "documents", len(strings.Split(c.rows(t, "things"), "\n")), 999)
	stored, err := c.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "sequence", stored.Sequence, cp.Sequence)

	// The culprit is found by trials of parts of the batch, which leave no trace.
	before := c.indices(t)
	check(c.sink.Try(t.Context(), cp, put(things, nil, manyThings(1000, 617)[600:620])))
	must(t, c.sink.Try(t.Context(), cp, put(things, nil, manyThings(1000, 617)[:617])))
	equal(t, "indices after trials", c.indices(t), before)

	mustCommit(t, c.sink, cp, put(things, nil, manyThings(1000, -1)))
	equal(t, "documents", len(strings.Split(c.rows(t, "things"), "\n")), 1000)

	t.Run("control", func(t *testing.T) {
		disable(t, fault.ItemResults)
		c := newCluster(t)
		cp := c.acquired(t, things.Create)
		if _, err := commit(t, c.sink, cp, bad); err != nil {
			t.Errorf("without a look at each item the commit fails all the same: %v", err)
		}
		equal(t, "documents", len(strings.Split(c.rows(t, "things"), "\n")), 999)
	})
}

func (c *cluster) indices(t testing.TB) string {
	t.Helper()
	var found map[string]any
	must(t, c.ask(t.Context(), http.MethodGet, c.prefix+"*/_alias", nil, &found))
	var names []string
	for index := range found {
		names = append(names, c.short(index))
	}
	return sorted(names)
}

// TestBusy: items that the server is too busy for are sent again, they alone, until it
// takes them; whole requests too.
func TestBusy(t *testing.T) {
	for _, status := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			c := newCluster(t)
			p, sink := c.behind(t)
			cp := acquire(t, sink, "test")
			cp = mustCommit(t, sink, cp, things.Create)
			var requests, sent atomic.Int64
			var refused atomic.Int64
			p.on(func(w http.ResponseWriter, r *http.Request, body []byte) bool {
				if !isBulk(r) {
					return false
				}
				sent.Add(int64(len(bulkItems(body))))
				switch n := requests.Add(1); {
				case n <= 2: // one of each lane
					answer(w, http.StatusTooManyRequests, `{"error":{"type":"circuit_breaking_exception","reason":"injected"},"status":429}`)
				case n <= 8:
					p.refuseItems(w, r, body, status, func(item string) bool {
						bad := strings.Contains(item, `7","version"`) // d7, d17, …
						if bad {
							refused.Add(1)
						}
						return bad
					})
				default:
					return false
				}
				return true
			})
			mustCommit(t, sink, cp, put(things, nil, manyThings(1000, -1)))
			equal(t, "documents", len(strings.Split(c.rows(t, "things"), "\n")), 1000)
			// Two whole requests, the batch, and up to five times a hundred.
			if sent.Load() > 1000+1000+600 || refused.Load() == 0 {
				t.Errorf("%d items were sent, of which %d were refused", sent.Load(), refused.Load()/2)
			}
			p.on(func(w http.ResponseWriter, r *http.Request, body []byte) bool {
				if isBulk(r) {
					p.refuseItems(w, r, body, status, func(string) bool { return true })
					return true
				}
				return false
			})
			cp.Sequence++
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			err := sink.Commit(ctx, cp, following(cp), put(things, nil, manyThings(10, -1)))
			wantClass(t, sink, err, projector.Transient)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the error does not tell that the time was over: %v", err)
			}
			wantError(t, err, "injected")
		})
	}
}

// TestTooLarge: a request that the server does not take is sent in halves; a document that
// it does not take alone is poison.
func TestTooLarge(t *testing.T) {
	const limit = 4000
	c := newCluster(t)
	p, sink := c.behind(t)
	cp := mustCommit(t, sink, acquire(t, sink, "test"), things.Create)
	p.on(func(w http.ResponseWriter, r *http.Request, body []byte) bool {
		if isBulk(r) && len(body) > limit {
			answer(w, http.StatusRequestEntityTooLarge, "")
			return true
		}
		return false
	})
	cp = mustCommit(t, sink, cp, put(things, nil, manyThings(1000, -1)))
	equal(t, "documents", len(strings.Split(c.rows(t, "things"), "\n")), 1000)
	_, err := commit(t, sink, cp, put(things, nil, append(manyThings(10, -1), of("large", 9, thing{strings.Repeat("x", limit), 1}))))
	wantClass(t, sink, err, projector.Poison)
	wantError(t, err, `"large"`, "http.max_content_length")
}

// TestFold: of several writes to one document in a commit the last is sent.
func TestFold(t *testing.T) {
	c := newCluster(t)
	p, sink := c.behind(t)
	cp := mustCommit(t, sink, acquire(t, sink, "test"), things.Create)
	var sent atomic.Int64
	p.on(func(_ http.ResponseWriter, r *http.Request, body []byte) bool {
		if isBulk(r) {
			sent.Add(int64(len(bulkItems(body))))
		}
		return false
	})
	cp = mustCommit(t, sink, cp,
		put(things, nil, list(of("a", 5, thing{"a", 1}), of("b", 5, thing{"b", 1}), of("a", 5, thing{"a", 2}))),
		put(things, list(gone[thing]("a", 5), gone[thing]("c", 5)), list(of("c", 5, thing{"c", 1}))),
		put(things, list(gone[thing]("a", 5)), list(of("a", 5, thing{"a", 3}), of("b", 4, thing{"b", 0}))),
	)
	equal(t, "rows", c.rows(t, "things"), `a {"name":"a","n":3}`+"\n"+`b {"name":"b","n":1}`+"\n"+`c {"name":"c","n":1}`)
	equal(t, "items sent", sent.Load(), 3)
	mustCommit(t, sink, cp, put(things, nil, list(of("a", 6, thing{"a", 4}))), put(things, list(gone[thing]("a", 6)), nil))
	equal(t, "rows", c.rows(t, "things"), `b {"name":"b","n":1}`+"\n"+`c {"name":"c","n":1}`)
}

// TestLargeCommit: what exceeds the memory of a Tx is sent before the handler returns.
func TestLargeCommit(t *testing.T) {
	c := newCluster(t)
	cp := c.acquired(t, things.Create)
	text := strings.Repeat("long ", 400)
	mustCommit(t, c.sink, cp, func(ctx context.Context, tx *elasticsearch.Tx) error {
		for n := range 4 {
			var rows []projector.Row[thing]
			for i := range 6000 {
				rows = append(rows, of(fmt.Sprint("d", i), int64(n+1), thing{text, int64(n)}))
			}
			if err := things.Put(ctx, tx, nil, rows); err != nil {
				return err
			}
		}
		return nil
	})
	hits, err := c.hits(t.Context(), c.sink.Alias(model, "things"))
	must(t, err)
	equal(t, "documents", len(hits), 6000)
	for _, h := range hits {
		equal(t, "version of "+h.ID, h.Version, 4)
	}
}

// TestIndexGone: an index that somebody has removed is not made anew by a write to it.
func TestIndexGone(t *testing.T) {
	c := newCluster(t)
	cp := c.acquired(t, things.Create)
	must(t, c.ask(t.Context(), http.MethodDelete, c.index(t, "model-g1-things"), nil, nil))
	for name, write := range map[string]apply{
		"a document": put(things, nil, manyThings(1, -1)),
		"a deletion": put(things, list(gone[thing]("a", 5)), nil), // the server makes an index for it
		"both":       all(put(things, nil, manyThings(10, -1)), put(things, list(gone[thing]("a", 5), gone[thing]("b", 5)), nil)),
	} {
		_, err := commit(t, c.sink, cp, write)
		wantClass(t, c.sink, err, projector.Fatal)
		wantError(t, err, "model-g1-things-", "is gone", "rebuilt")
		equal(t, "indices after "+name, c.indices(t), "tidemark-checkpoints")
	}
	// The owner can still begin a rebuild.
	cp = acquire(t, c.sink, "next")
	shadow, err := c.sink.Begin(t.Context(), cp, 2)
	must(t, err)
	shadow = mustCommit(t, c.sink, shadow, things.Create)
	t.Run("control", func(t *testing.T) {
		disable(t, fault.ItemResults)
		mustCommit(t, c.sink, cp, put(things, list(gone[thing]("a", 5)), nil))
		if !strings.Contains(c.indices(t), "-write") {
			t.Error("the server makes no index for a deletion")
		}
	})
	must(t, c.sink.Discard(t.Context(), shadow))
	shadow, err = c.sink.Begin(t.Context(), cp, 3)
	must(t, err)
	shadow = mustCommit(t, c.sink, shadow, things.Create)
	cp, err = c.sink.Load(t.Context(), model, 1)
	must(t, err)
	must(t, c.sink.Switch(t.Context(), cp, shadow))
	equal(t, "things", c.aliases(t, c.prefix+"model-things"), "model-g3-things")
}
