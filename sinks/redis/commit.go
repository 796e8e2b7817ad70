package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// transact makes one attempt, once: what to do after a failure is the caller's to decide,
// who reads the checkpoint back first. The client's Watch may run its function again on
// some errors, so that gets none.
func (s *Sink) transact(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error, commit bool) error {
	body, err := next.Encode()
	if err != nil {
		return err
	}
	if commit && begins(prev, next) {
		if err := s.removeLost(ctx, prev, next.Rebuild.Mode); err != nil {
			return s.noted(prev, failed("remove what is left of projection "+strconv.Quote(prev.Projection), err))
		}
	}
	var result error
	partly := false
	err = s.client.Watch(ctx, func(conn *goredis.Tx) error {
		tx := s.newTx(conn, prev, next)
		defer tx.close()
		result = tx.transact(ctx, next, string(body), apply, commit)
		partly = tx.partly
		return nil
	}, checkpointKey(prev.Projection, prev.Generation))
	if err == nil {
		err = result
	} else {
		err = failed("watch the checkpoint of projection "+strconv.Quote(prev.Projection), err)
	}
	if d, ok := errors.AsType[*DamagedError](err); ok && !partly {
		// Who is not the owner any more has read what another was writing.
		err = s.damage(ctx, prev, d.What)
	}
	return s.noted(prev, err)
}

// noted remembers an error that passes: where the next commit goes may be another server.
func (s *Sink) noted(c projector.Checkpoint, err error) error {
	if _, met := errors.AsType[*conflictError](err); err != nil && !met && s.Classify(err) == projector.Transient {
		s.suspect.Store(c.Projection, true)
	}
	return err
}

// transact runs between the checkpoint's WATCH and EXEC. Whatever is read meanwhile is
// still so at the EXEC: only the owner writes to the model, and had there been another
// since, the checkpoint would have been touched.
func (tx *Tx) transact(ctx context.Context, next projector.Checkpoint, body string, apply func(context.Context, *Tx) error, commit bool) error {
	if fault.Global.Off(fault.FenceWatch) {
		if err := tx.conn.Unwatch(ctx).Err(); err != nil {
			return failed("unwatch", err)
		}
	}
	if err := tx.fence(ctx); err != nil {
		return err
	}
	if err := tx.run(ctx, apply); err != nil {
		return err
	}
	commands, rows, err := tx.plan(ctx)
	if err != nil || !commit {
		return err
	}
	return tx.exec(ctx, next, body, commands, rows)
}

// fence compares term, owner and sequence with what is stored.
func (tx *Tx) fence(ctx context.Context) error {
	cp := tx.checkpoint
	doing := "read the checkpoint of projection " + strconv.Quote(cp.Projection)
	key := checkpointKey(cp.Projection, cp.Generation)
	values, err := tx.conn.HMGet(ctx, key, fieldTerm, fieldOwner, fieldSequence, fieldDamaged).Result()
	if err != nil {
		return failed(doing, tx.notHash(ctx, key, err))
	}
	text := func(i int) string { s, _ := values[i].(string); return s }
	differs := false
	if !fault.Global.Off(fault.FenceTerm) {
		differs = text(0) != strconv.FormatInt(cp.Term, 10) || text(1) != cp.Owner
	}
	if !fault.Global.Off(fault.FenceSequence) {
		differs = differs || text(2) != strconv.FormatInt(cp.Sequence, 10)
	}
	if differs && !fault.Global.Off(fault.FenceRaises) {
		return fencedBy(cp, values[0], values[1])
	}
	if what := text(3); what != "" && !tx.begins {
		return damaged(cp, what)
	}
	return nil
}

// run lets the handlers write.
func (tx *Tx) run(ctx context.Context, apply func(context.Context, *Tx) error) error {
	err := apply(ctx, tx)
	switch {
	case err == nil && tx.err != nil:
		return fmt.Errorf("tidemark/redis: a write of the handler was refused, and the handler returned no error; nothing was written: %w", tx.err)
	case err != nil && tx.err != nil:
		return &handlerError{err, tx.err}
	}
	return err
}

// exec sends the transaction. It is the connection of the WATCH that it goes by, and no
// other: where that is broken the client gives up.
func (tx *Tx) exec(ctx context.Context, next projector.Checkpoint, body string, commands [][]any, rows map[string]int64) error {
	cp := tx.checkpoint
	key := checkpointKey(cp.Projection, cp.Generation)
	if err := ctx.Err(); err != nil {
		return failed("commit", err)
	}
	pipe := tx.conn.TxPipeline()
	set := []any{fieldSequence, next.Sequence, fieldBody, body}
	for target, n := range rows {
		set = append(set, rowsPrefix+target, n)
	}
	stored := pipe.HSet(ctx, key, set...)
	if next.Phase == projector.Live {
		pipe.Set(ctx, liveKey(cp.Projection), next.Place, 0)
	}
	if tx.begins {
		pipe.HDel(ctx, key, fieldDamaged)
	}
	for _, args := range commands {
		_ = pipe.Process(ctx, goredis.NewCmd(ctx, args...))
	}
	fault.Global.Reach(fault.CommitSend)
	answers, err := pipe.Exec(ctx)
	fault.Global.Reach(fault.CommitAnswer)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, goredis.TxFailedErr):
		return tx.conflict(ctx)
	case !serverError(err):
		return failed("commit", err)
	case stored.Err() == nil:
		// The transaction was carried out, all but a command: what had been checked was
		// altered by somebody else in between.
		tx.partly = true
		what := "a command of a commit has failed, and the others were carried out: " + refusal(answers, err).Error()
		_ = tx.sink.damage(ctx, next, what)
		return damaged(next, what)
	}
	return failed("commit", refusal(answers, err))
}

// refusal is why the server refuses a transaction. If one of the commands is not queued
// then EXEC only says that there was something.
func refusal(answers []goredis.Cmder, err error) error {
	for _, a := range answers {
		if e := a.Err(); e != nil && serverError(e) && !strings.HasPrefix(e.Error(), "EXECABORT") {
			return e
		}
	}
	return err
}

// conflict tells a commit that has met a Load from one that has met another owner.
func (tx *Tx) conflict(ctx context.Context) error {
	if err := tx.fence(ctx); err != nil {
		return err
	}
	return &conflictError{tx.checkpoint.Projection}
}
