package main

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// rawBulkWrite is the limit that a mirror into MongoDB is measured by: the driver's change stream is read to its end,
// nothing decoded, and beside it the documents that the mirror writes are written by unordered bulkWrites of upserts,
// without a transaction or a checkpoint. Neither waits for the other, and the documents are made beforehand. The time
// is that until both are done.
func rawBulkWrite(ctx context.Context, j job, _ *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	out, err := connect(ctx, j.Target, sinkDatabase)
	if err != nil {
		return r, err
	}
	writes, err := mirrored(j.Events / 2)
	if err != nil {
		return r, err
	}
	prepared := ownCPU()
	begin := time.Now()
	reading, stop := context.WithCancel(ctx)
	defer stop()
	read := make(chan error, 1)
	go func() { read <- readStream(reading, db, j) }()
	// As the sink's commits are, so that both are acknowledged by a majority.
	coll := out.Collection("orders", options.Collection().SetWriteConcern(writeconcern.Majority()))
	for len(writes) > 0 && err == nil {
		n := min(int(j.BatchSize), len(writes))
		_, err = coll.BulkWrite(ctx, writes[:n], options.BulkWrite().SetOrdered(false))
		writes = writes[n:]
	}
	if err != nil {
		stop()
	}
	if err := errors.Join(err, <-read); err != nil {
		return r, err
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()-prepared
	r.RSS, err = peakRSS()
	return r, errors.Join(err, out.Client().Disconnect(ctx), db.Client().Disconnect(ctx))
}

// mirrored are the mirror's writes, one for each event of the backlog.
func mirrored(orders int) ([]mongo.WriteModel, error) {
	writes := make([]mongo.WriteModel, 0, 2*orders)
	add := func(o order) error {
		replacement, err := bson.Marshal(bson.D{
			{Key: "number", Value: o.Number},
			{Key: "customer", Value: o.Customer},
			{Key: "status", Value: o.Status},
			{Key: "amount", Value: o.Amount},
		})
		if err != nil {
			return err
		}
		filter, err := bson.Marshal(bson.D{{Key: "_id", Value: o.ID}})
		writes = append(writes, mongo.NewReplaceOneModel().SetFilter(bson.Raw(filter)).SetReplacement(bson.Raw(replacement)).SetUpsert(true))
		return err
	}
	for n := range orders {
		if err := add(orderAt(n)); err != nil {
			return nil, err
		}
	}
	for _, n := range updateOrder(orders) {
		if err := add(changedOrder(n)); err != nil {
			return nil, err
		}
	}
	return writes, nil
}

// checkBulk compares what was written with the source, as for the mirror.
func checkBulk(ctx context.Context, t target, source *mongo.Collection) error {
	got, err := ordersIn(ctx, t.mongo.Collection("orders"))
	if err != nil {
		return err
	}
	return sameOrders(ctx, got, source)
}
