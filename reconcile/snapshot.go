package reconcile

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/order"
	"github.com/tidemark-go/tidemark/projector"
)

// Snapshot is the projector.Reconciler for any projection: it reads every document of the
// collections that the projection follows. The zero value is ready for use.
type Snapshot struct {
	// Mode is how the model that readers see is treated. Empty: projector.Shadow.
	Mode projector.Mode
	// ChunkRows and ChunkBytes limit a chunk: how many documents are read as of one time
	// and written in one transaction. While one is read no change is applied. 0: 20,000
	// documents, 8 MiB.
	ChunkRows, ChunkBytes int
	// RowsPerSecond limits how fast documents are read, on average. 0: no limit.
	RowsPerSecond int
	// OnProgress is told how far a rebuild has come, after each chunk. It must return soon.
	// Nil: nobody is; Runner.Status tells as well.
	OnProgress func(projector.Progress)
}

var _ projector.Reconciler = Snapshot{}

// Begin implements projector.Reconciler.
func (s Snapshot) Begin() (projector.Mode, projector.Reader) {
	if s.Mode == "" {
		s.Mode = projector.Shadow
	}
	if s.ChunkRows <= 0 {
		s.ChunkRows = 20_000
	}
	if s.ChunkBytes <= 0 {
		s.ChunkBytes = 8 << 20
	}
	if s.RowsPerSecond > 0 {
		// Small enough to be spread over each second.
		s.ChunkRows = min(s.ChunkRows, max(1, s.RowsPerSecond/10))
	}
	return s.Mode, &reader{Snapshot: s, began: time.Now()}
}

// reader reads the chunks of one rebuild.
type reader struct {
	Snapshot
	began time.Time
	rows  int64
}

// Due spreads the reads so that the limit holds on average over the rebuild.
func (r *reader) Due() time.Time {
	if r.RowsPerSecond <= 0 {
		return time.Time{}
	}
	return r.began.Add(time.Duration(float64(r.rows) / float64(r.RowsPerSecond) * float64(time.Second)))
}

func (r *reader) Report(p projector.Progress) {
	if r.OnProgress != nil {
		r.OnProgress(p)
	}
}

// Read reads a chunk in a snapshot session of its own, which is over when the chunk is
// read: the server keeps history for it meanwhile, and only for a few minutes.
func (r *reader) Read(ctx context.Context, from projector.Range) (chunk projector.Documents, err error) {
	client := from.Collection.Database().Client()
	sess, err := client.StartSession(options.Session().SetSnapshot(true).SetSnapshotTime(from.At))
	if err != nil {
		return chunk, err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, sess)
	rows := r.ChunkRows
	if from.Limit > 0 {
		rows = min(rows, from.Limit)
	}
	cur, err := from.Collection.Database().RunCommandCursor(ctx, find(from, rows))
	if err != nil {
		return chunk, fmt.Errorf("read documents of %s: %w", from.Collection.Name(), err)
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	cur.SetBatchSize(int32(min(rows, 1<<30))) //nolint:gosec // in range
	size := 0
	var memory arena
	for len(chunk.Docs) < rows && size < r.ChunkBytes && cur.Next(ctx) {
		if len(chunk.Docs) == 0 && isID(cur.Current, from.After) {
			continue // min is inclusive
		}
		chunk.Docs = append(chunk.Docs, memory.keep(cur.Current))
		size += len(cur.Current)
	}
	if err := cur.Err(); err != nil {
		return projector.Documents{}, fmt.Errorf("read documents of %s: %w", from.Collection.Name(), err)
	}
	// Only an exhausted cursor proves that nothing follows.
	chunk.Done = cur.ID() == 0 && cur.RemainingBatchLength() == 0
	if chunk.Done && !from.After.IsZero() && from.After.Type != bson.TypeMaxKey {
		if chunk.Docs, err = r.greatest(ctx, from, chunk.Docs); err != nil {
			return projector.Documents{}, err
		}
	}
	r.rows += int64(len(chunk.Docs))
	return chunk, nil
}

func isID(doc bson.Raw, id bson.RawValue) bool {
	return !id.IsZero() && order.Compare(doc.Lookup("_id"), id) == 0
}

// greatest adds the document whose _id is MaxKey, which a find with min and no max leaves
// out (seen on 6.0).
func (r *reader) greatest(ctx context.Context, from projector.Range, docs []bson.Raw) ([]bson.Raw, error) {
	cmd := bson.D{
		{Key: "find", Value: from.Collection.Name()},
		{Key: "filter", Value: bson.D{{Key: "_id", Value: bson.MaxKey{}}}},
	}
	cur, err := from.Collection.Database().RunCommandCursor(ctx, withUUID(cmd, from))
	if err != nil {
		return nil, fmt.Errorf("read documents of %s: %w", from.Collection.Name(), err)
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	if cur.Next(ctx) && (len(docs) == 0 || !isID(docs[len(docs)-1], cur.Current.Lookup("_id"))) {
		docs = append(docs, bytes.Clone(cur.Current))
	}
	return docs, cur.Err()
}

// find is the query of a chunk: by the bounds of the index on _id, whose order is that of
// the sort. A plain {$gt: last} compares within one BSON type only. And in an aggregation
// expression two _id can be equal that are not (DBPointers whose namespaces are of one
// length), so that documents would be left out (seen on 6.0).
func find(from projector.Range, rows int) bson.D {
	cmd := bson.D{
		{Key: "find", Value: from.Collection.Name()},
		{Key: "sort", Value: bson.D{{Key: "_id", Value: 1}}},
		{Key: "hint", Value: bson.D{{Key: "_id", Value: 1}}},
	}
	if !from.After.IsZero() {
		rows++ // that one itself
		cmd = append(cmd, bson.E{Key: "min", Value: bson.D{{Key: "_id", Value: from.After}}})
	}
	return withUUID(append(cmd, bson.E{Key: "batchSize", Value: rows}), from)
}

func withUUID(cmd bson.D, from projector.Range) bson.D {
	if len(from.UUID.Data) > 0 {
		cmd = append(cmd, bson.E{Key: "collectionUUID", Value: from.UUID})
	}
	return cmd
}

// arena copies documents out of the cursor's memory, many into one piece.
type arena struct{ free []byte }

const arenaBytes = 256 << 10

func (a *arena) keep(doc bson.Raw) bson.Raw {
	if len(doc) > len(a.free) {
		a.free = make([]byte, max(arenaBytes, len(doc)))
	}
	kept := a.free[:copy(a.free, doc):len(doc)]
	a.free = a.free[len(doc):]
	return kept
}
