package mongodb

import (
	"context"
	"errors"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"
)

// batch writes many rows to a collection: statements are put straight into commands,
// each of which is sent when it is full. The driver's models would need several objects a
// row, all of them at a time, and be marshalled one by one.
type batch struct {
	coll    *TxCollection
	command string // "update", "delete" or "insert"

	buf        []byte // the command under construction, empty when there is none
	list       int32  // where its array of statements begins
	statement  int    // where its last statement begins, name included,
	body       int    // and where its document does
	statements int
	sent       bool
}

// The size of a command, beyond which it is sent. It is of no matter for the time: the
// server takes a hundred times as long as a round trip to carry out as much. But the
// driver copies commands, four times.
const (
	fullCommand   = 512 << 10
	maxStatements = 50_000 // the server takes 100,000
)

// maxCommand is what the server takes as a command, without what the driver adds.
const maxCommand = 16<<20 + 14<<10

var errTooLarge = errors.New("with its key it has more than the 16 MB that the server takes")

// lists are the names of the commands' arrays.
var lists = map[string]string{"update": "updates", "delete": "deletes", "insert": "documents"}

// batch begins one, in the session's buffer, of which there is one for all its commits.
func (c *TxCollection) batch(command string) *batch {
	b := &batch{coll: c, command: command, buf: c.tx.sess.buf[:0]}
	c.tx.sess.buf = nil
	return b
}

// begin begins a statement; the caller appends its elements to buf.
func (b *batch) begin() {
	if len(b.buf) == 0 {
		_, b.buf = bsoncore.AppendDocumentStart(b.buf)
		b.buf = bsoncore.AppendStringElement(b.buf, b.command, b.coll.Name())
		b.buf = bsoncore.AppendBooleanElement(b.buf, "ordered", false)
		b.list, b.buf = bsoncore.AppendArrayElementStart(b.buf, lists[b.command])
	}
	b.statement = len(b.buf)
	b.buf = append(b.buf, byte(bsoncore.TypeEmbeddedDocument))
	b.buf = append(strconv.AppendInt(b.buf, int64(b.statements), 10), 0)
	b.body = len(b.buf)
	_, b.buf = bsoncore.AppendDocumentStart(b.buf)
}

// end ends the statement. One that makes a command larger than it should be goes into
// the next.
func (b *batch) end(ctx context.Context) (err error) {
	if b.buf, err = bsoncore.AppendDocumentEnd(b.buf, int32(b.body)); err != nil { //nolint:gosec // far below 2 GB
		return err
	}
	if b.statements > 0 && (len(b.buf) > fullCommand || b.statements == maxStatements) {
		last := append([]byte(nil), b.buf[b.body:]...)
		b.buf = b.buf[:b.statement]
		if err := b.send(ctx); err != nil {
			return err
		}
		b.begin()
		b.buf = append(b.buf[:b.body], last...)
	}
	b.statements++
	return nil
}

// finish sends what is left. Also after an error it must be called, and then sends nothing.
func (b *batch) finish(ctx context.Context, err error) error {
	if err == nil && len(b.buf) > 0 {
		err = b.send(ctx)
	}
	if err != nil && b.sent {
		err = b.coll.tx.fail(err) // a part of it is written, so nothing must be committed
	}
	if cap(b.buf) <= 4*fullCommand {
		b.coll.tx.sess.buf = b.buf
	}
	b.buf = nil
	return err
}

func (b *batch) send(ctx context.Context) (err error) {
	if b.buf, err = bsoncore.AppendArrayEnd(b.buf, b.list); err != nil {
		return err
	}
	if b.buf, err = bsoncore.AppendDocumentEnd(b.buf, 0); err != nil {
		return err
	}
	if len(b.buf) > maxCommand { // the server would close the connection, which would look like a failure that passes
		return errTooLarge
	}
	b.sent = true
	_, err = writing(ctx, b.coll, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, b.coll.tx.sink.db.RunCommand(ctx, bson.Raw(b.buf)).Err()
	})
	b.buf, b.statements = b.buf[:0], 0
	return err
}
