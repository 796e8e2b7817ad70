// The command generate writes to the collection tickets what a help desk would: new
// tickets, changes of status, deletions, some of them in transactions. It creates the
// collection, with the images that the projection needs, where it is missing.
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
	var o load
	source := flag.String("mongodb", "", "connection string of a MongoDB replica set (default $MONGODB_URI)")
	database := flag.String("database", "helpdesk", "the database to write to")
	create := flag.Bool("create", false, "create the collection and write nothing")
	flag.IntVar(&o.writes, "writes", 1000, "documents to write, 0: until interrupted")
	flag.Float64Var(&o.rate, "rate", 0, "documents per second, 0: as fast as the server takes them")
	flag.IntVar(&o.workers, "workers", 8, "connections that write at once")
	flag.Uint64Var(&o.seed, "seed", 1, "what the writers choose depends on this number")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	client, err := mongo.Connect(options.Client().ApplyURI(cmp.Or(*source, os.Getenv("MONGODB_URI"))).SetWriteConcern(writeconcern.Majority()))
	if err == nil {
		err = run(ctx, client.Database(*database), *create, o)
		err = errors.Join(err, client.Disconnect(context.WithoutCancel(ctx)))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, db *mongo.Database, createOnly bool, o load) error {
	if err := create(ctx, db); err != nil || createOnly {
		return err
	}
	done, err := o.run(ctx, db.Collection("tickets"))
	fmt.Println("generate:", done)
	return err
}

// create makes the collection. One that is there already gets its images switched on.
func create(ctx context.Context, db *mongo.Database) error {
	images := bson.D{{Key: "enabled", Value: true}}
	err := db.CreateCollection(ctx, "tickets", options.CreateCollection().SetChangeStreamPreAndPostImages(images))
	var refused mongo.CommandError
	if errors.As(err, &refused) && refused.Name == "NamespaceExists" {
		err = db.RunCommand(ctx, bson.D{{Key: "collMod", Value: "tickets"}, {Key: "changeStreamPreAndPostImages", Value: images}}).Err()
	}
	return err
}
