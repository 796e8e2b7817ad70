package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
)

// committedSince waits for another commit than that one.
func (w *World) committedSince(ctx context.Context, sequence int64) error {
	err := until(ctx, time.Millisecond, 30*time.Second, func() (bool, error) {
		now, err := w.sink.glance(ctx)
		return now.Sequence > sequence, err
	})
	if err != nil {
		return w.withLog(fmt.Errorf("waiting for the projection to commit: %w", err))
	}
	return nil
}

// level waits until the projection has committed the last change made.
func (w *World) level(ctx context.Context) error {
	begun := time.Now()
	err := until(ctx, 10*time.Millisecond, levelTimeout, func() (bool, error) {
		c, err := w.sink.glance(ctx)
		return c.Settled && (c.Position.Time.After(w.last.time) || tokenText(c.Position.Token) >= w.last.token), err
	})
	if err != nil {
		return w.withLog(fmt.Errorf("the projection is not level with the source: %w", err))
	}
	w.say("projection level with the source after %s", time.Since(begun).Round(time.Millisecond))
	return nil
}

// change is one of the source's change stream. Tokens are in the order of the stream.
type change struct {
	token string
	time  bson.Timestamp
}

// watch opens the stream of the collection's changes after a position.
func (w *World) watch(ctx context.Context, pos projector.Position) (*mongo.ChangeStream, error) {
	o := options.ChangeStream()
	if pos.Token != nil {
		o.SetStartAfter(pos.Token)
	} else {
		o.SetStartAtOperationTime(&pos.Time)
	}
	only := mongo.Pipeline{{{Key: "$match", Value: bson.D{{Key: "ns.coll", Value: w.demo.Collection}}}}}
	return w.Source.Watch(ctx, only, o)
}

// read reads the next n changes.
func (w *World) read(ctx context.Context, stream *mongo.ChangeStream, n int) ([]change, error) {
	ctx, cancel := context.WithTimeout(ctx, levelTimeout)
	defer cancel()
	changes := make([]change, 0, n)
	for len(changes) < n {
		if !stream.Next(ctx) {
			return nil, fmt.Errorf("read the changes, %d of %d: %w", len(changes), n, stream.Err())
		}
		c := change{token: tokenText(stream.Current.Lookup("_id").Document())}
		c.time.T, c.time.I = stream.Current.Lookup("clusterTime").Timestamp()
		changes = append(changes, c)
	}
	return changes, nil
}

func tokenText(token bson.Raw) string {
	text, _ := token.Lookup("_data").StringValueOK()
	return text
}

// sourceTime is the time of the last write that a majority has.
func (w *World) sourceTime(ctx context.Context) (t bson.Timestamp, err error) {
	reply, err := w.Source.RunCommand(ctx, bson.D{
		{Key: "find", Value: w.demo.Collection},
		{Key: "limit", Value: 1},
		{Key: "singleBatch", Value: true},
		{Key: "readConcern", Value: bson.D{{Key: "level", Value: "majority"}}},
	}).Raw()
	if err != nil {
		return t, err
	}
	var ok bool
	if t.T, t.I, ok = reply.Lookup("operationTime").TimestampOK(); !ok {
		err = errors.New("the server gives no operation time")
	}
	return t, err
}

// rollOplog writes elsewhere until the oplog begins after everything written so far.
func (w *World) rollOplog(ctx context.Context) error {
	now, err := w.sourceTime(ctx)
	if err != nil {
		return err
	}
	oplog := w.Source.Client().Database("local").Collection("oplog.rs")
	busy := w.Source.Client().Database(w.servers.name + "_busy")
	noise := bson.D{{Key: "noise", Value: string(make([]byte, 1<<20))}}
	err = until(ctx, time.Millisecond, levelTimeout, func() (bool, error) {
		var oldest struct{ TS bson.Timestamp }
		if err := oplog.FindOne(ctx, bson.D{}).Decode(&oldest); err != nil || oldest.TS.After(now) {
			return err == nil, err
		}
		_, err := busy.Collection("noise").InsertOne(ctx, noise)
		return false, err
	})
	if err != nil {
		err = fmt.Errorf("let the oplog roll over: %w", err)
	}
	return errors.Join(err, busy.Drop(ctx))
}
