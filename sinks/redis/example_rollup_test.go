package redis_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// Ticket is a document of the collection tickets.
type Ticket struct {
	Status string `bson:"status"`
	Hours  int64  `bson:"hours"`
}

// Effort is a row of the hash by_status.
type Effort struct {
	Status  string `row:"status,key"`
	Tickets int64  `row:"tickets,sum"`
	Hours   int64  `row:"hours,sum"`
}

// Effort is what a ticket adds to the sums. Drafts add nothing: that is a filter.
func (t Ticket) Effort() []Effort {
	if t.Status == "draft" {
		return nil
	}
	return []Effort{{Status: t.Status, Tickets: 1, Hours: t.Hours}}
}

// A Rollup keeps sums per key, and readers ask for them by key: by the library, or by a
// script of their own.
func Example_rollup() {
	ctx, stop := context.WithCancel(context.Background())
	db, models, remove := open(ctx)
	defer remove()
	created := createCollection(ctx, db, "tickets")

	byStatus := redis.Hash[Effort]{Name: "by_status"}
	runner, err := projector.New(db, redis.New(models), redis.Projection{
		Name: "ticket_effort", Version: 1,
		Bindings: redis.Bindings{projector.Rollup("tickets", Ticket.Effort, byStatus)},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	// What is written in the function given to Written can be waited for.
	written, err := projector.Written(ctx, db, func(ctx context.Context) error {
		tickets := db.Collection("tickets")
		_, err := tickets.InsertMany(ctx, []any{
			bson.M{"_id": 1, "status": "open", "hours": 2},
			bson.M{"_id": 2, "status": "open", "hours": 5},
			bson.M{"_id": 3, "status": "waiting", "hours": 1},
			bson.M{"_id": 4, "status": "draft", "hours": 9},
		})
		if err != nil {
			return err
		}
		if _, err := tickets.UpdateByID(ctx, 2, bson.M{"$set": bson.M{"status": "solved"}, "$inc": bson.M{"hours": 3}}); err != nil {
			return err
		}
		_, err = tickets.DeleteOne(ctx, bson.M{"_id": 3})
		return err
	})
	check(err)
	check(runner.WaitFor(ctx, written))

	rows, err := byStatus.Get(ctx, models, "ticket_effort", "open", "solved", "waiting")
	check(err)
	for _, r := range rows {
		if r != nil {
			fmt.Printf("%s: %d tickets, %d hours\n", r.Status, r.Tickets, r.Hours)
		}
	}

	// The same without this package, as another language would.
	hours, err := models.Eval(ctx, `
		local place = redis.call('GET', KEYS[1])
		return redis.call('HGET', place .. ':by_status:' .. ARGV[1], 'hours')`,
		[]string{"{ticket_effort}:live"}, "solved").Result()
	check(err)
	fmt.Println("solved by script:", hours)

	stop()
	check(<-ended)

	// Output:
	// open: 1 tickets, 2 hours
	// solved: 1 tickets, 8 hours
	// solved by script: 8
}
