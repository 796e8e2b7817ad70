package postgres

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/tidemark-go/tidemark/internal/row"
)

// kind is what a table is for.
type kind int

const (
	rollup   kind = iota // keys, sums, contributions
	keyed                // keys, plain columns, the owner
	mirrored             // plain columns; the owner is the key
)

// plan is what follows from a row type and a table's name: columns and statements.
//
// The statements take a set of rows as one array per column: the server then parses
// and plans once whatever the number of rows. The rows are sorted by key, so that
// transactions that write to the same rows lock them in one order.
//
// INSERT … ON CONFLICT finds its rows by the index it names. A DELETE … USING is up
// to the planner: a plan made while the table was tiny (a nested loop over it, say) is
// kept for a prepared statement until the table is analyzed, and takes minutes once
// the table has grown in between. So the DELETEs are sent unprepared, which costs a
// fraction of a millisecond for each batch that has removals.
type plan struct {
	schema  *row.Schema
	kind    kind
	columns []column

	create, index            string
	add, emptied             string
	put, putMarked           string // the second has the mark as one more parameter
	removeRows, removeOwners string
	load, sweep              string
}

// column is a column of the table, in the order of the definition.
type column struct {
	name  string
	typ   *columnType
	key   bool
	null  bool
	field *row.Field // nil: not the user's
}

func (c column) quoted() string { return `"` + c.name + `"` }

// add adds the column's value of a row.
func (c *column) add(a *array, r reflect.Value) error {
	v, ok := c.field.Value(r)
	if !ok {
		a.addNull()
		return nil
	}
	if err := c.typ.add(a, v); err != nil {
		return fmt.Errorf("column %q: %w", c.name, err)
	}
	return nil
}

// ownerColumn holds projector.KeyText of the document that a row comes from.
const ownerColumn = "_id"

type planKey struct {
	row  reflect.Type
	name string
}

var plans sync.Map // planKey → *plan

func (t Table[R]) plan() (*plan, error) {
	k := planKey{reflect.TypeFor[R](), t.Name}
	if p, ok := plans.Load(k); ok {
		return p.(*plan), nil
	}
	s, err := row.Of[R]()
	if wrong := row.ColumnName(t.Name); wrong != "" {
		err = errors.Join(err, fmt.Errorf("bad table name %q: %s", t.Name, wrong))
	}
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(s.Fields, func(f row.Field) bool { return f.Name == buildColumn }) {
		return nil, fmt.Errorf("row type %s: column %q is reserved for this library", s.Type, buildColumn)
	}
	p := newPlan(t.Name, s)
	plans.Store(k, p)
	return p, nil
}

func (t Table[R]) planFor(kinds ...kind) (*plan, error) {
	p, err := t.plan()
	if err != nil {
		return nil, fmt.Errorf("tidemark/postgres: %w", err)
	}
	for _, k := range kinds {
		if p.kind == k {
			return p, nil
		}
	}
	if p.kind == rollup {
		return nil, fmt.Errorf("tidemark/postgres: row type %s of table %q has sums, so rows can only be added to it, not put", p.schema.Type, t.Name)
	}
	return nil, fmt.Errorf("tidemark/postgres: row type %s of table %q has no sums, so rows can only be put into it, not added", p.schema.Type, t.Name)
}

func newPlan(name string, s *row.Schema) *plan {
	p := &plan{schema: s}
	for _, fields := range [][]row.Field{s.Keys, s.Sums, s.Plain} {
		for i := range fields {
			f := &fields[i]
			p.columns = append(p.columns, column{f.Name, types[f.Kind], f.Role == row.Key, f.Nullable, f})
		}
	}
	switch {
	case len(s.Sums) > 0:
		p.kind = rollup
		p.columns = append(p.columns, column{name: row.Contributions, typ: types[row.Int]})
	case len(s.Keys) > 0:
		p.kind = keyed
		p.columns = append(p.columns, column{name: ownerColumn, typ: types[row.Text]})
	default:
		p.kind = mirrored
		p.columns = append(p.columns, column{name: ownerColumn, typ: types[row.Text], key: true})
	}
	p.write(`"` + name + `"`)
	return p
}

