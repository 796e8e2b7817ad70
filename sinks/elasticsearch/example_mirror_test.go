package elasticsearch_test

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// Product is a document of the collection products.
type Product struct {
	SKU    string   `bson:"sku"`
	Title  string   `bson:"title"`
	Tags   []string `bson:"tags"`
	Hidden bool     `bson:"hidden"`
}

// Entry is a document of the search index. Its id is not here: it is the product's _id.
type Entry struct {
	SKU   string   `row:"sku"`
	Title string   `row:"title"`
	Tags  []string `row:"tags,json"`
}

// Entry is a product's document; hidden ones have none.
func (p Product) Entry() (Entry, bool) {
	return Entry{SKU: p.SKU, Title: p.Title, Tags: p.Tags}, !p.Hidden
}

// A Mirror keeps one document for each document of the source, or none. What the mapping
// does not name follows from the Go type.
func Example_mirror() {
	ctx, stop := context.WithCancel(context.Background())
	db, es, prefix, remove := open(ctx)
	defer remove()
	created := create(ctx, db, "products")

	sink := elasticsearch.New(es, prefix)
	runner, err := projector.New(db, sink, elasticsearch.Projection{
		Name: "shop", Version: 1,
		Bindings: elasticsearch.Bindings{
			projector.Mirror("products", Product.Entry, elasticsearch.Index[Entry]{
				Name:    "search",
				Mapping: `{"title": {"type": "text"}, "tags": {"type": "keyword"}}`,
			}),
		},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		products := db.Collection("products")
		_, err := products.InsertMany(ctx, []any{
			bson.M{"_id": 7, "sku": "b-7", "title": "A blue bolt", "tags": bson.A{"steel"}},
			bson.M{"_id": 8, "sku": "n-8", "title": "A nut for a blue bolt", "tags": bson.A{"brass"}},
			bson.M{"_id": 9, "sku": "b-9", "title": "Another bolt"},
		})
		if err != nil {
			return err
		}
		_, err = products.UpdateByID(ctx, 9, bson.M{"$set": bson.M{"hidden": true}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))
	check(sink.Refresh(ctx, "shop")) // a search sees what was written up to here

	search(es, sink.Alias("shop", "search"), `{"match": {"title": "BOLT"}}`)

	stop()
	check(<-ended)

	// Output:
	// 7 {"sku":"b-7","title":"A blue bolt","tags":["steel"]}
	// 8 {"sku":"n-8","title":"A nut for a blue bolt","tags":["brass"]}
}
