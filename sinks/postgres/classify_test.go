package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func TestClassify(t *testing.T) {
	s := postgres.New(nil)
	for codes, want := range map[string]projector.Class{
		"08000 08006 40001 40P01 40003 53100 53200 53300 57014 57P01 57P02 57P03 57P05 25006 25P03 55P03": projector.Transient,
		"28000 28P01 3D000 3F000 42501 42P01 42703 42601 42804 57P04 58030 XX000 XX001 F0000":             projector.Fatal,
		"21000 22003 22012 22021 22P02 22P05 23502 23505 23514 25P02 2D000 54000 0A000 P0001 55006":       projector.Poison,
	} {
		for code := range strings.FieldsSeq(codes) {
			err := error(&pgconn.PgError{Code: code})
			wantClass(t, s, err, want)
			wantClass(t, s, fmt.Errorf("a handler's: %w", errors.Join(errors.New("x"), err)), want)
		}
	}
	wantClass(t, s, errors.New("anything else"), projector.Poison)
	wantClass(t, s, context.DeadlineExceeded, projector.Transient)
	// A handler may talk to others; their trouble is not this sink's.
	wantClass(t, s, &net.OpError{Op: "dial", Err: errors.New("refused")}, projector.Poison)
	wantClass(t, s, io.ErrUnexpectedEOF, projector.Poison)
}

// A connection that can't be had or breaks is worth a retry, and no error shows a password.
func TestConnectionErrors(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	const password = "very-secret"
	for _, c := range []struct {
		name  string
		f     func(*pgxpool.Config)
		class projector.Class
	}{
		{"nobody there", func(c *pgxpool.Config) { c.ConnConfig.Port = 1 }, projector.Transient},
		{"no such database", func(c *pgxpool.Config) { c.ConnConfig.Database = "missing" }, projector.Fatal},
		{"no such role", func(c *pgxpool.Config) { c.ConnConfig.User = "missing" }, projector.Fatal},
		{"cut off", through(func(c net.Conn) net.Conn { return cut{c} }), projector.Transient},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := postgres.New(d.pool(t, func(config *pgxpool.Config) {
				config.ConnConfig.Password = password
				config.ConnConfig.Fallbacks = nil
				c.f(config)
			}))
			check := func(err error) {
				t.Helper()
				wantError(t, err, "tidemark/postgres: ")
				wantClass(t, s, err, c.class)
				if strings.Contains(fmt.Sprintf("%v %+v", err, err), password) {
					t.Errorf("the password is in: %v", err)
				}
			}
			_, err := acquire(t.Context(), s, model, "me")
			check(err)
			_, err = s.Load(t.Context(), model, 1)
			check(err)
			_, err = commit(t, s, cp)
			check(err)
		})
	}
}

// cut is a connection that ends at once.
type cut struct{ net.Conn }

func (c cut) Read([]byte) (int, error) {
	_ = c.Close()
	return 0, io.EOF
}

// Whatever a handler makes of it, a connection that breaks under it is the reason.
func TestConnectionBreaksUnderHandler(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	_, err := commit(t, d.sink, cp, func(ctx context.Context, tx *postgres.Tx) error {
		var pid int
		if err := tx.QueryRow(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
			return err
		}
		d.text(t, "select pg_terminate_backend($1)", pid)
		if _, err := tx.Exec(ctx, "select 1"); err == nil {
			t.Error("no error")
		}
		return errors.New("the handler's own words")
	})
	wantError(t, err, "the handler's own words")
	wantClass(t, d.sink, err, projector.Transient)
}
