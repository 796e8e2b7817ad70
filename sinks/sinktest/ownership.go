package sinktest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

func ownershipChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"acquire/unknown-projection", nil, acquireUnknown[Tx]},
		{"acquire/raises-only-the-term", nil, acquireRaises[Tx]},
		{"acquire/two-at-a-time", nil, acquireTogether[Tx]},
		{"load/reads-only", nil, loadReadsOnly[Tx]},
		{"load/waits-for-a-commit", loadWaits, loadWaitsForCommit[Tx]},
		{"owners/concurrent", nil, concurrentOwners[Tx]},
	}
}

func acquireUnknown[Tx any](e *env[Tx]) {
	cp, err := acquireLive(e.ctx, e.Sink(e.T), projection, "somebody")
	e.must("Acquire of an unknown projection", err)
	if cp.Term != 1 || cp.Sequence != 0 || cp.Owner != "somebody" {
		e.Errorf("a new checkpoint has term %d, sequence %d, owner %q, want 1, 0, somebody", cp.Term, cp.Sequence, cp.Owner)
	}
	if cp.Position.Token != nil || !cp.Position.Time.IsZero() {
		e.Errorf("a new checkpoint has the position %s, want none", cp.Position)
	}
	body, err := cp.Encode()
	e.must("encode it", err)
	if _, err := projector.DecodeCheckpoint(projection, body); err != nil {
		e.Errorf("a new checkpoint is not valid: %v", err)
	}
	if cp.Phase != projector.Live {
		e.Errorf("a new checkpoint has phase %q, want live", cp.Phase)
	}
	e.wantCheckpoint("after Acquire", e.load(projection), cp)
	e.wantEffects("after Acquire", cp.Place)
}

func acquireRaises[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("kept"))
	for _, name := range []string{"second", "third"} {
		cp, err := acquireLive(e.ctx, e.Sink(e.T), projection, name)
		e.must("Acquire", err)
		o.stored.Term++
		e.wantCheckpoint("returned by Acquire", cp, o.stored)
		if stored := e.load(projection); cp.Owner != name || stored.Owner != name {
			e.Errorf("the owner is %q, and %q by Load, want %q", cp.Owner, stored.Owner, name)
		}
		o.stands("after Acquire")
	}
	o.wantEffects("after Acquire", o.place(), "kept")
}

// acquireTogether: the terms that are taken at one moment are all different, for an
// empty store too.
func acquireTogether[Tx any](e *env[Tx]) {
	const n = 6
	sinks := make([]projector.Sink[Tx], n)
	for i := range sinks {
		sinks[i] = e.Sink(e.T)
	}
	for round := range int64(3) {
		terms := make([]int64, n)
		var wg sync.WaitGroup
		for i, sink := range sinks {
			wg.Go(func() {
				cp, err := retried(e, sink, func() (projector.Checkpoint, error) { return acquireLive(e.ctx, sink, projection, fmt.Sprint(i)) })
				if err != nil {
					e.Errorf("one of %d Acquires at a time: %v", n, err)
				}
				terms[i] = cp.Term
			})
		}
		wg.Wait()
		slices.Sort(terms)
		for i, term := range terms {
			if term != round*n+int64(i)+1 {
				e.Fatalf("%d Acquires at a time have taken the terms %d, want each of the next once", n, terms)
			}
		}
	}
}

// retried is how the runner calls a method: again, where the error is transient.
func retried[Tx, V any](e *env[Tx], sink projector.Sink[Tx], f func() (V, error)) (V, error) {
	for attempt := 0; ; attempt++ {
		v, err := f()
		if err == nil || attempt == 20 || e.ctx.Err() != nil || sink.Classify(err) != projector.Transient {
			return v, err
		}
		select { // on a busy machine the others need a moment
		case <-time.After(time.Duration(attempt+1) * 5 * time.Millisecond):
		case <-e.ctx.Done():
		}
	}
}

