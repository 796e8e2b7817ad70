package sinktest_test

import (
	"context"
	"errors"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

// change makes a change of a projection's generations on the server, which carries it
// out even where its client has gone. The locks of those that are named are held.
func (s memorySink) change(ctx context.Context, projection string, generations []int64, do func(*known) error) error {
	release, err := s.connect(ctx)
	if release != nil {
		defer release()
	}
	if err != nil {
		return err
	}
	k := s.find(projection)
	if k == nil {
		return projector.ErrFenced
	}
	tx := &memoryTx{}
	locks := []*lock{&k.lock}
	for _, g := range generations {
		if p := s.generation(projection, g); p != nil {
			locks = append(locks, &p.lock)
		}
	}
	unlock := func() {
		for _, l := range locks {
			s.unlock(l, tx)
		}
	}
	for _, l := range locks {
		if err := s.take(ctx, l, tx, false); err != nil {
			unlock()
			return err
		}
	}
	result := make(chan error, 1)
	err = s.carryOut(func() {
		defer unlock()
		_ = s.hop(context.Background())
		s.mu.Lock()
		defer s.mu.Unlock()
		if tx.ended {
			result <- errTransient
			return
		}
		result <- do(k)
	})
	if err != nil {
		return err
	}
	select {
	case err := <-result:
		return errors.Join(err, s.hop(ctx))
	case <-ctx.Done():
		return ctx.Err()
	}
}

// owned compares a checkpoint's term and owner with the stored ones.
func (s memorySink) owned(p *stored, c projector.Checkpoint) error {
	if p == nil {
		return projector.ErrFenced
	}
	c.Sequence = p.sequence
	return s.compare(p, c)
}

func (s memorySink) Begin(ctx context.Context, live projector.Checkpoint, generation int64) (projector.Checkpoint, error) {
	var begun projector.Checkpoint
	err := s.change(ctx, live.Projection, nil, func(k *known) (err error) {
		of := k.generations[live.Generation]
		switch {
		case of == nil:
			return projector.ErrFenced
		case s.broken == "begin not fenced":
		case s.broken == "begin compares the sequence":
			err = s.compare(of, live)
		default:
			err = s.owned(of, live)
		}
		if err != nil {
			return err
		}
		p := k.generations[generation]
		if p != nil && s.broken != "begin starts over" {
			if err := s.owned(p, live); err != nil {
				return err
			}
			begun, err = s.decode(live.Projection, p)
			return err
		}
		begun = projector.Checkpoint{
			Format: 1, Projection: live.Projection, Generation: generation, Phase: projector.Building,
			Place: s.placeOf(live.Projection, generation, s.broken == "begin gives the live place"),
		}
		p = &stored{generation: generation, term: of.term, owner: of.owner}
		k.generations[generation] = p
		begun.Term, begun.Owner = p.term, p.owner
		p.body, err = begun.Encode()
		return err
	})
	if err != nil { // the server may still be at it
		return projector.Checkpoint{}, err
	}
	return begun, nil
}

func (s memorySink) Switch(ctx context.Context, from, to projector.Checkpoint) error {
	generations := []int64{min(from.Generation, to.Generation), max(from.Generation, to.Generation)}
	return s.change(ctx, from.Projection, generations, func(k *known) error {
		a, b := k.generations[from.Generation], k.generations[to.Generation]
		if a == nil || b == nil {
			return projector.ErrFenced
		}
		if err := s.compare(a, from); err != nil && s.broken != "switch not fenced" {
			return err
		}
		if err := s.compare(b, to); err != nil && s.broken != "switch not fenced" && s.broken != "switch compares from only" {
			return err
		}
		return s.switchLocked(ctx, k, a, b, to)
	})
}

func (s memorySink) switchLocked(ctx context.Context, k *known, a, b *stored, to projector.Checkpoint) error {
	retired, err := s.decode(to.Projection, a)
	if err != nil {
		return err
	}
	was := to.Place
	retired.Phase, to.Phase = projector.Retired, projector.Live
	old, fresh := s.places[retired.Place], s.places[was]
	delete(s.places, retired.Place)
	delete(s.places, was)
	retired.Place = s.placeOf(to.Projection, a.generation, false)
	to.Place = s.placeOf(to.Projection, b.generation, true)
	if s.broken == "switch leaves readers" {
		old, fresh = fresh, old
	}
	if s.broken == "switch in two steps" {
		s.mu.Unlock()
		time.Sleep(2 * time.Millisecond)
		s.mu.Lock()
	}
	s.places[retired.Place], s.places[to.Place] = old, fresh
	k.live = to.Place
	if s.broken == "switch loses the retired rows" {
		delete(s.places, retired.Place)
	}
	if s.broken == "switch stores what was stored" {
		before, _ := s.decode(to.Projection, b)
		before.Place, before.Phase = to.Place, to.Phase
		to = before
	}
	if err := s.restore(b, to); err != nil {
		return err
	}
	if s.broken == "cancelled switch is half done" && ctx.Err() != nil {
		return ctx.Err()
	}
	if a.sequence == 0 && s.broken != "switch keeps a from without a model" {
		delete(k.generations, a.generation)
		delete(s.places, retired.Place)
		return nil
	}
	return s.restore(a, retired)
}

// restore stores a checkpoint under the next sequence.
func (s memorySink) restore(p *stored, c projector.Checkpoint) (err error) {
	if s.broken != "switch keeps the sequence" {
		p.sequence++
	}
	p.body, err = c.Encode()
	return err
}

func (s memorySink) Discard(ctx context.Context, c projector.Checkpoint) error {
	return s.change(ctx, c.Projection, []int64{c.Generation}, func(k *known) error {
		p := k.generations[c.Generation]
		if p == nil {
			return nil
		}
		if err := s.owned(p, c); err != nil && s.broken != "discard not fenced" {
			return err
		}
		there, err := s.decode(c.Projection, p)
		if err != nil {
			return err
		}
		phase := there.Phase
		if s.broken == "discard believes its caller" {
			phase = c.Phase
		}
		if phase == projector.Live {
			return errFatal
		}
		delete(k.generations, c.Generation)
		if s.broken != "discard leaves the place" {
			delete(s.places, there.Place)
		}
		return nil
	})
}
