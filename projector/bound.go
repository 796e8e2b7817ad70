package projector

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// store is a sink as the runner sees it: without its transaction type, for one
// projection.
type store interface {
	acquire(ctx context.Context, owner string) ([]Checkpoint, error)
	load(ctx context.Context, generation int64) (Checkpoint, error)
	begin(ctx context.Context, live Checkpoint, generation int64) (Checkpoint, error)
	change(ctx context.Context, from, to Checkpoint) error
	discard(ctx context.Context, c Checkpoint) error
	commit(ctx context.Context, prev, next Checkpoint, batch []*change) error
	sweep(ctx context.Context, prev, next Checkpoint, limit int) (removed int, err error)
	count(ctx context.Context, prev Checkpoint) (rows int64, err error)
	emptied() bool
	empty(ctx context.Context, prev, next Checkpoint, limit int) (removed int, err error)
	recompute(ctx context.Context, src *mongo.Database, binding int, keys []StoredKey) (refreshed, error)
	refresh(ctx context.Context, prev, next Checkpoint, binding int, keys []StoredKey, version int64, rows refreshed) error
	versioned() bool
	refreshReaders(ctx context.Context) error
	try(ctx context.Context, prev Checkpoint, batch []*change) error
	classify(err error) Class
}

// bound is a projection and its sink.
type bound[Tx any] struct {
	sink       Sink[Tx]
	projection Projection[Tx]
	plan       *plan
}

func (b *bound[Tx]) acquire(ctx context.Context, owner string) ([]Checkpoint, error) {
	return b.sink.Acquire(ctx, b.projection.Name, owner)
}

func (b *bound[Tx]) load(ctx context.Context, generation int64) (Checkpoint, error) {
	return b.sink.Load(ctx, b.projection.Name, generation)
}

func (b *bound[Tx]) begin(ctx context.Context, live Checkpoint, generation int64) (Checkpoint, error) {
	return b.sink.Begin(ctx, live, generation)
}

func (b *bound[Tx]) change(ctx context.Context, from, to Checkpoint) error {
	return b.sink.Switch(ctx, from, to)
}

func (b *bound[Tx]) discard(ctx context.Context, c Checkpoint) error { return b.sink.Discard(ctx, c) }

func (b *bound[Tx]) classify(err error) Class { return b.sink.Classify(err) }

func (b *bound[Tx]) commit(ctx context.Context, prev, next Checkpoint, batch []*change) error {
	return b.sink.Commit(ctx, prev, next, func(ctx context.Context, tx Tx) error {
		if err := safely(func() error { return b.prepare(ctx, tx, prev, next) }); err != nil {
			return err
		}
		return b.apply(ctx, tx, next, batch)
	})
}

func (b *bound[Tx]) try(ctx context.Context, prev Checkpoint, batch []*change) error {
	return b.sink.Try(ctx, prev, func(ctx context.Context, tx Tx) error { return b.apply(ctx, tx, prev, batch) })
}

func (b *bound[Tx]) recompute(ctx context.Context, src *mongo.Database, binding int, keys []StoredKey) (refreshed, error) {
	return b.projection.Bindings[binding].refresh.recompute(ctx, src, keys)
}

// refresh commits recomputed rows.
func (b *bound[Tx]) refresh(ctx context.Context, prev, next Checkpoint, binding int, keys []StoredKey, version int64, rows refreshed) error {
	return b.sink.Commit(ctx, prev, next, func(ctx context.Context, tx Tx) error {
		return b.projection.Bindings[binding].refresh.put(ctx, tx, keys, version, rows)
	})
}

// refreshReaders lets readers see what is committed, in a sink where that takes a while.
func (b *bound[Tx]) refreshReaders(ctx context.Context) error {
	if r, ok := b.sink.(interface {
		Refresh(ctx context.Context, projection string) error
	}); ok {
		return r.Refresh(ctx, b.projection.Name)
	}
	return nil
}

// versioned reports whether the sink keeps a version per row, so that it takes changes in
// any order and any number of times.
func (b *bound[Tx]) versioned() bool {
	return versioned(b.sink)
}

// sweep removes rows that an in-place rebuild has not written.
func (b *bound[Tx]) sweep(ctx context.Context, prev, next Checkpoint, limit int) (removed int, err error) {
	err = b.sink.Commit(ctx, prev, next, func(ctx context.Context, tx Tx) error {
		removed = 0
		for _, binding := range b.projection.Bindings {
			if binding.sweeper == nil {
				continue
			}
			n, err := binding.sweeper.Sweep(ctx, tx, limit-removed)
			if removed += n; err != nil || removed >= limit {
				return err
			}
		}
		return nil
	})
	return removed, err
}

// emptied reports whether there are targets that are emptied in several commits.
func (b *bound[Tx]) emptied() bool {
	return slices.ContainsFunc(b.projection.Bindings, func(binding Binding[Tx]) bool { return binding.emptier != nil })
}

// empty removes rows that were there before a rebuild in mode Reset.
func (b *bound[Tx]) empty(ctx context.Context, prev, next Checkpoint, limit int) (removed int, err error) {
	err = b.sink.Commit(ctx, prev, next, func(ctx context.Context, tx Tx) error {
		removed = 0
		for _, binding := range b.projection.Bindings {
			if binding.emptier == nil {
				continue
			}
			n, err := binding.emptier.Empty(ctx, tx, limit-removed)
			if removed += n; err != nil || removed >= limit {
				return err
			}
		}
		return nil
	})
	return removed, err
}

