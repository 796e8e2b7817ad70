package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// createSchema and createTable make the store of the checkpoints. Body is what
// Checkpoint.Encode wrote, byte for byte, hence text and not jsonb. Place and phase are
// in it as well; they stand beside it for whoever reads the table by SQL. Made is what
// the generation's commits have made of the things that a switch can't carry over.
const (
	createSchema = `create schema tidemark`
	createTable  = `create table tidemark.checkpoints (
	projection text collate "C" not null,
	generation bigint not null,
	term       bigint not null,
	sequence   bigint not null,
	owner      text not null,
	phase      text not null,
	place      text not null,
	body       text not null,
	made       text[] not null default '{}',
	updated_at timestamptz not null default clock_timestamp(),
	primary key (projection, generation)
)`

	readCheckpoints = `select generation, term, sequence, owner, body from tidemark.checkpoints
where projection = $1 and ($2::bigint[] is null or generation = any ($2)) order by generation for update`
	liveGeneration = `select coalesce((select generation from tidemark.checkpoints where projection = $1 and phase = 'live'), 1)`
	newCheckpoint  = `insert into tidemark.checkpoints (projection, generation, term, sequence, owner, phase, place, body)
values ($1, $2, $3, 0, $4, $5, $6, $7)`
	firstCheckpoint = `insert into tidemark.checkpoints (projection, generation, term, sequence, owner, phase, place, body)
select $1, $2, 0, 0, '', $3, $4, $5 where not exists (select from tidemark.checkpoints where projection = $1)`
	raiseTerm = `update tidemark.checkpoints set term = $2, owner = $3, updated_at = clock_timestamp() where projection = $1`
)

// storeLock is the advisory lock under which the store, and a projection in it, is created.
const storeLock = 0x7469_6465_6d61_726b // "tidemark"

// withCheckpoint runs f in a transaction of its own.
func (s *Sink) withCheckpoint(ctx context.Context, f func(pgx.Tx) error) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	defer rollback(ctx, conn.Conn())
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// rollback ends a transaction whatever became of ctx. Where that fails the pool
// drops the connection, and the server rolls back.
func rollback(ctx context.Context, conn *pgx.Conn) {
	pg := conn.PgConn()
	if conn.IsClosed() || pg.IsBusy() || pg.TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = pg.Exec(ctx, "rollback").Close()
}

// patient makes the settings under which a transaction waits for a checkpoint. The
// session's own timeouts could end the wait each time before the blocker is ended. And
// with the session's search_path a function that somebody has made in public, for the very
// types of a call, would be run in place of the system's, with this role's rights.
const patient = `select pg_catalog.pg_backend_pid(), pg_catalog.set_config('lock_timeout', '0', true), pg_catalog.set_config('statement_timeout', '0', true),
	pg_catalog.set_config('idle_in_transaction_session_timeout', coalesce(nullif($1::text, ''), pg_catalog.current_setting('idle_in_transaction_session_timeout')), true),
	` + ownPath

// ownPath is the search_path for statements of the sink's own, to the transaction's end.
const ownPath = `pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)`

// settle makes the settings of patient, and gives the transaction's backend.
func (s *Sink) settle(ctx context.Context, tx pgx.Tx) (pid int32, err error) {
	err = tx.QueryRow(ctx, patient, s.idleSetting()).Scan(&pid, nil, nil, nil, nil)
	return pid, err
}

// lock reads checkpoints under their rows' locks, in the order of generations, all of
// the projection's where none is named. It ends whoever holds a row for long.
func (s *Sink) lock(ctx context.Context, tx pgx.Tx, projection string, generations ...int64) ([]projector.Checkpoint, error) {
	pid, err := s.settle(ctx, tx)
	if err != nil {
		return nil, err
	}
	stop := s.endBlockers(ctx, pid)
	all, err := read(ctx, tx, projection, generations...)
	return all, errors.Join(err, stop(err))
}

// wait is lock for the owner of the term, who waits for commits of its own: it ends none.
func (s *Sink) wait(ctx context.Context, tx pgx.Tx, projection string, generations ...int64) ([]projector.Checkpoint, error) {
	if _, err := s.settle(ctx, tx); err != nil {
		return nil, err
	}
	return read(ctx, tx, projection, generations...)
}

