package main

import (
	"context"
	"slices"
	"time"
	_ "time/tzdata" // the zones, for machines that have none

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Shop is the calendar of the shop, whatever the zone of the process and of the servers is.
var Shop = In("Europe/Berlin")

// Order is what the model needs of a document of the collection orders.
type Order struct {
	Placed time.Time `bson:"placed"`
	Cents  int64     `bson:"cents"`
}

// Calendar knows the days of a zone. Its method day is the only place where a time becomes
// a day: not every server has the same rules of all zones.
type Calendar struct{ zone *time.Location }

// In is the calendar of a zone by its name, such as "America/Sao_Paulo". It panics where
// there is none: the zones are a part of the program.
func In(zone string) Calendar {
	location, err := time.LoadLocation(zone)
	if err != nil {
		panic(err)
	}
	return Calendar{location}
}

func (c Calendar) day(t time.Time) string { return t.In(c.zone).Format(time.DateOnly) }

// Of are the days that an order has a part in: that of its placing, or none before it, or
// where the year is none that a date is written with.
func (c Calendar) Of(o Order) []string {
	if year := o.Placed.UTC().Year(); year <= 1 || year >= 9999 {
		return nil
	}
	return []string{c.day(o.Placed)}
}

// Sums is what one order adds to the sums, a pure function of the order. The library
// subtracts what it gave before a change and adds what it gives after it, however old the
// day is.
func (c Calendar) Sums(o Order) (sums []Summed) {
	for _, day := range c.Of(o) {
		sums = append(sums, Summed{Day: day, Orders: 1, Cents: o.Cents})
	}
	return sums
}

// Recompute makes the rows of some days from all of their orders. By ctx it sees the
// source as of one time. A day without orders gets no row.
//
// The server adds up by quarters of an hour. Each of those lies within one day in every
// zone, since clocks differ by whole quarters (from 1972 on), so that the days are the
// calendar's.
func (c Calendar) Recompute(ctx context.Context, src *mongo.Database, days []string) (map[string]Refreshed, error) {
	placed, err := around(days)
	if err != nil {
		return nil, err
	}
	quarter := bson.D{{Key: "date", Value: "$placed"}, {Key: "unit", Value: "minute"}, {Key: "binSize", Value: 15}}
	cur, err := src.Collection("orders").Aggregate(ctx, bson.A{
		bson.D{{Key: "$match", Value: bson.D{{Key: "$or", Value: placed}}}},
		bson.D{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "$dateTrunc", Value: quarter}}},
			{Key: "orders", Value: bson.D{{Key: "$sum", Value: 1}}},
			{Key: "cents", Value: bson.D{{Key: "$sum", Value: "$cents"}}},
			{Key: "largest", Value: bson.D{{Key: "$max", Value: "$cents"}}},
		}}},
	})
	if err != nil {
		return nil, err
	}
	var quarters []struct {
		Begin                  time.Time `bson:"_id"`
		Orders, Cents, Largest int64
	}
	if err := cur.All(ctx, &quarters); err != nil {
		return nil, err
	}
	rows := map[string]Refreshed{}
	for _, q := range quarters {
		day := c.day(q.Begin)
		if !slices.Contains(days, day) {
			continue // a neighbour
		}
		row, known := rows[day]
		if !known {
			row.Largest = q.Largest
		}
		rows[day] = Refreshed{row.Orders + q.Orders, row.Cents + q.Cents, max(row.Largest, q.Largest)}
	}
	return rows, nil
}

// around gives conditions that hold for all times of some days, and for few others: a day
// of any zone lies within the day of that date in UTC and its neighbours.
func around(days []string) (conditions bson.A, err error) {
	type period struct{ from, to time.Time }
	var periods []period
	for _, day := range slices.Sorted(slices.Values(days)) {
		utc, err := time.Parse(time.DateOnly, day)
		if err != nil {
			return nil, err
		}
		next := period{utc.AddDate(0, 0, -1), utc.AddDate(0, 0, 2)}
		if n := len(periods); n > 0 && !periods[n-1].to.Before(next.from) {
			periods[n-1].to = next.to
			continue
		}
		periods = append(periods, next)
	}
	for _, p := range periods {
		conditions = append(conditions, bson.D{{Key: "placed", Value: bson.D{{Key: "$gte", Value: p.from}, {Key: "$lt", Value: p.to}}}})
	}
	return conditions, nil
}
