package sinktest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/tidemark-go/tidemark/projector"
)

func placeChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"first-commit/two-at-a-time", nil, firstTogether[Tx]},
		{"first-commit/many-projections-at-a-time", nil, firstOfMany[Tx]},
		{"first-commit/again-after-a-failure", nil, firstAgain[Tx]},
		{"first-commit/after-a-trial", transactional, firstTried[Tx]},
		{"model/check", nil, modelCheck[Tx]},
		{"model/create-keeps-what-is-there", nil, modelCreateTwice[Tx]},
		{"model/clear", nil, modelClear[Tx]},
	}
}

// firstTogether: of two first commits under one term, one happens.
func firstTogether[Tx any](e *env[Tx]) {
	a := e.acquire(projection)
	b := &owner[Tx]{env: e, sink: e.Sink(e.T), stored: a.stored}
	owners := []*owner[Tx]{a, b}
	writes := []apply[Tx]{all(e.create(), e.effect("a")), all(e.create(), e.effect("b"))}
	results := make([]error, len(owners))
	var wg sync.WaitGroup
	for i, o := range owners {
		wg.Go(func() {
			_, results[i] = retried(e, o.sink, func() (struct{}, error) { return struct{}{}, o.commit(e.ctx, writes[i]) })
		})
	}
	wg.Wait()
	var winner *owner[Tx]
	var names []string
	for i, err := range results {
		if err != nil {
			e.wantFenced("one of two first commits", err)
			continue
		}
		winner, names = owners[i], append(names, []string{"a", "b"}[i])
	}
	if len(names) != 1 {
		e.Fatalf("of two first commits at a time %d have succeeded: %v", len(names), errors.Join(results...))
	}
	winner.leftNothing("after two first commits at a time", names...)
	winner.mustCommit(e.effect("second"))
	winner.leftNothing("after the second commit", append(names, "second")...)
}

// firstOfMany: projections that begin at the same moment, on an empty store, don't
// stand in each other's way.
func firstOfMany[Tx any](e *env[Tx]) {
	const n = 4
	owners := make([]*owner[Tx], n)
	writes := make([]apply[Tx], n)
	for i := range owners {
		owners[i] = &owner[Tx]{env: e, sink: e.Sink(e.T)}
		writes[i] = all(e.create(), e.effect(fmt.Sprint("of ", i)))
	}
	var wg sync.WaitGroup
	for i, o := range owners {
		wg.Go(func() {
			var err error
			o.stored, err = retried(e, o.sink, func() (projector.Checkpoint, error) {
				return acquireLive(e.ctx, o.sink, fmt.Sprintf("sinktest_%d", i), "owner")
			})
			if err == nil {
				_, err = retried(e, o.sink, func() (struct{}, error) { return struct{}{}, o.commit(e.ctx, writes[i]) })
			}
			if err != nil {
				e.Errorf("one of %d projections that begin at a time: %v", n, err)
			}
		})
	}
	wg.Wait()
	for i, o := range owners {
		if o.stored.Sequence > 0 {
			o.leftNothing("after it began beside others", fmt.Sprint("of ", i))
		}
	}
}

// firstAgain: a first commit that fails leaves nothing that would stop the next.
func firstAgain[Tx any](e *env[Tx]) {
	o := e.acquire(projection)
	cause := errors.New("the cause")
	failing := func(context.Context, Tx) error { return cause }
	for range 2 {
		if err := o.commit(e.ctx, e.create(), e.effect("of a first commit that failed"), e.send, failing); !errors.Is(err, cause) {
			e.Errorf("a first commit whose apply fails gives %v, want its error", err)
		}
		o.stands("after a first commit that failed")
	}
	for _, r := range e.Refused {
		if err := o.commit(e.ctx, e.create(), r.Write); err == nil {
			e.Errorf("%s was committed", e.refusal(r))
		}
	}
	o.stands("after first commits that failed")
	o.mustCommit(e.create(), e.effect("first"))
	o.leftNothing("after the first commit", "first")
}

func firstTried[Tx any](e *env[Tx]) {
	o := e.acquire(projection)
	if err := o.sink.Try(e.ctx, o.stored, all(e.create(), e.effect("tried"))); err != nil {
		e.Errorf("a trial of the first commit: %v", err)
	}
	o.stands("after a trial of the first commit")
	o.mustCommit(e.create(), e.effect("first"))
	o.leftNothing("after the first commit", "first")
}

// modelCheck: targets refuse forms that their rows are not made for.
func modelCheck[Tx any](e *env[Tx]) {
	forms := []projector.Form{projector.FormRollup, projector.FormUpsert, projector.FormMirror}
	targets := map[string]bool{}
	check := func(wanted bool, m projector.Model[Tx], fit projector.Form) {
		if !wanted {
			return
		}
		if targets[m.Target()] || m.Target() == "" {
			e.Errorf("two targets, or one without a name, are called %q", m.Target())
		}
		targets[m.Target()] = true
		for _, form := range forms {
			err := m.Check(form)
			if form == fit && err != nil {
				e.Errorf("target %s does not fit a %s: %v", m.Target(), form, err)
			}
			if form != fit && err == nil {
				e.Errorf("target %s is made for a %s, and does not refuse a %s", m.Target(), fit, form)
			}
		}
	}
	check(true, e.Documents.Target, projector.FormMirror)
	check(e.features.Adds, e.Counts.Target, projector.FormRollup)
	check(e.features.DecimalSums, e.Amounts.Target, projector.FormRollup)
	check(e.features.Keys, e.Entries.Target, projector.FormUpsert)
	check(e.features.Keys, e.Keys.Target, projector.FormUpsert)
	check(e.features.Values, e.Values.Target, projector.FormMirror)
}

func modelCreateTwice[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	o.mustCommit(e.create(), e.effect("beside Create"))
	o.mustCommit(e.create())
	o.leftNothing("after Create", "before", "beside Create")
}

func modelClear[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("one"), e.effect("two"))
	if e.features.Transactions {
		cause := errors.New("the cause")
		if err := o.commit(e.ctx, e.clear(), e.send, func(context.Context, Tx) error { return cause }); err == nil {
			e.Errorf("an error of apply was lost")
		}
		o.leftNothing("after a Clear that was rolled back", "one", "two")
	}
	o.mustCommit(e.clear())
	if rest := e.effects(o.place()); len(rest) > 0 {
		e.Errorf("after Clear these effects show:\n%s", lines(rest))
	}
	o.mustCommit(e.clear(), e.effect("three"))
	o.leftNothing("after Clear and a write", "three")
}
