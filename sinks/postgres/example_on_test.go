package postgres_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// Account is a document of the collection accounts.
type Account struct {
	Plan string `bson:"plan"`
}

// planChanges writes a line for every change of an account's plan. It asks for
// Change, so it is given the document before and after; with State it would be given
// the one after, with Touch none.
func planChanges(_ context.Context, tx *postgres.Tx, c projector.Change[Account]) error {
	plan := func(a *Account) string {
		if a == nil {
			return "none" // there was, or there is, no such account
		}
		return a.Plan
	}
	before, after := plan(c.Before), plan(c.After)
	if before == after {
		return nil
	}
	tx.Queue(`insert into changes (id, account, before, after) values ($1, $2, $3, $4)`,
		c.ID(), projector.KeyText(c.Key), before, after)
	return nil
}

// On hands the changes themselves to a handler, in the order of the stream, and the
// handler writes what it likes through tx: in the transaction that commits the
// position, so each change takes effect once.
func Example_on() {
	ctx, stop := context.WithCancel(context.Background())
	db, pool, remove := open(ctx)
	defer remove()
	created := create(ctx, db, "accounts")

	runner, err := projector.New(db, postgres.New(pool), postgres.Projection{
		Name: "plan_history", Version: 1,
		Bindings: postgres.Bindings{
			projector.On("accounts", projector.Each(planChanges)),
		},
		Setup: func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.Exec(ctx, `create table changes (
				id text primary key, line bigint generated always as identity, account text, before text, after text)`)
			return err
		},
		NoRebuild: true, // a history can't be computed from the current documents
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		accounts := db.Collection("accounts")
		if _, err := accounts.InsertOne(ctx, bson.M{"_id": "ada", "plan": "free", "seats": 1}); err != nil {
			return err
		}
		for _, set := range []bson.M{{"seats": 2}, {"plan": "team"}} {
			if _, err := accounts.UpdateByID(ctx, "ada", bson.M{"$set": set}); err != nil {
				return err
			}
		}
		_, err := accounts.DeleteOne(ctx, bson.M{"_id": "ada"})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	rows, err := pool.Query(ctx, "select account, before, after from plan_history.changes order by line")
	check(err)
	for rows.Next() {
		var account, before, after string
		check(rows.Scan(&account, &before, &after))
		fmt.Printf("%s: %s -> %s\n", account, before, after)
	}
	check(rows.Err())

	stop()
	check(<-ended)

	// Output:
	// ada: none -> free
	// ada: free -> team
	// ada: team -> none
}
