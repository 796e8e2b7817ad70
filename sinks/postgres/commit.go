package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Commit implements projector.Sink. It takes one round trip where apply only queues.
func (s *Sink) Commit(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	return s.transact(ctx, prev, next, apply, (*Tx).commit)
}

// Try implements projector.Sink. Constraints that are checked at COMMIT are checked
// before the rollback.
func (s *Sink) Try(ctx context.Context, prev projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	next := prev
	next.Sequence++
	return s.transact(ctx, prev, next, apply, (*Tx).checkConstraints)
}

func (s *Sink) transact(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error, finish func(*Tx, context.Context) error) error {
	body, err := next.Encode()
	if err != nil {
		return err
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return failed("get a connection", err)
	}
	defer conn.Release()
	tx := s.begin(conn.Conn(), prev, next, body)
	defer rollback(ctx, conn.Conn())
	defer tx.close()

	if err = tx.run(ctx, apply, finish); err == nil {
		return nil
	}
	return s.judge(ctx, tx, prev, err)
}

// judge turns the error of a transaction into what the caller has to know. Handlers
// don't always wrap what they get, so it looks at what the transaction has met, too.
func (s *Sink) judge(ctx context.Context, tx *Tx, prev projector.Checkpoint, err error) error {
	switch {
	case errors.Is(err, errFence), errors.Is(tx.err, errFence):
		rollback(ctx, tx.conn)
		return s.fenced(ctx, tx.conn, prev)
	case code(err) == invalidStatementName, tx.reused && stale(code(err)):
		tx.statements.forget = true
		return &staleError{err}
	case code(err) == failedTransaction && code(tx.err) != "":
		// The handler went on after the statement that failed.
		return fmt.Errorf("%w (%w)", tx.err, err)
	case code(err) != "":
		return err
	case tx.conn.IsClosed(), tx.conn.PgConn().TxStatus() == 'E' && s.Classify(tx.err) == projector.Transient:
		return &brokenError{err}
	}
	return err
}

// begin queues the start of the transaction; nothing is sent yet.
func (s *Sink) begin(conn *pgx.Conn, prev, next projector.Checkpoint, body []byte) *Tx {
	tx := &Tx{
		conn: conn, statements: statementsOf(conn), first: prev.Sequence == 0,
		projection: next.Projection, place: next.Place, generation: next.Generation,
		mark: fmt.Sprintf("%s/%d/%d/%d", next.Projection, next.Generation, next.Term, next.Sequence),
	}
	if r := next.Rebuild; r != nil && r.Mode == projector.InPlace {
		tx.build = r.Mark
	}
	tx.enqueue(&item{sql: begin, oids: none})
	tx.enqueue(&item{
		sql:  fence(),
		oids: fenceOIDs,
		args: []any{
			prev.Projection, prev.Term, prev.Sequence, next.Sequence, string(body), next.Place,
			pgx.Identifier{next.Place}.Sanitize() + ", pg_temp", s.idleSetting(), tx.mark, prev.Owner,
			prev.Generation, string(next.Phase),
		},
		explain: func(err error) error {
			if code(err) == divisionByZero {
				return errFence
			}
			return fmt.Errorf("tidemark/postgres: store the checkpoint of projection %q: %w", prev.Projection, err)
		},
	})
	return tx
}

var (
	none      = []uint32{}
	fenceOIDs = []uint32{
		pgtype.TextOID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TextOID, pgtype.TextOID,
		pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.Int8OID, pgtype.TextOID,
	}
)

const (
	begin     = "begin isolation level read committed"
	commit    = "commit"
	immediate = "set constraints all immediate"
)

// fence is the statement that stores the checkpoint, and with it claims the commit.
// It compares term and sequence, and it raises where they differ: an UPDATE that
// matches no row is no error, so that a COMMIT sent behind it would commit the writes
// of an owner that has been superseded. The division makes it one.
//
// The same statement makes the transaction's settings, which saves parsing three
// more. Search_path names the generation's schema alone, so that nothing in public is
// hit by accident; pg_temp is last, where it is named first it would be searched
// first, and a table left there by another user of the pool would be written to. The
// commit's own time limit stands for statement_timeout: one that a batch exceeds would
// end every attempt.
func fence() string {
	raises, term, sequence := "1 / count(*)", "term = $2 and owner = $10", "sequence = $3"
	if fault.Global.Off(fault.FenceRaises) {
		raises = "count(*)"
	}
	if fault.Global.Off(fault.FenceTerm) {
		term = "$2::bigint is not null and $10::text is not null"
	}
	if fault.Global.Off(fault.FenceSequence) {
		sequence = "$3::bigint is not null"
	}
	return `with claimed as (
	update tidemark.checkpoints set sequence = $4, body = $5, place = $6, phase = $12, updated_at = clock_timestamp()
	where projection = $1 and generation = $11 and ` + term + ` and ` + sequence + ` returning 1
)
select ` + raises + `, set_config('search_path', $7, true),
	set_config('statement_timeout', '0', true),
	set_config('idle_in_transaction_session_timeout', coalesce(nullif($8, ''), current_setting('idle_in_transaction_session_timeout')), true),
	set_config('` + markSetting + `', $9, true)
from claimed`
}

