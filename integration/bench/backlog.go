package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// order is a document of the source, about 200 bytes without a body.
type order struct {
	ID       bson.ObjectID `bson:"_id"`
	Number   int64         `bson:"number"`
	Customer string        `bson:"customer"`
	Status   string        `bson:"status"`
	Product  int64         `bson:"product"`
	Amount   int64         `bson:"amount"`
	Placed   time.Time     `bson:"placed"`
	Note     string        `bson:"note"`
	Body     string        `bson:"body,omitempty"`
}

var statuses = [...]string{"open", "paid", "sent"}

const products = 10_000

// orderAt is the order of that number as it is inserted. Nothing in it is random, so that every run has the same.
func orderAt(n int) order {
	return order{
		ID: orderID(n), Number: int64(n), Customer: fmt.Sprintf("customer-%06d", n*7919%50_000), Status: statuses[n%3],
		Product: int64(n * 104_729 % products), Amount: int64(100 + n%9_900),
		Placed: time.UnixMilli(1_767_225_600_000 + int64(n)*1000).UTC(), Note: "leave it at the door, please ring the bell",
	}
}

// changedOrder is the same order after its update.
func changedOrder(n int) order {
	o := orderAt(n)
	o.Status, o.Amount = statuses[(n+1+n/3%2)%3], o.Amount+int64(1+n%50)
	return o
}

func orderID(n int) (id bson.ObjectID) {
	binary.BigEndian.PutUint32(id[:4], 1_767_225_600)
	binary.BigEndian.PutUint64(id[4:], uint64(n))
	return id
}

// updateOrder is the order in which orders of the backlog are updated: not that of their insertion.
func updateOrder(n int) []int { return rand.New(rand.NewPCG(1, 2)).Perm(n) }

// backlog is a collection whose changes are drained: all orders inserted, then all updated.
type backlog struct {
	collection string
	orders     int
	start      bson.Timestamp // before the first change
	tail       int            // number of the first order inserted after middle
	middle     bson.Timestamp // as many inserts before the first update as the hand-written loop takes
}

func (b backlog) events() int { return 2 * b.orders }

// write fills a collection that keeps images. With a body, the orders carry one of that many bytes.
func (b *bench) write(ctx context.Context, collection string, orders, body int) (backlog, error) {
	log := backlog{collection: collection, orders: orders, tail: orders - min(loopEvents, orders)/2}
	fmt.Printf("writing %d inserts and as many updates into %s\n", orders, collection)
	var err error
	if log.start, err = b.create(ctx, collection); err != nil {
		return log, err
	}
	coll := b.db.Collection(collection)
	if err := insert(ctx, coll, 0, log.tail, body); err != nil {
		return log, err
	}
	if log.middle, err = b.next(ctx, collection); err != nil {
		return log, err
	}
	if err := insert(ctx, coll, log.tail, orders, body); err != nil {
		return log, err
	}
	var updates []mongo.WriteModel
	for i, n := range updateOrder(orders) {
		o := changedOrder(n)
		set := bson.D{{Key: "$set", Value: bson.D{{Key: "status", Value: o.Status}, {Key: "amount", Value: o.Amount}}}}
		updates = append(updates, mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: o.ID}}).SetUpdate(set))
		if len(updates) == 1000 || i == orders-1 {
			if _, err := coll.BulkWrite(ctx, updates, options.BulkWrite().SetOrdered(true)); err != nil {
				return log, err
			}
			updates = updates[:0]
		}
	}
	return log, nil
}

// create makes a collection that keeps images, and gives the time from which its changes come.
func (b *bench) create(ctx context.Context, collection string) (bson.Timestamp, error) {
	keep := options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}})
	if err := b.db.CreateCollection(ctx, collection, keep); err != nil {
		return bson.Timestamp{}, err
	}
	return b.next(ctx, collection)
}

func insert(ctx context.Context, coll *mongo.Collection, from, to, body int) error {
	size := 1000
	if body > 0 {
		size = 100
	}
	words := strings.Repeat("the quick brown fox jumps over the lazy dog; ", body/45+1)
	var docs []order
	for n := from; n < to; n++ {
		o := orderAt(n)
		o.Body = words[:body]
		docs = append(docs, o)
		if len(docs) == size || n == to-1 {
			if _, err := coll.InsertMany(ctx, docs); err != nil {
				return err
			}
			docs = docs[:0]
		}
	}
	return nil
}

// now is the time of the last change that a majority has.
func (b *bench) now(ctx context.Context, collection string) (t bson.Timestamp, err error) {
	reply, err := b.db.RunCommand(ctx, bson.D{
		{Key: "find", Value: collection},
		{Key: "limit", Value: 1},
		{Key: "singleBatch", Value: true},
		{Key: "projection", Value: bson.D{{Key: "_id", Value: 1}}},
		{Key: "readConcern", Value: bson.D{{Key: "level", Value: "majority"}}},
	}).Raw()
	if err != nil {
		return t, err
	}
	var ok bool
	if t.T, t.I, ok = reply.Lookup("operationTime").TimestampOK(); !ok {
		return t, errors.New("the source gives no operation time")
	}
	return t, nil
}

// next is the first time at which the next change can be.
func (b *bench) next(ctx context.Context, collection string) (bson.Timestamp, error) {
	t, err := b.now(ctx, collection)
	t.I++
	return t, err
}
