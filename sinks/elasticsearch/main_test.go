package elasticsearch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	http.DefaultClient.CloseIdleConnections()
	if err := serve.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const model = "model" // the projection of most tests

// server is the one of all tests: that of the environment, where there is one.
func server() (string, error) {
	if url := os.Getenv("ELASTICSEARCH_URL"); url != "" {
		return strings.TrimSuffix(url, "/"), nil
	}
	n, err := node()
	if err != nil {
		return "", err
	}
	return n.URL(), nil
}

// node is a server of this package's tests.
var node = sync.OnceValues(func() (*serve.ElasticsearchServer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	return serve.StartElasticsearch(ctx, serve.ElasticsearchOptions{})
})

// cluster is the part of a server that has a prefix of its own, and a sink on it.
type cluster struct {
	url    string
	prefix string
	sink   *elasticsearch.Sink
}

func newCluster(t testing.TB) *cluster {
	t.Helper()
	url, err := server()
	must(t, err)
	return clusterAt(t, url)
}

func clusterAt(t testing.TB, url string) *cluster {
	t.Helper()
	c := &cluster{url: url, prefix: "t" + bson.NewObjectID().Hex()[8:] + "-"}
	c.sink = c.through(t, url)
	t.Cleanup(func() {
		var found map[string]any
		must(t, c.ask(context.Background(), http.MethodGet, c.prefix+"*/_alias", nil, &found))
		// Many at once, in lines that the server takes.
		for names := range slices.Chunk(slices.Collect(maps.Keys(found)), 20) {
			must(t, c.ask(context.Background(), http.MethodDelete, strings.Join(names, ","), nil, nil))
		}
	})
	return c
}

// through is a sink on the cluster with a client of its own, as another process would have
// it, that goes to a url: the server's, or a proxy's.
func (c *cluster) through(t testing.TB, url string) *elasticsearch.Sink {
	t.Helper()
	return elasticsearch.New(client(t, url), elasticsearch.Prefix(c.prefix))
}

func client(t sinktest.T, at string) *elastictransport.Client {
	connections := &http.Transport{MaxIdleConnsPerHost: 4}
	es, err := transport(at, connections)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(connections.CloseIdleConnections)
	return es
}

// transport is what the clients of go-elasticsearch send by, without their API: see
// clienttest.
func transport(at string, connections http.RoundTripper) (*elastictransport.Client, error) {
	u, err := url.Parse(at)
	if err != nil {
		return nil, err
	}
	return elastictransport.NewClient(elastictransport.WithURLs(u), elastictransport.WithTransport(connections))
}

