package sinktest

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/tidemark-go/tidemark/projector"
)

func putChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"put/later-wins", nil, putLaterWins[Tx]},
		{"put/removal-of-all-rows-of-a-document", nil, putRemoveAll[Tx]},
		{"put/put-beats-removal", keyed, putBeatsRemoval[Tx]},
		{"put/removal-by-the-owner-only", owners, putOwners[Tx]},
		{"put/random-against-a-model", nil, putRandomDocuments[Tx]},
		{"put/random-keys-against-a-model", keyed, putRandomEntries[Tx]},
		{"put/replay-changes-nothing", versioned, putReplay[Tx]},
	}
}

type (
	entryRow    = projector.Row[Entry]
	documentRow = projector.Row[Document]
)

// entry is a row of the document that owner names.
func (e *env[Tx]) entry(owner, shelf, slot string, size int64) entryRow {
	return entryRow{Owner: id(owner), Version: e.version.Add(1), Row: &Entry{shelf, slot, "by " + owner, size}}
}

func (e *env[Tx]) allOf(owner string) entryRow {
	return entryRow{Owner: id(owner), Version: e.version.Add(1)}
}

func (e *env[Tx]) document(owner string, n int64) documentRow {
	return documentRow{Owner: id(owner), Version: e.version.Add(1), Row: &Document{owner, n}}
}

func put[Tx, R any](p Putting[Tx, R], remove, rows []projector.Row[R]) apply[Tx] {
	return func(ctx context.Context, tx Tx) error { return p.Target.Put(ctx, tx, remove, rows) }
}

func (e *env[Tx]) entries(place string) []string {
	e.Helper()
	rows, err := e.Entries.Rows(e.ctx, place)
	e.must("read the entries", err)
	return keptTexts(rows, e.features.Owners)
}

// entryTexts are rows as they should be stored.
func (e *env[Tx]) entryTexts(rows ...entryRow) []string {
	texts := make([]string, len(rows))
	for i, r := range rows {
		texts[i] = keptText(Kept[Entry]{*r.Row, projector.KeyText(r.Owner)}, e.features.Owners)
	}
	return texts
}

func putLaterWins[Tx any](e *env[Tx]) {
	o := e.begin()
	docs := func(rows ...documentRow) apply[Tx] { return put(e.Documents, nil, rows) }
	o.mustCommit(docs(e.document("d", 1), e.document("e", 1), e.document("d", 2)))
	e.wantRows("after a batch with two rows of one document", e.documents(o.place()), []string{documentText("d", 2), documentText("e", 1)})
	o.mustCommit(docs(e.document("d", 3)))
	o.mustCommit(docs(e.document("e", 4)), docs(e.document("e", 5)))
	e.wantRows("after two Puts in a commit", e.documents(o.place()), []string{documentText("d", 3), documentText("e", 5)})
	if !e.features.Keys {
		return
	}
	first, second, third := e.entry("d", "s", "1", 1), e.entry("d", "s", "1", 2), e.entry("e", "s", "1", 3)
	o.mustCommit(put(e.Entries, nil, []entryRow{first, second}))
	e.wantRows("after two rows of one key", e.entries(o.place()), e.entryTexts(second))
	o.mustCommit(put(e.Entries, nil, []entryRow{third}))
	e.wantRows("after another document's row of that key", e.entries(o.place()), e.entryTexts(third))
}

func putRemoveAll[Tx any](e *env[Tx]) {
	o := e.begin()
	docs := func(remove, rows []documentRow) apply[Tx] { return put(e.Documents, remove, rows) }
	gone := func(owner string) documentRow { return documentRow{Owner: id(owner), Version: e.version.Add(1)} }
	o.mustCommit(docs(nil, []documentRow{e.document("d", 1), e.document("e", 1)}))
	o.mustCommit(docs([]documentRow{gone("d"), gone("nobody")}, nil))
	e.wantRows("after a removal", e.documents(o.place()), []string{documentText("e", 1)})
	o.mustCommit(docs([]documentRow{gone("e")}, []documentRow{e.document("e", 2)}))
	e.wantRows("after a removal and a put of one document", e.documents(o.place()), []string{documentText("e", 2)})
	o.mustCommit(docs([]documentRow{gone("e")}, []documentRow{e.document("d", 3)}))
	e.wantRows("after a removal beside a put", e.documents(o.place()), []string{documentText("d", 3)})
	if !e.features.Owners {
		return
	}
	kept, moved := e.entry("e", "s", "3", 3), e.entry("d", "s", "9", 9)
	o.mustCommit(put(e.Entries, nil, []entryRow{e.entry("d", "s", "1", 1), e.entry("d", "s", "2", 2), kept}))
	o.mustCommit(put(e.Entries, []entryRow{e.allOf("d"), e.allOf("nobody")}, []entryRow{moved}))
	e.wantRows("after the removal of all rows of a document, which then put one", e.entries(o.place()), e.entryTexts(kept, moved))
	o.mustCommit(put(e.Entries, []entryRow{e.allOf("d")}, nil))
	e.wantRows("after the removal of all rows of a document", e.entries(o.place()), e.entryTexts(kept))
}

