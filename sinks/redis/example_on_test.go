package redis_test

import (
	"context"
	"fmt"

	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// Account is a document of the collection accounts.
type Account struct {
	Name string `bson:"name"`
	Plan string `bson:"plan"`
	Cost int64  `bson:"cost"`
}

// leaders keeps the accounts sorted by cost, and tells another system of changed plans by a
// stream. It asks for Change, so it is given the document before and after.
func leaders(_ context.Context, tx *redis.Tx, c projector.Change[Account]) error {
	id := projector.KeyText(c.Key)
	if c.After == nil {
		tx.SortedSet("by_cost").Remove(id)
		return nil
	}
	tx.SortedSet("by_cost").Put(id, float64(c.After.Cost))
	if c.Before != nil && c.Before.Plan != c.After.Plan && !c.Replaying {
		tx.Outside().Stream("moves").Append("id", c.ID(), "account", id, "plan", c.After.Plan)
	}
	return nil
}

// On hands the changes themselves to a handler, which writes what it likes through Tx, a
// queue of commands: they are carried out together with the position, so each change takes
// effect once.
func Example_on() {
	ctx, stop := context.WithCancel(context.Background())
	db, models, remove := open(ctx)
	defer remove()
	created := createCollection(ctx, db, "accounts")

	runner, err := projector.New(db, redis.New(models), redis.Projection{
		Name: "leaders", Version: 1,
		Bindings: redis.Bindings{projector.On("accounts", projector.Each(leaders))},
		Reset:    func(_ context.Context, tx *redis.Tx) error { tx.Clear(); return nil },
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		accounts := db.Collection("accounts")
		for i, name := range []string{"ada", "bob", "eve"} {
			if _, err := accounts.InsertOne(ctx, bson.M{"_id": name, "plan": "free", "cost": i}); err != nil {
				return err
			}
		}
		if _, err := accounts.UpdateByID(ctx, "ada", bson.M{"$set": bson.M{"plan": "team", "cost": 90}}); err != nil {
			return err
		}
		_, err := accounts.DeleteOne(ctx, bson.M{"_id": "bob"})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	place, err := redis.Live(ctx, models, "leaders")
	check(err)
	top, err := models.ZRangeArgs(ctx, goredis.ZRangeArgs{Key: place + ":on:by_cost", Start: 0, Stop: -1, Rev: true}).Result()
	check(err)
	fmt.Println(top)
	moves, err := models.XRange(ctx, "{leaders}:outside:moves", "-", "+").Result()
	check(err)
	for _, m := range moves {
		fmt.Println(m.Values["account"], "is now on", m.Values["plan"])
	}

	stop()
	check(<-ended)

	// Output:
	// [ada eve]
	// ada is now on team
}