func loadReadsOnly[Tx any](e *env[Tx]) {
	sink := e.Sink(e.T)
	if cp, err := sink.Load(e.ctx, projection, 1); err != nil || cp.Term != 0 || cp.Sequence != 0 {
		e.Errorf("Load of an unknown projection gives term %d, sequence %d, want term 0 and no error: %v", cp.Term, cp.Sequence, err)
	}
	o := e.begin()
	if o.stored.Term != 1 {
		e.Errorf("the first Acquire after a Load has term %d, want 1", o.stored.Term)
	}
	o.mustCommit(e.effect("one"))
	for range 3 {
		o.stands("after Load")
	}
	o.mustCommit(e.effect("two"))
	o.stands("after another commit")
	if cp := e.loadGeneration(projection, 2); cp.Term != 0 {
		e.Errorf("Load of an unknown generation gives term %d, want 0", cp.Term)
	}
}

// loadWaitsForCommit: what Load has read is the last word on a commit that was under way.
func loadWaitsForCommit[Tx any](e *env[Tx]) {
	o := e.begin()
	reader := e.Sink(e.T)
	for round := range 3 {
		name := fmt.Sprint("round ", round)
		before := o.stored
		open := o.open(e.effect(name))
		if !open.holds(e) {
			return
		}
		loaded := make(chan error, 1)
		var cp projector.Checkpoint
		go func() {
			var err error
			cp, err = reader.Load(e.ctx, projection, 1)
			loaded <- err
		}()
		wait(e.ctx, e.random(e.patience/20))
		err := open.resume()
		e.must("Load", <-loaded)
		switch {
		case err == nil && cp.Sequence == before.Sequence:
			e.Errorf("Load gave sequence %d, and then a commit under way has made it %d all the same", cp.Sequence, o.stored.Sequence+1)
		case err != nil && cp.Sequence != before.Sequence:
			e.Errorf("Load gave sequence %d, but the commit under way has failed: %v", cp.Sequence, err)
		}
		o.stored = e.load(projection)
	}
}

// open is a commit whose handler has written and does not return.
type open struct {
	held   chan struct{}
	thaw   chan struct{}
	result chan error
	err    error
	ended  bool
}

// open begins a commit, on a goroutine, and keeps it in its handler until resume.
func (o *owner[Tx]) open(applies ...apply[Tx]) *open {
	p := &open{held: make(chan struct{}), thaw: make(chan struct{}), result: make(chan error, 1)}
	stay := func(ctx context.Context, _ Tx) error {
		close(p.held)
		select {
		case <-p.thaw:
		case <-ctx.Done():
		}
		return nil
	}
	prev, next := o.stored, following(o.stored)
	go func() {
		p.result <- o.sink.Commit(o.ctx, prev, next, all(append(applies, o.send, stay)...))
	}()
	return p
}

// holds waits until the handler has written.
func (p *open) holds(t T) bool {
	t.Helper()
	select {
	case <-p.held:
		return true
	case p.err = <-p.result:
		p.ended = true
		t.Errorf("a commit was over before its handler was: %v", p.err)
		return false
	}
}

// resume lets the handler return, and gives the commit's result.
func (p *open) resume() error {
	if !p.ended {
		close(p.thaw)
		p.err = <-p.result
		p.ended = true
	}
	return p.err
}

// concurrentOwners take the term from each other and are cut off at random moments.
// Each sequence number is one commit and one effect; every commit that was reported
// shows, and none that shows was reported as refused.
func concurrentOwners[Tx any](e *env[Tx]) {
	o := e.begin()
	l := &ledger{wanted: 2 * e.rounds}
	typical := o.typical()
	base := o.stored.Sequence
	var wg sync.WaitGroup
	for n := range 4 {
		c := &contender[Tx]{
			env: e, sink: e.Sink(e.T), ledger: l, name: fmt.Sprint("owner ", n), typical: typical,
			rng: rand.New(rand.NewPCG(e.rng.Uint64(), 0)), //nolint:gosec // to be repeatable
		}
		wg.Go(c.run)
	}
	wg.Wait()
	cp := e.load(projection)
	shown := e.effects(cp.Place)
	l.compare(e, shown)
	if got, want := int64(len(shown)), cp.Sequence-base; e.features.Transactions && got != want {
		e.Errorf("%d effects show, but the sequence has grown by %d", got, want)
	}
}

