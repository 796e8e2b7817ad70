package sinktest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

func sweeperChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"sweeper/documents", nil, sweepDocuments[Tx]},
		{"sweeper/keys", keyed, sweepEntries[Tx]},
	}
}

// sweep is a rebuild in place of one target.
type sweep[Tx any] struct {
	*owner[Tx]
	sweeper projector.Sweeper[Tx]
	rebuild *projector.Rebuild
}

// sweeping begins with the target's preparation, if it is a Sweeper.
func sweeping[Tx, R any](o *owner[Tx], p Putting[Tx, R]) (s *sweep[Tx], ok bool) {
	sweeper, ok := p.Target.(projector.Sweeper[Tx])
	if !ok {
		o.Logf("target %s is no projector.Sweeper, nothing is checked", p.Target.Target())
		return nil, false
	}
	return &sweep[Tx]{owner: o, sweeper: sweeper}, true
}

// begin is the first commit of a rebuild with this mark.
func (s *sweep[Tx]) begin(mark int64) {
	s.Helper()
	s.rebuild = &projector.Rebuild{
		Mode: projector.InPlace, Mark: mark, Began: time.Now().UTC().Truncate(time.Millisecond), Cause: "a check",
		Read: []projector.Copied{{Collection: "documents"}},
	}
	s.marked(s.sweeper.Prepare)
	s.marked(s.sweeper.Prepare) // does nothing where it is prepared
}

// end is a commit without a rebuild.
func (s *sweep[Tx]) end() {
	s.Helper()
	s.rebuild = nil
	s.marked(all[Tx]())
}

// marked is mustCommit of the rebuild.
func (s *sweep[Tx]) marked(writes ...apply[Tx]) {
	s.Helper()
	s.must("Commit of a rebuild in place", s.commit(writes...))
}

func (s *sweep[Tx]) commit(writes ...apply[Tx]) error {
	next := following(s.stored)
	next.Rebuild = s.rebuild
	err := s.sink.Commit(s.ctx, s.stored, next, all(writes...))
	if err == nil {
		s.stored = next
	}
	return err
}

func (s *sweep[Tx]) wantCount(after string, want int64) {
	s.Helper()
	got := int64(-1)
	s.marked(func(ctx context.Context, tx Tx) (err error) {
		got, err = s.sweeper.Count(ctx, tx)
		return err
	})
	if got != want {
		s.Errorf("%s Count gives %d, want %d", after, got, want)
	}
}

// all sweeps until nothing is left over, and wants so many rows to go.
func (s *sweep[Tx]) all(after string, want int) {
	s.Helper()
	const limit = 2
	total := 0
	for range want + 3 {
		n := -1
		s.marked(func(ctx context.Context, tx Tx) (err error) {
			n, err = s.sweeper.Sweep(ctx, tx, limit)
			return err
		})
		if n < 0 || n > limit {
			s.Fatalf("%s Sweep with limit %d reports %d", after, limit, n)
		}
		total += n
		if n == 0 {
			break
		}
	}
	if total != want {
		s.Errorf("%s Sweep reports %d rows in all, want %d", after, total, want)
	}
}

// rolledBack: a sweep is part of its transaction.
func (s *sweep[Tx]) rolledBack() {
	s.Helper()
	if !s.features.Transactions {
		return
	}
	cause := errors.New("the cause")
	err := s.commit(func(ctx context.Context, tx Tx) error {
		_, err := s.sweeper.Sweep(ctx, tx, 1000)
		return err
	}, s.send, func(context.Context, Tx) error { return cause })
	if !errors.Is(err, cause) {
		s.Errorf("an apply that fails after Sweep gives %v, want its error", err)
	}
	s.stands("after a Sweep that was rolled back")
}

