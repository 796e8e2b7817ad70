package projector

import (
	"bytes"
	"errors"
	"math"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
)

func raw(t testing.TB, doc bson.D) bson.Raw {
	t.Helper()
	b, err := bson.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// updateEvent is an event with everything in it.
func updateEvent() bson.D {
	return bson.D{
		{Key: "_id", Value: bson.D{{Key: "_data", Value: "8265F1"}}},
		{Key: "operationType", Value: "update"},
		{Key: "clusterTime", Value: bson.Timestamp{T: 1795953600, I: 7}},
		{Key: "wallTime", Value: bson.DateTime(1795953600123)},
		{Key: "lsid", Value: bson.D{{Key: "id", Value: bson.Binary{Subtype: 4, Data: make([]byte, 16)}}}},
		{Key: "txnNumber", Value: int64(3)},
		{Key: "fullDocument", Value: bson.D{{Key: "_id", Value: 1}, {Key: "s", Value: "paid"}}},
		{Key: "fullDocumentBeforeChange", Value: bson.D{{Key: "_id", Value: 1}, {Key: "s", Value: "new"}, {Key: "x", Value: 1}}},
		{Key: "ns", Value: bson.D{{Key: "db", Value: "shop"}, {Key: "coll", Value: "orders"}}},
		{Key: "documentKey", Value: bson.D{{Key: "region", Value: "eu"}, {Key: "_id", Value: 1}}},
		{Key: "updateDescription", Value: bson.D{
			{Key: "updatedFields", Value: bson.D{{Key: "s", Value: "paid"}, {Key: "a.b.c", Value: 1}}},
			{Key: "removedFields", Value: bson.A{"x"}},
			{Key: "truncatedArrays", Value: bson.A{bson.D{{Key: "field", Value: "list"}, {Key: "newSize", Value: 2}}}},
		}},
		{Key: "aFieldOfTheFuture", Value: bson.A{1}},
	}
}

func TestEnvelopeIsReadWhole(t *testing.T) {
	e, err := readEnvelope(raw(t, updateEvent()))
	if err != nil {
		t.Fatal(err)
	}
	var ok bool
	if e.Updated, ok = updated(e.update); !ok {
		t.Fatal("updateDescription is not understood")
	}
	if e.op != "update" || e.Namespace.String() != "shop.orders" || KeyText(e.Key) != "1" || e.ID() != "8265F1" {
		t.Errorf("%+v", e)
	}
	if e.ClusterTime != (bson.Timestamp{T: 1795953600, I: 7}) || e.Version != versionOf(e.ClusterTime) {
		t.Errorf("time %v, version %d", e.ClusterTime, e.Version)
	}
	if want := time.UnixMilli(1795953600123).UTC(); !e.WallTime.Equal(want) {
		t.Errorf("wall time %s, want %s", e.WallTime, want)
	}
	if e.Txn == nil || e.Txn.Number != 3 || e.Txn.Session == nil {
		t.Errorf("transaction %+v", e.Txn)
	}
	if e.before.Lookup("s").StringValue() != "new" || e.after.Lookup("s").StringValue() != "paid" {
		t.Errorf("images %s, %s", e.before, e.after)
	}
	for path, want := range map[string]bool{
		"s": true, "x": true, "x.y": true, "a": true, "a.b": true, "a.b.c": true, "a.b.c.d": true, "list": true,
		"a.bb": false, "a.b.cc": false, "ss": false, "lis": false, "region": false,
	} {
		if got := e.Updated.Has(path); got != want {
			t.Errorf("Updated.Has(%s) is %v", path, got)
		}
	}
	if (*Updated)(nil).Has("s") {
		t.Error("no update has a field")
	}
}

// A lost image is a field that is present and null; for an insert there is none before,
// for a delete none after. (CASES B21: a missing pre-image that drifts without a word.)
func TestLostImagesAreTold(t *testing.T) {
	doc := bson.D{{Key: "_id", Value: 1}}
	for _, c := range []struct {
		op            string
		before, after any // nil: the field is missing
		need          images
		want          string
	}{
		{"insert", nil, doc, images{true, true}, ""},
		{"insert", nil, bson.Null{}, images{true, true}, "post-image"},
		{"update", doc, doc, images{true, true}, ""},
		{"update", bson.Null{}, doc, images{true, true}, "pre-image"},
		{"update", bson.Null{}, doc, images{false, true}, ""},
		{"update", nil, doc, images{true, false}, "pre-image"},
		{"replace", doc, bson.Null{}, images{false, true}, "post-image"},
		{"replace", doc, nil, images{false, true}, "post-image"},
		{"delete", bson.Null{}, nil, images{true, true}, "pre-image"},
		{"delete", doc, nil, images{true, true}, ""},
		{"update", nil, nil, images{}, ""},
	} {
		event := bson.D{
			{Key: "_id", Value: bson.D{{Key: "_data", Value: "82"}}},
			{Key: "operationType", Value: c.op},
			{Key: "clusterTime", Value: bson.Timestamp{T: 1}},
			{Key: "documentKey", Value: doc},
		}
		if c.before != nil {
			event = append(event, bson.E{Key: "fullDocumentBeforeChange", Value: c.before})
		}
		if c.after != nil {
			event = append(event, bson.E{Key: "fullDocument", Value: c.after})
		}
		e, err := readEnvelope(raw(t, event))
		if err != nil {
			t.Fatal(err)
		}
		if got := e.lostImage(c.need); got != c.want {
			t.Errorf("%s, before %v, after %v, needed %v: lost %q, want %q", c.op, c.before, c.after, c.need, got, c.want)
		}
	}
}

// Every field that is missing or of another type is an error that names it, never a
// zero value. (CASES B18: an event without a documentKey that crashes its reader.)
func TestMalformedEventsAreRefused(t *testing.T) {
	whole := updateEvent()
	required := map[string]bool{"_id": true, "operationType": true, "clusterTime": true, "documentKey": true}
	for i, field := range whole {
		without := append(append(bson.D{}, whole[:i]...), whole[i+1:]...)
		if _, err := readEnvelope(raw(t, without)); (err != nil) != required[field.Key] {
			t.Errorf("without %s: %v", field.Key, err)
		}
		other := append(bson.D{}, whole...)
		other[i].Value = bson.MinKey{}
		if _, err := readEnvelope(raw(t, other)); (err != nil) != (field.Key != "aFieldOfTheFuture") {
			t.Errorf("%s of another type: %v", field.Key, err)
		}
	}
	b := raw(t, whole)
	for n := range len(b) {
		if _, err := readEnvelope(b[:n]); !errors.Is(err, errMalformedEvent) {
			t.Fatalf("cut off after %d of %d bytes: %v", n, len(b), err)
		}
	}
}

// split cuts an event into pieces as the server does: each with a token of its own and
// some of the fields.
func split(t testing.TB, event bson.D, pieces ...[]string) []bson.Raw {
	t.Helper()
	fields := map[string]any{}
	for _, f := range event {
		fields[f.Key] = f.Value
	}
	var out []bson.Raw
	for i, names := range pieces {
		piece := bson.D{
			{Key: "_id", Value: bson.D{{Key: "_data", Value: "82F" + string(rune('1'+i))}}},
			{Key: "splitEvent", Value: bson.D{{Key: "fragment", Value: int32(i + 1)}, {Key: "of", Value: int32(len(pieces))}}}, //nolint:gosec // few
		}
		for _, n := range names {
			piece = append(piece, bson.E{Key: n, Value: fields[n]})
		}
		out = append(out, raw(t, piece))
	}
	return out
}

var pieces = [][]string{
	{"operationType", "clusterTime", "wallTime", "ns", "documentKey"}, {"fullDocumentBeforeChange"}, {"fullDocument", "updateDescription"},
}

// A split event is one event with the last fragment's token, however its fragments are
// spread over replies: a restart in between must begin with the first. (CASES B26.)
func TestFragmentsAreJoined(t *testing.T) {
	parts := split(t, updateEvent(), pieces...)
	whole := raw(t, updateEvent())
	for cut := range len(parts) + 1 {
		var f fragments
		first, err := f.join(append([]bson.Raw{whole}, parts[:cut]...))
		if err != nil {
			t.Fatal(err)
		}
		second, err := f.join(append(append([]bson.Raw{}, parts[cut:]...), whole))
		if err != nil {
			t.Fatal(err)
		}
		events := append(first, second...)
		if len(events) != 3 {
			t.Fatalf("cut at %d: %d events", cut, len(events))
		}
		e, err := readEnvelope(events[1])
		if err != nil {
			t.Fatal(err)
		}
		if e.ID() != "82F3" || KeyText(e.Key) != "1" || e.before.Lookup("s").StringValue() != "new" || e.after.Lookup("s").StringValue() != "paid" || e.update.Type == 0 {
			t.Errorf("cut at %d: %+v", cut, e)
		}
	}
}

// A fragment out of place is an error: it must not be joined to another event, and
// none must be left out.
func TestFragmentsOutOfPlaceAreRefused(t *testing.T) {
	p := split(t, updateEvent(), pieces...)
	whole := raw(t, updateEvent())
	for name, events := range map[string][]bson.Raw{
		"second first":       {p[1], p[2]},
		"one left out":       {p[0], p[2]},
		"one twice":          {p[0], p[0], p[1], p[2]},
		"last twice":         {p[0], p[1], p[2], p[2]},
		"another event amid": {p[0], p[1], whole, p[2]},
		"no numbers":         {raw(t, bson.D{{Key: "splitEvent", Value: bson.D{}}})},
		"no document":        {raw(t, bson.D{{Key: "splitEvent", Value: 1}})},
		"more than of":       {raw(t, bson.D{{Key: "splitEvent", Value: bson.D{{Key: "fragment", Value: int32(1)}, {Key: "of", Value: int32(0)}}}}), whole},
	} {
		var f fragments
		if got, err := f.join(events); !errors.Is(err, errMalformedEvent) {
			t.Errorf("%s: %d events, error %v", name, len(got), err)
		}
	}
}

func FuzzEvent(f *testing.F) {
	whole := raw(f, updateEvent())
	f.Add([]byte(whole))
	for _, p := range split(f, updateEvent(), pieces...) {
		f.Add([]byte(p))
	}
	f.Add([]byte{5, 0, 0, 0, 0})
	first := split(f, updateEvent(), pieces...)[0]
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := readEnvelope(b)
		if err == nil && (e.token == nil || e.op == "" || e.ClusterTime.IsZero()) {
			t.Errorf("accepted without its essentials: %+v", e)
		}
		_ = e.lostImage(images{true, true})
		_ = e.ID()
		u, _ := updated(e.update)
		_ = u.Has("a.b")
		_ = KeyText(e.Key)
		var parts fragments
		if _, err := parts.join([]bson.Raw{first}); err != nil {
			t.Fatal(err)
		}
		joined, err := parts.join([]bson.Raw{b})
		if err != nil && !errors.Is(err, errMalformedEvent) {
			t.Errorf("%v", err)
		}
		for _, j := range joined {
			_, _ = readEnvelope(j)
		}
	})
}

