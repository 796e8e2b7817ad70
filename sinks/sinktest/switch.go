package sinktest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

func switchChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"generations/switch", nil, switchThereAndBack[Tx]},
		{"generations/switch-fenced", nil, switchFenced[Tx]},
		{"generations/switch-first", nil, switchFirst[Tx]},
		{"generations/switch-readers", nil, switchReaders[Tx]},
		{"generations/switch-unknown", nil, switchUnknown[Tx]},
		{"generations/switch-and-discard", nil, switchDiscard[Tx]},
	}
}

// live is what a reader of the model sees now: the names of the effects.
func (e *env[Tx]) live() []string {
	e.Helper()
	place, err := e.Live(e.ctx, projection)
	e.must("resolve the live place", err)
	return e.effects(place)
}

func (e *env[Tx]) wantLive(after string, names ...string) {
	e.Helper()
	got, want := e.live(), slices.Sorted(slices.Values(names))
	if !slices.Equal(got, want) {
		e.Errorf("%s a reader of the live model sees these effects:\n%s\nwant\n%s", after, lines(got), lines(want))
	}
}

// finished is what the core makes of the checkpoint of a generation that is to be live:
// the rebuild is over.
func finished(cp projector.Checkpoint) projector.Checkpoint {
	cp.Rebuild = nil
	cp.CommittedAt = time.Now().UTC().Truncate(time.Millisecond).Add(time.Second)
	return cp
}

// rebuilt commits a checkpoint of a rebuild, as the last one before a switch.
func (o *owner[Tx]) rebuilt() {
	o.Helper()
	next := following(o.stored)
	next.Rebuild = &projector.Rebuild{Mode: projector.Shadow, Began: next.CommittedAt, Cause: "a check"}
	o.must("Commit", o.sink.Commit(o.ctx, o.stored, next, all[Tx]()))
	o.stored = next
}

// mustSwitch makes to the live generation instead of o's, and takes over what is stored.
func (o *owner[Tx]) mustSwitch(to *owner[Tx]) {
	o.Helper()
	given := finished(to.stored)
	o.must("Switch", o.Sink(o.T).Switch(o.ctx, o.stored, given))
	o.switched(to, given)
}

// switched checks what a switch has stored.
func (o *owner[Tx]) switched(to *owner[Tx], given projector.Checkpoint) {
	o.Helper()
	want := func(g *owner[Tx], cp projector.Checkpoint, phase projector.Phase) {
		o.Helper()
		got := o.loadGeneration(projection, cp.Generation)
		cp.Sequence++
		cp.Phase, cp.Place = phase, got.Place
		o.wantCheckpoint(fmt.Sprintf("after the switch, of generation %d,", cp.Generation), got, cp)
		g.stored = cp
		o.wantOwner("after the switch", cp)
	}
	want(o, o.stored, projector.Retired)
	want(to, given, projector.Live)
	if live := o.loadGeneration(projection, 0); live.Generation != given.Generation {
		o.Errorf("after the switch Load of generation 0 gives generation %d, want the live one, %d", live.Generation, given.Generation)
	}
	if o.place() == to.place() {
		o.Errorf("after the switch both generations have the place %q", o.place())
	}
}

