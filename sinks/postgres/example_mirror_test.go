package postgres_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// Customer is a document of the collection customers.
type Customer struct {
	Name   string   `bson:"name"`
	Tags   []string `bson:"tags"`
	Closed bool     `bson:"closed"`
}

// Contact is a row of crm.contacts. Its key is not here: it is the document's _id.
type Contact struct {
	Name string   `row:"name"`
	Tags []string `row:"tags,json"`
}

// Contact is a customer's row; closed ones have none.
func (c Customer) Contact() (Contact, bool) {
	return Contact{Name: c.Name, Tags: c.Tags}, !c.Closed
}

// A Mirror keeps one row for each document, or none, in a table whose key is the
// document's _id in its text form.
func Example_mirror() {
	ctx, stop := context.WithCancel(context.Background())
	db, pool, remove := open(ctx)
	defer remove()
	created := create(ctx, db, "customers")

	runner, err := projector.New(db, postgres.New(pool), postgres.Projection{
		Name: "crm", Version: 1,
		Bindings: postgres.Bindings{
			projector.Mirror("customers", Customer.Contact, postgres.Table[Contact]{Name: "contacts"}),
		},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		customers := db.Collection("customers")
		_, err := customers.InsertMany(ctx, []any{
			bson.M{"_id": 7, "name": "Ada", "tags": bson.A{"vip"}},
			bson.M{"_id": "acme", "name": "Acme Ltd"},
			bson.M{"_id": 9, "name": "Bob"},
		})
		if err != nil {
			return err
		}
		_, err = customers.UpdateByID(ctx, 9, bson.M{"$set": bson.M{"closed": true}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	rows, err := pool.Query(ctx, `select _id, name, coalesce(tags ->> 0, '-') from crm.contacts order by _id`)
	check(err)
	for rows.Next() {
		var id, name, tag string
		check(rows.Scan(&id, &name, &tag))
		fmt.Println(id, name, tag)
	}
	check(rows.Err())

	stop()
	check(<-ended)

	// Output:
	// 7 Ada vip
	// acme Acme Ltd -
}
