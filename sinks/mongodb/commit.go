package mongodb

import (
	"context"
	"fmt"
	"maps"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Commit implements projector.Sink.
func (s *Sink) Commit(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	return s.transact(ctx, prev, next, apply, (*Tx).commit)
}

// Try implements projector.Sink.
func (s *Sink) Try(ctx context.Context, prev projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	next := prev
	next.Sequence++
	return s.transact(ctx, prev, next, apply, (*Tx).flush)
}

// transact runs one transaction, once: what to do after a failure is the caller's to
// decide, who reads the checkpoint back first. The driver's WithTransaction would run
// apply again behind its back.
func (s *Sink) transact(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error, finish func(*Tx, context.Context) error) (err error) {
	body, err := next.Encode()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	sess, err := s.sessionOf(ctx, prev)
	if err != nil {
		return err
	}
	defer func() { s.release(ctx, sess, err) }()
	if err := sess.StartTransaction(); err != nil {
		return failed("start a transaction", err)
	}
	tx := s.newTx(ctx, sess, prev, next)
	defer tx.close()
	fenced, err := tx.fence(ctx, prev, next, string(body))
	switch {
	case err != nil:
		return fmt.Errorf("tidemark/mongodb: store the checkpoint of projection %q: %w", prev.Projection, err)
	case fenced:
		return s.fenced(ctx, prev)
	}
	if err := tx.run(ctx, apply); err != nil {
		return err
	}
	return finish(tx, ctx)
}

// fence is the filter that lets a write pass only while prev is stored.
func fence(prev projector.Checkpoint) bson.D {
	filter := fenceTerm(prev)
	if !fault.Global.Off(fault.FenceSequence) {
		filter = append(filter, bson.E{Key: "sequence", Value: prev.Sequence})
	}
	return filter
}

// fenceTerm is the filter that lets a write pass only while the term is prev's.
func fenceTerm(prev projector.Checkpoint) bson.D {
	filter := byID(prev.Projection, prev.Generation)
	if !fault.Global.Off(fault.FenceTerm) {
		filter = append(filter, bson.E{Key: "term", Value: prev.Term}, bson.E{Key: "owner", Value: prev.Owner})
	}
	return filter
}

// fence is the transaction's first statement: it stores the checkpoint, and with it
// claims the commit. It compares term and sequence, and it is an error if they differ:
// an update that matches no document is none by itself.
func (tx *Tx) fence(ctx context.Context, prev, next projector.Checkpoint, body string) (fenced bool, err error) {
	r, err := tx.sink.checkpoints.UpdateOne(mongo.NewSessionContext(ctx, tx.sess.Session), fence(prev), bson.D{
		{Key: "$set", Value: bson.D{
			{Key: "sequence", Value: next.Sequence},
			{Key: "body", Value: body},
		}},
		{Key: "$currentDate", Value: bson.D{{Key: "updatedAt", Value: true}}},
	})
	if err != nil {
		return false, needsReplicaSet(err)
	}
	tx.sess.uncertain.Store(false) // the server has ended the session's earlier transactions
	return r.MatchedCount == 0 && !fault.Global.Off(fault.FenceRaises), nil
}

// needsReplicaSet says what to do where the server has no transactions.
func needsReplicaSet(err error) error {
	if !hasCode(err, illegalOperation) {
		return err
	}
	return &setupError{fmt.Errorf("the sink is a single mongod, which has no transactions; make it a replica set of one: start it with --replSet rs0 and run rs.initiate(): %w", err)}
}

// run lets the handlers write.
func (tx *Tx) run(ctx context.Context, apply func(context.Context, *Tx) error) error {
	err := apply(ctx, tx)
	switch {
	case err == nil && tx.err != nil:
		return fmt.Errorf("tidemark/mongodb: a statement of the handler failed, and the handler returned no error; nothing was written: %w", tx.err)
	case err != nil && tx.err != nil:
		// The handler has made an error of its own of it. What the driver said decides
		// whether to try again, so it must not be lost.
		return &handlerError{err, tx.err}
	}
	return err
}

// commit sends what is queued, and the commit.
func (tx *Tx) commit(ctx context.Context) error {
	if err := tx.flush(ctx); err != nil {
		return err
	}
	if err := tx.inherit(ctx); err != nil {
		return err
	}
	if err := tx.record(ctx); err != nil {
		return failed("note the collections of the model", err)
	}
	fault.Global.Reach(fault.CommitSend)
	if err := tx.sess.commit(ctx); err != nil {
		return failed("commit", err)
	}
	fault.Global.Reach(fault.CommitAnswer)
	for name := range tx.used {
		tx.sess.recorded[name] = true
	}
	maps.Copy(tx.sess.swept, tx.swept)
	return nil
}

// record notes the collections that the generation has written to in its document, for
// the day on which it is discarded. It costs a statement when one is new to the session.
func (tx *Tx) record(ctx context.Context) error {
	var names bson.A
	for name := range tx.used {
		if !tx.sess.recorded[name] {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	_, err := tx.sink.checkpoints.UpdateOne(mongo.NewSessionContext(ctx, tx.sess.Session), byID(tx.projection, tx.generation),
		bson.D{{Key: "$addToSet", Value: bson.D{{Key: "collections", Value: bson.D{{Key: "$each", Value: names}}}}}})
	return err
}

// commitRetries is how long a commit of unknown outcome is sent again.
const commitRetries = 10 * time.Second

// commit ends the transaction. Where its outcome is unknown the commit is sent again,
// in the same session and under the same number: the server then answers for the first
// one. The transaction's body is never sent again from here.
func (sess *session) commit(ctx context.Context) (err error) {
	defer func() {
		if err != nil { // the server may yet carry it out, or still hold its locks
			sess.uncertain.Store(true)
		}
	}()
	ended := time.Now().Add(commitRetries)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := sess.CommitTransaction(ctx)
		if err == nil {
			return nil
		}
		if !hasLabel(err, unknownCommit) || hasCode(err, maxTimeExpired) || ctx.Err() != nil || time.Now().After(ended) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}