// ask asks the server around the sink.
func (c *cluster) ask(ctx context.Context, method, path string, body, out any) error {
	var b []byte
	if body != nil {
		var err error
		if b, err = json.Marshal(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+"/"+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(answer, out)
}

// hit is a document as a search finds it.
type hit struct {
	Index   string          `json:"_index"`
	ID      string          `json:"_id"`
	Version int64           `json:"_version"`
	Source  json.RawMessage `json:"_source"`
}

// hits are all documents of an index or alias, none where it is not there.
func (c *cluster) hits(ctx context.Context, index string) (all []hit, err error) {
	var page struct {
		ID   string `json:"_scroll_id"`
		Hits struct {
			Hits []hit `json:"hits"`
		} `json:"hits"`
	}
	if err := c.ask(ctx, http.MethodPost, index+"/_refresh?ignore_unavailable=true", nil, nil); err != nil {
		return nil, err
	}
	err = c.ask(ctx, http.MethodPost, index+"/_search?ignore_unavailable=true&scroll=1m&size=5000&version=true", nil, &page)
	for err == nil && len(page.Hits.Hits) > 0 {
		all = append(all, page.Hits.Hits...)
		id := page.ID
		page.Hits.Hits = nil
		err = c.ask(ctx, http.MethodPost, "_search/scroll", map[string]any{"scroll": "1m", "scroll_id": id}, &page)
	}
	if len(all) > 0 {
		err = errors.Join(err, c.ask(ctx, http.MethodDelete, "_search/scroll", map[string]any{"scroll_id": page.ID}, nil))
	}
	return all, err
}

// rows are the documents of a target as a reader sees them, sorted, a line each.
func (c *cluster) rows(t testing.TB, target string) string {
	t.Helper()
	return c.in(t, c.sink.Alias(model, target))
}

func (c *cluster) in(t testing.TB, index string) string {
	t.Helper()
	hits, err := c.hits(t.Context(), index)
	must(t, err)
	lines := make([]string, len(hits))
	for i, h := range hits {
		lines[i] = h.ID + " " + string(h.Source)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// record is the checkpoints' document of a projection.
type record struct {
	Term, Served int64
	Pending      any
	Generations  []struct {
		Generation, Sequence int64
		Phase, Place, Body   string
		Indices              map[string]string
	}
}

func (c *cluster) record(ctx context.Context, projection string) (r record, err error) {
	found := struct {
		Source *record `json:"_source"`
	}{&r}
	err = c.ask(ctx, http.MethodGet, c.prefix+"tidemark-checkpoints/_doc/"+projection, nil, &found)
	return r, err
}

// aliases are the indices behind an alias, sorted.
func (c *cluster) aliases(t testing.TB, alias string) string {
	t.Helper()
	var found map[string]any
	if err := c.ask(t.Context(), http.MethodGet, "_alias/"+alias, nil, &found); err != nil && !strings.Contains(err.Error(), "404") {
		t.Fatal(err)
	}
	var names []string
	for index := range found {
		names = append(names, c.short(index))
	}
	return sorted(names)
}

var nonces = regexp.MustCompile("-[a-z2-7]{12}$")

// short is an index's name without the prefix, and without what makes it like no other.
func (c *cluster) short(index string) string {
	return nonces.ReplaceAllString(strings.TrimPrefix(index, c.prefix), "")
}

// index is the full name of the only index that is called so for short.
func (c *cluster) index(t testing.TB, short string) string {
	t.Helper()
	var found map[string]any
	must(t, c.ask(t.Context(), http.MethodGet, c.prefix+short+"*/_alias", nil, &found))
	var names []string
	for index := range found {
		if c.short(index) == short {
			names = append(names, index)
		}
	}
	if len(names) != 1 {
		t.Fatalf("indices called %s: %q", short, names)
	}
	return names[0]
}

type apply = func(context.Context, *elasticsearch.Tx) error

// acquire takes the term and gives the live checkpoint.
func acquire(t testing.TB, s *elasticsearch.Sink, owner string) projector.Checkpoint {
	t.Helper()
	all, err := s.Acquire(t.Context(), model, owner)
	must(t, err)
	for _, cp := range all {
		if cp.Phase == projector.Live {
			return cp
		}
	}
	t.Fatal("nothing is live")
	return projector.Checkpoint{}
}

// acquired takes the term, and commits setup first where nothing is committed yet.
func (c *cluster) acquired(t testing.TB, setup ...apply) projector.Checkpoint {
	t.Helper()
	cp := acquire(t, c.sink, "test")
	if cp.Sequence > 0 {
		return cp
	}
	next, err := commit(t, c.sink, cp, setup...)
	must(t, err)
	return next
}

// commit applies fs in the commit after prev.
func commit(t testing.TB, s *elasticsearch.Sink, prev projector.Checkpoint, fs ...apply) (projector.Checkpoint, error) {
	t.Helper()
	next := following(prev)
	return next, s.Commit(t.Context(), prev, next, all(fs...))
}

func mustCommit(t testing.TB, s *elasticsearch.Sink, prev projector.Checkpoint, fs ...apply) projector.Checkpoint {
	t.Helper()
	next, err := commit(t, s, prev, fs...)
	must(t, err)
	return next
}

func following(prev projector.Checkpoint) projector.Checkpoint {
	next := prev
	next.Sequence++
	next.Position.Time = bson.Timestamp{T: 1_700_000_000, I: uint32(next.Sequence)} //nolint:gosec // small
	return next
}

func all(fs ...apply) apply {
	return func(ctx context.Context, tx *elasticsearch.Tx) error {
		for _, f := range fs {
			if err := f(ctx, tx); err != nil {
				return err
			}
		}
		return nil
	}
}

func put[R any](x elasticsearch.Index[R], remove, put []projector.Row[R]) apply {
	return func(ctx context.Context, tx *elasticsearch.Tx) error { return x.Put(ctx, tx, remove, put) }
}

// of is a row of a document.
func of[R any](owner any, version int64, row R) projector.Row[R] {
	return projector.Row[R]{Owner: value(owner), Version: version, Row: &row}
}

// gone is the removal of a document.
func gone[R any](owner any, version int64) projector.Row[R] {
	return projector.Row[R]{Owner: value(owner), Version: version}
}

func list[R any](rows ...projector.Row[R]) []projector.Row[R] { return rows }

func value(v any) bson.RawValue {
	typ, b, err := bson.MarshalValue(v)
	if err != nil {
		panic(err)
	}
	return bson.RawValue{Type: typ, Value: b}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %v\nwant %v", what, got, want)
	}
}

// wantError checks that err is there and says all of these.
func wantError(t testing.TB, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one that says %q", says)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("error does not say %q: %v", s, err)
		}
	}
}

func wantClass(t testing.TB, s *elasticsearch.Sink, err error, want projector.Class) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if got := s.Classify(err); got != want {
		t.Errorf("class %v, want %v, of: %v", got, want, err)
	}
}

func wantFenced(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, projector.ErrFenced) {
		t.Fatalf("not fenced: %v", err)
	}
}

// disable switches guards off for the rest of the test.
func disable(t testing.TB, g ...fault.Guard) { t.Cleanup(fault.Global.Disable(g...)) }

func sorted(names []string) string {
	slices.Sort(names)
	return strings.Join(names, " ")
}