func switchThereAndBack[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("old"))
	n := o.build(2, e.effect("new"))
	n.rebuilt()
	e.wantLive("before the switch", "old")
	old, fresh := []string{"old"}, []string{"new"}
	show := func(after string, live []string) {
		e.Helper()
		e.wantLive(after, live...)
		o.leftNothing(after+" in generation 1", old...)
		n.leftNothing(after+" in generation 2", fresh...)
	}
	goOn := func(after string, live *[]string) {
		e.Helper()
		for i := range 2 {
			old, fresh = append(old, fmt.Sprintf("old, %d %s", i, after)), append(fresh, fmt.Sprintf("new, %d %s", i, after))
			o.mustCommit(e.effect(old[len(old)-1]))
			n.mustCommit(e.effect(fresh[len(fresh)-1]))
		}
		show("after the commits "+after, *live)
	}
	o.mustSwitch(n)
	show("after the switch", fresh)
	goOn("after the switch", &fresh)
	n.mustSwitch(o)
	show("after the switch back", old)
	goOn("after the switch back", &old)
	o.mustSwitch(n)
	show("after the second switch", fresh)
	// A new owner finds it so.
	taken, err := e.Sink(e.T).Acquire(e.ctx, projection, "next")
	e.must("Acquire", err)
	if !slices.Equal(numbers(taken), []int64{1, 2}) {
		e.Fatalf("after the switch Acquire gives the generations %d, want 1 and 2", numbers(taken))
	}
	for i, g := range []*owner[Tx]{o, n} {
		g.stored.Term, g.stored.Owner = g.stored.Term+1, "next"
		e.wantCheckpoint("returned by Acquire after the switch", taken[i], g.stored)
	}
	goOn("of the next owner", &fresh)
	// The empty model can be made in the place that it has now, too.
	n.mustCommit(e.clear(), e.create())
	fresh = nil
	show("after the live model was cleared", fresh)
}

// switchFenced: the fence is that of both generations.
func switchFenced[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("old"))
	n := o.build(2, e.effect("new"))
	nothing := func(after string) {
		e.Helper()
		o.leftNothing(after, "old")
		n.leftNothing(after, "new")
		e.wantLive(after, "old")
	}
	for what, wrong := range map[string]func(c *projector.Checkpoint){
		"a term that nobody has taken": func(c *projector.Checkpoint) { c.Term++ },
		"an earlier term":              func(c *projector.Checkpoint) { c.Term-- },
		"another owner":                func(c *projector.Checkpoint) { c.Owner = "another" },
		"an earlier sequence":          func(c *projector.Checkpoint) { c.Sequence-- },
		"a later sequence":             func(c *projector.Checkpoint) { c.Sequence++ },
	} {
		from, to := o.stored, n.stored
		wrong(&from)
		e.wantFenced("a switch with "+what+" of the old generation", o.sink.Switch(e.ctx, from, n.stored))
		wrong(&to)
		e.wantFenced("a switch with "+what+" of the new generation", o.sink.Switch(e.ctx, o.stored, to))
		nothing("after a switch with " + what)
	}
	unknown := n.stored
	unknown.Generation = 7
	e.wantFenced("a switch to a generation that is not there", o.sink.Switch(e.ctx, o.stored, unknown))
	nothing("after a switch to a generation that is not there")
	from, to := o.stored, n.stored
	o.mustSwitch(n)
	e.wantFenced("the same switch once more", o.sink.Switch(e.ctx, from, to))
	e.wantLive("after the same switch once more", "new")
	e.wantFenced("a commit of the new generation, as it was before the switch", n.sink.Commit(e.ctx, to, following(to), e.effect("late")))
	e.wantFenced("a commit of the old generation, as it was before the switch", o.sink.Commit(e.ctx, from, following(from), e.effect("late")))
	o.stands("after commits from before the switch")
	n.stands("after commits from before the switch")
}

