package mongodb

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// markField holds the mark of the rebuild in place that has put the row.
const markField = "_mark"

// Prepare implements projector.Sweeper. Documents take a mark as they are.
func (c Collection[R]) Prepare(context.Context, *Tx) error {
	_, err := c.planFor(keyed, mirrored)
	return err
}

// Sweep implements projector.Sweeper. It reads the collection in the order of _id, up to as
// many rows without the mark as it may remove, and goes on where the last commit's Sweep
// has ended: there is no index on marks, which every row put at any time would have to pay
// for.
func (c Collection[R]) Sweep(ctx context.Context, tx *Tx, limit int) (int, error) {
	if _, err := c.planFor(keyed, mirrored); err != nil {
		return 0, err
	}
	if tx.mark == 0 {
		return 0, fmt.Errorf("tidemark/mongodb: collection %q: rows are swept in a rebuild in place only", c.Name)
	}
	return tx.remove(ctx, c.Name, bson.D{{Key: markField, Value: bson.D{{Key: "$ne", Value: tx.mark}}}}, limit)
}

// remove deletes up to limit rows that match, in the order of _id. It goes on where the last
// commit of the same rebuild has ended.
func (tx *Tx) remove(ctx context.Context, name string, filter bson.D, limit int) (int, error) {
	if limit <= 0 {
		return 0, nil
	}
	coll := tx.Collection(name)
	byID := bson.D{{Key: "_id", Value: 1}}
	fields := options.Find().SetProjection(byID).SetHint(byID).SetSort(byID).SetLimit(int64(limit)).SetBatchSize(int32(min(limit, findBatch))) //nolint:gosec // at most findBatch
	if last := tx.sess.swept[name]; tx.rebuild != 0 && last.rebuild == tx.rebuild {
		fields.SetMin(bson.D{{Key: "_id", Value: last.id}}) // $gt would find _ids of the same type only
	}
	var ids []bson.RawValue
	err := coll.find(ctx, filter, fields, func(r bson.Raw) error {
		ids = append(ids, copied(r.Lookup("_id")))
		return nil
	})
	if err == nil {
		err = coll.bulk(ctx, deletions("_id", ids))
	}
	if err != nil {
		return 0, failed(fmt.Sprintf("remove rows of collection %q", name), err)
	}
	if len(ids) > 0 {
		tx.swept[name] = swept{tx.rebuild, ids[len(ids)-1]}
	}
	return len(ids), nil
}

// swept is how far a rebuild has removed rows: up to this _id there are none any more that it
// is to remove. What it puts later is not of that kind, so that is so for as long as the
// session's commits follow one another, and their fence sees to that.
type swept struct {
	rebuild int64 // its mark
	id      bson.RawValue
}

// Count implements projector.Sweeper.
func (c Collection[R]) Count(ctx context.Context, tx *Tx) (int64, error) {
	n, err := tx.Collection(c.Name).CountDocuments(ctx, bson.D{})
	if err != nil {
		return 0, failed(fmt.Sprintf("count the rows of collection %q", c.Name), err)
	}
	return n, nil
}
