package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidemark-go/tidemark/projector"
)

const storeCheckpoint = `update tidemark.checkpoints set sequence = $3, phase = $4, place = $5, body = $6, updated_at = clock_timestamp()
where projection = $1 and generation = $2`

// Switch implements projector.Sink: the two schemas change their names in the
// transaction that changes the checkpoints. That locks no table.
func (s *Sink) Switch(ctx context.Context, from, to projector.Checkpoint) error {
	err := s.withCheckpoint(ctx, func(tx pgx.Tx) error {
		retired, target, err := s.both(ctx, tx, from, to)
		if err != nil {
			return err
		}
		if err := obstacles(ctx, tx, retired, target.Place); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, ddlPatience); err != nil {
			return err
		}
		live := from.Projection
		if err := carryOver(ctx, tx, live, target.Place, target.Phase == projector.Retired); err != nil {
			return err
		}
		rename := "alter schema %s rename to " + quoted(shadow(live, from.Generation))
		if retired.Sequence == 0 {
			rename = "drop schema if exists %s" // fails where anything is in it
		}
		for _, sql := range []string{
			fmt.Sprintf(rename, quoted(live)),
			fmt.Sprintf("alter schema %s rename to %s", quoted(target.Place), quoted(live)),
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		if retired.Sequence == 0 {
			_, err = tx.Exec(ctx, removeCheckpoint, live, from.Generation)
		} else {
			retired.Phase, retired.Place = projector.Retired, shadow(live, from.Generation)
			err = moveOn(ctx, tx, retired)
		}
		if err != nil {
			return err
		}
		next := to
		next.Phase, next.Place = projector.Live, live
		return moveOn(ctx, tx, next)
	})
	return generational("switch to", to.Projection, to.Generation, err)
}

// both locks the two rows and returns what is stored.
func (s *Sink) both(ctx context.Context, tx pgx.Tx, from, to projector.Checkpoint) (retired, target projector.Checkpoint, err error) {
	found, err := s.wait(ctx, tx, from.Projection, from.Generation, to.Generation)
	if err != nil {
		return retired, target, err
	}
	for _, c := range []struct {
		believed projector.Checkpoint
		stored   *projector.Checkpoint
	}{{from, &retired}, {to, &target}} {
		for _, f := range found {
			if f.Generation == c.believed.Generation {
				*c.stored = f
			}
		}
		if c.stored.Generation == 0 {
			return retired, target, gone(c.believed)
		}
		if err := admit(c.believed, *c.stored, true); err != nil {
			return retired, target, err
		}
	}
	if retired.Phase != projector.Live || target.Phase == projector.Live || target.Sequence == 0 {
		return retired, target, &setupError{fmt.Errorf("generation %d is %s and generation %d is %s, with %d commits",
			from.Generation, retired.Phase, to.Generation, target.Phase, target.Sequence)}
	}
	return retired, target, nil
}

// moveOn stores a checkpoint as its own successor.
func moveOn(ctx context.Context, tx pgx.Tx, c projector.Checkpoint) error {
	body, err := c.Encode()
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, storeCheckpoint, c.Projection, c.Generation, c.Sequence+1, c.Phase, c.Place, string(body))
	return err
}

// raced reports an error for DDL that met another session's on the same object, such as a
// GRANT on the schema in the moment of its renaming. PostgreSQL 15 has no SQLSTATE of its
// own for it, and never translates the text.
func raced(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && strings.HasPrefix(pg.Message, "tuple concurrently ")
}
