// Package mongodb keeps read models in MongoDB, version 6.0 or newer, on a replica set:
// the source's own or another one.
//
//	type Count struct {
//		Status string `row:"status,key"`
//		N      int64  `row:"n,sum"`
//	}
//
//	var TicketCounts = mongodb.Projection{
//		Name: "ticket_counts", Version: 1,
//		Bindings: mongodb.Bindings{
//			projector.Rollup("tickets", Ticket.Counts, mongodb.Collection[Count]{Name: "counts"}),
//		},
//	}
//
//	runner, err := projector.New(source, mongodb.New(client.Database("models")), TicketCounts, options)
//
// # Where things are
//
// A model's collections are in the database given to [New], and have names that begin
// with the place of the model's generation. That of the first is the projection's name:
// ticket_counts.counts above. A rebuild, and a first load is one, fills the second in
// ticket_counts.g2.counts, and then makes that the live one, so readers let [Live] find the
// collection:
//
//	counts, err := mongodb.Live(ctx, db, "ticket_counts", "counts")
//
// Checkpoints are in tidemark.checkpoints, a document per generation. How far behind a
// model is: updatedAt there is the time of its last commit, and body has the position.
//
// The database may be the one that is followed: the stream asks for the collections that
// the projection follows, and sees neither the model nor the checkpoints. Writing to a
// collection that the projection itself follows is refused.
//
// # Writing
//
// [Collection] is the target of the forms Rollup, Upsert, Mirror and Refresh: it makes its
// collection in the transaction of the model's first commit, and writes a batch by
// unordered commands of half a megabyte. Handlers of the form On write through [Tx].
//
// What a row is:
//
//	Rollup  {_id: {<keys>}, <sums>, contributions}
//	Upsert  {_id: {<keys>}, <fields>, _owner}   _owner is the _id of the row's document, and indexed
//	Mirror  {_id, <fields>}                     _id is the document's own, of whatever type
//
// A rebuild in place adds _mark to the rows that it has put.
//
// Keys are in the order of the row type's fields, which is part of an _id's value: to
// find a row by its key, give all of it in that order. A part of it, such as
// "_id.status", wants an index of its own; make it in the projection's Setup.
//
// What a field is, by its Go type:
//
//	string             string       valid UTF-8; else refused, and the error names the field
//	bool               bool
//	int…, uint8…32     long
//	float32, float64   double
//	time.Time          date         to the millisecond
//	[]byte             binData      subtype 0; nil is empty, not null
//	bson.ObjectID      objectId
//	bson.Decimal128    decimal
//	option json        what the JSON is (see docs/types.md): an embedded document, an array or
//	                   a value; whole numbers as long, others as double, longer ones as
//	                   decimal; null for nil
//	pointers           the same     null for nil
//
// The option json goes by json tags, not by bson ones, so that a row type means the same
// in every sink; a time.Time inside it becomes a string.
//
// A rollup row exists while it has a contribution, and contributions is their number.
// Should more be taken off a row than it has, the batch fails with a [DriftError]: a
// counter is never clamped. Sums are exact or refused: an int64 that overflows, and a
// Decimal128 that would need more than 34 digits, which the server would round in
// silence, are errors of the batch.
//
// # Exactly once
//
// A commit is one multi-document transaction that changes the rows and the checkpoint,
// committed by a majority. Its first statement, the fence, updates the checkpoint where
// term, owner and sequence are the ones that the committer has seen; where that matches
// nothing, the transaction is aborted and the error wraps [projector.ErrFenced]. So:
//
//  1. Rows and checkpoint change together or not at all. A crash before the commit is
//     carried out leaves both as they were, one after it leaves both new.
//  2. No commit of an earlier term succeeds. Acquire raises the term by a write of its
//     own. A transaction that had passed its fence by then holds the document, and
//     Acquire waits for its end, or makes one; one that comes to its fence later
//     finds the new term, or, where its snapshot is older than Acquire's write, gets a
//     write conflict.
//  3. No commit succeeds twice: the first of two has moved the sequence on, and what
//     holds for the term holds for it.
//  4. A commit whose answer was lost is decided by Load, which writes to the document,
//     too: every transaction that has passed its fence has been committed or aborted
//     when Load returns, and falls under 3 if it comes to its fence later. Load
//     returns once a majority has its write, and with it all that it has read. A
//     primary that has been superseded without knowing can't get that majority, so it
//     can neither take the term nor vouch for a commit that is about to be rolled back.
//
// A commit of unknown outcome (UnknownTransactionCommitResult) is sent again for ten
// seconds, the commit alone: the server answers for the first one. The body of a
// transaction is run again by the caller only, after Load.
//
// # Owners that die or freeze
//
// The server does not end a transaction when its client dies: its locks stay for
// transactionLifetimeLimitSeconds, 60 by default. So the checkpoint has the id of the
// session that the owner's transactions run in. Whoever is kept from the document for
// longer than a second reads that id and kills the session, which aborts the
// transaction at once. It is always the right one: an owner stores its session, by a
// majority, before it begins its first transaction, and nobody can put another in its
// place while one of its transactions holds the document. Killing late does no harm
// either, to an owner that has just ended its transaction or a new one: what is aborted
// is tried again, after Load.
//
// What holds a document runs in the session of one of the generations, a switch that of
// two; so all sessions that the projection's documents name are killed. They are one
// owner's.
//
// Between the killing and the retry nothing of the killed transaction can slip in. Its
// commit, sent before or later, is answered with NoSuchTransaction; so the frozen owner
// that wakes up writes nothing. Its first statement, had it been on its way all the
// time, would begin it again, but can only pass a fence of which term and sequence are
// still the stored ones, and nobody will send a commit for it: it holds the document,
// and is killed like any other.
//
// An owner uses one session per generation for as long as its term lasts. The server knows the
// transactions of a session by rising numbers; each ends the one before, and what comes
// late of that is refused. So an owner's own lost attempts are in its way for no longer
// than its next one. After a commit that was cancelled, or lost, the sink begins and
// aborts an empty transaction for that reason.
//
// Killing needs no right of its own as long as all instances log in as the same user;
// with different ones a takeover takes until the server's limit.
//
// # Generations
//
// Each generation has a document, a session and collections of its own, and no commit
// writes to anything of another's: commits to two generations go on beside each other. The
// field phase of the document tells readers which generation is live. These are all
// changes of it:
//
//	Acquire  inserts the first generation, live, where the projection has no document
//	Begin    inserts one that is building
//	Switch   live → retired (or removed, if it never had a commit) and building or
//	         retired → live, in one transaction that compares term, owner and sequence of both
//	Discard  building or retired → gone
//
// So one generation is live at any time, and it is another from the moment of the
// switch's commit. Renaming collections would be none of that: it is not allowed in
// transactions, waits for open ones, and ends cursors. A collection that was live stays
// as it is for those who still read it, until it is discarded.
//
// Acquire raises one document after the other, each by a write that is conditional on the
// document being as it was read, and is done when it finds none that is not raised. That
// is as good as one step:
//
//  1. The new owner begins after the last is raised. By then every document refuses every
//     earlier owner; until then an earlier owner may commit to those not raised yet, in the
//     ordinary way, and the new one reads what it has committed.
//  2. A generation that begins meanwhile is found: Begin is a transaction that writes to
//     the document of another generation as well. Either that comes before the document is
//     raised, and then Acquire finds the new document when it looks again; or it fails.
//     Nor can a switch come in between: it compares both documents.
//  3. No two instances take the same term. The term is one above the highest stored, and
//     who takes it has raised the first document to it, from what nobody else has changed
//     since the highest was read.
//  4. A crash, or an error, in between leaves documents of different terms. An earlier
//     owner finds itself fenced by the one it commits to next, or not, and is right either
//     way; whoever acquires next takes a term above all of them.
//
// (One transaction over all documents would be a transaction of an instance whose session
// no document names, so that nobody could end it.)
//
// Discard marks the document as gone, which is the fenced step: from then on the
// generation is not there for any method, and no transaction writes to its
// collections. Then it drops the collections, then it removes the document. After a crash
// the next Acquire, Begin or Discard goes on. Discard drops the collections that the
// generation has noted in its document when it wrote to them, and no others, whatever
// their names. And since a process can freeze in the middle, and wake up when the place is
// that of another generation of the same number, it looks for the collections, then looks
// whether the document is still that of the generation that is gone, and then drops
// them by their UUIDs. The document of a first generation is emptied rather than removed:
// an instance that wanted to insert it, and froze, must not find room for it.
//
// What people have added to a live collection by hand (indexes, validation, images) the
// next generation's takes over when it is made, by Create or by a first write, while that
// generation is being built; one that comes to be after the switch takes over nothing. An
// index that the projection makes itself comes before one of the live collection that has
// its keys or its name. So an index that the projection no longer makes stays, until
// somebody drops it. Views can't follow a switch, so there must
// be none on a model's collections when a rebuild begins. Grant the right to read on the
// database, not on collections: the next generation's have other names.
//
// # Limits
//
// A transaction takes 30 s at most, see [TimeLimit]. Nor can it
// change any number of documents: the server's cache has to hold what is not committed, and
// where it doesn't, the error is a write conflict each time. So a handler that clears a
// collection in Projection.Reset can do that with a few hundred thousand documents; the
// model's own collections are emptied by ten thousand in a commit. Documents have 16 MB at most; one
// that doesn't fit stops the projection as any change that can't be applied does.
// Single servers have no transactions: make them a replica set of one. Sharded clusters
// are not tested.
package mongodb
