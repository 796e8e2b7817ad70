package sinktest

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tidemark-go/tidemark/projector"
)

func generationChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"generations/begin", nil, generationsBegin[Tx]},
		{"generations/commit-beside", nil, generationsBeside[Tx]},
		{"generations/acquire", nil, generationsAcquire[Tx]},
		{"generations/changed-during-acquire", nil, generationsRace[Tx]},
		{"generations/malformed", nil, generationsMalformed[Tx]},
		{"generations/discard", nil, generationsDiscard[Tx]},
	}
}

// another begins a generation beside the live one that o has, for an instance of its own.
func (o *owner[Tx]) another(generation int64) *owner[Tx] {
	o.Helper()
	sink := o.Sink(o.T)
	cp, err := sink.Begin(o.ctx, o.stored, generation)
	o.must("Begin", err)
	return &owner[Tx]{o.env, sink, cp}
}

// build is another, with the empty model and these writes committed.
func (o *owner[Tx]) build(generation int64, writes ...apply[Tx]) *owner[Tx] {
	o.Helper()
	n := o.another(generation)
	n.mustCommit(append([]apply[Tx]{o.create()}, writes...)...)
	return n
}

// generationsBegin: what is added, and that nothing else changes.
func generationsBegin[Tx any](e *env[Tx]) {
	behind := e.begin()
	o := &owner[Tx]{e, behind.sink, behind.stored}
	o.mustCommit(e.effect("live"))
	n := o.another(2)
	cp := n.stored
	if cp.Projection != projection || cp.Generation != 2 || cp.Sequence != 0 || cp.Term != o.stored.Term || cp.Owner != o.stored.Owner || cp.Phase != projector.Building {
		e.Errorf("Begin gives %q, generation %d, sequence %d, term %d of %q, %s; want %q, 2, 0, %d of %q, building",
			cp.Projection, cp.Generation, cp.Sequence, cp.Term, cp.Owner, cp.Phase, projection, o.stored.Term, o.stored.Owner)
	}
	if cp.Position.Token != nil || !cp.Position.Time.IsZero() {
		e.Errorf("a new generation has the position %s, want none", cp.Position)
	}
	if cp.Place == o.place() {
		e.Errorf("a new generation has the place of the live one, %q", cp.Place)
	}
	n.stands("after Begin")
	e.wantOwner("after Begin", n.stored)
	e.wantEffects("in a new generation", n.place())
	again := func(after string) {
		e.Helper()
		got, err := o.sink.Begin(e.ctx, o.stored, 2)
		e.must("Begin of a generation that is there", err)
		e.wantCheckpoint("returned by another Begin "+after, got, n.stored)
		n.stands("after another Begin " + after)
	}
	again("at once")
	n.mustCommit(e.create(), e.effect("new"))
	again("after a commit")
	e.wantEffects("after another Begin", n.place(), "new")
	// The live model goes on while a rebuild begins: its sequence does not matter.
	third := behind.another(3)
	if third.place() == n.place() || third.place() == o.place() {
		e.Errorf("two of three generations have one place: %q, %q, %q", o.place(), n.place(), third.place())
	}
	other := e.acquire("sinktest_other").another(2)
	if other.place() == n.place() {
		e.Errorf("generations of two projections have one place, %q", n.place())
	}
	o.beginFenced("under a term that nobody has taken", func(c *projector.Checkpoint) { c.Term++ })
	o.beginFenced("of another owner", func(c *projector.Checkpoint) { c.Owner = "another" })
	next := e.begin()
	o.beginFenced("under an earlier term", func(*projector.Checkpoint) {})
	next.leftNothing("after all that", "live")
	if e.loadGeneration(projection, 4).Term != 0 {
		e.Errorf("a Begin that was fenced has added its generation")
	}
}

// beginFenced begins generation 4, and 2, which is there, from a live checkpoint that is
// not the stored one.
func (o *owner[Tx]) beginFenced(how string, differs func(*projector.Checkpoint)) {
	o.Helper()
	wrong := o.stored
	differs(&wrong)
	for _, generation := range []int64{4, 2} {
		_, err := o.sink.Begin(o.ctx, wrong, generation)
		o.wantFenced(fmt.Sprintf("Begin of generation %d %s", generation, how), err)
	}
}

func (e *env[Tx]) wantOwner(after string, want projector.Checkpoint) {
	e.Helper()
	if got := e.loadGeneration(want.Projection, want.Generation); got.Term != want.Term || got.Owner != want.Owner {
		e.Errorf("%s generation %d has term %d of %q, want %d of %q", after, want.Generation, got.Term, got.Owner, want.Term, want.Owner)
	}
}

