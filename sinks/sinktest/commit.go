package sinktest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

func commitChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"commit/success-leaves-both", nil, commitSucceeds[Tx]},
		{"commit/error-of-apply", nil, commitApplyFails[Tx]},
		{"commit/refused-write", nil, commitRefused[Tx]},
		{"commit/swallowed-refusal", nil, commitSwallowed[Tx]},
		{"commit/projections-apart", nil, commitApart[Tx]},
		{"commit/projections-on-one-instance", nil, commitOneInstance[Tx]},
		{"commit/large-batch", nil, commitLarge[Tx]},
		{"poison/class", nil, poisonClass[Tx]},
		{"poison/neighbours", nil, poisonNeighbours[Tx]},
		{"try/tells-and-writes-nothing", nil, tryTells[Tx]},
		{"try/fenced", nil, tryFenced[Tx]},
	}
}

func commitSucceeds[Tx any](e *env[Tx]) {
	o := e.begin()
	o.stands("after the first commit")
	var names []string
	for i := range 5 {
		names = append(names, fmt.Sprint("commit ", i))
		o.mustCommit(e.effect(names[i]))
		o.stands("after a commit")
		e.wantEffects("after a commit", o.place(), names...)
	}
	o.mustCommit() // an idle stream's position
	o.stands("after a commit without writes")
	e.wantEffects("after a commit without writes", o.place(), names...)
}

// applyError is a handler's error with details.
type applyError struct{ detail string }

func (e *applyError) Error() string { return e.detail }

func commitApplyFails[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	cause := errors.New("the cause")
	for name, write := range map[string]apply[Tx]{
		"before any write":     all[Tx](),
		"after a write":        e.effect("of an apply that failed"),
		"after a write is out": all(e.effect("of an apply that failed"), e.send),
	} {
		what := "an apply that failed " + name
		err := o.commit(e.ctx, write, func(context.Context, Tx) error {
			return fmt.Errorf("%w: %w", &applyError{"detail"}, cause)
		})
		var detail *applyError
		if !errors.Is(err, cause) || !errors.As(err, &detail) {
			e.Errorf("after %s errors.Is and errors.As don't find its error in: %v", what, err)
		}
		e.wantClass(what, o.sink, err, projector.Poison)
		o.leftNothing("after "+what, "before")
	}
	o.mustCommit(e.effect("after"))
	e.wantEffects("after the next commit", o.place(), "before", "after")
}

// leftNothing checks that only these effects show, and the checkpoint stands.
func (o *owner[Tx]) leftNothing(after string, names ...string) {
	o.Helper()
	o.stands(after)
	o.wantEffects(after, o.place(), names...)
}

func commitRefused[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	for _, r := range e.Refused {
		for _, apply := range []apply[Tx]{
			all(e.effect("beside a refused write"), r.Write),
			all(e.effect("beside a refused write"), e.send, r.Write, e.effect("behind a refused write")),
		} {
			if err := o.commit(e.ctx, apply); err == nil {
				e.Errorf("%s was committed", e.refusal(r))
			}
			o.leftNothing("after "+e.refusal(r), "before")
		}
	}
}

// commitSwallowed: a handler that takes no notice of an error commits what it has
// written besides, or nothing; never the checkpoint alone.
func commitSwallowed[Tx any](e *env[Tx]) {
	o := e.begin()
	var names []string
	for i, r := range e.Refused {
		name := fmt.Sprint("beside refused write ", i)
		swallow := func(ctx context.Context, tx Tx) error {
			_ = r.Write(ctx, tx)
			return nil
		}
		err := o.commit(e.ctx, e.effect(name), e.send, swallow)
		if err == nil {
			names = append(names, name)
		}
		o.leftNothing(fmt.Sprintf("after %s, whose error the handler swallowed (commit: %v),", e.refusal(r), err), names...)
	}
}

// commitApart: two projections on one store know nothing of each other.
func commitApart[Tx any](e *env[Tx]) {
	a, b := e.begin(), e.acquire("sinktest_other")
	b.mustCommit(e.create(), e.effect("of b"))
	if a.place() == b.place() {
		e.Errorf("two projections have one place, %q", a.place())
	}
	a.mustCommit(e.effect("of a"))
	// One that is in the middle of a commit keeps no other from its own.
	open := a.open(e.effect("also of a"))
	if open.holds(e) {
		_, _ = e.promptly("a commit beside another projection's", e.patience, func() error {
			b.mustCommitBeside(e.effect("also of b"))
			return nil
		})
		e.must("the other projection's commit", open.resume())
		a.stored = following(a.stored)
	}
	e.wantEffects("in the one place", a.place(), "of a", "also of a")
	e.wantEffects("in the other place", b.place(), "of b", "also of b")
	for _, o := range []*owner[Tx]{a, b} {
		if cp := e.load(o.stored.Projection); cp.Sequence != o.stored.Sequence || cp.Projection != o.stored.Projection {
			e.Errorf("projection %q has sequence %d of %q, want %d", o.stored.Projection, cp.Sequence, cp.Projection, o.stored.Sequence)
		}
	}
	b.mustCommit(e.clear())
	e.wantEffects("after the other was cleared", a.place(), "of a", "also of a")
}

