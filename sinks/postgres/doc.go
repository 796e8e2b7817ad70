// Package postgres keeps read models in PostgreSQL, version 15 or newer.
//
//	type Count struct {
//		Status string `row:"status,key"`
//		N      int64  `row:"n,sum"`
//	}
//
//	var TicketCounts = postgres.Projection{
//		Name: "ticket_counts", Version: 1,
//		Bindings: postgres.Bindings{
//			projector.Rollup("tickets", Ticket.Counts, postgres.Table[Count]{Name: "counts"}),
//		},
//	}
//
//	runner, err := projector.New(db, postgres.New(pool), TicketCounts, options)
//
// # Where things are
//
// A model lives in a schema that is called like its projection: readers use
//
//	select * from ticket_counts.counts
//
// The schema is made by the model's first commit, where it isn't there already; a role
// without the right to create schemas gets an error that names the statement to run.
// Checkpoints are in tidemark.checkpoints, a row per projection and generation, made when
// the first projection starts. How far behind a model is: now() - updated_at, in the row
// whose phase is live, is the time since its last commit, and body has the position.
//
// # Writing
//
// [Table] is the target of the forms Rollup, Upsert, Mirror and Refresh: it makes its table from
// the row type, and writes a batch by one set-based statement, or two where rows go.
// Handlers of the form On write through [Tx], SQL of their own or a Table as well.
//
// What a Table stores, by the type of the field:
//
//	string             text              no NUL, valid UTF-8; else refused, and the error names the column
//	bool               boolean
//	int…, uint8…32     bigint
//	float32, float64   double precision
//	time.Time          timestamptz       to the millisecond, as BSON dates are; 4713 BC to 294276
//	[]byte             bytea             nil is empty, not null
//	bson.ObjectID      text              24 hex digits
//	bson.Decimal128    numeric           exact; NaN and ±Infinity too (PostgreSQL 14), but not in a sum
//	option json        jsonb             JSON, see docs/types.md; null for nil; no NUL, valid UTF-8
//	pointers           the same          null for nil; all else is not null
//
// Columns of the library's own: contributions (bigint) in a Rollup's table, the number
// of contributions that a row is made of; _id (text) in the others, the document that
// a row comes from, or the key of a Refresh, as by [projector.KeyText] (a string 42 is
// "42", with its quotes, as 42 is a number). Text in keys and in _id is ordered byte
// by byte (collation "C").
//
// A rollup row exists while it has a contribution. Should more be taken off a row than
// it has, the batch fails with a [DriftError]: a counter is never clamped.
//
// # Exactly once
//
// A commit is one transaction that changes the rows and the checkpoint. Its first
// statement, the fence, updates the checkpoint's row where term and sequence are the
// ones that the committer has seen, and raises an error where it matches none. So:
//
//  1. Rows and checkpoint change together or not at all. A crash before COMMIT leaves
//     both as they were, a crash after it leaves both new.
//  2. No commit of an earlier term succeeds: Acquire raised the term under the same
//     row lock. A frozen owner that wakes up and sends the rest of its transaction gets
//     the fence's error, and everything sent behind it is skipped, the COMMIT included.
//  3. No commit succeeds twice: the first attempt of two has moved the sequence on. That
//     holds for an attempt that arrives late on another connection, too.
//  4. A commit whose answer was lost is decided by Load, which waits for the row's lock:
//     an attempt that had come as far as the row has been committed or rolled back by
//     then, and one that comes later falls under 2 or 3.
//
// Acquire and Load end whoever holds the row for longer than a second, or the advisory lock
// under which a projection's first checkpoint is stored, since a client
// frozen in the middle of a pipeline or of a COPY is beyond all timeouts of PostgreSQL
// 15. They terminate backends of the same role, of which the transaction is rolled
// back. A client frozen between two round trips is ended by the server after
// [IdleTimeout].
//
// This holds as far as PostgreSQL's own durability does: with synchronous_commit off,
// or after a failover to a standby that lacks the last commits, rows and checkpoint go
// back together, and the stream is applied again from there.
//
// # Generations
//
// A rebuild in a shadow fills a second generation of the model, in a schema of its own
// that has the generation's number behind the projection's name, such as
// ticket_counts$2. It has a row of checkpoints of its own, so that commits of the two don't
// wait for each other. The switch renames both schemas, the live one to ticket_counts$1,
// in the transaction that changes both checkpoints. Nothing of a Table names a schema, and
// search_path does for what a handler writes: use no schema's name for the model's own
// tables there.
//
//	Begin    compares the term under the live row's lock; drops what an earlier life of the
//	         model has left under the names that it needs; adds a row. A crash before its
//	         COMMIT leaves nothing, one after it a generation that Acquire returns.
//	commit   the first one makes the schema and the tables, as that of a new model does.
//	Switch   locks both rows, in the order of generations as everybody who locks two does;
//	         compares term, owner and sequence of both; carries over; renames; stores both.
//	         All of it is one transaction: whoever dies in it leaves the old model live,
//	         and a repetition after a lost answer finds sequences that have moved on.
//	Discard  drops the schema and removes the row in one transaction.
//
// Acquire raises the term in all rows of the projection, and no row escapes it: Begin adds
// one under the live row's lock only, and Acquire, when it has that lock, looks again.
//
// What the switch carries over to the tables, views and sequences of the same name: grants
// on them, their columns and the schema, all in the owner's name from then on; owners, where
// this role has their rights; comments. The live schema's default privileges are given to the
// new one before its tables are made, and so to tables that the live one has not got. Where the
// generation goes back to one that was live before, rights revoked since are taken from it as
// well, whoever granted them. Indexes that people have made on the live tables are made on the
// new ones when these are still empty.
//
// What can't be carried over is refused when the rebuild begins, each by name, and again at
// the switch:
//
//   - What depends on the tables from another schema: views, foreign keys, functions by their
//     arguments or an SQL-standard body, publications.
//   - What was added in the model's schema other than by the projection: tables, views, sequences
//     that are no column's, functions and procedures; and on its tables columns, triggers, rules,
//     policies, row level security, and constraints (check, unique, primary and foreign key,
//     exclusion).
//
// The projection's own is what its first commit has made, Setup among it, what a rebuild in the
// same tables adds for a new Version, and what a handler makes by a CREATE, ALTER or DO through
// its [Tx] later on. A handler that makes something by calling a function, or behind a
// SAVEPOINT, makes it for others in this sense; make it in Setup.
//
// Not refused, and lost with the old tables: partitions of the model's own tables, which are made
// as time goes by; what an extension has made; changed defaults, NOT NULL and storage
// parameters; types, domains, extended statistics and whatever else is not named above. What
// was in the schema before the model's first commit counts as the projection's own.
//
// Refused is also a role that may not create schemas in the database, or does not own the live
// one: a rebuild by projector.Reset or projector.InPlace needs neither, and keeps the tables.
//
// # What readers see of a switch
//
// The renaming locks no table: it waits for no reader, and no reader waits for it. A
// statement that begins after the switch, in a transaction of its own, sees the new
// generation, prepared statements too. Tables are looked up one by one: a join that is
// being parsed in the very instant of the switch may get one of each generation. A
// transaction that is open during the switch (seen on PostgreSQL 15):
//
//   - goes on with the old tables, to its end, if it has read them before, since it holds
//     their locks and does not look up their names again;
//   - else reads the new ones. Under REPEATABLE READ and SERIALIZABLE that is as they were
//     at its snapshot: perhaps empty, or half filled. Such a transaction should read
//     all tables of the model that it needs before it does anything that takes long.
//
// During a rebuild by Reset readers see a model that is emptied in one commit and then
// fills. Rebuilt in place, rows are marked in a column of the library's own,
// tidemark_build, and those without the mark are removed at the end.
//
// A retired generation can still be read in its schema until it is discarded. What others
// have made in that schema, or upon its tables from elsewhere, is dropped with it.
//
// # Pools
//
// The pool may be shared with the rest of the service. Give it two connections for
// each projection. Poolers between the two must keep a session together, or at least a
// transaction and the prepared statements of the protocol: PgBouncer in session mode,
// or from 1.21 on in transaction mode with max_prepared_statements set (not tested).
// Statement mode can't work.
package postgres