// generationsBeside: the commits of two generations at a time, with rows of their own.
func generationsBeside[Tx any](e *env[Tx]) {
	o := e.begin()
	n := o.another(2)
	// One that is in the middle of a commit keeps no other from its own, nor from its first.
	for round, pair := range [][2]*owner[Tx]{{o, n}, {n, o}, {o, n}} {
		holds, goes := pair[0], pair[1]
		open := holds.open(e.effect(fmt.Sprint("held ", round)))
		if !open.holds(e) {
			return
		}
		var writes []apply[Tx]
		if goes.stored.Sequence == 0 {
			writes = append(writes, e.create())
		}
		_, back := e.promptly("a commit beside another generation's", e.patience, func() error {
			goes.mustCommitBeside(all(append(writes, e.effect(fmt.Sprint("beside ", round)))...))
			return nil
		})
		e.must("the other generation's commit", open.resume())
		holds.stored = following(holds.stored)
		if !back {
			return
		}
	}
	names := map[*owner[Tx]][]string{o: {"held 0", "beside 1", "held 2"}, n: {"beside 0", "held 1", "beside 2"}}
	var wg sync.WaitGroup
	for g, own := range names {
		first := len(own)
		for k := range e.rounds/4 + 2 {
			names[g] = append(names[g], fmt.Sprintf("commit %d of generation %d", k, g.stored.Generation))
		}
		writes := names[g][first:]
		wg.Go(func() {
			for _, name := range writes {
				g.mustCommitBeside(e.effect(name))
			}
		})
	}
	wg.Wait()
	for g, own := range names {
		e.must("a trial", g.sink.Try(e.ctx, g.stored, e.effect("tried")))
		e.must("load beside", func() error { _, err := g.sink.Load(e.ctx, projection, g.stored.Generation); return err }())
		g.stands(fmt.Sprintf("of generation %d, after commits of two at a time,", g.stored.Generation))
		e.wantEffects(fmt.Sprintf("in generation %d, after commits of two at a time,", g.stored.Generation), g.place(), own...)
	}
	o.mustCommit(e.clear())
	e.wantEffects("after the other generation was cleared", n.place(), names[n]...)
}

// generationsAcquire: a takeover is one of all generations.
func generationsAcquire[Tx any](e *env[Tx]) {
	old := e.begin()
	old.mustCommit(e.effect("live"))
	tenth, second, third := old.build(10, e.effect("tenth")), old.build(2, e.effect("second")), old.another(3)
	all := []*owner[Tx]{old, second, third, tenth}
	var opens []*open
	for _, o := range []*owner[Tx]{second, tenth} {
		p := o.open(e.effect("late"))
		opens = append(opens, p)
		if !p.holds(e) {
			return
		}
	}
	sink := e.Sink(e.T)
	var taken []projector.Checkpoint
	err, back := e.promptly("Acquire, while an earlier owner is in the middle of commits,", e.patience, func() (err error) {
		taken, err = retried(e, sink, func() ([]projector.Checkpoint, error) { return sink.Acquire(e.ctx, projection, "new owner") })
		return err
	})
	for i, p := range opens {
		if perr := p.resume(); back && err == nil {
			if perr == nil {
				e.Errorf("the commit of a superseded owner has succeeded")
			}
			e.wantInterrupted("the commit of a superseded owner", []*owner[Tx]{second, tenth}[i].sink, perr)
		}
	}
	if !back {
		return
	}
	e.must("Acquire", err)
	news := make([]*owner[Tx], len(all))
	for i := range all {
		if len(taken) != len(all) || taken[i].Generation != all[i].stored.Generation {
			e.Fatalf("Acquire gives the generations %d, want 1, 2, 3 and 10 in that order", numbers(taken))
		}
		want := all[i].stored
		want.Term, want.Owner = taken[0].Term, "new owner"
		e.wantCheckpoint("returned by Acquire", taken[i], want)
		if want.Term != old.stored.Term+1 || taken[i].Owner != want.Owner {
			e.Errorf("generation %d has term %d of %q after Acquire, want %d of %q", want.Generation, taken[i].Term, taken[i].Owner, old.stored.Term+1, want.Owner)
		}
		news[i] = &owner[Tx]{e, sink, want}
		news[i].stands("after Acquire")
		e.wantOwner("after Acquire", want)
	}
	stand := func(after string) {
		e.Helper()
		for i, names := range [][]string{{"live"}, {"second"}, nil, {"tenth"}} {
			news[i].leftNothing(fmt.Sprintf("%s in generation %d", after, news[i].stored.Generation), names...)
		}
	}
	stand("after Acquire")
	for _, o := range all {
		e.wantFenced(fmt.Sprintf("the superseded owner's commit of generation %d", o.stored.Generation), o.commit(e.ctx, e.effect("of the superseded owner")))
		if o != old {
			e.wantFenced(fmt.Sprintf("the superseded owner's Discard of generation %d", o.stored.Generation), o.sink.Discard(e.ctx, o.stored))
		}
	}
	old.beginFenced("by the superseded owner", func(*projector.Checkpoint) {})
	e.wantFenced("the superseded owner's Switch", old.sink.Switch(e.ctx, old.stored, second.stored))
	stand("after the superseded owner's attempts")
	for i, o := range news {
		if i == 2 {
			o.mustCommit(e.create())
		}
		o.mustCommit(e.effect("of the new owner"))
		o.stands("after the new owner's commit")
	}
	e.wantEffects("after the new owner's commit", news[2].place(), "of the new owner")
}

