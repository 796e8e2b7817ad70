package projector

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/fault"
)

const (
	// refreshKeys is how many touched keys wait at most; more are recomputed at once. They
	// are stored with every checkpoint.
	refreshKeys = 5000
	// recomputeKeys is how many are given to the function at a time.
	recomputeKeys = 1000
)

// Touched is a collection whose documents touch keys of a Refresh. Make it with Touches.
type Touched[K comparable] struct {
	collection string
	keys       func(*decoder, *change) ([]K, error)
	fault      error
}

// Touches says which keys of a Refresh a document of a collection has a part in. A change
// touches those of the document before and of the one after it; the collection must keep
// both images.
func Touches[T any, K comparable](collection string, keys func(T) []K) Touched[K] {
	t := Touched[K]{collection: collection}
	if keys == nil {
		t.fault = errors.New("the function of Touches is nil")
	}
	t.keys = func(d *decoder, c *change) ([]K, error) {
		before, after, err := both(d, c, keys)
		return append(before, after...), err
	}
	return t
}

// Refresh keeps one row per key, for what is easier computed anew than updated: a document
// that joins several collections, a median, a ranking. Changes only tell which keys are
// touched. Those of about Options.RefreshInterval are taken together, and recompute is
// called once for all of them: it reads what it needs from src and gives a row for each
// key that has one; the row of a key that it leaves out is removed. Rows are keyed by K,
// as those of a Mirror are by _id, so the row type has no `key`.
//
// The context given to recompute carries a snapshot session, which its reads must use: they
// see the source at one time, that of the model's position where that is recent. recompute
// must depend on nothing else; it may be called again for the same keys. K is stored with
// the checkpoint until its row is computed, so it must be a type that BSON can hold and
// bring back as it was; times in it are cut to milliseconds.
func Refresh[K comparable, R, Tx any](recompute func(ctx context.Context, src *mongo.Database, keys []K) (map[K]R, error), into Putter[Tx, R], from ...Touched[K]) Binding[Tx] {
	first := formBinding[Tx](FormRefresh, "", into, recompute == nil)
	if len(from) == 0 {
		first.faults = append(first.faults, errors.New("nothing touches its keys; add Touches"))
		first.collection = "(none)"
	}
	r := &refreshing[Tx]{recompute: func(ctx context.Context, src *mongo.Database, keys []StoredKey) (refreshed, error) {
		asked := make([]K, len(keys))
		stored := make(map[K]StoredKey, len(keys))
		for i, k := range keys {
			if err := bson.RawValue(k).Unmarshal(&asked[i]); err != nil {
				return nil, fmt.Errorf("read a key of type %T back: %w", asked[i], err)
			}
			stored[asked[i]] = k
		}
		var computed map[K]R
		err := safely(func() (err error) { computed, err = recompute(ctx, src, asked); return err })
		if err != nil {
			return nil, err
		}
		rows := make(map[string]R, len(computed))
		for k, row := range computed {
			s, ok := stored[k]
			if !ok {
				return nil, fmt.Errorf("it gave a row for the key %v, which it was not asked for", k)
			}
			rows[identity(bson.RawValue(s))] = row
		}
		return rows, nil
	}, put: func(ctx context.Context, tx Tx, keys []StoredKey, version int64, rows refreshed) error {
		all := rows.(map[string]R)
		var remove, put []Row[R]
		for _, k := range keys {
			row := Row[R]{Owner: bson.RawValue(k), Version: version}
			if r, ok := all[identity(row.Owner)]; ok {
				row.Row = &r
				put = append(put, row)
			} else {
				remove = append(remove, row)
			}
		}
		return into.Put(ctx, tx, remove, put)
	}}
	bindings := make([]Binding[Tx], len(from))
	for i, t := range from {
		b := first
		b.collection, b.images = t.collection, images{before: true, after: true}
		if t.fault != nil {
			b.faults = append(b.faults, t.fault)
		}
		b.decode = func(d *decoder, c *change) (any, error) {
			keys, err := t.keys(d, c)
			if err != nil {
				return nil, err
			}
			return storedKeys(keys)
		}
		b.refresh = r
		if i > 0 {
			b.create, b.clear, b.emptier, b.sweeper, b.target, b.layout, b.refresh = nil, nil, nil, nil, "", "", nil
		}
		bindings[i] = b
	}
	if len(bindings) > 0 {
		first = bindings[0]
		first.more = bindings[1:]
	}
	return first
}

// refreshing is what a Refresh does beside collecting keys.
type refreshing[Tx any] struct {
	recompute func(context.Context, *mongo.Database, []StoredKey) (refreshed, error)
	put       func(context.Context, Tx, []StoredKey, int64, refreshed) error
}

// refreshed is a map of rows by the identity of their keys.
type refreshed any

