package projector

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Runner keeps one projection up to date. Make it with New.
type Runner struct {
	plan     *plan
	source   *source
	store    store
	options  Options
	status   *status
	arrivals *arrivals
	running  atomic.Bool
	requests requests
	rebuilt  atomic.Pointer[rebuilding] // the rebuild under way; nil: none
}

// New ties a projection to its source and its sink. It connects to neither: what can be
// wrong with the projection and the options by themselves is found here, and all of it
// at once, as a ConfigError; what needs the servers is found by Run.
func New[Tx any](db *mongo.Database, sink Sink[Tx], p Projection[Tx], o Options) (*Runner, error) {
	var bindings []Binding[Tx]
	for _, b := range p.Bindings {
		bindings = append(append(bindings, b), b.more...)
	}
	p.Bindings = bindings
	plan, faults := newPlan(db, p)
	o, more := o.withDefaults()
	faults = append(faults, more...)
	if p.NoRebuild && o.Start.from == "" {
		faults = append(faults, errors.New("the projection declares NoRebuild, so it can't begin with a rebuild either: set Options.Start"))
	}
	if any(sink) == nil {
		faults = append(faults, errors.New("the sink is nil"))
	}
	if len(faults) > 0 {
		return nil, &ConfigError{Projection: p.Name, Faults: faults}
	}
	return &Runner{
		plan: plan, options: o,
		source:   &source{db: db, plan: plan, silence: o.SilenceTimeout},
		store:    &bound[Tx]{sink: sink, projection: p, plan: plan},
		status:   &status{s: Status{Projection: p.Name, State: Idle}},
		arrivals: newArrivals(),
	}, nil
}

// Name is the projection's.
func (r *Runner) Name() string { return r.plan.projection }

// Status tells how the runner stands. It may be called at any time.
func (r *Runner) Status() Status {
	s := r.status.get()
	if b := r.rebuilt.Load(); b != nil {
		b.tell(&s)
	}
	return s
}

// Run follows the source until ctx is cancelled, which ends it with nil: it stops
// reading, lets the commit under way end for at most Options.StopTimeout, and leaves
// no goroutine behind. Passing failures of the source and the sink are retried for
// ever. Whatever else ends it is one of this package's error types. A Runner runs once
// at a time, and may run again.
func (r *Runner) Run(ctx context.Context) (err error) {
	if !r.running.CompareAndSwap(false, true) {
		return fmt.Errorf("tidemark: projection %q: Run is under way already", r.plan.projection)
	}
	defer r.running.Store(false)
	r.status.begin()
	r.arrivals.end(nil)
	r.requests.run(nil)
	err = r.run(ctx)
	r.rebuilt.Store(nil)
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		err = nil
	}
	r.status.end(err)
	ended := err
	if ended == nil {
		ended = fmt.Errorf("tidemark: projection %q: Run has ended", r.plan.projection)
	}
	r.arrivals.end(ended)
	r.requests.run(ended)
	return err
}

func (r *Runner) run(ctx context.Context) error {
	watch, err := r.connectSource(ctx)
	var config *ConfigError
	if errors.As(err, &config) && len(watch.Collections) > 0 {
		// A collection that was replaced while nothing ran may lack what it needs, too.
		var replaced *ReplacedError
		if live, lerr := r.store.load(ctx, 0); lerr == nil && live.Term > 0 && errors.As(r.check(live, watch), &replaced) {
			err = replaced
			if _, rebuilds := r.rebuilds(replaced); rebuilds {
				err = nil // the rebuild looks again, and can do without it
			}
		}
	}
	if err != nil {
		return err
	}
	for limit := r.options.ConnectTimeout; ; limit = forever {
		all, err := r.connectSink(ctx, limit)
		if err != nil {
			return err
		}
		err = r.keep(ctx, newGenerations(all), watch)
		var again *reopen
		var gone *CheckpointError
		switch {
		case errors.As(err, &again):
			r.options.Logger.Warn("the sink holds another checkpoint than the one committed last; starting again from it",
				"projection", r.plan.projection, "stored", again.stored.Position.String())
		case errors.As(err, &gone) && gone.Gone && r.options.Reconcile != nil && !r.plan.noRebuild:
			r.options.Logger.Warn("the sink has lost the model, which is filled anew", "projection", r.plan.projection, "error", err)
			r.options.Start = Start{} // it is no new projection
		default:
			return err
		}
		r.requests.interrupted(fmt.Errorf("tidemark: projection %q: interrupted, look what is live and ask again: %w", r.plan.projection, err))
	}
}

const forever = 100 * 365 * 24 * time.Hour

// connectSource makes the first contact and checks the source.
func (r *Runner) connectSource(ctx context.Context) (watch Watch, err error) {
	err = r.connect(ctx, "source", r.options.ConnectTimeout, func(ctx context.Context) error {
		watch, err = r.source.preflight(ctx, false)
		return err
	}, func(err error) error {
		var config *ConfigError
		switch {
		case errors.As(err, &config):
			return err
		case isUnauthorized(err):
			return &SourceError{Projection: r.plan.projection, Doing: "connect to the source; check user, password and authSource", Err: err}
		}
		return nil
	})
	return watch, err
}

// connectSink makes the first contact and takes the term.
func (r *Runner) connectSink(ctx context.Context, limit time.Duration) (all []Checkpoint, err error) {
	err = r.connect(ctx, "sink", limit, func(ctx context.Context) error {
		all, err = r.store.acquire(ctx, r.options.Owner)
		return err
	}, func(err error) error {
		switch {
		case isCheckpointError(err):
			return err
		case errors.Is(err, context.DeadlineExceeded), r.store.classify(err) == Transient:
			return nil
		}
		return &SinkError{Projection: r.plan.projection, Err: err}
	})
	return all, err
}

