package mongodb

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/x/mongo/driver"
	"go.mongodb.org/mongo-driver/v2/x/mongo/driver/topology"

	"github.com/tidemark-go/tidemark/projector"
)

// Labels of the server's and the driver's errors.
const (
	transientTransaction = "TransientTransactionError"
	unknownCommit        = "UnknownTransactionCommitResult"
	retryableWrite       = "RetryableWriteError"
)

// The codes that are looked at one by one.
const (
	authenticationFailed = 18
	illegalOperation     = 20
	namespaceNotFound    = 26
	namespaceExists      = 48
	maxTimeExpired       = 50
	uuidMismatch         = 361
)

// transientCodes are errors that pass by themselves.
var transientCodes = []int{
	6, 7, 89, 9001, // host unreachable, not found, network timeout, socket
	24, 112, 117, // lock timeout, write conflict, conflicting operation
	maxTimeExpired, 262, 290, // time limits: of the statement, the server, the transaction
	46, 63, 64, 150, 13388, 249, // lock busy, stale routing, write concern not reached in time
	91, 189, 10107, 10058, 11600, 11602, 13435, 13436, // failover and shutdown
	11601, 237, 279, // interrupted, cursor killed, client disconnect
	134, 202, 239, 246, // read concern not available yet, resources, snapshot too old, unavailable
	206, 217, 225, 244, 251, 261, 267, // sessions and transactions that are gone or superseded, or too many
	365, 391, 462, // temporarily unavailable, authenticate anew, ingress rate
	namespaceExists, // a collection that someone created at the same time
}

// fatalCodes are errors that have nothing to do with the batch.
var fatalCodes = []int{
	11, 13, authenticationFailed, 8000, // users and rights
	illegalOperation, 263, // no replica set; not allowed in a transaction
	namespaceNotFound, 73, 166, // no such namespace, a bad name, a view
	59, 115, 303, 323, // commands that the server does not have
	67, 85, 86, // indexes that contradict one that is there
	72, 79, 100, // options; write concerns that can't be met
}

// Classify implements projector.Sink. It goes by the labels and codes of the server's
// error, also where a handler has wrapped it:
//
//	Transient  the labels TransientTransactionError, UnknownTransactionCommitResult and
//	           RetryableWriteError; network errors, timeouts, no primary, a cleared
//	           pool; 112 write conflict, 24 lock timeout, 251 no such transaction, the
//	           codes of a failover
//	Fatal      13, 18 and 8000 rights and logins, 263 not allowed in a transaction, 20 no
//	           replica set, commands the server does not know, index conflicts; a
//	           disconnected client; a DriftError, a RebuildError
//	Poison     121 document validation, 11000 duplicate key, 2 bad value, 10334 and 17280
//	           sizes, anything else
func (s *Sink) Classify(err error) projector.Class {
	if fatal(err) {
		return projector.Fatal
	}
	if hasLabel(err, transientTransaction) || hasLabel(err, unknownCommit) || hasLabel(err, retryableWrite) {
		return projector.Transient
	}
	codes := codesOf(err)
	has := func(list []int) bool {
		return slices.ContainsFunc(codes, func(c int) bool { return slices.Contains(list, c) })
	}
	switch {
	case has(fatalCodes):
		return projector.Fatal
	case has(transientCodes), timeout(err), unreachable(err):
		return projector.Transient
	}
	return projector.Poison
}

// fatal reports what this package itself has found to be wrong whatever the batch.
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
	if _, ok := errors.AsType[*projector.FormatError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*projector.RebuildError](err); ok {
		return true
	}
	return errors.Is(err, mongo.ErrClientDisconnected)
}

// timeout reports that an answer did not come in time.
func timeout(err error) bool {
	return mongo.IsTimeout(err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// unreachable reports that the server could not be asked, or the connection broke.
func unreachable(err error) bool {
	if mongo.IsNetworkError(err) {
		return true
	}
	if noServer(err) {
		return true
	}
	if _, ok := errors.AsType[topology.ConnectionError](err); ok {
		return true
	}
	if _, ok := errors.AsType[topology.WaitQueueTimeoutError](err); ok {
		return true
	}
	var pool driver.RetryablePoolError // no error itself, but what a cleared pool gives is one of these
	return errors.As(err, &pool) && pool.Retryable()
}

// noServer reports that there was no server to ask, however short the time was.
func noServer(err error) bool {
	_, ok := errors.AsType[topology.ServerSelectionError](err)
	return ok
}

// codesOf is every code that the servers' errors in err carry. Errors of the
// handshake are the driver's inner ones.
func codesOf(err error) (codes []int) {
	walk(err, func(e error) {
		switch e := e.(type) {
		case mongo.ServerError:
			codes = append(codes, e.ErrorCodes()...)
		case driver.Error:
			codes = append(codes, int(e.Code))
		}
	})
	return codes
}

func hasCode(err error, code int) bool { return slices.Contains(codesOf(err), code) }

func hasLabel(err error, label string) (has bool) {
	walk(err, func(e error) {
		l, ok := e.(interface{ HasErrorLabel(string) bool })
		has = has || ok && l.HasErrorLabel(label)
	})
	return has
}

// walk calls f with every error that err wraps, all branches of it: errors.As would
// stop at the first of several.
func walk(err error, f func(error)) {
	if err == nil {
		return
	}
	f(err)
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		walk(e.Unwrap(), f)
	case interface{ Unwrap() []error }:
		for _, e := range e.Unwrap() {
			walk(e, f)
		}
	}
}

// DriftError: a rollup's rows disagree with the source. More was taken off a row than
// it had, or its contributions are all gone and a sum is left. Nothing of the batch
// was written. The model must be rebuilt; the cause is a handler that was changed
// without raising Version, a collection that something else writes to, or a bug.
type DriftError struct {
	Collection string
	ID         string // of one such row, as extended JSON
}

func (e *DriftError) Error() string {
	return fmt.Sprintf("tidemark/mongodb: collection %q disagrees with the source: more was taken off a row than it had, or sums are left where no contribution is (row %s); "+
		"nothing was written; rebuild the model (was a handler changed without raising Version, or is the collection written to by something else?)", e.Collection, e.ID)
}

// setupError is something to be put right in the database or the projection.
type setupError struct{ err error }

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

// blockedError is a checkpoint that can't be had in time.
type blockedError struct{ err error }

func (e *blockedError) Error() string {
	return fmt.Sprintf("the checkpoint's document is held by a transaction that could not be ended (it must have been begun by the same user; "+
		"the server ends it after its transactionLifetimeLimitSeconds), or the server is slow: %v", e.err)
}
func (e *blockedError) Unwrap() error { return e.err }

// handlerError is what a handler made of an error of its Tx, and that error.
type handlerError struct{ err, cause error }

func (e *handlerError) Error() string   { return e.err.Error() }
func (e *handlerError) Unwrap() []error { return []error{e.err, e.cause} }

// ignore makes nothing of an error that is expected.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// failed says what the sink was doing, where this package has not said it already.
func failed(doing string, err error) error {
	if strings.HasPrefix(err.Error(), "tidemark/mongodb: ") || strings.HasPrefix(err.Error(), "tidemark: ") {
		return err
	}
	return fmt.Errorf("tidemark/mongodb: %s: %w", doing, err)
}
