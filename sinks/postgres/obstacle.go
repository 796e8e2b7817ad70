package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidemark-go/tidemark/projector"
)

// insteadOf is the way out where a shadow rebuild has none.
const insteadOf = "use Mode: projector.Reset (or projector.InPlace, for Mirror, Upsert and Refresh), which keeps the tables that are there"

// obstacles is what would prevent the switch from the live generation to the one in
// schema place, or be lost by it, as a RebuildError.
func obstacles(ctx context.Context, tx pgx.Tx, live projector.Checkpoint, place string) error {
	var (
		role, database                 string
		mayCreate, there, owns, filled bool
	)
	err := tx.QueryRow(ctx, `select quote_ident(current_user), quote_ident(current_database()),
	has_database_privilege(current_database(), 'CREATE'), n.oid is not null, coalesce(pg_has_role(nspowner, 'USAGE'), true),
	exists (select from pg_class where relnamespace = n.oid) or exists (select from pg_proc where pronamespace = n.oid)
	or exists (select from pg_type where typnamespace = n.oid)
from (values (true)) v left join pg_namespace n on nspname = $1`, live.Projection).
		Scan(&role, &database, &mayCreate, &there, &owns, &filled)
	if err != nil {
		return err
	}
	refuse := func(format string, args ...any) error {
		return &projector.RebuildError{Projection: live.Projection, Err: fmt.Errorf(format, args...)}
	}
	switch schema := quoted(live.Projection); {
	case !mayCreate:
		return refuse("it would make schema %s, and role %s has no right to create schemas; %s, or run, as a role that may,\ngrant create on database %s to %s",
			quoted(place), role, insteadOf, database, role)
	case !owns:
		return refuse("it would rename schema %s, which belongs to another role; %s, or run, as its owner or a superuser,\nalter schema %s owner to %s",
			schema, insteadOf, schema, role)
	case live.Sequence == 0 && filled:
		return refuse("schema %s is there, and something in it, before the model's first commit; %s, or empty the schema: the tables are made by the rebuild, and take over the schema's grants",
			schema, insteadOf)
	case !there:
		return nil
	}
	upon, err := names(ctx, tx, dependents, live.Projection)
	if err != nil {
		return err
	}
	lost, err := names(ctx, tx, strangers, live.Projection, live.Generation, place)
	if err != nil {
		return err
	}
	var faults []string
	if len(upon) > 0 {
		faults = append(faults, fmt.Sprintf("what depends on the model's tables from outside of schema %s would stay with the old ones: %s (drop it, and create it again after the switch)",
			quoted(live.Projection), strings.Join(upon, ", ")))
	}
	if len(lost) > 0 {
		faults = append(faults, fmt.Sprintf("what was added in schema %s would go with the old tables: %s (drop it or move it to another schema; or create it in the projection's Setup, which runs for each generation)",
			quoted(live.Projection), strings.Join(lost, ", ")))
	}
	if len(faults) > 0 {
		return refuse("%s; or %s", strings.Join(faults, "; "), insteadOf)
	}
	return nil
}

