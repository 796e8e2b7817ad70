package postgres_test

import (
	"testing"

	"github.com/tidemark-go/tidemark/projector"
)

// A sink that was set back to before a switch, under the same term, fences whoever knows of
// the switch. A caller that says itself that the generation is live, or is not, has a fault.
func TestSetBack(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create, add(counts, nil, one))
	next := d.built(t, live, 2, counts.Create)
	d.exec(t, "create table public.copied as table tidemark.checkpoints")
	retired, now := d.switched(t, live, next)
	d.exec(t, `begin; alter schema model rename to model$2; alter schema model$1 rename to model;
delete from tidemark.checkpoints; insert into tidemark.checkpoints table public.copied; commit`)

	_, err := commit(t, d.sink, now, add(counts, nil, one))
	wantFenced(t, err)
	wantFenced(t, d.sink.Switch(t.Context(), now, retired))
	wantFenced(t, d.sink.Discard(t.Context(), retired))
	_, err = d.sink.Begin(t.Context(), now, 3)
	wantFenced(t, err)

	err = d.sink.Discard(t.Context(), live)
	wantError(t, err, "live")
	wantClass(t, d.sink, err, projector.Fatal)
	_, err = d.sink.Begin(t.Context(), next, 3)
	wantError(t, err, "given as the live one")
	wantClass(t, d.sink, err, projector.Fatal)
	equal(t, "sum", d.text(t, countsN), "1")
	equal(t, "generations", d.rows(t, "select generation, phase from tidemark.checkpoints order by 1"), "1 live\n2 building")
}