func numbers(all []projector.Checkpoint) []int64 {
	generations := make([]int64, len(all))
	for i, cp := range all {
		generations[i] = cp.Generation
	}
	return generations
}

// generationsRace: what an earlier owner does to the generations while Acquire runs has
// happened before it, and then Acquire knows of it and has its term, or never does.
func generationsRace[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("live"))
	limit := o.typical()
	var spare *owner[Tx] // the generation that is not live
	last := int64(1)
	for round := range 3 * max(2, e.rounds/6) {
		var what string
		var change func() error
		switch {
		case spare == nil:
			last++
			what, change = "Begin", func() error { _, err := o.sink.Begin(e.ctx, o.stored, last); return err }
		case spare.stored.Phase == projector.Building:
			if spare.stored.Sequence == 0 {
				spare.mustCommit(e.create())
			}
			what, change = "Switch", func() error { return o.sink.Switch(e.ctx, o.stored, spare.stored) }
		default:
			what, change = "Discard", func() error { return o.sink.Discard(e.ctx, spare.stored) }
		}
		next := e.Sink(e.T)
		pause := e.random(limit)
		var taken []projector.Checkpoint
		var err, aerr error
		var wg sync.WaitGroup
		wg.Go(func() { err = change() })
		wg.Go(func() {
			wait(e.ctx, pause)
			taken, aerr = retried(e, next, func() ([]projector.Checkpoint, error) {
				return next.Acquire(e.ctx, projection, fmt.Sprint("owner ", round))
			})
		})
		wg.Wait()
		e.must("Acquire beside "+what, aerr)
		e.wantInterrupted(what+" beside Acquire", o.sink, err)
		live, rest := e.wantTaken(fmt.Sprintf("after Acquire beside %s (%v)", what, err), taken, last)
		if live == nil || len(rest) > 1 {
			e.Fatalf("after Acquire beside %s there are the generations %d, want one that is live and at most one more", what, numbers(taken))
		}
		o, spare = &owner[Tx]{e, next, *live}, nil
		if len(rest) > 0 {
			spare = &owner[Tx]{e, next, rest[0]}
		}
	}
}

// wantTaken checks that what Acquire gave is what is stored, and tells the live generation
// from the rest. Numbers go up to last.
func (e *env[Tx]) wantTaken(after string, taken []projector.Checkpoint, last int64) (live *projector.Checkpoint, rest []projector.Checkpoint) {
	e.Helper()
	for g := int64(1); g <= last; g++ {
		i := slices.IndexFunc(taken, func(cp projector.Checkpoint) bool { return cp.Generation == g })
		if i < 0 {
			if cp := e.loadGeneration(projection, g); cp.Term != 0 {
				e.Errorf("%s generation %d is stored with term %d, and Acquire did not give it", after, g, cp.Term)
			}
			continue
		}
		e.wantCheckpoint(after, e.loadGeneration(projection, g), taken[i])
		e.wantOwner(after, taken[i])
		if taken[i].Phase == projector.Live {
			live = &taken[i]
		} else {
			rest = append(rest, taken[i])
		}
	}
	return live, rest
}

