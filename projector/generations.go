package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// generations are the builds of a model that the sink has.
type generations struct {
	live     Checkpoint
	building *Checkpoint  // the one that a rebuild fills; nil: none
	others   []Checkpoint // retired, or left over
	last     int64        // the highest number
	anew     bool         // what was begun in the live generation's place can't go on: it is begun again
}

func newGenerations(all []Checkpoint) *generations {
	g := new(generations)
	for _, c := range all {
		g.last = max(g.last, c.Generation)
		switch {
		case c.Phase == Live:
			g.live = c
		case c.Phase == Building && c.Rebuild != nil && g.building == nil:
			g.building = &c
		default:
			g.others = append(g.others, c)
		}
	}
	return g
}

// retired is the generation that was live last; nil: there is none.
func (g *generations) retired() *Checkpoint {
	var last *Checkpoint
	for i, c := range g.others {
		if c.Phase == Retired && (last == nil || c.CommittedAt.After(last.CommittedAt)) {
			last = &g.others[i]
		}
	}
	return last
}

// job is what the runner has to do about the model beside following the source.
type job struct {
	cause    string
	follow   bool // the live generation can be kept up to date meanwhile
	rollback bool // go back to the retired generation
}

// maxLost is how many rebuilds in a row may fail since the source has lost what they need.
const maxLost = 3

// keep keeps the model: follows the source with the live generation, and rebuilds it when
// that is due, until something ends it.
func (r *Runner) keep(ctx context.Context, g *generations, watch Watch) error {
	var f *follower
	defer func() { f.stop() }()
	todo, err := r.due(g, watch)
	if err != nil {
		return err
	}
	for lost := 0; ; {
		if f != nil && todo != nil && f.ended() {
			g.stopped(f)
			f = nil
		}
		if f == nil && (todo == nil || todo.follow && g.live.Rebuild == nil) {
			if f, err = r.startFollowing(ctx, g.live, watch); err != nil {
				return err
			}
		}
		if todo == nil {
			if todo, err = r.idle(ctx, g, f); err != nil {
				return err
			}
			continue
		}
		r.requests.begin(todo.rollback)
		err := r.do(ctx, g, f, todo)
		r.rebuilt.Store(nil)
		var refused *RebuildError
		switch {
		case err == nil:
			r.status.change(func(s *Status) { s.Checkpoint = g.live })
			r.requests.done(nil)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f, todo, lost, watch = nil, nil, 0, g.live.Watch
		case ctx.Err() != nil:
			return ctx.Err()
		case startOver(err) && !todo.rollback && lost+1 < maxLost:
			lost++
			r.options.Logger.Warn("the rebuild has to start over", "projection", r.plan.projection, "error", err)
			g.discard()
		case (startOver(err) || errors.As(err, &refused)) && todo.follow && g.live.Rebuild == nil:
			// The live model goes on.
			if f != nil && f.ended() {
				g.stopped(f)
				f = nil
			}
			if !errors.As(err, &refused) {
				err = &RebuildError{Projection: r.plan.projection, Err: err}
			}
			r.options.Logger.Error("the rebuild was given up, the live model goes on", "projection", r.plan.projection, "error", err)
			r.requests.done(err)
			g.discard()
			todo, lost = nil, 0
		case startOver(err):
			return &RebuildError{Projection: r.plan.projection, Err: fmt.Errorf("%d attempts in a row have failed: %w", lost+1, err)}
		default:
			return err
		}
	}
}

// stopped takes note of where the follower has left the live generation.
func (g *generations) stopped(f *follower) {
	if c := f.c.stored; c.Generation == g.live.Generation && c.Sequence > g.live.Sequence {
		g.live = c
	}
}

// discard gives up what is being built: it is removed when the next rebuild begins.
func (g *generations) discard() {
	if g.building != nil {
		g.others = append(g.others, *g.building)
		g.building = nil
	}
	g.anew = true
}

