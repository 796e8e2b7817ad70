package projector

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Options configure a Runner. The zero value of each field is its default, but for
// Reconcile and Start, of which one must be set.
type Options struct {
	// Reconcile rebuilds the model from the source's documents: for a projection that the
	// sink does not know yet (unless Start is set), after history was lost, a collection
	// replaced, the Version raised, and whenever Runner.Rebuild is called. Use
	// reconcile.Snapshot. Nil: where a model would have to be rebuilt, Run ends with an
	// error that says why.
	Reconcile Reconciler
	// Start says where a projection begins that the sink does not know yet, without a
	// rebuild. It has no effect once there is a checkpoint. Start or Reconcile must be set.
	Start Start
	// StopOnReplace ends Run with a ReplacedError where a collection was dropped, renamed
	// or replaced as a whole, rather than have the model rebuilt from what there is now.
	StopOnReplace bool
	// KeepRetired is how long the model is kept that a rebuild has replaced, for
	// Runner.Rollback. 0: 24 h. Negative: not at all; then a reader who has looked for the
	// live one just before the switch finds it gone, in MongoDB without an error: a
	// collection that is not there has no documents.
	KeepRetired time.Duration

	// Registry decodes documents. Nil: the driver's default.
	Registry *bson.Registry
	// Logger takes what an operator should know. Nil: slog.Default().
	Logger *slog.Logger
	// Owner names this instance in the checkpoint, for people to read; a random part is
	// added. Empty: host name and process id.
	Owner string

	// BatchChanges and BatchBytes limit a commit: it is cut between source
	// transactions once it has so many changes, or changes of so many bytes. 0: 20,000
	// changes, 32 MiB.
	BatchChanges, BatchBytes int
	// TransactionBytes is how much of one source transaction is held in memory to be
	// committed as a whole. A larger one is committed in parts, which is logged and
	// counted in Status.CutTransactions. 0: 64 MiB.
	TransactionBytes int
	// BufferBytes limits what is read ahead of the commit. 0: 16 MiB.
	BufferBytes int

	// ConnectTimeout limits how long Run waits for the first contact with the source
	// and the sink. Later failures are retried for ever. 0: 30 s.
	ConnectTimeout time.Duration
	// CommitTimeout limits one attempt to commit; past it the connection counts as
	// broken. 0: 60 s.
	CommitTimeout time.Duration
	// SilenceTimeout is how long a reply of the change stream may take before the server is
	// asked, by another connection, whether it works on it. If it doesn't, the connection
	// counts as broken. 0: 20 s.
	SilenceTimeout time.Duration
	// StopTimeout limits how long Run goes on with the commit under way once its
	// context is cancelled. 0: 10 s.
	StopTimeout time.Duration
	// RefreshInterval is how long touched keys of a Refresh wait for more to come before
	// they are recomputed together. Somebody who waits for the model ends it at once.
	// 0: 1 s.
	RefreshInterval time.Duration
	// IdleInterval is how often the position of a quiet stream is stored, so that it
	// does not fall out of the source's oplog. 0: 10 s.
	IdleInterval time.Duration
}

// Start says where a new projection begins.
type Start struct {
	from string // "now" or "time"; "": not set
	at   bson.Timestamp
}

// FromNow begins with the changes made after the first start. Documents that exist
// already are not in the model: right for an empty collection, or for a projection
// that is about changes rather than documents. With a Rollup, Run refuses it where
// there are documents.
func FromNow() Start { return Start{from: "now"} }

// FromTime begins with the changes made at t or later, a cluster time that is still
// in the source's oplog.
func FromTime(t bson.Timestamp) Start { return Start{from: "time", at: t} }

func (o Options) withDefaults() (Options, []error) {
	var faults []error
	switch {
	case o.Start.from == "time" && o.Start.at.IsZero():
		faults = append(faults, errors.New("Options.Start is FromTime with a zero time; use the time that projector.Written gives, say, or FromNow"))
	case o.Start.from == "" && o.Reconcile == nil:
		faults = append(faults, errors.New("neither Options.Reconcile nor Options.Start is set, and there is no default: with Reconcile: reconcile.Snapshot{} the model is filled from the documents that exist, "+
			"and rebuilt by itself when history is lost; Start: projector.FromNow() leaves out the documents that exist (right for an empty collection), "+
			"and projector.FromTime(t) begins at a cluster time that the oplog still has"))
	}
	size := func(name string, v *int, def int) {
		if *v < 0 {
			faults = append(faults, fmt.Errorf("Options.%s is %d; it must be positive, or 0 for %d", name, *v, def))
		}
		if *v == 0 {
			*v = def
		}
	}
	length := func(name string, v *time.Duration, def time.Duration) {
		if *v < 0 {
			faults = append(faults, fmt.Errorf("Options.%s is %s; it must be positive, or 0 for %s", name, *v, def))
		}
		if *v == 0 {
			*v = def
		}
	}
	size("BatchChanges", &o.BatchChanges, 20_000)
	size("BatchBytes", &o.BatchBytes, 32<<20)
	size("TransactionBytes", &o.TransactionBytes, 64<<20)
	size("BufferBytes", &o.BufferBytes, 16<<20)
	if o.KeepRetired == 0 {
		o.KeepRetired = 24 * time.Hour
	}
	length("ConnectTimeout", &o.ConnectTimeout, 30*time.Second)
	length("CommitTimeout", &o.CommitTimeout, time.Minute)
	length("SilenceTimeout", &o.SilenceTimeout, 20*time.Second)
	length("StopTimeout", &o.StopTimeout, 10*time.Second)
	length("RefreshInterval", &o.RefreshInterval, time.Second)
	length("IdleInterval", &o.IdleInterval, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Owner == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "unknown"
		}
		o.Owner = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	var b [8]byte
	_, _ = rand.Read(b[:])
	o.Owner += "/" + hex.EncodeToString(b[:]) // no two Runners have one
	return o, faults
}