// mustCommitBeside is mustCommit for another goroutine.
func (o *owner[Tx]) mustCommitBeside(a apply[Tx]) {
	if err := o.commit(o.ctx, a); err != nil {
		o.Errorf("Commit: %v", err)
	}
}

// commitOneInstance: several projections use one instance at the same time.
func commitOneInstance[Tx any](e *env[Tx]) {
	sink := e.Sink(e.T)
	const n = 4
	owners := make([]*owner[Tx], n)
	names := make([][]string, n)
	for i := range owners {
		cp, err := acquireLive(e.ctx, sink, fmt.Sprintf("sinktest_%d", i), "owner")
		e.must("Acquire", err)
		owners[i] = &owner[Tx]{e, sink, cp}
		owners[i].mustCommit(e.create())
		for k := range e.rounds/8 + 1 {
			names[i] = append(names[i], fmt.Sprintf("commit %d of %d", k, i))
		}
	}
	var wg sync.WaitGroup
	for i, o := range owners {
		wg.Go(func() {
			for _, name := range names[i] {
				o.mustCommitBeside(e.effect(name))
			}
		})
	}
	wg.Wait()
	for i, o := range owners {
		o.leftNothing("after commits of several projections on one instance", names[i]...)
	}
}

// commitLarge writes more rows than fit into one statement of most stores, and
// removes them; in between it has one that is refused behind all of them.
func commitLarge[Tx any](e *env[Tx]) {
	const n = 10_001 // the servers' and drivers' limits are round
	o := e.begin()
	rows, counts := make([]documentRow, n), make([]Count, n)
	want := make([]string, n)
	for i := range rows {
		name := fmt.Sprintf("document %d of a batch that is large enough", i)
		rows[i] = e.document(name, int64(i))
		counts[i] = Count{name, "s", 1, int64(i)}
		want[i] = documentText(name, int64(i))
	}
	write := put(e.Documents, nil, rows)
	if e.features.Transactions {
		if err := o.commit(e.ctx, write, e.Refused[len(e.Refused)-1].Write); err == nil {
			e.Errorf("%s was committed", e.refusal(e.Refused[len(e.Refused)-1]))
		}
		e.wantRows("after a large batch that was refused", e.documents(o.place()), nil)
	}
	o.mustCommit(write)
	e.wantRows("after a large batch", e.documents(o.place()), want)
	if e.features.Adds {
		o.mustCommit(e.add(nil, counts))
		e.wantRows("after a large batch", e.counts(o.place()), summed(counts))
		o.mustCommit(e.add(counts, nil))
		e.wantRows("after all of it was taken off", e.counts(o.place()), nil)
	}
	for i := range rows {
		rows[i].Row, rows[i].Version = nil, e.version.Add(1)
	}
	o.mustCommit(put(e.Documents, rows, nil))
	e.wantRows("after all of it was removed", e.documents(o.place()), nil)
}

func poisonClass[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	for _, r := range e.Refused {
		e.wantClass("a commit with "+e.refusal(r), o.sink, o.commit(e.ctx, r.Write), projector.Poison)
		o.triesRefused("a trial of "+e.refusal(r), r.Write)
		wrapped := func(ctx context.Context, tx Tx) error {
			if err := r.Write(ctx, tx); err != nil {
				return fmt.Errorf("a handler's words: %w", err)
			}
			return nil
		}
		e.wantClass("a handler that wraps the error of "+e.refusal(r), o.sink, o.commit(e.ctx, wrapped), projector.Poison)
	}
	e.wantClass("a handler's own error", o.sink, errors.New("it can't be"), projector.Poison)
	o.leftNothing("in the end", "before")
}

