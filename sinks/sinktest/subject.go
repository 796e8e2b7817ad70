package sinktest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

// T is the part of *testing.T that the checks use.
type T interface {
	Helper()
	// Context is cancelled when the check is over, before its cleanups.
	Context() context.Context
	Cleanup(func())
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Features states what a sink guarantees beyond projector.Sink's own text. False
// promises less: the zero Features is a sink without transactions that keeps one row
// per document. What is stated is checked, and what is not is left out.
//
// The package's text has a table of what is usual for which kind of store.
type Features struct {
	// Transactions: the handler's writes and the checkpoint commit together or not at
	// all. (Whether the store can roll back, or is sent nothing that it might refuse, is
	// the same to the checks.) False: a versioned sink. Each row carries the version of its
	// change, so that an earlier change never overwrites a later one and a replay changes
	// nothing; rows may show before their checkpoint does, those of a failed commit too.
	Transactions bool
	// Trials: Try finds all that Commit would be refused for. It is so by itself with
	// Transactions. False, for a versioned sink: Try sends nothing to the server, and
	// finds only what the handler or the sink's own code refuses; what the server refuses
	// shows at the commit. Any Try compares with the stored checkpoint, returns an
	// error of apply and leaves the checkpoint alone.
	Trials bool
	// LoadWaits: Load and Commit take the same lock, so that a commit that was under
	// way during a Load has happened by its return, or never will. False: such a commit
	// may still happen afterwards, but then the retry under its sequence does not.
	LoadWaits bool
	// Adds: there are targets for Rollup, Store.Counts. It needs Transactions.
	Adds bool
	// DecimalSums: sums may be decimals, Store.Amounts.
	DecimalSums bool
	// Keys: there are targets for Upsert, Store.Entries and Store.Keys.
	Keys bool
	// Owners: rows with keys remember the document that wrote them last, and only its
	// changes remove them. False: versions decide. It needs Keys.
	Owners bool
	// Values: rows of every kind of value can be stored, Store.Values.
	Values bool
}

// Subject is a sink to be checked.
type Subject[Tx any] struct {
	Features Features
	// Open makes an empty store of the check's own: no projection is known to it, not
	// even the tables that hold checkpoints are there. What it opens it closes by
	// T.Cleanup. Required.
	Open func(T) Store[Tx]
	// Patience is the longest that Acquire, and Load, may take where a frozen owner
	// holds the checkpoint, and that any method may take to return once its context has
	// ended. 0: 5 s.
	Patience time.Duration
	// Rounds is how often checks at random moments are repeated. 0: 40.
	Rounds int
	// Seed of everything random, which every check logs. 0: another one each time.
	Seed uint64
}

// Store is a store of one check, and the way to look behind the sink's back.
type Store[Tx any] struct {
	// Sink opens one more instance of the sink on the store. Instances share nothing
	// else, as if they were in processes of their own. Required.
	Sink func(T) projector.Sink[Tx]

	// Documents is required, the others are as Features says. Targets must differ in
	// their Target name.
	Documents Putting[Tx, Document]
	Counts    Adding[Tx, Count]
	Amounts   Adding[Tx, Amount]
	Entries   Putting[Tx, Entry]
	Keys      Putting[Tx, Keys]
	Values    Putting[Tx, Values]

	// Live resolves what a reader of the model resolves before it reads: the place for
	// Rows that shows the live generation at this moment. It goes around the sink: it
	// reads the pointer, or names the alias, or is a constant where a switch renames.
	// Once a reader has the place it may take its time: the rows of it stay whole, be it
	// those of one generation or of the other. Required.
	Live func(ctx context.Context, projection string) (place string, err error)

	// Checkpoint reads the bytes that are stored for a generation of a projection, as
	// Encode made them, nil where there are none, and SetCheckpoint puts others in their
	// place. They go around the sink. Required.
	Checkpoint    func(ctx context.Context, projection string, generation int64) ([]byte, error)
	SetCheckpoint func(ctx context.Context, projection string, generation int64, body []byte) error

	// Refused are writes that the sink refuses for their content, at least one: best
	// one that the sink's own code refuses, one that the server refuses when it is
	// asked, and one that the server refuses at the commit. They may use the targets.
	Refused []Refusal[Tx]

	// Send makes sure that what was written so far has reached the server, for sinks
	// that queue. Nil: writes are sent at once, or nothing is before the commit.
	Send func(context.Context, Tx) error

	// Freeze holds the checkpoint as the owner does whose process was stopped in the
	// middle of a commit, until thaw is called, which must not fail when the server has
	// ended the owner's connection. The checks have a frozen owner of their own, whose
	// handler does not return; Freeze is for one that is worse. Nil: there is none.
	Freeze func(ctx context.Context, cp projector.Checkpoint) (thaw func(), err error)
}

// Refusal is a write that the sink refuses for its content.
type Refusal[Tx any] struct {
	Name  string
	Write func(context.Context, Tx) error
}

// Adding is a target that adds, and a reader of its rows.
type Adding[Tx, R any] struct {
	Target projector.Adder[Tx, R]
	// Rows reads the target's rows in a place (Checkpoint.Place, or what Store.Live gives)
	// as any reader sees them, in any order; none where the place is not there.
	Rows func(ctx context.Context, place string) ([]Sum[R], error)
}

// Sum is a stored row of an Adding.
type Sum[R any] struct {
	Row           R
	Contributions int64
}

// Putting is a target that puts, and a reader of its rows. Where the target of Documents
// or Entries is a projector.Loader or a projector.Sweeper as well, that is checked too.
type Putting[Tx, R any] struct {
	Target projector.Putter[Tx, R]
	// Rows reads the target's rows in a place (Checkpoint.Place, or what Store.Live gives)
	// as any reader sees them, in any order; none where the place is not there.
	Rows func(ctx context.Context, place string) ([]Kept[R], error)
}

// Kept is a stored row of a Putting.
type Kept[R any] struct {
	Row R
	// Owner is projector.KeyText of the document's _id. It may be "" in rows with keys
	// of a sink that keeps no owners.
	Owner string
}

func (s Subject[Tx]) patience() time.Duration {
	if s.Patience > 0 {
		return s.Patience
	}
	return 5 * time.Second
}

func (s Subject[Tx]) rounds() int {
	if s.Rounds > 0 {
		return s.Rounds
	}
	return 40
}

// fault says what is wrong with the subject itself.
func (s Subject[Tx]) fault() error {
	f := s.Features
	return refuse("%s",
		rule{"Subject.Open is nil", s.Open == nil},
		rule{"Features.LoadWaits needs Transactions", f.LoadWaits && !f.Transactions},
		rule{"Features.Adds needs Transactions", f.Adds && !f.Transactions},
		rule{"Features.DecimalSums needs Adds", f.DecimalSums && !f.Adds},
		rule{"Features.Owners needs Keys", f.Owners && !f.Keys},
	)
}

// fault says what the store lacks of what the features promise.
func (s Store[Tx]) fault(f Features) error {
	return refuse("Store.%s is missing, which the Features ask for",
		rule{"Sink", s.Sink == nil},
		rule{"Documents", s.Documents.Target == nil || s.Documents.Rows == nil},
		rule{"Counts", f.Adds && (s.Counts.Target == nil || s.Counts.Rows == nil)},
		rule{"Amounts", f.DecimalSums && (s.Amounts.Target == nil || s.Amounts.Rows == nil)},
		rule{"Entries", f.Keys && (s.Entries.Target == nil || s.Entries.Rows == nil)},
		rule{"Keys", f.Keys && (s.Keys.Target == nil || s.Keys.Rows == nil)},
		rule{"Values", f.Values && (s.Values.Target == nil || s.Values.Rows == nil)},
		rule{"Live", s.Live == nil},
		rule{"Checkpoint", s.Checkpoint == nil},
		rule{"SetCheckpoint", s.SetCheckpoint == nil},
		rule{"Refused", len(s.Refused) == 0},
	)
}

type rule struct {
	what   string
	broken bool
}

func refuse(format string, rules ...rule) error {
	var faults []error
	for _, r := range rules {
		if r.broken {
			faults = append(faults, fmt.Errorf("sinktest: "+format, r.what))
		}
	}
	return errors.Join(faults...)
}
