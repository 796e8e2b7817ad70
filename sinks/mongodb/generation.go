package mongodb

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Begin implements projector.Sink. The document is inserted by a transaction that also
// writes to live's, in live's session: so it comes before an Acquire, which then finds
// it, or fails.
func (s *Sink) Begin(ctx context.Context, live projector.Checkpoint, generation int64) (projector.Checkpoint, error) {
	doing := fmt.Sprintf("begin generation %d of projection %q", generation, live.Projection)
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	cp := fresh(live.Projection, generation)
	cp.Phase, cp.Term, cp.Owner = projector.Building, live.Term, live.Owner
	for {
		stored, there, err := s.begun(ctx, cp)
		if err != nil {
			return projector.Checkpoint{}, failed(doing, err)
		}
		if there {
			return stored, nil
		}
		err = s.sweepGone(ctx, live.Projection)
		if err == nil {
			err = s.obstacles(ctx, cp)
		}
		if err == nil {
			err = s.insert(ctx, live, cp)
		}
		switch {
		case mongo.IsDuplicateKeyError(err): // an earlier attempt, of which the answer was lost
		case err != nil:
			return projector.Checkpoint{}, failed(doing, err)
		default:
			return cp, nil
		}
	}
}

// begun reads the generation that is to begin, where it is stored already.
func (s *Sink) begun(ctx context.Context, cp projector.Checkpoint) (_ projector.Checkpoint, there bool, err error) {
	found, err := s.checkpoints.FindOne(ctx, byID(cp.Projection, cp.Generation)).Raw()
	if err != nil {
		return cp, false, ignore(err, mongo.ErrNoDocuments)
	}
	now, err := decode(cp.Projection, found)
	if err != nil {
		return cp, false, err
	}
	if now.checkpoint.Term != cp.Term || now.checkpoint.Owner != cp.Owner {
		return cp, false, s.fenced(ctx, cp)
	}
	return now.checkpoint, true, nil
}

// insert stores the document of a generation that begins.
func (s *Sink) insert(ctx context.Context, live, cp projector.Checkpoint) error {
	own, err := s.newSession()
	if err != nil {
		return fmt.Errorf("start a session: %w", err)
	}
	own.term = cp.Term
	doc, err := document(cp, own.ID())
	if err != nil {
		return err
	}
	sess, err := s.sessionOf(ctx, live)
	if err != nil {
		return err
	}
	err = s.transaction(ctx, sess, func(ctx context.Context) error {
		r, err := s.checkpoints.UpdateOne(ctx, fenceTerm(live), inc("loads", 1))
		if err == nil && r.MatchedCount == 0 && !fault.Global.Off(fault.FenceRaises) {
			err = s.fenced(ctx, live)
		}
		if err != nil {
			return err
		}
		sess.uncertain.Store(false) // the server has ended the session's earlier transactions
		_, err = s.checkpoints.ReplaceOne(ctx, discarded(placeOf(cp.Projection, cp.Generation)), doc, options.Replace().SetUpsert(true))
		return err
	})
	if err == nil {
		s.keep(cp, own)
	}
	return err
}

// Switch implements projector.Sink. It is one transaction, in the session of from,
// while the use of both sessions is the caller's.
func (s *Sink) Switch(ctx context.Context, from, to projector.Checkpoint) (err error) {
	doing := fmt.Sprintf("switch projection %q from generation %d to %d", from.Projection, from.Generation, to.Generation)
	if from.Projection != to.Projection || from.Generation == to.Generation {
		return &setupError{fmt.Errorf("tidemark/mongodb: %s: a switch needs two generations of one projection, not one of %q as well", doing, to.Projection)}
	}
	to.Phase, to.Place = projector.Live, placeOf(to.Projection, to.Generation)
	body, err := to.Encode()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	sess, err := s.sessionOf(ctx, from)
	if err != nil {
		return err
	}
	other, err := s.sessionOf(ctx, to)
	if err != nil {
		s.release(ctx, sess, nil)
		return err
	}
	defer func() { s.release(ctx, other, nil) }()
	if other.uncertain.Load() { // a lost attempt may hold its document
		s.settle(ctx, other)
	}
	err = s.transaction(ctx, sess, func(ctx context.Context) error {
		if err := s.retire(ctx, sess, from); err != nil {
			return err
		}
		r, err := s.checkpoints.UpdateOne(ctx, append(fence(to), notLive), bson.D{
			{Key: "$set", Value: bson.D{
				{Key: "sequence", Value: to.Sequence + 1},
				{Key: "phase", Value: string(projector.Live)},
				{Key: "body", Value: string(body)},
			}},
			{Key: "$currentDate", Value: bson.D{{Key: "updatedAt", Value: true}}},
		})
		if err == nil && r.MatchedCount == 0 && !fault.Global.Off(fault.FenceRaises) {
			err = s.fenced(ctx, to)
		}
		return err
	})
	if err != nil {
		return failed(doing, err)
	}
	if from.Sequence == 0 {
		s.forget(from)
	}
	return nil
}

var (
	onlyLive = bson.E{Key: "phase", Value: string(projector.Live)}
	notLive  = bson.E{Key: "phase", Value: bson.D{{Key: "$ne", Value: string(projector.Live)}}}
)

// retire is a switch's part in the generation that was live.
func (s *Sink) retire(ctx context.Context, sess *session, from projector.Checkpoint) error {
	found, err := s.checkpoints.FindOneAndUpdate(ctx, append(fence(from), onlyLive), bson.D{{Key: "$set", Value: bson.D{
		{Key: "sequence", Value: from.Sequence + 1},
		{Key: "phase", Value: string(projector.Retired)},
	}}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		if fault.Global.Off(fault.FenceRaises) {
			return nil
		}
		return s.fenced(ctx, from)
	}
	if err != nil {
		return err
	}
	sess.uncertain.Store(false) // the server has ended the session's earlier transactions
	if from.Sequence == 0 {
		return s.bury(ctx, from.Projection, from.Generation, nil)
	}
	now, err := decode(from.Projection, found)
	if err != nil {
		return err
	}
	cp := now.checkpoint
	cp.Phase, cp.Place = projector.Retired, placeOf(cp.Projection, cp.Generation)
	body, err := cp.Encode()
	if err != nil {
		return err
	}
	_, err = s.checkpoints.UpdateOne(ctx, byID(cp.Projection, cp.Generation), set("body", string(body)))
	return err
}

// transaction runs f and the commit in a transaction of sess, once, and gives up the
// session's use.
func (s *Sink) transaction(ctx context.Context, sess *session, f func(context.Context) error) (err error) {
	defer func() { s.release(ctx, sess, err) }()
	if err := sess.StartTransaction(); err != nil {
		return fmt.Errorf("start a transaction: %w", err)
	}
	if err := f(mongo.NewSessionContext(ctx, sess.Session)); err != nil {
		return needsReplicaSet(err)
	}
	fault.Global.Reach(fault.CommitSend)
	if err := sess.commit(ctx); err != nil {
		return err
	}
	fault.Global.Reach(fault.CommitAnswer)
	return nil
}
