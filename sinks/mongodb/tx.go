package mongodb

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
)

// Tx is what a handler writes through: everything that goes through it is committed
// together with the checkpoint, or not at all. It is for one goroutine, and for the
// duration of the handler's call.
//
// Whatever context its methods are given, they run in the sink's transaction. The
// context given to the handler is a plain one: what a handler does with it elsewhere,
// on the same client too, is not part of the transaction.
//
// An error of the server ends the transaction, also one that the handler could go on
// from, such as a duplicate key: ask first, or write so that it can't happen (an
// upsert). A handler that returns nil after such an error fails all the same.
type Tx struct {
	sink     *Sink
	sess     *session
	base     context.Context // the commit's, without a session: for questions asked outside of the transaction
	deadline time.Time
	watch    projector.Watch

	projection string
	generation int64
	place      string
	first      bool  // the generation's first commit
	building   bool  // the generation was not live yet
	rebuild    int64 // the mark of the rebuild in the model's own place; 0: there is none
	mark       int64 // what a rebuild in place marks the rows with that are put; 0: there is none

	made   map[string]*inheritance // collections created in this transaction, and what they are still to take over
	there  map[string]bool         // the model's collections, without the place, that are known to be there
	used   map[string]bool         // and those that were written to
	swept  map[string]swept        // by the same names
	queue  []queued
	closed bool
	err    error // the first error of a statement
}

// queued are writes to one collection, in their order.
type queued struct {
	collection *TxCollection
	models     []mongo.WriteModel
}

func (s *Sink) newTx(ctx context.Context, sess *session, prev, next projector.Checkpoint) *Tx {
	deadline, _ := ctx.Deadline()
	tx := &Tx{
		sink: s, sess: sess, base: ctx, deadline: deadline, watch: next.Watch,
		projection: prev.Projection, generation: prev.Generation, place: placeOf(prev.Projection, prev.Generation),
		first: prev.Sequence == 0, building: prev.Phase == projector.Building,
		made: map[string]*inheritance{}, there: map[string]bool{}, used: map[string]bool{}, swept: map[string]swept{},
	}
	if next.Rebuild != nil {
		tx.rebuild = next.Rebuild.Mark
		if next.Rebuild.Mode == projector.InPlace {
			tx.mark = next.Rebuild.Mark
		}
	}
	return tx
}

// Collection is a collection of the model, called name in the generation that is being
// written: its whole name is the generation's place, a dot, and name.
func (tx *Tx) Collection(name string) *TxCollection {
	c := tx.collection(tx.place + "." + name)
	c.short = name
	return c
}

// Outside is a collection of the sink's database by its whole name, for what does not
// belong to a generation and must survive a rebuild, such as an outbox.
func (tx *Tx) Outside(name string) *TxCollection {
	c := tx.collection(name)
	if name == reserved || strings.HasPrefix(name, reserved+".") || strings.HasPrefix(name, "system.") {
		c.fault = &setupError{fmt.Errorf("tidemark/mongodb: collection %q is not for handlers to write; name another", name)}
	}
	return c
}

func (tx *Tx) collection(name string) *TxCollection {
	c := &TxCollection{tx: tx, coll: tx.sink.db.Collection(name)}
	// Whatever a model writes into a collection that it follows comes back to it as a
	// change. Two clusters can't be told apart here, so the names decide.
	if tx.watch.Database == tx.sink.db.Name() && slices.ContainsFunc(tx.watch.Collections, func(w projector.Watched) bool { return w.Name == name }) {
		c.fault = &setupError{fmt.Errorf("tidemark/mongodb: the projection would write to collection %[1]q of database %[2]q, which it follows, and so feed on its own writes; "+
			"give the projection, its target or the sink's database another name", name, tx.watch.Database)}
	}
	return c
}

// bound makes ctx one of the transaction's: its session, its time limit.
func (tx *Tx) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithDeadline(ctx, tx.deadline)
	return mongo.NewSessionContext(ctx, tx.sess.Session), cancel
}

var errOver = errors.New("tidemark/mongodb: the transaction is over; a Tx must not be kept after the handler's return")

