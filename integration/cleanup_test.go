package integration_test

import (
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

// A reader whose transaction has seen the replaced model keeps it from being removed, and
// nothing else from happening: rebuilds go on, and the end of the stream ends Run.
func TestReaderOfARetiredGeneration(t *testing.T) {
	t.Parallel()
	r := newRebuilder(t, inPostgres, 200)
	g := r.start(projector.Options{KeepRetired: -1, StopOnReplace: true, Reconcile: small})
	r.exact(g)
	m := r.model.(*postgresModel)
	tx, err := m.pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "select from order_ledger.orders limit 1")
	must(t, err)
	places := func() int64 {
		return selectOne[int64](t, m.pool, `select count(*) from pg_namespace where nspname like 'order\_ledger%'`)
	}

	must(t, g.Rebuild(t.Context()))
	must(t, g.Rebuild(t.Context())) // beside the one that can't go yet
	for range 20 {
		must(t, r.writer.step(t.Context()))
	}
	r.exact(g)
	if n := places(); n < 2 {
		t.Errorf("there are %d places, though a reader is in one that is not live", n)
	}
	must(t, tx.Rollback(t.Context()))
	until(t, 30*time.Second, "what is retired is removed", func() bool { return places() == 1 })

	tx, err = m.pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), "select from order_ledger.orders limit 1")
	must(t, err)
	must(t, g.Rebuild(t.Context()))
	must(t, r.db.Collection("orders").Drop(t.Context()))
	ends[*projector.ReplacedError](t, g)
	if n := places(); n != 2 {
		t.Errorf("there are %d places: the reader was in nothing's way", n)
	}
}
