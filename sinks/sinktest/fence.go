package sinktest

import (
	"context"
	"fmt"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

func fenceChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"fence/term", nil, fenceTerm[Tx]},
		{"fence/owner", nil, fenceOwner[Tx]},
		{"fence/sequence", nil, fenceSequence[Tx]},
		{"fence/begun-before-the-takeover", nil, fenceBegunBefore[Tx]},
		{"fence/late-writes-are-harmless", versioned, fenceLate[Tx]},
	}
}

func fenceTerm[Tx any](e *env[Tx]) {
	old := e.begin()
	old.mustCommit(e.effect("of the old owner"))
	owner := e.begin()
	if owner.stored.Term <= old.stored.Term {
		e.Fatalf("the new owner has term %d, the old one %d", owner.stored.Term, old.stored.Term)
	}
	names := []string{"of the old owner"}
	for i := range 3 {
		e.wantFenced("a commit under an earlier term", old.commit(e.ctx, e.effect("of the superseded owner")))
		owner.leftNothing("after a superseded owner's commit", names...)
		names = append(names, fmt.Sprint("of the new owner ", i))
		owner.mustCommit(e.effect(names[len(names)-1]))
	}
	// With the sequence of the new owner it has nothing but the term against it.
	old.stored.Sequence = owner.stored.Sequence
	e.wantFenced("a commit under an earlier term, of the following sequence", old.commit(e.ctx, e.effect("of the superseded owner")))
	early := old.stored
	early.Term = owner.stored.Term + 1
	e.wantFenced("a commit under a term that nobody has taken", old.sink.Commit(e.ctx, early, following(early), e.effect("of nobody")))
	owner.leftNothing("in the end", names...)
}

// fenceOwner: a store that was set back gives a term once more, to another owner.
func fenceOwner[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	other := o.stored
	other.Owner = "the owner of the same term, before the store was set back"
	e.wantFenced("another owner's commit", o.sink.Commit(e.ctx, other, following(other), e.effect("of another owner")))
	e.wantFenced("another owner's trial", o.sink.Try(e.ctx, other, e.effect("of another owner")))
	o.leftNothing("after another owner's commit", "before")
}

// fenceSequence: under one term too each sequence is committed once. The second is
// the retry of a commit whose answer was lost.
func fenceSequence[Tx any](e *env[Tx]) {
	o := e.begin()
	before := o.stored
	o.mustCommit(e.effect("one"))
	retry := following(before)
	e.wantFenced("a second commit of one sequence", o.sink.Commit(e.ctx, before, retry, e.effect("one again")))
	o.leftNothing("after a second commit of one sequence", "one")
	ahead := o.stored
	ahead.Sequence += 5
	e.wantFenced("a commit that leaves a sequence out", o.sink.Commit(e.ctx, ahead, following(ahead), e.effect("too early")))
	o.leftNothing("after a commit that leaves a sequence out", "one")
	first := before
	first.Sequence = 0
	e.wantFenced("another first commit", o.sink.Commit(e.ctx, first, following(first), all(e.create(), e.effect("first again"))))
	o.leftNothing("after another first commit", "one")
	o.mustCommit(e.effect("two"))
	o.leftNothing("after the next commit", "one", "two")
}

// fenceBegunBefore: a commit that began before the takeover and goes on after it.
func fenceBegunBefore[Tx any](e *env[Tx]) {
	old := e.begin()
	var names []string
	for round, send := range []bool{true, false, true} {
		late := fmt.Sprint("of the superseded owner, round ", round)
		writes := []apply[Tx]{e.effect(late)}
		if !send {
			writes = nil // nothing reaches the server before the takeover
		}
		open := old.open(writes...)
		if !open.holds(e) {
			return
		}
		owner := e.takeOver()
		if owner == nil {
			_ = open.resume()
			return
		}
		names = append(names, fmt.Sprint("of the new owner, round ", round))
		err := owner.commit(e.ctx, e.effect(names[round]))
		e.must("the new owner's first commit", err)
		err = open.resume()
		if err == nil {
			e.Errorf("the commit of a superseded owner has succeeded")
		}
		e.wantInterrupted("the commit of a superseded owner", old.sink, err)
		owner.leftNothing("after a superseded owner's commit", names...)
		old = owner
	}
}

// takeOver is begin while another owner's commit is open, nil where it is late.
func (e *env[Tx]) takeOver() *owner[Tx] {
	e.Helper()
	o := &owner[Tx]{env: e, sink: e.Sink(e.T)}
	_, back := e.promptly("Acquire, while an earlier owner is in the middle of a commit,", e.patience, func() error {
		var err error
		o.stored, err = retried(e, o.sink, func() (projector.Checkpoint, error) { return acquireLive(e.ctx, o.sink, projection, "new owner") })
		if err != nil {
			e.Errorf("Acquire, while an earlier owner is in the middle of a commit: %v", err)
		}
		return err
	})
	if !back || o.stored.Term == 0 {
		return nil
	}
	return o
}

