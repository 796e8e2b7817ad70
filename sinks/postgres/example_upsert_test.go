package postgres_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// Order is a document that holds what will be rows of their own.
type Order struct {
	ID    string `bson:"_id"`
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

// An Upsert keeps rows with keys of their own, any number of them for a document. Rows
// that a changed document no longer gives are removed.
func Example_upsert() {
	ctx, stop := context.WithCancel(context.Background())
	db, pool, remove := open(ctx)
	defer remove()
	created := create(ctx, db, "orders")

	runner, err := projector.New(db, postgres.New(pool), postgres.Projection{
		Name: "orders", Version: 1,
		Bindings: postgres.Bindings{
			projector.Upsert("orders", Order.Rows, postgres.Table[Line]{Name: "lines"}),
		},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		orders := db.Collection("orders")
		_, err := orders.InsertOne(ctx, bson.M{"_id": "A-1", "lines": bson.A{
			bson.M{"sku": "bolt", "quantity": 40}, bson.M{"sku": "nut", "quantity": 40},
		}})
		if err != nil {
			return err
		}
		_, err = orders.UpdateByID(ctx, "A-1", bson.M{"$set": bson.M{"lines": bson.A{
			bson.M{"sku": "bolt", "quantity": 50}, bson.M{"sku": "washer", "quantity": 80},
		}}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	rows, err := pool.Query(ctx, "select order_id, sku, quantity from orders.lines order by order_id, sku")
	check(err)
	for rows.Next() {
		var l Line
		check(rows.Scan(&l.Order, &l.SKU, &l.Quantity))
		fmt.Println(l.Order, l.SKU, l.Quantity)
	}
	check(rows.Err())

	stop()
	check(<-ended)

	// Output:
	// A-1 bolt 50
	// A-1 washer 80
}
