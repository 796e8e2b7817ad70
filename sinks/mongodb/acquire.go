package mongodb

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Acquire implements projector.Sink.
func (s *Sink) Acquire(ctx context.Context, projection, owner string) ([]projector.Checkpoint, error) {
	if projection == reserved || projection == "system" {
		return nil, &setupError{fmt.Errorf(
			"tidemark/mongodb: a projection can't be called %q: its model's collections would get names that are taken; choose another name", projection)}
	}
	t := taking{
		sink: s, projection: projection, owner: owner, began: time.Now(),
		sessions: map[int64]*session{}, taken: map[int64]projector.Checkpoint{},
	}
	for {
		all, err := t.step(ctx)
		if err != nil {
			return nil, failed("take the term of projection "+strconv.Quote(projection), err)
		}
		if all != nil {
			return all, nil
		}
	}
}

// taking is an Acquire under way. It raises the term of one document after the other,
// by ascending generation, each on condition that it is as it was read, and is done when
// it finds no document that it has not raised. The package's documentation says why
// that is as good as one step.
type taking struct {
	sink              *Sink
	projection, owner string
	began             time.Time
	term              int64                          // the one that is taken, chosen before the first is raised
	sessions          map[int64]*session             // by generation
	taken             map[int64]projector.Checkpoint // by generation, as they were raised
}

// step reads all documents and raises those that are not raised yet, up to the first
// that has changed meanwhile; where there are none it gives the checkpoints. All
// documents are decoded before one is changed, so that a refusal changes nothing.
func (t *taking) step(ctx context.Context) ([]projector.Checkpoint, error) {
	all, err := t.sink.generations(ctx, t.projection)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, t.introduce(ctx)
	}
	before := t.taken
	t.taken = map[int64]projector.Checkpoint{} // without what has been discarded
	highest := int64(0)
	for _, now := range all {
		highest = max(highest, now.checkpoint.Term)
		g := now.checkpoint.Generation
		if cp, ok := before[g]; ok {
			t.taken[g] = cp
		} else if sess := t.sessions[g]; sess != nil && string(now.lsid) == string(sess.ID()) {
			t.taken[g], t.term = now.checkpoint, now.checkpoint.Term // an earlier attempt, of which the answer was lost
		}
	}
	if len(t.taken) == 0 {
		t.term = highest + 1
	}
	if len(t.taken) == len(all) {
		return t.finish(ctx, all), nil
	}
	for _, now := range all {
		if _, ok := t.taken[now.checkpoint.Generation]; ok {
			continue
		}
		fault.Global.Reach(fault.GenerationStep)
		if ok, err := t.take(ctx, now); !ok {
			return nil, err
		}
	}
	if fault.Global.Off(fault.AcquireAll) {
		return t.finish(ctx, all), nil
	}
	return nil, nil // but to look once more: what has begun meanwhile has an old term
}

// finish gives the checkpoints, and the sessions to the sink.
func (t *taking) finish(ctx context.Context, all []stored) (cps []projector.Checkpoint) {
	for _, now := range all {
		cp := t.taken[now.checkpoint.Generation]
		if sess := t.sessions[cp.Generation]; sess != nil {
			sess.term = cp.Term
			t.sink.keep(cp, sess)
		}
		cps = append(cps, cp)
	}
	// Somebody's transaction may stand in the way: then the next Acquire, Begin or Discard does it.
	ctx, cancel := context.WithTimeout(ctx, t.sink.grace)
	defer cancel()
	_ = t.sink.sweepGone(ctx, t.projection)
	return cps
}

