package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidemark-go/tidemark/projector"
)

// Projection, Bindings and Binding are the projector's, with this sink's transaction
// filled in.
type (
	Projection = projector.Projection[*Tx]
	Bindings   = []projector.Binding[*Tx]
	Binding    = projector.Binding[*Tx]
)

// Sink keeps read models in PostgreSQL. It is safe for use by several projections
// and goroutines.
type Sink struct {
	pool        *pgxpool.Pool
	idleTimeout time.Duration
	grace       time.Duration
}

// Option changes how a Sink works.
type Option func(*Sink)

// IdleTimeout bounds how long an open transaction may wait for its client: the server
// ends it after that, which frees the projection's checkpoint from a frozen process
// (idle_in_transaction_session_timeout). It must exceed the longest pause that a
// handler makes between two statements. Default 10 s; 0 leaves the session's own.
func IdleTimeout(d time.Duration) Option { return func(s *Sink) { s.idleTimeout = d } }

// New makes a sink on a pool, which stays the caller's to configure and to close. A
// projection takes one connection for each commit and returns it, two while a rebuild fills
// a generation beside the live one; a takeover from a frozen owner opens one more, outside
// of the pool.
func New(pool *pgxpool.Pool, opts ...Option) *Sink {
	s := &Sink{pool: pool, idleTimeout: 10 * time.Second, grace: time.Second}
	for _, o := range opts {
		o(s)
	}
	return s
}

var _ projector.Sink[*Tx] = (*Sink)(nil)

// reserved are schemas that a projection's model can't live in.
var reserved = []string{"tidemark", "public", "information_schema"}

// Acquire implements projector.Sink.
func (s *Sink) Acquire(ctx context.Context, projection, owner string) ([]projector.Checkpoint, error) {
	if slices.Contains(reserved, projection) || strings.HasPrefix(projection, "pg_") {
		return nil, &setupError{fmt.Errorf(
			"tidemark/postgres: a projection can't be called %q: its model would live in the schema of that name; choose another name", projection)}
	}
	if s.pool == nil {
		return nil, &setupError{errors.New("tidemark/postgres: the pool given to New is nil")}
	}
	var all []projector.Checkpoint
	take := func(tx pgx.Tx) (err error) {
		if all, err = s.lockAll(ctx, tx, projection); err != nil {
			return err
		}
		var term int64
		for _, cp := range all {
			term = max(term, cp.Term+1)
		}
		for i := range all {
			all[i].Term, all[i].Owner = term, owner
		}
		_, err = tx.Exec(ctx, raiseTerm, projection, term, owner)
		return err
	}
	err := s.withCheckpoint(ctx, take)
	if missing(err) {
		if err = s.createStore(ctx); err == nil {
			err = s.withCheckpoint(ctx, take)
		}
	}
	if code(err) == insufficientPrivilege && !fatal(err) {
		err = s.missingGrants(err)
	}
	if err != nil {
		return nil, failed("take the term of projection "+strconv.Quote(projection), err)
	}
	return all, nil
}

// Load implements projector.Sink.
func (s *Sink) Load(ctx context.Context, projection string, generation int64) (projector.Checkpoint, error) {
	var (
		found []projector.Checkpoint
		last  int64
		err   error
	)
	// A switch may come between the look for the live one's number and its lock, and then
	// that one is retired, or gone: so it looks again, until the number stays the same. Each
	// time is a transaction of its own, as rows are locked in the order of generations.
	for live, again := generation == 0, true; again && err == nil; last = generation {
		err = s.withCheckpoint(ctx, func(tx pgx.Tx) (err error) {
			if live {
				if err := tx.QueryRow(ctx, liveGeneration, projection).Scan(&generation); err != nil {
					return err
				}
			}
			found, err = s.lock(ctx, tx, projection, generation)
			return err
		})
		again = live && generation != last && (len(found) == 0 || found[0].Phase != projector.Live)
	}
	if err != nil && !missing(err) {
		return projector.Checkpoint{}, failed("read the checkpoint of projection "+strconv.Quote(projection), err)
	}
	if len(found) == 0 {
		cp := fresh(projection)
		if generation != 0 && generation != cp.Generation {
			cp.Generation, cp.Place, cp.Phase = generation, shadow(projection, generation), projector.Building
		}
		return cp, nil
	}
	return found[0], nil
}

// fresh is the first checkpoint of a projection, which has committed nothing yet.
func fresh(projection string) projector.Checkpoint {
	return projector.Checkpoint{
		Format: projector.CheckpointFormat, Projection: projection, Generation: 1, Place: projection, Phase: projector.Live,
	}
}
