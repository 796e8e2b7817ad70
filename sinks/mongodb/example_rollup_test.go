package mongodb_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// Ticket is a document of the collection tickets.
type Ticket struct {
	Status string `bson:"status"`
	Hours  int64  `bson:"hours"`
}

// Effort is a row of ticket_effort.by_status.
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

// A Rollup keeps sums per key. A document that is changed moves its contribution from
// one key to another; a row goes with its last contribution.
func Example_rollup() {
	ctx, stop := context.WithCancel(context.Background())
	source, models, remove := open(ctx)
	defer remove()
	created := create(ctx, source, "tickets")

	runner, err := projector.New(source, mongodb.New(models), mongodb.Projection{
		Name: "ticket_effort", Version: 1,
		Bindings: mongodb.Bindings{
			projector.Rollup("tickets", Ticket.Effort, mongodb.Collection[Effort]{Name: "by_status"}),
		},
	}, projector.Options{Start: projector.FromTime(created), Logger: quiet})
	check(err)
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()

	// What is written in the function given to Written can be waited for.
	written, err := projector.Written(ctx, source, func(ctx context.Context) error {
		tickets := source.Collection("tickets")
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

	// Readers ask for the collection that is live: a rebuild makes another.
	live, err := mongodb.Live(ctx, models, "ticket_effort", "by_status")
	check(err)
	found, err := live.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	check(err)
	var rows []struct {
		Key struct {
			Status string `bson:"status"`
		} `bson:"_id"`
		Tickets int64 `bson:"tickets"`
		Hours   int64 `bson:"hours"`
	}
	check(found.All(ctx, &rows))
	for _, r := range rows {
		fmt.Printf("%s: %d tickets, %d hours\n", r.Key.Status, r.Tickets, r.Hours)
	}

	stop()
	check(<-ended)

	// Output:
	// open: 1 tickets, 2 hours
	// solved: 1 tickets, 8 hours
}
