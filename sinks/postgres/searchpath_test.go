package postgres_test

import (
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

// What somebody has made in public under the name of a system's function or operator is not
// run with the sink's rights.
func TestFunctionsInPublic(t *testing.T) {
	d := newDatabase(t)
	d.exec(t, `create table public.ran (what text)`)
	d.exec(t, `create function public.quote_ident(name) returns text language plpgsql as $$
begin insert into public.ran values ('quote_ident'); return pg_catalog.quote_ident($1::text); end $$`)
	d.exec(t, `create function public.joined(int, text) returns text language plpgsql as $$
begin insert into public.ran values ('||'); return $1::text || $2; end $$`)
	d.exec(t, `create operator public.|| (function = public.joined, leftarg = int, rightarg = text)`)
	equal(t, "control", d.text(t, `select quote_ident(current_user) is not null and 1 || ' ' = '1 '`), "true")
	equal(t, "control", d.text(t, `select string_agg(what, ' ' order by what) from public.ran`), "quote_ident ||")
	d.exec(t, "delete from public.ran")

	live := d.acquired(t, counts.Create)
	next := d.built(t, live, 2, counts.Create)
	retired, live := d.switched(t, live, next)
	live, retired = d.switched(t, live, retired)
	must(t, d.sink.Discard(t.Context(), live))
	thaw, err := d.freeze(t.Context(), retired)
	must(t, err)
	defer thaw()
	_, err = acquire(soon(t, 10*time.Second), d.sink, model, "next")
	must(t, err)
	equal(t, "ran", d.text(t, `select string_agg(distinct what, ' ') from public.ran`), "<null>")
	equal(t, "phase", retired.Phase, projector.Live)
}