// Versions grow with the cluster time, for as long as they promise to.
func TestVersionsGrowUntil2088(t *testing.T) {
	last := uint32(epoch + math.MaxInt32)
	if y := time.Unix(int64(last), 0).UTC().Year(); y != 2088 {
		t.Errorf("they end in %d", y)
	}
	at := []bson.Timestamp{{T: 1}, {T: 1, I: math.MaxUint32}, {T: epoch - 1, I: 5}, {T: epoch}, {T: epoch, I: 1}, {T: 1795953600, I: 1}, {T: 1795953600, I: 2}, {T: 1795953601}, {T: last}, {T: last, I: math.MaxUint32}}
	for i := 1; i < len(at); i++ {
		if a, b := versionOf(at[i-1]), versionOf(at[i]); a >= b {
			t.Errorf("%v has version %d, the later %v has %d", at[i-1], a, at[i], b)
		}
	}
	if v := versionOf(bson.Timestamp{T: 1795953600}); v <= 0 {
		t.Errorf("the version of today is %d; sinks need it positive", v)
	}
	r := random(t)
	for range effort.Values(100_000) {
		a := bson.Timestamp{T: r.Uint32N(last + 1), I: r.Uint32()}
		b := bson.Timestamp{T: a.T + r.Uint32N(2), I: r.Uint32()}
		if b.T > last {
			continue
		}
		if a.Compare(b) != compare(versionOf(a), versionOf(b)) {
			t.Fatalf("%v and %v order otherwise than their versions", a, b)
		}
	}
}

