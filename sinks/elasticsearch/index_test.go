package elasticsearch_test

import (
	"context"
	"encoding/json"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

type article struct {
	Title   string          `row:"title"`
	Tags    []string        `row:"tags,json"`
	Rating  float64         `row:"rating"`
	Price   bson.Decimal128 `row:"price"`
	Written *time.Time      `row:"written_at"`
	Thumb   []byte          `row:"thumb"`
}

var articles = elasticsearch.Index[article]{
	Name:     "articles",
	Mapping:  `{"title": {"type": "text", "analyzer": "folded"}, "tags": {"type": "keyword"}, "price": {"type": "scaled_float_missing"}}`,
	Settings: `{"analysis": {"analyzer": {"folded": {"type": "custom", "tokenizer": "standard", "filter": ["lowercase"]}}}, "index": {"number_of_replicas": 0}}`,
}

// TestMapping: what the index is like that Create makes, and that a search finds.
func TestMapping(t *testing.T) {
	c := newCluster(t)
	_, err := commit(t, c.sink, acquire(t, c.sink, "test"), articles.Create)
	wantClass(t, c.sink, err, projector.Fatal) // no such type in this server
	wantError(t, err, "does not take the mapping", "scaled_float_missing")

	x := articles
	x.Mapping = strings.Replace(x.Mapping, "scaled_float_missing", "double", 1)
	cp := c.acquired(t, x.Create)
	price, err := bson.ParseDecimal128("12.50")
	must(t, err)
	mustCommit(t, c.sink, cp, put(x, nil, list(of(1, 1, article{"The QUICK fox", []string{"a", "b"}, 0.1, price, nil, []byte{0, 255}}))))
	must(t, c.sink.Refresh(t.Context(), model))
	var found struct {
		Hits struct {
			Hits []hit `json:"hits"`
		} `json:"hits"`
	}
	must(t, c.ask(t.Context(), http.MethodPost, c.sink.Alias(model, "articles")+"/_search", map[string]any{"query": map[string]any{"bool": map[string]any{"filter": []any{
		map[string]any{"match": map[string]any{"title": "quick"}},
		map[string]any{"term": map[string]any{"tags": "b"}},
		map[string]any{"range": map[string]any{"price": map[string]any{"gt": 12, "lt": 13}}},
	}}}}, &found))
	if len(found.Hits.Hits) != 1 {
		t.Fatalf("found %d", len(found.Hits.Hits))
	}
	equal(t, "document", string(found.Hits.Hits[0].Source), `{"title":"The QUICK fox","tags":["a","b"],"rating":0.1,"price":"12.50","written_at":null,"thumb":"AP8="}`)

	var index map[string]struct {
		Mappings struct {
			Dynamic    any                        `json:"dynamic"`
			Properties map[string]json.RawMessage `json:"properties"`
		} `json:"mappings"`
		Settings struct {
			Index struct {
				GC       string `json:"gc_deletes"`
				Replicas string `json:"number_of_replicas"`
				Pipeline string `json:"default_pipeline"`
				Final    string `json:"final_pipeline"`
				Translog struct {
					Durability string `json:"durability"`
				} `json:"translog"`
			} `json:"index"`
		} `json:"settings"`
	}
	must(t, c.ask(t.Context(), http.MethodGet, c.index(t, "model-g1-articles"), nil, &index))
	made := index[c.index(t, "model-g1-articles")]
	equal(t, "dynamic", made.Mappings.Dynamic.(string), "strict")
	equal(t, "written_at", string(made.Mappings.Properties["written_at"]), `{"type":"date","format":"strict_date_optional_time"}`)
	equal(t, "gc_deletes", made.Settings.Index.GC, "1h")
	equal(t, "replicas", made.Settings.Index.Replicas, "0")
	// Written, whatever a template says.
	equal(t, "durability", made.Settings.Index.Translog.Durability, "request")
	equal(t, "pipelines", made.Settings.Index.Pipeline+" "+made.Settings.Index.Final, "_none _none")
}

type note struct {
	Body any `row:"body,json"`
}

// TestDynamic: what is inside of a field and not mapped is refused, or kept if Lenient.
func TestDynamic(t *testing.T) {
	c := newCluster(t)
	mapping := `{"body": {"type": "object", "properties": {"known": {"type": "keyword"}}}}`
	strict := elasticsearch.Index[note]{Name: "strict", Mapping: mapping}
	lenient := elasticsearch.Index[note]{Name: "lenient", Mapping: mapping, Lenient: true}
	cp := c.acquired(t, strict.Create, lenient.Create)
	rows := list(of(1, 1, note{map[string]any{"known": "a", "other": 1}}))
	_, err := commit(t, c.sink, cp, put(strict, nil, rows))
	wantClass(t, c.sink, err, projector.Poison)
	wantError(t, err, "strict_dynamic_mapping_exception", `"strict"`)
	mustCommit(t, c.sink, cp, put(lenient, nil, rows))
	equal(t, "lenient", c.rows(t, "lenient"), `1 {"body":{"known":"a","other":1}}`)
}

// TestRefusedValues: what JSON or Elasticsearch has no form for is refused, by name.
func TestRefusedValues(t *testing.T) {
	c := newCluster(t)
	x := elasticsearch.Index[article]{Name: "articles"}
	cp := c.acquired(t, x.Create)
	far := time.Date(12000, 1, 1, 0, 0, 0, 0, time.UTC)
	for says, row := range map[string]article{
		`field "title": it is not valid UTF-8`: {Title: "a\xff"},
		`field "rating": JSON and`:             {Rating: math.NaN()},
		`field "written_at": Elasticsearch's`:  {Written: &far},
		`field "tags"`:                         {Tags: []string{"\xff"}},
	} {
		_, err := commit(t, c.sink, cp, put(x, nil, list(of("d", 1, row))))
		wantClass(t, c.sink, err, projector.Poison)
		wantError(t, err, says, `document "d"`)
	}
	_, err := commit(t, c.sink, cp, put(x, nil, list(of("d", 0, article{}))))
	wantClass(t, c.sink, err, projector.Fatal)
	wantError(t, err, "has no Version")
	equal(t, "documents", c.rows(t, "articles"), "")
}

type summed struct {
	Key string `row:"key,key"`
	N   int64  `row:"n,sum"`
}

// TestCheck: all that is wrong with a target is said before anything is read.
func TestCheck(t *testing.T) {
	route := func(thing) string { return "" }
	for says, x := range map[string]elasticsearch.Index[thing]{
		"bad name":                   {Name: "Things"},
		`mapping names field "nope"`: {Name: "x", Mapping: `{"nope": {}}`},
		"mapping: it must be a JSON": {Name: "x", Mapping: `[`},
		"settings: it must be a":     {Name: "x", Settings: `1`},
		"Route and Routes go":        {Name: "x", Route: route},
		`bad route "EU"`:             {Name: "x", Route: route, Routes: []string{"EU"}},
		`route "eu" is there twice`:  {Name: "x", Route: route, Routes: []string{"eu", "eu"}},

		"index.translog.durability must be \"request\"": {Name: "x", Settings: `{"translog": {"durability": "ASYNC"}}`},
		"index.default_pipeline must be \"_none\"":      {Name: "x", Settings: `{"index.default_pipeline": "theirs"}`},
		"index.final_pipeline must be \"_none\"":        {Name: "x", Settings: `{"index": {"final_pipeline": "theirs"}}`},
	} {
		wantError(t, x.Check(projector.FormMirror), says)
	}
	wantError(t, elasticsearch.Index[summed]{Name: "x"}.Check(projector.FormRollup), "no transactions")
	wantError(t, elasticsearch.Index[summed]{Name: "x"}.Check(projector.FormUpsert), "drop `sum`")
	a, b := things, things
	b.Mapping = `{"n": {"type": "long"}}`
	if a.Layout() == b.Layout() {
		t.Errorf("a changed mapping does not show: %s", a.Layout())
	}
}

// TestForeign: names for readers that are taken by others' indices and aliases are
// refused, and left alone.
func TestForeign(t *testing.T) {
	taken := func(t *testing.T, index string, aliases ...string) *cluster {
		c := newCluster(t)
		must(t, c.ask(t.Context(), http.MethodPut, c.prefix+index+"/_doc/1", map[string]any{"a": 1}, nil))
		for _, a := range aliases {
			must(t, c.ask(t.Context(), http.MethodPut, c.prefix+index+"/_alias/"+c.prefix+a, nil, nil))
		}
		return c
	}
	refuse := func(t *testing.T, c *cluster, index string, x interface {
		Create(context.Context, *elasticsearch.Tx) error
	},
	) {
		t.Helper()
		_, err := commit(t, c.sink, acquire(t, c.sink, "test"), x.Create)
		wantClass(t, c.sink, err, projector.Fatal)
		wantError(t, err, c.prefix+index, "another name")
		equal(t, "their index", c.in(t, c.prefix+index), `1 {"a":1}`)
		equal(t, "indices", c.indices(t), sorted([]string{index, "tidemark-checkpoints"}))
	}
	refuse(t, taken(t, "model-things"), "model-things", things)
	refuse(t, taken(t, "theirs", "model-things"), "theirs", things)
	refuse(t, taken(t, "theirs", "model-places"), "theirs", byRegion)
	refuse(t, taken(t, "model-g9-things", "model-things"), "model-g9-things", things)

	c := taken(t, "model-g1-things")
	c.acquired(t, things.Create)
	equal(t, "their index", c.in(t, c.prefix+"model-g1-things"), `1 {"a":1}`)
	equal(t, "ours", c.rows(t, "things"), "")
}

// TestAbsentTarget: a handler's own target must have been made.
func TestAbsentTarget(t *testing.T) {
	c := newCluster(t)
	cp := c.acquired(t)
	_, err := commit(t, c.sink, cp, put(things, nil, manyThings(1, -1)))
	wantClass(t, c.sink, err, projector.Fatal)
	wantError(t, err, `no index "things"`, "Setup")
}
