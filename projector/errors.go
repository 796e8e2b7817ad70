package projector

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Errors to ask for with errors.Is. Each has a type with the details, to ask for
// with errors.As.
var (
	// ErrFenced: another instance has taken over.
	ErrFenced = errors.New("another instance has taken over")
	// ErrHistoryLost: the source no longer has what follows the stored position.
	ErrHistoryLost = errors.New("the source's history after the stored position is lost")
)

// ConfigError lists everything that is wrong with a projection, its options or the
// collections that it follows. All faults are found before the first change is read.
type ConfigError struct {
	Projection string
	Faults     []error
}

func (e *ConfigError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "tidemark: projection %q can't run:", e.Projection)
	for _, f := range e.Faults {
		fmt.Fprintf(&b, "\n  - %s", strings.ReplaceAll(f.Error(), "\n", "\n  - "))
	}
	return b.String()
}

// each gives what errors.Join has put together, or the error alone.
func each(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// Unwrap gives the faults.
func (e *ConfigError) Unwrap() []error { return e.Faults }

// ConnectError: a server could not be reached at the first attempt within
// Options.ConnectTimeout. (After a first contact the library retries for ever.)
type ConnectError struct {
	Projection string
	Server     string // "source" or "sink"
	After      time.Duration
	Err        error
}

func (e *ConnectError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: no contact with the %s within %s; check its address, that it runs, and the credentials: %v",
		e.Projection, e.Server, e.After, e.Err)
}

func (e *ConnectError) Unwrap() error { return e.Err }

// FencedError: another instance has taken the projection's term, or has committed
// in its place. Nothing of this instance was written after that.
type FencedError struct {
	Projection string
	Term       int64  // ours
	Theirs     int64  // the stored one
	Owner      string // who holds it
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: %s holds term %d, this instance had %d and has written nothing since",
		e.Projection, e.Owner, e.Theirs, e.Term)
}

// Is makes errors.Is(err, ErrFenced) true.
func (e *FencedError) Is(target error) bool { return target == ErrFenced }

// HistoryLostError: the change stream can't be continued from the stored position,
// since the source's oplog no longer has what follows it. The checkpoint and the
// model are untouched. The model has to be rebuilt from the source's documents.
type HistoryLostError struct {
	Projection string
	Stored     Position       // where the model stands
	Source     bson.Timestamp // where the source is now
	Oldest     bson.Timestamp // the oldest entry of its oplog; zero where the right to read it is missing
	Code       int            // the server's
	Err        error
}

func (e *HistoryLostError) Error() string {
	oldest := ""
	if !e.Oldest.IsZero() {
		oldest = ", its oplog begins at " + timeText(e.Oldest)
	}
	return fmt.Sprintf("tidemark: projection %q: history lost: the model stands at %s, the source is at %s%s; nothing was changed; the model must be rebuilt: %v",
		e.Projection, e.Stored, timeText(e.Source), oldest, e.Err)
}

// Is makes errors.Is(err, ErrHistoryLost) true.
func (e *HistoryLostError) Is(target error) bool { return target == ErrHistoryLost }

func (e *HistoryLostError) Unwrap() error { return e.Err }

// ImageLostError: the source has a change but no longer the image of its document
// that a handler needs: it has expired, or was never recorded.
type ImageLostError struct {
	Projection string
	Namespace  Namespace
	Key        string // text form of the document's _id
	Image      string // "pre-image" or "post-image"
	At         Position
}

func (e *ImageLostError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: the %s of document %s in %s, changed at %s, is gone or was never recorded; "+
		"nothing later was applied; the model must be rebuilt (keep images for longer than the longest downtime: changeStreamOptions.preAndPostImages.expireAfterSeconds)",
		e.Projection, e.Image, e.Key, e.Namespace, timeText(e.At.Time))
}

// Is makes errors.Is(err, ErrHistoryLost) true: what to do is the same.
func (e *ImageLostError) Is(target error) bool { return target == ErrHistoryLost }

// ReplacedError: a collection that the projection follows was dropped, renamed, or
// replaced as a whole, or its database was dropped. The model stands as before.
type ReplacedError struct {
	Projection string
	Namespace  Namespace // the collection or database
	Event      string    // "drop", "rename", "dropDatabase", "invalidate", or "other collection" where the UUID differs
	At         Position
}

func (e *ReplacedError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: %s was replaced or removed as a whole (%s at %s); the model holds what was there before and must be rebuilt",
		e.Projection, strings.TrimSuffix(e.Namespace.String(), "."), e.Event, timeText(e.At.Time))
}

// PoisonError: one change can't be applied, alone and repeatedly. Everything before
// its group is committed, nothing after it.
type PoisonError struct {
	Projection string
	Namespace  Namespace
	Key        string // text form of the document's _id
	Op         Op
	At         Position // of the change itself
	Err        error    // the handler's, the decoder's or the sink's reason; a PanicError where the handler panicked
}