// take raises one document; false: it is no longer what it was.
func (t *taking) take(ctx context.Context, now stored) (bool, error) {
	cp := now.checkpoint
	overtaken := cp.Term >= t.term // by someone whose term is above ours: the first commit will tell
	cp.Term, cp.Owner = t.term, t.owner
	if !overtaken {
		sess, err := t.session(cp.Generation)
		if err != nil {
			return false, err
		}
		raised, err := t.sink.raise(ctx, now, cp, sess.ID())
		if err != nil {
			return false, err
		}
		if !raised {
			// An owner that commits without a pause can make that happen time and again;
			// then it is stopped in the way a dead one is.
			if time.Since(t.began) > t.sink.grace {
				err = t.sink.killOwner(ctx, t.projection)
			}
			return false, err
		}
	}
	t.taken[cp.Generation] = cp
	return true, nil
}

func (t *taking) session(generation int64) (*session, error) {
	if sess := t.sessions[generation]; sess != nil {
		return sess, nil
	}
	sess, err := t.sink.newSession()
	if err != nil {
		return nil, fmt.Errorf("start a session: %w", err)
	}
	t.sessions[generation] = sess
	return sess, nil
}

// introduce stores the first checkpoint of a projection.
func (t *taking) introduce(ctx context.Context) error {
	sess, err := t.session(1)
	if err != nil {
		return err
	}
	cp := fresh(t.projection, 1)
	cp.Term, cp.Owner = 1, t.owner
	doc, err := document(cp, sess.ID())
	if err != nil {
		return err
	}
	fault.Global.Reach(fault.GenerationStep)
	_, err = t.sink.checkpoints.InsertOne(ctx, doc)
	if err == nil {
		t.term, t.taken[1] = cp.Term, cp
		return nil
	}
	if !mongo.IsDuplicateKeyError(err) {
		return err
	}
	// Someone else was faster, and the next step finds that; or this is late, and the
	// projection has gone on to another generation.
	found, err := t.sink.checkpoints.FindOne(ctx, bson.D{{Key: "_id", Value: placeOf(t.projection, 1)}}).Raw()
	if err == nil && !found.Lookup("gone").IsZero() {
		all, err := t.sink.generations(ctx, t.projection)
		if err == nil && len(all) == 0 {
			err = &setupError{fmt.Errorf("tidemark/mongodb: all that is left of projection %q is the note, in %s, that its first generation was discarded; "+
				"restore its checkpoint, or remove the note together with the model to start over", t.projection, checkpoints)}
		}
		return err
	}
	return ignore(err, mongo.ErrNoDocuments)
}

// generations reads all checkpoints of a projection, by ascending generation.
func (s *Sink) generations(ctx context.Context, projection string) (all []stored, err error) {
	cur, err := s.checkpoints.Find(ctx, ofProjection(projection), options.Find().SetSort(bson.D{{Key: "generation", Value: 1}}))
	if err != nil {
		return nil, err
	}
	var found []bson.Raw
	if err := cur.All(ctx, &found); err != nil {
		return nil, err
	}
	for _, f := range found {
		now, err := decode(projection, f)
		if err != nil {
			return nil, err
		}
		all = append(all, now)
	}
	return all, nil
}

// raise puts cp's term and owner in the place of now's; false: the document is no
// longer what it was.
func (s *Sink) raise(ctx context.Context, now stored, cp projector.Checkpoint, lsid bson.Raw) (taken bool, err error) {
	filter := append(byID(cp.Projection, cp.Generation),
		bson.E{Key: "term", Value: now.checkpoint.Term},
		bson.E{Key: "sequence", Value: now.checkpoint.Sequence},
		bson.E{Key: "body", Value: now.body})
	update := bson.D{
		{Key: "$set", Value: bson.D{{Key: "term", Value: cp.Term}, {Key: "owner", Value: cp.Owner}, {Key: "lsid", Value: lsid}}},
		{Key: "$currentDate", Value: bson.D{{Key: "updatedAt", Value: true}}},
	}
	err = s.underLock(ctx, cp.Projection, func(ctx context.Context) error {
		r, err := s.checkpoints.UpdateOne(ctx, filter, update)
		if err == nil {
			taken = r.MatchedCount == 1
		}
		return err
	})
	return taken, err
}
