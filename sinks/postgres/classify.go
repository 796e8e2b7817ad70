package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidemark-go/tidemark/projector"
)

// The SQLSTATEs that are looked at one by one.
const (
	invalidStatementName  = "26000"
	featureNotSupported   = "0A000"
	insufficientPrivilege = "42501"
	undefinedTable        = "42P01"
	invalidSchemaName     = "3F000"
	divisionByZero        = "22012"
	readOnlyTransaction   = "25006"
	failedTransaction     = "25P02"
	idleInTransaction     = "25P03"
	transactionTimeout    = "25P04"
	lockNotAvailable      = "55P03"
	databaseDropped       = "57P04"
)

// Classify implements projector.Sink. It goes by the SQLSTATE of the server's error,
// also where a handler has wrapped it:
//
//	Transient  08 connection, 40 rollback (serialization failure, deadlock), 53
//	           resources, 57 operator intervention (shutdown, cancelled, terminated),
//	           25006 read-only (a failover), 25P03 and 25P04 idle or long transactions, 55P03 lock
//	           timeout; a connection that broke or could not be made; timeouts
//	Fatal      28 authentication, 3D database, 3F schema, 42 syntax, rights and names
//	           (42501, 42P01, 42703 …), 57P04, 58 and XX the server's own trouble, F0
//	           its configuration; a DriftError; a RebuildError; a missing right to create
//	Poison     22 data, 23 constraints, 54 limits, anything else
func (s *Sink) Classify(err error) projector.Class {
	if _, ok := errors.AsType[*staleError](err); ok {
		return projector.Transient
	}
	if c := code(err); c != "" && !errors.As(err, new(*DriftError)) && !errors.As(err, new(*projector.RebuildError)) {
		return classify(c)
	}
	if fatal(err) {
		return projector.Fatal
	}
	if _, ok := errors.AsType[*brokenError](err); ok {
		return projector.Transient
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok || pgconn.SafeToRetry(err) || pgconn.Timeout(err) {
		return projector.Transient
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return projector.Transient
	}
	return projector.Poison
}

func fatal(err error) bool {
	if _, ok := errors.AsType[*DriftError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*setupError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*projector.CheckpointError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*projector.RebuildError](err); ok {
		return true
	}
	_, ok := errors.AsType[*projector.FormatError](err)
	return ok
}

func classify(code string) projector.Class {
	switch code {
	case readOnlyTransaction, idleInTransaction, transactionTimeout, lockNotAvailable:
		return projector.Transient
	case databaseDropped:
		return projector.Fatal
	}
	switch code[:2] {
	case "08", "40", "53", "57":
		return projector.Transient
	case "28", "3D", "3F", "42", "58", "F0", "XX":
		return projector.Fatal
	}
	return projector.Poison
}

// DriftError: a rollup's rows disagree with the source. More was taken off a row than
// it had, or its contributions are all gone and a sum is left. Nothing of the batch
// was written. The model must be rebuilt; the cause is a handler that was changed
// without raising Version, a table that something else writes to, or a bug.
type DriftError struct {
	Table string
	err   error
}

func (e *DriftError) Error() string {
	return fmt.Sprintf("tidemark/postgres: table %q disagrees with the source: more was taken off a row than it had, or sums are left where no contribution is; "+
		"nothing was written; rebuild the model (was a handler changed without raising Version, or is the table written to by something else?)", e.Table)
}

func (e *DriftError) Unwrap() error { return e.err }

// setupError is something to be put right in the database or the projection.
type setupError struct{ err error }

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

// brokenError is an error under which the connection broke, or could not be had.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// staleError is a server's error that may come from a statement prepared before a
// table was altered; the next attempt prepares anew.
type staleError struct{ err error }

func (e *staleError) Error() string { return e.err.Error() }
func (e *staleError) Unwrap() error { return e.err }

// failed says what the sink was doing. What neither the server has said nor this
// library is the connection's failure.
func failed(doing string, err error) error {
	if code(err) == "" && !fatal(err) {
		err = &brokenError{err}
	}
	return fmt.Errorf("tidemark/postgres: %s: %w", doing, err)
}
