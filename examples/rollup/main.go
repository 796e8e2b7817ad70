// The command rollup keeps the revenue per day, for as long as it runs.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func main() {
	database := flag.String("database", "shop", "the database of $MONGODB_URI that has the collection orders")
	sink := flag.String("sink", "mongodb", "where the revenue is kept: mongodb, beside the orders, or postgres, in $POSTGRES_DSN")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first signal ends Run in good order, a second one the process
	if err := run(ctx, *database, *sink, Shop); err != nil {
		log.Fatal("rollup has ended: ", err)
	}
}

func run(ctx context.Context, database, sink string, days Calendar) error {
	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
	if err != nil {
		return fmt.Errorf("$MONGODB_URI: %w", err)
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()
	db := client.Database(database)
	var runner *projector.Runner
	switch sink {
	case "mongodb":
		runner, err = projector.New(db, mongodb.New(db), InMongoDB(days), projector.Options{Reconcile: reconcile.Snapshot{}})
	case "postgres":
		pool, poolErr := pgxpool.New(ctx, os.Getenv("POSTGRES_DSN"))
		if poolErr != nil {
			return poolErr
		}
		defer pool.Close()
		runner, err = projector.New(db, postgres.New(pool), InPostgres(days), projector.Options{Reconcile: reconcile.Snapshot{}})
	default:
		err = fmt.Errorf("there is no sink %q, but mongodb and postgres", sink)
	}
	if err != nil {
		return err
	}
	return runner.Run(ctx)
}
