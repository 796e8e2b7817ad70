// Package redis keeps read models in Redis, version 6.2 or newer, or a server that speaks
// like it: a single one, one watched by Sentinels, or a cluster.
//
//	type Count struct {
//		Status string `row:"status,key"`
//		N      int64  `row:"n,sum"`
//	}
//
//	var TicketCounts = redis.Projection{
//		Name: "ticket_counts", Version: 1,
//		Bindings: redis.Bindings{
//			projector.Rollup("tickets", Ticket.Counts, redis.Hash[Count]{Name: "counts"}),
//		},
//	}
//
//	runner, err := projector.New(source, redis.New(client), TicketCounts, options)
//
// # Where things are
//
// Every key of a projection begins with its name in braces. That is a hash tag: a cluster
// keeps them all in one slot, hence on one node, and a projection is as large as a node.
//
//	{ticket_counts}:live              the place of the generation that readers see
//	{ticket_counts}:g1:counts:open    a row, a hash: HGETALL gives its columns
//	{ticket_counts}:g1:counts         the index of the target: a field for each row
//	{ticket_counts}:g1:on:<name>      what handlers of On have written through Tx
//	{ticket_counts}:outside:<name>    the same, of no generation
//	{ticket_counts}:checkpoint:1      a checkpoint: its field body has the position
//	{ticket_counts}:generations       which generations there are
//
// A rebuild writes to another place, {ticket_counts}:g2, and then changes the pointer. So
// readers ask for the pointer and the rows at once, by a script, which is what [Read] and
// [Hash.Get] do: the rows that they give are of one generation and of one moment, and
// neither a switch nor the end of the old generation, a grace period later, comes between.
// A reader in another language runs the same:
//
//	EVAL "local p = redis.call('GET', KEYS[1])
//	      return redis.call('HGETALL', p .. ':counts:' .. ARGV[1])" 1 {ticket_counts}:live open
//
// [Hash.All] goes through all rows of one generation, [Live] gives its place alone. How far
// behind a model is: the field body of the checkpoint, as JSON, has the position and
// committedAt.
//
// # What a row is
//
// [Hash] is the target of the forms Rollup, Upsert, Mirror and Refresh. The end of a row's key is a
// text: for a Mirror [projector.KeyText] of the document's _id, else the text of the key's
// column, as it is; of several columns, with a bar between, and with % and | in them
// written as %25 and %7C ([Hash.Key]). The hash has a field for each column of the row
// type, the keys included, and for a Rollup contributions, their number. By Go type:
//
//	string             as it is, all bytes of it
//	bool               true, false
//	int…, uint8…32     decimal
//	float32, float64   the shortest text that means the same number; NaN, +Inf, -Inf
//	time.Time          2026-11-29T12:00:00.000Z, UTC; milliseconds since 1970 outside of the
//	                   years 0 to 9999
//	[]byte             as they are; nil is empty, not null
//	bson.ObjectID      24 hex digits
//	bson.Decimal128    12.50, 1E+30, NaN, Infinity
//	option json        JSON, see docs/types.md
//	pointers           the same; no field for nil
//
// Rows of which every column may be null have the field tm_row besides, since a hash without
// fields is no key. Sums are int64; others are refused before the start: Redis adds
// integers exactly, and nothing else. Count cents.
//
// A row of a Rollup exists while it has a contribution. Should more be taken off it than it
// has, the batch fails with a [DriftError]: a counter is never clamped. A sum that would
// exceed an int64 is an error of the batch.
//
// The index has, for each row, the mark of a rebuild in place and the _id of the row's owner.
// It is there since Redis can't list keys by their beginning but by a walk through all keys.
// It costs some 50 to 100 bytes a row.
//
// # Exactly once
//
// A commit is one transaction of Redis, on one connection:
//
//	WATCH the checkpoint
//	compare   its term, owner and sequence with the expected ones: else ErrFenced
//	queue     the handlers write: into memory, nothing is sent
//	read      what the rows hold that are concerned: sums, owners, types
//	plan      add up and decide here; overflow, drift, a foreign type: an error, nothing sent
//	MULTI     the checkpoint and the rows, as absolute values
//	EXEC      all of it, or nothing if the checkpoint was touched since WATCH
//
// Invariants:
//
//  1. Rows and checkpoint change together or not at all. EXEC runs without anything in
//     between, goes to the append-only file and to replicas as one, and a file that ends
//     within one is loaded without it (seen on 7.0). What the server refuses before, for want
//     of memory too, refuses all.
//  2. What is read between WATCH and EXEC is still so at the EXEC: only the holder of the
//     term writes to a model, and a new holder touches the checkpoint. So no row has to be
//     watched itself, and none is added to twice.
//  3. No commit of an earlier term succeeds: Acquire changes term and owner of all
//     checkpoints in one script. A commit that has compared by then fails at its EXEC, one
//     that comes later at its comparison.
//  4. No commit succeeds twice: the first of two has moved the sequence on, and what holds
//     for the term holds for it.
//  5. A commit whose answer was lost is decided by Load, which touches the checkpoint: an
//     EXEC that has not come to the server by then fails when it does. There is no lock to
//     wait for: of attempt and Load one is first, and the other sees it.
//  6. An EXEC is sent only by the connection of its WATCH. The client gives a transaction up
//     when that breaks; it does not send it again by another, which would watch nothing.
//
// EXEC does not roll back: of a command that fails in it the others stay done. So every
// command that can fail by what a key holds is checked beforehand, and sent as a value, not
// as an increment. It still fails where something else than this library writes to the same
// key within that moment. Then the commit's error is a [DamagedError], and the checkpoint is
// marked, so that each later commit fails by it as well, until a rebuild. (If the process
// dies before it has read the answer, the mark is missing. Verify finds such a row.)
//
// Where a process can die, and what is then true:
//
//	before EXEC was sent     nothing was written; the server drops the queue with the connection
//	after EXEC was sent      it is carried out or not, as a whole; the next owner reads which
//	in Acquire               the term is taken or not; taken by nobody it does no harm
//	in Switch                the pointer and both checkpoints are changed by one script, or none
//	in Discard               rows are gone, the checkpoint goes last: calling it again goes on
//	in a rebuild             the new generation stays, as far as it has come
//	before a rebuild begins  in a damaged place rows are gone, and its mark stays until the commit
//	not dead but frozen      by 3 nothing it sends counts. Redis has no locks that it could hold
//
// # What the server must be like
//
// Acquire looks at it, and refuses with all faults and what to do:
//
//   - An eviction policy allkeys-… under a memory limit removes rows, and is refused.
//     noeviction, and volatile-…, which takes keys that expire, are fine: with memory full a
//     commit is refused as a whole and tried again, until there is room.
//   - A server that writes nothing to disk is refused but for [AllowVolatile].
//   - Where neither INFO nor CONFIG GET is allowed, it says so; [TrustServer] goes on.
//   - A cluster's client that may read from replicas is refused.
//
// It looks again after a transient error of a commit, since a failover may have put another
// server in the place. One that passes between two commits, without an error, is not noticed
// before the next start: give all nodes the same settings.
//
// With appendfsync everysec, the usual setting, a loss of power takes the last second of
// commits. So does a failover to a replica that lags, since replication is asynchronous; the
// sink does not WAIT for replicas. Rows and position go back together, the runner reads from
// there again, and the model is right once it has caught up. A wait for a write that had
// ended is then no longer true for a while.
//
// # Lost rows
//
// Redis is often taken for a cache, and flushed. What is noticed:
//
//	everything, or a checkpoint   by the next commit, which is fenced, and by Load, which gives
//	                              Term 0; what is left of its generation is then discarded
//	the index of a target         by the next commit to that target, and by Acquire: the
//	                              checkpoint has the number of rows
//	a row that is added to        by the commit
//	a string or stream of Tx      by the commit that writes to it again
//	other rows                    by Acquire, and by Switch in the new generation, as far as they
//	                              are among 200 of each target taken at random: one in a hundred
//	                              gone is seen in 87 of 100 cases, one in ten always. A row that
//	                              is put again is whole again
//	hashes, sets, sorted sets and not: they go with their last member as well, so that a counter
//	lists of Tx                   in such a hash begins at 0 again. Count in strings, or in a Hash
//	the readers' pointer          is written by each commit
//
// The error is a [DamagedError], which errors.Is finds to be [projector.ErrHistoryLost]: the
// model has to be rebuilt. What a verify finds, it finds for certain.
//
// The rows of a lost index are found by what their keys begin with, when a rebuild begins in
// the same place and when the generation is discarded: by a SCAN through all keys of the
// node, a thousand at a time. Of a million keys that takes a second or so, of which the first
// commit's time limit must leave enough.
//
// # Limits
//
// A batch is sent by one EXEC, while which the server does nothing else: some microseconds a
// row. So is Clear, which a rebuild by reset begins with. The client's ReadTimeout must leave
// time for both. Ring clients work as far as their ring stays as it is.
package redis
