// The command ticketcounts keeps the number of tickets per status, for as long as it runs.
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
	database := flag.String("database", "helpdesk", "the database of $MONGODB_URI that has the collection tickets")
	sink := flag.String("sink", "postgres", "where the counts are kept: postgres, in $POSTGRES_DSN, or mongodb, beside the tickets")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first signal ends Run in good order, a second one the process
	if err := run(ctx, *database, *sink); err != nil {
		log.Fatal("ticketcounts has ended: ", err)
	}
}

func run(ctx context.Context, database, sink string) error {
	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
	if err != nil {
		return fmt.Errorf("$MONGODB_URI: %w", err)
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()
	db := client.Database(database)
	var runner *projector.Runner
	switch sink {
	case "mongodb":
		runner, err = projector.New(db, mongodb.New(db), CountsInMongoDB, projector.Options{Reconcile: reconcile.Snapshot{}})
	case "postgres":
		pool, poolErr := pgxpool.New(ctx, os.Getenv("POSTGRES_DSN"))
		if poolErr != nil {
			return poolErr
		}
		defer pool.Close()
		runner, err = projector.New(db, postgres.New(pool), CountsInPostgres, projector.Options{Reconcile: reconcile.Snapshot{}})
	default:
		err = fmt.Errorf("there is no sink %q, but postgres and mongodb", sink)
	}
	if err != nil {
		return err
	}
	return runner.Run(ctx)
}