// generationsMalformed: a checkpoint that can't be read keeps the terms of all as they are.
func generationsMalformed[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("live"))
	n := o.build(2, e.effect("new"))
	good, err := e.Checkpoint(e.ctx, projection, 2)
	e.must("read the stored bytes", err)
	for _, body := range []string{"position 17", `{"format":{"$numberInt":"99"}}`} {
		e.must("write the stored bytes", e.SetCheckpoint(e.ctx, projection, 2, []byte(body)))
		_, err = e.Sink(e.T).Acquire(e.ctx, projection, "refused")
		e.wantUnreadable("Acquire with a generation whose checkpoint is "+body, err)
		_, err = e.Sink(e.T).Load(e.ctx, projection, 2)
		e.wantUnreadable("Load of a generation whose checkpoint is "+body, err)
		o.stands("after an Acquire that was refused for another generation")
		e.wantOwner("after an Acquire that was refused for another generation", o.stored)
		o.mustCommit(e.create()) // the other generation can go on
	}
	stored, err := e.Checkpoint(e.ctx, projection, 2)
	e.must("read the stored bytes", err)
	if string(stored) != `{"format":{"$numberInt":"99"}}` {
		e.Errorf("a checkpoint that can't be read was written over, with %s", stored)
	}
	e.must("write the stored bytes", e.SetCheckpoint(e.ctx, projection, 2, good))
	e.wantOwner("after its checkpoint was restored", n.stored)
	n.mustCommit(e.effect("after"))
	n.leftNothing("after its checkpoint was restored", "new", "after")
}

func (e *env[Tx]) wantUnreadable(what string, err error) {
	e.Helper()
	var malformed *projector.CheckpointError
	var format *projector.FormatError
	if !errors.As(err, &malformed) && !errors.As(err, &format) {
		e.Errorf("%s: want a CheckpointError or a FormatError, got: %v", what, err)
	}
}

// generationsDiscard: a generation goes as a whole, and no other with it.
func generationsDiscard[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("live"))
	second, third, fourth := o.build(2, e.effect("second")), o.build(3, e.effect("third")), o.another(4)
	stale := second.stored
	second.mustCommit(e.effect("also second"))
	stand := func(after string) {
		e.Helper()
		o.leftNothing(after, "live")
		third.leftNothing(after, "third")
	}
	// What is live is not a matter of what the caller thinks.
	building := o.stored
	building.Phase = projector.Building
	for what, live := range map[string]projector.Checkpoint{"the live generation": o.stored, "the live generation, taken for another,": building} {
		if err := o.sink.Discard(e.ctx, live); err == nil {
			e.Errorf("Discard of %s was no error", what)
		} else if o.sink.Classify(err) == projector.Transient {
			e.Errorf("Discard of %s is Transient, but it does not pass: %v", what, err)
		}
		stand("after Discard of " + what)
	}
	for what, wrong := range map[string]func(*projector.Checkpoint){
		"of another owner":                   func(c *projector.Checkpoint) { c.Owner = "another" },
		"under a term that nobody has taken": func(c *projector.Checkpoint) { c.Term++ },
		"under an earlier term":              func(c *projector.Checkpoint) { c.Term-- },
	} {
		cp := second.stored
		wrong(&cp)
		e.wantFenced("Discard "+what, o.sink.Discard(e.ctx, cp))
		second.leftNothing("after a fenced Discard", "second", "also second")
	}
	e.must("Discard, with an earlier sequence,", o.sink.Discard(e.ctx, stale))
	e.must("Discard of a generation without a commit", o.sink.Discard(e.ctx, fourth.stored))
	for _, gone := range []*owner[Tx]{second, fourth} {
		if cp := e.loadGeneration(projection, gone.stored.Generation); cp.Term != 0 {
			e.Errorf("after its Discard generation %d has term %d, want 0", cp.Generation, cp.Term)
		}
		if rows := e.documents(gone.place()); len(rows) > 0 {
			e.Errorf("after its Discard generation %d has the rows\n%s", gone.stored.Generation, lines(rows))
		}
		e.must("another Discard", o.sink.Discard(e.ctx, gone.stored))
		e.wantFenced("a commit of a discarded generation", gone.commit(e.ctx, e.effect("late")))
		if rows := e.documents(gone.place()); len(rows) > 0 {
			e.Errorf("after a late commit the discarded generation %d has the rows\n%s", gone.stored.Generation, lines(rows))
		}
	}
	never := second.stored
	never.Generation = 7
	e.must("Discard of a generation that never was", o.sink.Discard(e.ctx, never))
	stand("after Discard of others")
	// The number is free again, and what was under it is gone.
	again := o.another(2)
	if again.stored.Sequence != 0 {
		e.Errorf("a generation that was discarded and begun again has sequence %d, want 0", again.stored.Sequence)
	}
	e.wantEffects("in a generation that was discarded and begun again", again.place())
	again.mustCommit(e.create(), e.effect("second once more"))
	if got := e.effects(again.place()); !slices.Equal(got, []string{"second once more"}) {
		e.Errorf("in a generation that was discarded and begun again these effects show:\n%s", lines(got))
	}
	taken, err := e.Sink(e.T).Acquire(e.ctx, projection, "next")
	e.must("Acquire", err)
	if got := numbers(taken); !slices.Equal(got, []int64{1, 2, 3}) {
		e.Errorf("Acquire gives the generations %d, want 1, 2 and 3", got)
	}
}
