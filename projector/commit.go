package projector

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// committer is the commit stage: the one place where decisions about position are
// taken. It runs in one goroutine.
type committer struct {
	plan    *plan
	source  *source
	store   store
	stream  *stream
	decoder *decoder
	status  *status
	awaited *arrivals
	log     *slog.Logger
	options Options
	watch   Watch
	samples []Sample
	rebuild *Rebuild // stored with every commit; nil: no rebuild fills the model
	build   *build   // copies documents beside the stream; nil: it only follows
	pending pendings // keys of a Refresh that wait

	stored      Checkpoint // the last one known to be in the sink
	lastSettled time.Time
	lastCommit  time.Time
	lastSample  time.Time
	took        time.Duration  // by the last commit of changes
	backoff     backoff        // of attempts at the sink
	wait        backoff        // of questions to the source
	target      bson.Timestamp // a time of the source that the position has to reach; zero: none
	targetToken bson.Raw       // the stream's at that time
	passed      int            // batches in a row that were refused, though trials accept them
}

// reopen says that the sink holds another checkpoint than expected, though no newer
// owner: it has failed over and lost commits, or was put back to an earlier copy.
// Everything read is dropped, and the stream starts again from what is stored.
type reopen struct{ stored Checkpoint }

func (*reopen) Error() string { return "the sink's checkpoint is not the one committed last" }

