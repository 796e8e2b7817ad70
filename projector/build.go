package projector

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/internal/order"
)

// snapshotAge is how old, in seconds, a time may be that a chunk is read at. The
// server keeps 300 s of history by default (minSnapshotHistoryWindowInSeconds).
const snapshotAge = 60

// sweepRows is how many rows that are left over, or in the way, are removed in one commit.
const sweepRows = 10_000

// build is the part of a committer that copies documents. Everything here runs in the
// commit stage, but for the reading of a chunk.
type build struct {
	reader   Reader
	mode     Mode
	cause    string
	began    time.Time
	progress func(Progress)
	every    bool // the sink keeps a version per row: every change is applied, wherever the frontier is
	// stop ends the live generation's own stream and gives its last checkpoint; nil: there
	// is none.
	stop func(context.Context) (Checkpoint, error)
	live Checkpoint // the last one of the live generation, once stopped; zero: none

	reading *reading // a chunk on its way, as of the stored position; nil: none
	turn    bool     // a chunk comes next, rather than the changes that wait
	limit   int      // most documents of a chunk, as more were too much for the sink; 0: as the reader likes
	newer   bool     // the position is too old to read at: it has to move on first
	swept   bool
	// computed are the keys of a Refresh that were recomputed in it, by keyHash.
	computed map[[16]byte]bool
	since    time.Time // this process's part of it
	before   int64     // documents copied before that
	seen     int64     // documents copied
	total    int64     // estimated
}

// errCaughtUp ends a build: all is copied, and the position is one that the source had
// after that.
var errCaughtUp = errors.New("the build has caught up")

// outOfOrderError: a change came that belongs before the position.
type outOfOrderError struct{ at, position bson.Timestamp }

func (e *outOfOrderError) Error() string {
	return fmt.Sprintf("a change of %s came after the stream had passed %s", timeText(e.at), timeText(e.position))
}

// exactAt is the time at which the source was what the model has, in the collections and
// up to the keys that it has; false while a group is open.
func (c Checkpoint) exactAt() (bson.Timestamp, bool) {
	at := c.Position.Time
	if c.Position.Token == nil {
		// Nothing was read from the time on, so everything before it is in the model.
		if at.I == 0 {
			at.T--
			at.I = 1 << 31
		} else {
			at.I--
		}
	}
	return at, !c.Open || fault.Global.Off(fault.ChunkSettled)
}

// reading is a chunk that is being read.
type reading struct {
	at         bson.Timestamp
	collection int
	cancel     context.CancelFunc
	done       chan struct{}
	changes    []*change
	last       bson.RawValue
	all        bool
	err        error
}

// frontier is where the build stands in collection i.
func (r *Rebuild) frontier(i int) Copied {
	if i < len(r.Read) {
		return r.Read[i]
	}
	return Copied{}
}

// next is the collection to copy from, false when all are copied.
func (r *Rebuild) next(p *plan) (collection int, ok bool) {
	if r == nil {
		return 0, false // a generation that was complete before
	}
	for i := range p.collections {
		if !r.frontier(i).Done {
			return i, true
		}
	}
	return 0, false
}

// covers reports whether the document of a change has been copied: then the change is to
// be applied. If not, its chunk will contain what the change did.
func (r *Rebuild) covers(c *change) bool {
	if r == nil || c.collection < 0 {
		return true
	}
	f := r.frontier(c.collection)
	return f.Done && !fault.Global.Off(fault.ChunkDone) || !f.Last.IsZero() && order.Compare(c.Key, bson.RawValue(f.Last)) <= 0
}

// with is the rebuild with a further chunk of collection i copied.
func (r *Rebuild) with(p *plan, i int, last bson.RawValue, rows int, done bool) *Rebuild {
	next := *r
	next.Read = slices.Clone(r.Read)
	for j := len(next.Read); j <= i; j++ {
		next.Read = append(next.Read, Copied{Collection: p.collections[j].name})
	}
	f := &next.Read[i]
	f.Rows += int64(rows)
	f.Done = done
	if !last.IsZero() {
		f.Last = StoredKey(last)
	}
	return &next
}

func (r *Rebuild) rows() (n int64) {
	if r == nil {
		return 0
	}
	for _, c := range r.Read {
		n += c.Rows
	}
	return n
}

