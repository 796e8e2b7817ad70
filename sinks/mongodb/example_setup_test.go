package mongodb_test

import (
	"context"
	"errors"
	"log"
	"log/slog"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
)

// open gives the examples two databases of their own, one to follow and one for the
// models, and remove, which drops both.
func open(ctx context.Context) (source, models *mongo.Database, remove func()) {
	m, err := server()
	check(err)
	client, err := connect(m.URI())
	check(err)
	name := "example_" + bson.NewObjectID().Hex()
	source, models = client.Database(name), client.Database(name+"_models")
	return source, models, func() {
		ctx := context.WithoutCancel(ctx)
		check(errors.Join(source.Drop(ctx), models.Drop(ctx), client.Disconnect(ctx)))
	}
}

// create makes a collection that keeps images, and gives the time from which on a
// projection has to read to see everything that is ever in it.
func create(ctx context.Context, db *mongo.Database, collection string) bson.Timestamp {
	created, err := projector.Written(ctx, db, func(ctx context.Context) error {
		return db.CreateCollection(ctx, collection, options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}}))
	})
	check(err)
	return created
}

// quiet keeps the runner's log out of the examples' output.
var quiet = slog.New(slog.DiscardHandler)

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}
