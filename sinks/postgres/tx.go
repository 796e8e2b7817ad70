package postgres

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// Tx is what a handler writes through: everything that goes through it is committed
// together with the checkpoint, or not at all. It is for one goroutine, and for the
// duration of the handler's call.
//
// Unqualified names are those of the model's own schema and nothing else (search_path
// is set to it); name the schema of a table that lives elsewhere, such as an outbox
// that must survive a rebuild.
//
// Statements with parameters are prepared once per connection and generation; build
// no SQL texts with values in them. SAVEPOINT and ROLLBACK TO work, statements that
// end the transaction are refused. A multi-statement script that ends it all the same
// is noticed, but what it has committed itself stays.
type Tx struct {
	conn       *pgx.Conn
	statements *statements
	projection string
	place      string
	generation int64
	mark       string
	build      int64 // what rows are marked with while they are rebuilt in place, else 0

	queue  []*item
	first  bool // the model's first commit
	makes  bool // a statement may have made something that has to be noted
	begun  bool // something has been sent
	last   bool // the next flush is the last one
	reused bool // a statement of the handler ran that was prepared in an earlier transaction
	closed bool

	refused error // the first error that did not come from the server
	err     error // the first error
}

// item is a statement in the queue. Its arguments are either args or, encoded already,
// values with their formats.
type item struct {
	sql     string
	args    []any
	values  [][]byte
	formats []int16
	oids    []uint32 // of the parameters; nil: the server has to be asked
	once    bool     // not prepared, and so planned anew each time
	explain func(error) error
	buffers []*array // to be given back once sent

	st    *statement
	parse bool // it is prepared by the way, in the same round trip
	tag   pgconn.CommandTag
}

// Queue adds a statement to be sent with the ones that follow, at the latest with the
// COMMIT; its result is not reported, its error is, by the commit. This is the fast
// way to write: a handler that only queues costs one round trip, its commit included.
func (tx *Tx) Queue(sql string, args ...any) {
	if err := forbidden(sql); err != nil && tx.refused == nil {
		tx.refused = err
	}
	tx.makes = tx.makes || len(args) == 0 && defining.MatchString(sql)
	tx.enqueue(&item{sql: sql, args: args})
}

