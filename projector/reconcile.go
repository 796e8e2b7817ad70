package projector

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Reconciler says how a model is rebuilt from the source's documents: reconcile.Snapshot
// is one. This package decides when and where each chunk of documents enters the model;
// the Reconciler reads them.
type Reconciler interface {
	// Begin is called once for each rebuild, also for one that goes on after a restart.
	Begin() (Mode, Reader)
}

// Reader reads the documents of one rebuild, one chunk at a time. Report may be called
// while Read runs.
type Reader interface {
	// Read gives the next chunk of a collection: documents in the server's order of _id,
	// all as of one cluster time. An error is retried, unless it is one that the stream
	// would end with, too.
	Read(context.Context, Range) (Documents, error)
	// Due is when the next chunk may be read. A zero time, or one that is past: at once.
	Due() time.Time
	// Report is told how far the rebuild has come, after each commit. It must return
	// soon.
	Report(Progress)
}

// Range says which documents to read.
type Range struct {
	Collection *mongo.Collection
	// UUID is the collection's, to be named in the read: a snapshot read of a collection
	// that was dropped or renamed gives no documents otherwise, and no error.
	UUID  bson.Binary
	After bson.RawValue  // only documents with a greater _id; zero: from the first
	At    bson.Timestamp // as of this cluster time
	Limit int            // most documents, as more were too much for the sink; 0: as the Reader likes
}

// Documents is a chunk of a collection.
type Documents struct {
	Docs []bson.Raw
	// Done says that nothing follows: the cursor was exhausted. A short chunk says
	// nothing.
	Done bool
}

// Progress is how far a rebuild has come.
type Progress struct {
	Mode       Mode
	Cause      string
	Began      time.Time
	Collection string        // being copied; empty once all are
	Rows       int64         // documents copied so far; never falls
	Estimate   int64         // how many there are about, 0 where not known
	PerSecond  float64       // documents copied, over this process's part of the rebuild
	Left       time.Duration // about, 0 where not known
	Done       bool          // the model is in place
	SinkRows   int64         // rows in the model's targets, once Done; InPlace only
}
