package sinktest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

func unknownChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"unknown/cancelled-commit", nil, unknownOutcome[Tx]},
		{"cancel/every-method", nil, cancelEvery[Tx]},
		{"cancel/while-waiting", nil, cancelWaiting[Tx]},
	}
}

// unknownOutcome cancels commits at random moments, and then does as the runner does:
// Load decides whether it has happened; if not, it is tried again under the same
// sequence. Whatever the moment, the effect is there exactly when the sequence is.
func unknownOutcome[Tx any](e *env[Tx]) {
	o := e.begin()
	limit := o.typical() * 3 / 2
	var names []string
	retries := 0
	for round := range e.rounds {
		name := fmt.Sprint("round ", round)
		write := e.effect(name)
		next := following(o.stored)
		for attempt := 0; ; attempt++ {
			if attempt == 20 {
				e.Fatalf("commit %q does not happen", name)
			}
			// A cancelled call may have cost the connection, and the next takes longer.
			if o.attempt(next, write, limit*time.Duration(attempt+1)) {
				break
			}
			retries++
			if e.features.LoadWaits || !e.features.Transactions {
				e.wantEffects("after a Load that showed that the commit has not happened", o.place(), names...)
			}
		}
		names = append(names, name)
		e.wantEffects("after the commit", o.place(), names...)
	}
	// A commit that was given up for good may be late, but must not show any more.
	wait(e.ctx, 2*limit+20*time.Millisecond)
	o.leftNothing("in the end", names...)
	e.Logf("%d commits were tried again", retries)
}

// typical is how long a commit takes.
func (o *owner[Tx]) typical() time.Duration {
	var longest time.Duration
	for i := range 5 {
		begin := time.Now()
		o.mustCommit(o.putDocument("warm-up", o.version.Add(1), &Document{Name: "warm-up"}))
		if d := time.Since(begin); i > 2 && d > longest {
			longest = d
		}
	}
	o.mustCommit(o.putDocument("warm-up", o.version.Add(1), nil))
	return longest
}

// attempt makes one attempt to commit, which is cut off, and says whether it is in.
func (o *owner[Tx]) attempt(next projector.Checkpoint, write apply[Tx], limit time.Duration) bool {
	o.Helper()
	ctx, cancel := o.ending(o.random(limit))
	defer cancel()
	err, back := o.promptly("a commit that was cancelled", limit+o.patience, func() error {
		return o.sink.Commit(ctx, o.stored, next, all(write, o.send))
	})
	if !back {
		o.Fatalf("the sink can't be used any more")
	}
	if err != nil && !errors.Is(err, projector.ErrFenced) {
		o.wantInterrupted("a cancelled commit", o.sink, err)
	}
	stored, lerr := retried(o.env, o.sink, func() (projector.Checkpoint, error) { return o.sink.Load(o.ctx, projection, 1) })
	o.must("Load after a cancelled commit", lerr)
	switch {
	case stored.Sequence == next.Sequence:
		o.wantCheckpoint("after a cancelled commit", stored, next)
		o.stored = next
		return true
	case err == nil:
		o.Fatalf("a commit has succeeded, and then Load gives sequence %d instead of %d", stored.Sequence, next.Sequence)
	case stored.Sequence != o.stored.Sequence:
		o.Fatalf("after the commit of sequence %d Load gives %d", next.Sequence, stored.Sequence)
	}
	return false
}

// cancelEvery ends the context of every method at random moments, and before it begins.
func cancelEvery[Tx any](e *env[Tx]) {
	o := e.begin()
	limit := o.typical()
	methods := map[string]func(context.Context) error{
		"Acquire": func(ctx context.Context) error {
			_, err := acquireLive(ctx, o.sink, projection, "again")
			return err
		},
		"Load": func(ctx context.Context) error {
			_, err := o.sink.Load(ctx, projection, 1)
			return err
		},
		"Commit": func(ctx context.Context) error {
			return o.sink.Commit(ctx, o.stored, following(o.stored), e.effect("cancelled"))
		},
		"Try": func(ctx context.Context) error {
			return o.sink.Try(ctx, o.stored, e.effect("tried"))
		},
		"Begin": func(ctx context.Context) error {
			_, err := o.sink.Begin(ctx, o.stored, 2)
			return err
		},
		"Discard": func(ctx context.Context) error {
			second := o.stored
			second.Generation, second.Phase = 2, projector.Building
			return o.sink.Discard(ctx, second)
		},
	}
	for round := range max(1, e.rounds/4) {
		for name, call := range methods {
			moment := e.random(limit)
			if round == 0 {
				moment = 0
			}
			ctx, cancel := e.ending(moment)
			err, back := e.promptly(name+", whose context has ended,", limit+e.patience, func() error { return call(ctx) })
			cancel()
			if !back {
				return
			}
			e.wantInterrupted(name+", whose context has ended", o.sink, err)
		}
	}
	o.stored = e.load(projection)
	if o.stored.Phase != projector.Live {
		e.Errorf("after cancelled calls the generation that nobody has switched is %s", o.stored.Phase)
	}
	e.usable("after cancelled calls", o.sink)
}

// usable checks that the instance can take over and commit.
func (e *env[Tx]) usable(after string, sink projector.Sink[Tx]) {
	e.Helper()
	_, back := e.promptly("a takeover and a commit "+after, 2*e.patience, func() error {
		o := &owner[Tx]{env: e, sink: sink}
		var err error
		o.stored, err = retried(e, o.sink, func() (projector.Checkpoint, error) { return acquireLive(e.ctx, o.sink, projection, "last") })
		if err == nil {
			err = o.commit(e.ctx, e.putDocument("usable", e.version.Add(1), &Document{Name: "usable"}))
		}
		if err != nil {
			e.Errorf("a takeover and a commit %s: %v", after, err)
		}
		return err
	})
	if back {
		rows := e.documents(e.load(projection).Place)
		for _, r := range rows {
			if r == documentText("usable", 0) {
				return
			}
		}
		e.Errorf("%s the effect of a commit does not show", after)
	}
}

// cancelWaiting ends the context of methods that wait for another's commit.
func cancelWaiting[Tx any](e *env[Tx]) {
	o := e.begin()
	e.load(projection)
	for name, call := range map[string]func(context.Context, projector.Sink[Tx]) error{
		"Acquire": func(ctx context.Context, s projector.Sink[Tx]) error {
			_, err := acquireLive(ctx, s, projection, "impatient")
			return err
		},
		"Load": func(ctx context.Context, s projector.Sink[Tx]) error {
			_, err := s.Load(ctx, projection, 1)
			return err
		},
		"Commit": func(ctx context.Context, s projector.Sink[Tx]) error {
			return s.Commit(ctx, o.stored, following(o.stored), e.effect("second"))
		},
	} {
		o.stored = e.begin().stored
		open := o.open(e.effect("open during " + name))
		if !open.holds(e) {
			return
		}
		beside := e.Sink(e.T)
		short := e.patience / 20
		ctx, cancel := context.WithTimeout(e.ctx, short)
		err, back := e.promptly(name+", whose context has ended while it waits,", short+e.patience/2, func() error { return call(ctx, beside) })
		cancel()
		if back {
			e.wantInterrupted(name+", whose context has ended while it waits", beside, err)
		}
		if err := open.resume(); err != nil {
			e.wantInterrupted("the commit that it has waited for", o.sink, err)
		}
	}
	e.usable("after cancelled waits", o.sink)
}
