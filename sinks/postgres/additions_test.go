package postgres_test

import (
	"context"
	"strings"
	"testing"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// What people have made in the live schema would go with it: it is refused by name, at
// Begin and at the switch, and only that.
func TestAdditionsRefused(t *testing.T) {
	for name, c := range map[string]struct{ make, lost string }{
		"table":            {"create table model.mine (id bigserial primary key, n int check (n > 0))", "table mine"},
		"partitioned":      {"create table model.mine (n int) partition by range (n); create table model.mine_1 partition of model.mine default", "table mine"},
		"foreign table":    {"create foreign data wrapper w; create server s foreign data wrapper w; create foreign table model.mine (n int) server s", "table mine"},
		"sequence":         {"create sequence model.mine", "sequence mine"},
		"function":         {"create function model.mine(model.counts, int) returns int language sql as 'select 1'", "function mine(counts, int4)"},
		"overloaded":       {"create function model.f(text) returns int language sql as 'select 1'", "function f(text)"},
		"procedure":        {"create procedure model.mine() language sql as 'select 1'", "function mine()"},
		"rule":             {"create rule mine as on insert to model.counts do also notify mine", "rule mine on counts"},
		"check":            {"alter table model.counts add constraint mine check (n < 100)", "constraint mine on counts"},
		"unique":           {"alter table model.counts add constraint mine unique (n)", "constraint mine on counts"},
		"foreign key":      {"create table public.far (n bigint primary key); alter table model.counts add constraint mine foreign key (n) references public.far", "constraint mine on counts"},
		"column":           {"alter table model.counts add mine int", "column mine of counts"},
		"column and check": {"alter table model.counts add mine int constraint positive check (mine > 0)", "column mine of counts, constraint positive on counts"},
		"trigger": {
			"create function public.g() returns trigger language plpgsql as 'begin return new; end'; create trigger mine before insert on model.made for each row execute function public.g()",
			"trigger mine on made",
		},
		// Not refused: it can't be told from what is made as time goes by, or goes on.
		"partition of a model's": {"create table model.later partition of model.parted for values from (10) to (20)", ""},
		"index":                  {"create unique index on model.counts (n)", ""},
		"default":                {"alter table model.made alter n set default 7", ""},
		"in another schema":      {"create table public.mine (n int)", ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			live := d.acquired(t, counts.Create, setup)
			next := d.built(t, live, 2, counts.Create, setup)
			d.exec(t, c.make)
			_, err := d.sink.Begin(t.Context(), live, 3)
			if c.lost == "" {
				must(t, err)
				must(t, d.sink.Switch(t.Context(), live, next))
				return
			}
			lost := `in schema "model" would go with the old tables: ` + c.lost + " ("
			wantRebuildError(t, d.sink, err, lost, "Setup")
			wantRebuildError(t, d.sink, d.sink.Switch(t.Context(), live, next), lost)
		})
	}
}

// setup makes a thing of each kind.
func setup(ctx context.Context, tx *postgres.Tx) error {
	_, err := tx.Exec(ctx, `create table made (id bigserial primary key, n int unique check (n > 0) references made (n));
create table parted (n int) partition by range (n); create table part partition of parted for values from (0) to (10);
create sequence free; create view seen as select * from made;
create function f(made) returns int language sql as 'select 1'; create function f(int) returns int language sql as 'select 1';
create function g() returns trigger language plpgsql as 'begin return new; end';
create trigger t before insert on made for each row execute function g();
create rule r as on delete to made do also notify made`)
	return err
}

// What the projection has made itself is none of it, whatever a new Version leaves out, and
// whenever it was made.
func TestAdditionsOfTheProjection(t *testing.T) {
	t.Run("left out", func(t *testing.T) {
		d := newDatabase(t)
		live := d.acquired(t, counts.Create, orders.Create, setup)
		next := d.built(t, live, 2, counts.Create, run("create table other (n int)"))
		retired, now := d.switched(t, live, next)
		d.switched(t, now, retired) // and back
	})
	for name, c := range map[string]struct {
		later func(context.Context, *postgres.Tx) error
		more  string
	}{
		"table of a rebuild by Reset":       {orders.Create, "table orders"},
		"mark of a rebuild in place":        {run("alter table made add tidemark_build bigint"), ""},
		"handler":                           {run("create table late (n int unique check (n > 0))"), "table late"},
		"handler's column":                  {run("alter table made add late int"), "column late of made"},
		"handler's function":                {run("create or replace function late() returns int language sql as 'select 1'"), "function late()"},
		"handler, queued":                   {queue("create table if not exists late (n int)"), "table late"},
		"handler's block":                   {run("do $$ begin create table late (n int); end $$"), "table late"},
		"handler, behind another statement": {run("select 1; create table late (n int)"), "table late"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			live := d.acquired(t, counts.Create, setup)
			const made = "select array_to_string(made, ', ') from tidemark.checkpoints where generation = 1"
			before := d.text(t, made)
			d.exec(t, "create table model.mine (n int)")
			live, err := commit(t, d.sink, live, c.later)
			must(t, err)
			if after := d.text(t, made); !strings.Contains(after, c.more) || strings.Contains(after, "mine") || strings.Contains(before, "late") {
				t.Errorf("noted: %s", after)
			}
			_, err = d.sink.Begin(t.Context(), live, 2)
			wantRebuildError(t, d.sink, err, `would go with the old tables: table mine (`)
			d.exec(t, "drop table model.mine")
			next := d.built(t, live, 2, counts.Create)
			retired, now := d.switched(t, live, next)
			equal(t, "phases", line(retired.Phase, now.Phase), line(projector.Retired, projector.Live))
		})
	}
}
