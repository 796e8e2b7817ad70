package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := errors.Join(serve.Close(), goleak.Find()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var markets = []string{"eu", "us"}

// Products exist before the projection starts for the first time, and are changed at random
// while it is stopped and started again: the indices of both markets have what the
// documents say. So they do after a rebuild, during which a search never fails.
func TestCatalogueEqualsTheSource(t *testing.T) {
	s := newShop(t)
	s.change(100)
	stop := s.start(func(ctx context.Context) error { return run(ctx, s.es, s.db.Name(), s.prefix) })
	for range 3 {
		s.change(60)
		stop() // while what was written last may not be committed, or the first load not be over
		s.change(60)
		stop = s.start(func(ctx context.Context) error { return run(ctx, s.es, s.db.Name(), s.prefix) })
	}
	s.insert(product{Title: "unmistakable thing", Market: "us"})
	s.equal()
	stop()

	runner, err := projector.New(s.db, elasticsearch.New(s.es, elasticsearch.Prefix(s.prefix)), Catalogue, projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: 20}})
	if err != nil {
		t.Fatal(err)
	}
	before := s.indices()
	stop = s.start(runner.Run)
	rebuilt := make(chan error, 1)
	go func() { rebuilt <- runner.Rebuild(t.Context()) }()
	for searches := 1; ; searches++ {
		entries, err := find(t.Context(), s.es, s.prefix, "us", "unmistakable thing")
		if err != nil || len(entries) != 1 {
			t.Fatalf("search %d during the rebuild: %d entries, %v", searches, len(entries), err)
		}
		select {
		case err := <-rebuilt:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d searches during the rebuild", searches)
		default:
			s.change(1)
			continue
		}
		break
	}
	if after := s.indices(); len(before) != 2 || len(after) != 2 || slices.ContainsFunc(after, func(index string) bool { return slices.Contains(before, index) }) {
		t.Errorf("the indices behind the alias are %v, were %v", after, before)
	}
	s.equal()
	stop()
}

// A search finds what has all of its words in the title, in one market or in all; what has
// left a market is not found there.
func TestSearch(t *testing.T) {
	s := newShop(t)
	lamp := s.insert(product{Title: "Red Lamp", Cents: 1999, Market: "eu"})
	s.insert(product{Title: "Red Chair", Market: "eu"})
	moved := s.insert(product{Title: "Tall red lamp", Market: "eu"})
	s.insert(product{Title: "Secret red lamp", Market: "eu", Hidden: true})
	s.insert(product{Title: "Lunar red lamp", Market: "moon"})
	stop := s.start(func(ctx context.Context) error { return run(ctx, s.es, s.db.Name(), s.prefix) })
	s.set(moved, "market", "us")
	s.equal()
	for _, c := range []struct {
		market, words string
		ids           []bson.ObjectID
	}{
		{"", "red lamp", []bson.ObjectID{lamp, moved}},
		{"eu", "lamp red", []bson.ObjectID{lamp}},
		{"us", "red lamp", []bson.ObjectID{moved}},
		{"us", "chair", nil},
	} {
		entries, err := find(t.Context(), s.es, s.prefix, c.market, c.words)
		var ids, want []string
		for _, e := range entries {
			ids = append(ids, e.ID)
		}
		for _, id := range c.ids {
			want = append(want, id.Hex())
		}
		slices.Sort(ids)
		if diff := cmp.Diff(want, ids); err != nil || diff != "" {
			t.Errorf("%q in %q: %v\n%s", c.words, c.market, err, diff)
		}
	}
	if err := search(t.Context(), s.es, s.prefix, "moon", "lamp"); err == nil || !strings.Contains(err.Error(), "catalogue-products-moon") {
		t.Errorf("in a market without an index: %v", err)
	}
	stop()
}

func TestFaultsAreNamed(t *testing.T) {
	s := newShop(t)
	err := run(t.Context(), s.es, s.db.Name()+"_empty", s.prefix)
	if err == nil || !strings.Contains(err.Error(), `db.createCollection("products", {changeStreamPreAndPostImages: {enabled: true}})`) {
		t.Errorf("without the collection: %v", err)
	}
}

// shop is a source of products and a part of an Elasticsearch, of the test's own.
type shop struct {
	*testing.T
	db     *mongo.Database
	es     *elastictransport.Client
	prefix string
	random *rand.Rand
	ids    []bson.ObjectID
}

func newShop(t *testing.T) *shop {
	t.Helper()
	source, err := serve.MongoDB(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	client, err := mongo.Connect(options.Client().ApplyURI(source))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("MONGODB_URI", source)
	address, err := serve.Elasticsearch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	server, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	connections := &http.Transport{}
	es, err := elastictransport.NewClient(elastictransport.WithURLs(server), elastictransport.WithTransport(connections))
	if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	name := "searchindex_" + bson.NewObjectID().Hex()
	s := &shop{T: t, db: client.Database(name), es: es, prefix: name + "-", random: rand.New(rand.NewPCG(seed, 0))} //nolint:gosec // no secret
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		var indices map[string]any
		err := s.ask(ctx, http.MethodGet, s.prefix+"*/_alias", "", &indices)
		for index := range indices {
			err = errors.Join(err, s.ask(ctx, http.MethodDelete, index, "", nil))
		}
		connections.CloseIdleConnections()
		if err := errors.Join(err, s.db.Drop(ctx), client.Disconnect(ctx)); err != nil {
			t.Error(err)
		}
	})
	images := bson.D{{Key: "enabled", Value: true}}
	if err := s.db.CreateCollection(t.Context(), "products", options.CreateCollection().SetChangeStreamPreAndPostImages(images)); err != nil {
		t.Fatal(err)
	}
	return s
}