func (e *PoisonError) Error() string {
	if e.Op == Snapshot {
		return fmt.Sprintf("tidemark: projection %q: the rebuild stopped at document %s in %s, which can't be applied; mend the document, the type or the function, and start again: %v",
			e.Projection, e.Key, e.Namespace, e.Err)
	}
	return fmt.Sprintf("tidemark: projection %q: stopped before the %s of document %s in %s (%s), which can't be applied; mend the type or the function so that it takes this change, and start again (the change stays in the stream, whatever becomes of the document): %v",
		e.Projection, e.Op, e.Key, e.Namespace, timeText(e.At.Time), e.Err)
}

func (e *PoisonError) Unwrap() error { return e.Err }

// PanicError is a handler's panic, contained.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.Value, e.Stack) }

// Unwrap gives the panic's value where it was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// CheckpointError: the stored checkpoint can't be read, or contradicts itself. It is
// left as it is.
type CheckpointError struct {
	Projection string
	Gone       bool // it was removed while the projection ran; with Options.Reconcile the model is then filled anew
	Err        error
}

func (e *CheckpointError) Error() string {
	return fmt.Sprintf("tidemark: the stored checkpoint of projection %q is malformed; it was left as it is; restore it, or remove it together with the model to start over: %v", e.Projection, e.Err)
}

func (e *CheckpointError) Unwrap() error { return e.Err }

// FormatError: the stored checkpoint was written by a newer release of this library.
type FormatError struct {
	Projection    string
	Stored, Known int
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("tidemark: the stored checkpoint of projection %q has format %d, this release knows up to %d; run a newer release", e.Projection, e.Stored, e.Known)
}

// MismatchError: the stored checkpoint was written by another projection than this
// one: another version, other collections, images or bindings, another source. The
// source would accept its position in silence and the model would be wrong.
type MismatchError struct {
	Projection string
	Differs    []string // each difference in words
	Rebuild    bool     // Options.Reconcile rebuilds the model for it: the Version was raised, or the source is another
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("tidemark: projection %q does not fit its stored checkpoint: %s; to run this code the model must be rebuilt: raise Version and set Options.Reconcile, or run the code that wrote this one",
		e.Projection, strings.Join(e.Differs, "; "))
}

// PositionError: the source can't make sense of the stored position (codes 9, 15, 260).
// The checkpoint is left as it is.
type PositionError struct {
	Projection string
	Stored     Position
	Code       int
	Err        error
}

func (e *PositionError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: the source does not accept the stored position (%s); the checkpoint was left as it is; it was altered, or is no token of this source: %v",
		e.Projection, e.Stored, e.Err)
}

func (e *PositionError) Unwrap() error { return e.Err }

// EventTooLargeError: a change and its images exceed the 16 MB of a BSON document,
// and the source can't split them. MongoDB 6.0.9 and 7.0 can.
type EventTooLargeError struct {
	Projection string
	After      Position // the last change read before it
	Err        error
}

func (e *EventTooLargeError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: the change after %s is over 16 MB with its images, and this server can't split it: "+
		"upgrade the source to MongoDB 6.0.9, 7.0 or newer: %v", e.Projection, e.After, e.Err)
}

func (e *EventTooLargeError) Unwrap() error { return e.Err }

// SourceError: the source refuses to serve the stream for a reason that retrying
// does not mend, such as a missing privilege.
type SourceError struct {
	Projection string
	Doing      string
	Err        error
}

func (e *SourceError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: %s: %v", e.Projection, e.Doing, e.Err)
}

func (e *SourceError) Unwrap() error { return e.Err }

// SinkError: the sink refuses for a reason that is not this batch's, such as a
// missing right or a missing table.
type SinkError struct {
	Projection string
	Err        error
}

func (e *SinkError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: the sink refuses to work, whatever the batch: %v", e.Projection, e.Err)
}

func (e *SinkError) Unwrap() error { return e.Err }

// RecomputeError: the rows of some keys of a Refresh can't be computed, or not be stored.
type RecomputeError struct {
	Projection string
	Binding    string
	Keys       int    // how many were asked for at once
	Key        string // text form of the first
	Err        error
}

func (e *RecomputeError) Error() string {
	return fmt.Sprintf("tidemark: projection %q: %s: the rows of %d keys (%s first) can't be recomputed; mend the function, and start again: %v",
		e.Projection, e.Binding, e.Keys, e.Key, e.Err)
}

func (e *RecomputeError) Unwrap() error { return e.Err }

// RebuildError: a rebuild can't be made, or its switch, for a reason that the error
// says what to do about. The live model is as it was.
type RebuildError struct {
	Projection string
	Err        error
}

func (e *RebuildError) Error() string {
	return fmt.Sprintf("tidemark: projection %q can't be rebuilt: %v", e.Projection, e.Err)
}

func (e *RebuildError) Unwrap() error { return e.Err }
