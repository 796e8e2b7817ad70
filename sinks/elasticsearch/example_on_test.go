package elasticsearch_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// Item is a document of the collection items.
type Item struct {
	SKU   string `bson:"sku"`
	Price int64  `bson:"price"`
}

// Price is what became of an item's price, a document for each change of it.
type Price struct {
	Change string `row:"change,key"`
	SKU    string `row:"sku"`
	From   *int64 `row:"from_price"`
	To     int64  `row:"to_price"`
}

var prices = elasticsearch.Index[Price]{Name: "prices"}

// priceChanges writes through an Index, as pure forms do: by the change's Version, and
// under an id that is the same whenever the change is delivered.
func priceChanges(ctx context.Context, tx *elasticsearch.Tx, changes []projector.Change[Item]) error {
	var rows []projector.Row[Price]
	for _, c := range changes {
		if c.After == nil || c.Before != nil && c.Before.Price == c.After.Price {
			continue
		}
		p := Price{Change: c.ID(), SKU: c.After.SKU, To: c.After.Price}
		if c.Before != nil {
			p.From = &c.Before.Price
		}
		rows = append(rows, projector.Row[Price]{Owner: c.Key, Version: c.Version, Row: &p})
	}
	return prices.Put(ctx, tx, nil, rows)
}

// On hands the changes themselves to a handler, in the order of the stream. It makes its
// own targets in Setup.
func Example_on() {
	ctx, stop := context.WithCancel(context.Background())
	db, es, prefix, remove := open(ctx)
	defer remove()
	created := create(ctx, db, "items")

	sink := elasticsearch.New(es, prefix)
	runner, err := projector.New(db, sink, elasticsearch.Projection{
		Name: "price_history", Version: 1,
		Bindings:  elasticsearch.Bindings{projector.On("items", priceChanges)},
		Setup:     prices.Create,
		NoRebuild: true, // a history can't be computed from the current documents
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		items := db.Collection("items")
		if _, err := items.InsertOne(ctx, bson.M{"_id": 1, "sku": "bolt", "price": 5}); err != nil {
			return err
		}
		_, err := items.UpdateByID(ctx, 1, bson.M{"$set": bson.M{"price": 7}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))
	check(sink.Refresh(ctx, "price_history"))

	var found struct {
		Count int `json:"count"`
	}
	request(es, "POST", "/"+sink.Alias("price_history", "prices")+"/_count", `{"query": {"range": {"to_price": {"gt": 5}}}}`, &found)
	fmt.Println(found.Count)

	stop()
	check(<-ended)

	// Output: 1
}
