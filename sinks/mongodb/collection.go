package mongodb

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// Collection is a collection of a model, in the place of the model's generation. Its
// fields follow from the row type R. The tag `row:"column"` names a field's column. After the
// name may stand ",key" (the keys together identify a row), ",sum" (a Rollup adds it up; an
// integer or a bson.Decimal128) or ",json" (any Go type, stored as JSON); "-"
// leaves the field out. Every exported field needs one. Which Go types
// there are, and what becomes of them, is in the package's documentation.
//
// What the collection is for follows from R, too: a row type with sums makes one for a
// Rollup, one with keys but no sums one for an Upsert, one without keys one for a
// Mirror.
type Collection[R any] struct {
	// Name of the collection, without its generation's place: lower-case letters, digits
	// and underscores, a letter first.
	Name string
}

var (
	_ projector.Adder[*Tx, struct{}]  = Collection[struct{}]{}
	_ projector.Putter[*Tx, struct{}] = Collection[struct{}]{}
	_ projector.Loader[*Tx, struct{}] = Collection[struct{}]{}
	_ projector.Emptier[*Tx]          = Collection[struct{}]{}
	_ projector.Sweeper[*Tx]          = Collection[struct{}]{}
)

// Target implements projector.Model.
func (c Collection[R]) Target() string { return c.Name }

// Layout implements projector.Layout.
func (c Collection[R]) Layout() string { return row.Layout[R]() }

// Check implements projector.Model.
func (c Collection[R]) Check(form projector.Form) error {
	p, err := c.plan()
	if err != nil {
		return err
	}
	return row.CheckForm(p.schema, form, "collection", c.Name)
}

// kind is what a collection is for.
type kind int

const (
	rollup   kind = iota // _id of keys, sums, contributions
	keyed                // _id of keys, plain fields, the owner
	mirrored             // the owner as _id, plain fields
)

// ownerField holds the _id of the document that a row comes from.
const ownerField = "_owner"

// plan is what follows from a row type.
type plan struct {
	schema  *row.Schema
	kind    kind
	decimal bool // one of the sums is a Decimal128
}

func (c Collection[R]) plan() (*plan, error) {
	s, err := row.Of[R]()
	if wrong := row.ColumnName(c.Name); wrong != "" {
		err = errors.Join(err, fmt.Errorf("bad collection name %q: %s", c.Name, wrong))
	}
	if err != nil {
		return nil, err
	}
	p := &plan{schema: s, kind: mirrored}
	switch {
	case len(s.Sums) > 0:
		p.kind = rollup
		for i := range s.Sums {
			p.decimal = p.decimal || s.Sums[i].Kind == row.Decimal
		}
	case len(s.Keys) > 0:
		p.kind = keyed
	}
	return p, nil
}

func (c Collection[R]) planFor(kinds ...kind) (*plan, error) {
	p, err := c.plan()
	if err != nil {
		return nil, fmt.Errorf("tidemark/mongodb: %w", err)
	}
	for _, k := range kinds {
		if p.kind == k {
			return p, nil
		}
	}
	if p.kind == rollup {
		return nil, fmt.Errorf("tidemark/mongodb: row type %s of collection %q has sums, so rows can only be added to it, not put", p.schema.Type, c.Name)
	}
	return nil, fmt.Errorf("tidemark/mongodb: row type %s of collection %q has no sums, so rows can only be put into it, not added", p.schema.Type, c.Name)
}

// Add implements projector.Adder: a round trip for all rows, or for half a megabyte of them, and two more where
// contributions are taken off (the second only if a row is emptied). A row type with
// decimal sums costs another one, to see that every sum stays exact.
func (c Collection[R]) Add(ctx context.Context, tx *Tx, minus, plus []R) error {
	p, err := c.planFor(rollup)
	if err != nil {
		return err
	}
	d, err := row.Fold(p.schema, minus, plus)
	if err != nil {
		return fmt.Errorf("tidemark/mongodb: collection %q: %w", c.Name, err)
	}
	if d.Len() == 0 {
		return nil
	}
	a := adder{p: p, d: d, coll: tx.Collection(c.Name)}
	for _, step := range []func(context.Context) error{a.checkExact, a.add, a.removeEmptied} {
		if err := step(ctx); err != nil {
			return failed(fmt.Sprintf("add to collection %q", c.Name), err)
		}
	}
	return nil
}

// Put implements projector.Putter: a round trip for the removals and one for what is
// put, or for half a megabyte of it.
func (c Collection[R]) Put(ctx context.Context, tx *Tx, remove, put []projector.Row[R]) error {
	p, err := c.planFor(keyed, mirrored)
	if err != nil {
		return err
	}
	w := putter[R]{p: p, coll: tx.Collection(c.Name), mark: tx.mark}
	if err := w.write(ctx, remove, put); err != nil {
		return failed(fmt.Sprintf("put into collection %q", c.Name), err)
	}
	return nil
}

// Load implements projector.Loader, for a Mirror's collection.
func (c Collection[R]) Load(ctx context.Context, tx *Tx, rows []projector.Row[R]) error {
	p, err := c.planFor(mirrored)
	if err != nil {
		return err
	}
	w := putter[R]{p: p, coll: tx.Collection(c.Name), mark: tx.mark}
	if err := w.load(ctx, rows); err != nil {
		return failed(fmt.Sprintf("load into collection %q", c.Name), err)
	}
	return nil
}

// textOf names a row's _id in an error.
func textOf(id bson.RawValue) string {
	b, err := bson.MarshalExtJSON(bson.D{{Key: "_id", Value: id}}, false, false)
	if err != nil {
		return fmt.Sprint(id)
	}
	return strings.TrimSuffix(strings.TrimPrefix(string(b), `{"_id":`), "}")
}
