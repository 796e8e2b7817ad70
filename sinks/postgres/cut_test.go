package postgres_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// severed breaks the connection at a write, before it or when its answer is there.
type severed struct {
	net.Conn
	*cutter
	lost *atomic.Bool
}

type cutter struct {
	left   atomic.Int64 // writes until then; below 0: never
	answer bool
}

func (c severed) Write(b []byte) (int, error) {
	if n := c.left.Add(-1); n == 0 {
		if !c.answer {
			_ = c.Close()
			return 0, net.ErrClosed
		}
		c.lost.Store(true)
	}
	return c.Conn.Write(b)
}

func (c severed) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && c.lost.Load() {
		_ = c.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// Begin, Switch and Discard happen as a whole or not at all, wherever they are cut off.
func TestCutOff(t *testing.T) {
	type op = func(context.Context, *postgres.Sink) error
	for name, prepare := range map[string]func(*testing.T, *database) op{
		"begin": func(t *testing.T, d *database) op {
			live := d.acquired(t, counts.Create)
			d.exec(t, "create schema model$2; create table model$2.leftover ()")
			return func(ctx context.Context, s *postgres.Sink) error {
				_, err := s.Begin(ctx, live, 2)
				return err
			}
		},
		"switch": func(t *testing.T, d *database) op {
			live := d.acquired(t, counts.Create, add(counts, nil, one))
			next := d.built(t, live, 2, counts.Create)
			d.exec(t, "grant usage on schema model to public; grant select on model.counts to public; comment on table model.counts is 'c'")
			return func(ctx context.Context, s *postgres.Sink) error { return s.Switch(ctx, live, next) }
		},
		"discard": func(t *testing.T, d *database) op {
			next := d.built(t, d.acquired(t, counts.Create), 2, counts.Create)
			return func(ctx context.Context, s *postgres.Sink) error { return s.Discard(ctx, next) }
		},
	} {
		for _, answer := range []bool{false, true} {
			t.Run(map[bool]string{false: name + "/request lost", true: name + "/answer lost"}[answer], func(t *testing.T) {
				t.Parallel()
				d := newDatabase(t)
				do := prepare(t, d)
				c := &cutter{answer: answer}
				c.left.Store(-1)
				pool := d.pool(t, func(config *pgxpool.Config) {
					config.MaxConns = 1
					through(func(conn net.Conn) net.Conn { return severed{conn, c, new(atomic.Bool)} })(config)
				})
				sink := postgres.New(pool)
				before, cuts := d.state(t), int64(0)
				for {
					must(t, pool.Ping(t.Context()))
					c.left.Store(cuts + 1)
					err := do(t.Context(), sink)
					reached := c.left.Swap(-1) <= 0
					after := d.state(t)
					if !reached {
						must(t, err)
						if after == before {
							t.Errorf("it did nothing:\n%s", after)
						}
						break
					}
					// A pool may find out that the connection is gone after the last answer.
					if err != nil {
						wantClass(t, sink, err, projector.Transient)
					}
					if after != before {
						if !answer {
							t.Errorf("cut off at write %d it left\n%s\nbefore it was\n%s", cuts+1, after, before)
						}
						break
					}
					cuts++
				}
				if cuts < 5 {
					t.Errorf("only %d places to cut at were seen", cuts)
				}
				t.Logf("%d places; at last\n%s", cuts, d.state(t))
			})
		}
	}
}

// state is all that operations on generations change.
func (d *database) state(t *testing.T) string {
	t.Helper()
	return d.rows(t, `
select concat_ws(' ', 'checkpoint', generation, term, sequence, phase, place, md5(body)) from tidemark.checkpoints
union all
select concat_ws(' ', 'schema', nspname, nspacl) from pg_namespace where nspname like 'model%'
union all
select concat_ws(' ', 'table', relname, relnamespace::regnamespace, relacl, obj_description(oid, 'pg_class')) from pg_class
where relkind = 'r' and relnamespace in (select oid from pg_namespace where nspname like 'model%')
order by 1`)
}
