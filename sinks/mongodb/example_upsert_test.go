package mongodb_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// Order is a document that holds what will be rows of their own.
type Order struct {
	ID    string `bson:"_id"`
	State string `bson:"state"`
	Lines []struct {
		SKU      string `bson:"sku"`
		Quantity int64  `bson:"quantity"`
	} `bson:"lines"`
}

// Line is a row of orders.lines.
type Line struct {
	Order    string `row:"order_id,key"`
	SKU      string `row:"sku,key"`
	Quantity int64  `row:"quantity"`
}

// Rows are an order's lines.
func (o Order) Rows() []Line {
	lines := make([]Line, 0, len(o.Lines))
	for _, l := range o.Lines {
		lines = append(lines, Line{Order: o.ID, SKU: l.SKU, Quantity: l.Quantity})
	}
	return lines
}

// OpenOrder is a row of orders.open.
type OpenOrder struct {
	Lines []string `row:"skus,json"`
}

// Open is an order's row in orders.open, which only open orders have.
func (o Order) Open() (OpenOrder, bool) {
	row := OpenOrder{Lines: []string{}}
	for _, l := range o.Lines {
		row.Lines = append(row.Lines, l.SKU)
	}
	return row, o.State == "open"
}

// An Upsert keeps rows with keys of their own, any number of them for a document; rows
// that a changed document no longer gives are removed. A Mirror keeps one row per
// document, or none, under the document's own _id.
func Example_upsertAndMirror() {
	ctx, stop := context.WithCancel(context.Background())
	source, models, remove := open(ctx)
	defer remove()
	created := create(ctx, source, "orders")

	runner, err := projector.New(source, mongodb.New(models), mongodb.Projection{
		Name: "orders", Version: 1,
		Bindings: mongodb.Bindings{
			projector.Upsert("orders", Order.Rows, mongodb.Collection[Line]{Name: "lines"}),
			projector.Mirror("orders", Order.Open, mongodb.Collection[OpenOrder]{Name: "open"}),
		},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, source, func(ctx context.Context) error {
		orders := source.Collection("orders")
		for _, id := range []string{"A-1", "A-2"} {
			_, err := orders.InsertOne(ctx, bson.M{"_id": id, "state": "open", "lines": bson.A{
				bson.M{"sku": "bolt", "quantity": 40}, bson.M{"sku": "nut", "quantity": 40},
			}})
			if err != nil {
				return err
			}
		}
		_, err := orders.UpdateByID(ctx, "A-1", bson.M{"$set": bson.M{"state": "shipped", "lines": bson.A{
			bson.M{"sku": "bolt", "quantity": 50}, bson.M{"sku": "washer", "quantity": 80},
		}}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	for _, name := range []string{"lines", "open"} {
		coll, err := mongodb.Live(ctx, models, "orders", name)
		check(err)
		found, err := coll.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
		check(err)
		for found.Next(ctx) {
			text, err := bson.MarshalExtJSON(found.Current, false, false)
			check(err)
			fmt.Printf("%s: %s\n", name, text)
		}
		check(found.Err())
	}

	stop()
	check(<-ended)

	// Output:
	// lines: {"_id":{"order_id":"A-1","sku":"bolt"},"quantity":50,"_owner":"A-1"}
	// lines: {"_id":{"order_id":"A-1","sku":"washer"},"quantity":80,"_owner":"A-1"}
	// lines: {"_id":{"order_id":"A-2","sku":"bolt"},"quantity":40,"_owner":"A-2"}
	// lines: {"_id":{"order_id":"A-2","sku":"nut"},"quantity":40,"_owner":"A-2"}
	// open: {"_id":"A-2","skus":["bolt","nut"]}
}