// run commits what the stream delivers until the context ends or something stops it.
func (c *committer) run(ctx context.Context) error {
	q := newQueue()
	l := limits{c.options.BatchChanges, c.options.BatchBytes, c.options.TransactionBytes}
	defer c.build.abandon()
	for ctx.Err() == nil {
		if err := c.take(ctx, q, l); err != nil {
			return err
		}
		if did, err := c.build.step(ctx, c, q, false); did || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		if did, err := c.refresh(ctx, q); did || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		n, settled := q.cut(l, c.build != nil || c.awaited.awaited() || time.Since(c.lastSettled) > settleEvery, c.beyond)
		var err error
		switch {
		case n > 0:
			batch := q.changes[:n]
			if err := c.build.narrow(c, batch); err != nil {
				return err
			}
			at := batch[n-1].position()
			level := settled && n == len(q.changes) && q.closed
			if level && q.token != nil {
				at.Token = q.token
			}
			if err = c.commit(ctx, batch, at, settled, level); err == nil && !settled && batch[n-1].Txn != nil {
				c.cutTransaction(batch[n-1])
			}
			q.drop(n)
		case q.failed(c.beyond) != nil:
			return q.failed(c.beyond)
		case len(q.changes) == 0 && c.storeIdle(q):
			c.sample(ctx)
			at := c.stored.Position
			if q.token != nil {
				at.Token = q.token
				at.Time, _ = c.stored.exactAt()
			}
			err = c.commit(ctx, nil, at, true, true)
			q.token = nil
		default:
			// What has come can't be committed yet, so a chunk may come before it.
			var did bool
			if did, err = c.build.step(ctx, c, q, true); !did && err == nil {
				err = c.more(ctx, q)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sample takes the samples that are still missing, of documents that have come since the
// start, when there is nothing else to do.
func (c *committer) sample(ctx context.Context) {
	if time.Since(c.lastSample) >= time.Second {
		c.lastSample = time.Now()
		c.samples = append(c.samples, c.source.missingSamples(ctx, c.decoder, c.samples)...)
	}
}

// take moves what has arrived into the queue. Of a backlog it waits for more, as long as
// the last commit took, and so spends no more than half of the time on it: the larger a
// commit, the fewer rows it writes for as many changes.
func (c *committer) take(ctx context.Context, q *queue, l limits) error {
	var due <-chan time.Time
	for !q.full(l) {
		if len(c.stream.chunks) == 0 {
			if !q.more || c.build != nil {
				return nil
			}
			if due == nil {
				t := time.NewTimer(min(c.took, maxGather))
				defer t.Stop()
				due = t.C
			}
		}
		select {
		case ch, ok := <-c.stream.chunks:
			if !ok {
				return ctx.Err()
			}
			if err := c.accept(ctx, q, ch); err != nil {
				return err
			}
		case <-due:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// maxGather limits how long changes of a backlog wait for more, also where the stream
// breaks meanwhile.
const maxGather = time.Second

// more waits for more to come, and for the next chunk of a rebuild or a recomputation.
func (c *committer) more(ctx context.Context, q *queue) error {
	due, stop := c.timer()
	defer stop()
	select {
	case ch, ok := <-c.stream.chunks:
		if !ok {
			return ctx.Err()
		}
		return c.accept(ctx, q, ch)
	case <-due:
		return nil
	case <-ctx.Done():
		return nil
	}
}

func (c *committer) accept(ctx context.Context, q *queue, ch *chunk) error {
	if ch.ready != nil {
		select {
		case <-ch.ready:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	c.stream.taken(ch)
	q.add(ch)
	if len(ch.changes) > 0 {
		c.status.waiting()
	}
	return nil
}

// storeIdle says whether an empty reply's token is worth a commit: at once if the last
// commit was not settled, else at a bounded rate.
func (c *committer) storeIdle(q *queue) bool {
	if c.stored.Open && q.closed {
		return true
	}
	if q.token == nil {
		return false
	}
	due := c.awaited.awaited() || time.Since(c.lastCommit) >= c.options.IdleInterval
	return due && !bytes.Equal(q.token, c.stored.Position.Token) && !fault.Global.Off(fault.IdlePosition)
}

func (c *committer) cutTransaction(last *change) {
	c.status.change(func(s *Status) { s.CutTransactions++ })
	c.log.Warn("a source transaction exceeds Options.TransactionBytes and is committed in parts", //
		"projection", c.plan.projection, "clusterTime", timeText(last.ClusterTime), "limit", c.options.TransactionBytes)
}

// commit brings a batch into the sink, or finds the one change that prevents it.
func (c *committer) commit(ctx context.Context, batch []*change, at Position, settled, level bool) error {
	err := c.lookup(ctx, batch)
	if err == nil {
		pending, touched := c.pending.with(c.plan, batch)
		next := c.following(at, settled, pending)
		err = c.attempt(ctx, next, batch, level, func(ctx context.Context) error { return c.store.commit(ctx, c.stored, next, batch) })
		if err == nil {
			c.pending.note(pending, touched)
		}
	}
	var refused *refusedError
	if !errors.As(err, &refused) {
		return err
	}
	if len(batch) == 0 {
		return &SinkError{Projection: c.plan.projection, Err: refused.err}
	}
	if half := middle(batch); half > 0 {
		if err := c.commit(ctx, batch[:half], batch[half-1].position(), true, false); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return c.commit(ctx, batch[half:], at, settled, level)
	}
	if err = c.blame(ctx, batch, refused.err); !errors.Is(err, errPassed) {
		return err
	}
	if c.passed++; c.passed > maxPassed {
		return &SinkError{Projection: c.plan.projection, Err: fmt.Errorf("it refuses to commit what it accepts in trials: %w", refused.err)}
	}
	if err := c.pause(ctx, refused.err); err != nil {
		return err
	}
	return c.commit(ctx, batch, at, settled, level)
}

// maxPassed is how often in a row a batch may be refused that trials accept.
const maxPassed = 3

// shrinkAfter is how many attempts in a row may run into their time limit before the
// batch is halved.
const shrinkAfter = 2

// refusedError is a batch that its handlers or the sink refuse for its content, or for
// being too much.
type refusedError struct{ err error }

func (e *refusedError) Error() string { return e.err.Error() }

// middle is the boundary between groups nearest to the middle of the batch, 0 where
// it is a single group.
func middle(batch []*change) int {
	boundary := func(i int) bool { return batch[i-1].ClusterTime != batch[i].ClusterTime }
	half := len(batch) / 2
	for i := half; i < len(batch) && i > 0; i++ {
		if boundary(i) {
			return i
		}
	}
	for i := half; i > 0; i-- {
		if boundary(i) {
			return i
		}
	}
	return 0
}

// blame finds the change of a group that can't be applied, by trials that are rolled
// back: the shortest beginning of the group that fails ends with it.
func (c *committer) blame(ctx context.Context, group []*change, err error) error {
	// The first trial is of the whole group: it has to fail twice.
	passes, fails := 0, len(group)+1
	for fails-passes > 1 {
		mid := (passes + fails) / 2
		if fails > len(group) {
			mid = len(group)
		}
		terr := c.trial(ctx, group[:mid])
		var refused *refusedError
		switch {
		case terr == nil:
			passes = mid
		case errors.As(terr, &refused):
			fails, err = mid, refused.err
		default:
			return terr
		}
	}
	if passes == len(group) {
		return errPassed
	}
	return c.plan.poison(group[fails-1], err)
}

// errPassed: a group that was refused is accepted when it is tried again.
var errPassed = errors.New("the group is accepted now")

func (c *committer) trial(ctx context.Context, batch []*change) error {
	for ctx.Err() == nil {
		cctx, cancel := c.commitContext(ctx)
		err := c.store.try(cctx, c.stored, batch)
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrFenced):
			return c.fenced(ctx)
		}
		switch c.classify(err) {
		case Poison:
			return &refusedError{err}
		case Fatal:
			return &SinkError{Projection: c.plan.projection, Err: err}
		}
		if err := c.pause(ctx, err); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// attempt commits a batch, again and again until it is known to be in the sink, or
// known not to be acceptable. An answer that was lost is never taken for a failure:
// the stored checkpoint decides, read under the lock that a commit holds.
func (c *committer) attempt(ctx context.Context, next Checkpoint, batch []*change, level bool, commit func(context.Context) error) error {
	for timeouts := 0; ; {
		fault.Global.Reach(fault.CommitBegin)
		cctx, cancel := c.commitContext(ctx)
		begin := time.Now()
		err := commit(cctx)
		cancel()
		if err == nil {
			if len(batch) > 0 {
				c.took = time.Since(begin)
			}
			c.committed(next, batch, level)
			return nil
		}
		if !errors.Is(err, ErrFenced) {
			switch c.classify(err) {
			case Poison:
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return &refusedError{err}
			case Fatal:
				return &SinkError{Projection: c.plan.projection, Err: err}
			}
			cause := err
			if errors.Is(err, context.DeadlineExceeded) {
				if timeouts++; timeouts >= shrinkAfter && !smaller(batch) {
					cause = fmt.Errorf("a commit that can't be made smaller has run into its time limit, Options.CommitTimeout (%s) or the sink's own; if the sink is not just slow for a while, raise it: %w",
						c.options.CommitTimeout, err)
				}
			}
			if err := c.pause(ctx, cause); err != nil {
				return err
			}
		}
		refused := err
		if fault.Global.Off(fault.ReadBack) {
			continue
		}
		stored, err := c.load(ctx)
		switch {
		case err != nil:
			return err
		case stored.same(next):
			c.committed(next, batch, level)
			return nil
		case stored.Term != c.stored.Term, stored.Owner != c.stored.Owner, stored.Sequence != c.stored.Sequence:
			return c.superseded(stored)
		case errors.Is(refused, ErrFenced): // though nothing has changed
			if err := c.pause(ctx, refused); err != nil {
				return err
			}
		case timeouts >= shrinkAfter && middle(batch) > 0:
			return &refusedError{refused} // it may be too much for the time limit: halve it
		case timeouts >= shrinkAfter && len(batch) > 1 && batch[0].Op == Snapshot:
			return errTooSlow // a chunk is halved by who has read it
		}
		fault.Global.Reach(fault.CommitRetry)
	}
}

// smaller reports whether a batch that is too much for one commit can be halved, here or by
// who has read it.
func smaller(batch []*change) bool {
	return middle(batch) > 0 || len(batch) > 1 && batch[0].Op == Snapshot
}

// following is the checkpoint that comes after the stored one; closed says that the
// position is between groups.
func (c *committer) following(at Position, closed bool, pending []Pending) Checkpoint {
	next := c.stored
	next.Sequence++
	next.Version = c.plan.version
	next.Position, next.Open, next.Watch, next.Samples, next.Rebuild, next.Pending = at, !closed, c.watch, c.samples, c.rebuild, pending
	if fault.Global.Off(fault.RefreshPending) {
		next.Pending = nil
	}
	next.settle()
	next.CommittedAt = time.Now().UTC().Truncate(time.Millisecond)
	return next
}

// errTooSlow: a chunk runs into the time limit of a commit.
var errTooSlow = errors.New("the chunk is too large for one commit")

func (c *committer) committed(next Checkpoint, batch []*change, level bool) {
	c.stored = next
	c.lastCommit = time.Now()
	if next.Settled {
		c.lastSettled = c.lastCommit
	}
	c.backoff.reset()
	c.passed = 0
	c.status.committed(next, batch, level)
	c.awaited.committed(next)
	fault.Global.Reach(fault.CommitDone)
}

// load reads the stored checkpoint, until the sink answers.
func (c *committer) load(ctx context.Context) (Checkpoint, error) {
	for {
		cctx, cancel := c.commitContext(ctx)
		stored, err := c.store.load(cctx, c.stored.Generation)
		cancel()
		if err == nil {
			return stored, nil
		}
		if isCheckpointError(err) {
			return stored, err
		}
		if c.classify(err) != Transient {
			return stored, &SinkError{Projection: c.plan.projection, Err: err}
		}
		if err := c.pause(ctx, err); err != nil {
			return stored, err
		}
	}
}

// insist asks the sink until it answers. Being fenced is looked into.
func (c *committer) insist(ctx context.Context, ask func(context.Context) error) error {
	for {
		passing, err := c.once(ctx, ask)
		if passing == nil {
			return err
		}
		if err := c.pause(ctx, passing); err != nil {
			return err
		}
	}
}

// once asks the sink once, and tells a failure that passes from one that doesn't.
func (c *committer) once(ctx context.Context, ask func(context.Context) error) (passing, err error) {
	cctx, cancel := c.commitContext(ctx)
	err = ask(cctx)
	cancel()
	var refused *RebuildError
	switch {
	case err == nil, isCheckpointError(err), errors.As(err, &refused):
		return nil, err
	case errors.Is(err, ErrFenced):
		return nil, c.fenced(ctx)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case c.classify(err) != Transient:
		return nil, &SinkError{Projection: c.plan.projection, Err: err}
	}
	return err, nil
}

func (c *committer) fenced(ctx context.Context) error {
	stored, err := c.load(ctx)
	if err != nil {
		return err
	}
	return c.superseded(stored)
}

// superseded is what a checkpoint means that is not the one committed last.
func (c *committer) superseded(stored Checkpoint) error {
	if stored.Sequence == 0 && c.stored.Sequence > 0 {
		// To begin anew, from now say, would leave out what lies between in silence.
		return &CheckpointError{Projection: c.plan.projection, Gone: true, Err: fmt.Errorf("it was removed while the projection ran, which stood at %s", c.stored.Position)}
	}
	// A sink that has gone back may give the same term to someone else.
	if stored.Term < c.stored.Term || stored.Term == c.stored.Term && stored.Owner == c.stored.Owner {
		return &reopen{stored}
	}
	return &FencedError{Projection: c.plan.projection, Term: c.stored.Term, Theirs: stored.Term, Owner: stored.Owner}
}

// classify asks the sink, but for what is plainly a connection's fault.
func (c *committer) classify(err error) Class {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return Transient // the commit's own time limit, or the end of the run
	}
	return c.store.classify(err)
}

// pause waits before another attempt; it fails when the run is to end.
func (c *committer) pause(ctx context.Context, cause error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	c.delayed(cause)
	return c.backoff.wait(ctx)
}

func (c *committer) delayed(cause error) {
	c.status.retrying(committingToSink, cause)
	c.log.Warn("the sink fails, the commit is tried again", "projection", c.plan.projection, "error", cause)
}

// commitContext bounds one attempt. It outlives a cancelled run by StopTimeout, so that
// the commit under way can end.
func (c *committer) commitContext(ctx context.Context) (context.Context, context.CancelFunc) {
	cctx, cancel := context.WithTimeout(context.WithValue(context.WithoutCancel(ctx), delays{}, c.delayed), c.options.CommitTimeout)
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(c.options.StopTimeout)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-cctx.Done():
		}
	})
	return cctx, func() { stop(); cancel() }
}

// lookup completes what Mirror's Lookup needs from the source, before the sink's
// transaction begins.
func (c *committer) lookup(ctx context.Context, batch []*change) error {
	if !c.plan.lookups || len(batch) == 0 {
		return nil
	}
	items := c.plan.items(batch)
	for i, b := range c.plan.bindings {
		if b.fetch == nil || len(items[i]) == 0 {
			continue
		}
		if err := c.fetch(ctx, b, batch[len(batch)-1].ClusterTime, items[i]); err != nil {
			var bad *undecodable
			if errors.As(err, &bad) {
				return c.undecodable(ctx, batch, bad)
			}
			return err
		}
	}
	return nil
}

// undecodable commits what comes before the group of a change whose document was looked
// up and can't be decoded, and names that change.
func (c *committer) undecodable(ctx context.Context, batch []*change, bad *undecodable) error {
	for i, ch := range batch {
		if !slices.Contains(ch.items, bad.item) {
			continue
		}
		for i > 0 && batch[i-1].ClusterTime == ch.ClusterTime {
			i--
		}
		if i > 0 {
			if err := c.commit(ctx, batch[:i], batch[i-1].position(), true, false); err != nil {
				return err
			}
		}
		return c.plan.poison(ch, bad.err)
	}
	return &SourceError{Projection: c.plan.projection, Doing: "look up documents", Err: bad.err}
}

func (c *committer) fetch(ctx context.Context, b planned, at bson.Timestamp, items []any) error {
	coll := c.source.db.Collection(b.collection, majority)
	var wait backoff
	for {
		err := b.fetch(ctx, coll, at, c.decoder, items)
		var bad *undecodable
		if err == nil || errors.As(err, &bad) || ctx.Err() != nil {
			return err
		}
		if end := c.source.terminal(ctx, err, c.stored.Position); end != nil {
			return end
		}
		c.status.retrying(followingSource, err)
		if err := wait.wait(ctx); err != nil {
			return err
		}
	}
}

func isCheckpointError(err error) bool {
	var malformed *CheckpointError
	var format *FormatError
	return errors.As(err, &malformed) || errors.As(err, &format)
}