// markSetting is set for the transaction only: it tells whether a script in a handler
// has ended the transaction and begun another.
const markSetting = "tidemark.commit"

// errFence is what a handler sees of the fence, where it writes at once.
var errFence = fmt.Errorf("tidemark/postgres: this commit's term or sequence is over: %w", projector.ErrFenced)

// fenced tells who is in the way.
func (s *Sink) fenced(ctx context.Context, conn *pgx.Conn, prev projector.Checkpoint) error {
	term, owner := prev.Term, ""
	err := conn.QueryRow(ctx, `select term, owner from tidemark.checkpoints where projection = $1 and generation = $2`,
		prev.Projection, prev.Generation).Scan(&term, &owner)
	if errors.Is(err, pgx.ErrNoRows) {
		return gone(prev)
	}
	return superseded(prev, term, owner)
}

// run is a commit from its first statement to the answer to its last.
func (tx *Tx) run(ctx context.Context, apply func(context.Context, *Tx) error, finish func(*Tx, context.Context) error) error {
	if tx.first {
		if err := tx.createPlace(ctx); err != nil {
			return err
		}
	}
	if err := apply(ctx, tx); err != nil {
		return err
	}
	if err := tx.usable(); err != nil {
		return err
	}
	if tx.begun && tx.conn.PgConn().TxStatus() == 'E' {
		return tx.swallowed()
	}
	if tx.first && tx.place != tx.projection {
		if err := tx.carryIndexes(ctx); err != nil {
			return err
		}
	}
	return finish(tx, ctx)
}

// createPlace makes the generation's schema, where nobody has prepared it.
func (tx *Tx) createPlace(ctx context.Context) error {
	var there bool
	err := tx.QueryRow(ctx, `select exists (select from pg_namespace where nspname = $1)`, tx.place).Scan(&there)
	if err != nil {
		return err
	}
	if !there {
		if err := tx.createSchema(ctx); err != nil {
			return err
		}
	}
	if tx.place == tx.projection {
		return nil
	}
	// Default privileges count when a table is made, so they can't wait for the switch.
	return carry(ctx, tx, defaultGrants, tx.projection, tx.place, false)
}

func (tx *Tx) createSchema(ctx context.Context) error {
	create := "create schema " + pgx.Identifier{tx.place}.Sanitize()
	_, err := tx.Exec(ctx, create)
	if code(err) == insufficientPrivilege {
		role := pgx.Identifier{tx.conn.Config().User}.Sanitize()
		return &setupError{fmt.Errorf("tidemark/postgres: the model's schema is missing, and the right to create it; as a role that has it run\n%s authorization %s;\n%w",
			create, role, err)}
	}
	return err
}

func (tx *Tx) commit(ctx context.Context) error {
	note := noteMade
	if !tx.first {
		note = noteMore
	}
	if tx.first || tx.makes {
		tx.enqueue(&item{
			sql: note, once: true, oids: []uint32{pgtype.TextOID, pgtype.Int8OID},
			values: [][]byte{[]byte(tx.projection), strconv.AppendInt(nil, tx.generation, 10)},
		})
	}
	end := &item{sql: commit, oids: none}
	tx.enqueue(end)
	tx.last = true
	if err := tx.flush(ctx); err != nil {
		return err
	}
	fault.Global.Reach(fault.CommitAnswer)
	// COMMIT in a failed transaction answers ROLLBACK, and that is no error.
	if tag := end.tag.String(); tag != "COMMIT" {
		return fmt.Errorf("tidemark/postgres: the server answered COMMIT with %s: nothing was written", strconv.Quote(tag))
	}
	return nil
}

func (tx *Tx) checkConstraints(ctx context.Context) error {
	tx.enqueue(&item{sql: immediate, oids: none})
	return tx.flush(ctx)
}
