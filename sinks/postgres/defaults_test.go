package postgres_test

import (
	"fmt"
	"testing"
)

// What the live schema gives by default is given to the tables that a rebuild makes.
func TestDefaultPrivileges(t *testing.T) {
	rights := func(t *testing.T, d *database, role string) string {
		t.Helper()
		return d.text(t, `select string_agg(relname || ' ' || privilege_type, ', ' order by relname, privilege_type)
from pg_class, aclexplode(relacl) where relnamespace = 'model'::regnamespace and grantee = $1::text::regrole`, role)
	}
	const defaults = "alter default privileges in schema model grant select on tables to %[1]s; alter default privileges in schema model grant usage on sequences to %[1]s"
	t.Run("first load", func(t *testing.T) {
		d := newDatabase(t)
		reader := d.newRole(t)
		d.exec(t, "create schema model; grant usage on schema model to "+reader)
		d.exec(t, fmt.Sprintf(defaults, reader))
		live, err := acquire(t.Context(), d.sink, model, "me")
		must(t, err)
		next := d.built(t, live, 2, counts.Create, run("create table numbered (id bigserial)"))
		must(t, d.sink.Switch(t.Context(), live, next))
		equal(t, "rights", rights(t, d, reader), "counts SELECT, numbered SELECT, numbered_id_seq USAGE")
	})
	t.Run("new version", func(t *testing.T) {
		d := newDatabase(t)
		reader := d.newRole(t)
		live := d.acquired(t, counts.Create, run("create table secret (n int)"))
		d.exec(t, "grant usage on schema model to "+reader)
		d.exec(t, "grant select on model.counts to "+reader)
		d.exec(t, fmt.Sprintf(defaults, reader))
		next := d.built(t, live, 2, counts.Create, orders.Create, run("create table secret (n int)"))
		d.switched(t, live, next)
		// Secret was made before, and nobody has given it to the reader.
		equal(t, "rights", rights(t, d, reader), "counts SELECT, orders SELECT")
		equal(t, "default privileges", d.text(t, "select count(*) from pg_default_acl where defaclnamespace = 'model'::regnamespace"), "2")
	})
	t.Run("revoked", func(t *testing.T) {
		d := newDatabase(t)
		reader := d.newRole(t)
		d.exec(t, "create schema model")
		d.exec(t, fmt.Sprintf(defaults, reader))
		setup := run("create table secret (n int); grant insert on secret to " + reader)
		live := d.acquired(t, counts.Create, setup)
		equal(t, "rights before", rights(t, d, reader), "counts SELECT, secret INSERT, secret SELECT")
		d.exec(t, "revoke select on model.secret from "+reader)
		next := d.built(t, live, 2, counts.Create, setup)
		retired, now := d.switched(t, live, next)
		equal(t, "rights", rights(t, d, reader), "counts SELECT, secret INSERT")
		d.switched(t, now, retired)
		equal(t, "rights, going back", rights(t, d, reader), "counts SELECT, secret INSERT")
	})
}
