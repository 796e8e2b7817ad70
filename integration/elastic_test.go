package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// elasticNode is the native server of all tests, since it takes seconds to start and half
// a gigabyte; nil where there is another one.
var elasticNode = sync.OnceValues(func() (*serve.ElasticsearchServer, error) {
	if os.Getenv("ELASTICSEARCH_URL") != "" || runtime.GOOS != "linux" {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	return serve.StartElasticsearch(ctx, serve.ElasticsearchOptions{})
})

// elasticURL is where the server of all tests is.
func elasticURL(t testing.TB) string {
	t.Helper()
	node, err := elasticNode()
	must(t, err)
	if node != nil {
		return node.URL()
	}
	at, err := serve.Elasticsearch(t.Context())
	must(t, err)
	return strings.TrimSuffix(at, "/")
}

// elasticModel is a model of the orders in Elasticsearch.
type elasticModel struct {
	t        testing.TB
	url      string
	prefix   string                   // of all names, so that each test has its own
	own, way *elastictransport.Client // the test's own; the runner's
}

func newElasticModel(t testing.TB) *elasticModel {
	t.Helper()
	return newElasticModelAt(t, elasticURL(t))
}

func newElasticModelAt(t testing.TB, at string) *elasticModel {
	t.Helper()
	m := &elasticModel{t: t, url: at, prefix: unique("t") + "-"}
	m.own, m.way = elasticClient(t, at), elasticClient(t, at)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var found map[string]any
		must(t, m.ask(ctx, http.MethodGet, m.prefix+"*/_alias", nil, &found))
		for index := range found {
			must(t, m.ask(ctx, http.MethodDelete, index, nil, nil))
		}
	})
	return m
}

func elasticClient(t testing.TB, at string) *elastictransport.Client {
	t.Helper()
	connections := &http.Transport{MaxIdleConnsPerHost: 4}
	c, err := elasticAt(at, connections)
	must(t, err)
	t.Cleanup(connections.CloseIdleConnections)
	return c
}

// elasticAt is what the clients of go-elasticsearch send by, without their API, which
// takes minutes to compile.
func elasticAt(at string, connections http.RoundTripper) (*elastictransport.Client, error) {
	u, err := url.Parse(at)
	if err != nil {
		return nil, err
	}
	return elastictransport.NewClient(elastictransport.WithURLs(u), elastictransport.WithTransport(connections))
}

