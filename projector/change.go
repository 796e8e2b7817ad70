package projector

import (
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Op says what a change did to its document.
type Op string

// The operations a handler sees. Snapshot is a document read by a rebuild.
const (
	Insert   Op = "insert"
	Update   Op = "update"
	Replace  Op = "replace"
	Delete   Op = "delete"
	Snapshot Op = "snapshot"
)

// Namespace names a collection.
type Namespace struct{ Database, Collection string }

// String is the usual dotted form.
func (n Namespace) String() string { return n.Database + "." + n.Collection }

// Event is what every change carries, whatever images it has.
type Event struct {
	Op          Op
	Namespace   Namespace
	Key         bson.RawValue  // the document's _id; KeyText gives its text form
	ClusterTime bson.Timestamp // equal for all changes of one source transaction
	WallTime    time.Time      // the server's clock at the change, in milliseconds
	Version     int64          // grows with ClusterTime; for sinks that keep a version per document
	Updated     *Updated       // what an update changed; nil for every other operation
	Txn         *TxnID         // the source transaction; nil outside of one
	Replaying   bool           // history is being applied again: mute side effects

	token bson.Raw
}

// ID identifies the change for good: the same change has the same ID whenever it
// is delivered, so it serves as an idempotency key for systems outside the sink. A
// Snapshot's names the document and the time that it was read at.
func (e *Event) ID() string {
	if e.token == nil {
		return fmt.Sprintf("snapshot/%s/%s/%d", e.Namespace, KeyText(e.Key), e.Version)
	}
	if s, ok := e.token.Lookup("_data").StringValueOK(); ok {
		return s
	}
	return e.token.String()
}

// Updated tells what an update changed, as the server reports it in
// updateDescription: Fields by dotted path, the Removed paths, and the arrays that
// were Truncated.
type Updated struct {
	Fields    bson.Raw
	Removed   []string
	Truncated bson.RawValue
}

// Has reports whether the update set, removed or truncated the field at path, a
// part of it, or a document that holds it.
func (u *Updated) Has(path string) bool {
	if u == nil {
		return false
	}
	touches := func(p string) bool {
		return p == path || strings.HasPrefix(p, path+".") || strings.HasPrefix(path, p+".")
	}
	elements, _ := u.Fields.Elements()
	for _, e := range elements {
		if touches(e.Key()) {
			return true
		}
	}
	for _, p := range u.Removed {
		if touches(p) {
			return true
		}
	}
	arrays, _ := u.Truncated.ArrayOK()
	values, _ := arrays.Values()
	for _, v := range values {
		if d, ok := v.DocumentOK(); ok {
			if p, ok := d.Lookup("field").StringValueOK(); ok && touches(p) {
				return true
			}
		}
	}
	return false
}

// TxnID identifies a source transaction: the server's session and its number in it.
type TxnID struct {
	Session bson.Raw
	Number  int64
}

// Change is a change with both images: the document before and after it, as they
// were then. Before is nil for an insert, After for a delete. Its collection must
// keep pre- and post-images; an image that the server has lost never reaches a
// handler, it stops the projection with an ImageLostError.
type Change[T any] struct {
	Event
	Before, After *T
}

// State is a change with the document after it, as it was then; After is nil where
// the document was deleted. Its collection must keep pre- and post-images.
type State[T any] struct {
	Event
	After *T
}

// Touch is a change without images: only that the document with this key changed.
type Touch struct{ Event }

// images says which images of a change are needed.
type images struct{ before, after bool }

func (i images) or(o images) images { return images{i.before || o.before, i.after || o.after} }

// delivered is what On's handlers take: a pointer to Change, State or Touch.
type delivered[C any] interface {
	*C
	images() images
	deliver(d *decoder, c *change) error
}

func (*Change[T]) images() images { return images{before: true, after: true} }

func (c *Change[T]) deliver(d *decoder, ch *change) (err error) {
	c.Event = ch.Event
	if c.Before, err = decode[T](d, ch.before); err != nil {
		return err
	}
	c.After, err = decode[T](d, ch.after)
	return err
}

func (*State[T]) images() images { return images{after: true} }

func (c *State[T]) deliver(d *decoder, ch *change) (err error) {
	c.Event = ch.Event
	c.After, err = decode[T](d, ch.after)
	return err
}

func (*Touch) images() images { return images{} }

func (c *Touch) deliver(_ *decoder, ch *change) error {
	c.Event = ch.Event
	return nil
}

// epoch is the second from which Version counts: seconds since 1970 shifted by 32
// bits would overflow an int64 in 2038, seconds since 2020 do in 2088.
const epoch = 1577836800

func versionOf(t bson.Timestamp) int64 {
	return (int64(t.T)-epoch)<<32 | int64(t.I)
}