// putBeatsRemoval: a key is released and taken in one batch.
func putBeatsRemoval[Tx any](e *env[Tx]) {
	o := e.begin()
	held := e.entry("d", "s", "1", 1)
	o.mustCommit(put(e.Entries, nil, []entryRow{held}))
	again := e.entry("d", "s", "1", 2)
	o.mustCommit(put(e.Entries, []entryRow{again}, []entryRow{again}))
	e.wantRows("after a key was removed and put by one document", e.entries(o.place()), e.entryTexts(again))
	handed := e.entry("e", "s", "1", 3)
	release := entryRow{Owner: id("d"), Version: handed.Version, Row: again.Row}
	o.mustCommit(put(e.Entries, []entryRow{release}, []entryRow{handed}))
	e.wantRows("after a key was handed from one document to another", e.entries(o.place()), e.entryTexts(handed))
	// Two documents exchange their keys.
	o.mustCommit(put(e.Entries, nil, []entryRow{e.entry("f", "s", "2", 4)}))
	a, b := e.entry("e", "s", "2", 5), e.entry("f", "s", "1", 6)
	o.mustCommit(put(e.Entries,
		[]entryRow{{Owner: a.Owner, Version: a.Version, Row: handed.Row}, {Owner: b.Owner, Version: b.Version, Row: &Entry{Shelf: "s", Slot: "2"}}},
		[]entryRow{a, b}))
	e.wantRows("after two documents have exchanged their keys", e.entries(o.place()), e.entryTexts(a, b))
	// Of a removed row only the key counts.
	gone := e.entry("e", "s", "2", 77)
	o.mustCommit(put(e.Entries, []entryRow{gone}, nil))
	e.wantRows("after a removal", e.entries(o.place()), e.entryTexts(b))
}

func putOwners[Tx any](e *env[Tx]) {
	o := e.begin()
	held := e.entry("d", "s", "1", 1)
	o.mustCommit(put(e.Entries, nil, []entryRow{held}))
	o.mustCommit(put(e.Entries, []entryRow{e.entry("e", "s", "1", 1)}, nil))
	e.wantRows("after a removal by a document that does not own the row", e.entries(o.place()), e.entryTexts(held))
	taken := e.entry("e", "s", "1", 2)
	o.mustCommit(put(e.Entries, nil, []entryRow{taken}))
	o.mustCommit(put(e.Entries, []entryRow{e.entry("d", "s", "1", 1)}, nil))
	e.wantRows("after a removal by the row's earlier owner", e.entries(o.place()), e.entryTexts(taken))
	o.mustCommit(put(e.Entries, []entryRow{e.allOf("d")}, nil))
	e.wantRows("after a removal of all rows of the earlier owner", e.entries(o.place()), e.entryTexts(taken))
	// An owner is told by its _id with its type.
	number := entryRow{Owner: value(int32(1)), Version: e.version.Add(1), Row: &Entry{"s", "2", "by 1", 1}}
	o.mustCommit(put(e.Entries, nil, []entryRow{number}))
	o.mustCommit(put(e.Entries, []entryRow{e.allOf("1"), {Owner: id("1"), Version: e.version.Add(1), Row: number.Row}}, nil))
	e.wantRows("after a removal by a document whose _id looks like the owner's", e.entries(o.place()), e.entryTexts(taken, number))
	o.mustCommit(put(e.Entries, []entryRow{{Owner: value(1.0), Version: e.version.Add(1)}}, nil))
	e.wantRows("after a removal by the owner, whose _id has become a double,", e.entries(o.place()), e.entryTexts(taken))
}

