package postgres_test

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"net/url"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
)

// open gives the examples a database of their own on a MongoDB and on a PostgreSQL,
// and remove, which drops both.
func open(ctx context.Context) (db *mongo.Database, pool *pgxpool.Pool, remove func()) {
	name := "example_" + bson.NewObjectID().Hex()
	uri, err := serve.MongoDB(ctx)
	check(err)
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	check(err)

	dsn, err := serve.Postgres(ctx)
	check(err)
	admin, err := pgx.Connect(ctx, dsn)
	check(err)
	_, err = admin.Exec(ctx, "create database "+name)
	check(err)
	u, err := url.Parse(dsn)
	check(err)
	u.Path = "/" + name
	pool, err = pgxpool.New(ctx, u.String())
	check(err)

	return client.Database(name), pool, func() {
		ctx := context.WithoutCancel(ctx)
		pool.Close()
		_, err := admin.Exec(ctx, "drop database "+name+" with (force)")
		check(errors.Join(err, admin.Close(ctx), client.Database(name).Drop(ctx), client.Disconnect(ctx)))
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
