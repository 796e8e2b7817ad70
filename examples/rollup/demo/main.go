// The command demo shows what the daily revenue survives: a projection that is killed in
// the middle of a burst of writes, and one that is stopped for longer than MongoDB's history
// lasts. In the end what the Rollup and the Refresh have kept is compared with the source.
// The projection keeps its model in the database that it follows, or by -sink postgres in
// PostgreSQL.
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
		Example:    "rollup",
		Projection: "daily_revenue",
		Collection: "orders",
		Sinks:      []string{"mongodb", "postgres"},
		Compare:    compare,
		Equal:      "Rollup and Refresh equal the source, day by day",
	})
}

// compare puts the model's columns beside a fresh aggregation of the source.
func compare(ctx context.Context, w *demo.World) error {
	return errors.Join(compareColumn(ctx, w, "orders", 1), compareColumn(ctx, w, "cents", "$cents"))
}

// compareColumn does so with one of them, which is the sum of an operand.
func compareColumn(ctx context.Context, w *demo.World, column string, operand any) error {
	summed, err := w.Column(ctx, "summed", "day", column)
	if err != nil {
		return err
	}
	refreshed, err := w.Column(ctx, "refreshed", "_id", column)
	if err != nil {
		return err
	}
	source, err := aggregation(ctx, w.Source, operand)
	if err != nil {
		return err
	}
	return w.Equal("day", []string{column + ": Rollup", "Refresh", "source"}, summed, refreshed, source)
}

// aggregation is a sum per day, by the server's own knowledge of the example's zone.
func aggregation(ctx context.Context, db *mongo.Database, operand any) (map[string]int64, error) {
	day := bson.D{{Key: "date", Value: "$placed"}, {Key: "format", Value: "%Y-%m-%d"}, {Key: "timezone", Value: "Europe/Berlin"}}
	cur, err := db.Collection("orders").Aggregate(ctx, bson.A{bson.D{{Key: "$group", Value: bson.D{
		{Key: "_id", Value: bson.D{{Key: "$dateToString", Value: day}}},
		{Key: "sum", Value: bson.D{{Key: "$sum", Value: operand}}},
	}}}})
	if err != nil {
		return nil, err
	}
	var groups []struct {
		Day string `bson:"_id"`
		Sum int64  `bson:"sum"`
	}
	if err := cur.All(ctx, &groups); err != nil {
		return nil, err
	}
	sums := map[string]int64{}
	for _, g := range groups {
		sums[g.Day] = g.Sum
	}
	return sums, nil
}