// beyond says which changes of the queue don't concern the model yet. The keys that they
// touch may have been recomputed, though.
func (c *committer) beyond(ch *change) bool {
	if ch.err != nil && ch.collection >= 0 && c.plan.collections[ch.collection].refresh {
		return false
	}
	return c.build != nil && !c.build.every && !c.rebuild.covers(ch) && !fault.Global.Off(fault.Frontier)
}

// step takes a build further; false: the stream comes next.
func (b *build) step(ctx context.Context, c *committer, q *queue, turn bool) (did bool, err error) {
	if b == nil || !b.turn && !turn && b.reading == nil && len(q.changes) > 0 {
		return false, nil
	}
	collection, more := c.rebuild.next(c.plan)
	if !more && len(c.pending.list) > 0 {
		// Keys that wait come first. The turn stays, or the changes of a source that never
		// rests would take it every time, and touch more.
		return false, nil
	}
	if !fault.Global.Off(fault.ChunkHold) {
		b.turn = false // changes that wait come after this
	}
	at, exact := c.stored.exactAt()
	switch {
	case !exact || q.end != nil:
		return false, nil
	case !more:
		return c.finish(ctx, q)
	case b.reading != nil && fault.Global.Off(fault.ChunkHold):
		select {
		case <-b.reading.done:
			return true, c.copied(ctx, q)
		default:
			return false, nil // the stream goes on while the chunk is read
		}
	case b.reading != nil:
		return true, c.copied(ctx, q)
	case b.newer || c.status.heard().T > at.T+snapshotAge:
		return c.advance(ctx, q)
	case !c.due():
		return false, nil
	}
	c.read(ctx, collection, c.rebuild.frontier(collection).Last, at)
	return true, nil
}

// narrow leaves out of a batch what is beyond the frontier, and gives the next turn to a
// chunk.
func (b *build) narrow(c *committer, batch []*change) error {
	if b == nil {
		return nil
	}
	b.turn = true
	if at, exact := c.stored.exactAt(); exact && !batch[0].ClusterTime.After(at) {
		return &outOfOrderError{batch[0].ClusterTime, at}
	}
	for _, ch := range batch {
		if c.beyond(ch) {
			c.plan.leaveOut(ch)
		}
	}
	return nil
}

// timer tells when the next chunk is due, or the recomputation of the keys that wait.
func (c *committer) timer() (<-chan time.Time, func() bool) {
	_, in := c.refreshDue()
	if b := c.build; b != nil && b.reading == nil {
		if due := time.Until(b.reader.Due()); due > 0 && (in <= 0 || due < in) {
			in = due
		}
	}
	if in <= 0 {
		return nil, func() bool { return false }
	}
	t := time.NewTimer(in)
	return t.C, t.Stop
}

// due reports whether the next chunk may be read.
func (c *committer) due() bool { return !time.Now().Before(c.build.reader.Due()) }

// read begins to read a chunk.
func (c *committer) read(ctx context.Context, collection int, after StoredKey, at bson.Timestamp) {
	ctx, cancel := context.WithCancel(ctx)
	r := &reading{at: at, collection: collection, cancel: cancel, done: make(chan struct{})}
	c.build.reading = r
	uuid := c.watch.Collections[collection].UUID
	if len(uuid.Data) == 0 {
		// It did not exist when the stream's position had been taken: whatever it has came later.
		r.all = true
		close(r.done)
		return
	}
	limit := c.build.limit
	go func() {
		defer close(r.done)
		from := Range{Collection: c.source.db.Collection(c.plan.collections[collection].name), UUID: uuid, After: bson.RawValue(after), At: at, Limit: limit}
		if fault.Global.Off(fault.ChunkAt) {
			from.At, _ = c.source.now(ctx)
		}
		if fault.Global.Off(fault.ChunkUUID) {
			from.UUID = bson.Binary{}
		}
		docs, err := c.build.reader.Read(ctx, from)
		if err != nil {
			r.err = err
			return
		}
		if n := len(docs.Docs); n > 0 {
			r.last = docs.Docs[n-1].Lookup("_id")
			r.last.Value = bytes.Clone(r.last.Value)
		}
		r.all = docs.Done
		r.changes = c.decoder.snapshots(docs.Docs, collection, at)
	}()
}

// abandon drops a chunk that is being read.
func (b *build) abandon() {
	if b != nil && b.reading != nil {
		b.reading.cancel()
		<-b.reading.done
		b.reading = nil
	}
}

