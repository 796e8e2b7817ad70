package projector

import (
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"
)

// change is one event of the stream on its way to the commit.
type change struct {
	Event
	before, after bson.Raw // nil: none
	collection    int      // index of the followed collection, -1 for an event that is passed over
	items         []any    // what each binding of the collection makes of it
	size          int      // bytes of the event
	err           error    // the stream must stop before this change's group
}

// position is where a model stands that has applied everything up to this change.
func (c *change) position() Position { return Position{Token: c.token, Time: c.ClusterTime} }

// decoder turns raw events into changes. It is shared by several goroutines.
type decoder struct {
	registry  *bson.Registry // nil: the driver's own
	plan      *plan
	replaying bool // for a generation that a rebuild fills
}

// decode unmarshals a document; nil gives nil.
func decode[T any](d *decoder, doc bson.Raw) (*T, error) {
	if doc == nil {
		return nil, nil
	}
	v := new(T)
	var err error
	if d.registry == nil {
		err = bson.Unmarshal(doc, v)
	} else {
		err = bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: doc}.UnmarshalWithRegistry(d.registry, v)
	}
	if err != nil {
		return nil, fmt.Errorf("decode into %T: %w", *v, err)
	}
	return v, nil
}

// safely contains the panics of a user's function.
func safely(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// event decodes one raw event. Whatever is wrong with it ends up in the change's err,
// so that everything before it is still applied.
func (d *decoder) event(raw bson.Raw, c *change) {
	c.collection = -1
	c.size = len(raw)
	e, err := readEnvelope(raw)
	c.Event = e.Event
	if err != nil {
		c.err = &SourceError{Projection: d.plan.projection, Doing: "read an event of the stream", Err: err}
		return
	}
	switch e.op {
	case "insert", "update", "replace", "delete":
		c.Op = Op(e.op)
	case "drop", "rename", "dropDatabase", "invalidate":
		c.err = &ReplacedError{Projection: d.plan.projection, Namespace: d.plan.affected(&e), Event: e.op, At: c.position()}
		return
	default:
		return // createIndexes, modify and whatever comes: no document changed
	}
	i, ok := d.plan.byName[e.Namespace.Collection]
	if !ok || e.Namespace.Database != d.plan.database {
		return
	}
	c.collection = i
	coll := &d.plan.collections[i]
	if coll.on && e.update.Type != 0 { // no pure form reads it
		if c.Updated, ok = updated(e.update); !ok {
			c.err = &SourceError{Projection: d.plan.projection, Doing: "read an event of the stream", Err: fmt.Errorf("%w: field updateDescription", errMalformedEvent)}
			return
		}
	}
	if lost := e.lostImage(coll.images); lost != "" {
		c.err = &ImageLostError{Projection: d.plan.projection, Namespace: e.Namespace, Key: KeyText(c.Key), Image: lost, At: c.position()}
		return
	}
	c.before, c.after, c.Replaying = e.before, e.after, d.replaying
	d.items(c)
}

// items is what the bindings of a change's collection make of it.
func (d *decoder) items(c *change) {
	bindings := d.plan.collections[c.collection].bindings
	c.items = make([]any, len(bindings))
	for j, b := range bindings {
		if c.err = safely(func() (err error) { c.items[j], err = d.plan.bindings[b].decode(d, c); return err }); c.err != nil {
			c.err = d.plan.poison(c, c.err)
			return
		}
	}
	c.before, c.after = nil, nil // the items have what they need; let the rest go
}

// envelope is an event of the stream, its documents still raw.
type envelope struct {
	Event
	op            string
	to            Namespace
	before, after bson.Raw       // nil where the field is null or missing
	update        bsoncore.Value // updateDescription, as it came
}

// lostImage names the image that is needed, should be there, and is not. The server
// says null where an image has expired or was never recorded.
func (e *envelope) lostImage(need images) string {
	if need.before && e.op != "insert" && e.before == nil {
		return "pre-image"
	}
	if need.after && e.op != "delete" && e.after == nil {
		return "post-image"
	}
	return ""
}

var errMalformedEvent = errors.New("the event is malformed")

// readEnvelope walks an event once, without reflection: at tens of thousands of
// events per second decoding the envelope into a struct would cost more than the
// document in it.
func readEnvelope(raw bson.Raw) (e envelope, err error) {
	length, rem, ok := bsoncore.ReadLength(raw)
	if !ok || int(length) != len(raw) {
		return e, errMalformedEvent
	}
	var txn TxnID
	for len(rem) > 1 {
		var el bsoncore.Element
		if el, rem, ok = bsoncore.ReadElement(rem); !ok {
			return e, errMalformedEvent
		}
		v := el.Value()
		ok = true
		switch string(el.KeyBytes()) {
		case "_id":
			e.token, ok = rawDocument(v)
		case "operationType":
			e.op, ok = operation(v)
		case "clusterTime":
			e.ClusterTime.T, e.ClusterTime.I, ok = v.TimestampOK()
		case "wallTime":
			var ms int64
			ms, ok = v.DateTimeOK()
			e.WallTime = time.UnixMilli(ms).UTC()
		case "ns":
			e.Namespace, ok = namespace(v)
		case "to":
			e.to, ok = namespace(v)
		case "documentKey":
			var key bsoncore.Document
			if key, ok = v.DocumentOK(); ok {
				var id bsoncore.Value
				id, err = key.LookupErr("_id")
				e.Key, ok = bson.RawValue{Type: bson.Type(id.Type), Value: id.Data}, err == nil
			}
		case "fullDocument":
			e.after, ok = readImage(v)
		case "fullDocumentBeforeChange":
			e.before, ok = readImage(v)
		case "updateDescription":
			e.update, ok = v, v.Type == bsoncore.TypeEmbeddedDocument
		case "lsid":
			txn.Session, ok = rawDocument(v)
			e.Txn = &txn
		case "txnNumber":
			txn.Number, ok = v.AsInt64OK()
		}
		if !ok {
			return e, fmt.Errorf("%w: field %s", errMalformedEvent, el.Key())
		}
	}
	if e.token == nil || e.op == "" || e.ClusterTime.IsZero() {
		return e, fmt.Errorf("%w: no _id, operationType or clusterTime", errMalformedEvent)
	}
	switch e.op {
	case "insert", "update", "replace", "delete":
		if e.Key.IsZero() {
			return e, fmt.Errorf("%w: no documentKey", errMalformedEvent)
		}
	}
	e.Version = versionOf(e.ClusterTime)
	return e, nil
}

func rawDocument(v bsoncore.Value) (bson.Raw, bool) {
	d, ok := v.DocumentOK()
	return bson.Raw(d), ok
}

func readImage(v bsoncore.Value) (bson.Raw, bool) {
	if v.Type == bsoncore.TypeNull {
		return nil, true
	}
	return rawDocument(v)
}

// operation avoids an allocation per event for the usual ones.
func operation(v bsoncore.Value) (string, bool) {
	b, ok := text(v)
	switch string(b) {
	case "insert":
		return "insert", ok
	case "update":
		return "update", ok
	case "replace":
		return "replace", ok
	case "delete":
		return "delete", ok
	}
	return string(b), ok
}

// text is a string value's bytes.
func text(v bsoncore.Value) ([]byte, bool) {
	n, b, ok := bsoncore.ReadLength(v.Data)
	if v.Type != bsoncore.TypeString || !ok || n < 1 || int(n) > len(b) {
		return nil, false
	}
	return b[:n-1], true
}

func namespace(v bsoncore.Value) (n Namespace, ok bool) {
	d, ok := v.DocumentOK()
	if !ok {
		return n, false
	}
	if n.Database, ok = d.Lookup("db").StringValueOK(); !ok {
		return n, false
	}
	n.Collection, _ = d.Lookup("coll").StringValueOK() // none for dropDatabase
	return n, true
}

func updated(v bsoncore.Value) (*Updated, bool) {
	d, ok := v.DocumentOK()
	if !ok {
		return nil, false
	}
	u := new(Updated)
	if f, ok := d.Lookup("updatedFields").DocumentOK(); ok {
		u.Fields = bson.Raw(f)
	}
	if a, ok := d.Lookup("removedFields").ArrayOK(); ok {
		values, err := a.Values()
		if err != nil {
			return nil, false
		}
		for _, v := range values {
			s, ok := v.StringValueOK()
			if !ok {
				return nil, false
			}
			u.Removed = append(u.Removed, s)
		}
	}
	if t := d.Lookup("truncatedArrays"); t.Type != 0 {
		u.Truncated = bson.RawValue{Type: bson.Type(t.Type), Value: t.Data}
	}
	return u, true
}
