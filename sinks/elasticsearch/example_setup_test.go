package elasticsearch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"strings"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// open gives the examples a database of their own on a MongoDB, a client and a prefix of
// their own on an Elasticsearch, and remove, which removes both.
func open(ctx context.Context) (db *mongo.Database, es *elastictransport.Client, prefix elasticsearch.Option, remove func()) {
	name := "example_" + bson.NewObjectID().Hex()
	uri, err := serve.MongoDB(ctx)
	check(err)
	source, err := mongo.Connect(options.Client().ApplyURI(uri))
	check(err)
	url, err := server()
	check(err)
	connections := &http.Transport{}
	es, err = transport(url, connections)
	check(err)
	return source.Database(name), es, elasticsearch.Prefix(name + "-"), func() {
		ctx := context.WithoutCancel(ctx)
		var found map[string]any
		request(es, http.MethodGet, "/"+name+"-*/_alias", "", &found)
		for index := range found {
			request(es, http.MethodDelete, "/"+index, "", nil)
		}
		connections.CloseIdleConnections()
		check(errors.Join(source.Database(name).Drop(ctx), source.Disconnect(ctx)))
	}
}

// search prints the documents that match, by their ids.
func search(es *elastictransport.Client, alias, query string) {
	var found struct {
		Hits struct {
			Hits []hit `json:"hits"`
		} `json:"hits"`
	}
	request(es, http.MethodPost, "/"+alias+"/_search", `{"sort": "sku", "query": `+query+`}`, &found)
	for _, h := range found.Hits.Hits {
		fmt.Println(h.ID, string(h.Source))
	}
}

func request(es *elastictransport.Client, method, path, body string, out any) {
	req, err := http.NewRequest(method, path, strings.NewReader(body))
	check(err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := es.Perform(req)
	check(err)
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	check(err)
	if resp.StatusCode >= 300 {
		check(fmt.Errorf("%s %s: %s", method, path, answer))
	}
	if out != nil {
		check(json.Unmarshal(answer, out))
	}
}

// create makes a collection that keeps images, and gives the time from which on a
// projection has to read to see everything that is ever in it.
func create(ctx context.Context, db *mongo.Database, collection string) bson.Timestamp {
	created, err := projector.Written(ctx, db, func(ctx context.Context) error {
		return db.CreateCollection(ctx, collection, options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}}))
	})
	check(err)
	return created
}

// quiet keeps the runner's log out of the examples' output.
var quiet = slog.New(slog.DiscardHandler)

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}