func names(ctx context.Context, tx pgx.Tx, sql string, args ...any) ([]string, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// dependents names what depends on something in schema $1 and is not in it: views and
// their like by their rule, foreign keys, defaults, policies, partitions, columns of a
// table's row type, functions by their arguments or, in SQL's own syntax, their body,
// publications. What is temporary is let be. (A function whose body is a string has no dependency, and sees the new
// tables from the switch on.)
const dependents = `
with schema as (
	select oid from pg_namespace where nspname = $1
), inside (classid, objid) as (
	select 'pg_class'::regclass::oid, oid from pg_class where relnamespace = (select oid from schema)
	union all
	select 'pg_type'::regclass, oid from pg_type where typnamespace = (select oid from schema)
	union all
	select 'pg_proc'::regclass, oid from pg_proc where pronamespace = (select oid from schema)
	union all
	select 'pg_namespace'::regclass, oid from schema -- for a publication of all its tables
), depending as (
	select distinct d.classid, d.objid, d.objsubid,
		case d.classid
		when 'pg_class'::regclass then d.objid
		when 'pg_rewrite'::regclass then (select ev_class from pg_rewrite where oid = d.objid)
		when 'pg_constraint'::regclass then (select nullif(conrelid, 0) from pg_constraint where oid = d.objid)
		when 'pg_attrdef'::regclass then (select adrelid from pg_attrdef where oid = d.objid)
		when 'pg_trigger'::regclass then (select tgrelid from pg_trigger where oid = d.objid)
		when 'pg_policy'::regclass then (select polrelid from pg_policy where oid = d.objid)
		end as relation
	from pg_depend d join inside i on d.refclassid = i.classid and d.refobjid = i.objid
	where d.deptype in ('n', 'a') and (i.classid <> 'pg_namespace'::regclass or d.classid = 'pg_publication_namespace'::regclass)
), placed as (
	select *, case
		when relation is not null then (select relnamespace from pg_class where oid = relation)
		when classid = 'pg_proc'::regclass then (select pronamespace from pg_proc where oid = objid)
		when classid = 'pg_type'::regclass then (select typnamespace from pg_type where oid = objid)
		when classid = 'pg_constraint'::regclass then (select connamespace from pg_constraint where oid = objid)
		when classid = 'pg_statistic_ext'::regclass then (select stxnamespace from pg_statistic_ext where oid = objid)
		end as namespace
	from depending
)
select distinct o.type || ' ' || o.identity
from placed, pg_identify_object(case when classid = 'pg_rewrite'::regclass then 'pg_class'::regclass::oid else classid end,
	case when classid = 'pg_rewrite'::regclass then relation else objid end, objsubid) o
where namespace is distinct from (select oid from schema)
and not exists (select from pg_namespace where oid = namespace and nspname like 'pg\_temp\_%')
order by 1`

// additions names what a schema holds that people rely on and that no switch can carry
// over: tables, views, sequences that are no column's, functions, and what is bound to one
// table, its columns among it. Besides (name) it has the transaction that wrote it last, and
// for a column or a constraint the table. Left out are partitions, which are made as time goes
// by, and what an extension has made. The names are the same whatever the schema's, and the
// search_path.
func additions(schema string) string {
	return `
select case relkind when 'm' then 'materialized view ' when 'v' then 'view ' when 'S' then 'sequence ' else 'table ' end || relname::text as name,
	xmin as since, null as upon
from pg_class c where relkind in ('r', 'p', 'f', 'v', 'm', 'S') and not relispartition and relnamespace = ` + schema + `
and not exists (select from pg_depend where classid = 'pg_class'::regclass and objid = c.oid
	and (deptype = 'e' or relkind = 'S' and deptype in ('a', 'i') and refclassid = 'pg_class'::regclass and refobjsubid > 0))
union all
select 'column ' || attname::text || ' of ' || relname::text, a.xmin, 'table ' || relname::text
from pg_attribute a join pg_class c on c.oid = attrelid
where relkind in ('r', 'p', 'f') and not relispartition and attnum > 0 and not attisdropped and attislocal and attname <> '` + buildColumn + `'
and relnamespace = ` + schema + `
union all
select 'constraint ' || conname::text || ' on ' || relname::text, o.xmin, 'table ' || relname::text
from pg_constraint o join pg_class c on c.oid = conrelid
where contype in ('c', 'f', 'p', 'u', 'x') and conislocal and conparentid = 0 and not relispartition and relnamespace = ` + schema + `
union all
select 'function ' || proname::text || '(' || array_to_string(array(
	select typname::text from unnest(proargtypes) with ordinality u (t, n) join pg_type on pg_type.oid = t order by n), ', ') || ')', xmin, null
from pg_proc f where pronamespace = ` + schema + `
and not exists (select from pg_depend where classid = 'pg_proc'::regclass and objid = f.oid and deptype = 'e')
union all
select 'rule ' || rulename::text || ' on ' || relname::text, r.xmin, null
from pg_rewrite r join pg_class c on c.oid = ev_class where rulename <> '_RETURN' and relnamespace = ` + schema + `
union all
select 'trigger ' || tgname::text || ' on ' || relname::text, g.xmin, null
from pg_trigger g join pg_class c on c.oid = tgrelid where not tgisinternal and relnamespace = ` + schema + `
union all
select 'policy ' || polname::text || ' on ' || relname::text, p.xmin, null
from pg_policy p join pg_class c on c.oid = polrelid where relnamespace = ` + schema + `
union all
select 'row level security of ' || relname::text, xmin, null from pg_class where relrowsecurity and relnamespace = ` + schema
}

// strangers are the additions in schema $1 that its generation ($2) has not made itself
// and that schema $3 has not got. What belongs to a table that is one is not named besides.
var strangers = `
with known (name) as (
	select unnest(made) from tidemark.checkpoints where projection = $1 and generation = $2
	union all
	select name from (` + additions(`(select oid from pg_namespace where nspname = $3)`) + `) there
)
select name from (` + additions(`(select oid from pg_namespace where nspname = $1)`) + `) here
where name not in (select name from known) and (upon is null or upon in (select name from known))
order by 1`

// noteMade is sent at the end of a generation's first commit, noteMore at that of a later one
// that has made something: by a Table that a rebuild in the generation's own place has found
// missing, or by a handler's statement.
var (
	noteMade = `update tidemark.checkpoints set made = array(select name from (` + inPlace + `) a)
where projection = $1 and generation = $2`
	noteMore = `update tidemark.checkpoints set made = made || array(select name from (` + inPlace + `) a
	where since = pg_current_xact_id()::xid and not name = any (made))
where projection = $1 and generation = $2`
	inPlace = additions(`(select oid from pg_namespace where nspname = place)`)
)

// removeLeftover drops a generation's schema that has no checkpoint: the checkpoint
// was removed by hand, or set back without the models. It refuses where something in the
// schema, or upon it, is another's.
func removeLeftover(ctx context.Context, tx pgx.Tx, projection, place string) error {
	var ours bool
	err := tx.QueryRow(ctx, `select pg_has_role(nspowner, 'USAGE')
	and not exists (select from pg_class where relnamespace = n.oid and not pg_has_role(relowner, 'USAGE'))
	and not exists (select from pg_proc where pronamespace = n.oid and not pg_has_role(proowner, 'USAGE'))
	and not exists (select from tidemark.checkpoints where place = nspname)
from (select * from pg_namespace where nspname = $1) n`, place).Scan(&ours)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	upon, err := names(ctx, tx, dependents, place)
	if err != nil {
		return err
	}
	drop := "drop schema " + quoted(place) + " cascade"
	if !ours || len(upon) > 0 {
		return &projector.RebuildError{Projection: projection, Err: fmt.Errorf(
			"schema %s, whose name the rebuild needs, is there and holds things of others, or others depend on it (%s), or another checkpoint names it; look at it, then run\n%s",
			quoted(place), strings.Join(upon, ", "), drop)}
	}
	if _, err := tx.Exec(ctx, ddlPatience); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, drop)
	return err
}
