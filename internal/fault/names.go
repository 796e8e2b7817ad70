package fault

// A Point is a named place in the code, passed on the way of every batch.
type Point string

// The points, in the order in which a batch passes them.
const (
	StreamOpen     Point = "stream.open"     // about to open a change stream
	CommitBegin    Point = "commit.begin"    // a batch is cut, the sink's transaction not begun
	HandlerBegin   Point = "handler.begin"   // inside the sink's transaction, before the projection's writes
	HandlerEnd     Point = "handler.end"     // the projection's writes are queued or done
	CommitSend     Point = "commit.send"     // the sink is about to send its COMMIT
	CommitAnswer   Point = "commit.answer"   // the sink's answer to COMMIT has arrived
	CommitDone     Point = "commit.done"     // the runner has taken note of the commit
	CommitRetry    Point = "commit.retry"    // the stored checkpoint has been read back, the batch goes again
	ChunkRead      Point = "chunk.read"      // a rebuild's chunk is read and decoded, its commit not begun
	Recompute      Point = "refresh.read"    // about to recompute keys of a Refresh
	SwitchBegin    Point = "switch.begin"    // a rebuilt generation is about to become the live one
	SwitchDone     Point = "switch.done"     // it has become so in the sink
	AliasSend      Point = "alias.send"      // Elasticsearch: the aliases are about to follow the checkpoint
	StreamReopens  Point = "stream.reopens"  // a broken stream is about to be opened again
	GenerationStep Point = "generation.step" // a sink is between two steps of taking a term or discarding a generation
)

// A Guard is a check that keeps a promise.
type Guard string

// The guards.
const (
	FenceTerm      Guard = "fence.term"      // a commit compares the term
	FenceSequence  Guard = "fence.sequence"  // a commit compares the sequence
	FenceRaises    Guard = "fence.raises"    // a fence that matches no row is an error of the transaction
	ReadBack       Guard = "commit.readback" // after a lost answer the checkpoint is read before the retry
	EndBlockers    Guard = "acquire.kill"    // a new owner ends the connections that block it
	HoldGroup      Guard = "group.hold"      // the last group is held back until it is closed
	WholeGroups    Guard = "group.whole"     // a batch is cut between groups only
	RenameTarget   Guard = "stream.to"       // the stream's filter lets renames onto a collection pass
	DropDatabase   Guard = "stream.drop"     // the stream's filter lets dropDatabase and invalidate pass
	IdlePosition   Guard = "stream.idle"     // a quiet stream's position is stored
	StreamResume   Guard = "stream.resume"   // a broken stream goes on after the last event read
	StreamWatch    Guard = "stream.watch"    // a connection of the stream that has fallen silent is noticed
	SplitEvents    Guard = "stream.split"    // the server splits events over 16 MB
	TerminalCodes  Guard = "stream.terminal" // errors that opening again can't mend end the stream
	InjectiveKeys  Guard = "key.injective"   // text forms that could be mistaken for another type's are quoted
	IsolateRunner  Guard = "group.isolate"   // a failing runner of a Group leaves the others alone
	Frontier       Guard = "chunk.frontier"  // changes beyond a rebuild's frontier are dropped
	ChunkAt        Guard = "chunk.at"        // a chunk is read as of the position that it enters the model at
	ChunkHold      Guard = "chunk.hold"      // no change is applied from the moment a chunk is read until it commits
	ChunkSettled   Guard = "chunk.settled"   // a chunk is read at the end of a group only
	ChunkProof     Guard = "chunk.proof"     // the stream has passed a time before a chunk is read as of it
	ChunkDone      Guard = "chunk.done"      // the last chunk's upper bound is open
	ChunkUUID      Guard = "chunk.uuid"      // a chunk's read names the collection's UUID
	ChunkFrontier  Guard = "chunk.together"  // a chunk's rows and the frontier are one commit
	SwitchOrder    Guard = "switch.order"    // the new model's position is not before the old one's
	Sweep          Guard = "rebuild.sweep"   // rows that an in-place rebuild has not written are removed
	RowVersion     Guard = "row.version"     // Elasticsearch: a document is written with its change's version
	RouteDelete    Guard = "route.delete"    // Elasticsearch: a document is removed from the routes that it is not in
	ItemResults    Guard = "bulk.items"      // Elasticsearch: the answer to each item of a bulk request is looked at
	CompareAndSet  Guard = "checkpoint.cas"  // Elasticsearch: the checkpoint is stored by the sequence number it was read with
	AliasToken     Guard = "alias.token"     // Elasticsearch: a change of the aliases that is late by a switch is refused
	ExpandEvents   Guard = "stream.plain"    // the stream asks for ordinary events only, not for DDL
	FenceWatch     Guard = "fence.watch"     // a commit fails where its checkpoint is touched meanwhile
	LoadTouches    Guard = "load.touch"      // a Load makes commits fail that are under way
	CheckTypes     Guard = "commit.types"    // what a key holds is asked before it is written to
	CountRows      Guard = "commit.rows"     // rows that are gone are noticed by their number
	DiscardCheck   Guard = "discard.check"   // a late Discard leaves alone what a newer generation has in its place
	DiscardNote    Guard = "discard.note"    // what is left of a first generation keeps a late first Acquire out
	RefreshPending Guard = "refresh.pending" // the touched keys of a Refresh that wait are stored with the checkpoint
	AcquireAll     Guard = "acquire.all"     // Acquire looks again for generations that it has not raised
	IndexNames     Guard = "index.names"     // Elasticsearch: an index has a name that none had before it
	KeyOwners      Guard = "key.owners"      // Elasticsearch: a later part of a transaction leaves alone the rows that an earlier one has put
	AliasFollow    Guard = "alias.follow"    // Elasticsearch: Acquire compares the aliases with the checkpoint
	RemoveStray    Guard = "stray.remove"    // Redis: rows that no index tells of are found by what their keys begin with
)
