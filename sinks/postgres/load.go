package postgres

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"reflect"

	"github.com/tidemark-go/tidemark/projector"
)

// Load implements projector.Loader: it writes the rows by COPY, now, after the statements
// that are queued. Unlike Put it overwrites nothing: a key that is there already, or twice
// among rows, is the server's error 23505, of class Poison, and so is a value that can't be
// stored. While rows are marked, in a rebuild in place, it is Put.
func (t Table[R]) Load(ctx context.Context, tx *Tx, rows []projector.Row[R]) error {
	p, err := t.planFor(keyed, mirrored)
	if err != nil {
		return err
	}
	if tx.build != 0 {
		return t.Put(ctx, tx, nil, rows)
	}
	if len(rows) == 0 {
		return nil
	}
	if err := tx.flush(ctx); err != nil {
		return err
	}
	c := &copying[R]{columns: p.columns, rows: rows, out: &array{buf: []byte(copyHeader)}}
	_, err = tx.conn.PgConn().CopyFrom(ctx, c, p.load)
	// Of a row that can't be encoded the server has only heard that the COPY was given up.
	// (Where the connection broke, c may still be read from.)
	if !tx.conn.IsClosed() && c.err != nil {
		err = fmt.Errorf("tidemark/postgres: table %q, %w", t.Name, c.err)
	}
	return tx.fail(err)
}

// copying encodes rows for a binary COPY as they are read, so that the server stores the
// first while the next are encoded.
type copying[R any] struct {
	columns []column
	rows    []projector.Row[R]
	out     *array // a field of a COPY is written like an element of a binary array
	sent    int    // of out
	ended   bool
	err     error
}

// Read implements io.Reader.
func (c *copying[R]) Read(p []byte) (int, error) {
	if c.sent == len(c.out.buf) {
		if c.ended {
			return 0, io.EOF
		}
		c.sent, c.out.buf = 0, c.out.buf[:0]
	}
	for len(c.out.buf) < len(p) && !c.ended {
		if c.err = c.encode(); c.err != nil {
			return 0, c.err
		}
	}
	n := copy(p, c.out.buf[c.sent:])
	c.sent += n
	return n, nil
}

// encode adds the next row, or the end, which is a row of -1 columns.
func (c *copying[R]) encode() error {
	if c.ended = len(c.rows) == 0; c.ended {
		c.out.buf = binary.BigEndian.AppendUint16(c.out.buf, 1<<16-1)
		return nil
	}
	r := c.rows[0]
	c.rows = c.rows[1:]
	return c.out.addCopied(c.columns, reflect.ValueOf(r.Row).Elem(), projector.KeyText(r.Owner))
}

// copyHeader is COPY's binary signature, and no flags, and no extension.
const copyHeader = "PGCOPY\n\377\r\n\000" + "\000\000\000\000" + "\000\000\000\000"

// addCopied adds a row and its owner, which is the last column.
func (a *array) addCopied(columns []column, r reflect.Value, owner string) error {
	a.buf = binary.BigEndian.AppendUint16(a.buf, uint16(len(columns)))
	last := len(columns) - 1
	for i := range columns[:last] {
		if err := columns[i].add(a, r); err != nil {
			return fmt.Errorf("%w (document %s)", err, owner)
		}
	}
	return a.addText(owner)
}