func read(ctx context.Context, tx pgx.Tx, projection string, generations ...int64) ([]projector.Checkpoint, error) {
	rows, err := tx.Query(ctx, readCheckpoints, projection, generations)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (cp projector.Checkpoint, err error) {
		var (
			generation, term, sequence int64
			owner                      string
			body                       []byte
		)
		if err := r.Scan(&generation, &term, &sequence, &owner, &body); err != nil {
			return cp, err
		}
		if cp, err = projector.DecodeCheckpoint(projection, body); err != nil {
			return cp, err
		}
		if cp.Generation != generation {
			return cp, &projector.CheckpointError{Projection: projection, Err: fmt.Errorf("it is of generation %d, and stored as generation %d", cp.Generation, generation)}
		}
		cp.Term, cp.Sequence, cp.Owner = term, sequence, owner
		return cp, nil
	})
}

// lockAll locks all generations of a projection, after storing the first one where there
// is none. Begin may add one while the lock is waited for, which the waiting statement
// does not see. So it looks again until it finds only what it holds: among that is the
// live one, without whose lock none is added.
func (s *Sink) lockAll(ctx context.Context, tx pgx.Tx, projection string) ([]projector.Checkpoint, error) {
	for held := 0; ; {
		all, err := s.lock(ctx, tx, projection)
		switch {
		case err != nil:
			return nil, err
		case len(all) == 0:
			err = s.introduce(ctx, tx, projection)
		case len(all) == held:
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		held = len(all)
	}
}

// introduce stores the first checkpoint of a projection that has none. The advisory
// lock comes before the statement's snapshot: so who finds none is the first.
func (s *Sink) introduce(ctx context.Context, tx pgx.Tx, projection string) error {
	cp := fresh(projection)
	body, err := cp.Encode()
	if err != nil {
		return err
	}
	if err := s.lockStore(ctx, tx); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, firstCheckpoint, projection, cp.Generation, cp.Phase, cp.Place, string(body))
	return err
}

// lockStore takes the advisory lock. It ends whoever holds that for long.
func (s *Sink) lockStore(ctx context.Context, tx pgx.Tx) error {
	pid, err := s.settle(ctx, tx)
	if err != nil {
		return err
	}
	stop := s.endBlockers(ctx, pid)
	_, err = tx.Exec(ctx, `select pg_advisory_xact_lock($1)`, int64(storeLock))
	return errors.Join(err, stop(err))
}

// createStore makes the schema and the table of the checkpoints. CREATE … IF NOT
// EXISTS would not do: it needs the right to create even where nothing is to be
// created, and two sessions that create at once collide on the catalogue (23505).
func (s *Sink) createStore(ctx context.Context) error {
	err := s.withCheckpoint(ctx, func(tx pgx.Tx) error {
		if err := s.lockStore(ctx, tx); err != nil {
			return err
		}
		var schema, table bool
		err := tx.QueryRow(ctx, `select
	exists (select from pg_namespace where nspname = 'tidemark'),
	exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'tidemark' and c.relname = 'checkpoints')`).
			Scan(&schema, &table)
		if err == nil && !schema {
			_, err = tx.Exec(ctx, createSchema)
		}
		if err == nil && !table {
			_, err = tx.Exec(ctx, createTable)
		}
		return err
	})
	if code(err) == insufficientPrivilege && !fatal(err) {
		return &setupError{fmt.Errorf("tidemark/postgres: the table of checkpoints is missing, and the right to create it; as a role that has it run\n%s;\n%s;\n%s%w",
			createSchema, createTable, s.grants(), err)}
	}
	return err
}

// grants are the statements that let this role use the store.
func (s *Sink) grants() string {
	role := pgx.Identifier{s.pool.Config().ConnConfig.User}.Sanitize()
	return fmt.Sprintf("grant usage on schema tidemark to %s;\ngrant select, insert, update, delete on tidemark.checkpoints to %s;\n", role, role)
}

func (s *Sink) missingGrants(err error) error {
	return &setupError{fmt.Errorf("tidemark/postgres: the table of checkpoints belongs to another role; as that role run\n%s%w", s.grants(), err)}
}