func sweepDocuments[Tx any](e *env[Tx]) {
	o := e.begin()
	s, ok := sweeping(o, e.Documents)
	if !ok {
		return
	}
	docs := func(names string, n int64) (rows []documentRow, texts []string) {
		for _, name := range names {
			rows, texts = append(rows, e.document(string(name), n)), append(texts, documentText(string(name), n))
		}
		return rows, texts
	}
	puts := func(names string, n int64) apply[Tx] {
		rows, _ := docs(names, n)
		return put(e.Documents, nil, rows)
	}
	want := func(after string, parts ...[]string) {
		e.Helper()
		var texts []string
		for _, p := range parts {
			texts = append(texts, p...)
		}
		e.wantRows(after, e.documents(o.place()), texts)
	}
	text := func(names string, n int64) []string { _, texts := docs(names, n); return texts }
	o.mustCommit(puts("abcdefg", 1))
	s.begin(7)
	want("after Prepare", text("abcdefg", 1))
	s.wantCount("after Prepare", 7)
	s.marked(puts("a", 1)) // put again as it is
	s.marked(puts("bx", 2))
	gone, _ := docs("g", 0)
	gone[0].Row = nil
	s.marked(put(e.Documents, gone, nil)) // a change beside the rebuild
	want("before the sweep", text("acdef", 1), text("bx", 2))
	s.wantCount("before the sweep", 7)
	s.rolledBack()
	want("after a sweep that was rolled back", text("acdef", 1), text("bx", 2))
	s.all("after rows without a mark were left over", 4)
	want("after the sweep", text("a", 1), text("bx", 2))
	s.wantCount("after the sweep", 3)
	s.end()
	o.mustCommit(puts("yz", 3)) // no rebuild: no mark
	// The next rebuild has a higher mark, and the earlier one counts for nothing.
	s.begin(9)
	s.marked(puts("bz", 4))
	s.all("after rows with an earlier mark and without one were left over", 3)
	want("after the sweep of the second rebuild", text("bz", 4))
	s.wantCount("after the sweep of the second rebuild", 2)
	// A rebuild that finds nothing leaves nothing.
	s.begin(1<<62 + 1)
	s.all("after a rebuild without rows", 2)
	want("after a rebuild without rows")
	s.end()
	o.mustCommit(puts("a", 5))
	want("after the rebuilds", text("a", 5))
}

// sweepEntries: rows with keys keep their owners through a rebuild in place.
func sweepEntries[Tx any](e *env[Tx]) {
	o := e.begin()
	s, ok := sweeping(o, e.Entries)
	if !ok {
		return
	}
	row := func(owner string, slot, size int64) entryRow { return e.entry(owner, "s", fmt.Sprint(slot), size) }
	puts := func(rows ...entryRow) apply[Tx] { return put(e.Entries, nil, rows) }
	o.mustCommit(puts(row("d", 1, 1), row("d", 2, 1), row("e", 3, 1), row("e", 4, 1), row("f", 5, 1)))
	s.begin(7)
	kept, taken, changed := row("d", 1, 1), row("f", 3, 2), row("f", 5, 3)
	s.marked(puts(kept, taken, changed)) // "e" has lost slot 3 to "f"
	s.wantCount("before the sweep", 5)
	s.all("after two rows were left over", 2)
	e.wantRows("after the sweep", e.entries(o.place()), e.entryTexts(kept, taken, changed))
	s.end()
	if e.features.Owners {
		o.mustCommit(put(e.Entries, []entryRow{row("e", 3, 0), e.allOf("e")}, nil))
		e.wantRows("after removals by the row's earlier owner", e.entries(o.place()), e.entryTexts(kept, taken, changed))
		o.mustCommit(put(e.Entries, []entryRow{e.allOf("f")}, nil))
		e.wantRows("after removals by the owner", e.entries(o.place()), e.entryTexts(kept))
	}
	again := row("e", 3, 4)
	o.mustCommit(puts(again))
	s.begin(8)
	s.marked(puts(row("e", 3, 4)))
	left := int(1) // kept
	if !e.features.Owners {
		left += 1 // changed
	}
	s.all("after the second rebuild", left)
	e.wantRows("after the second rebuild", e.entries(o.place()), e.entryTexts(again))
}
