package postgres

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// carryOver gives the relations in schema place what those of the same name in schema
// live were given by others: owners where this role may, grants on schema, relations and
// columns, default privileges and comments. What place has beyond that, from its Setup
// say, it keeps, unless exact asks for the rights and comments of live and no others: a
// retired generation has those of its own time, and a right that was revoked since must
// not come back with it.
func carryOver(ctx context.Context, tx pgx.Tx, live, place string, exact bool) error {
	// Owners come first, as all rights are granted in the owner's name, and the schema's
	// before the relations', whose owners need its CREATE.
	for _, query := range []string{schemaOwner, schemaGrants, relationOwners, relationGrants, columnGrants, defaultGrants, comments} {
		if err := carry(ctx, tx, query, live, place, exact); err != nil {
			return err
		}
	}
	return nil
}

// querier is a transaction, the sink's own or a commit.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// carry runs the statements that a query writes.
func carry(ctx context.Context, tx querier, query, live, place string, exact bool) error {
	rows, err := tx.Query(ctx, query, live, place, exact)
	if err != nil {
		return err
	}
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(statements) == 0 {
		return err
	}
	_, err = tx.Exec(ctx, strings.Join(statements, ";\n"))
	return err
}

// pairs begins each of the queries below, which write statements: $1 is the live schema,
// $2 the other, $3 whether the other's own rights go.
const pairs = `
with args as (
	select $1::text as live, $2::text as place, $3::boolean as exact
), schema as (
	select f.oid as f, t.oid as t, f.nspowner as f_owner, t.nspowner as t_owner, f.nspacl as f_acl, t.nspacl as t_acl, args.*
	from args join pg_namespace f on f.nspname = live join pg_namespace t on t.nspname = place
), relation as (
	select f.oid as f, t.oid as t, f.relowner as f_owner, t.relowner as t_owner, f.relacl as f_acl, t.relacl as t_acl,
		t.relkind as kind, case t.relkind when 'S' then 's'::"char" else 'r' end as acl_kind,
		case t.relkind when 'S' then 'sequence' else 'table' end as word, format('%I.%I', place, t.relname) as name, exact
	from schema join pg_class f on f.relnamespace = schema.f join pg_class t on t.relnamespace = schema.t and t.relname = f.relname
	where f.relkind in ('r', 'p', 'v', 'm', 'f', 'S') and t.relkind in ('r', 'p', 'v', 'm', 'f', 'S') and (f.relkind = 'S') = (t.relkind = 'S')
), attribute as (
	select relation.f, relation.t, f.attnum as f_num, t.attnum as t_num, f.attacl as f_acl, t.attacl as t_acl, f_owner, t_owner,
		name, quote_ident(t.attname) as col, exact
	from relation join pg_attribute f on f.attrelid = relation.f join pg_attribute t on t.attrelid = relation.t and t.attname = f.attname
	where kind <> 'S' and f.attnum > 0 and t.attnum > 0 and not f.attisdropped and not t.attisdropped
)`

// mayBecome is whether this role can give a thing to the role, and still have its rights.
// From PostgreSQL 16 on the first is a right of its own.
func mayBecome(role string) string {
	return `(pg_has_role(` + role + `, 'USAGE') and
	case when current_setting('server_version_num')::int >= 160000 then pg_has_role(` + role + `, 'SET') else true end)`
}

