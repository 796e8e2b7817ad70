package postgres

import (
	"context"
	"encoding/binary"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// Table is a table of a model, in the schema of the model's generation. Its columns
// follow from the row type R. The tag `row:"column"` names a field's column. After the
// name may stand ",key" (the keys together identify a row), ",sum" (a Rollup adds it up; an
// integer or a bson.Decimal128) or ",json" (any Go type, stored as JSON); "-"
// leaves the field out. Every exported field needs one. Which Go types
// there are, and what becomes of them, is in the package's documentation.
//
// What the table is for follows from R, too: a row type with sums makes a table for a
// Rollup, one with keys but no sums a table for an Upsert, one without keys a table
// for a Mirror.
type Table[R any] struct {
	// Name of the table: lower-case letters, digits and underscores, a letter first.
	Name string
}

var (
	_ projector.Adder[*Tx, struct{}]  = Table[struct{}]{}
	_ projector.Putter[*Tx, struct{}] = Table[struct{}]{}
)

// Target implements projector.Model.
func (t Table[R]) Target() string { return t.Name }

// Layout implements projector.Layout.
func (t Table[R]) Layout() string { return row.Layout[R]() }

// Check implements projector.Model.
func (t Table[R]) Check(form projector.Form) error {
	p, err := t.plan()
	if err != nil {
		return err
	}
	return row.CheckForm(p.schema, form, "table", t.Name)
}

// Add implements projector.Adder: one statement for all rows, and one more where
// contributions are taken off.
func (t Table[R]) Add(_ context.Context, tx *Tx, minus, plus []R) error {
	p, err := t.planFor(rollup)
	if err != nil {
		return err
	}
	d, err := row.Fold(p.schema, minus, plus)
	if err != nil {
		return fmt.Errorf("tidemark/postgres: table %q: %w", t.Name, err)
	}
	if d.Len() == 0 {
		return nil
	}
	add, emptied := newSet(p.columns), newSet(p.keys())
	for i := range d.Len() {
		r := d.Row(i)
		err := add.addKey(p, r)
		add.addSums(p, d, i)
		if d.Count(i) <= 0 && err == nil {
			err = emptied.addKey(p, r)
		}
		if err != nil {
			add.discard()
			emptied.discard()
			return fmt.Errorf("tidemark/postgres: table %q, %w", t.Name, err)
		}
	}
	tx.enqueue(add.item(p.add))
	if emptied.rows == 0 {
		emptied.discard()
		return nil
	}
	i := emptied.item(p.emptied)
	i.once = true
	i.explain = func(err error) error {
		if code(err) == divisionByZero {
			return &DriftError{Table: t.Name, err: err}
		}
		return err
	}
	tx.enqueue(i)
	return nil
}

// Put implements projector.Putter: at most one statement for the removals of rows, one
// for the removals of whole documents, and one for what is put.
func (t Table[R]) Put(_ context.Context, tx *Tx, remove, put []projector.Row[R]) error {
	p, err := t.planFor(keyed, mirrored)
	if err != nil {
		return err
	}
	w := putWriter[R]{p: p, rows: newSet(p.owned()), owners: newSet(p.owner()), put: newSet(p.columns)}
	if err := w.write(remove, put); err != nil {
		w.discard()
		return fmt.Errorf("tidemark/postgres: table %q, %w", t.Name, err)
	}
	w.enqueue(tx)
	return nil
}

// putWriter turns the rows of one Put into parameters.
type putWriter[R any] struct {
	p                 *plan
	rows, owners, put *set
}

func (w *putWriter[R]) write(remove, put []projector.Row[R]) error {
	if w.p.kind == mirrored {
		return w.writeMirrored(remove, put)
	}
	whole := remove[:0:0]
	single := remove
	for i := range remove {
		if remove[i].Row == nil {
			whole, single = split(remove)
			break
		}
	}
	for _, r := range whole {
		w.owners.addOwner(projector.KeyText(r.Owner))
	}
	rows := func(isPut bool, i int) *projector.Row[R] {
		if isPut {
			return &put[i]
		}
		return &single[i]
	}
	removed, kept := row.Settle(len(single), len(put), func(dst []byte, isPut bool, i int) []byte {
		return w.p.schema.AppendKey(dst, reflect.ValueOf(rows(isPut, i).Row).Elem())
	})
	for _, i := range removed {
		if err := w.rows.addRow(reflect.ValueOf(single[i].Row).Elem(), projector.KeyText(single[i].Owner)); err != nil {
			return err
		}
	}
	return w.writePut(kept, put)
}

// writeMirrored writes rows that are keyed by their owner.
func (w *putWriter[R]) writeMirrored(remove, put []projector.Row[R]) error {
	removed, kept := row.Settle(len(remove), len(put), func(dst []byte, isPut bool, i int) []byte {
		if isPut {
			return append(dst, projector.KeyText(put[i].Owner)...)
		}
		return append(dst, projector.KeyText(remove[i].Owner)...)
	})
	for _, i := range removed {
		w.owners.addOwner(projector.KeyText(remove[i].Owner))
	}
	return w.writePut(kept, put)
}

func (w *putWriter[R]) writePut(kept []int, put []projector.Row[R]) error {
	for _, i := range kept {
		if err := w.put.addRow(reflect.ValueOf(put[i].Row).Elem(), projector.KeyText(put[i].Owner)); err != nil {
			return err
		}
	}
	return nil
}

// split parts removals of whole documents from those of single rows.
func split[R any](remove []projector.Row[R]) (whole, single []projector.Row[R]) {
	for _, r := range remove {
		if r.Row == nil {
			whole = append(whole, r)
		} else {
			single = append(single, r)
		}
	}
	return whole, single
}

func (w *putWriter[R]) enqueue(tx *Tx) {
	for _, s := range []struct {
		set         *set
		sql, marked string
		once        bool
	}{
		{w.rows, w.p.removeRows, "", true},
		{w.owners, w.p.removeOwners, "", true},
		{w.put, w.p.put, w.p.putMarked, false},
	} {
		if s.set.rows == 0 {
			s.set.discard()
			continue
		}
		i := s.set.item(s.sql)
		i.once = s.once
		if tx.build != 0 && s.marked != "" {
			i.sql = s.marked
			i.add(pgtype.Int8OID, binary.BigEndian.AppendUint64(nil, uint64(tx.build)))
		}
		tx.enqueue(i)
	}
}

func (w *putWriter[R]) discard() {
	w.rows.discard()
	w.owners.discard()
	w.put.discard()
}