func compare(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func testDecoder() *decoder {
	p := &plan{
		projection: "p", database: "shop", byName: map[string]int{"orders": 0},
		collections: []followed{{name: "orders", images: images{true, true}, bindings: []int{0}}},
	}
	p.bindings = []planned{{decode: func(_ *decoder, c *change) (any, error) {
		switch KeyText(c.Key) {
		case "panics":
			panic("boom")
		case "fails":
			return nil, errStop
		}
		return c.Op, nil
	}}}
	return &decoder{plan: p}
}

// What an event turns into: a change, something to pass over, or an error before which
// everything is still applied.
func TestEventsAreSorted(t *testing.T) {
	event := func(op, db, coll, key string, more ...bson.E) bson.Raw {
		doc := bson.D{{Key: "_id", Value: key}}
		e := bson.D{
			{Key: "_id", Value: bson.D{{Key: "_data", Value: "82"}}},
			{Key: "operationType", Value: op},
			{Key: "clusterTime", Value: bson.Timestamp{T: 5}},
			{Key: "ns", Value: bson.D{{Key: "db", Value: db}, {Key: "coll", Value: coll}}},
			{Key: "documentKey", Value: doc},
			{Key: "fullDocument", Value: doc},
			{Key: "fullDocumentBeforeChange", Value: doc},
		}
		return raw(t, append(e, more...))
	}
	to := func(db, coll string) bson.E {
		return bson.E{Key: "to", Value: bson.D{{Key: "db", Value: db}, {Key: "coll", Value: coll}}}
	}
	d := testDecoder()
	for _, c := range []struct {
		name   string
		event  bson.Raw
		passed bool
		check  func(error) bool
	}{
		{"insert", event("insert", "shop", "orders", "1"), false, nil},
		{"of another collection", event("insert", "shop", "carts", "1"), true, nil},
		{"of another database", event("insert", "other", "orders", "1"), true, nil},
		{"createIndexes", event("createIndexes", "shop", "orders", "1"), true, nil},
		{"of the future", event("splitBrain", "shop", "orders", "1"), true, nil},
		{"drop", event("drop", "shop", "orders", "1"), true, replaced("shop.orders", "drop")},
		{"rename away", event("rename", "shop", "orders", "1", to("shop", "old")), true, replaced("shop.orders", "rename")},
		{"rename onto", event("rename", "shop", "new", "1", to("shop", "orders")), true, replaced("shop.orders", "rename")},
		{"handler panics", event("insert", "shop", "orders", "panics"), false, poisoned("panics")},
		{"handler fails", event("update", "shop", "orders", "fails"), false, poisoned("fails")},
		{"no event", bson.Raw{5, 0, 0, 0, 0}, true, func(err error) bool { return errors.As(err, new(*SourceError)) }},
	} {
		var ch change
		d.event(c.event, &ch)
		if (ch.collection < 0) != c.passed {
			t.Errorf("%s: collection %d", c.name, ch.collection)
		}
		switch {
		case c.check == nil && ch.err != nil:
			t.Errorf("%s: %v", c.name, ch.err)
		case c.check != nil && !c.check(ch.err):
			t.Errorf("%s: error %v", c.name, ch.err)
		case c.check == nil && !c.passed && (len(ch.items) != 1 || ch.items[0] != Insert):
			t.Errorf("%s: items %v", c.name, ch.items)
		}
	}
}

func replaced(ns, event string) func(error) bool {
	return func(err error) bool {
		var r *ReplacedError
		return errors.As(err, &r) && r.Namespace.String() == ns && r.Event == event && r.At.Time.T == 5
	}
}

func poisoned(key string) func(error) bool {
	return func(err error) bool {
		var p *PoisonError
		var panicked *PanicError
		return errors.As(err, &p) && p.Key == key && p.Namespace.Collection == "orders" && errors.As(err, &panicked) == (key == "panics")
	}
}

// A panic's stack leads to the user's line.
func TestPanicsKeepTheirStack(t *testing.T) {
	err := safely(func() error { return panicking() })
	var p *PanicError
	if !errors.As(err, &p) || !bytes.Contains(p.Stack, []byte("panicking")) || !errors.Is(err, errStop) {
		t.Errorf("%v", err)
	}
}

func panicking() error { panic(errStop) }