// due says what a start finds to be done.
func (r *Runner) due(g *generations, watch Watch) (*job, error) {
	if g.live.Sequence == 0 {
		if r.options.Start.from != "" {
			return nil, nil
		}
		return &job{cause: "first load"}, nil
	}
	if err := r.check(g.live, watch); err != nil {
		cause, rebuilds := r.rebuilds(err)
		if !rebuilds {
			return nil, err
		}
		return &job{cause: cause}, nil
	}
	switch {
	case g.live.Rebuild != nil && r.options.Reconcile == nil:
		return nil, &RebuildError{Projection: r.plan.projection, Err: errors.New("a rebuild in its own place was begun and has not ended; set Options.Reconcile to have it ended")}
	case g.live.Rebuild != nil:
		return &job{cause: g.live.Rebuild.Cause}, nil
	case g.building != nil && g.building.Version < r.plan.version:
		g.discard()
	case g.building != nil && g.building.Version > r.plan.version:
		// A later release builds it; this one keeps the live model.
	case g.building != nil && r.options.Reconcile != nil:
		return &job{cause: g.building.Rebuild.Cause, follow: true}, nil
	}
	return nil, nil
}

// rebuilds says whether an error is one that a rebuild mends, and is to.
func (r *Runner) rebuilds(err error) (cause string, rebuilds bool) {
	if r.options.Reconcile == nil || r.plan.noRebuild {
		return "", false
	}
	var replaced *ReplacedError
	var mismatch *MismatchError
	switch {
	case errors.Is(err, ErrHistoryLost):
		return "history lost: " + first(err), true
	case errors.As(err, &replaced):
		return "replaced: " + first(err), !r.options.StopOnReplace
	case errors.As(err, &mismatch):
		return strings.Join(mismatch.Differs, "; "), mismatch.Rebuild
	}
	return "", false
}

// first is the beginning of an error's text, for a checkpoint's cause.
func first(err error) string {
	text := err.Error()
	if len(text) > 300 {
		text = strings.ToValidUTF8(text[:300], "") + "…"
	}
	return text
}

// startOver reports whether a rebuild has to begin from its beginning.
func startOver(err error) bool {
	var replaced *ReplacedError
	var order *outOfOrderError
	return errors.Is(err, ErrHistoryLost) || errors.As(err, &replaced) || errors.As(err, &order)
}

// committer makes the commit stage of a generation.
func (r *Runner) committer(stored Checkpoint, watch Watch, st *status, awaited *arrivals, replaying bool) *committer {
	return &committer{
		plan: r.plan, source: r.source, store: r.store, status: st, awaited: awaited,
		log: r.options.Logger, options: r.options, watch: watch,
		decoder: &decoder{registry: r.options.Registry, plan: r.plan, replaying: replaying},
		stored:  stored, rebuild: stored.Rebuild, pending: newPendings(stored.Pending), lastSettled: time.Now(), lastCommit: time.Now(),
	}
}

// follower follows the source with the live generation, in a goroutine of its own.
type follower struct {
	c      *committer
	cancel context.CancelFunc
	done   chan struct{}
	err    error // once done
}

func (r *Runner) startFollowing(ctx context.Context, live Checkpoint, watch Watch) (*follower, error) {
	c := r.committer(live, watch, r.status, r.arrivals, false)
	var differs []string
	if c.samples, differs = r.source.samples(ctx, c.decoder, live.Samples); len(differs) > 0 {
		return nil, &MismatchError{Projection: r.plan.projection, Differs: differs}
	}
	if live.Sequence == 0 {
		if err := r.begin(ctx, c); err != nil {
			return nil, err
		}
	}
	r.status.running(c.stored)
	r.arrivals.committed(c.stored)
	ctx, cancel := context.WithCancel(ctx)
	f := &follower{c: c, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		r.options.Logger.Info("following the source", "projection", r.plan.projection, "term", c.stored.Term, "generation", c.stored.Generation, "position", c.stored.Position.String())
		f.err = r.follow(ctx, c)
	}()
	return f, nil
}