// grants writes what it takes to get from the rights of t to those of f, for rows of
// (target, col, kind in pg_default_acl, owner of t, rights of f, rights of t, exact). A
// right that t has by default privileges alone goes where f has not got it: it was revoked
// there, or given by default later.
//
// The owner can't revoke what another has granted, but for the grant option that it was
// granted with. So, with exact, all that others have granted goes that way (onward), and what f
// has of it is granted by the owner.
func grants(of string) string {
	return pairs + `, target (name, col, kind, owner, f_acl, t_acl, exact) as (` + of + `
), want as (
	select name, col, owner, grantee, privilege_type, bool_or(is_grantable) as grantable from target, aclexplode(f_acl)
	where grantee <> owner group by 1, 2, 3, 4, 5
), granted as (
	select target.*, grantor, grantee, privilege_type, is_grantable, exact and grantor <> owner as onward
	from target, aclexplode(t_acl) where grantee <> owner
), passed as (
	select *, bool_or(onward) over (partition by name, col, privilege_type) as was from granted
), have as (
	select name, col, kind, grantee, privilege_type, bool_or(is_grantable and not was) as grantable, exact
	from passed where not onward group by 1, 2, 3, 4, 5, 7
)
select format('revoke grant option for %s%s on %s from %s cascade', privilege_type, col, name, grantee::regrole::text)
from passed where was and not onward and is_grantable
union all
select format('revoke %s%s on %s from %s cascade', privilege_type, col, name, case grantee when 0 then 'public' else grantee::regrole::text end)
from have where (exact or exists (
	select from schema, pg_default_acl d, aclexplode(defaclacl) a
	where defaclnamespace = schema.t and defaclobjtype = have.kind and a.grantee = have.grantee and a.privilege_type = have.privilege_type))
and not exists (
	select from want w where w.name = have.name and w.col = have.col and w.grantee = have.grantee and w.privilege_type = have.privilege_type)
union all
select format('grant %s%s on %s to %s%s', privilege_type, col, name, case grantee when 0 then 'public' else grantee::regrole::text end,
	case when grantable then ' with grant option' else '' end)
from want where not exists (
	select from have h where h.name = want.name and h.col = want.col and h.grantee = want.grantee and h.privilege_type = want.privilege_type
	and (h.grantable or not want.grantable))`
}

var (
	schemaOwner = pairs + `
select format('alter schema %I owner to %s', place, f_owner::regrole) from schema where f_owner <> t_owner and ` + mayBecome("f_owner")

	schemaGrants = grants(`
	select format('schema %I', place), '', ''::"char", t_owner, coalesce(f_acl, acldefault('n', f_owner)), coalesce(t_acl, acldefault('n', t_owner)), exact
	from schema`)

	// A sequence that belongs to a column goes with its table.
	relationOwners = pairs + `
select format('alter table %s owner to %s', name, relation.f_owner::regrole) from relation, schema
where relation.f_owner <> relation.t_owner and kind <> 'S'
and (has_schema_privilege(relation.f_owner, schema.t, 'CREATE') or (select rolsuper from pg_roles where rolname = current_user))
and ` + mayBecome("relation.f_owner")

	relationGrants = grants(`
	select word || ' ' || name, '', case kind when 'S' then kind else 'r' end, t_owner,
		coalesce(f_acl, acldefault(acl_kind, f_owner)), coalesce(t_acl, acldefault(acl_kind, t_owner)), exact
	from relation`)

	// After the tables', since a table's REVOKE takes the columns' rights as well.
	columnGrants = grants(`
	select 'table ' || name, ' (' || col || ')', ''::"char", t_owner, f_acl, t_acl, exact from attribute`)

	defaultGrants = pairs + `
select format('alter default privileges for role %s in schema %I grant %s on %s to %s%s', defaclrole::regrole, place, privilege_type,
	case defaclobjtype when 'r' then 'tables' when 'S' then 'sequences' when 'f' then 'functions' else 'types' end,
	case grantee when 0 then 'public' else grantee::regrole::text end, case when is_grantable then ' with grant option' else '' end)
from schema join pg_default_acl on defaclnamespace = schema.f, aclexplode(defaclacl)
where pg_has_role(defaclrole, 'USAGE')`

	comments = pairs + `, target (what, f_text, t_text, exact) as (
	select format('schema %I', place), obj_description(f, 'pg_namespace'), obj_description(t, 'pg_namespace'), exact from schema
	union all
	select case kind when 'v' then 'view ' when 'm' then 'materialized view ' when 'f' then 'foreign table ' else word || ' ' end || name,
		obj_description(f, 'pg_class'), obj_description(t, 'pg_class'), exact from relation
	union all
	select 'column ' || name || '.' || col, col_description(f, f_num), col_description(t, t_num), exact from attribute
)
select format('comment on %s is %L', what, f_text) from target
where case when exact then f_text is distinct from t_text else f_text is not null and t_text is null end`
)