// flush sends what is queued: a round trip for each run of writes to one collection.
func (tx *Tx) flush(ctx context.Context) error {
	if tx.closed {
		return errOver
	}
	queue := tx.queue
	tx.queue = nil
	for _, q := range queue {
		if q.collection.fault != nil {
			return tx.fail(q.collection.fault)
		}
		ctx, cancel := tx.bound(ctx)
		err := q.collection.ready(ctx)
		if err == nil {
			_, err = q.collection.coll.BulkWrite(ctx, q.models)
		}
		cancel()
		if err != nil {
			return tx.fail(fmt.Errorf("tidemark/mongodb: queued writes to collection %q: %w", q.collection.coll.Name(), err))
		}
	}
	return nil
}

// fail remembers the first error.
func (tx *Tx) fail(err error) error {
	if err != nil && tx.err == nil {
		tx.err = err
	}
	return err
}

func (tx *Tx) close() {
	tx.closed = true
	tx.queue = nil
}

// TxCollection is a collection as a Tx writes to it. Its methods are those of the
// driver's Collection; all of them run in the transaction, after what is queued.
type TxCollection struct {
	tx    *Tx
	coll  *mongo.Collection
	short string // the name without the place; "" for a collection that is not the model's
	fault error  // why it must not be written to
}

// Name is the whole name of the collection.
func (c *TxCollection) Name() string { return c.coll.Name() }

// use notes that the collection is written to.
func (c *TxCollection) use() {
	if c.short != "" {
		c.tx.used[c.short] = true
	}
}

// Queue adds writes to be sent together with those that follow, at the latest with the
// commit, in their order; an error is reported by the commit. This is the fast way to
// write: a round trip to the server for many writes to one collection.
func (c *TxCollection) Queue(models ...mongo.WriteModel) {
	c.use()
	if n := len(c.tx.queue); n > 0 && c.tx.queue[n-1].collection.coll.Name() == c.coll.Name() {
		c.tx.queue[n-1].models = append(c.tx.queue[n-1].models, models...)
		return
	}
	if len(models) > 0 {
		c.tx.queue = append(c.tx.queue, queued{c, slices.Clone(models)})
	}
}

// BulkWrite writes several models in one round trip.
func (c *TxCollection) BulkWrite(ctx context.Context, models []mongo.WriteModel, opts ...options.Lister[options.BulkWriteOptions]) (*mongo.BulkWriteResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.BulkWriteResult, error) {
		return c.coll.BulkWrite(ctx, models, opts...)
	})
}

// InsertOne inserts a document.
func (c *TxCollection) InsertOne(ctx context.Context, document any, opts ...options.Lister[options.InsertOneOptions]) (*mongo.InsertOneResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.InsertOneResult, error) {
		return c.coll.InsertOne(ctx, document, opts...)
	})
}

// InsertMany inserts documents, a slice.
func (c *TxCollection) InsertMany(ctx context.Context, documents any, opts ...options.Lister[options.InsertManyOptions]) (*mongo.InsertManyResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.InsertManyResult, error) {
		return c.coll.InsertMany(ctx, documents, opts...)
	})
}

// UpdateOne updates at most one document.
func (c *TxCollection) UpdateOne(ctx context.Context, filter, update any, opts ...options.Lister[options.UpdateOneOptions]) (*mongo.UpdateResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.UpdateResult, error) {
		return c.coll.UpdateOne(ctx, filter, update, opts...)
	})
}

// UpdateMany updates every document that matches.
func (c *TxCollection) UpdateMany(ctx context.Context, filter, update any, opts ...options.Lister[options.UpdateManyOptions]) (*mongo.UpdateResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.UpdateResult, error) {
		return c.coll.UpdateMany(ctx, filter, update, opts...)
	})
}

// ReplaceOne replaces at most one document.
func (c *TxCollection) ReplaceOne(ctx context.Context, filter, replacement any, opts ...options.Lister[options.ReplaceOptions]) (*mongo.UpdateResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.UpdateResult, error) {
		return c.coll.ReplaceOne(ctx, filter, replacement, opts...)
	})
}