// missing reports whether the store is not there yet.
func missing(err error) bool {
	c := code(err)
	return c == undefinedTable || c == invalidSchemaName
}

func (s *Sink) idleSetting() string {
	if s.idleTimeout <= 0 {
		return ""
	}
	return strconv.FormatInt(max(1, s.idleTimeout.Milliseconds()), 10)
}

// blockers finds who holds the row, or the advisory lock ($3, $4), that backend $1 waits
// for, and terminates those that were seen before ($2). Other backends may wait for the
// same: whoever is in a row's queue shows by a lock on the tuple, waits as we do and is
// spared, but what blocks it is looked at in turn. A backend is known by its pid and the start of its
// transaction, since a pooled connection goes from one short transaction to the next.
const blockers = `
with recursive waiting as (
	select pid from pg_locks
	where locktype = 'tuple' and relation = to_regclass('tidemark.checkpoints')
	and database = (select oid from pg_database where datname = current_database())
	union
	select pid from pg_locks
	where locktype = 'advisory' and not granted and classid::bigint = $3 and objid::bigint = $4 and objsubid = 1
	and database = (select oid from pg_database where datname = current_database())
), queue (pid) as (
	select unnest(pg_blocking_pids($1))
	union
	select b from queue, unnest(pg_blocking_pids(queue.pid)) b where queue.pid in (select pid from waiting)
), holder as (
	select pid, pid || ' ' || coalesce(xact_start::text, '') as id
	from queue join pg_stat_activity a using (pid)
	where pid not in (select pid from waiting)
)
select id, case when id = any ($2) then pg_terminate_backend(pid) end from holder`

// endBlockers watches, on a connection of its own, while backend pid waits for the
// row of a checkpoint or for the store's lock, and ends the backends that hold it for longer than the grace:
// an owner that is dead or frozen. A client frozen in the middle of a pipeline or of
// a COPY is beyond every timeout of PostgreSQL 15, since its backend is not idle. The
// same role, or pg_signal_backend, suffices.
//
// Stop ends the watch; given the error of the wait, it adds why the watch failed.
func (s *Sink) endBlockers(ctx context.Context, pid int32) (stop func(error) error) {
	if fault.Global.Off(fault.EndBlockers) {
		return func(error) error { return nil }
	}
	ctx, cancel := context.WithCancel(ctx)
	result := make(chan error, 1)
	go func() { result <- s.watch(ctx, pid) }()
	return func(waited error) error {
		cancel()
		err := <-result
		if waited == nil || errors.Is(waited, pgx.ErrNoRows) || missing(waited) {
			return nil
		}
		return err
	}
}

func (s *Sink) watch(ctx context.Context, pid int32) error {
	var (
		conn *pgx.Conn
		seen []string
		last error
	)
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return last
		case <-time.After(s.grace):
		}
		var err error
		if conn == nil || conn.IsClosed() {
			conn, err = s.dial(ctx)
		}
		if err == nil {
			seen, err = look(ctx, conn, pid, seen)
		}
		if ctx.Err() == nil {
			last = err
		}
	}
}

// dial opens a connection beside the pool, which the blocked connections may have
// exhausted.
func (s *Sink) dial(ctx context.Context) (*pgx.Conn, error) {
	config := s.pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	return pgx.ConnectConfig(ctx, config.ConnConfig)
}

func look(ctx context.Context, conn *pgx.Conn, pid int32, seen []string) ([]string, error) {
	var holders []string
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "select "+ownPath); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, blockers, pid, append([]string{}, seen...), int64(storeLock>>32), int64(storeLock&0xffff_ffff))
		if err != nil {
			return err
		}
		holders, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (id string, err error) {
			return id, r.Scan(&id, nil)
		})
		return err
	})
	if code(err) == insufficientPrivilege {
		return seen, &setupError{fmt.Errorf("another role's connection holds the checkpoint and can't be ended; run projections as one role, or grant pg_signal_backend: %w", err)}
	}
	return holders, err
}

// code is the SQLSTATE of a server's error, "" for any other.
func code(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}
