package mongodb

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
)

// ErrNotBuilt: the model is being built for the first time, and can't be read yet.
var ErrNotBuilt = errors.New("the model is being built for the first time, and can't be read yet")

// Live finds the collection that readers of a model should read: the one called name,
// as in [Collection], of the generation that is live. It reads the projection's
// checkpoints each time, so a reader that asks anew follows a rebuild's switch. Db is
// the database that was given to [New]. Until a model is there the error is one that
// errors.Is finds with [ErrNotBuilt].
//
// A reader that asks, and reads, time and again, sees the model go forward only, across
// switches too, if its contexts are those of one causally consistent session and it reads
// with majority read concern. Who reads from the primary, without a session, sees that as
// well, but for elections: for a while an old primary may answer, with what was committed
// before. It must ask each time: a collection that was live before a switch stays readable,
// until its generation is discarded, but nothing changes in it; after that it has no
// documents, and reading it is no error. In a transaction pointer and rows are of the same
// moment, however long the reader takes:
//
//	err := client.UseSession(ctx, func(ctx context.Context) error {
//		_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(ctx context.Context) (any, error) {
//			counts, err := mongodb.Live(ctx, db, "ticket_counts", "counts")
//			if err != nil {
//				return nil, err
//			}
//			return nil, counts.FindOne(ctx, filter).Decode(&row)
//		})
//		return err
//	})
func Live(ctx context.Context, db *mongo.Database, projection, name string) (*mongo.Collection, error) {
	// With majority a switch is not followed that a failover could take back.
	coll := db.Collection(checkpoints, options.Collection().SetReadConcern(readconcern.Majority()))
	filter := append(ofProjection(projection), onlyLive)
	fields := options.Find().SetProjection(bson.D{{Key: "sequence", Value: 1}})
	var live []struct {
		Place    string `bson:"_id"`
		Sequence int64  `bson:"sequence"`
	}
	for range liveReads {
		cur, err := coll.Find(ctx, filter, fields)
		if err == nil {
			err = cur.All(ctx, &live)
		}
		switch {
		case err != nil:
			return nil, failed("find the live model of projection "+strconv.Quote(projection), err)
		case len(live) != 1: // unknown, or it has read one document before a switch and one after it
		case live[0].Sequence == 0:
			return nil, fmt.Errorf("tidemark/mongodb: projection %q: %w", projection, ErrNotBuilt)
		default:
			return db.Collection(live[0].Place + "." + name), nil
		}
	}
	if len(live) > 1 {
		return nil, fmt.Errorf("tidemark/mongodb: several generations of projection %q are live, which only a change by hand can bring about; restore its checkpoints in %s", projection, checkpoints)
	}
	return nil, fmt.Errorf("tidemark/mongodb: database %q has no model of projection %q; check both names, and that the projection has been started", db.Name(), projection)
}

// liveReads is how often Live reads until it finds one live generation.
const liveReads = 3
