package main

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
)

// rawBatchSizes are tried in each round, for reading and for writing; the better one counts.
var rawBatchSizes = []int32{1000, 5000}

// rawDrain is the limit that models are measured by: the driver's change stream with the runner's filter, nothing
// decoded, nothing written.
func rawDrain(ctx context.Context, j job, _ *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	begin := time.Now()
	if err := readStream(ctx, db, j); err != nil {
		return r, err
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()
	r.RSS, err = peakRSS()
	return r, errors.Join(err, db.Client().Disconnect(ctx))
}

// readStream opens the change stream and reads as many events as the job says.
func readStream(ctx context.Context, db *mongo.Database, j job) error {
	cs, err := watch(ctx, db, j)
	if err != nil {
		return err
	}
	bytes := 0
	for range j.Events {
		if !cs.Next(ctx) {
			return errors.Join(errors.New("the stream has ended"), cs.Err())
		}
		bytes += len(cs.Current)
	}
	if bytes == 0 {
		return errors.New("the events are empty")
	}
	return cs.Close(ctx)
}

// connect makes the first contact, so that it isn't measured.
func connect(ctx context.Context, uri, database string) (*mongo.Database, error) {
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		return nil, err
	}
	return client.Database(database), client.Ping(ctx, readpref.Primary())
}

// watch opens the driver's change stream as the job says.
func watch(ctx context.Context, db *mongo.Database, j job) (*mongo.ChangeStream, error) {
	o := options.ChangeStream().SetStartAtOperationTime(&j.Start).SetMaxAwaitTime(50 * time.Millisecond).
		SetFullDocument(options.WhenAvailable)
	if j.BatchSize > 0 {
		o.SetBatchSize(j.BatchSize)
	}
	if j.PreImages {
		o.SetFullDocumentBeforeChange(options.WhenAvailable)
	}
	followed := bson.D{{Key: "$in", Value: bson.A{j.Collection}}}
	return db.Watch(ctx, mongo.Pipeline{{{Key: "$match", Value: bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "ns.coll", Value: followed}},
		bson.D{{Key: "to.coll", Value: followed}},
		bson.D{{Key: "operationType", Value: bson.D{{Key: "$in", Value: bson.A{"dropDatabase", "invalidate"}}}}},
	}}}}}}, o)
}