// storedKeys are keys as the checkpoint has them.
func storedKeys[K comparable](keys []K) ([]StoredKey, error) {
	stored := make([]StoredKey, len(keys))
	for i, k := range keys {
		t, v, err := bson.MarshalValue(k)
		if err != nil {
			return nil, fmt.Errorf("a key of type %T can't be stored: %w", k, err)
		}
		stored[i] = StoredKey{Type: t, Value: v}
	}
	return stored, nil
}

// pendings are the touched keys that wait for their recomputation, in the order in which
// they were touched first.
type pendings struct {
	list  []Pending
	known map[string]bool
	since time.Time // when the first was touched; zero: none waits
}

func newPendings(stored []Pending) pendings {
	p := pendings{list: stored, known: map[string]bool{}}
	if len(stored) > 0 {
		p.since = time.Now()
	}
	for _, k := range stored {
		p.known[k.identity()] = true
	}
	return p
}

func (p Pending) identity() string {
	return fmt.Sprint(p.Binding, " ", identity(bson.RawValue(p.Key)))
}

// with is the list with what a batch touches.
func (p *pendings) with(pl *plan, batch []*change) (list, added []Pending) {
	list = p.list[:len(p.list):len(p.list)]
	fresh := map[string]bool{}
	for _, c := range batch {
		if c.items == nil || !pl.collections[c.collection].refresh || c.Op == Snapshot {
			continue
		}
		for slot, b := range pl.collections[c.collection].bindings {
			keys, ok := c.items[slot].([]StoredKey)
			if !ok {
				continue
			}
			for _, k := range keys {
				pending := Pending{Binding: pl.bindings[b].owner, Key: k}
				if id := pending.identity(); !p.known[id] && !fresh[id] {
					fresh[id] = true
					added = append(added, pending)
				}
			}
		}
	}
	return append(list, added...), added
}

// note keeps what a commit has stored.
func (p *pendings) note(list, added []Pending) {
	p.list = list
	for _, a := range added {
		p.known[a.identity()] = true
	}
	if p.since.IsZero() && len(list) > 0 {
		p.since = time.Now()
	}
}

// due says whether the keys that wait are to be recomputed now, and if not, when.
func (c *committer) refreshDue() (now bool, in time.Duration) {
	p := &c.pending
	switch {
	case len(p.list) == 0:
		return false, 0
	case len(p.list) >= refreshKeys || c.awaited.awaited() || c.build != nil && c.rebuildDone():
		return true, 0
	}
	in = time.Until(p.since.Add(c.options.RefreshInterval))
	return in <= 0, in
}

func (c *committer) rebuildDone() bool {
	_, more := c.rebuild.next(c.plan)
	return !more
}

// refresh recomputes the keys that wait, where that is due. It is done as of the model's
// position, so that the model is then the source at one time; where the position is too
// old for that, as of now, and the model is ahead of its position until that has come
// there, which the checkpoint says.
func (c *committer) refresh(ctx context.Context, q *queue) (did bool, err error) {
	at, closed := c.stored.exactAt()
	if !closed {
		return false, nil
	}
	if now, _ := c.refreshDue(); !now {
		if c.stored.Ahead.After(at) && len(c.pending.list) == 0 && len(q.changes) == 0 {
			return c.advance(ctx, q)
		}
		return false, nil
	}
	if c.status.heard().T > at.T+snapshotAge {
		if len(q.changes) == 0 {
			return c.advance(ctx, q)
		}
		if len(c.pending.list) < refreshKeys {
			return false, nil // the stream is far behind, and will touch them again
		}
		if at, err = c.nowOf(ctx); err != nil {
			return false, err
		}
	}
	list := c.pending.list
	for binding := range c.plan.bindings {
		var keys []StoredKey
		for _, p := range list {
			if p.Binding == binding {
				keys = append(keys, p.Key)
			}
		}
		if err := c.recomputeAll(ctx, binding, keys, at); err != nil {
			return false, err
		}
	}
	return true, nil
}

// recomputeAll recomputes keys, so many at a time.
func (c *committer) recomputeAll(ctx context.Context, binding int, keys []StoredKey, at bson.Timestamp) error {
	for part := range slices.Chunk(keys, recomputeKeys) {
		if err := c.recompute(ctx, binding, part, at); err != nil {
			return err
		}
	}
	return nil
}

// nowOf is a time of the source.
func (c *committer) nowOf(ctx context.Context) (t bson.Timestamp, err error) {
	err = c.ask(ctx, func() (err error) { t, err = c.source.now(ctx); return err })
	return t, err
}

// ask asks the source until it answers.
func (c *committer) ask(ctx context.Context, question func() error) error {
	for {
		err := question()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if end := c.source.terminal(ctx, err, c.stored.Position); end != nil {
			return end
		}
		c.status.retrying(followingSource, err)
		if err := c.wait.wait(ctx); err != nil {
			return err
		}
	}
}

