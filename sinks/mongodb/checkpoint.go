package mongodb

import (
	"errors"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

// checkpoints is the collection of the checkpoints, a document per generation:
//
//	_id, place   where its collections are: their names begin with it and a dot
//	projection, generation
//	phase        live, building or retired; one of a projection's is live
//	term, sequence, owner
//	body         what Checkpoint.Encode wrote, byte for byte, hence a string and no document
//	collections  the names, without the place, of the collections that it has written to
//	lsid         the id of the session in which the owner's transactions run
//	loads        counts the reads under the lock, and other writes that only take the lock
//	updatedAt    the server's time of the last commit
//	gone         in what is left of a discarded generation: the number of its discarding
const checkpoints = reserved + ".checkpoints"

// reserved begins the names of the library's own collections.
const reserved = "tidemark"

// placeOf is where a generation's collections are: their names begin with it and a dot.
// It is the _id of the checkpoint as well.
func placeOf(projection string, generation int64) string {
	if generation == 1 {
		return projection
	}
	return projection + ".g" + strconv.FormatInt(generation, 10)
}

// byID is the filter for a generation's checkpoint.
func byID(projection string, generation int64) bson.D {
	return bson.D{{Key: "_id", Value: placeOf(projection, generation)}, {Key: "gone", Value: nil}}
}

// ofProjection is the filter for all checkpoints of a projection, by the index on _id.
func ofProjection(projection string) bson.D {
	return bson.D{
		{Key: "_id", Value: bson.D{{Key: "$gte", Value: projection}, {Key: "$lt", Value: projection + ".h"}}},
		{Key: "projection", Value: projection},
		{Key: "gone", Value: nil},
	}
}

func set(key string, value any) bson.D {
	return bson.D{{Key: "$set", Value: bson.D{{Key: key, Value: value}}}}
}

func inc(key string, n int64) bson.D {
	return bson.D{{Key: "$inc", Value: bson.D{{Key: key, Value: n}}}}
}

// stored is a document of the collection of checkpoints.
type stored struct {
	checkpoint projector.Checkpoint
	body       string
	lsid       bson.Raw
}

// decode reads a document. Whatever of it can't be read is a CheckpointError, or a
// FormatError where a newer release has written it.
func decode(projection string, found bson.Raw) (stored, error) {
	malformed := func(text string) (stored, error) {
		return stored{}, &projector.CheckpointError{Projection: projection, Err: errors.New(text)}
	}
	body, ok := found.Lookup("body").StringValueOK()
	if !ok {
		return malformed("its field body is missing, or no string")
	}
	cp, err := projector.DecodeCheckpoint(projection, []byte(body))
	if err != nil {
		return stored{}, err
	}
	if id, _ := found.Lookup("_id").StringValueOK(); id != placeOf(projection, cp.Generation) {
		return malformed("its field body is that of generation " + strconv.FormatInt(cp.Generation, 10) + ", but its _id is " + strconv.Quote(id))
	}
	// A document that was restored by hand may have doubles here.
	if cp.Term, ok = found.Lookup("term").AsInt64OK(); !ok {
		return malformed("its field term is missing, or no number")
	}
	if cp.Sequence, ok = found.Lookup("sequence").AsInt64OK(); !ok {
		return malformed("its field sequence is missing, or no number")
	}
	cp.Owner, _ = found.Lookup("owner").StringValueOK()
	lsid, _ := found.Lookup("lsid").DocumentOK()
	return stored{cp, body, lsid}, nil
}

// fresh is the checkpoint of a generation that has committed nothing yet.
func fresh(projection string, generation int64) projector.Checkpoint {
	cp := projector.Checkpoint{
		Format: projector.CheckpointFormat, Projection: projection, Generation: generation,
		Place: placeOf(projection, generation), Phase: projector.Building,
	}
	if generation == 1 {
		cp.Phase = projector.Live
	}
	return cp
}

// document is the whole document of a checkpoint that is new, with lsid as the session
// of its owner.
func document(cp projector.Checkpoint, lsid bson.Raw) (bson.D, error) {
	body, err := cp.Encode()
	if err != nil {
		return nil, err
	}
	return bson.D{
		{Key: "_id", Value: placeOf(cp.Projection, cp.Generation)},
		{Key: "projection", Value: cp.Projection},
		{Key: "generation", Value: cp.Generation},
		{Key: "phase", Value: string(cp.Phase)},
		{Key: "place", Value: cp.Place},
		{Key: "term", Value: cp.Term},
		{Key: "sequence", Value: cp.Sequence},
		{Key: "owner", Value: cp.Owner},
		{Key: "body", Value: string(body)},
		{Key: "lsid", Value: lsid},
		{Key: "updatedAt", Value: time.Now().UTC()},
	}, nil
}
