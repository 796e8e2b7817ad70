package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

func id(v any) bson.D { return bson.D{{Key: "_id", Value: v}} }

// Every method writes and reads in the transaction, whatever context it is given:
// none of it is there after a rollback.
func TestTxMethods(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	everything := func(_ context.Context, tx *mongodb.Tx) error {
		ctx := context.Background()
		c := tx.Collection("things")
		equal(t, "name", c.Name(), "model.things")
		must(t, c.Create(ctx, mongo.IndexModel{Keys: bson.D{{Key: "x", Value: 1}}, Options: options.Index().SetUnique(true)}))
		c.Queue(mongo.NewInsertOneModel().SetDocument(bson.D{{Key: "_id", Value: 1}, {Key: "x", Value: 1}}))
		tx.Outside("outbox").Queue(mongo.NewInsertOneModel().SetDocument(id("m")))
		c.Queue(mongo.NewInsertOneModel().SetDocument(bson.D{{Key: "_id", Value: 2}, {Key: "x", Value: 2}}))
		n, err := c.CountDocuments(ctx, bson.D{}) // after what is queued
		must(t, err)
		equal(t, "count", n, 2)
		_, err = c.InsertOne(ctx, bson.D{{Key: "_id", Value: 3}, {Key: "x", Value: 3}})
		must(t, err)
		_, err = c.InsertMany(ctx, []any{bson.D{{Key: "_id", Value: 4}, {Key: "x", Value: 4}}, bson.D{{Key: "_id", Value: 5}, {Key: "x", Value: 5}}})
		must(t, err)
		_, err = c.UpdateOne(ctx, id(1), bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: 1}}}})
		must(t, err)
		u, err := c.UpdateMany(ctx, bson.D{}, bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: 1}}}})
		must(t, err)
		equal(t, "updated", u.ModifiedCount, 5)
		_, err = c.ReplaceOne(ctx, id(2), bson.D{{Key: "x", Value: 22}})
		must(t, err)
		_, err = c.DeleteOne(ctx, id(3))
		must(t, err)
		_, err = c.DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$gte", Value: 5}}}})
		must(t, err)
		_, err = c.BulkWrite(ctx, []mongo.WriteModel{mongo.NewInsertOneModel().SetDocument(bson.D{{Key: "_id", Value: 6}, {Key: "x", Value: 6}})})
		must(t, err)
		must(t, c.FindOneAndUpdate(ctx, id(6), bson.D{{Key: "$set", Value: bson.D{{Key: "x", Value: 66}}}}).Err())
		var doc struct{ X int }
		must(t, c.FindOne(ctx, id(6)).Decode(&doc))
		equal(t, "x", doc.X, 66)
		if err := c.FindOne(ctx, id(7)).Err(); !errors.Is(err, mongo.ErrNoDocuments) {
			t.Error(err)
		}
		for _, find := range []func() (*mongo.Cursor, error){
			func() (*mongo.Cursor, error) { return c.Find(ctx, bson.D{}, options.Find().SetBatchSize(2)) },
			func() (*mongo.Cursor, error) { return c.Aggregate(ctx, bson.A{}, options.Aggregate().SetBatchSize(2)) },
		} {
			cur, err := find()
			must(t, err)
			var docs []bson.D
			must(t, cur.All(ctx, &docs))
			equal(t, "documents", len(docs), 4)
		}
		for _, name := range []string{"tidemark.checkpoints", "tidemark", "system.x"} {
			if _, err := tx.Outside(name).DeleteMany(ctx, bson.D{}); err == nil {
				t.Errorf("%s can be written to", name)
			}
		}
		return nil
	}
	// What the handler may not name is Fatal, and was ignored there: so it is reported.
	_, err := commit(t, d.sink, cp, everything)
	wantError(t, err, "the handler returned no error", "not for handlers to write")
	wantClass(t, d.sink, err, projector.Fatal)
	names, err := d.ListCollectionNames(t.Context(), bson.D{})
	must(t, err)
	equal(t, "collections", fmt.Sprint(names), "[tidemark.checkpoints]")
}