// switchFirst: the first load of a model is a rebuild of one that is not there.
func switchFirst[Tx any](e *env[Tx]) {
	o := e.acquire(projection)
	n := o.build(2, e.effect("new"))
	given := finished(n.stored)
	e.must("the first switch", o.sink.Switch(e.ctx, o.stored, given))
	if cp := e.load(projection); cp.Term != 0 {
		e.Errorf("after the first switch there is still generation 1, with term %d", cp.Term)
	}
	for _, name := range []string{"second", "third"} {
		taken, err := e.Sink(e.T).Acquire(e.ctx, projection, name)
		e.must("Acquire", err)
		if !slices.Equal(numbers(taken), []int64{2}) {
			e.Fatalf("after the first switch Acquire gives the generations %d, want 2 alone", numbers(taken))
		}
		n.stored = taken[0]
	}
	given.Term, given.Sequence, given.Phase, given.Place = n.stored.Term, given.Sequence+1, projector.Live, n.place()
	e.wantCheckpoint("after the first switch", n.stored, given)
	e.wantLive("after the first switch", "new")
	n.mustCommit(e.effect("later"))
	e.wantLive("after the commit that followed", "new", "later")
	n.leftNothing("after the commit that followed", "new", "later")
	// The next rebuild is one like any other.
	next := n.build(3, e.effect("newer"))
	n.mustSwitch(next)
	e.wantLive("after the second switch", "newer")
}

// switchReaders: a reader that looks all the time sees one generation or the other.
func switchReaders[Tx any](e *env[Tx]) {
	const n = 50
	o := e.begin()
	of := func(generation int64) (rows []documentRow, texts []string) {
		for i := range n {
			name := fmt.Sprintf("%03d of generation %d", i, generation)
			rows, texts = append(rows, e.document(name, generation)), append(texts, documentText(name, generation))
		}
		slices.Sort(texts)
		return rows, texts
	}
	rows, old := of(1)
	o.mustCommit(put(e.Documents, nil, rows))
	rows, fresh := of(2)
	other := o.build(2, put(e.Documents, nil, rows))
	ctx, stop := context.WithCancel(e.ctx)
	defer stop()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for seen := 0; ctx.Err() == nil; seen++ {
				got, err := e.liveDocuments(e.ctx)
				if err != nil {
					e.Errorf("a reader beside a switch: %v", err)
					return
				}
				if !slices.Equal(got, old) && !slices.Equal(got, fresh) {
					e.Errorf("a reader beside a switch sees %d rows, which are not those of one generation:\n%s", len(got), lines(got))
					return
				}
			}
		})
	}
	from, to := o, other
	for round := range e.rounds/4 + 2 {
		from.mustSwitch(to)
		from, to = to, from
		got, err := e.liveDocuments(e.ctx)
		e.must("read the live model", err)
		if want := [][]string{fresh, old}[round%2]; !slices.Equal(got, want) {
			e.Errorf("after switch %d a reader sees\n%s\nwant\n%s", round, lines(got), lines(want))
		}
		wait(e.ctx, e.random(2*time.Millisecond))
	}
	stop()
	wg.Wait()
}

// liveDocuments may be asked on any goroutine.
func (e *env[Tx]) liveDocuments(ctx context.Context) ([]string, error) {
	place, err := e.Live(ctx, projection)
	if err != nil {
		return nil, fmt.Errorf("resolve the live place: %w", err)
	}
	rows, err := e.Documents.Rows(ctx, place)
	texts := keptTexts(rows, true)
	slices.Sort(texts)
	return texts, err
}

// switchUnknown cuts switches off at random moments, and then does as the runner does:
// the phases that Load gives decide whether it has happened.
func switchUnknown[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("old"))
	n := o.build(2, e.effect("new"))
	begin := time.Now()
	o.mustSwitch(n)
	limit := time.Since(begin)
	e.wantLive("after a switch", "new")
	from, to, retries := n, o, 0
	for range max(4, e.rounds/2) {
		for attempt := 1; ; attempt++ {
			if attempt == 20 {
				e.Fatalf("the switch does not happen")
			}
			if from.attemptSwitch(to, limit*time.Duration(attempt)) {
				break
			}
			retries++
		}
		from, to = to, from
		e.wantLive("after a switch whose outcome was unknown", map[*owner[Tx]]string{o: "old", n: "new"}[from])
	}
	wait(e.ctx, 2*limit+20*time.Millisecond)
	from.stands("in the end")
	to.stands("in the end")
	from.mustCommit(e.effect("after"))
	to.mustCommit(e.effect("after"))
	e.wantLive("in the end", map[*owner[Tx]]string{o: "old", n: "new"}[from], "after")
	e.Logf("%d switches were tried again", retries)
}

