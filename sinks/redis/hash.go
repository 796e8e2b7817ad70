package redis

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// Hash is a target of which every row is a Redis hash of its own, with a field for each
// column. The columns follow from the row type R. The tag `row:"column"` names a field's
// column. After the name may stand ",key" (the keys together identify a row), ",sum" (a
// Rollup adds it up; an integer) or ",json" (any Go type, stored as JSON); "-"
// leaves the field out. Every exported field needs one. What becomes of the Go types is in
// the package's documentation.
//
// What the target is for follows from R, too: a row type with sums makes one for a Rollup,
// one with keys but no sums one for an Upsert, one without keys one for a Mirror.
type Hash[R any] struct {
	// Name of the target within its projection: lower-case letters, digits and
	// underscores, a letter first; not "on".
	Name string
}

var (
	_ projector.Adder[*Tx, struct{}]  = Hash[struct{}]{}
	_ projector.Putter[*Tx, struct{}] = Hash[struct{}]{}
	_ projector.Sweeper[*Tx]          = Hash[struct{}]{}
	_ projector.Layout                = Hash[struct{}]{}
)

// Target implements projector.Model.
func (h Hash[R]) Target() string { return h.Name }

// Layout implements projector.Layout.
func (h Hash[R]) Layout() string { return row.Layout[R]() }

// Check implements projector.Model.
func (h Hash[R]) Check(form projector.Form) error {
	p, err := h.plan()
	if err != nil {
		return err
	}
	return row.CheckForm(p.schema, form, "hash", h.Name)
}

// kind is what a target is for.
type kind int

const (
	rollup   kind = iota // sums and contributions, by keys
	keyed                // plain columns, by keys, with an owner
	mirrored             // plain columns, by the owner
)

// filler is a field of rows that might else have none, and a hash without fields is no key.
const filler = "tm_row"

// plan is what follows from a row type.
type plan struct {
	schema   *row.Schema
	kind     kind
	filled   bool // rows have the filler
	nullable bool
}

func (h Hash[R]) plan() (*plan, error) {
	s, err := row.Of[R]()
	if wrong := row.ColumnName(h.Name); wrong != "" {
		err = errors.Join(err, fmt.Errorf("bad hash name %q: %s", h.Name, wrong))
	}
	if h.Name == onTarget {
		err = errors.Join(err, fmt.Errorf("bad hash name %q: it is where handlers of On write", h.Name))
	}
	if err != nil {
		return nil, err
	}
	p := &plan{schema: s, kind: mirrored, filled: true}
	for i := range s.Fields {
		p.filled = p.filled && s.Fields[i].Nullable
		p.nullable = p.nullable || s.Fields[i].Nullable
	}
	switch {
	case len(s.Sums) > 0:
		p.kind = rollup
		for i := range s.Sums {
			if s.Sums[i].Kind != row.Int {
				err = errors.Join(err, fmt.Errorf("row type %s of hash %q: column %q can't be a sum: Redis adds integers exactly, and nothing else; "+
					"count in the smallest unit, such as cents, as an int64", s.Type, h.Name, s.Sums[i].Name))
			}
		}
	case len(s.Keys) > 0:
		p.kind = keyed
	}
	return p, err
}

func (h Hash[R]) planFor(kinds ...kind) (*plan, error) {
	p, err := h.plan()
	if err != nil {
		return nil, fmt.Errorf("tidemark/redis: %w", err)
	}
	for _, k := range kinds {
		if p.kind == k {
			return p, nil
		}
	}
	if p.kind == rollup {
		return nil, fmt.Errorf("tidemark/redis: row type %s of hash %q has sums, so rows can only be added to it, not put", p.schema.Type, h.Name)
	}
	return nil, fmt.Errorf("tidemark/redis: row type %s of hash %q has no sums, so rows can only be put into it, not added", p.schema.Type, h.Name)
}

// Create implements projector.Model. In a generation's first commit it removes what an
// earlier one of the same number may have left, since somebody deleted its checkpoint.
func (h Hash[R]) Create(_ context.Context, tx *Tx) error {
	p, err := h.plan()
	if err != nil {
		return tx.fail(fmt.Errorf("tidemark/redis: %w", err))
	}
	if tx.first {
		tx.target(h.Name, p).clear()
		return nil
	}
	tx.target(h.Name, p)
	return nil
}

// Clear implements projector.Model. The rows are removed within the transaction, while
// which the server does nothing else: about a second for a million rows.
func (h Hash[R]) Clear(_ context.Context, tx *Tx) error {
	p, err := h.plan()
	if err != nil {
		return tx.fail(fmt.Errorf("tidemark/redis: %w", err))
	}
	tx.target(h.Name, p).clear()
	return nil
}