// ask asks the server around the sink.
func (m *elasticModel) ask(ctx context.Context, method, path string, body, out any) error {
	var b bytes.Buffer
	if body != nil {
		if err := json.NewEncoder(&b).Encode(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "/"+path, &b)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := m.own.Perform(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s %s: %w: %s", method, path, errMissing, answer)
	case resp.StatusCode >= http.StatusMultipleChoices:
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	case out == nil:
		return nil
	}
	return json.Unmarshal(answer, out)
}

// errMissing: an index or a document is not there.
var errMissing = errors.New("not there")

// elasticHits are documents as a search finds them.
type elasticHits struct {
	ID   string `json:"_scroll_id"`
	Hits struct {
		Total struct {
			Value int64 `json:"value"`
		} `json:"total"`
		Hits []struct {
			Index  string          `json:"_index"`
			ID     string          `json:"_id"`
			Source json.RawMessage `json:"_source"`
		} `json:"hits"`
	} `json:"hits"`
}

// alias is the name by which a target is read.
func (m *elasticModel) alias(projection, target string) string {
	return elasticsearch.New(nil, elasticsearch.Prefix(m.prefix)).Alias(projection, target)
}

// each hands every document of an alias to f, whatever a search may not see yet too.
func (m *elasticModel) each(alias string, f func(id string, source []byte) error) error {
	ctx := m.t.Context()
	if err := m.ask(ctx, http.MethodPost, alias+"/_refresh", nil, nil); err != nil {
		return err
	}
	var page elasticHits
	err := m.ask(ctx, http.MethodPost, alias+"/_search?scroll=1m&size=5000", nil, &page)
	for err == nil && len(page.Hits.Hits) > 0 {
		for _, h := range page.Hits.Hits {
			if err := f(h.ID, h.Source); err != nil {
				return err
			}
		}
		page.Hits.Hits = nil
		err = m.ask(ctx, http.MethodPost, "_search/scroll", map[string]any{"scroll": "1m", "scroll_id": page.ID}, &page)
	}
	if page.ID != "" {
		err = errors.Join(err, m.ask(ctx, http.MethodDelete, "_search/scroll", map[string]any{"scroll_id": page.ID}, nil))
	}
	return err
}

// sums is what a Refresh computes instead of a Rollup, which Elasticsearch can't have: a
// row for each kind of order.
type sums struct {
	Kind   string `row:"kind"`
	Orders int64  `row:"orders"`
	Amount int64  `row:"amount"`
}

// summed computes the sums of some kinds. worth is how many times it has the amounts.
func summed(worth int64) func(ctx context.Context, src *mongo.Database, kinds []string) (map[string]sums, error) {
	return func(ctx context.Context, src *mongo.Database, kinds []string) (map[string]sums, error) {
		all := map[string]sums{}
		wanted := map[string]bson.A{}
		for _, k := range kinds {
			field, value, _ := strings.Cut(k, " ")
			wanted[field] = append(wanted[field], value)
		}
		for field, values := range wanted {
			cur, err := src.Collection("orders").Aggregate(ctx, bson.A{
				bson.D{{Key: "$match", Value: bson.D{{Key: field, Value: bson.D{{Key: "$in", Value: values}}}}}},
				bson.D{{Key: "$group", Value: bson.D{
					{Key: "_id", Value: "$" + field},
					{Key: "orders", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
					{Key: "amount", Value: bson.D{{Key: "$sum", Value: "$amount"}}},
				}}},
			})
			if err != nil {
				return nil, err
			}
			var found []struct {
				Value          string `bson:"_id"`
				Orders, Amount int64
			}
			if err := cur.All(ctx, &found); err != nil {
				return nil, err
			}
			for _, f := range found {
				kind := field + " " + f.Value
				all[kind] = sums{kind, f.Orders, worth * f.Amount}
			}
		}
		return all, nil
	}
}

func elasticSums(worth int64) projector.Binding[*elasticsearch.Tx] {
	return projector.Refresh(summed(worth), elasticsearch.Index[sums]{Name: "sums"}, projector.Touches("orders", order.kinds))
}

// elasticLedger is orderLedger in Elasticsearch.
var elasticLedger = elasticsearch.Projection{
	Name: orderPlace, Version: 1,
	Bindings: elasticsearch.Bindings{
		projector.Mirror("orders", order.mirrored, elasticsearch.Index[mirrored]{Name: "orders"}),
		projector.Upsert("orders", order.holders, elasticsearch.Index[holder]{Name: "handles"}),
		elasticSums(1),
	},
}

func (m *elasticModel) sink() *elasticsearch.Sink {
	return elasticsearch.New(m.way, elasticsearch.Prefix(m.prefix))
}

func (m *elasticModel) runner(source *mongo.Database, o projector.Options) (*projector.Runner, error) {
	if o.RefreshInterval == 0 {
		o.RefreshInterval = 100 * time.Millisecond // or most tests would see one recomputation
	}
	return projector.New(source, m.sink(), elasticLedger, o)
}

// rows has no number of changes that were applied twice: there is nothing that adds.
func (m *elasticModel) rows() (got orderRows, twice int64, err error) {
	got = newOrderRows()
	return got, 0, errors.Join(
		m.each(m.alias(orderPlace, "orders"), func(_ string, source []byte) error {
			var r struct {
				ID     int64
				Group  string `json:"grp"`
				State  string
				Amount int64
				Handle string
			}
			err := json.Unmarshal(source, &r)
			got.Mirror[r.ID] = mirrored(r)
			return err
		}),
		m.each(m.alias(orderPlace, "handles"), func(_ string, source []byte) error {
			var r struct {
				Handle     string
				ID, Amount int64
			}
			err := json.Unmarshal(source, &r)
			got.Handles[r.Handle] = holder(r)
			return err
		}),
		m.each(m.alias(orderPlace, "sums"), func(_ string, source []byte) error {
			var r sums
			err := json.Unmarshal(source, &r)
			got.Balances[r.Kind] = [2]int64{r.Orders, r.Amount}
			if group, ok := strings.CutPrefix(r.Kind, "group "); ok {
				got.Totals[group] = total{group, r.Orders, r.Amount}
			}
			return err
		}),
	)
}

const checkpointDoc = "tidemark-checkpoints/_doc/"

func (m *elasticModel) checkpoint(ctx context.Context) (c projector.Checkpoint, err error) {
	var found struct {
		Source struct {
			Term        int64
			Generations []struct {
				Sequence int64
				Phase    projector.Phase
				Body     string
			}
		} `json:"_source"`
	}
	err = m.ask(ctx, http.MethodGet, m.prefix+checkpointDoc+orderPlace, nil, &found)
	if errors.Is(err, errMissing) {
		return c, nil
	}
	for _, g := range found.Source.Generations {
		if err == nil && g.Phase == projector.Live && g.Body != "" {
			c, err = projector.DecodeCheckpoint(orderPlace, []byte(g.Body))
			c.Term, c.Sequence = found.Source.Term, g.Sequence
		}
	}
	return c, err
}

func (m *elasticModel) forget() error {
	return m.ask(m.t.Context(), http.MethodDelete, m.prefix+checkpointDoc+orderPlace, nil, nil)
}

// gateway stands between a sink and the server.
type gateway struct {
	*httptest.Server
	meddle atomic.Pointer[func(w http.ResponseWriter, r *http.Request) bool]
}

// throughGateway is a source of orders and a model whose runner goes through a gateway.
func throughGateway(t *testing.T) (*kept, *gateway) {
	t.Helper()
	c := keep(t, inElasticsearch, keeping{})
	m := c.model.(*elasticModel)
	to, err := url.Parse(m.url)
	must(t, err)
	connections := &http.Transport{}
	forward := httputil.NewSingleHostReverseProxy(to)
	forward.Transport, forward.ErrorLog = connections, log.New(io.Discard, "", 0)
	p := new(gateway)
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := p.meddle.Load(); f == nil || !(*f)(w, r) {
			forward.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
		connections.CloseIdleConnections()
	})
	m.way = elasticClient(t, p.URL)
	return c, p
}

// on sets what is done to a bulk request, nil for nothing; true: it was answered.
func (p *gateway) on(f func(w http.ResponseWriter, r *http.Request) bool) {
	if f == nil {
		p.meddle.Store(nil)
		return
	}
	bulk := func(w http.ResponseWriter, r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/_bulk") && f(w, r)
	}
	p.meddle.Store(&bulk)
}

// busyFor has the server answer 429 for a time, while far more is written than a runner
// may keep. It gives how much, and how much more memory was in use at most.
func busyFor(t *testing.T, length time.Duration, o projector.Options) (c *kept, g *running, written, held int64) {
	c, p := throughGateway(t)
	o.CommitTimeout = time.Second // or it would not say for so long that it tries again
	g = c.start(o)
	c.step(50)
	c.exact(g)
	before := int64(heapInUse())
	var refused atomic.Int64
	p.on(func(w http.ResponseWriter, r *http.Request) bool {
		_, _ = io.Copy(io.Discard, r.Body)
		refused.Add(1)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusTooManyRequests)
		_, _ = io.WriteString(w, `{"error":{"type":"es_rejected_execution_exception","reason":"rejected execution"},"status":429}`)
		return true
	})
	text := pad("x", 0.25)
	docs := make([]any, 4)
	const parts = 48
	for n := range parts {
		for i := range docs {
			o := c.writer.fresh()
			docs[i] = bson.D{{Key: "_id", Value: o.ID}, {Key: "group", Value: o.Group}, {Key: "state", Value: o.State}, {Key: "amount", Value: o.Amount}, {Key: "pad", Value: text}}
		}
		_, err := c.writer.orders.InsertMany(t.Context(), docs)
		must(t, err)
		written += int64(len(docs) * len(text))
		time.Sleep(length / parts) // that it takes this long is what it is about
		if n%8 == 7 {
			held = max(held, int64(heapInUse())-before)
		}
	}
	until(t, 10*time.Second, "it says that it tries again because of 429", func() bool {
		c.alive(g)
		s := g.Status()
		return s.State == projector.Retrying && s.Err != nil && strings.Contains(s.Err.Error(), "429")
	})
	t.Logf("%d MB written in %s, %d requests refused, %d MB more in use", written>>20, length, refused.Load(), held>>20)
	p.on(nil)
	return c, g, written, held
}

