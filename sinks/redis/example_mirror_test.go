package redis_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// Product is a document of the collection products.
type Product struct {
	Title string   `bson:"title"`
	Cents int64    `bson:"cents"`
	Tags  []string `bson:"tags"`
	Sold  bool     `bson:"sold"`
}

// Card is what a shop window shows of a product.
type Card struct {
	Title string   `row:"title"`
	Cents int64    `row:"cents"`
	Tags  []string `row:"tags,json"`
}

func (p Product) Card() (Card, bool) { return Card{p.Title, p.Cents, p.Tags}, !p.Sold }

// A Mirror keeps a row per document: a cache that is never stale for longer than a commit,
// and from which nothing has to be invalidated.
func Example_mirror() {
	ctx, stop := context.WithCancel(context.Background())
	db, models, remove := open(ctx)
	defer remove()
	created := createCollection(ctx, db, "products")

	cards := redis.Hash[Card]{Name: "cards"}
	runner, err := projector.New(db, redis.New(models), redis.Projection{
		Name: "window", Version: 1,
		Bindings: redis.Bindings{projector.Mirror("products", Product.Card, cards)},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	id, sold := bson.NewObjectID(), bson.NewObjectID()
	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		_, err := db.Collection("products").InsertMany(ctx, []any{
			bson.M{"_id": id, "title": "lamp", "cents": 4900, "tags": bson.A{"home"}},
			bson.M{"_id": sold, "title": "chair", "cents": 9900},
		})
		if err != nil {
			return err
		}
		_, err = db.Collection("products").UpdateByID(ctx, sold, bson.M{"$set": bson.M{"sold": true}})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	// Rows of a Mirror are found by the text of the document's _id: of an ObjectID, its hex.
	found, err := cards.Get(ctx, models, "window", id.Hex(), sold.Hex())
	check(err)
	fmt.Println(*found[0], found[1] == nil)

	stop()
	check(<-ended)

	// Output:
	// {lamp 4900 [home]} true
}
