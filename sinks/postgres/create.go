package postgres

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Create implements projector.Model. A table that is there already must have the
// columns and the primary key that the row type asks for; further columns are allowed
// where they have a default, are generated, or may be null. In a model's first commit
// it must be empty as well, since its rows would be counted twice.
func (t Table[R]) Create(ctx context.Context, tx *Tx) error {
	p, err := t.plan()
	if err != nil {
		return fmt.Errorf("tidemark/postgres: %w", err)
	}
	var there bool
	err = tx.QueryRow(ctx, `select exists (select from pg_class where relname = $1 and relnamespace = (select oid from pg_namespace where nspname = $2))`,
		t.Name, tx.place).Scan(&there)
	if err != nil {
		return err
	}
	if there {
		return t.examine(ctx, tx, p)
	}
	tx.makes = true
	tx.enqueue(&item{sql: p.create, oids: none, once: true})
	if p.index != "" {
		tx.enqueue(&item{sql: p.index, oids: none, once: true})
	}
	return tx.flush(ctx)
}

// Clear implements projector.Model. It deletes rather than truncates: a TRUNCATE
// locks readers out until the commit, and one who reads from an older snapshot would
// see an empty table. The rows that are deleted are vacuumed later.
func (t Table[R]) Clear(_ context.Context, tx *Tx) error {
	if _, err := t.plan(); err != nil {
		return fmt.Errorf("tidemark/postgres: %w", err)
	}
	tx.enqueue(&item{sql: `delete from "` + t.Name + `"`, oids: none, once: true})
	return nil
}

// found is a column as the catalogue has it.
type found struct {
	Name     string
	Type     string
	NotNull  bool
	Optional bool // may be left out of an INSERT
	Key      int  // place in the primary key, 0: not in it
}

func (t Table[R]) examine(ctx context.Context, tx *Tx, p *plan) error {
	rows, err := tx.Query(ctx, `
select a.attname::text as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as "notnull",
	not a.attnotnull or a.atthasdef or a.attidentity <> '' as optional,
	coalesce(array_position(i.indkey::int2[], a.attnum) + 1, 0) as key
from pg_class c
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
left join pg_index i on i.indrelid = c.oid and i.indisprimary
where c.relname = $1 and c.relnamespace = (select oid from pg_namespace where nspname = $2)
order by a.attnum`, t.Name, tx.place)
	if err != nil {
		return err
	}
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByName[found])
	if err != nil {
		return err
	}
	if differs := p.differences(columns); len(differs) > 0 {
		return &setupError{fmt.Errorf("tidemark/postgres: table %s.%s does not fit row type %s: %s; rebuild the model under a raised Version, or drop the table",
			tx.place, t.Name, p.schema.Type, strings.Join(differs, "; "))}
	}
	if !tx.first {
		return nil
	}
	var rest bool
	if err := tx.QueryRow(ctx, `select exists (select from "`+t.Name+`")`).Scan(&rest); err != nil {
		return err
	}
	if rest {
		return &setupError{fmt.Errorf("tidemark/postgres: table %s.%s has rows, but the model has no checkpoint that tells what they contain; "+
			"drop the model's schema (drop schema %s cascade) to start over", tx.place, t.Name, pgx.Identifier{tx.place}.Sanitize())}
	}
	return nil
}

// differences tells in words how a table differs from the plan.
func (p *plan) differences(columns []found) (differs []string) {
	add := func(format string, args ...any) { differs = append(differs, fmt.Sprintf(format, args...)) }
	rest := slices.Clone(columns)
	for _, c := range p.columns {
		i := slices.IndexFunc(rest, func(f found) bool { return f.Name == c.name })
		if i < 0 {
			add("column %q is missing", c.name)
			continue
		}
		f := rest[i]
		rest = slices.Delete(rest, i, i+1)
		if f.Type != c.typ.sql {
			add("column %q is %s, not %s", c.name, f.Type, c.typ.sql)
		}
		if c.null && f.NotNull {
			add("column %q is not null, but field %s can be null", c.name, c.field.GoName)
		}
	}
	for _, f := range rest {
		if !f.Optional {
			add("column %q is not in the row type, and an insert can't leave it out", f.Name)
		}
	}
	for i, k := range p.keys() {
		if !slices.ContainsFunc(columns, func(f found) bool { return f.Name == k.name && f.Key == i+1 }) {
			add("the primary key is not (%s)", list(p.keys(), ", ", column.quoted))
			break
		}
	}
	if n := len(slices.DeleteFunc(slices.Clone(columns), func(f found) bool { return f.Key == 0 })); n > len(p.keys()) {
		add("the primary key has %d columns, not %d", n, len(p.keys()))
	}
	return differs
}