// stop ends a follower; nil is none.
func (f *follower) stop() {
	if f != nil {
		f.cancel()
		<-f.done
	}
}

func (f *follower) ended() bool {
	if f == nil {
		return true
	}
	select {
	case <-f.done:
		return true
	default:
		return false
	}
}

// idle waits while the live generation follows the source, until there is something to
// be done.
func (r *Runner) idle(ctx context.Context, g *generations, f *follower) (*job, error) {
	expires := time.NewTimer(r.expiry(g))
	defer expires.Stop()
	for {
		select {
		case <-f.done:
			g.stopped(f)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if cause, rebuilds := r.rebuilds(f.err); rebuilds {
				r.options.Logger.Warn("the model has to be rebuilt", "projection", r.plan.projection, "error", f.err)
				return &job{cause: cause}, nil
			}
			return nil, f.err
		case q := <-r.requests.wanted():
			return &job{cause: "by hand", follow: true, rollback: q.rollback}, nil
		case <-expires.C:
			clean, err := r.cleanUp(ctx, g, r.committer(g.live, f.c.watch, r.status, r.arrivals, false))
			if clean || err != nil {
				return nil, err
			}
			expires.Reset(cleanUpAgain)
		}
	}
}

// cleanUpAgain is how long until a generation that could not be removed is tried again.
const cleanUpAgain = 5 * time.Second

// expiry is how long until a generation is to be removed that is not needed any more.
func (r *Runner) expiry(g *generations) time.Duration {
	switch keep := g.retired(); {
	case keep == nil && len(g.others) == 0:
		return forever
	case keep == nil || len(g.others) > 1:
		return 0
	default:
		return max(0, time.Until(g.live.Since.Add(r.options.KeepRetired)))
	}
}

// cleanUp removes the generations that are not needed any more: all but the one retired
// last, and that as well when its time is over. One that can't be removed now, since a
// stranger's transaction has read it, say, stays for later, and nothing waits for that.
func (r *Runner) cleanUp(ctx context.Context, g *generations, c *committer) (clean bool, err error) {
	keep := g.retired()
	if keep != nil && time.Since(g.live.Since) >= r.options.KeepRetired {
		keep = nil
	}
	var kept []Checkpoint
	clean = true
	for _, old := range g.others {
		if keep != nil && old.Generation == keep.Generation {
			kept = append(kept, old)
			continue
		}
		old.Term, old.Owner = c.stored.Term, c.stored.Owner
		passing, err := c.once(ctx, func(ctx context.Context) error { return r.store.discard(ctx, old) })
		switch {
		case err != nil:
			return false, err
		case passing != nil:
			old.Phase = Building // of which nothing is certain, so no rollback goes to it
			clean, kept = false, append(kept, old)
			r.options.Logger.Warn("a generation of the model can't be removed yet", "projection", r.plan.projection, "generation", old.Generation, "error", passing)
		default:
			r.options.Logger.Info("removed a generation of the model", "projection", r.plan.projection, "generation", old.Generation)
		}
	}
	g.others = kept
	return clean, nil
}

// rebuilding is the rebuild under way, as Status tells of it.
type rebuilding struct {
	status   *status
	follow   func() bool // the live generation is being kept up to date
	progress atomic.Pointer[Progress]
}

func (b *rebuilding) tell(s *Status) {
	s.Rebuild = b.progress.Load()
	if s.State != Starting && s.State != Running && s.State != Retrying || b.follow() {
		return
	}
	own := b.status.get()
	s.State, s.Doing, s.Err = Rebuilding, "", nil
	if own.State == Retrying {
		s.State, s.Doing, s.Err = Retrying, own.Doing, own.Err
	}
	s.Retries, s.StreamsOpened = s.Retries+own.Retries, s.StreamsOpened+own.StreamsOpened
}

