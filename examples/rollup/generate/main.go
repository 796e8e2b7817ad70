// The command generate writes to the collection orders what a shop would: new orders,
// changed amounts, orders that turn out to be of another day, some of it long ago, and
// deletions; some of them in transactions. It creates the collection, with the images that
// the projection needs, where it is missing.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

func main() {
	source := flag.String("mongodb", "", "connection string of a MongoDB replica set (default $MONGODB_URI)")
	database := flag.String("database", "shop", "the database to write to")
	createOnly := flag.Bool("create", false, "create the collection and write nothing")
	writes := flag.Int("writes", 1000, "orders to write")
	seed := flag.Uint64("seed", 1, "what is written depends on this number")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	client, err := mongo.Connect(options.Client().ApplyURI(cmp.Or(*source, os.Getenv("MONGODB_URI"))).SetWriteConcern(writeconcern.Majority()))
	if err == nil {
		db := client.Database(*database)
		if err = create(ctx, db); err == nil && !*createOnly {
			var done tally
			if done, err = write(ctx, db.Collection("orders"), *writes, *seed); err == nil {
				fmt.Println("generate:", done)
			}
		}
		err = errors.Join(err, client.Disconnect(context.WithoutCancel(ctx)))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

// create makes the collection, with an index by which the orders of a day are found. One
// that is there already gets its images switched on.
func create(ctx context.Context, db *mongo.Database) error {
	images := bson.D{{Key: "enabled", Value: true}}
	err := db.CreateCollection(ctx, "orders", options.CreateCollection().SetChangeStreamPreAndPostImages(images))
	var refused mongo.CommandError
	if errors.As(err, &refused) && refused.Name == "NamespaceExists" {
		err = db.RunCommand(ctx, bson.D{{Key: "collMod", Value: "orders"}, {Key: "changeStreamPreAndPostImages", Value: images}}).Err()
	}
	if err != nil {
		return err
	}
	_, err = db.Collection("orders").Indexes().CreateOne(ctx, mongo.IndexModel{Keys: bson.D{{Key: "placed", Value: 1}}})
	return err
}