func (p *plan) keys() []column {
	if p.kind == mirrored {
		return p.owner()
	}
	return p.columns[:len(p.schema.Keys)]
}

func (p *plan) owner() []column { return p.columns[len(p.columns)-1:] }

// owned is what tells a row and its owner.
func (p *plan) owned() []column {
	if p.kind == mirrored {
		return p.owner()
	}
	return append(append([]column{}, p.keys()...), p.owner()...)
}

// write writes the statements.
func (p *plan) write(table string) {
	p.create = "create table " + table + " (\n\t" + list(p.columns, ",\n\t", column.definition) +
		",\n\tprimary key (" + list(p.keys(), ", ", column.quoted) + ")\n)"
	insertAs := func(more, value string) string {
		return "insert into " + table + " as t (" + list(p.columns, ", ", column.quoted) + more + ")\nselect *" + value + " from " +
			unnest(p.columns) + "\non conflict (" + list(p.keys(), ", ", column.quoted) + ") do "
	}
	insert := insertAs("", "")
	match := func(by []column) string {
		return list(by, " and ", func(c column) string { return "t." + c.quoted() + " = d." + c.quoted() })
	}
	removal := func(by []column) string {
		return "delete from " + table + " t using " + unnest(by) + " as d (" + list(by, ", ", column.quoted) + ")\nwhere " + match(by)
	}
	if p.kind == rollup {
		sums := p.columns[len(p.schema.Keys):]
		p.add = insert + "update set " + list(sums, ", ", func(c column) string {
			return c.quoted() + " = t." + c.quoted() + " + excluded." + c.quoted()
		})
		// A row that was emptied goes. It raises where the row is not clean: fewer than
		// no contributions, or none and a sum that is left. (A CHECK would be tried on the
		// row as proposed for insertion, before the conflict is found, and refuse every
		// negative delta.)
		p.emptied = "with gone as (\n" + removal(p.keys()) + ` and t."` + row.Contributions + `" <= 0` +
			"\nreturning " + list(sums, " and ", func(c column) string { return "t." + c.quoted() + " = 0" }) + " as clean\n)\n" +
			"select 1 / (case when bool_and(clean) is false then 0 else 1 end) from gone"
		return
	}
	set := p.columns[len(p.keys()):]
	if p.kind == mirrored {
		set = p.columns[:len(p.columns)-1]
	} else {
		p.index = "create index on " + table + ` ("` + ownerColumn + `")`
	}
	update := "update set " + list(set, ", ", func(c column) string { return c.quoted() + " = excluded." + c.quoted() })
	mark := column{name: buildColumn}.quoted()
	p.put = insert + update
	p.putMarked = insertAs(", "+mark, fmt.Sprintf(", $%d::bigint", len(p.columns)+1)) + update + ", " + mark + " = excluded." + mark
	p.load = "copy " + table + " (" + list(p.columns, ", ", column.quoted) + ") from stdin with (format binary)"
	// The rows are found by their place, so that the search ends at the limit.
	p.sweep = "delete from " + table + " where ctid = any (array(\n\tselect ctid from " + table + " where " + mark + " is distinct from $1 limit $2))"
	p.removeRows = removal(p.owned())
	p.removeOwners = removal(p.owner())
}

// definition is the column's in CREATE TABLE. Keys compare byte by byte: that is
// fastest, and no update of the system's locales can spoil the index.
func (c column) definition() string {
	s := c.quoted() + " " + c.typ.sql
	if c.typ.sql == "text" && (c.key || c.name == ownerColumn) {
		s += ` collate "C"`
	}
	if !c.null {
		s += " not null"
	}
	return s
}

func unnest(columns []column) string {
	n := 0
	return "unnest(" + list(columns, ", ", func(c column) string {
		n++
		return fmt.Sprintf("$%d::%s[]", n, c.typ.sql)
	}) + ")"
}

func list(columns []column, separator string, text func(column) string) string {
	parts := make([]string, len(columns))
	for i, c := range columns {
		parts[i] = text(c)
	}
	return strings.Join(parts, separator)
}