// attemptSwitch makes one attempt, which is cut off, and says whether it has happened.
func (o *owner[Tx]) attemptSwitch(to *owner[Tx], limit time.Duration) bool {
	o.Helper()
	given := finished(to.stored)
	ctx, cancel := o.ending(o.random(limit))
	defer cancel()
	err, back := o.promptly("a switch that was cancelled", limit+o.patience, func() error { return o.sink.Switch(ctx, o.stored, given) })
	if !back {
		o.Fatalf("the sink can't be used any more")
	}
	if err != nil && !errors.Is(err, projector.ErrFenced) {
		o.wantInterrupted("a cancelled switch", o.sink, err)
	}
	// One that is late may happen between two Loads, but then they soon agree.
	var was, is projector.Checkpoint
	for begin := time.Now(); time.Since(begin) < o.patience; wait(o.ctx, 5*time.Millisecond) {
		is, was = o.reload(to), o.reload(o)
		switch {
		case is.Phase == projector.Live && was.Phase == projector.Retired:
			// Which of the attempts it was is no matter, but for the checkpoint that it had.
			given.CommittedAt = is.CommittedAt
			o.switched(to, given)
			return true
		case is.Phase == to.stored.Phase && was.Phase == projector.Live:
			if err == nil {
				o.Fatalf("a switch has succeeded, and then Load gives the phases %s and %s", was.Phase, is.Phase)
			}
			if is.Sequence != to.stored.Sequence || was.Sequence != o.stored.Sequence {
				o.Fatalf("after a switch that has not happened the sequences are %d and %d, they were %d and %d", was.Sequence, is.Sequence, o.stored.Sequence, to.stored.Sequence)
			}
			return false
		}
	}
	o.Fatalf("a switch that was cut off has left the phases %s and %s", was.Phase, is.Phase)
	return false
}

// reload is Load as the runner calls it.
func (o *owner[Tx]) reload(g *owner[Tx]) projector.Checkpoint {
	o.Helper()
	cp, err := retried(o.env, o.sink, func() (projector.Checkpoint, error) { return o.sink.Load(o.ctx, projection, g.stored.Generation) })
	o.must("Load", err)
	return cp
}

// switchDiscard: after a switch the retired generation goes, and the live one can't.
func switchDiscard[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("old"))
	n := o.build(2, e.effect("new"))
	before := n.stored
	o.mustSwitch(n)
	before.Sequence = n.stored.Sequence
	if err := n.sink.Discard(e.ctx, before); err == nil {
		e.Errorf("Discard of a generation that has become live was no error")
	}
	e.wantLive("after Discard of a generation that has become live", "new")
	e.must("Discard of the retired generation", n.sink.Discard(e.ctx, o.stored))
	if cp := e.load(projection); cp.Term != 0 {
		e.Errorf("after its Discard the retired generation has term %d, want 0", cp.Term)
	}
	if rows := e.documents(o.place()); len(rows) > 0 {
		e.Errorf("after its Discard the retired generation has the rows\n%s", lines(rows))
	}
	n.leftNothing("after Discard of the retired generation", "new")
	n.mustCommit(e.effect("later"))
	e.wantLive("after Discard of the retired generation", "new", "later")
	taken, err := e.Sink(e.T).Acquire(e.ctx, projection, "next")
	e.must("Acquire", err)
	if !slices.Equal(numbers(taken), []int64{2}) {
		e.Fatalf("after Discard of the retired generation Acquire gives the generations %d, want 2 alone", numbers(taken))
	}
	n.stored = taken[0]
	// A rebuild may take the number again.
	again := n.build(1, e.effect("newer"))
	n.mustSwitch(again)
	e.wantLive("after the switch to a generation whose number was used before", "newer")
}
