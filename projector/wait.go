package projector

import (
	"context"
	"errors"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Written runs write and returns the operation time of what it wrote, to be given to
// WaitFor. The write's calls must use the context that they are given. Only what a
// majority has acknowledged is sure to reach the model: use write concern majority, which
// is the server's default.
func Written(ctx context.Context, db *mongo.Database, write func(context.Context) error) (bson.Timestamp, error) {
	sess, err := db.Client().StartSession()
	if err != nil {
		return bson.Timestamp{}, err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	if err := write(mongo.NewSessionContext(ctx, sess)); err != nil {
		return bson.Timestamp{}, err
	}
	t := sess.OperationTime()
	if t == nil {
		return bson.Timestamp{}, errors.New("tidemark: write did not use the context that it was given, so its time is not known")
	}
	return *t, nil
}

// WaitFor returns once everything that happened in the source up to t is in the model,
// whether it concerned the model or not. It waits for a Runner that has not begun yet;
// once Run has ended it gives Run's error. A context with a deadline bounds it. A failure
// to ask the source, as where a connection breaks, is given as it is: call it again.
//
// The source is asked for the token that its stream would have at t. Tokens order like
// bytes; that order serves only to tell readiness, here.
func (r *Runner) WaitFor(ctx context.Context, t bson.Timestamp) error {
	// A position later than t has all of t, whatever follows at its own time.
	// A model that is being filled in its own place holds nothing yet that can be waited for.
	later := func(c Checkpoint) bool { return c.Sequence > 0 && c.Rebuild == nil && c.Position.Time.After(t) }
	if later(r.arrivals.stored()) {
		return r.store.refreshReaders(ctx)
	}
	probe, err := r.source.probeToken(ctx, t)
	if err != nil {
		return err
	}
	token, _ := probe.Lookup("_data").StringValueOK()
	err = r.arrivals.wait(ctx, func(c Checkpoint) bool {
		reached, _ := c.Position.Token.Lookup("_data").StringValueOK()
		return later(c) || c.Settled && c.Rebuild == nil && reached != "" && reached >= token
	})
	if err != nil {
		return err
	}
	return r.store.refreshReaders(ctx)
}

// arrivals lets callers wait for a checkpoint. While anyone waits, commits are made to
// be settled, and a quiet stream's position is stored at once.
type arrivals struct {
	mu      sync.Mutex
	last    Checkpoint
	ended   error         // Run has ended
	changed chan struct{} // closed and replaced with every change
	waiting int
}

func newArrivals() *arrivals { return &arrivals{changed: make(chan struct{})} }

func (a *arrivals) stored() Checkpoint {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

func (a *arrivals) committed(c Checkpoint) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = c
	a.tell()
}

// end makes those who wait give up; nil: Run begins.
func (a *arrivals) end(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = err
	a.tell()
}

func (a *arrivals) tell() {
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *arrivals) awaited() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.waiting > 0
}

func (a *arrivals) wait(ctx context.Context, enough func(Checkpoint) bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting++
	defer func() { a.waiting-- }()
	for !enough(a.last) {
		if a.ended != nil {
			return a.ended
		}
		changed := a.changed
		a.mu.Unlock()
		select {
		case <-changed:
			a.mu.Lock()
		case <-ctx.Done():
			a.mu.Lock()
			return ctx.Err()
		}
	}
	return nil
}
