package mongodb

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Discard implements projector.Sink. It first marks the document as gone, which is the
// step that is fenced, then drops the collections, then removes the document. Whoever
// finds a document that is gone, in Acquire, Begin or another Discard, does the rest.
func (s *Sink) Discard(ctx context.Context, c projector.Checkpoint) error {
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	err := s.discard(ctx, c)
	if err == nil {
		fault.Global.Reach(fault.GenerationStep)
		err = s.sweepGone(ctx, c.Projection)
	}
	if err != nil {
		return failed(fmt.Sprintf("discard generation %d of projection %q", c.Generation, c.Projection), err)
	}
	s.forget(c)
	return nil
}

func (s *Sink) discard(ctx context.Context, c projector.Checkpoint) error {
	s.settled(ctx, c.Projection, c.Generation)
	var matched int64
	err := s.underLock(ctx, c.Projection, func(ctx context.Context) error {
		r, err := s.checkpoints.UpdateOne(ctx, append(fenceTerm(c), notLive), set("gone", bson.NewObjectID()))
		if err == nil {
			matched = r.MatchedCount
		}
		return err
	})
	if err != nil || matched > 0 {
		return err
	}
	found, err := s.checkpoints.FindOne(ctx, byID(c.Projection, c.Generation)).Raw()
	if err != nil {
		return ignore(err, mongo.ErrNoDocuments)
	}
	term, _ := found.Lookup("term").AsInt64OK()
	owner, _ := found.Lookup("owner").StringValueOK()
	phase, _ := found.Lookup("phase").StringValueOK()
	// A caller who knows it as another has been superseded, or the sink was set back.
	if phase == string(projector.Live) && c.Phase == projector.Live && term == c.Term && owner == c.Owner {
		return &setupError{fmt.Errorf("tidemark/mongodb: generation %d of projection %q is live and can't be discarded", c.Generation, c.Projection)}
	}
	return s.fenced(ctx, c)
}

// remains is what is left of a discarded generation.
type remains struct {
	Place       string        `bson:"_id"`
	Generation  int64         `bson:"generation"`
	Gone        bson.ObjectID `bson:"gone"`
	Collections []string      `bson:"collections"`
}

// discarded is the filter for what is left of the generation that was in a place.
func discarded(place string) bson.D {
	return bson.D{{Key: "_id", Value: place}, {Key: "gone", Value: bson.D{{Key: "$ne", Value: nil}}}}
}

// sweepGone drops the collections of the generations that are gone, and their documents.
func (s *Sink) sweepGone(ctx context.Context, projection string) error {
	filter := ofProjection(projection)
	filter[len(filter)-1].Value = bson.D{{Key: "$ne", Value: nil}}
	cur, err := s.checkpoints.Find(ctx, filter)
	if err != nil {
		return err
	}
	var all []remains
	if err := cur.All(ctx, &all); err != nil {
		return err
	}
	for _, r := range all {
		if r.Generation == 0 {
			continue // a first generation's, swept already
		}
		if err := s.drop(ctx, r); err != nil {
			return err
		}
		fault.Global.Reach(fault.GenerationStep)
		if err := s.bury(ctx, projection, r.Generation, r.Gone); err != nil {
			return err
		}
	}
	return nil
}

// drop drops the collections of a generation that is gone: those that it has written to,
// whatever else has a name like theirs. It may be late, by any time, and another
// generation in the same place by then. So it looks for the collections first, then
// whether the place is still that of the one that is gone, and then drops them by their
// UUIDs: a new one's collections are made after its document, and have others. (The drop
// command takes a collectionUUID on 6.0.5 and 6.0.27, tried.)
func (s *Sink) drop(ctx context.Context, r remains) error {
	names := make(bson.A, len(r.Collections))
	for i, name := range r.Collections {
		names[i] = r.Place + "." + name
	}
	fault.Global.Reach(fault.GenerationStep)
	found, err := s.db.ListCollectionSpecifications(ctx, bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: names}}}})
	if err != nil {
		return err
	}
	err = s.checkpoints.FindOne(ctx, bson.D{{Key: "_id", Value: r.Place}, {Key: "gone", Value: r.Gone}}).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	if err != nil {
		return err
	}
	fault.Global.Reach(fault.GenerationStep)
	for _, f := range found {
		if f.Type != "collection" {
			continue
		}
		command := bson.D{{Key: "drop", Value: f.Name}, {Key: "writeConcern", Value: bson.D{{Key: "w", Value: "majority"}}}}
		if !fault.Global.Off(fault.DiscardCheck) {
			command = append(command, bson.E{Key: "collectionUUID", Value: f.UUID})
		}
		err := s.db.RunCommand(ctx, command).Err()
		if err != nil && !hasCode(err, namespaceNotFound) && !hasCode(err, uuidMismatch) {
			return err
		}
	}
	return nil
}

// bury removes the document of a generation, where its field gone is was. That of the
// first is not deleted, but emptied: an Acquire that found no document and then did not
// come to insert the first one for a long time must not put a second live generation
// beside what came after. What is left has another number in gone, so that a drop that is
// late does not take the place for that of the generation that it is about.
func (s *Sink) bury(ctx context.Context, projection string, generation int64, was any) (err error) {
	filter := bson.D{{Key: "_id", Value: placeOf(projection, generation)}, {Key: "gone", Value: was}}
	if generation == 1 && !fault.Global.Off(fault.DiscardNote) {
		_, err = s.checkpoints.ReplaceOne(ctx, filter, bson.D{{Key: "projection", Value: projection}, {Key: "gone", Value: bson.NewObjectID()}})
	} else {
		_, err = s.checkpoints.DeleteOne(ctx, filter)
	}
	return err
}
