package redis

import (
	"context"
	"strconv"
	"sync"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/projector"
)

// Projection, Bindings and Binding are the projector's, with this sink's transaction
// filled in.
type (
	Projection = projector.Projection[*Tx]
	Bindings   = []projector.Binding[*Tx]
	Binding    = projector.Binding[*Tx]
)

// Sink keeps read models in Redis. It is safe for use by several projections and
// goroutines.
type Sink struct {
	client      goredis.UniversalClient
	volatile    bool
	trustServer bool
	suspect     sync.Map // projections whose server may be another one now: a connection broke, say
}

// Option changes how a Sink works.
type Option func(*Sink)

// AllowVolatile accepts a server that writes nothing to disk. After its restart every
// model is gone, and is built again.
func AllowVolatile() Option { return func(s *Sink) { s.volatile = true } }

// TrustServer leaves out the checks of the server's version, eviction and persistence,
// for servers where neither INFO nor CONFIG GET is allowed. What they would have found is
// then the caller's to see to.
func TrustServer() Option { return func(s *Sink) { s.trustServer = true } }

// New makes a sink on a client, which stays the caller's to configure and to close: a
// single server's, a Sentinel's or a cluster's (all keys of a projection are in one hash
// slot), and never one that may ask a replica, as a cluster's does with ReadOnly,
// RouteByLatency or RouteRandomly: Acquire refuses that. It should have
// ContextTimeoutEnabled, or a time limit is noticed only after the ReadTimeout.
func New(client goredis.UniversalClient, opts ...Option) *Sink {
	s := &Sink{client: client}
	for _, o := range opts {
		o(s)
	}
	return s
}

var _ projector.Sink[*Tx] = (*Sink)(nil)

// Acquire implements projector.Sink. It checks the server first, see the package's
// documentation, and a sample of the rows at last. Rows that are missing are no error of
// Acquire, which a rebuild needs as well, but of every Commit: a [DamagedError].
func (s *Sink) Acquire(ctx context.Context, projection, owner string) ([]projector.Checkpoint, error) {
	if err := s.checkClient(); err != nil {
		return nil, err
	}
	if err := s.checkServer(ctx, projection); err != nil {
		return nil, err
	}
	doing := "take the term of projection " + strconv.Quote(projection)
	taken, err := s.take(ctx, projection, owner)
	if err != nil {
		return nil, failed(doing, err)
	}
	checkpoints := make([]projector.Checkpoint, len(taken))
	for i, d := range taken {
		checkpoints[i] = d.checkpoint
		if d.checkpoint.Phase == projector.Retired {
			continue // Switch looks at it
		}
		gone, err := s.sample(ctx, d)
		if err != nil {
			return nil, failed("look for lost rows of projection "+strconv.Quote(projection), err)
		}
		if gone != "" {
			_ = s.damage(ctx, d.checkpoint, gone)
		}
	}
	return checkpoints, nil
}

// Load implements projector.Sink. It is for the owner: a commit under way fails by it, and
// is tried again. Who only wants to look reads the key {projection}:checkpoint:generation.
// After a transient error, such as a connection that broke, it checks the server as Acquire
// does: a failover may have put another one in its place.
func (s *Sink) Load(ctx context.Context, projection string, generation int64) (projector.Checkpoint, error) {
	if _, broke := s.suspect.LoadAndDelete(projection); broke {
		if err := s.checkServer(ctx, projection); err != nil {
			s.suspect.Store(projection, true)
			return projector.Checkpoint{}, err
		}
	}
	d, err := s.load(ctx, projection, generation)
	if err != nil {
		return projector.Checkpoint{}, s.noted(fresh(projection, max(1, generation), projector.Live),
			failed("read the checkpoint of projection "+strconv.Quote(projection), err))
	}
	return d.checkpoint, nil
}

// Commit implements projector.Sink.
func (s *Sink) Commit(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	return s.transact(ctx, prev, next, apply, true)
}

// Try implements projector.Sink. It does all that Commit does before it sends the
// transaction: what the server would refuse then, for want of memory, say, is no matter of
// the batch.
func (s *Sink) Try(ctx context.Context, prev projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	next := prev
	next.Sequence++
	return s.transact(ctx, prev, next, apply, false)
}

// Begin implements projector.Sink.
func (s *Sink) Begin(ctx context.Context, live projector.Checkpoint, generation int64) (projector.Checkpoint, error) {
	cp, err := s.begin(ctx, live, generation)
	if err != nil {
		return projector.Checkpoint{}, failed("begin a generation of projection "+strconv.Quote(live.Projection), err)
	}
	return cp, nil
}

// Switch implements projector.Sink. Readers that ask by the pointer, as [Hash.Get] and
// [Read] do, see the new generation from then on; the old one stays until Discard. Of the
// new one a sample of the rows is looked for before, and where some are gone the error is a
// [DamagedError].
func (s *Sink) Switch(ctx context.Context, from, to projector.Checkpoint) error {
	if err := s.switchTo(ctx, from, to); err != nil {
		return failed("switch projection "+strconv.Quote(from.Projection), err)
	}
	return nil
}

// Discard implements projector.Sink. It removes a thousand keys at a time.
func (s *Sink) Discard(ctx context.Context, c projector.Checkpoint) error {
	if err := s.discard(ctx, c); err != nil {
		return failed("discard a generation of projection "+strconv.Quote(c.Projection), err)
	}
	return nil
}