// The server has too much to do for a time, at its full figure a minute: memory stays bounded, and nothing is missing
// afterwards.
func TestElasticBusy(t *testing.T) {
	c, g, _, held := busyFor(t, time.Duration(effort.Values(60))*time.Second, projector.Options{BufferBytes: 1 << 20, BatchBytes: 1 << 20})
	if held > 64<<20 { // a reply has 16 MB; it is decoded, and in the driver's buffer as well
		t.Errorf("%d MB are in use", held>>20)
	}
	c.exact(g)
	g.stop()
	// With a buffer that takes everything, everything is kept.
	t.Run("control", func(t *testing.T) {
		c, g, written, held := busyFor(t, time.Duration(effort.Values(3))*time.Second, projector.Options{BufferBytes: 1 << 30, BatchBytes: 1 << 20})
		if held < written {
			t.Errorf("only %d MB of %d are in use: what bounds them is not the buffer", held>>20, written>>20)
		}
		c.exact(g)
		g.stop()
	})
}

// Of a thousand documents that one bulk request has, one is refused: it is named, and
// everything before it is there. When the projection leaves it out, the rest comes.
func TestElasticBadDocument(t *testing.T) {
	db, m := source(t), newElasticModel(t)
	withImages(t, db, "things")
	start := func(f func(thing) (thingRow, bool)) *running {
		r, err := projector.New(db, m.sink(), elasticsearch.Projection{Name: "bad", Version: 1, Bindings: elasticsearch.Bindings{
			projector.Mirror("things", f, elasticsearch.Index[thingRow]{Name: "things", Mapping: `{"name": {"type": "date"}}`}),
		}}, projector.Options{Start: projector.FromNow(), Logger: quiet()})
		must(t, err)
		return run(t, r)
	}
	ids := func() map[string]bool {
		all := map[string]bool{}
		must(t, m.each(m.alias("bad", "things"), func(id string, _ []byte) error { all[id] = true; return nil }))
		return all
	}
	g := start(thing.row)
	until(t, time.Minute, "the runner follows the source", func() bool { return g.Status().State == projector.Running })
	const n, bad = 1000, 617
	docs := make([]any, n)
	for i := range docs {
		docs[i] = bson.D{{Key: "_id", Value: i}, {Key: "name", Value: time.Unix(int64(i), 0).UTC().Format(time.RFC3339)}}
	}
	docs[bad] = bson.D{{Key: "_id", Value: bad}, {Key: "name", Value: "no date"}}
	_, err := db.Collection("things").InsertMany(t.Context(), docs)
	must(t, err)
	e := ends[*projector.PoisonError](t, g)
	if e.Key != fmt.Sprint(bad) || e.Op != projector.Insert {
		t.Errorf("it names the %s of %s", e.Op, e.Key)
	}
	refused, ok := errors.AsType[*elasticsearch.DocumentError](e)
	if !ok || refused.ID != fmt.Sprint(bad) {
		t.Errorf("the cause is %v", e.Err)
	}
	found := ids()
	for i := range bad {
		if !found[fmt.Sprint(i)] {
			t.Fatalf("document %d is before the bad one, and not in the index", i)
		}
	}
	g = start(func(d thing) (thingRow, bool) {
		row, _ := d.row()
		return row, row.Name != "no date"
	})
	g.level(db)
	if found := ids(); len(found) != n-1 || found[fmt.Sprint(bad)] {
		t.Errorf("there are %d documents, the bad one among them: %t", len(found), found[fmt.Sprint(bad)])
	}
	g.stop()
}

