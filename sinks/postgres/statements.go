package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// statements are the statements that this package has prepared on one connection.
//
// Pgx has a cache of its own, which this package doesn't use inside a transaction. It
// goes by the text alone, and prepares before the first statement of a batch is run:
// before the search_path is set and before a table of the same batch exists. A
// statement of one generation would then run with the parameter types of another's
// tables. Here a statement is known by its generation as well, and is prepared at its
// place in the transaction.
type statements struct {
	known  map[statementKey]*statement
	names  int64
	round  int64 // number of the transaction
	forget bool  // before the next transaction
}

type statementKey struct {
	place      string
	generation int64
	sql        string
}

type statement struct {
	*pgconn.StatementDescription
	round int64 // in which it was prepared
}

// maxStatements bounds what a handler that builds its SQL text can leave on the
// server; handlers should use parameters instead.
const maxStatements = 250

// statementsOf finds the connection's statements, which go when it goes.
func statementsOf(conn *pgx.Conn) *statements {
	data := conn.PgConn().CustomData()
	s, ok := data["tidemark"].(*statements)
	if !ok {
		s = &statements{known: map[statementKey]*statement{}}
		data["tidemark"] = s
	}
	s.round++
	return s
}

func (s *statements) prepare(ctx context.Context, conn *pgx.Conn, k statementKey) (*statement, error) {
	if len(s.known) >= maxStatements {
		s.forget = true
	}
	if err := s.forgetAll(ctx, conn); err != nil {
		return nil, err
	}
	sd, err := conn.Prepare(ctx, s.name(), k.sql)
	if err != nil {
		return nil, err
	}
	st := &statement{sd, s.round}
	s.known[k] = st
	return st, nil
}

// add notes a statement that is about to be prepared by the way.
func (s *statements) add(k statementKey, oids []uint32) *statement {
	s.forget = s.forget || len(s.known) >= maxStatements
	st := &statement{&pgconn.StatementDescription{Name: s.name(), SQL: k.sql, ParamOIDs: oids}, s.round}
	s.known[k] = st
	return st
}

func (s *statements) name() string {
	s.names++
	return fmt.Sprintf("tidemark_%d", s.names)
}

// forgetAll deallocates, where that is due.
func (s *statements) forgetAll(ctx context.Context, conn *pgx.Conn) error {
	if !s.forget {
		return nil
	}
	for k, st := range s.known {
		if err := conn.Deallocate(ctx, st.Name); err != nil {
			return err
		}
		delete(s.known, k)
	}
	s.forget = false
	return nil
}

// stale reports whether an error may come from a table that was altered after a
// statement was prepared: a changed result type (0A000), names and types (42).
func stale(code string) bool {
	return code == featureNotSupported || len(code) == 5 && code[:2] == "42" && code != insufficientPrivilege
}
