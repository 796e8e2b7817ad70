// Package projector keeps read models in step with MongoDB. A projection follows
// collections by their change stream and writes what it makes of them into a sink, such
// as PostgreSQL, together with its position in the stream: after a crash the model goes
// on from where it stood, and no change is applied twice or left out.
//
// # A whole model
//
// A document type, a row type, a pure function from one to the other, and a binding:
//
//	type Ticket struct {
//		Status string `bson:"status"`
//	}
//
//	type Count struct {
//		Status string `row:"status,key"`
//		N      int64  `row:"n,sum"`
//	}
//
//	func (t Ticket) Counts() []Count { return []Count{{Status: t.Status, N: 1}} }
//
//	var TicketCounts = postgres.Projection{Name: "ticket_counts", Version: 1, Bindings: postgres.Bindings{
//		projector.Rollup("tickets", Ticket.Counts, postgres.Table[Count]{Name: "counts"}),
//	}}
//
// and a [Runner] that keeps it up to date until its context ends:
//
//	runner, err := projector.New(db, postgres.New(pool), TicketCounts, projector.Options{Reconcile: reconcile.Snapshot{}})
//	if err != nil {
//		return err
//	}
//	return runner.Run(ctx)
//
// # Forms
//
// A [Binding] is made by one of five functions. In the first three the user gives a pure
// function of a document, and the library works out what a change of the document means
// for the rows:
//
//   - [Rollup] adds: sums and counts per key.
//   - [Upsert] puts rows with keys of their own, any number for a document.
//   - [Mirror] puts one row for a document, or none.
//   - [Refresh] has the user say which keys a document touches, and recomputes their rows
//     from the source: joins, medians.
//   - [On] is the open form: the handler gets the changes and writes what it likes,
//     through the sink's transaction.
//
// A pure function is called for the document as it was before the change and as it is
// after it, so the collection has to keep both images (a Mirror needs the one after
// only, and none with [Lookup]). A handler of On says by its element type what it needs:
// [Change] has both, [State] the one after, [Touch] none. The runner never switches
// images on; it tells which collection lacks them, and the command to run.
//
// A function that gives nothing for a document is a filter. Whoever changes what a
// function gives raises Projection.Version: the rows that the old one has written and
// the new one would not fit together. (The checkpoint has the row types, and hashes of
// what the functions make of up to three documents of each collection, and a start under
// the same Version where that has changed is refused. It is a cheap net: it has not seen
// the other documents.)
//
// # Where a projection starts, and how it is rebuilt
//
// With [Options].Reconcile (see package reconcile) a projection that the sink does not know
// is filled from the documents that exist, and the model is rebuilt by itself whenever it
// can't be brought up to date from the stream: when history or an image was lost, when a
// collection was dropped or replaced, when the Version was raised, when the source is
// another. [Runner.Rebuild] has it rebuilt by hand, [Runner.Rollback] goes back to the
// generation before. The source is only read, in chunks, while it is written to.
//
// In the usual mode, [Shadow], readers see the old model until one moment and the new one
// from then on; where its stream is healthy the old one is kept up to date meanwhile.
// [Reset] is for a sink without the right to make a second place, [InPlace] for a Mirror,
// an Upsert or a Refresh that must stay readable without one.
//
// Without Reconcile, [Options].Start says where to begin: [FromNow] leaves out the
// documents that exist, [FromTime] begins at a time that the oplog still has; and whatever
// needs a rebuild ends Run with an error that says so.
//
// # Running
//
// [Runner.Run] blocks. Cancelling its context ends it with nil, after the commit under
// way. Passing failures, of network, elections, deadlocks, are retried for ever and are
// seen in [Runner.Status]. Everything else ends Run with one of the error types of this
// package, which say what to do. Where the model can't be brought up to date from the
// stream it is one that errors.Is finds with [ErrHistoryLost], or a [ReplacedError]. A
// [Group] runs several projections in one process.
//
// # Reading your own writes
//
// [Written] tells the time of a write, and [Runner.WaitFor] returns when the model has
// everything up to a time.
//
// # How the promises are kept
//
// A batch goes through the stages below, each in goroutines of its own and bounded by
// bytes in between; while one batch commits the next is read and decoded.
//
//	read → decode → cut into batches → handlers and commit
//
// Every decision about position is taken by the last stage, the committer, which is one
// goroutine. The rest of this text argues that what it does is right.
//
// The stored state is a [Checkpoint]: Term, Sequence, Position, Settled and more. The
// sink's part is three rules (see [Sink]): a commit applies the handlers' writes and the
// next checkpoint together or neither; it fails where the stored term or sequence is not
// the expected one; and a read of the checkpoint waits for a commit under way.
//
// States of the committer, c being the checkpoint that it believes is stored:
//
//	gather   takes what has been read; waits only when nothing can be committed.
//	attempt  has a batch B that follows c, and next = (c.Term, c.Sequence+1, B's end);
//	         commits B and next provided that c is stored. Success: c = next, gather.
//	unknown  the attempt failed as a connection does, or the fence refused it.
//	         Reads the checkpoint under the lock of commits:
//	         next is stored          → it happened: c = next, gather
//	         c is stored             → it did not, and never will: attempt
//	         a later term            → fenced: end
//	         our term or an earlier  → the sink has gone back, or on without us: reopen
//	         nothing                 → someone has removed it: end
//	reopen   drops all that was read, takes what is stored as c (and the term anew, if
//	         the sink has forgotten that it was taken), opens the stream there.
//	bisect   B was refused for its content: commits its halves, each an attempt of its
//	         own; a single group is narrowed down by trials that are rolled back, until
//	         the change is known that can't be applied: end, with its name.
//
// Invariants:
//
//  1. The position is never ahead of the rows, nor behind them: they are written by one
//     transaction, and by nothing else. That is the sink's first rule.
//  2. Nothing that was read is dropped but in reopen and at the end, and both go back to
//     the stored position. Batches are taken from the front of the queue, in the order of
//     the stream; a broken stream is opened after the last event read; an event that
//     can't be decoded, or lacks an image, stays in the queue as an error that no batch
//     passes.
//  3. A position is only ever the token of an event that is applied, the token of an
//     empty reply when all before it is applied, or a time that nothing was read from yet.
//     The token of a stream just opened is none of these: it can already be past an event
//     to come. So a first start stores a time, and opens the stream after that.
//  4. A batch is cut between groups, the runs of changes with one cluster time: a source
//     transaction is one. A group ends where a change with another time follows or a getMore
//     is answered empty; the number of events in a reply and its token say nothing. The
//     open group at the end is held back if it is a transaction. If not it is committed
//     as far as it has come, for an idle system would else wait for the next change; and
//     a transaction over Options.TransactionBytes is committed in parts, and counted.
//  5. A checkpoint is settled if its batch ended between groups that are closed: then the
//     rows are the source as it was at Position.Time, no more and no less. After an
//     unsettled commit the next empty reply is committed at once; under writes without a
//     pause, where no reply is empty, a commit is held back for the end of its group once a
//     second, and whenever somebody waits.
//     An empty reply of a stream opened again counts only once the stream has moved on:
//     after a failover the server may not have come to that place yet.
//  6. One writer: a new owner raises the stored term and reads the position under one
//     lock, that of commits. Each later commit of the old one fails by the fence, however
//     late it is sent, and the new one has seen all that were before.
//  7. One commit of a sequence: of two attempts with the same c, because the answer to the
//     first was lost, the second to reach the sink finds that c is no longer stored. The
//     term alone would not do, as both have the same.
//
// Where a process can die, and what is then true:
//
//	before the commit is sent      c is stored, with the rows of c. The batch is read again.
//	in the transaction             the sink rolls it back: as above.
//	after COMMIT was sent          either c or next is stored, each with its rows; the new
//	                               owner reads which, and waits for the lock to do so.
//	after the commit, before its   next is stored; only the process did not know it.
//	answer is read
//	in a first start               either nothing is stored but the term, and the start
//	                               time is chosen anew, or the empty model and its time are.
//	between reopen and the next    what is stored is untouched by reopen.
//	commit
//	not dead but frozen            a new owner has the term: by 6 nothing it sends counts. Sinks
//	                               end a frozen owner's transaction, so its locks go too.
//
// # How a rebuild keeps them
//
// A rebuild fills a generation: a place in the sink and a checkpoint, both its own. It
// follows the stream with a committer of its own, from a position P taken before its first
// read, by the rules above; and it copies documents in order of _id, a chunk at a time. Its
// frontier says, for each collection, up to which _id it has copied, in the order that the
// server sorts by. The invariant that everything here serves:
//
//	I   After each commit the generation is exactly f(the documents of the source as of
//	    the position, whose keys are at or below the frontier).
//
// It holds after the first commit: the position is P, the frontier is before every key, and
// the model is empty. Each step keeps it:
//
//	change   A batch is applied as far as its keys are at or below the frontier; what is
//	         beyond is dropped, since its chunk will be read at a later time and contain it.
//	         A collection that is not begun has all its keys beyond.
//	chunk    Only where the position is settled, at a time T: then all of the source's
//	         changes up to T are behind it and none later. The chunk is read in a snapshot
//	         session as of T itself, and no change is applied between the beginning of its
//	         read and its commit; changes wait in the bounded buffer. The commit has the
//	         rows, the new frontier and the same position. So the documents enter the model
//	         as they were at the position, wherever the source is by then.
//	advance  T must be within the history that the server keeps for snapshots. If it is over
//	         a minute old, as on a quiet source, a time N of the source is taken, and the
//	         position is moved to N when the stream has passed it: when the next change is
//	         later than N, or an empty reply's token is at or beyond the token of a stream
//	         that is opened at N. Should a change still come that is not later than the
//	         position, then tokens don't order as that comparison takes for granted: it is
//	         noticed, and the generation given up.
//	end      A collection is done when the cursor of a chunk was exhausted; a short chunk
//	         proves nothing. Its upper bound is open from then on.
//	switch   When all collections are done, the position is advanced once more, the old
//	         generation's stream is stopped, and its checkpoint read under the lock. When the
//	         new one's position is not before that, one step of the sink, fenced by both
//	         checkpoints, makes the new one live and retires the old: a reader never goes
//	         back in time, and what [Runner.WaitFor] has promised stays true.
//
// Because of I two documents never claim one row of an Upsert at a time at which the source
// did not have it so, and sums never pass through values that would have to be mended: a
// nearly right version commits chunks wherever they happen to arrive and repairs later.
//
// A read names the collection's UUID: of a collection that was dropped or renamed, the
// server would give no documents and no error (seen on 6.0). That, a drop or rename in the
// stream, and lost history or images, end the attempt; it is begun anew, and after three in
// a row Run ends with a [RebuildError], or goes on with the old model if that is healthy.
// An image that is lost for a change beyond the frontier is not needed, and stops nothing.
//
// Where a process can die: the generation's checkpoint has position and frontier, so any
// commit is a place to go on from, and what was read and not committed is read again, at the
// position as it is then. Between a switch and the note of it the sink tells which
// generation is live. A generation that was begun and has committed nothing is removed by
// the next rebuild.
//
// A sink that keeps a version per row (Elasticsearch) applies every change, wherever the
// frontier is: it can lose a checkpoint that was not written though the rows were, and the
// rows of a document that is deleted in between would otherwise be left over. Reset is a
// rebuild whose first commit clears the live rows, or, where that is too much for one (see
// [Emptier]), whose first commits do, each some of them: until then nothing is copied, so
// that no change is applied either, and one that was interrupted before its first chunk
// begins anew. In place the rows beyond the frontier are the old model's; each row written
// is marked, and what has another mark in the end is removed.
//
// # What it rests on
//
// A sink does not lose a commit that it has confirmed. One that does (a failover to a standby that lacks the last transactions) goes back in rows and
// position together, and the committer reopens from there: the model is right again once
// the stream has caught up, though readers saw it go back, and a wait that had ended is no
// longer true for a while. And documents are read as of the change: with [Lookup]
// they are read as of later, so that a reader may see a part of a source transaction.
package projector