// ledger is what the commits of all owners have reported.
type ledger struct {
	wanted int // so many commits are enough

	mu           sync.Mutex
	attempts     int
	done, unsure []string
}

// enough counts an attempt, and says whether it is one too many.
func (l *ledger) enough() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempts++
	return len(l.done) >= l.wanted || l.attempts > 10*l.wanted
}

func (l *ledger) add(list *[]string, name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*list = append(*list, name)
}

func (l *ledger) compare(t T, shown []string) {
	t.Helper()
	t.Logf("%d commits, and %d whose outcome was unknown", len(l.done), len(l.unsure))
	for _, name := range l.done {
		if !slices.Contains(shown, name) {
			t.Errorf("the commit of %q was reported as done, and its effect does not show", name)
		}
	}
	for _, name := range shown {
		if !slices.Contains(l.done, name) && !slices.Contains(l.unsure, name) {
			t.Errorf("the effect %q shows, though its commit was fenced or refused", name)
		}
	}
}

// contender is one of several owners.
type contender[Tx any] struct {
	*env[Tx]
	sink    projector.Sink[Tx]
	ledger  *ledger
	name    string
	typical time.Duration // of a commit
	rng     *rand.Rand
	commits int
}

// run takes the term, commits until somebody else has taken it, and lets others have
// it for a while.
func (c *contender[Tx]) run() {
	for c.ctx.Err() == nil {
		cp, err := retried(c.env, c.sink, func() (projector.Checkpoint, error) { return acquireLive(c.ctx, c.sink, projection, c.name) })
		if err != nil {
			c.Errorf("Acquire: %v", err)
			return
		}
		for mine := true; mine; {
			if c.ledger.enough() {
				return
			}
			mine = c.commit(&cp)
		}
		wait(c.ctx, c.random(8*c.typical))
	}
}

func (c *contender[Tx]) random(limit time.Duration) time.Duration {
	return time.Duration(c.rng.Int64N(int64(limit) + 1))
}

// commit says whether the owner may go on from cp.
func (c *contender[Tx]) commit(cp *projector.Checkpoint) bool {
	c.commits++
	name := fmt.Sprintf("%s, commit %d", c.name, c.commits)
	next := following(*cp)
	limit := c.patience
	if c.rng.IntN(4) == 0 {
		limit = c.random(4 * c.typical)
	}
	ctx, cancel := context.WithTimeout(c.ctx, limit)
	defer cancel()
	pause := func(ctx context.Context, _ Tx) error { // so that commits overlap
		wait(ctx, c.random(c.typical))
		return nil
	}
	err := c.sink.Commit(ctx, *cp, next, all(c.effect(name), c.send, pause))
	switch {
	case err == nil:
		c.ledger.add(&c.ledger.done, name)
		*cp = next
		return true
	case errors.Is(err, projector.ErrFenced):
		if !c.features.Transactions {
			c.ledger.add(&c.ledger.unsure, name)
		}
		return false
	}
	c.ledger.add(&c.ledger.unsure, name)
	c.wantInterrupted("a commit among several owners", c.sink, err)
	stored, err := retried(c.env, c.sink, func() (projector.Checkpoint, error) { return c.sink.Load(c.ctx, projection, 1) })
	if err != nil {
		c.Errorf("Load: %v", err)
		return false
	}
	if stored.Term == cp.Term && stored.Sequence > next.Sequence {
		c.Errorf("somebody has committed sequence %d under term %d, which is not theirs", stored.Sequence, cp.Term)
	}
	*cp = stored
	return stored.Term == next.Term
}
