package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidemark-go/tidemark/projector"
)

// missingIndexes writes the statements for the indexes that someone has made on the live
// tables (schema $1) and that the tables of the same name in schema $2 lack, where these
// have the columns. What stands behind the table's name in the definition is the same in
// all schemas.
const missingIndexes = `
with indexes as (
	select n.nspname, t.oid as t, t.relname as t_name, c.relname as name, indexrelid, indisunique,
		substr(pg_get_indexdef(indexrelid), length(format('CREATE %sINDEX %I ON %I.%I ', case when indisunique then 'UNIQUE ' else '' end, c.relname, n.nspname, t.relname)) + 1) as rest
	from pg_index join pg_class c on c.oid = indexrelid join pg_class t on t.oid = indrelid join pg_namespace n on n.oid = t.relnamespace
	where n.nspname in ($1, $2) and t.relkind in ('r', 'm') and c.relkind = 'i' and indisvalid and not indisprimary
)
select format('create %sindex %I on %I.%I ', case when f.indisunique then 'unique ' else '' end, f.name, $2::text, f.t_name) || f.rest
from indexes f join pg_class t on t.relname = f.t_name and t.relkind in ('r', 'm') and t.relnamespace = (select oid from pg_namespace where nspname = $2)
where f.nspname = $1
and not exists (select from pg_constraint where conindid = f.indexrelid)
and not exists (select from indexes i where i.t = t.oid and (i.name = f.name or i.rest = f.rest and i.indisunique >= f.indisunique))
and not exists (
	select from pg_depend join pg_attribute a on a.attrelid = refobjid and a.attnum = refobjsubid
	where classid = 'pg_class'::regclass and objid = f.indexrelid and refclassid = 'pg_class'::regclass and refobjid = f.t and refobjsubid > 0
	and not exists (select from pg_attribute where attrelid = t.oid and attname = a.attname and not attisdropped))
order by 1`

// carryIndexes gives a generation's empty tables the indexes that people have made on the
// live ones, for their queries: at the switch it would take too long.
func (tx *Tx) carryIndexes(ctx context.Context) error {
	rows, err := tx.Query(ctx, missingIndexes, tx.projection, tx.place)
	if err != nil {
		return err
	}
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, sql); err != nil {
			if c := code(err); c == "" || classify(c) == projector.Transient {
				return err
			}
			return &projector.RebuildError{Projection: tx.projection, Err: fmt.Errorf(
				"an index of the live table can't be made on the new one: drop it there, or %s:\n%s: %w", insteadOf, sql, err)}
		}
	}
	return nil
}