// The node is killed by SIGKILL in the middle of bulk requests and commits, and comes back.
func TestElasticNodeKilled(t *testing.T) {
	node, err := elasticNode()
	must(t, err)
	if node == nil { // a server of the test's own is all that can be killed
		node, err = serve.StartElasticsearch(t.Context(), serve.ElasticsearchOptions{})
		must(t, err)
		t.Cleanup(func() { must(t, node.Close()) })
	}
	c := keep(t, inElasticsearch, keeping{})
	m := newElasticModelAt(t, node.URL())
	c.model = m
	a := newAmbush(t)
	g := c.start(projector.Options{BatchChanges: 200})
	c.write()
	for round := range effort.Rounds(4) {
		c.commits(g, 3)
		killed := make(chan struct{})
		later := time.Duration(c.rng.Int64N(int64(20 * time.Millisecond)))
		a.at([]fault.Point{fault.HandlerEnd, fault.CommitSend}[round%2], func() {
			time.AfterFunc(later, func() {
				if err := node.Kill(); err != nil {
					t.Error(err)
				}
				close(killed)
			})
		})
		wait(t, "the node is killed", killed)
		c.goOn(100)
		must(t, node.Restart(t.Context()))
		must(t, m.ask(t.Context(), http.MethodGet, "_cluster/health/"+m.prefix+"*?wait_for_status=yellow&timeout=60s", nil, nil))
		c.exact(g)
	}
	t.Logf("%d steps, %d retries", c.steps.Load(), g.Status().Retries)
	g.stop()
}

