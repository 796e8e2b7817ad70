package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/projector"
)

// transientPrefixes begin the server's errors that pass by themselves, or by somebody's
// making room.
var transientPrefixes = []string{
	"LOADING", "MASTERDOWN", "READONLY", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", // start, failover, resharding
	"BUSY", "UNKILLABLE", "UNBLOCKED", "NOREPLICAS", "NOGOODSLAVE", "INPROG",
	"OOM", "MISCONF", // memory or disk full
	"ERR max number of clients reached",
}

// fatalPrefixes begin errors that have nothing to do with the batch.
var fatalPrefixes = []string{
	"NOAUTH", "WRONGPASS", "NOPERM", "DENIED", "NOPROTO", // logins and rights
	"WRONGTYPE", // something else has written to the library's own keys
	"CROSSSLOT", // a proxy that does not know hash tags
	"EXECABORT", // refused for a reason that was not told
	"NOSCRIPT",  // a proxy that loses scripts
	"ERR unknown command", "ERR DB index", "ERR SELECT", "ERR Client sent AUTH", "ERR invalid password", "ERR operation not permitted",
	"ERR This instance has cluster support disabled",
}

// Classify implements projector.Sink. It goes by the first word of the server's error, also
// where a handler has wrapped it:
//
//	Transient  a connection that broke, timeouts; LOADING, READONLY, CLUSTERDOWN and the like;
//	           OOM and MISCONF, when memory or disk are full; a commit that met a Load
//	Fatal      NOAUTH, WRONGPASS, NOPERM; WRONGTYPE and keys that hold what this library has
//	           not written; a server that is refused at start; a closed client; a
//	           DriftError, a DamagedError
//	Poison     anything else: what a row holds can't be stored, a sum would overflow
func (s *Sink) Classify(err error) projector.Class {
	if fatal(err) {
		return projector.Fatal
	}
	if _, ok := errors.AsType[*conflictError](err); ok {
		return projector.Transient
	}
	class := projector.Poison
	walk(err, func(e error) {
		if _, ok := e.(*brokenError); ok || e == context.DeadlineExceeded || e == context.Canceled { //nolint:errorlint // walk unwraps
			class = max(class, projector.Transient)
		}
		if r, ok := e.(goredis.Error); ok { //nolint:errorlint // walk unwraps
			class = max(class, classOf(r.Error()))
		}
	})
	return class
}

// classOf is the class of a server's error by its text.
func classOf(text string) projector.Class {
	if _, cause, ok := strings.Cut(text, "EXECABORT Transaction discarded because of: "); ok {
		text = cause
	}
	text = strings.TrimPrefix(text, "-")
	for _, p := range transientPrefixes {
		if strings.HasPrefix(text, p) {
			return projector.Transient
		}
	}
	// An error inside of a script has the command's own in it.
	for _, p := range []string{"-OOM", "-READONLY", "-MISCONF", "-NOREPLICAS", "OOM command not allowed"} {
		if strings.Contains(text, p) {
			return projector.Transient
		}
	}
	for _, p := range fatalPrefixes {
		if strings.HasPrefix(text, p) {
			return projector.Fatal
		}
	}
	if strings.Contains(text, "NOPERM") || strings.Contains(text, "WRONGTYPE") {
		return projector.Fatal
	}
	return projector.Poison
}

// fatal reports what this package itself has found to be wrong whatever the batch.
func fatal(err error) bool {
	if _, ok := errors.AsType[*DriftError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*DamagedError](err); ok {
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
	return errors.Is(err, goredis.ErrClosed)
}

// walk calls f with every error that err wraps, all branches of it.
func walk(err error, f func(error)) {
	if err == nil {
		return
	}
	f(err)
	switch e := err.(type) { //nolint:errorlint // it is what unwraps
	case interface{ Unwrap() error }:
		walk(e.Unwrap(), f)
	case interface{ Unwrap() []error }:
		for _, e := range e.Unwrap() {
			walk(e, f)
		}
	}
}

// DriftError: a rollup's rows disagree with the source. More was taken off a row than it
// had, or its contributions are all gone and a sum is left. Nothing of the batch was
// written. The model must be rebuilt; the cause is a handler that was changed without
// raising Version, something else that writes to the keys, or a bug.
type DriftError struct {
	Hash string
	Key  string // the text of one such row's key
}

func (e *DriftError) Error() string {
	return fmt.Sprintf("tidemark/redis: hash %q disagrees with the source: more was taken off a row than it had, or sums are left where no contribution is (row %q); "+
		"nothing was written; rebuild the model (was a handler changed without raising Version, or are the keys written to by something else?)", e.Hash, e.Key)
}

// DamagedError: a part of the model is gone, or was altered by something else than this
// library: evicted, expired, deleted, flushed. Nothing of the batch was written, with one
// exception, of which the text tells. It stays: every commit of the generation fails by it,
// until a rebuild takes the generation's place or begins in it.
type DamagedError struct {
	Projection string
	Generation int64
	What       string
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("tidemark/redis: the model of projection %q, generation %d, is damaged and must be rebuilt: %s", e.Projection, e.Generation, e.What)
}

// Is makes errors.Is(err, projector.ErrHistoryLost) true: what to do is the same.
func (e *DamagedError) Is(target error) bool { return target == projector.ErrHistoryLost }

// setupError is something to be put right in the server or the projection.
type setupError struct{ err error }

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

// foreign is a key of the library's own that holds what it has not written.
func foreign(key, is, want string) error {
	return &setupError{fmt.Errorf("tidemark/redis: key %q holds a %s where this library keeps a %s; something else has written it; nothing of the batch was written; "+
		"move or delete that key, and let no one else write to keys that begin with the projection's name in braces", key, is, want)}
}

// conflictError is a commit whose checkpoint was touched while it was under way.
type conflictError struct{ projection string }

func (e *conflictError) Error() string {
	return fmt.Sprintf("tidemark/redis: the checkpoint of projection %q was read or taken while a commit was under way; nothing of it was written", e.projection)
}

// brokenError is an error under which the connection broke, or could not be had.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// handlerError is what a handler made of an error of its Tx, and that error.
type handlerError struct{ err, cause error }

func (e *handlerError) Error() string   { return e.err.Error() }
func (e *handlerError) Unwrap() []error { return []error{e.err, e.cause} }

// serverError reports whether the server has said it, so that the connection is sound.
func serverError(err error) bool {
	_, ok := errors.AsType[goredis.Error](err)
	return ok
}

// failed says what the sink was doing, where this package has not said it already. What
// neither the server has said nor this library is the connection's failure.
func failed(doing string, err error) error {
	if strings.HasPrefix(err.Error(), "tidemark") || errors.Is(err, projector.ErrFenced) {
		return err
	}
	if !serverError(err) && !fatal(err) {
		err = &brokenError{err}
	}
	return fmt.Errorf("tidemark/redis: %s: %w", doing, err)
}
