package postgres_test

import (
	"context"
	"testing"
)

// A right that another than the owner has granted, and that was revoked since, does not come
// back with a retired generation; what is granted now is.
func TestGrantedOnward(t *testing.T) {
	d := newDatabase(t)
	other, third, reader := d.newRole(t), d.newRole(t), d.newRole(t)
	t.Cleanup(func() { // before the roles go
		_, err := d.Exec(context.WithoutCancel(t.Context()), "drop schema if exists model, model$1, model$2 cascade")
		must(t, err)
	})
	live := d.acquired(t, orders.Create, counts.Create)
	for _, sql := range []string{
		"grant usage on schema model to " + other + " with grant option",
		"grant usage on schema model to " + third,
		"grant select, insert on model.counts to " + other + " with grant option",
		"grant select (id) on model.orders to " + other + " with grant option",
		"set role " + other + "; grant select on model.counts to " + third + " with grant option; grant select, insert on model.counts to " + reader +
			"; grant usage on schema model to " + reader + "; grant select (id) on model.orders to " + reader + "; reset role",
		"set role " + third + "; grant select on model.counts to public; reset role",
	} {
		d.exec(t, sql)
	}
	const given = `select * from (
	select relname::text, grantee::regrole::text, privilege_type, is_grantable, '' from pg_class c, aclexplode(relacl) where relnamespace = 'model'::regnamespace and grantee <> relowner
	union select '', grantee::regrole::text, privilege_type, is_grantable, '' from pg_namespace, aclexplode(nspacl) where nspname = 'model' and grantee <> nspowner
	union select relname, grantee::regrole::text, privilege_type, is_grantable, attname from pg_class c join pg_attribute on attrelid = c.oid, aclexplode(attacl) where relnamespace = 'model'::regnamespace
) x order by x::text`
	before := d.rows(t, given)
	next := d.built(t, live, 2, orders.Create, counts.Create)
	retired, now := d.switched(t, live, next)
	equal(t, "carried over", d.rows(t, given), before)
	for _, sql := range []string{
		"revoke select on model.counts from public, " + reader,
		"revoke usage on schema model from " + reader,
		"revoke select (id) on model.orders from " + reader,
	} {
		d.exec(t, sql)
	}
	want := d.rows(t, given)
	d.switched(t, now, retired)
	equal(t, "going back", d.rows(t, given), want)
}