// connect tries until the limit; final turns an error that ends it at once into
// what the user is told, and gives nil for one worth another attempt.
func (r *Runner) connect(ctx context.Context, server string, limit time.Duration, try func(context.Context) error, final func(error) error) error {
	cctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var wait backoff
	for {
		tctx, done := context.WithTimeout(cctx, r.options.CommitTimeout)
		err := try(tctx)
		done()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if end := final(err); end != nil {
			return end
		}
		r.status.retrying(connecting+server, err)
		if cctx.Err() != nil || wait.wait(cctx) != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return &ConnectError{Projection: r.plan.projection, Server: server, After: limit, Err: err}
		}
	}
}

// check compares the stored checkpoint with this projection and its source.
func (r *Runner) check(stored Checkpoint, watch Watch) error {
	if stored.Sequence < 0 {
		return &CheckpointError{Projection: r.plan.projection, Err: fmt.Errorf("its sequence is %d", stored.Sequence)}
	}
	if stored.Sequence == 0 {
		return nil
	}
	if stored.Position.Token == nil && stored.Position.Time.IsZero() {
		return &CheckpointError{Projection: r.plan.projection, Err: errors.New("it has no position")}
	}
	if mismatch := r.plan.mismatches(stored, watch); mismatch != nil {
		return mismatch
	}
	uuids := map[string]bson.Binary{}
	for _, c := range watch.Collections {
		uuids[c.Name] = c.UUID
	}
	for _, was := range stored.Watch.Collections {
		if len(was.UUID.Data) > 0 && !was.UUID.Equal(uuids[was.Name]) {
			return &ReplacedError{
				Projection: r.plan.projection, Namespace: Namespace{watch.Database, was.Name},
				Event: "other collection", At: stored.Position,
			}
		}
	}
	return nil
}

// begin stores the first checkpoint of a projection, together with its empty model.
// The position is stored before a stream is opened at it: a stream just opened can
// already be past the first change still to come.
func (r *Runner) begin(ctx context.Context, c *committer) error {
	var at Position
	err := r.insist(ctx, c.status, &at, func() (err error) { at, err = r.start(ctx); return err })
	if err != nil {
		return err
	}
	return c.commit(ctx, nil, at, true, true)
}

// insist asks the source until it answers. At is the position that the question is
// about, nil: none.
func (r *Runner) insist(ctx context.Context, st *status, at *Position, ask func() error) error {
	var wait backoff
	for {
		err := ask()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var config *ConfigError
		if errors.As(err, &config) {
			return err
		}
		if end := r.source.terminal(ctx, err, *at); end != nil {
			return end
		}
		st.retrying(followingSource, err)
		if wait.wait(ctx) != nil {
			return ctx.Err()
		}
	}
}

// start is the position that Options.Start means, once it is known to be one that the
// source can begin at: a position that is stored is not chosen again.
func (r *Runner) start(ctx context.Context) (Position, error) {
	now, err := r.source.now(ctx)
	if err != nil {
		return Position{}, err
	}
	if at := (Position{Time: r.options.Start.at}); !at.Time.IsZero() {
		if at.Time.T > now.T {
			return at, &ConfigError{Projection: r.plan.projection, Faults: []error{
				fmt.Errorf("Options.Start is FromTime(%s), which is to come: the source is at %s", timeText(at.Time), timeText(now)),
			}}
		}
		return at, r.source.reaches(ctx, at)
	}
	// Now is the time of the last change made; everything after it is still to come.
	return Position{Time: bson.Timestamp{T: now.T, I: now.I + 1}}, r.checkEmpty(ctx, now)
}

// checkEmpty looks for documents that a start from now leaves out. A Rollup can't do
// without them: their next change would take off what was never added.
func (r *Runner) checkEmpty(ctx context.Context, now bson.Timestamp) error {
	sess, err := r.source.db.Client().StartSession(options.Session().SetSnapshot(true).SetSnapshotTime(now))
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, sess)
	var faults []error
	for _, c := range r.plan.collections {
		err := r.source.db.Collection(c.name).FindOne(ctx, bson.D{}).Err()
		if errors.Is(err, mongo.ErrNoDocuments) {
			continue
		}
		if err != nil {
			return err
		}
		for _, b := range c.bindings {
			switch form := r.plan.bindings[b].form; form {
			case FormRollup:
				faults = append(faults, fmt.Errorf("%s (%s): the collection has documents, which FromNow would leave out, and their next change would be subtracted from sums that they were never added to; "+
					"begin with FromTime at a time before they were written, if the oplog still has it, or on an empty collection", r.plan.bindings[b].name, c.name))
			case FormMirror, FormUpsert:
				r.options.Logger.Warn("the collection has documents that this model leaves out until they change, as Options.Start is FromNow",
					"projection", r.plan.projection, "collection", c.name, "binding", r.plan.bindings[b].name)
			}
		}
	}
	if len(faults) > 0 {
		return &ConfigError{Projection: r.plan.projection, Faults: faults}
	}
	return nil
}

// follow runs the stages until one of them ends: reader, decoders, commit.
func (r *Runner) follow(ctx context.Context, c *committer) error {
	ctx, cancel := context.WithCancel(ctx)
	c.stream = newStream(r.source, c.decoder, c.status, c.awaited, r.options.Logger, r.options.BufferBytes)
	c.stream.brief = c.build != nil // which asks whether the stream has passed a time
	var stages sync.WaitGroup
	at := c.stored.Position
	stages.Go(func() { c.stream.run(ctx, at) })
	for range decoders() {
		stages.Go(c.stream.decodeAll)
	}
	err := c.run(ctx)
	cancel()
	stages.Wait()
	return err
}
