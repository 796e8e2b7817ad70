package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// workers write at once, each to orders of its own.
const workers = 8

// tally counts what was written.
type tally struct {
	inserts, amounts, moves, deletes int
	within                           int // how many of them in transactions
	took                             time.Duration
}

func (t tally) String() string {
	return fmt.Sprintf("%d writes: %d orders, %d changes of an amount, %d of a day, %d deletes; %d of them in transactions; took %s",
		t.inserts+t.amounts+t.moves+t.deletes, t.inserts, t.amounts, t.moves, t.deletes, t.within, t.took.Round(time.Millisecond))
}

func (t *tally) add(o tally) {
	t.inserts, t.amounts, t.moves, t.deletes = t.inserts+o.inserts, t.amounts+o.amounts, t.moves+o.moves, t.deletes+o.deletes
	t.within += o.within
}

// write shares the work, and the orders that exist, among the workers.
func write(ctx context.Context, orders *mongo.Collection, writes int, seed uint64) (done tally, err error) {
	begun := time.Now()
	cur, err := orders.Find(ctx, bson.D{}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return done, err
	}
	var existing []struct {
		ID bson.ObjectID `bson:"_id"`
	}
	if err := cur.All(ctx, &existing); err != nil {
		return done, err
	}
	all := make([]*worker, workers)
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range all {
		w := &worker{orders: orders, random: rand.New(rand.NewPCG(seed, uint64(i)))} //nolint:gosec // i is not negative
		for j := i; j < len(existing); j += workers {
			w.ids = append(w.ids, existing[j].ID)
		}
		share := (writes + i) / workers
		all[i] = w
		wg.Go(func() { errs[i] = w.run(ctx, share) })
	}
	wg.Wait()
	for _, w := range all {
		done.add(w.done)
	}
	done.took = time.Since(begun)
	return done, errors.Join(errs...)
}

type worker struct {
	orders *mongo.Collection
	random *rand.Rand
	ids    []bson.ObjectID
	done   tally
}

func (w *worker) run(ctx context.Context, share int) error {
	for share > 0 {
		n := 1
		if w.random.IntN(8) == 0 {
			n = min(share, 2+w.random.IntN(4))
		}
		share -= n
		writes := make([]mongo.WriteModel, n)
		for i := range writes {
			writes[i] = w.choose()
		}
		if err := w.perform(ctx, writes); err != nil {
			return err
		}
	}
	return nil
}

// choose decides on a write, and takes it for done. Each changes something.
func (w *worker) choose() mongo.WriteModel {
	if len(w.ids) == 0 || w.random.IntN(10) < 5 {
		id := bson.NewObjectID()
		w.ids = append(w.ids, id)
		w.done.inserts++
		return mongo.NewInsertOneModel().SetDocument(bson.D{
			{Key: "_id", Value: id}, {Key: "placed", Value: w.placed(14)}, {Key: "cents", Value: 100 + w.random.Int64N(10_000)},
		})
	}
	i := w.random.IntN(len(w.ids))
	one := bson.D{{Key: "_id", Value: w.ids[i]}}
	change := func(operator, field string, value any) mongo.WriteModel {
		return mongo.NewUpdateOneModel().SetFilter(one).SetUpdate(bson.D{{Key: operator, Value: bson.D{{Key: field, Value: value}}}})
	}
	switch n := w.random.IntN(10); {
	case n < 5:
		w.done.amounts++
		return change("$inc", "cents", 1+w.random.Int64N(500))
	case n < 7:
		w.done.moves++
		days := int64(14)
		if w.random.IntN(4) == 0 {
			days = 400
		}
		return change("$set", "placed", w.placed(days))
	}
	last := len(w.ids) - 1
	w.ids[i] = w.ids[last]
	w.ids = w.ids[:last]
	w.done.deletes++
	return mongo.NewDeleteOneModel().SetFilter(one)
}

// placed is a time within so many days up to now, to the millisecond.
func (w *worker) placed(days int64) time.Time {
	return time.Now().Add(-time.Duration(w.random.Int64N(days*24*3600*1000)) * time.Millisecond)
}

// perform carries writes out, several of them in one transaction.
func (w *worker) perform(ctx context.Context, writes []mongo.WriteModel) error {
	if len(writes) == 1 {
		_, err := w.orders.BulkWrite(ctx, writes)
		return err
	}
	session, err := w.orders.Database().Client().StartSession()
	if err != nil {
		return err
	}
	defer session.EndSession(context.WithoutCancel(ctx))
	_, err = session.WithTransaction(ctx, func(ctx context.Context) (any, error) { return w.orders.BulkWrite(ctx, writes) })
	w.done.within += len(writes)
	return err
}
