package postgres_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// frozenCreator holds the lock under which the store and new projections are made, and does
// nothing any more.
func frozenCreator(t *testing.T, d *database) {
	t.Helper()
	config := d.Config().ConnConfig
	conn, err := pgx.ConnectConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	_, err = conn.Exec(t.Context(), "begin; select pg_advisory_xact_lock(x'746964656d61726b'::bigint)")
	must(t, err)
}

// A client that is frozen while it makes the store, or a projection, holds up no other.
func TestFrozenCreator(t *testing.T) {
	acquires := func(prepare func(*testing.T, *database)) func(*testing.T) bool {
		return func(t *testing.T) bool {
			t.Parallel()
			d := newDatabase(t)
			prepare(t, d)
			frozenCreator(t, d)
			_, err := acquire(soon(t, 4*time.Second), d.sink, "another", "me")
			return err == nil
		}
	}
	withAndWithoutEach(t, fault.EndBlockers, map[string]func(*testing.T) bool{
		"store":      acquires(func(*testing.T, *database) {}),
		"projection": acquires(func(t *testing.T, d *database) { d.acquired(t) }),
	})
}

// A role that may not end it says that, and not that it may not create.
func TestFrozenCreatorWithoutTheRight(t *testing.T) {
	d := newDatabase(t)
	frozenCreator(t, d)
	sink := postgres.New(d.pool(t, d.role(t, "")))
	t.Parallel()
	_, err := acquire(soon(t, 4*time.Second), sink, model, "me")
	wantError(t, err, "pg_signal_backend")
	if strings.Contains(err.Error(), "missing") || strings.Contains(err.Error(), "belongs to another") {
		t.Errorf("error names another reason: %v", err)
	}
}

// Of many that wait for it none is ended but the frozen one.
func TestFrozenCreatorInCrowd(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	d.acquired(t)
	frozenCreator(t, d)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			if _, err := acquire(soon(t, 10*time.Second), d.sink, fmt.Sprint("another", i%3), fmt.Sprint("crowd ", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	equal(t, "terms", d.text(t, "select string_agg(term::text, ' ') from tidemark.checkpoints where projection <> 'model'"), "2 2 2")
}