// copied commits the chunk that was read. Its place in the stream is the stored position:
// nothing was applied since it was read, and it was read as of that position's time.
func (c *committer) copied(ctx context.Context, q *queue) error {
	b, r := c.build, c.build.reading
	select {
	case <-r.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	r.cancel()
	b.reading = nil
	if r.err != nil {
		return c.notRead(ctx, r)
	}
	c.wait.reset()
	c.target = bson.Timestamp{}
	for _, ch := range r.changes {
		if ch.err != nil {
			return ch.err
		}
	}
	for binding, keys := range b.chunkKeys(c.plan, r.changes) {
		if err := c.recomputeAll(ctx, binding, keys, r.at); err != nil {
			return err
		}
	}
	next := c.rebuild.with(c.plan, r.collection, r.last, len(r.changes), r.all)
	// The next chunk is read while this one commits, from the same state of the source,
	// unless changes wait: they come first then.
	if following, more := next.next(c.plan); more && len(q.changes) == 0 && c.due() && !fault.Global.Off(fault.ChunkHold) {
		c.read(ctx, following, next.frontier(following).Last, r.at)
	}
	fault.Global.Reach(fault.ChunkRead)
	before := c.rebuild
	if fault.Global.Off(fault.ChunkFrontier) {
		// As if the frontier were stored by a commit of its own, after the rows'.
		if err := c.commit(ctx, r.changes, c.stored.Position, true, false); err != nil {
			return err
		}
		r.changes = nil
		fault.Global.Reach(fault.ChunkRead)
	}
	c.rebuild = next
	err := c.commit(ctx, r.changes, c.stored.Position, true, false)
	if errors.Is(err, errTooSlow) {
		c.rebuild = before
		b.abandon()
		b.limit = max(1, len(r.changes)/2)
		return nil
	}
	if err != nil {
		return err
	}
	if b.limit *= 2; b.limit > len(r.changes) {
		b.limit = 0
	}
	c.report(Progress{})
	return nil
}

// notRead decides what an error of a chunk's read means.
func (c *committer) notRead(ctx context.Context, r *reading) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case hasCode(r.err, snapshotCodes):
		c.build.newer, c.target = true, bson.Timestamp{}
		return c.wait.wait(ctx)
	case hasCode(r.err, uuidCodes):
		return &ReplacedError{
			Projection: c.plan.projection, Namespace: Namespace{c.plan.database, c.plan.collections[r.collection].name},
			Event: "other collection", At: c.stored.Position,
		}
	}
	if end := c.source.terminal(ctx, r.err, c.stored.Position); end != nil {
		return end
	}
	c.status.retrying(followingSource, r.err)
	c.log.Warn("a chunk of documents can't be read, it is tried again", "projection", c.plan.projection, "error", r.err)
	return c.wait.wait(ctx)
}

// advance moves the stored position to a recent time of the source, once the stream has
// passed it: a change of a later time is next, or an empty reply's token is beyond. (That
// tokens order like the times that they were given for is checked: a change that came
// after all would not fit the position.)
func (c *committer) advance(ctx context.Context, q *queue) (did bool, err error) {
	if c.target.IsZero() {
		err := c.ask(ctx, func() (err error) {
			if c.target, err = c.source.now(ctx); err == nil {
				c.targetToken, err = c.source.probeToken(ctx, c.target)
			}
			return err
		})
		if err != nil {
			return false, err
		}
	}
	at := Position{Token: c.stored.Position.Token, Time: c.target}
	if exact, _ := c.stored.exactAt(); !c.target.After(exact) {
		c.reached() // by a change that was applied
		return true, nil
	}
	switch {
	case len(q.changes) > 0 && q.changes[0].ClusterTime.After(c.target):
		if at.Token == nil {
			at.Time.I++
		}
	case len(q.changes) == 0 && q.token != nil && (tokenOf(q.token) >= tokenOf(c.targetToken) || fault.Global.Off(fault.ChunkProof)):
		at.Token = q.token
	case fault.Global.Off(fault.ChunkProof):
	default:
		return false, nil
	}
	if err := c.commit(ctx, nil, at, true, false); err != nil {
		return false, err
	}
	c.reached()
	return true, nil
}

// reached notes that the position has come to the target.
func (c *committer) reached() {
	c.target = bson.Timestamp{}
	if c.build != nil {
		c.build.newer = false
	}
}

