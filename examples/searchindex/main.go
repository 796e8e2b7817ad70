// The command searchindex keeps a catalogue that can be searched, for as long as it runs; or
// it searches it.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

func main() {
	database := flag.String("database", "shop", "the database of $MONGODB_URI that has the collection products")
	prefix := flag.String("prefix", "", "what all names in $ELASTICSEARCH_URL begin with")
	words := flag.String("search", "", "search the catalogue for these words, instead of keeping it")
	market := flag.String("market", "", "where to search: eu, us, or everywhere")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first signal ends Run in good order, a second one the process
	server, err := url.Parse(os.Getenv("ELASTICSEARCH_URL"))
	if err != nil {
		log.Fatal(err)
	}
	es, err := elastictransport.NewClient(elastictransport.WithURLs(server))
	if err == nil && *words != "" {
		err = search(ctx, es, *prefix, *market, *words)
	} else if err == nil {
		err = run(ctx, es, *database, *prefix)
	}
	if err != nil {
		log.Fatal("searchindex has ended: ", err)
	}
}

func run(ctx context.Context, es elasticsearch.Client, database, prefix string) error {
	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
	if err != nil {
		return fmt.Errorf("$MONGODB_URI: %w", err)
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()
	sink := elasticsearch.New(es, elasticsearch.Prefix(prefix))
	runner, err := projector.New(client.Database(database), sink, Catalogue, projector.Options{Reconcile: reconcile.Snapshot{}})
	if err != nil {
		return err
	}
	return runner.Run(ctx)
}