// lateRequest has a bulk request of a superseded owner come to the server when its
// successor has written later changes of the same documents.
func lateRequest(t *testing.T) *kept {
	c, p := throughGateway(t)
	m := c.model.(*elasticModel)
	old := c.start(projector.Options{CommitTimeout: time.Minute})
	c.step(100)
	c.exact(old)
	touchAll := func() {
		_, err := c.writer.orders.UpdateMany(t.Context(), bson.D{}, add("amount", 1000))
		must(t, err)
	}
	arrived, release := make(chan struct{}, 1000), make(chan struct{})
	p.on(func(http.ResponseWriter, *http.Request) bool {
		arrived <- struct{}{}
		<-release
		return false
	})
	touchAll()
	wait(t, "the request is on its way", arrived)
	m.way = m.own // around the gateway
	next := c.start(projector.Options{})
	touchAll()
	_, err := c.writer.orders.DeleteMany(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$mod", Value: bson.A{3, 0}}}}})
	must(t, err)
	c.catchUp(next)
	close(release)
	ends[*projector.FencedError](t, old)
	c.catchUp(next)
	next.stop()
	return c
}

// What an owner had sent before it was frozen, and comes to the server when another one has
// gone on, changes nothing.
func TestElasticLateRequest(t *testing.T) {
	if diff := lateRequest(t).compare(); diff != "" {
		t.Errorf("the index differs from the source (-source +index):\n%s", diff)
	}
	t.Run("control", func(t *testing.T) {
		without(t, fault.RowVersion)
		if lateRequest(t).compare() == "" {
			t.Error("without versions it does no harm either: the test proves nothing")
		}
	})
}

// replayed is a model whose checkpoint was put back, held in the middle of applying again
// what it has already.
func replayed(t *testing.T) (c *kept, g *running, held *barrier) {
	c = keep(t, inElasticsearch, keeping{})
	m := c.model.(*elasticModel)
	path := m.prefix + checkpointDoc + orderPlace
	g = c.start(projector.Options{})
	c.step(100)
	c.exact(g)
	g.stop()
	var old struct {
		Source json.RawMessage `json:"_source"`
	}
	must(t, m.ask(t.Context(), http.MethodGet, path, nil, &old))
	g = c.start(projector.Options{})
	c.step(300)
	c.exact(g)
	g.stop()
	must(t, m.ask(t.Context(), http.MethodPut, path, old.Source, nil))
	held = holdAt(t, fault.HandlerBegin, 4)
	g = c.start(projector.Options{BatchChanges: 20})
	held.wait()
	return c, g, held
}

// A checkpoint that was put back has history applied again, in other batches. No document
// is older for a moment, and none comes back that was deleted.
func TestElasticOlderCheckpoint(t *testing.T) {
	inTheMiddle := func(c *kept) string {
		got, _, err := c.model.rows()
		must(t, err)
		want := computed(t, c.db)
		got.Totals, got.Balances, want.Totals, want.Balances = nil, nil, nil, nil // computed anew in their time
		return cmp.Diff(want, got)
	}
	for range effort.Rounds(5) {
		c, g, held := replayed(t)
		if diff := inTheMiddle(c); diff != "" {
			t.Errorf("documents are older than they were (-source +index):\n%s", diff)
		}
		held.release()
		c.exact(g)
		g.stop()
	}
	t.Run("control", func(t *testing.T) {
		without(t, fault.RowVersion)
		c, _, held := replayed(t)
		if inTheMiddle(c) == "" {
			t.Error("without versions no document is older: the test proves nothing")
		}
		held.release()
	})
}

// routed is a projection of which each row is in one of several indices.
var routed = elasticsearch.Projection{Name: "routed", Version: 1, Bindings: elasticsearch.Bindings{
	projector.Mirror("orders", order.mirrored, elasticsearch.Index[mirrored]{
		Name: "orders", Routes: routes, Route: func(r mirrored) string { return r.State },
	}),
	projector.Upsert("orders", order.holders, elasticsearch.Index[holder]{
		Name: "handles", Routes: routes, Route: func(h holder) string { return routes[h.Amount&1] },
	}),
}}

var routes = []string{"new", "paid", "shipped"}

// routedDifference changes the source and compares the indices with it.
func routedDifference(t *testing.T, times int) string {
	uri, err := serve.MongoDB(t.Context())
	must(t, err)
	o, m := newOrdering(t, uri), newElasticModel(t)
	r, err := projector.New(o.db, m.sink(), routed, projector.Options{Start: projector.FromNow(), Logger: quiet(), BatchChanges: 50})
	must(t, err)
	g := run(t, r)
	until(t, time.Minute, "the runner follows the source", func() bool { return g.Status().State == projector.Running })
	for range times {
		o.step(200)
		g.level(o.db)
		want, got := map[string]bool{}, map[string]bool{}
		rows := computed(t, o.db)
		for id, r := range rows.Mirror {
			want[fmt.Sprintf("orders-%s: %d", r.State, id)] = true
		}
		for handle, h := range rows.Handles {
			want[fmt.Sprintf("handles-%s: %s", routes[h.Amount&1], handle)] = true
		}
		for _, target := range []string{"orders", "handles"} {
			for _, route := range routes {
				must(t, m.each(m.alias("routed", target+"-"+route), func(id string, _ []byte) error {
					got[fmt.Sprintf("%s-%s: %s", target, route, id)] = true
					return nil
				}))
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return diff
		}
	}
	g.stop()
	return ""
}

// Documents move between indices and are deleted: each is in the one that it belongs to,
// and in no other.
func TestElasticMovedBetweenIndices(t *testing.T) {
	if diff := routedDifference(t, effort.Rounds(10)); diff != "" {
		t.Errorf("the indices differ from the source (-source +indices):\n%s", diff)
	}
	t.Run("control", func(t *testing.T) {
		without(t, fault.RouteDelete)
		if routedDifference(t, 1) == "" {
			t.Error("documents are in no other index without the guard either: the test proves nothing")
		}
	})
}

// A source transaction writes several times to the same documents, all of which have one
// version: the last write of each counts.
func TestElasticTransaction(t *testing.T) {
	c := keep(t, inElasticsearch, keeping{})
	g := c.start(projector.Options{BatchChanges: 10})
	const documents = 5
	for range max(5, effort.Rounds(50)) {
		must(t, inTransaction(t.Context(), c.db, func(ctx context.Context) (err error) {
			for range 15 {
				id := int64(c.rng.IntN(documents))
				one := bson.D{{Key: "_id", Value: id}}
				switch c.rng.IntN(6) {
				case 0:
					_, err = c.writer.orders.DeleteOne(ctx, one)
				case 1:
					o := bson.D{{Key: "group", Value: c.writer.group()}, {Key: "state", Value: c.writer.state()}, {Key: "amount", Value: c.rng.Int64N(1000)}}
					_, err = c.writer.orders.ReplaceOne(ctx, one, o, options.Replace().SetUpsert(true))
				case 2:
					err = c.writer.update(ctx, one, set("state", c.writer.state()))
				case 3: // the handle that is handed around
					if err = c.writer.update(ctx, bson.D{{Key: "handle", Value: "handed"}}, unset("handle")); err == nil {
						err = c.writer.update(ctx, one, set("handle", "handed"))
					}
				default:
					err = c.writer.update(ctx, one, add("amount", 1))
				}
				if err != nil {
					return err
				}
			}
			return nil
		}))
		c.exact(g)
	}
	g.stop()
}