// DeleteOne deletes at most one document.
func (c *TxCollection) DeleteOne(ctx context.Context, filter any, opts ...options.Lister[options.DeleteOneOptions]) (*mongo.DeleteResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.DeleteResult, error) { return c.coll.DeleteOne(ctx, filter, opts...) })
}

// DeleteMany deletes every document that matches.
func (c *TxCollection) DeleteMany(ctx context.Context, filter any, opts ...options.Lister[options.DeleteManyOptions]) (*mongo.DeleteResult, error) {
	return writing(ctx, c, func(ctx context.Context) (*mongo.DeleteResult, error) { return c.coll.DeleteMany(ctx, filter, opts...) })
}

// FindOneAndUpdate updates at most one document and returns it.
func (c *TxCollection) FindOneAndUpdate(ctx context.Context, filter, update any, opts ...options.Lister[options.FindOneAndUpdateOptions]) *mongo.SingleResult {
	return single(writing(ctx, c, func(ctx context.Context) (*mongo.SingleResult, error) {
		r := c.coll.FindOneAndUpdate(ctx, filter, update, opts...)
		return r, found(r)
	}))
}

// FindOne finds a document, the transaction's own writes included.
func (c *TxCollection) FindOne(ctx context.Context, filter any, opts ...options.Lister[options.FindOneOptions]) *mongo.SingleResult {
	return single(statement(ctx, c, func(ctx context.Context) (*mongo.SingleResult, error) {
		r := c.coll.FindOne(ctx, filter, opts...)
		return r, found(r)
	}))
}

// Find finds documents, the transaction's own writes included. The cursor must be read
// before the handler returns.
func (c *TxCollection) Find(ctx context.Context, filter any, opts ...options.Lister[options.FindOptions]) (*mongo.Cursor, error) {
	return statement(ctx, c, func(ctx context.Context) (*mongo.Cursor, error) { return c.coll.Find(ctx, filter, opts...) })
}

// Aggregate runs a pipeline. The stages $out and $merge are not allowed in a
// transaction. The cursor must be read before the handler returns.
func (c *TxCollection) Aggregate(ctx context.Context, pipeline any, opts ...options.Lister[options.AggregateOptions]) (*mongo.Cursor, error) {
	return statement(ctx, c, func(ctx context.Context) (*mongo.Cursor, error) { return c.coll.Aggregate(ctx, pipeline, opts...) })
}

// CountDocuments counts the documents that match.
func (c *TxCollection) CountDocuments(ctx context.Context, filter any, opts ...options.Lister[options.CountOptions]) (int64, error) {
	return statement(ctx, c, func(ctx context.Context) (int64, error) { return c.coll.CountDocuments(ctx, filter, opts...) })
}

// statement runs a statement in the transaction, after what is queued.
func statement[T any](ctx context.Context, c *TxCollection, f func(context.Context) (T, error)) (T, error) {
	var none T
	if err := c.tx.flush(ctx); err != nil {
		return none, err
	}
	ctx, cancel := c.tx.bound(ctx)
	defer cancel()
	v, err := f(ctx)
	// What the driver refuses before it asks the server leaves the transaction intact.
	if _, ok := errors.AsType[mongo.ServerError](err); ok || timeout(err) || unreachable(err) {
		_ = c.tx.fail(err)
	}
	return v, err
}

func writing[T any](ctx context.Context, c *TxCollection, f func(context.Context) (T, error)) (T, error) {
	if c.fault != nil {
		var none T
		return none, c.tx.fail(c.fault)
	}
	c.use()
	return statement(ctx, c, func(ctx context.Context) (T, error) {
		if err := c.ready(ctx); err != nil {
			var none T
			return none, c.tx.fail(err)
		}
		return f(ctx)
	})
}

// found is a result's error; that there is no document is none.
func found(r *mongo.SingleResult) error {
	if err := r.Err(); !errors.Is(err, mongo.ErrNoDocuments) {
		return err
	}
	return nil
}

// single makes an error of ours a result.
func single(r *mongo.SingleResult, err error) *mongo.SingleResult {
	if r == nil {
		return mongo.NewSingleResultFromDocument(bson.D{}, err, nil)
	}
	return r
}