// ask asks the server.
func (s *shop) ask(ctx context.Context, method, path, body string, out any) error {
	request, err := http.NewRequestWithContext(ctx, method, "/"+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := s.es.Perform(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s: %w", path, response.Status, answer, err)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(answer, out)
}

// indices are those behind the alias.
func (s *shop) indices() (names []string) {
	s.Helper()
	var found map[string]any
	if err := s.ask(s.Context(), http.MethodGet, s.prefix+"catalogue-products/_alias", "", &found); err != nil {
		s.Fatal(err)
	}
	for name := range found {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// model is what is in the index of each market.
func (s *shop) model(ctx context.Context) (map[string]map[string]Entry, error) {
	if err := elasticsearch.New(s.es, elasticsearch.Prefix(s.prefix)).Refresh(ctx, "catalogue"); err != nil {
		return nil, err
	}
	model := map[string]map[string]Entry{}
	for _, market := range markets {
		var answer struct {
			Hits struct {
				Hits []found `json:"hits"`
			} `json:"hits"`
		}
		if err := s.ask(ctx, http.MethodPost, s.prefix+"catalogue-products-"+market+"/_search", `{"size": 10000}`, &answer); err != nil {
			return nil, err
		}
		model[market] = map[string]Entry{}
		for _, f := range answer.Hits.Hits {
			model[market][f.ID] = Entry(f.Entry)
		}
	}
	return model, nil
}

// product is a document of the source.
type product struct {
	ID      bson.ObjectID `bson:"_id"`
	Title   string        `bson:"title"`
	Tags    []string      `bson:"tags"`
	Cents   int64         `bson:"cents"`
	Market  string        `bson:"market"`
	Hidden  bool          `bson:"hidden"`
	Ignored int           `bson:"stock"`
}

// equal waits until the model is what the documents say.
func (s *shop) equal() {
	s.Helper()
	cur, err := s.db.Collection("products").Find(s.Context(), bson.D{})
	if err != nil {
		s.Fatal(err)
	}
	var products []product
	if err := cur.All(s.Context(), &products); err != nil {
		s.Fatal(err)
	}
	want := map[string]map[string]Entry{"eu": {}, "us": {}}
	for _, p := range products {
		if slices.Contains(markets, p.Market) && !p.Hidden {
			want[p.Market][p.ID.Hex()] = Entry{p.Title, p.Tags, p.Cents, p.Market}
		}
	}
	deadline := time.Now().Add(60 * time.Second)
	for {
		got, err := s.model(s.Context())
		diff := cmp.Diff(want, got)
		if err == nil && diff == "" {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("the model (+) is not the source (-): %v\n%.3000s", err, diff)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// start runs the command, or a runner; stop ends it as a signal does.
func (s *shop) start(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stopped := false
	stop = func() {
		if cancel(); stopped {
			return
		}
		stopped = true
		if err := <-ended; err != nil {
			s.Error(err)
		}
	}
	s.Cleanup(stop)
	return stop
}

func (s *shop) insert(p product) bson.ObjectID {
	s.Helper()
	p.ID = bson.NewObjectID()
	if _, err := s.db.Collection("products").InsertOne(s.Context(), p); err != nil {
		s.Fatal(err)
	}
	return p.ID
}

func (s *shop) set(id bson.ObjectID, field string, value any) {
	s.Helper()
	if _, err := s.db.Collection("products").UpdateByID(s.Context(), id, bson.D{{Key: "$set", Value: bson.D{{Key: field, Value: value}}}}); err != nil {
		s.Fatal(err)
	}
}

// change makes n changes at random, of products that nothing else is done to.
func (s *shop) change(n int) {
	s.Helper()
	for range n {
		market := []string{"eu", "us", "moon"}[s.random.IntN(3)]
		if len(s.ids) == 0 || s.random.IntN(5) < 2 {
			s.ids = append(s.ids, s.insert(product{
				Title: fmt.Sprint("thing ", s.random.IntN(100)), Tags: []string{market}, Cents: s.random.Int64N(1000), Market: market, Hidden: s.random.IntN(6) == 0,
			}))
			continue
		}
		i := s.random.IntN(len(s.ids))
		switch s.random.IntN(6) {
		case 0:
			if _, err := s.db.Collection("products").DeleteOne(s.Context(), bson.D{{Key: "_id", Value: s.ids[i]}}); err != nil {
				s.Fatal(err)
			}
			s.ids = slices.Delete(s.ids, i, i+1)
		case 1:
			s.set(s.ids[i], "hidden", s.random.IntN(2) == 0)
		case 2:
			s.set(s.ids[i], "market", market)
		case 3:
			s.set(s.ids[i], "stock", s.random.IntN(100)) // which the model does not have
		default:
			s.set(s.ids[i], "title", fmt.Sprint("thing ", s.random.IntN(100)))
		}
	}
}