// count is the number of rows in the targets that can tell.
func (b *bound[Tx]) count(ctx context.Context, prev Checkpoint) (rows int64, err error) {
	err = b.sink.Try(ctx, prev, func(ctx context.Context, tx Tx) error {
		rows = 0
		for _, binding := range b.projection.Bindings {
			if binding.sweeper == nil {
				continue
			}
			n, err := binding.sweeper.Count(ctx, tx)
			if rows += n; err != nil {
				return err
			}
		}
		return nil
	})
	return rows, err
}

// prepare readies the model for its first commit, and for that of a rebuild in its own
// place.
func (b *bound[Tx]) prepare(ctx context.Context, tx Tx, prev, next Checkpoint) error {
	begins := next.Rebuild != nil && (prev.Rebuild == nil || !prev.Rebuild.Began.Equal(next.Rebuild.Began))
	var err error
	switch {
	case prev.Sequence == 0:
		err = b.create(ctx, tx)
	case begins && next.Rebuild.Mode != Shadow:
		// A raised Version may have targets that are new, or no longer fit.
		err = b.createTargets(ctx, tx)
	}
	if err != nil || !begins {
		return err
	}
	switch next.Rebuild.Mode {
	case Reset:
		return b.clear(ctx, tx)
	case InPlace:
		return b.prepareSweep(ctx, tx)
	}
	return nil
}

func (b *bound[Tx]) prepareSweep(ctx context.Context, tx Tx) error {
	for _, binding := range b.projection.Bindings {
		if binding.sweeper == nil {
			continue // a further collection of a Refresh
		}
		if err := binding.sweeper.Prepare(ctx, tx); err != nil {
			return err
		}
	}
	return nil
}

// clear empties the model, but for the targets that are emptied in the commits that follow.
func (b *bound[Tx]) clear(ctx context.Context, tx Tx) error {
	for _, binding := range b.projection.Bindings {
		if binding.clear == nil || binding.emptier != nil {
			continue
		}
		if err := binding.clear(ctx, tx); err != nil {
			return err
		}
	}
	if b.projection.Reset == nil {
		return nil
	}
	return b.projection.Reset(ctx, tx)
}

// create makes the empty model.
func (b *bound[Tx]) create(ctx context.Context, tx Tx) error {
	if err := b.createTargets(ctx, tx); err != nil || b.projection.Setup == nil {
		return err
	}
	return b.projection.Setup(ctx, tx)
}

func (b *bound[Tx]) createTargets(ctx context.Context, tx Tx) error {
	for _, binding := range b.projection.Bindings {
		if binding.create == nil {
			continue
		}
		if err := binding.create(ctx, tx); err != nil {
			return err
		}
	}
	return nil
}

// apply gives a batch to the bindings: to On handlers in the order of the stream, then
// to each pure form all of its changes at once.
func (b *bound[Tx]) apply(ctx context.Context, tx Tx, next Checkpoint, batch []*change) error {
	fault.Global.Reach(fault.HandlerBegin)
	defer fault.Global.Reach(fault.HandlerEnd)
	return safely(func() error {
		if err := b.applyOn(ctx, tx, batch); err != nil {
			return err
		}
		return b.applyPure(ctx, tx, next, batch)
	})
}

// applyOn calls On handlers with runs of consecutive changes. A run ends at a change
// of another collection that has On handlers too.
func (b *bound[Tx]) applyOn(ctx context.Context, tx Tx, batch []*change) error {
	var run []*change
	flush := func() error {
		if len(run) == 0 {
			return nil
		}
		for slot, i := range b.plan.collections[run[0].collection].bindings {
			if b.plan.bindings[i].form != FormOn {
				continue
			}
			items := make([]any, 0, len(run))
			for _, c := range run {
				if c.items[slot] != nil { // else it is beyond a rebuild's frontier
					items = append(items, c.items[slot])
				}
			}
			if len(items) == 0 {
				continue
			}
			if err := b.projection.Bindings[i].apply(ctx, tx, items); err != nil {
				return err
			}
		}
		run = run[:0]
		return nil
	}
	for _, c := range batch {
		if c.collection < 0 || !b.plan.collections[c.collection].on {
			continue
		}
		if len(run) > 0 && run[0].collection != c.collection {
			if err := flush(); err != nil {
				return err
			}
		}
		run = append(run, c)
	}
	return flush()
}

func (b *bound[Tx]) applyPure(ctx context.Context, tx Tx, next Checkpoint, batch []*change) error {
	items := b.plan.items(batch)
	// Of the documents of a chunk nothing is stored yet, unless a model is filled in place.
	fresh := len(batch) > 0 && batch[0].Op == Snapshot && next.Rebuild != nil && next.Rebuild.Mode != InPlace && !b.versioned()
	for i, binding := range b.plan.bindings {
		if binding.form == FormOn || binding.form == FormRefresh || len(items[i]) == 0 {
			continue
		}
		apply := b.projection.Bindings[i].apply
		if load := b.projection.Bindings[i].load; load != nil && fresh {
			apply = load
		}
		if err := apply(ctx, tx, items[i]); err != nil {
			return err
		}
	}
	return nil
}