func putRandomDocuments[Tx any](e *env[Tx]) {
	o := e.begin()
	model := map[string]documentRow{}
	for round := range e.rounds {
		var remove, rows []documentRow
		removed := map[string]bool{}
		for range e.rng.IntN(12) {
			row := e.document(awkward[e.rng.IntN(len(awkward))], e.rng.Int64N(100))
			name := projector.KeyText(row.Owner)
			if e.rng.IntN(3) == 0 {
				remove = append(remove, documentRow{Owner: row.Owner, Version: row.Version})
				removed[name] = true
			} else {
				rows = append(rows, row)
			}
		}
		for name := range removed {
			delete(model, name)
		}
		for _, r := range rows {
			model[projector.KeyText(r.Owner)] = r
		}
		o.mustCommit(put(e.Documents, latest(remove, rows), rows))
		want := make([]string, 0, len(model))
		for _, name := range slices.Sorted(maps.Keys(model)) {
			want = append(want, keptText(Kept[Document]{*model[name].Row, name}, true))
		}
		e.wantRows(fmt.Sprintf("after batch %d", round), e.documents(o.place()), want)
	}
}

// latest gives removals no later version than a put of their document has: the batch
// says that the document is there in the end.
func latest(remove, rows []documentRow) []documentRow {
	for i := range remove {
		for _, r := range rows {
			if projector.KeyText(r.Owner) == projector.KeyText(remove[i].Owner) {
				remove[i].Version = min(remove[i].Version, r.Version)
			}
		}
	}
	return remove
}

// entryModel is what a target with owners holds, by key.
type entryModel map[[2]string]entryRow

func (m entryModel) apply(remove, rows []entryRow) {
	for _, r := range remove {
		for k, held := range m {
			if held.Owner.Equal(r.Owner) && (r.Row == nil || k == [2]string{r.Row.Shelf, r.Row.Slot}) {
				delete(m, k)
			}
		}
	}
	for _, r := range rows {
		m[[2]string{r.Row.Shelf, r.Row.Slot}] = r
	}
}

// putRandomEntries lets documents write, release and steal keys. Without owners a key
// is only released by who has it.
func putRandomEntries[Tx any](e *env[Tx]) {
	o := e.begin()
	model := entryModel{}
	for round := range e.rounds {
		var remove, rows []entryRow
		for range e.rng.IntN(12) {
			row := e.entry(fmt.Sprint("d", e.rng.IntN(4)), awkward[e.rng.IntN(4)], awkward[e.rng.IntN(6)], e.rng.Int64N(100))
			key := [2]string{row.Row.Shelf, row.Row.Slot}
			switch held, ok := model[key]; {
			case e.features.Owners && e.rng.IntN(20) == 0:
				remove = append(remove, e.allOf(fmt.Sprint("d", e.rng.IntN(4))))
			case e.rng.IntN(2) == 0:
				rows = append(rows, row)
			case e.features.Owners || ok && held.Owner.Equal(row.Owner):
				remove = append(remove, row)
			}
		}
		if !e.features.Owners {
			remove = withoutPut(remove, rows)
		}
		model.apply(remove, rows)
		o.mustCommit(put(e.Entries, remove, rows))
		want := e.entryTexts(slices.Collect(maps.Values(model))...)
		e.wantRows(fmt.Sprintf("after batch %d", round), e.entries(o.place()), want)
	}
}

// withoutPut leaves out removals of keys that are put: versions would have to fit.
func withoutPut(remove, rows []entryRow) []entryRow {
	return slices.DeleteFunc(remove, func(r entryRow) bool {
		return slices.ContainsFunc(rows, func(p entryRow) bool { return p.Row.Shelf == r.Row.Shelf && p.Row.Slot == r.Row.Slot })
	})
}

// putReplay is what a versioned sink is for: after a crash between the rows and their
// checkpoint the same changes come again.
func putReplay[Tx any](e *env[Tx]) {
	o := e.begin()
	at := e.version.Add(100)
	history := []apply[Tx]{
		e.putDocument("d", at, &Document{"d", 1}),
		e.putDocument("e", at+1, &Document{"e", 1}),
		e.putDocument("d", at+2, &Document{"d", 2}),
		e.putDocument("e", at+3, nil),
		e.putDocument("f", at+4, &Document{"f", 1}),
	}
	want := []string{documentText("d", 2), documentText("f", 1)}
	o.mustCommit(history...)
	e.wantRows("after the changes", e.documents(o.place()), slices.Clone(want))
	for n := range history {
		o.mustCommit(history[n:]...)
		e.wantRows("after a replay of their end", e.documents(o.place()), slices.Clone(want))
		o.mustCommit(history[n])
		e.wantRows("after a replay of one of them", e.documents(o.place()), slices.Clone(want))
	}
}