// Add implements projector.Adder. What is added is written by the commit, which reads the
// sums before: so that a sum overflows, or more is taken off than there is, is the
// commit's error.
func (h Hash[R]) Add(_ context.Context, tx *Tx, minus, plus []R) error {
	p, err := h.planFor(rollup)
	if err != nil {
		return tx.fail(err)
	}
	d, err := row.Fold(p.schema, minus, plus)
	if err != nil {
		return tx.fail(fmt.Errorf("tidemark/redis: hash %q: %w", h.Name, err))
	}
	return tx.fail(tx.target(h.Name, p).add(d))
}

// Put implements projector.Putter. A removal of all rows of a document, of a target with
// keys, reads the whole index; the forms of this library never ask for it.
func (h Hash[R]) Put(_ context.Context, tx *Tx, remove, put []projector.Row[R]) error {
	p, err := h.planFor(keyed, mirrored)
	if err != nil {
		return tx.fail(err)
	}
	t := tx.target(h.Name, p)
	o := op{removals: make([]removal, 0, len(remove)), puts: make([]putting, 0, len(put))}
	for _, r := range remove {
		m := removal{key: ownerText(r), owner: ownerText(r)}
		switch {
		case p.kind == mirrored:
		case r.Row == nil:
			m.all = true
		default:
			if m.key, err = keyText(p.schema, reflect.ValueOf(r.Row).Elem()); err != nil {
				return tx.fail(h.refused(r.Owner, err))
			}
		}
		o.removals = append(o.removals, m)
	}
	for _, r := range put {
		w := putting{key: ownerText(r), entry: owned(tx.mark, "")}
		v := reflect.ValueOf(r.Row).Elem()
		if p.kind == keyed {
			w.entry = owned(tx.mark, w.key)
			if w.key, err = keyText(p.schema, v); err != nil {
				return tx.fail(h.refused(r.Owner, err))
			}
		}
		if w.set, w.null, err = t.fields(v, w.key); err != nil {
			return tx.fail(h.refused(r.Owner, err))
		}
		o.puts = append(o.puts, w)
	}
	t.ops = append(t.ops, o)
	return nil
}

// Prepare implements projector.Sweeper. The index has a place for the mark of each row; what
// is done is to count the rows anew, of which some may have been lost.
func (h Hash[R]) Prepare(_ context.Context, tx *Tx) error {
	p, err := h.planFor(keyed, mirrored)
	if err != nil {
		return tx.fail(err)
	}
	tx.target(h.Name, p)
	return nil
}

// Sweep implements projector.Sweeper.
func (h Hash[R]) Sweep(ctx context.Context, tx *Tx, limit int) (int, error) {
	p, err := h.planFor(keyed, mirrored)
	if err == nil && tx.mark == 0 {
		err = fmt.Errorf("tidemark/redis: hash %q can only be swept in a rebuild in place", h.Name)
	}
	if err != nil {
		return 0, tx.fail(err)
	}
	n, err := tx.target(h.Name, p).sweep(ctx, limit)
	if err != nil {
		return 0, tx.fail(failed(fmt.Sprintf("sweep hash %q", h.Name), err))
	}
	return n, nil
}

// Count implements projector.Sweeper.
func (h Hash[R]) Count(ctx context.Context, tx *Tx) (int64, error) {
	p, err := h.plan()
	if err != nil {
		return 0, tx.fail(fmt.Errorf("tidemark/redis: %w", err))
	}
	_, rows, err := tx.target(h.Name, p).plan(ctx)
	if err != nil {
		return 0, tx.fail(failed(fmt.Sprintf("count hash %q", h.Name), err))
	}
	return rows, nil
}

// fields are the fields of a row that are not null, as the arguments of its HSET, and the
// names of those that are.
func (t *target) fields(r reflect.Value, key string) (set, null []any, err error) {
	s := t.p.schema
	set = make([]any, 0, 4+2*len(s.Fields))
	set = append(set, "hset", t.rowKey(key))
	for i := range s.Fields {
		text, ok, err := fieldText(&s.Fields[i], r)
		switch {
		case err != nil:
			return nil, nil, err
		case ok:
			set = append(set, s.Fields[i].Name, text)
		default:
			null = append(null, s.Fields[i].Name)
		}
	}
	if t.p.filled {
		set = append(set, filler, "1")
	}
	return set, null, nil
}

func (h Hash[R]) refused(owner interface{ String() string }, err error) error {
	return fmt.Errorf("tidemark/redis: hash %q: %w (document %s)", h.Name, err, owner)
}
