package postgres_test

import (
	"testing"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// A schema of the name that the switch gives to the live one would be found at the end of
// the rebuild only: Begin looks for it.
func TestLeftoverOfTheLiveOne(t *testing.T) {
	const schemas = "select string_agg(nspname, ' ' order by nspname) from pg_namespace where nspname like 'model%'"
	// leftover starts over, but leaves the retired generation's schema.
	leftover := func(t *testing.T) (*database, projector.Checkpoint) {
		d := newDatabase(t)
		live := d.acquired(t, counts.Create)
		next := d.built(t, live, 2, counts.Create)
		d.switched(t, live, next)
		d.exec(t, "drop schema model cascade; delete from tidemark.checkpoints")
		return d, d.acquired(t, counts.Create, add(counts, nil, one))
	}
	t.Run("ours", func(t *testing.T) {
		d, live := leftover(t)
		equal(t, "schemas", d.text(t, schemas), "model model$1")
		next := d.built(t, live, 2, counts.Create, add(counts, nil, two))
		equal(t, "schemas", d.text(t, schemas), "model model$2")
		d.switched(t, live, next)
		equal(t, "old rows", d.rows(t, "select status, n from model$1.counts order by 1"), "open 1")
	})
	t.Run("of others", func(t *testing.T) {
		for name, make := range map[string]string{
			"view upon it":     "create view public.upon as select * from model$1.counts",
			"other checkpoint": "insert into tidemark.checkpoints (projection, generation, term, sequence, owner, phase, place, body) values ('x', 1, 1, 1, '', 'retired', 'model$1', '')",
		} {
			t.Run(name, func(t *testing.T) {
				d, live := leftover(t)
				d.exec(t, make)
				_, err := d.sink.Begin(t.Context(), live, 2)
				wantRebuildError(t, d.sink, err, `drop schema "model$1" cascade`)
				equal(t, "schemas", d.text(t, schemas), "model model$1")
				equal(t, "generations", d.text(t, "select count(*) from tidemark.checkpoints where projection = 'model'"), "1")
			})
		}
	})
	t.Run("another role's", func(t *testing.T) {
		d, live := leftover(t)
		d.exec(t, "alter table model$1.counts owner to "+d.newRole(t))
		config := d.role(t, "grant usage on schema tidemark, model to %s; grant select, insert, update, delete on tidemark.checkpoints to %[1]s; alter schema model owner to %[1]s; alter schema model$1 owner to %[1]s")
		d.exec(t, "grant create on database "+d.Config().ConnConfig.Database+" to "+d.Config().ConnConfig.Database+"_role")
		_, err := postgres.New(d.pool(t, config)).Begin(t.Context(), live, 2)
		wantRebuildError(t, d.sink, err, `drop schema "model$1" cascade`)
		equal(t, "schemas", d.text(t, schemas), "model model$1")
	})
}