func tokenOf(token bson.Raw) string {
	s, _ := token.Lookup("_data").StringValueOK()
	return s
}

// finish brings a build that has copied everything to a time that the source had after
// that, and not before the place where the live generation stands: readers must not go
// back.
func (c *committer) finish(ctx context.Context, q *queue) (did bool, err error) {
	b := c.build
	if b.mode == InPlace && !b.swept && !fault.Global.Off(fault.Sweep) {
		if err := c.sweep(ctx); err != nil {
			return false, err
		}
	}
	b.swept = true
	if did, err = c.advance(ctx, q); !did || err != nil {
		return did, err
	}
	if b.stop != nil {
		if b.live, err = b.stop(ctx); err != nil {
			return false, err
		}
		b.stop = nil
	}
	// A position of which nothing was read yet is the time after the last that it has. Times
	// of another replica set say nothing.
	at, _ := c.stored.exactAt()
	live, _ := b.live.exactAt()
	if b.live.Sequence > 0 && b.live.Watch.ReplicaSet == c.watch.ReplicaSet && at.Before(live) && !fault.Global.Off(fault.SwitchOrder) {
		return true, nil
	}
	return true, errCaughtUp
}

// sweep removes the rows that the rebuild has not written.
func (c *committer) sweep(ctx context.Context) error { return c.remove(ctx, c.store.sweep) }

// empty removes the rows that were there before a rebuild in mode Reset. They may be too many
// for one commit. Nothing is copied until it has come to its end, and no change is applied
// until something is copied, so a rebuild that was interrupted with nothing copied is begun
// anew.
func (c *committer) empty(ctx context.Context) error { return c.remove(ctx, c.store.empty) }

func (c *committer) remove(ctx context.Context, some func(ctx context.Context, prev, next Checkpoint, limit int) (int, error)) error {
	for {
		removed := 0
		next := c.following(c.stored.Position, true, nil)
		err := c.attempt(ctx, next, nil, false, func(ctx context.Context) (err error) {
			removed, err = some(ctx, c.stored, next, sweepRows)
			return err
		})
		var refused *refusedError
		if errors.As(err, &refused) {
			return &SinkError{Projection: c.plan.projection, Err: refused.err}
		}
		if err != nil || removed == 0 {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// report tells how far the rebuild has come.
func (c *committer) report(p Progress) {
	b := c.build
	p.Mode, p.Cause, p.Began = b.mode, b.cause, b.began
	if r := c.rebuild; r != nil {
		b.seen = r.rows()
		if i, more := r.next(c.plan); more {
			p.Collection = c.plan.collections[i].name
		}
	}
	p.Rows, p.Estimate = b.seen, max(b.total, b.seen)
	if s := time.Since(b.since).Seconds(); s > 0 {
		p.PerSecond = float64(p.Rows-b.before) / s
	}
	if p.PerSecond > 0 && p.Collection != "" {
		p.Left = time.Duration(float64(p.Estimate-p.Rows) / p.PerSecond * float64(time.Second)).Round(time.Second)
	}
	b.progress(p)
	b.reader.Report(p)
}

// snapshots decodes a chunk, on as many goroutines as decode the stream.
func (d *decoder) snapshots(docs []bson.Raw, collection int, at bson.Timestamp) []*change {
	all := make([]change, len(docs))
	changes := make([]*change, len(docs))
	size := max(1, (len(docs)+decoders())/(decoders()+1))
	var work sync.WaitGroup
	for from := 0; from < len(docs); from += size {
		work.Go(func() {
			for i := from; i < min(from+size, len(docs)); i++ {
				d.snapshot(docs[i], collection, at, &all[i])
				changes[i] = &all[i]
			}
		})
	}
	work.Wait()
	return changes
}

func (d *decoder) snapshot(doc bson.Raw, collection int, at bson.Timestamp, c *change) {
	coll := &d.plan.collections[collection]
	key := doc.Lookup("_id")
	c.Event = Event{
		Op: Snapshot, Namespace: Namespace{d.plan.database, coll.name}, Key: key,
		ClusterTime: at, WallTime: time.Unix(int64(at.T), 0).UTC(), Version: versionOf(at), Replaying: true,
	}
	c.after, c.collection, c.size = doc, collection, len(doc)
	d.items(c)
}
