package main

import (
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// Summed is a row of daily_revenue.summed, which a Rollup keeps.
type Summed struct {
	Day    string `row:"day,key"`
	Orders int64  `row:"orders,sum"`
	Cents  int64  `row:"cents,sum"`
}

// Refreshed is a row of daily_revenue.refreshed, which a Refresh keeps. Its _id is the day,
// and it can have what adding and subtracting would not keep.
type Refreshed struct {
	Orders  int64 `row:"orders"`
	Cents   int64 `row:"cents"`
	Largest int64 `row:"largest"`
}

// revenue is the read model, twice over. Whoever changes what is in a row raises Version.
func revenue[Tx any](days Calendar, summed projector.Adder[Tx, Summed], refreshed projector.Putter[Tx, Refreshed]) projector.Projection[Tx] {
	return projector.Projection[Tx]{Name: "daily_revenue", Version: 1, Bindings: []projector.Binding[Tx]{
		projector.Rollup("orders", days.Sums, summed), projector.Refresh(days.Recompute, refreshed, projector.Touches("orders", days.Of)),
	}}
}

// InMongoDB is the read model in MongoDB.
func InMongoDB(days Calendar) mongodb.Projection {
	return revenue(days, mongodb.Collection[Summed]{Name: "summed"}, mongodb.Collection[Refreshed]{Name: "refreshed"})
}

// InPostgres is the read model in PostgreSQL.
func InPostgres(days Calendar) postgres.Projection {
	return revenue(days, postgres.Table[Summed]{Name: "summed"}, postgres.Table[Refreshed]{Name: "refreshed"})
}
