// The command demo shows what the counts survive: a projection that is killed in the middle
// of a burst of writes, and one that is stopped for longer than MongoDB's history lasts. The
// projection keeps its model in PostgreSQL, or by -sink mongodb in the database that it
// follows.
package main

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/examples/internal/demo"
)

func main() {
	demo.Main(demo.Demo{
		Example:    "ticketcounts",
		Projection: "ticket_counts",
		Collection: "tickets",
		Sinks:      []string{"postgres", "mongodb"},
		Compare:    compare,
		Equal:      "counts equal the source",
	})
}

// compare puts the counts beside a fresh aggregation of the source.
func compare(ctx context.Context, w *demo.World) error {
	model, err := w.Column(ctx, "counts", "status", "n")
	if err != nil {
		return err
	}
	source, err := aggregation(ctx, w.Source)
	if err != nil {
		return err
	}
	return w.Equal("status", []string{"model", "source"}, model, source)
}

func aggregation(ctx context.Context, db *mongo.Database) (map[string]int64, error) {
	cur, err := db.Collection("tickets").Aggregate(ctx, bson.A{bson.D{{Key: "$sortByCount", Value: "$status"}}})
	if err != nil {
		return nil, err
	}
	var groups []struct {
		Status string `bson:"_id"`
		Count  int64  `bson:"count"`
	}
	if err := cur.All(ctx, &groups); err != nil {
		return nil, err
	}
	counts := map[string]int64{}
	for _, g := range groups {
		counts[g.Status] = g.Count
	}
	return counts, nil
}
