package main

import (
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// Ticket is what the model needs of a document of the collection tickets.
type Ticket struct {
	ID     bson.ObjectID `bson:"_id"`
	Status string        `bson:"status"`
}

// Count is a row of ticket_counts.counts: how many tickets have a status.
type Count struct {
	Status string `row:"status,key"`
	N      int64  `row:"n,sum"`
}

// Counts is what one ticket adds to the counts. It sees the ticket alone, and gives
// the same for the same ticket always: the library subtracts what it gave before a
// change and adds what it gives after it.
func (t Ticket) Counts() []Count { return []Count{{Status: t.Status, N: 1}} }

// The read model, in one database or the other. Whoever changes Counts raises Version.
var (
	CountsInPostgres = postgres.Projection{Name: "ticket_counts", Version: 1, Bindings: postgres.Bindings{
		projector.Rollup("tickets", Ticket.Counts, postgres.Table[Count]{Name: "counts"}),
	}}
	CountsInMongoDB = mongodb.Projection{Name: "ticket_counts", Version: 1, Bindings: mongodb.Bindings{
		projector.Rollup("tickets", Ticket.Counts, mongodb.Collection[Count]{Name: "counts"}),
	}}
)
