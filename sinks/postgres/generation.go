package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// shadow is the schema of a generation that is not live. No projection's name has a $,
// and PostgreSQL takes it without quotes.
func shadow(projection string, generation int64) string {
	return projection + "$" + strconv.FormatInt(generation, 10)
}

// ddlPatience bounds how long a statement waits for a lock on a model's tables. Readers
// that come later queue behind it, so it gives up and is tried again.
const ddlPatience = `select set_config('lock_timeout', '3000', true)`

// Begin implements projector.Sink. The generation's schema is called like the projection,
// with a $ and the generation's number behind; one of that name without a checkpoint is
// dropped where all in it is this role's, and so is one of the name that the switch will give
// to the live one.
func (s *Sink) Begin(ctx context.Context, live projector.Checkpoint, generation int64) (projector.Checkpoint, error) {
	var begun projector.Checkpoint
	err := s.withCheckpoint(ctx, func(tx pgx.Tx) error {
		// Rows are locked in the order of generations, so the new one is only looked at
		// with the live one's lock held, under which alone one is added.
		stored, err := s.owned(ctx, tx, live)
		if err != nil {
			return err
		}
		if stored.Phase != projector.Live && live.Phase == projector.Live {
			return setBack(live, stored)
		}
		if stored.Phase != projector.Live {
			return &setupError{fmt.Errorf("generation %d, given as the live one, is %s", stored.Generation, stored.Phase)}
		}
		found, err := s.wait(ctx, tx, live.Projection, generation)
		if err != nil {
			return err
		}
		if len(found) > 0 {
			begun = found[0]
			return admit(live, begun, false)
		}
		begun = fresh(live.Projection)
		begun.Term, begun.Owner, begun.Generation = live.Term, live.Owner, generation
		begun.Place, begun.Phase = shadow(live.Projection, generation), projector.Building
		if err := obstacles(ctx, tx, stored, begun.Place); err != nil {
			return err
		}
		for _, number := range []int64{generation, stored.Generation} {
			if err := removeLeftover(ctx, tx, live.Projection, shadow(live.Projection, number)); err != nil {
				return err
			}
		}
		body, err := begun.Encode()
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, newCheckpoint, begun.Projection, generation, begun.Term, begun.Owner, begun.Phase, begun.Place, string(body))
		return err
	})
	if err != nil {
		return projector.Checkpoint{}, generational("begin", live.Projection, generation, err)
	}
	return begun, nil
}

// Discard implements projector.Sink. What others have made in the generation's schema, or
// upon its tables since the switch, goes with it.
func (s *Sink) Discard(ctx context.Context, c projector.Checkpoint) error {
	err := s.withCheckpoint(ctx, func(tx pgx.Tx) error {
		found, err := s.wait(ctx, tx, c.Projection, c.Generation)
		if len(found) == 0 || err != nil {
			return err
		}
		stored := found[0]
		if err := admit(c, stored, false); err != nil {
			return err
		}
		if stored.Phase == projector.Live && c.Phase != projector.Live {
			return setBack(c, stored)
		}
		if place := shadow(c.Projection, c.Generation); stored.Phase == projector.Live || stored.Place != place {
			return &setupError{fmt.Errorf("it is %s in schema %s, and only what is in %s can be discarded", stored.Phase, stored.Place, place)}
		}
		if _, err := tx.Exec(ctx, ddlPatience); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "drop schema if exists "+quoted(stored.Place)+" cascade"); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, removeCheckpoint, c.Projection, c.Generation)
		return err
	})
	if missing(err) {
		return nil
	}
	return generational("discard", c.Projection, c.Generation, err)
}

const removeCheckpoint = `delete from tidemark.checkpoints where projection = $1 and generation = $2`

// owned locks the row of c and returns what is stored, where c still counts.
func (s *Sink) owned(ctx context.Context, tx pgx.Tx, c projector.Checkpoint) (projector.Checkpoint, error) {
	found, err := s.wait(ctx, tx, c.Projection, c.Generation)
	switch {
	case err != nil:
		return projector.Checkpoint{}, err
	case len(found) == 0:
		return projector.Checkpoint{}, gone(c)
	}
	return found[0], admit(c, found[0], false)
}

// admit is the fence of the operations that read the row first and hold its lock.
func admit(believed, stored projector.Checkpoint, sequence bool) error {
	if !fault.Global.Off(fault.FenceTerm) && (stored.Term != believed.Term || stored.Owner != believed.Owner) ||
		sequence && !fault.Global.Off(fault.FenceSequence) && stored.Sequence != believed.Sequence {
		return superseded(believed, stored.Term, stored.Owner)
	}
	return nil
}

func gone(c projector.Checkpoint) error {
	return fmt.Errorf("tidemark/postgres: the checkpoint of projection %q, generation %d, is gone: %w", c.Projection, c.Generation, projector.ErrFenced)
}

// setBack is the error for a checkpoint that only a sink that was set back can have: its
// term and owner are those of before.
func setBack(believed, stored projector.Checkpoint) error {
	return fmt.Errorf("tidemark/postgres: projection %q: generation %d is stored as %s, and was %s: somebody has set it back, or switched: %w",
		believed.Projection, believed.Generation, stored.Phase, believed.Phase, projector.ErrFenced)
}

// superseded is the error for a believed checkpoint, where another is stored.
func superseded(believed projector.Checkpoint, term int64, owner string) error {
	if term == believed.Term {
		return fmt.Errorf("tidemark/postgres: projection %q: another commit follows term %d, sequence %d of generation %d: %w",
			believed.Projection, believed.Term, believed.Sequence, believed.Generation, projector.ErrFenced)
	}
	return &projector.FencedError{Projection: believed.Projection, Term: believed.Term, Theirs: term, Owner: owner}
}

// generational completes an error of an operation on generations.
func generational(doing, projection string, generation int64, err error) error {
	if _, ok := errors.AsType[*projector.RebuildError](err); ok || err == nil || errors.Is(err, projector.ErrFenced) {
		return err
	}
	if raced(err) {
		err = &staleError{err}
	}
	return failed(fmt.Sprintf("%s generation %d of projection %q", doing, generation, projection), err)
}

func quoted(names ...string) string { return pgx.Identifier(names).Sanitize() }
