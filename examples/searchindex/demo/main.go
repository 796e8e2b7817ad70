// The command demo shows what a search index survives: a projection that is killed in the
// middle of a burst of writes, and one that is stopped for longer than MongoDB's history
// lasts, after which the index is rebuilt behind its alias. In the end it is searched, and
// compared with the source.
package main

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/examples/internal/demo"
)

func main() {
	demo.Main(demo.Demo{
		Example:    "searchindex",
		Projection: "catalogue",
		Collection: "products",
		Sinks:      []string{"elasticsearch"},
		Compare:    compare,
		Equal:      "the indices equal the source, product by product",
	})
}

// compare searches, and puts the prices in the index of each market beside the source's.
func compare(ctx context.Context, w *demo.World) error {
	if err := w.Show(ctx, "-search", "red lamp", "-market", "eu"); err != nil {
		return err
	}
	var differs []error
	for _, market := range []string{"eu", "us"} {
		model, err := w.Column(ctx, "products-"+market, "_id", "cents")
		if err != nil {
			return err
		}
		source, err := prices(ctx, w.Source, market)
		if err != nil {
			return err
		}
		differs = append(differs, w.Equal(market, []string{"cents: model", "source"}, model, source))
	}
	return errors.Join(differs...)
}

func prices(ctx context.Context, db *mongo.Database, market string) (map[string]int64, error) {
	cur, err := db.Collection("products").Find(ctx, bson.D{{Key: "market", Value: market}, {Key: "hidden", Value: false}})
	if err != nil {
		return nil, err
	}
	var products []struct {
		ID    bson.ObjectID `bson:"_id"`
		Cents int64         `bson:"cents"`
	}
	if err := cur.All(ctx, &products); err != nil {
		return nil, err
	}
	cents := map[string]int64{}
	for _, p := range products {
		cents[p.ID.Hex()] = p.Cents
	}
	return cents, nil
}
