// The command generate writes to the collection products what a shop's staff would: new
// products, other titles and prices, products that move to another market, that are hidden
// and shown again, and deletions. It creates the collection, with the image that the
// projection needs, where it is missing.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// workers write at once, each to products of its own.
const workers = 8

func main() {
	source := flag.String("mongodb", "", "connection string of a MongoDB replica set (default $MONGODB_URI)")
	database := flag.String("database", "shop", "the database to write to")
	createOnly := flag.Bool("create", false, "create the collection and write nothing")
	writes := flag.Int("writes", 1000, "products to write")
	seed := flag.Uint64("seed", 1, "what is written depends on this number")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	client, err := mongo.Connect(options.Client().ApplyURI(cmp.Or(*source, os.Getenv("MONGODB_URI"))).SetWriteConcern(writeconcern.Majority()))
	if err == nil {
		db := client.Database(*database)
		if err = create(ctx, db); err == nil && !*createOnly {
			err = write(ctx, db.Collection("products"), *writes, *seed)
		}
		err = errors.Join(err, client.Disconnect(context.WithoutCancel(ctx)))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

// create makes the collection. One that is there already gets its images switched on.
func create(ctx context.Context, db *mongo.Database) error {
	images := bson.D{{Key: "enabled", Value: true}}
	err := db.CreateCollection(ctx, "products", options.CreateCollection().SetChangeStreamPreAndPostImages(images))
	var refused mongo.CommandError
	if errors.As(err, &refused) && refused.Name == "NamespaceExists" {
		err = db.RunCommand(ctx, bson.D{{Key: "collMod", Value: "products"}, {Key: "changeStreamPreAndPostImages", Value: images}}).Err()
	}
	return err
}

// product is a document of the collection.
type product struct {
	ID     bson.ObjectID `bson:"_id"`
	Title  string        `bson:"title"`
	Tags   []string      `bson:"tags"`
	Cents  int64         `bson:"cents"`
	Market string        `bson:"market"`
	Hidden bool          `bson:"hidden"`
}

// write shares the work, and the products that exist, among the workers.
func write(ctx context.Context, products *mongo.Collection, writes int, seed uint64) error {
	cur, err := products.Find(ctx, bson.D{})
	if err != nil {
		return err
	}
	var existing []product
	if err := cur.All(ctx, &existing); err != nil {
		return err
	}
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range workers {
		w := worker{coll: products, random: rand.New(rand.NewPCG(seed, uint64(i)))} //nolint:gosec // i is not negative
		for j := i; j < len(existing); j += workers {
			w.products = append(w.products, existing[j])
		}
		wg.Go(func() {
			for range (writes + i) / workers {
				if errs[i] = w.write(ctx); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	fmt.Printf("generate: %d writes\n", writes)
	return nil
}

type worker struct {
	coll     *mongo.Collection
	random   *rand.Rand
	products []product
}

var (
	colours = []string{"red", "green", "blue", "black", "white", "golden"}
	things  = []string{"lamp", "chair", "table", "kettle", "carpet", "clock", "mirror"}
	rooms   = []string{"kitchen", "hall", "bath", "office"}
	markets = []string{"eu", "us", "elsewhere"}
)

func (w *worker) one(of []string) string { return of[w.random.IntN(len(of))] }

func (w *worker) title() string { return w.one(colours) + " " + w.one(things) }

// write makes one change, which is never none.
func (w *worker) write(ctx context.Context) (err error) {
	if len(w.products) == 0 || w.random.IntN(10) < 4 {
		p := product{
			ID: bson.NewObjectID(), Title: w.title(), Tags: []string{w.one(rooms), w.one(rooms)},
			Cents: 100 + w.random.Int64N(100_000), Market: w.one(markets), Hidden: w.random.IntN(8) == 0,
		}
		w.products = append(w.products, p)
		_, err = w.coll.InsertOne(ctx, p)
		return err
	}
	i := w.random.IntN(len(w.products))
	p := &w.products[i]
	id := bson.D{{Key: "_id", Value: p.ID}}
	switch w.random.IntN(6) {
	case 0:
		_, err = w.coll.DeleteOne(ctx, id)
		last := len(w.products) - 1
		w.products[i] = w.products[last]
		w.products = w.products[:last]
		return err
	case 1:
		p.Hidden = !p.Hidden
	case 2:
		for before := p.Market; p.Market == before; {
			p.Market = w.one(markets)
		}
	default:
		p.Title = w.title()
		p.Cents += 1 + w.random.Int64N(1000)
	}
	_, err = w.coll.ReplaceOne(ctx, id, p)
	return err
}