// fenceLate: what a superseded owner of a versioned sink still writes has an earlier
// version than what the new owner makes of the same documents.
func fenceLate[Tx any](e *env[Tx]) {
	old := e.begin()
	at := e.version.Add(10)
	put := func(version, n int64) apply[Tx] {
		return e.putDocument("contested", version, &Document{Name: "contested", N: n})
	}
	for _, step := range []struct {
		late  apply[Tx]
		after []apply[Tx]
		want  []string
	}{
		{put(at, 1), []apply[Tx]{put(at, 1), put(at+2, 3)}, []string{documentText("contested", 3)}},
		{put(at+2, 3), []apply[Tx]{e.putDocument("contested", at+4, nil)}, nil},
		{put(at+6, 7), []apply[Tx]{put(at+6, 7)}, []string{documentText("contested", 7)}},
	} {
		open := old.open(step.late)
		if !open.holds(e) {
			return
		}
		owner := e.takeOver()
		if owner == nil {
			_ = open.resume()
			return
		}
		owner.mustCommit(step.after...)
		if err := open.resume(); err == nil {
			e.Errorf("the commit of a superseded owner has succeeded")
		}
		owner.stands("after a late write")
		e.wantRows("after a late write", e.documents(owner.place()), step.want)
		old = owner
	}
}

// putDocument puts one document's row, or removes it where row is nil.
func (e *env[Tx]) putDocument(name string, version int64, row *Document) apply[Tx] {
	rows := []projector.Row[Document]{{Owner: id(name), Version: version, Row: row}}
	return func(ctx context.Context, tx Tx) error {
		if row == nil {
			return e.Documents.Target.Put(ctx, tx, rows, nil)
		}
		return e.Documents.Target.Put(ctx, tx, nil, rows)
	}
}

func (e *env[Tx]) documents(place string) []string {
	e.Helper()
	rows, err := e.Documents.Rows(e.ctx, place)
	e.must("read the documents", err)
	return keptTexts(rows, true)
}

func documentText(name string, n int64) string {
	return keptText(Kept[Document]{Row: Document{Name: name, N: n}, Owner: projector.KeyText(id(name))}, true)
}

func keptTexts[R any](rows []Kept[R], owned bool) []string {
	texts := make([]string, len(rows))
	for i, r := range rows {
		texts[i] = keptText(r, owned)
	}
	return texts
}

// frozenChecks are about owners that hold the checkpoint and do nothing.
func frozenChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"frozen/acquire", nil, func(e *env[Tx]) { frozenOwner(e, acquireBeside[Tx]) }},
		{"frozen/load", nil, func(e *env[Tx]) { frozenOwner(e, loadBeside[Tx]) }},
		{"frozen/process", nil, frozenProcess[Tx]},
	}
}

func acquireBeside[Tx any](e *env[Tx], sink projector.Sink[Tx]) error {
	_, err := retried(e, sink, func() (projector.Checkpoint, error) { return acquireLive(e.ctx, sink, projection, "next owner") })
	return err
}

func loadBeside[Tx any](e *env[Tx], sink projector.Sink[Tx]) error {
	_, err := retried(e, sink, func() (projector.Checkpoint, error) { return sink.Load(e.ctx, projection, 1) })
	return err
}

// frozenOwner calls a method while an owner is in its handler, and does not leave it.
func frozenOwner[Tx any](e *env[Tx], call func(*env[Tx], projector.Sink[Tx]) error) {
	old := e.begin()
	old.mustCommit(e.effect("before"))
	open := old.open(e.effect("of the frozen owner"))
	if !open.holds(e) {
		return
	}
	beside := e.Sink(e.T)
	begin := time.Now()
	err, back := e.promptly("a method beside a frozen owner", e.patience, func() error { return call(e, beside) })
	e.Logf("it took %s", time.Since(begin).Round(time.Millisecond))
	if back && err != nil {
		e.Errorf("a method beside a frozen owner: %v", err)
	}
	names := []string{"before"}
	if err := open.resume(); err == nil {
		names = append(names, "of the frozen owner") // nobody has taken its term, and it may go on
	} else {
		e.wantInterrupted("the frozen owner's commit", old.sink, err)
	}
	e.wantEffects("after the frozen owner went on", old.place(), names...)
	next := e.begin()
	next.mustCommit(e.effect("after"))
	e.wantEffects("after the next owner's commit", old.place(), append(names, "after")...)
}

func frozenProcess[Tx any](e *env[Tx]) {
	if e.Freeze == nil {
		e.Logf("Store.Freeze is nil, nothing is checked")
		return
	}
	old := e.begin()
	old.mustCommit(e.effect("before"))
	thaw, err := e.Freeze(e.ctx, old.stored)
	e.must("Freeze", err)
	owner := e.takeOver()
	thaw()
	if owner == nil {
		return
	}
	e.wantFenced("the commit of an owner that was frozen", old.commit(e.ctx, e.effect("of the frozen owner")))
	owner.mustCommit(e.effect("after"))
	owner.leftNothing("after the takeover", "before", "after")
}