// poisonNeighbours: a refused batch does no harm to what is there, nor to what follows.
func poisonNeighbours[Tx any](e *env[Tx]) {
	o, other := e.begin(), e.acquire("sinktest_other")
	other.mustCommit(e.create(), e.effect("of the other"))
	names := []string{"before"}
	o.mustCommit(e.effect("before"))
	for i, r := range e.Refused {
		if err := o.commit(e.ctx, r.Write); err == nil {
			e.Errorf("%s was committed", e.refusal(r))
		}
		_, back := e.promptly("the commit after "+e.refusal(r), e.patience, func() error {
			o.mustCommitBeside(e.effect(fmt.Sprint("after ", i)))
			return nil
		})
		if !back {
			return
		}
		names = append(names, fmt.Sprint("after ", i))
		o.leftNothing("after the commit that followed "+e.refusal(r), names...)
	}
	other.leftNothing("beside refused writes", "of the other")
	other.mustCommit(e.effect("of the other, later"))
}

func tryTells[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	if err := o.sink.Try(e.ctx, o.stored, e.effect("tried")); err != nil {
		e.Errorf("a trial of what can be committed: %v", err)
	}
	o.leftNothing("after a trial", "before")
	for _, r := range e.Refused {
		o.triesRefused("a trial of "+e.refusal(r), all(e.effect("tried"), r.Write))
		o.leftNothing("after a trial of "+e.refusal(r), "before")
	}
	cause := errors.New("the cause")
	if err := o.sink.Try(e.ctx, o.stored, func(context.Context, Tx) error { return cause }); !errors.Is(err, cause) {
		e.Errorf("a trial of an apply that fails gives %v, want its error", err)
	}
	o.mustCommit(e.effect("after"))
	o.leftNothing("after the commit that followed", "before", "after")
}

// triesRefused tries a write that can't be committed.
func (o *owner[Tx]) triesRefused(what string, write apply[Tx]) {
	o.Helper()
	if err := o.sink.Try(o.ctx, o.stored, write); err != nil || trials(o.features) {
		o.wantClass(what, o.sink, err, projector.Poison)
	}
}

func tryFenced[Tx any](e *env[Tx]) {
	a := e.begin()
	ahead := a.stored
	ahead.Sequence++
	e.wantFenced("a trial with a sequence that is not the stored one", a.sink.Try(e.ctx, ahead, e.effect("tried")))
	b := e.begin()
	e.wantFenced("a trial under an earlier term", a.sink.Try(e.ctx, a.stored, e.effect("tried")))
	b.leftNothing("after fenced trials")
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// full is a checkpoint with every field set, and with texts that a store might want
// to change.
func full(prev projector.Checkpoint) projector.Checkpoint {
	next := following(prev)
	next.Watch = projector.Watch{
		ReplicaSet: bson.ObjectID{1, 2, 3, 0, 255}, Database: "d\u00e9p\u00f4t",
		Collections: []projector.Watched{{
			Name: "tickets \"\\ \u2028 <&>", UUID: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: make([]byte, 16)},
			Before: true, After: true, Bindings: []string{"rollup into counts", "on"},
		}, {Name: "later"}},
	}
	next.Samples = []projector.Sample{{Collection: "tickets", Key: projector.StoredKey(id("a\x00b")), Document: -1 << 63, Result: 1<<63 - 1}}
	next.Rebuild = &projector.Rebuild{
		Mode: projector.InPlace, Mark: 1<<63 - 1, Began: next.CommittedAt, Cause: "asked for by \"o'hara\" \u2028 {\"$oid\": 1}",
	}
	for i, key := range oddKeys() {
		next.Rebuild.Read = append(next.Rebuild.Read, projector.Copied{
			Collection: fmt.Sprint("tickets ", i), Last: projector.StoredKey(key), Rows: 1<<53 + int64(i), Done: i%2 == 0,
		})
	}
	next.Rebuild.Read = append(next.Rebuild.Read, projector.Copied{Collection: "nothing yet"})
	next.Pending = []projector.Pending{{Binding: 3, Key: projector.StoredKey(value(bson.D{{Key: "a", Value: bson.A{1, "x"}}}))}}
	return next
}

// oddKeys are _ids that don't survive every form of JSON.
func oddKeys() []bson.RawValue {
	keys := ids()
	for _, v := range []any{
		bson.D{{Key: "$oid", Value: "65f1c0ffee65f1c0ffee65f1"}},
		bson.D{{Key: "$numberLong", Value: "no number"}},
		math.Inf(-1), math.Copysign(0, -1), math.Float64frombits(0x7ff8_0000_0000_0001), // a NaN with bits of its own
		"a\xffb",
		bson.Regex{Pattern: "a/b", Options: "i"},
		bson.Binary{Subtype: 0x80, Data: []byte{0x07, 1}},
	} {
		keys = append(keys, value(v))
	}
	return keys
}
