package projector

import "context"

// Sink stores read models and their checkpoints. The sinks of this module are in
// sinks/...; anyone may write another. Tx is what a handler writes through: all
// that it offers must be part of the transaction that commits the checkpoint.
//
// The rules that a sink must keep, whatever its store:
//
//   - Commit applies the handler's writes and the next checkpoint together, or
//     neither. It compares the stored term, owner and sequence with prev's as its first
//     step, and fails with an error that wraps ErrFenced where one differs. (The owner,
//     since a sink that was set back would give the same term once more.)
//   - Acquire and Load wait for no stranger: a transaction of a dead or frozen
//     owner that blocks them is ended.
//   - A stored checkpoint that DecodeCheckpoint refuses is left alone by Acquire and Load.
//
// A model may be there in several generations, each with a place of its own (a schema,
// a prefix of names) and a checkpoint of its own: the live one, which readers see, one
// that a rebuild fills, and one retired by the last switch. Their commits go on beside
// each other and must not stand in each other's way. All checkpoints of a projection have
// one term and owner.
//
// Methods may be called from several goroutines, for different projections and
// generations.
//
// Two further methods are optional. Versioned() bool says that the sink has no
// transactions, and keeps the version of each row instead: then a rebuild applies every
// change. Refresh(ctx, projection) error lets readers see what was committed, where that
// takes a while otherwise; WaitFor calls it.
type Sink[Tx any] interface {
	// Acquire takes the projection's term: in one step it raises the term of all its
	// generations by one, so that every commit of an earlier owner fails, and returns
	// their checkpoints by ascending Generation. For a projection that the sink does not
	// know it stores and returns one with Generation 1, Term 1, Sequence 0, Phase Live and
	// no position, whose place does not exist yet. The checkpoints are decoded before the
	// term is raised; an error leaves everything as it was.
	Acquire(ctx context.Context, projection, owner string) ([]Checkpoint, error)
	// Load reads a checkpoint under the lock that Commit takes: an attempt that has
	// reached the stored checkpoint has been decided by then, and one that comes later
	// is up against whatever is committed next under the same sequence.
	// Generation 0 is the live one, whatever its number. For a generation that the sink
	// does not know it returns one with Term 0.
	Load(ctx context.Context, projection string, generation int64) (Checkpoint, error)
	// Commit runs apply in a transaction and stores next in the same one. Prev is the
	// checkpoint that the caller believes is stored; next has its generation and term, and
	// the following sequence. Where prev.Sequence is 0 the sink first makes the place
	// that the generation lives in. An error of apply is returned with everything rolled
	// back, and can be found by errors.Is and errors.As.
	Commit(ctx context.Context, prev, next Checkpoint, apply func(context.Context, Tx) error) error
	// Try is Commit with a rollback at its end: it tells whether the sink accepts
	// what apply does.
	Try(ctx context.Context, prev Checkpoint, apply func(context.Context, Tx) error) error
	// Begin adds a generation: it stores and returns a checkpoint with Sequence 0, Phase
	// Building and a place that does not exist yet. Its term and owner are those of live, a
	// checkpoint of the same projection, which it compares as Commit does, though not the
	// sequence. What would prevent the switch in the end is refused here, as a
	// RebuildError that says what to do. A generation that is stored already is returned as
	// it is, where its term and owner are live's.
	Begin(ctx context.Context, live Checkpoint, generation int64) (Checkpoint, error)
	// Switch makes to the generation that readers see, and from a retired one, in one
	// step: a reader sees all of one or all of the other. It compares term, owner and
	// sequence of both as Commit does, and raises both sequences by one. Stored for to is
	// then to as given, but Live, and for from what it was, but Retired, each with the
	// place that it has now. A from with Sequence 0, which never had a model, is removed.
	// What must outlive a switch in the store's own terms, such as grants, is carried over.
	Switch(ctx context.Context, from, to Checkpoint) error
	// Discard removes a generation that is not live, its place and its checkpoint,
	// comparing term and owner as Commit does. One that is not there is no error.
	Discard(ctx context.Context, c Checkpoint) error
	// Classify tells what an error of the other methods, or of a handler that wraps
	// one of the sink's, means for the batch.
	Classify(error) Class
}

// Delayed says that a method of a sink, while it runs, waits for a failure to pass, a server
// that is too busy, say: Status is Retrying then, until the next commit. A sink whose methods
// return such errors instead has no need of it. Ctx is the method's own; any other does
// nothing.
func Delayed(ctx context.Context, err error) {
	if note, ok := ctx.Value(delays{}).(func(error)); ok {
		note(err)
	}
}

// delays is the key of what Delayed calls.
type delays struct{}

// Class is what an error means for the batch that met it.
type Class int

// The classes.
const (
	// Poison: refused for its content, and for ever. The batch is halved until the
	// change is alone. Also the class of every error that is not the sink's own, such
	// as a handler's.
	Poison Class = iota
	// Transient: a network error, a failover, a deadlock. The stored checkpoint is
	// read back, then the batch is tried again.
	Transient
	// Fatal: wrong whatever the batch, such as a missing right or table.
	Fatal
)