// recompute computes the rows of some keys as of a time, or a later one where the source
// has no snapshot of that, and commits them.
func (c *committer) recompute(ctx context.Context, binding int, keys []StoredKey, at bson.Timestamp) error {
	rows, at, err := c.rowsOf(ctx, binding, keys, at)
	if err != nil {
		return err
	}
	done := map[string]bool{}
	for _, k := range keys {
		done[Pending{Binding: binding, Key: k}.identity()] = true
	}
	var left []Pending
	for _, p := range c.pending.list {
		if !done[p.identity()] {
			left = append(left, p)
		}
	}
	next := c.following(c.stored.Position, true, left)
	if next.Ahead = c.stored.Ahead; at.After(next.Ahead) {
		next.Ahead = at
	}
	next.settle()
	err = c.attempt(ctx, next, nil, false, func(ctx context.Context) error {
		return c.store.refresh(ctx, c.stored, next, binding, keys, versionOf(at), rows)
	})
	var refused *refusedError
	if errors.As(err, &refused) {
		return c.plan.refused(binding, keys, refused.err)
	}
	if err == nil {
		c.pending = newPendings(left)
	}
	return err
}

// rowsOf asks the user's function until it answers, and tells as of when it did.
func (c *committer) rowsOf(ctx context.Context, binding int, keys []StoredKey, at bson.Timestamp) (refreshed, bson.Timestamp, error) {
	for {
		rows, err := c.rowsOnce(ctx, binding, keys, at)
		switch {
		case err == nil:
			c.wait.reset()
			return rows, at, nil
		case ctx.Err() != nil:
			return nil, at, ctx.Err()
		case hasCode(err, snapshotCodes):
			// Even now can be refused for a while, after a change of the catalogue.
			if err := c.wait.wait(ctx); err != nil {
				return nil, at, err
			}
			if at, err = c.nowOf(ctx); err != nil {
				return nil, at, err
			}
			continue
		}
		if end := c.source.terminal(ctx, err, c.stored.Position); end != nil {
			return nil, at, end
		}
		if !passing(err) {
			return nil, at, c.plan.refused(binding, keys, err)
		}
		c.status.retrying(followingSource, err)
		c.log.Warn("a recomputation fails, it is tried again", "projection", c.plan.projection, "error", err)
		if err := c.wait.wait(ctx); err != nil {
			return nil, at, err
		}
	}
}

// passing reports whether an error of the source's is one that passes.
func passing(err error) bool {
	var labelled mongo.LabeledError
	return mongo.IsNetworkError(err) || mongo.IsTimeout(err) ||
		errors.As(err, &labelled) && (labelled.HasErrorLabel("TransientTransactionError") || labelled.HasErrorLabel("RetryableReadError")) ||
		hasCode(err, []int{91, 189, 10107, 11600, 11602, 13435, 13436}) // shutdown, stepdown, not primary
}

// rowsOnce calls the user's function in a snapshot session.
func (c *committer) rowsOnce(ctx context.Context, binding int, keys []StoredKey, at bson.Timestamp) (refreshed, error) {
	sess, err := c.source.db.Client().StartSession(options.Session().SetSnapshot(true).SetSnapshotTime(at))
	if err != nil {
		return nil, err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	fault.Global.Reach(fault.Recompute)
	return c.store.recompute(mongo.NewSessionContext(ctx, sess), c.source.db, binding, keys)
}

// refused is the error for keys whose rows can't be computed or stored.
func (p *plan) refused(binding int, keys []StoredKey, err error) error {
	return &RecomputeError{Projection: p.projection, Binding: p.bindings[binding].name, Keys: len(keys), Key: KeyText(bson.RawValue(keys[0])), Err: err}
}

// keyHash identifies a key among those of a rebuild, which may be too many to be kept.
func keyHash(binding int, k StoredKey) (h [16]byte) {
	sum := sha256.Sum256([]byte(Pending{Binding: binding, Key: k}.identity()))
	copy(h[:], sum[:])
	return h
}

// chunkKeys are the keys of a rebuild's chunk that were not recomputed in it before. Once
// is enough: whatever touches them later comes as a change.
func (b *build) chunkKeys(p *plan, changes []*change) map[int][]StoredKey {
	keys := map[int][]StoredKey{}
	for _, c := range changes {
		for slot, i := range p.collections[c.collection].bindings {
			touched, ok := c.items[slot].([]StoredKey)
			if !ok {
				continue
			}
			owner := p.bindings[i].owner
			for _, k := range touched {
				id := keyHash(owner, k)
				if !b.computed[id] {
					b.computed[id] = true
					k.Value = bytes.Clone(k.Value)
					keys[owner] = append(keys[owner], k)
				}
			}
		}
	}
	return keys
}
