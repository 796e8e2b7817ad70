package sinktest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tidemark-go/tidemark/projector"
)

func loaderChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"loader/equals-put", nil, loaderDocuments[Tx]},
		{"loader/values-equal-put", values, loaderValues[Tx]},
	}
}

// loading gives a target's Load as a write, if it has one.
func loading[Tx, R any](e *env[Tx], p Putting[Tx, R]) (load func([]projector.Row[R]) apply[Tx], ok bool) {
	loader, ok := p.Target.(projector.Loader[Tx, R])
	if !ok {
		e.Logf("target %s is no projector.Loader, nothing is checked", p.Target.Target())
		return nil, false
	}
	return func(rows []projector.Row[R]) apply[Tx] {
		return func(ctx context.Context, tx Tx) error { return loader.Load(ctx, tx, rows) }
	}, true
}

// loaderDocuments loads a new generation with the rows that are put in the live one, and
// goes on with both.
func loaderDocuments[Tx any](e *env[Tx]) {
	load, ok := loading(e, e.Documents)
	if !ok {
		return
	}
	o := e.begin()
	n := o.build(2)
	var rows []documentRow
	for i, key := range ids() {
		rows = append(rows, documentRow{Owner: key, Version: e.version.Add(1), Row: &Document{"odd", int64(i)}})
	}
	for i := range 3_001 { // more than fit into one statement of most stores
		rows = append(rows, e.document(fmt.Sprintf("document %d", i), int64(i)))
	}
	equal := func(after string) {
		e.Helper()
		e.wantRows(after+", in the generation that was loaded,", e.documents(n.place()), e.documents(o.place()))
	}
	if e.features.Transactions {
		cause := errors.New("the cause")
		err := n.commit(e.ctx, load(rows), e.send, func(context.Context, Tx) error { return cause })
		if !errors.Is(err, cause) {
			e.Errorf("an apply that fails after Load gives %v, want its error", err)
		}
		n.leftNothing("after a Load that was rolled back")
	}
	n.mustCommit(load(nil))
	for part := range slices.Chunk(rows, len(rows)/2) {
		o.mustCommit(put(e.Documents, nil, part))
		n.mustCommit(load(part[:1]), load(part[1:])) // several in a commit
	}
	equal("after Load")
	// What was loaded is changed and removed like what was put.
	var remove, changed []documentRow
	for i, r := range rows {
		r.Version = e.version.Add(1)
		switch i % 3 {
		case 0:
			r.Row = nil
			remove = append(remove, r)
		case 1:
			r.Row = &Document{"changed", -r.Row.N}
			changed = append(changed, r)
		}
	}
	for _, g := range []*owner[Tx]{o, n} {
		g.mustCommit(put(e.Documents, remove, changed))
	}
	equal("after changes of what was loaded")
	// A load beside other writes of a commit.
	more, gone := e.document("more", 1), e.document("document 1", 0)
	gone.Row = nil
	o.mustCommit(put(e.Documents, []documentRow{gone}, []documentRow{more}))
	n.mustCommit(put(e.Documents, []documentRow{gone}, nil), load([]documentRow{more}))
	equal("after a Load beside a Put")
}

// loaderValues: what Put stores Load stores in the same form, and what Put refuses it
// refuses.
func loaderValues[Tx any](e *env[Tx]) {
	load, ok := loading(e, e.Values)
	if !ok {
		return
	}
	o := e.begin()
	n := o.build(2)
	var rows []projector.Row[Values]
	for name, v := range ordinary() {
		rows = append(rows, projector.Row[Values]{Owner: id(name), Version: e.version.Add(1), Row: &v})
	}
	o.mustCommit(put(e.Values, nil, rows))
	n.mustCommit(load(rows))
	for name, v := range extreme() {
		row := []projector.Row[Values]{{Owner: id(name), Version: e.version.Add(1), Row: &v}}
		perr, lerr := o.commit(e.ctx, put(e.Values, nil, row)), n.commit(e.ctx, load(row))
		if (perr == nil) != (lerr == nil) {
			e.Errorf("of %s Put gives %v, and Load %v", name, perr, lerr)
		}
		if lerr != nil {
			e.wantClass("a Load of "+name, n.sink, lerr, projector.Poison)
			n.stands("after a Load of " + name + " was refused")
		}
	}
	e.wantRows("in the generation that was loaded", e.values(n.place()), e.values(o.place()))
}