func TestTxIsOver(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	var kept *mongodb.Tx
	_, err := commit(t, d.sink, cp, func(_ context.Context, tx *mongodb.Tx) error { kept = tx; return nil })
	must(t, err)
	c := kept.Collection("things")
	_, err = c.InsertOne(t.Context(), bson.D{})
	wantError(t, err, "the transaction is over")
	wantError(t, c.FindOne(t.Context(), bson.D{}).Err(), "the transaction is over")
	wantError(t, c.Create(t.Context()), "the transaction is over")
	wantError(t, counts.Add(t.Context(), kept, nil, []count{{"a", 1}}), "the transaction is over")
	equal(t, "rows", d.rows(t, "things"), "")
}

type order struct {
	Status string `bson:"status"`
}

func (o order) Counts() []count { return []count{{o.Status, 1}} }

// The model is in the watched database itself, and another projection follows it.
func TestSinkInTheWatchedDatabase(t *testing.T) {
	d := newDatabase(t)
	images := options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}})
	must(t, d.CreateCollection(t.Context(), "orders", images))
	var seen atomic.Int64
	runner, err := projector.New(d.Database, d.sink, mongodb.Projection{
		Name: model, Version: 1,
		Bindings: mongodb.Bindings{
			projector.Rollup("orders", order.Counts, counts),
			projector.On("orders", func(_ context.Context, tx *mongodb.Tx, changes []projector.Touch) error {
				seen.Add(int64(len(changes)))
				for _, c := range changes {
					tx.Outside("outbox").Queue(mongo.NewInsertOneModel().SetDocument(bson.D{{Key: "_id", Value: c.ID()}}))
				}
				return nil
			}),
		},
	}, projector.Options{Start: projector.FromNow(), IdleInterval: 20 * time.Millisecond})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(ctx) }()
	for runner.Status().State != projector.Running {
		time.Sleep(10 * time.Millisecond)
	}
	write := func(f func(context.Context, *mongo.Collection) error) {
		t.Helper()
		at, err := projector.Written(t.Context(), d.Database, func(ctx context.Context) error { return f(ctx, d.Collection("orders")) })
		must(t, err)
		must(t, runner.WaitFor(t.Context(), at))
	}
	write(func(ctx context.Context, c *mongo.Collection) error {
		_, err := c.InsertMany(ctx, []any{bson.D{{Key: "_id", Value: 1}, {Key: "status", Value: "new"}}, bson.D{{Key: "_id", Value: 2}, {Key: "status", Value: "new"}}})
		return err
	})
	write(func(ctx context.Context, c *mongo.Collection) error {
		_, err := c.UpdateByID(ctx, 1, bson.D{{Key: "$set", Value: bson.D{{Key: "status", Value: "paid"}}}})
		return err
	})
	want := `{"_id":{"status":"new"},"contributions":1,"n":1}` + "\n" + `{"_id":{"status":"paid"},"contributions":1,"n":1}`
	equal(t, "rows", d.rows(t, "counts"), want)
	live, err := mongodb.Live(t.Context(), d.Database, model, "counts")
	must(t, err)
	equal(t, "live", live.Name(), "model.counts")
	time.Sleep(300 * time.Millisecond) // positions are stored; a stream that fed on them would go on for ever
	equal(t, "changes seen", seen.Load(), 3)
	equal(t, "changes", runner.Status().Changes, 3)
	stop()
	must(t, <-ended)

	// A projection that follows what it writes is refused.
	must(t, d.CreateCollection(t.Context(), "loop.counts", images))
	loop, err := projector.New(d.Database, d.sink, mongodb.Projection{
		Name: "loop", Version: 1,
		Bindings: mongodb.Bindings{projector.Rollup("loop.counts", order.Counts, counts)},
	}, projector.Options{Start: projector.FromNow()})
	must(t, err)
	err = loop.Run(t.Context())
	if _, ok := errors.AsType[*projector.SinkError](err); !ok {
		t.Errorf("not a SinkError: %v", err)
	}
	wantError(t, err, fmt.Sprintf("collection %q of database %q, which it follows", "loop.counts", d.Name()))
}
