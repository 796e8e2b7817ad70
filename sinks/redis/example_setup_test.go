package redis_test

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
)

// source is the examples' MongoDB.
var source = sync.OnceValues(func() (*serve.Mongod, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return serve.StartMongod(ctx, serve.MongodOptions{})
})

// open gives the examples a database to follow and a Redis of their own for the models, and
// remove, which ends both.
func open(ctx context.Context) (db *mongo.Database, models *goredis.Client, remove func()) {
	m, err := source()
	check(err)
	client, err := mongo.Connect(options.Client().ApplyURI(m.URI()))
	check(err)
	s, err := server()
	check(err)
	db = client.Database("example_" + bson.NewObjectID().Hex())
	models = goredis.NewClient(&goredis.Options{Addr: s.Addr(), DB: int(lastDatabase.Add(1)), ContextTimeoutEnabled: true})
	return db, models, func() {
		ctx := context.WithoutCancel(ctx)
		check(errors.Join(db.Drop(ctx), client.Disconnect(ctx), models.Close()))
	}
}

// createCollection makes a collection that keeps images, and gives the time from which on a
// projection has to read to see everything that is ever in it.
func createCollection(ctx context.Context, db *mongo.Database, collection string) bson.Timestamp {
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