// Exec runs a statement now, after those that are queued. Without arguments sql may
// hold several statements, at the price of one more round trip.
func (tx *Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if len(args) == 0 {
		return tx.script(ctx, sql)
	}
	st, args, err := tx.ready(ctx, sql, args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := tx.conn.Exec(ctx, st.Name, args...)
	return tag, tx.fail(tx.discreet(err, st, args))
}

// script runs a text as it is. One of several statements may end the transaction in
// the middle of it, and begin another, which is not the one that the fence guards.
func (tx *Tx) script(ctx context.Context, sql string) (pgconn.CommandTag, error) {
	if err := forbidden(sql); err != nil {
		return pgconn.CommandTag{}, tx.fail(err)
	}
	if err := tx.flush(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	tx.makes = tx.makes || defining.MatchString(sql)
	tag, err := tx.conn.Exec(ctx, sql)
	if err == nil && strings.Contains(strings.TrimRight(sql, "; \t\r\n"), ";") {
		var mark string
		err = tx.conn.QueryRow(ctx, "select coalesce(current_setting('"+markSetting+"', true), '')", pgx.QueryExecModeSimpleProtocol).Scan(&mark)
		if err == nil && mark != tx.mark {
			err = errEnded
		}
	}
	return tag, tx.fail(err)
}

// Query runs a query now, after the statements that are queued. The rows must be
// closed before tx is used again.
func (tx *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	st, args, err := tx.ready(ctx, sql, args)
	if err != nil {
		return nil, err
	}
	rows, err := tx.conn.Query(ctx, st.Name, args...)
	return rows, tx.fail(tx.discreet(err, st, args))
}

// QueryRow is Query for a result of one row; errors come with Scan.
func (tx *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := tx.Query(ctx, sql, args...)
	return oneRow{rows, err}
}

type oneRow struct {
	rows pgx.Rows
	err  error
}

func (r oneRow) Scan(to ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(to...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// CopyFrom writes rows by COPY now, after the statements that are queued, and returns
// their number. It is the fastest way to insert what can't conflict.
func (tx *Tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := tx.flush(ctx); err != nil {
		return 0, err
	}
	n, err := tx.conn.CopyFrom(ctx, table, columns, rows)
	return n, tx.fail(err)
}

// ready flushes the queue and prepares the statement.
func (tx *Tx) ready(ctx context.Context, sql string, args []any) (*statement, []any, error) {
	if err := forbidden(sql); err != nil {
		return nil, nil, tx.fail(err)
	}
	if err := tx.flush(ctx); err != nil {
		return nil, nil, err
	}
	sql, args, err := rewrite(ctx, tx.conn, sql, args)
	if err != nil {
		return nil, nil, tx.fail(err)
	}
	st := tx.lookup(sql)
	if st == nil {
		if st, err = tx.statements.prepare(ctx, tx.conn, tx.key(sql)); err != nil {
			return nil, nil, tx.fail(err)
		}
	}
	return st, args, nil
}

// rewrite applies pgx.NamedArgs and its like.
func rewrite(ctx context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	if len(args) > 0 {
		if r, ok := args[0].(pgx.QueryRewriter); ok {
			return r.RewriteQuery(ctx, conn, sql, args[1:])
		}
	}
	return sql, args, nil
}

func (tx *Tx) key(sql string) statementKey { return statementKey{tx.place, tx.generation, sql} }

func (tx *Tx) lookup(sql string) *statement {
	st := tx.statements.known[tx.key(sql)]
	if st != nil && st.round != tx.statements.round && !ours[sql] {
		tx.reused = true
	}
	return st
}

// ours are the statements that no ALTER TABLE of a model can spoil.
var ours = map[string]bool{begin: true, commit: true, fence(): true, immediate: true}

func (tx *Tx) enqueue(i *item) { tx.queue = append(tx.queue, i) }

// flush sends what is queued, and with it a transaction's beginning.
func (tx *Tx) flush(ctx context.Context) error {
	if err := tx.usable(); err != nil {
		return err
	}
	if !tx.begun {
		if err := tx.statements.forgetAll(ctx, tx.conn); err != nil {
			return tx.fail(failed("forget prepared statements", err))
		}
	}
	queue := tx.queue
	tx.queue = nil
	sent := 0
	for n, i := range queue {
		if i.oids != nil {
			tx.resolve(i)
			continue
		}
		var err error
		if i.sql, i.args, err = rewrite(ctx, tx.conn, i.sql, i.args); err != nil {
			return tx.fail(err)
		}
		if i.st = tx.lookup(i.sql); i.st != nil {
			continue
		}
		// What parameters a handler's statement has must be asked when everything before
		// it has run, since that may create what it names.
		if err := tx.send(ctx, queue[sent:n], false); err != nil {
			return tx.fail(err)
		}
		sent = n
		if i.st, err = tx.statements.prepare(ctx, tx.conn, tx.key(i.sql)); err != nil {
			return tx.fail(err)
		}
	}
	return tx.fail(tx.send(ctx, queue[sent:], tx.last))
}

// resolve finds the statement of an item whose parameters are known.
func (tx *Tx) resolve(i *item) {
	if i.once {
		return
	}
	if i.st = tx.lookup(i.sql); i.st == nil {
		i.st, i.parse = tx.statements.add(tx.key(i.sql), i.oids), true
	}
}

// send is one round trip.
func (tx *Tx) send(ctx context.Context, items []*item, last bool) error {
	if len(items) == 0 {
		return nil
	}
	for n, i := range items {
		if err := i.encode(tx.conn); err != nil {
			return fmt.Errorf("tidemark/postgres: statement %d of the round trip: %w", n+1, err)
		}
	}
	p := tx.conn.PgConn().StartPipeline(ctx)
	for _, i := range items {
		switch {
		case i.once:
			p.SendQueryParams(i.sql, i.values, i.oids, i.formats, nil)
		case i.parse:
			p.SendPrepare(i.st.Name, i.sql, i.oids)
			fallthrough
		default:
			p.SendQueryStatement(i.st.StatementDescription, i.values, i.formats, nil)
		}
		i.release()
	}
	if last {
		fault.Global.Reach(fault.CommitSend)
	}
	tx.begun = true
	err := p.Sync()
	for _, i := range items {
		if err != nil {
			break
		}
		if err = i.answer(p); err != nil {
			err = i.explained(err)
		}
	}
	// Close reads on to the end of the round trip; after an error of a statement it
	// returns that error once more.
	if closed := p.Close(); err == nil {
		err = closed
	}
	if err != nil {
		tx.unprepared(items)
		if code(err) == "" && tx.conn.IsClosed() {
			err = &brokenError{fmt.Errorf("tidemark/postgres: %w", err)}
		}
	}
	return err
}

// answer reads the server's answer to one item.
func (i *item) answer(p *pgconn.Pipeline) error {
	if i.parse {
		r, err := p.GetResults()
		if err != nil {
			return err
		}
		if _, ok := r.(*pgconn.StatementDescription); !ok {
			return unexpected(r)
		}
		i.parse = false // its columns are asked for each time; there are none but the fence's
	}
	r, err := p.GetResults()
	if err != nil {
		return err
	}
	rr, ok := r.(*pgconn.ResultReader)
	if !ok {
		return unexpected(r)
	}
	i.tag, err = rr.Close()
	return err
}

func unexpected(answer any) error {
	return fmt.Errorf("tidemark/postgres: unexpected answer %T", answer)
}

// unprepared forgets the statements that an error has kept from being prepared.
func (tx *Tx) unprepared(items []*item) {
	for _, i := range items {
		if i.parse {
			delete(tx.statements.known, tx.key(i.sql))
		}
	}
}

func (i *item) explained(err error) error {
	if i.explain != nil {
		return i.explain(err)
	}
	return err
}

// discreet replaces pgx's error for an argument that can't be encoded, which quotes it.
func (tx *Tx) discreet(err error, st *statement, args []any) error {
	if err == nil || code(err) != "" || len(args) != len(st.ParamOIDs) {
		return err
	}
	if wrong := (&item{st: st, args: args}).encode(tx.conn); wrong != nil {
		return fmt.Errorf("tidemark/postgres: %w", wrong)
	}
	return err
}

// encode turns args into values. Pgx's own error would quote the value.
func (i *item) encode(conn *pgx.Conn) error {
	if i.values != nil || i.once || len(i.args) == 0 && len(i.st.ParamOIDs) == 0 {
		return nil
	}
	if len(i.args) != len(i.st.ParamOIDs) {
		return fmt.Errorf("it has %d parameters, and %d arguments were given", len(i.st.ParamOIDs), len(i.args))
	}
	var b pgx.ExtendedQueryBuilder
	for n, arg := range i.args {
		one := pgconn.StatementDescription{ParamOIDs: i.st.ParamOIDs[n : n+1]}
		if err := b.Build(conn.TypeMap(), &one, i.args[n:n+1]); err != nil {
			return fmt.Errorf("argument %d: a Go %T can't be encoded as %s", n+1, arg, typeName(conn, i.st.ParamOIDs[n]))
		}
		i.formats = append(i.formats, b.ParamFormats[0])
		i.values = append(i.values, bytes.Clone(b.ParamValues[0]))
	}
	return nil
}

func typeName(conn *pgx.Conn, oid uint32) string {
	if t, ok := conn.TypeMap().TypeForOID(oid); ok {
		return t.Name
	}
	return fmt.Sprintf("the type with oid %d", oid)
}

func (i *item) release() {
	for _, b := range i.buffers {
		arrays.Put(b)
	}
	i.buffers, i.values = nil, nil
}

var errEnded = &setupError{errors.New("tidemark/postgres: the handler has ended the transaction by itself; " +
	"what it committed before that is in the model, which must be rebuilt; take COMMIT and ROLLBACK out of the handler")}

// usable reports what stands in the way of the next statement.
func (tx *Tx) usable() error {
	switch {
	case tx.closed:
		return errors.New("tidemark/postgres: the transaction is over; a Tx must not be kept after the handler's return")
	case tx.refused != nil:
		return tx.refused
	case tx.conn.IsClosed():
		if tx.err != nil {
			return tx.err
		}
		return &brokenError{errors.New("tidemark/postgres: the connection was closed in the middle of the transaction")}
	case tx.conn.PgConn().IsBusy():
		return errors.New("tidemark/postgres: the rows of a query are still open; close them before the next statement, and before the handler returns")
	case tx.begun && tx.conn.PgConn().TxStatus() == 'I':
		return errEnded
	}
	return nil
}

// fail remembers the first error. One that is not the server's is final, whether or
// not the handler cares: the server knows nothing of it and would commit the rest.
func (tx *Tx) fail(err error) error {
	if err == nil {
		return nil
	}
	if tx.err == nil {
		tx.err = err
	}
	if code(err) == "" && tx.refused == nil {
		tx.refused = err
	}
	return err
}

// swallowed is the error for a handler that returned none although a statement failed.
func (tx *Tx) swallowed() error {
	const text = "tidemark/postgres: a statement of the handler failed, and the handler returned no error; nothing was written"
	if tx.err == nil {
		return errors.New(text)
	}
	return fmt.Errorf("%s: %w", text, tx.err)
}

func (tx *Tx) close() {
	tx.closed = true
	for _, i := range tx.queue {
		i.release()
	}
	tx.queue = nil
}

var (
	leadingComments = regexp.MustCompile(`^(?:\s+|--[^\n]*(?:\n|$)|/\*(?s:.*?)\*/|;)+`)
	words           = regexp.MustCompile(`^(?:[a-zA-Z]+\s*){1,3}`)
)

// defining finds a statement that may make a table or the like; those have no parameters.
var defining = regexp.MustCompile(`(?i)\b(?:create\s|alter\s|do\s*(?:\$|'|language\s))`)

// forbidden refuses a statement that would end the transaction or begin another.
func forbidden(sql string) error {
	if sql != "" && (sql[0] <= '/' || sql[0] == ';') {
		sql = leadingComments.ReplaceAllString(sql, "")
	}
	if sql == "" || !strings.ContainsRune("abceprsABCEPRS", rune(sql[0])) {
		return nil
	}
	w := strings.Fields(strings.ToLower(words.FindString(sql)))
	if len(w) == 0 {
		return nil
	}
	switch w[0] {
	case "begin", "commit", "end", "abort":
	case "start":
		if len(w) < 2 || w[1] != "transaction" {
			return nil
		}
	case "prepare":
		if len(w) < 2 || w[1] != "transaction" {
			return nil
		}
	case "rollback":
		if len(w) > 1 && w[1] == "to" || len(w) > 2 && w[2] == "to" {
			return nil
		}
	default:
		return nil
	}
	return &setupError{fmt.Errorf("tidemark/postgres: %s is refused in a handler: its transaction is committed together with the checkpoint", strings.ToUpper(strings.Join(w[:1], " ")))}
}
