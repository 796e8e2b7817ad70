package projector_test

import (
	"context"
	"fmt"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func ExampleKeyText() {
	id, _ := bson.ObjectIDFromHex("65f1c0ffee65f1c0ffee65f1")
	for _, key := range []any{
		id,
		"order-17",
		int64(42),
		42.0, // the same _id as int64(42), for MongoDB
		"42", // but not the same as this one
		bson.D{{Key: "shop", Value: "berlin"}, {Key: "n", Value: "7"}},
	} {
		t, value, err := bson.MarshalValue(key)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(projector.KeyText(bson.RawValue{Type: t, Value: value}))
	}

	// Output:
	// 65f1c0ffee65f1c0ffee65f1
	// order-17
	// 42
	// 42
	// "42"
	// {"shop":"berlin","n":"7"}
}

func ExampleUpdated_Has() {
	fields, err := bson.Marshal(bson.D{{Key: "address.city", Value: "Lyon"}})
	if err != nil {
		log.Fatal(err)
	}
	u := &projector.Updated{Fields: fields, Removed: []string{"phone"}}
	for _, path := range []string{"address.city", "address", "address.street", "phone", "name"} {
		fmt.Println(path, u.Has(path))
	}

	// Output:
	// address.city true
	// address true
	// address.street false
	// phone true
	// name false
}

// Everything that is wrong with a projection and its options is told at once.
func ExampleConfigError() {
	client, err := mongo.Connect()
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Disconnect(context.Background()) }()

	type Sum struct {
		Status string  `row:"status,key"`
		Price  float64 `row:"price,sum"`
		Since  string  `row:"Since,json b"`
	}
	prices := func(bson.M) []Sum { return nil }
	_, err = projector.New(client.Database("shop"), postgres.New(nil), postgres.Projection{
		Name: "Prices", Version: 1,
		Bindings: postgres.Bindings{projector.Rollup("orders", prices, postgres.Table[Sum]{Name: "prices"})},
	}, projector.Options{Start: projector.FromNow()})
	fmt.Println(err)

	// Output:
	// tidemark: projection "Prices" can't run:
	//   - Name is "Prices"; it must be lower-case letters, digits and underscores, a letter first, at most 40 of them
	//   - rollup into prices (orders): row type projector_test.Sum, field Price: sums of floats depend on their order; use int64 or bson.Decimal128
	//   - rollup into prices (orders): row type projector_test.Sum, field Since: bad column name "Since": it must be lower-case letters, digits and underscores, a letter first, at most 40 of them
	//   - rollup into prices (orders): row type projector_test.Sum, field Since: unknown option "json b"; there are key, sum and json
}