// do does a job: fills a generation, or catches one up, and makes it the live one.
func (r *Runner) do(ctx context.Context, g *generations, f *follower, todo *job) error {
	st := &status{s: Status{Projection: r.plan.projection, State: Running}}
	view := &rebuilding{status: st, follow: func() bool { return !f.ended() }}
	view.progress.Store(&Progress{Cause: todo.cause})
	r.rebuilt.Store(view)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if f != nil {
		// Whatever else ends the live generation's stream, a lost term ends this, too.
		watched := make(chan struct{})
		defer func() { <-watched }()
		defer cancel(nil)
		go func() {
			defer close(watched)
			select {
			case <-f.done:
				var again *reopen
				if errors.Is(f.err, ErrFenced) || errors.As(f.err, &again) || isCheckpointError(f.err) {
					cancel(f.err)
				}
			case <-ctx.Done():
			}
		}()
	}
	err := r.build(ctx, g, f, todo, view)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

func (r *Runner) build(ctx context.Context, g *generations, f *follower, todo *job, view *rebuilding) error {
	c, err := r.builder(ctx, g, f, todo, view)
	if err != nil {
		return err
	}
	c.report(Progress{})
	if err := r.follow(ctx, c); !errors.Is(err, errCaughtUp) {
		if err == nil {
			err = ctx.Err()
		}
		return err
	}
	r.requests.ending()
	done := Progress{Done: true}
	if c.build.mode == Shadow {
		if err := r.change(ctx, g, c); err != nil {
			return err
		}
	} else {
		c.rebuild = nil
		if err := c.commit(ctx, nil, c.stored.Position, true, true); err != nil {
			return err
		}
		g.live = c.stored
		done.SinkRows = r.sinkRows(ctx, c)
	}
	c.report(done)
	r.options.Logger.Info("the model was rebuilt", "projection", r.plan.projection, "generation", g.live.Generation, "cause", todo.cause,
		"mode", c.build.mode, "documents", c.build.seen, "sinkRows", done.SinkRows, "took", time.Since(c.build.began).Round(time.Millisecond))
	return nil
}

// sinkRows counts what a rebuild in place has left in the sink; 0 where that fails, or takes
// too long: the rebuild is done, and the model waits for nothing.
func (r *Runner) sinkRows(ctx context.Context, c *committer) (rows int64) {
	if c.build.mode != InPlace {
		return 0
	}
	passing, err := c.once(ctx, func(ctx context.Context) (err error) { rows, err = r.store.count(ctx, c.stored); return err })
	if err := cmp.Or(passing, err); err != nil {
		r.options.Logger.Warn("the rows in the sink were not counted", "projection", r.plan.projection, "error", err)
		return 0
	}
	return rows
}

// builder makes the commit stage of a rebuild or a rollback: with the generation that was
// begun before, or a new one.
func (r *Runner) builder(ctx context.Context, g *generations, f *follower, todo *job, view *rebuilding) (*committer, error) {
	var watch Watch
	begin := Position{}
	err := r.insist(ctx, view.status, &begin, func() (err error) {
		// The position comes first: what is found after that, and is gone or new, the stream
		// tells of.
		now, err := r.source.now(ctx)
		if err == nil {
			begin = Position{Time: bson.Timestamp{T: now.T, I: now.I + 1}}
			watch, err = r.source.preflight(ctx, true)
		}
		return err
	})
	var config *ConfigError
	if errors.As(err, &config) && todo.follow {
		err = &RebuildError{Projection: r.plan.projection, Err: err} // the live model does without
	}
	if err != nil {
		return nil, err
	}
	b := &build{began: time.Now().UTC().Truncate(time.Millisecond), since: time.Now(), cause: todo.cause, every: r.store.versioned(), live: g.live, computed: map[[16]byte]bool{}}
	b.progress = func(p Progress) { view.progress.Store(&p) }
	if todo.rollback {
		return r.goBack(ctx, g, f, b, watch, view)
	}
	if r.options.Reconcile == nil || r.plan.noRebuild {
		return nil, &RebuildError{Projection: r.plan.projection, Err: errors.New("Options.Reconcile is not set, or the projection declares NoRebuild")}
	}
	b.mode, b.reader = r.options.Reconcile.Begin()
	b.total = r.estimate(ctx)
	own := g.building
	if g.live.Rebuild != nil {
		own = &g.live
	}
	if own != nil && own.Sequence > 0 && !g.anew && r.check(*own, watch) == nil && !r.halfEmpty(*own) {
		b.mode, b.began, b.before = own.Rebuild.Mode, own.Rebuild.Began, own.Rebuild.rows()
		c := r.committer(*own, watch, view.status, r.awaited(b.mode), true)
		var differs []string
		if c.samples, differs = r.source.samples(ctx, c.decoder, own.Samples); len(differs) == 0 {
			// A document that stopped the last attempt may have been mended since: the next
			// chunk is read as of now.
			b.newer = true
			c.build = b
			r.beside(g, f, c)
			return c, nil
		}
	}
	g.discard()
	return r.anew(ctx, g, f, b, watch, begin, view)
}

// halfEmpty reports whether there may be rows in the model from before a rebuild.
func (r *Runner) halfEmpty(c Checkpoint) bool {
	return c.Rebuild != nil && c.Rebuild.Mode == Reset && len(c.Rebuild.Read) == 0 && r.store.emptied()
}

// awaited is who waits for the generation that a rebuild fills: nobody, unless it is live.
func (r *Runner) awaited(m Mode) *arrivals {
	if m == Shadow {
		return newArrivals()
	}
	return r.arrivals
}

// beside has a shadow stop the live generation when it is about to switch.
func (r *Runner) beside(g *generations, f *follower, c *committer) {
	if c.build.mode != Shadow {
		return
	}
	c.build.stop = func(ctx context.Context) (live Checkpoint, err error) {
		f.stop()
		// Its last commit's answer may have been lost.
		err = c.insist(ctx, func(ctx context.Context) error {
			live, err = r.store.load(ctx, g.live.Generation)
			return err
		})
		if err == nil && !live.ownedAs(c.stored) {
			err = c.superseded(live)
		}
		return live, err
	}
}

// ownedAs reports whether both checkpoints are of one ownership.
func (c Checkpoint) ownedAs(o Checkpoint) bool { return c.Term == o.Term && c.Owner == o.Owner }

// anew begins a rebuild.
func (r *Runner) anew(ctx context.Context, g *generations, f *follower, b *build, watch Watch, begin Position, view *rebuilding) (*committer, error) {
	c := r.committer(g.live, watch, view.status, r.awaited(b.mode), true)
	c.build, c.pending = b, newPendings(nil)
	c.rebuild = &Rebuild{Mode: b.mode, Began: b.began, Cause: b.cause}
	c.samples, _ = r.source.samples(ctx, c.decoder, nil)
	switch b.mode {
	case Shadow:
		// What is left over of earlier ones goes first, but for the one to roll back to.
		if _, err := r.cleanUp(ctx, g, c); err != nil {
			return nil, err
		}
		live := g.live
		err := c.insist(ctx, func(ctx context.Context) (err error) {
			c.stored, err = r.store.begin(ctx, live, g.last+1)
			return err
		})
		if err != nil {
			return nil, err
		}
		g.last++
		r.beside(g, f, c)
	case InPlace, Reset:
		if b.mode == InPlace {
			if err := r.plan.inPlace(); err != nil {
				return nil, &RebuildError{Projection: r.plan.projection, Err: err}
			}
		}
		f.stop()
		// A commit of which the answer was lost may have been the last.
		if c.stored.Sequence > 0 {
			stored, err := c.load(ctx)
			if err != nil {
				return nil, err
			}
			if !stored.ownedAs(c.stored) {
				return nil, c.superseded(stored)
			}
			c.stored = stored
		}
		c.rebuild.Mark = c.stored.Sequence + 1
	default:
		return nil, &RebuildError{Projection: r.plan.projection, Err: fmt.Errorf("there is no mode %q", b.mode)}
	}
	r.options.Logger.Info("rebuilding the model", "projection", r.plan.projection, "generation", c.stored.Generation, "mode", b.mode, "cause", b.cause)
	before := c.stored.Sequence
	err := c.commit(ctx, nil, begin, true, false)
	if err != nil {
		return nil, err
	}
	g.anew = false
	if b.mode == Shadow {
		begun := c.stored
		g.building = &begun
		return c, nil
	}
	if before > 0 && r.halfEmpty(c.stored) {
		err = c.empty(ctx)
	}
	g.live = c.stored
	return c, err
}

// goBack makes the commit stage that catches the retired generation up.
func (r *Runner) goBack(ctx context.Context, g *generations, f *follower, b *build, watch Watch, view *rebuilding) (*committer, error) {
	old := g.retired()
	if old == nil {
		return nil, &RebuildError{Projection: r.plan.projection, Err: errors.New("there is no retired generation to go back to: none was replaced, or Options.KeepRetired is over")}
	}
	if err := r.check(*old, watch); err != nil {
		return nil, &RebuildError{Projection: r.plan.projection, Err: fmt.Errorf("the retired generation can't go on: %w", err)}
	}
	old.Term, old.Owner = g.live.Term, g.live.Owner
	b.mode, b.cause, b.reader = Shadow, "rollback", noReader{}
	c := r.committer(*old, watch, view.status, newArrivals(), true)
	c.build, c.samples = b, old.Samples
	r.beside(g, f, c)
	return c, nil
}

// noReader is for a generation that has everything.
type noReader struct{}

func (noReader) Read(context.Context, Range) (Documents, error) { return Documents{Done: true}, nil }
func (noReader) Due() time.Time                                 { return time.Time{} }
func (noReader) Report(Progress)                                {}

// estimate is how many documents there are about.
func (r *Runner) estimate(ctx context.Context) (total int64) {
	for _, c := range r.plan.collections {
		if n, err := r.source.db.Collection(c.name).EstimatedDocumentCount(ctx); err == nil {
			total += n
		}
	}
	return total
}

// change makes a generation that has caught up the live one.
func (r *Runner) change(ctx context.Context, g *generations, c *committer) error {
	from, to := c.build.live, c.stored
	to.Rebuild, to.Since = nil, time.Now().UTC().Truncate(time.Millisecond)
	fault.Global.Reach(fault.SwitchBegin)
	var now Checkpoint
	err := c.insist(ctx, func(ctx context.Context) error {
		refused := r.store.change(ctx, from, to)
		if refused != nil && c.classify(refused) != Transient && !errors.Is(refused, ErrFenced) {
			return refused
		}
		var err error
		if now, err = r.store.load(ctx, to.Generation); err != nil || now.Phase == Live {
			return err
		}
		return refused // it has not happened
	})
	if err != nil {
		return err
	}
	if !now.ownedAs(to) {
		return c.superseded(now) // whoever has taken over has made the switch
	}
	fault.Global.Reach(fault.SwitchDone)
	g.live, g.building = now, nil
	g.others = deleteGeneration(g.others, now.Generation)
	if from.Sequence == 0 {
		return nil
	}
	var retired Checkpoint
	err = c.insist(ctx, func(ctx context.Context) (err error) {
		retired, err = r.store.load(ctx, from.Generation)
		return err
	})
	if err != nil {
		// The switch has happened, whatever this is: who has asked for it must not hear that
		// it has not, and ask again.
		r.requests.done(nil)
		return err
	}
	g.others = append(g.others, retired)
	return nil
}

func deleteGeneration(list []Checkpoint, generation int64) (rest []Checkpoint) {
	for _, c := range list {
		if c.Generation != generation {
			rest = append(rest, c)
		}
	}
	return rest
}

// Rebuild has the model rebuilt, and returns when the new one is live, or with the error
// that the rebuild was given up for; the old model is then as before. If a rebuild is
// under way already, for whatever cause, it waits for that one, unless that has caught up
// with the source, so that its model may show already. The rebuild goes on when ctx ends.
// With an error that ends Run it may have happened, or go on with the next start. It must
// not be called by a Reconciler, which the rebuild itself waits for.
func (r *Runner) Rebuild(ctx context.Context) error { return r.requests.wait(ctx, false) }

// Rollback goes back to the generation of the model that the last rebuild has replaced:
// it is caught up from where it stood, and then becomes the live one. A generation is kept
// for Options.KeepRetired. With another error than a *RebuildError it may have happened:
// compare Status().Checkpoint.Generation, once the State is Running, before asking again,
// which would undo it.
func (r *Runner) Rollback(ctx context.Context) error { return r.requests.wait(ctx, true) }

// requests are what callers of Rebuild and Rollback wait for: one at a time.
type requests struct {
	mu     sync.Mutex
	ended  error // Run has ended with it, and not begun again
	now    *request
	last   *request      // of a job that has caught up, and is about to be done
	queued chan *request // holds now, until the runner takes it
}

type request struct {
	rollback bool
	also     *request // of an earlier attempt at the same job, nil: none
	done     chan struct{}
	err      error
}

func (q *requests) queue() chan *request {
	if q.queued == nil {
		q.queued = make(chan *request, 1)
	}
	return q.queued
}

func (q *requests) wanted() <-chan *request {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.queue()
}

func (q *requests) wait(ctx context.Context, rollback bool) error {
	q.mu.Lock()
	now := q.now
	if now == nil && q.ended != nil {
		defer q.mu.Unlock()
		return q.ended
	}
	if now == nil {
		now = &request{rollback: rollback, done: make(chan struct{})}
		q.now = now
		q.queue() <- now
	}
	q.mu.Unlock()
	if now.rollback != rollback {
		return errOneAtATime
	}
	select {
	case <-now.done:
		return now.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// begin notes that a job has begun, whoever wanted it. A request of the other kind, which
// has come meanwhile, fails.
func (q *requests) begin(rollback bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-q.queue():
	default:
	}
	if q.now != nil && q.now.rollback != rollback {
		finish(&q.now, errOneAtATime)
	}
	if q.now == nil {
		q.now = &request{rollback: rollback, done: make(chan struct{})}
	}
	if q.last != nil { // the job that was about to be done has to start over
		q.now.also, q.last = q.last, nil
	}
}

// ending notes that the job under way has caught up: who asks from here on, having heard of
// its model, say, gets one that begins after that.
func (q *requests) ending() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.last, q.now = q.now, nil
}

var errOneAtATime = errors.New("tidemark: a rebuild and a rollback can't go on at once; try again when the one under way has ended")

// run notes that Run begins, or ends with an error.
func (q *requests) run(ended error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended = ended; ended != nil {
		finish(&q.last, ended)
		q.finishNow(ended)
	}
}

// interrupted notes that Run goes on from what the sink holds. A request stays only where no
// job had to do with it: one from after a job had caught up would be given that very job,
// which may go on from where it was.
func (q *requests) interrupted(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.last != nil || len(q.queue()) == 0 {
		finish(&q.last, err)
		q.finishNow(err)
	}
}

// done tells those who wait how the job has ended.
func (q *requests) done(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.last != nil {
		finish(&q.last, err)
	} else {
		q.finishNow(err)
	}
}

func (q *requests) finishNow(err error) {
	select {
	case <-q.queue():
	default:
	}
	finish(&q.now, err)
}

func finish(which **request, err error) {
	for r := *which; r != nil; r = r.also {
		r.err = err
		close(r.done)
	}
	*which = nil
}
