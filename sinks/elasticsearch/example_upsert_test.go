package elasticsearch_test

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// Order is a document of the collection orders.
type Order struct {
	ID     string `bson:"_id"`
	Region string `bson:"region"`
	Lines  []struct {
		SKU      string `bson:"sku"`
		Quantity int    `bson:"quantity"`
	} `bson:"lines"`
}

// Line is a document of the index, one for each line of an order.
type Line struct {
	Order    string `row:"order_id,key"`
	SKU      string `row:"sku,key"`
	Region   string `row:"region"`
	Quantity int    `row:"quantity"`
}

// Rows are an order's lines.
func (o Order) Rows() []Line {
	lines := make([]Line, 0, len(o.Lines))
	for _, l := range o.Lines {
		lines = append(lines, Line{Order: o.ID, SKU: l.SKU, Region: o.Region, Quantity: l.Quantity})
	}
	return lines
}

// lines are in an index for each region. One whose order moves to another region moves too.
var lines = elasticsearch.Index[Line]{
	Name: "lines", Routes: []string{"eu", "us"}, Route: func(l Line) string { return l.Region },
}

// An Upsert keeps rows with keys of their own, any number of them for a document. Rows
// that a changed document no longer gives are removed.
func Example_upsert() {
	ctx, stop := context.WithCancel(context.Background())
	db, es, prefix, remove := open(ctx)
	defer remove()
	created := create(ctx, db, "orders")

	sink := elasticsearch.New(es, prefix)
	runner, err := projector.New(db, sink, elasticsearch.Projection{
		Name: "orders", Version: 1,
		Bindings: elasticsearch.Bindings{projector.Upsert("orders", Order.Rows, lines)},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		orders := db.Collection("orders")
		_, err := orders.InsertOne(ctx, bson.M{"_id": "A-1", "region": "us", "lines": bson.A{
			bson.M{"sku": "bolt", "quantity": 40}, bson.M{"sku": "nut", "quantity": 40},
		}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))
	written, err = projector.Written(ctx, db, func(ctx context.Context) error {
		_, err := db.Collection("orders").UpdateByID(ctx, "A-1", bson.M{"$set": bson.M{"region": "eu", "lines": bson.A{
			bson.M{"sku": "bolt", "quantity": 50}, bson.M{"sku": "washer", "quantity": 80},
		}}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))
	check(sink.Refresh(ctx, "orders"))

	search(es, sink.Alias("orders", "lines"), `{"match_all": {}}`)
	search(es, sink.Alias("orders", "lines-us"), `{"match_all": {}}`) // nothing is left there

	stop()
	check(<-ended)

	// Output:
	// A-1|bolt {"order_id":"A-1","sku":"bolt","region":"eu","quantity":50,"tm_owner":"A-1"}
	// A-1|washer {"order_id":"A-1","sku":"washer","region":"eu","quantity":80,"tm_owner":"A-1"}
}
