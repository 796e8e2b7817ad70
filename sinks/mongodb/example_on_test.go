package mongodb_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// Account is a document of the collection accounts.
type Account struct {
	Plan string `bson:"plan"`
}

// planChanges counts the changes of plan, and puts a message for each into an outbox,
// which another process empties. It asks for Change, so it is given the document
// before and after; with State it would be given the one after, with Touch none.
func planChanges(_ context.Context, tx *mongodb.Tx, c projector.Change[Account]) error {
	if c.Before == nil || c.After == nil || c.Before.Plan == c.After.Plan {
		return nil
	}
	// A collection of the model: plan_history.moves.
	tx.Collection("moves").Queue(mongo.NewUpdateOneModel().SetUpsert(true).
		SetFilter(bson.M{"_id": c.Before.Plan + " -> " + c.After.Plan}).
		SetUpdate(bson.M{"$inc": bson.M{"n": 1}}))
	// One that is not the model's, by its whole name.
	if !c.Replaying { // the message has been sent long ago
		tx.Outside("outbox").Queue(mongo.NewInsertOneModel().
			SetDocument(bson.M{"_id": c.ID(), "account": projector.KeyText(c.Key), "plan": c.After.Plan}))
	}
	return nil
}

// On hands the changes themselves to a handler, in the order of the stream, and the
// handler writes what it likes through tx: in the transaction that commits the
// position, so each change takes effect once.
func Example_on() {
	ctx, stop := context.WithCancel(context.Background())
	source, models, remove := open(ctx)
	defer remove()
	created := create(ctx, source, "accounts")

	runner, err := projector.New(source, mongodb.New(models), mongodb.Projection{
		Name: "plan_history", Version: 1,
		Bindings: mongodb.Bindings{
			projector.On("accounts", projector.Each(planChanges)),
		},
		Setup: func(ctx context.Context, tx *mongodb.Tx) error {
			return tx.Collection("moves").Create(ctx, mongo.IndexModel{Keys: bson.D{{Key: "n", Value: -1}}})
		},
		NoRebuild: true, // a history can't be computed from the current documents
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, source, func(ctx context.Context) error {
		accounts := source.Collection("accounts")
		for _, name := range []string{"ada", "bob"} {
			if _, err := accounts.InsertOne(ctx, bson.M{"_id": name, "plan": "free", "seats": 1}); err != nil {
				return err
			}
			for _, set := range []bson.M{{"seats": 2}, {"plan": "team"}} {
				if _, err := accounts.UpdateByID(ctx, name, bson.M{"$set": set}); err != nil {
					return err
				}
			}
		}
		_, err := accounts.DeleteOne(ctx, bson.M{"_id": "ada"})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	moves, err := mongodb.Live(ctx, models, "plan_history", "moves")
	check(err)
	for _, coll := range []*mongo.Collection{moves, models.Collection("outbox")} {
		found, err := coll.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
		check(err)
		var docs []bson.M
		check(found.All(ctx, &docs))
		for _, d := range docs {
			if d["n"] != nil {
				fmt.Println(d["_id"], d["n"])
			} else {
				fmt.Println("to", d["account"], "about", d["plan"])
			}
		}
	}

	stop()
	check(<-ended)

	// Output:
	// free -> team 2
	// to ada about team
	// to bob about team
}
