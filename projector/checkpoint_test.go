package projector

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
)

func randomCheckpoint(t testing.TB, r *rand.Rand) Checkpoint {
	t.Helper()
	hexDigits := func(n int) string {
		var s strings.Builder
		for range n {
			s.WriteByte("0123456789ABCDEF"[r.IntN(16)])
		}
		return s.String()
	}
	binary := func(n int) bson.Binary {
		b := bson.Binary{Subtype: []byte{0, 4}[r.IntN(2)], Data: make([]byte, n)}
		for i := range b.Data {
			b.Data[i] = byte(r.Uint32())
		}
		return b
	}
	at := func() bson.Timestamp { return bson.Timestamp{T: r.Uint32(), I: r.Uint32()} }
	key := func() bson.RawValue {
		for {
			// The driver's JSON can't hold NaN's bits, symbols and the like; an _id that
			// the library has met is told apart by KeyText anyway.
			v := randomKey(r, 0)
			if text := KeyText(v); !strings.Contains(text, "NaN") && !strings.Contains(text, `"subType":"02"`) && !strings.HasPrefix(text, "bson(") && v.Type != bson.TypeString && v.Type != bson.TypeBinary {
				return v
			}
		}
	}
	c := Checkpoint{
		Format: CheckpointFormat, Projection: "p" + hexDigits(3), Version: 1 + r.IntN(1e6), Generation: 1 + r.Int64N(1e12), Place: "schema " + hexDigits(2),
		Phase: []Phase{Live, Building, Retired}[r.IntN(3)], Settled: r.IntN(2) == 0,
		Position:    Position{Time: at()},
		CommittedAt: time.UnixMilli(r.Int64N(4e12)).UTC(),
		Watch:       Watch{Database: "shop" + randomName(r)},
	}
	if r.IntN(4) > 0 {
		token := bson.D{{Key: "_data", Value: hexDigits(2 * r.IntN(200))}}
		if r.IntN(3) == 0 {
			token = append(token, bson.E{Key: "_typeBits", Value: binary(r.IntN(20))})
		}
		c.Position.Token = raw(t, token)
	}
	if r.IntN(2) == 0 {
		c.Watch.ReplicaSet = bson.NewObjectID()
	}
	for range r.IntN(4) {
		w := Watched{Name: "c" + randomName(r), UUID: binary(16), Before: r.IntN(2) == 0, After: r.IntN(2) == 0}
		for range 1 + r.IntN(3) {
			w.Bindings = append(w.Bindings, "rollup into "+randomName(r))
		}
		c.Watch.Collections = append(c.Watch.Collections, w)
	}
	for range r.IntN(3) {
		c.Samples = append(c.Samples, Sample{Collection: randomName(r), Key: StoredKey(key()), Document: int64(r.Uint64()), Result: int64(r.Uint64())}) //nolint:gosec // any bits
	}
	if r.IntN(2) == 0 {
		c.Rebuild = &Rebuild{Mode: []Mode{Shadow, Reset, InPlace}[r.IntN(3)], Mark: r.Int64N(5), Began: time.UnixMilli(r.Int64N(4e12)).UTC(), Cause: "code 286" + randomName(r)}
		for range 1 + r.IntN(3) {
			c.Rebuild.Read = append(c.Rebuild.Read, Copied{Collection: "c" + randomName(r), Last: StoredKey(key()), Rows: r.Int64N(1e12), Done: r.IntN(2) == 0})
		}
	}
	for range r.IntN(3) {
		c.Pending = append(c.Pending, Pending{Binding: r.IntN(5), Key: StoredKey(key())})
	}
	return c
}

func randomName(r *rand.Rand) string {
	return []string{"", "orders", "Bestellungen äöü", `a"b\`, "a b.c", "$oid", "<&>\u2028"}[r.IntN(7)]
}

// What is stored comes back, the token byte for byte: it is the source's own.
func TestCheckpointComesBackAsItWas(t *testing.T) {
	r := random(t)
	for i := range effort.Values(5000) {
		want := randomCheckpoint(t, r)
		b, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeCheckpoint(want.Projection, b)
		if err != nil {
			t.Fatalf("checkpoint %d: %v\n%s", i, err, b)
		}
		if !bytes.Equal(got.Position.Token, want.Position.Token) {
			t.Fatalf("checkpoint %d: token %s, was %s", i, got.Position.Token, want.Position.Token)
		}
		if again, err := got.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("checkpoint %d: encodes to %s, was %s (%v)", i, again, b, err)
		}
		if want.Watch.Collections == nil {
			want.Watch.Collections = got.Watch.Collections // null and none are the same
		}
		if !reflect.DeepEqual(got, want) || len(got.Watch.Collections) != len(want.Watch.Collections) {
			t.Fatalf("checkpoint %d: got\n%+v, want\n%+v", i, got, want)
		}
		if !got.same(want) {
			t.Fatal("it is not the same commit")
		}
	}
}

// A commit whose answer was lost is told from every other one.
func TestCommitsAreToldApart(t *testing.T) {
	c := randomCheckpoint(t, random(t))
	c.Term, c.Sequence = 3, 7
	for name, change := range map[string]func(*Checkpoint){
		"term":     func(o *Checkpoint) { o.Term++ },
		"sequence": func(o *Checkpoint) { o.Sequence++ },
		"time":     func(o *Checkpoint) { o.Position.Time.I++ },
		"token":    func(o *Checkpoint) { o.Position.Token = append(clone(o.Position.Token), 1) },
		"settled":  func(o *Checkpoint) { o.Settled = !o.Settled },
		"clock":    func(o *Checkpoint) { o.CommittedAt = o.CommittedAt.Add(time.Millisecond) },
	} {
		o := c
		if change(&o); c.same(o) {
			t.Errorf("two commits that differ in %s count as one", name)
		}
	}
}

// Whatever else stands where a checkpoint should be is refused, with an error that says
// whose it is; a format of the future with one that says so.
func TestGarbageIsNoCheckpoint(t *testing.T) {
	r := random(t)
	c := randomCheckpoint(t, r)
	good, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	refused := func(name string, b []byte) {
		t.Helper()
		got, err := DecodeCheckpoint(c.Projection, b)
		var malformed *CheckpointError
		if !errors.As(err, &malformed) || malformed.Projection != c.Projection || !reflect.DeepEqual(got, Checkpoint{}) {
			t.Errorf("%s: %v, %+v", name, err, got)
		}
	}
	with := func(field string, value any) []byte {
		t.Helper()
		var doc bson.D
		if err := bson.UnmarshalExtJSON(good, true, &doc); err != nil {
			t.Fatal(err)
		}
		for i := range doc {
			if doc[i].Key == field {
				doc[i].Value = value
			}
		}
		b, err := bson.MarshalExtJSON(doc, true, false)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	refused("nothing", nil)
	refused("blanks", []byte("  \n"))
	refused("null", []byte("null"))
	refused("a list", []byte("[]"))
	refused("an empty document", []byte("{}"))
	for n := range len(good) {
		refused("cut off", good[:n])
	}
	for range 1000 {
		b := make([]byte, r.IntN(200))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		refused("random bytes", b)
	}
	refused("format 0", with("format", int32(0)))
	refused("format -1", with("format", int32(-1)))
	refused("format of another type", with("format", "1"))
	refused("another projection's", with("projection", "other"))
	refused("no place", with("place", ""))
	refused("no generation", with("generation", int64(0)))
	refused("unknown phase", with("phase", "waning"))
	refused("a position that is none", with("position", "start"))
	refused("a token that is none", with("position", bson.D{{Key: "token", Value: "82"}, {Key: "time", Value: bson.Timestamp{T: 1}}}))
	refused("a time that is none", with("position", bson.D{{Key: "time", Value: int64(1)}}))

	var newer *FormatError
	if _, err := DecodeCheckpoint(c.Projection, with("format", int32(CheckpointFormat+1))); !errors.As(err, &newer) || newer.Stored != CheckpointFormat+1 || newer.Known != CheckpointFormat {
		t.Errorf("a newer format: %v", err)
	}
	// The layout of a newer format is its own affair: only its number is read.
	if _, err := DecodeCheckpoint(c.Projection, []byte(`{"format": 7, "position": [1, 2]}`)); !errors.As(err, &newer) {
		t.Errorf("a newer format of another layout: %v", err)
	}
}

func FuzzDecodeCheckpoint(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		c := randomCheckpoint(f, r)
		c.Projection = "p"
		b, err := c.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeCheckpoint("p", b)
		if err != nil {
			if !isCheckpointError(err) {
				t.Errorf("%v", err)
			}
			return
		}
		if c.Projection != "p" || c.Generation < 1 || c.Place == "" {
			t.Errorf("accepted: %+v", c)
		}
		_ = c.Position.String()
	})
}

// Everything in which a stored checkpoint can differ from its projection is told, in
// words, and all of it at once: the server would accept its token in silence.
// (CASES B08: a collection removed from the set.)
func TestMismatchesAreTold(t *testing.T) {
	uuid := bson.Binary{Subtype: 4, Data: bytes.Repeat([]byte{1}, 16)}
	watch := func() Watch {
		return Watch{ReplicaSet: bson.ObjectID{1}, Database: "shop", Collections: []Watched{
			{Name: "orders", UUID: uuid, Before: true, After: true, Bindings: []string{"rollup into counts", "mirror into orders"}},
			{Name: "carts", UUID: uuid, After: true, Bindings: []string{"mirror into carts"}},
		}}
	}
	p := &plan{projection: "p", version: 2}
	for name, c := range map[string]struct {
		change func(stored *Checkpoint, now *Watch)
		want   []string
	}{
		"nothing":            {func(*Checkpoint, *Watch) {}, nil},
		"version":            {func(s *Checkpoint, _ *Watch) { s.Version = 1 }, []string{"Version 1", "Version 2"}},
		"database":           {func(_ *Checkpoint, n *Watch) { n.Database = "shop2" }, []string{`"shop"`, `"shop2"`}},
		"replica set":        {func(_ *Checkpoint, n *Watch) { n.ReplicaSet[0] = 9 }, []string{"another replica set"}},
		"replica set hidden": {func(_ *Checkpoint, n *Watch) { n.ReplicaSet = bson.NilObjectID }, nil},
		"replica set shown":  {func(s *Checkpoint, _ *Watch) { s.Watch.ReplicaSet = bson.NilObjectID }, nil},
		"binding added": {func(_ *Checkpoint, n *Watch) {
			n.Collections[1].Bindings = []string{"mirror into carts", "on"}
		}, []string{`"carts"`, "mirror into carts on"}},
		"binding's target":   {func(_ *Checkpoint, n *Watch) { n.Collections[1].Bindings = []string{"mirror into c2"} }, []string{"mirror into c2", "were [mirror into carts]"}},
		"images":             {func(_ *Checkpoint, n *Watch) { n.Collections[1].Before = true }, []string{`"carts"`, "other images"}},
		"collection added":   {func(_ *Checkpoint, n *Watch) { n.Collections = append(n.Collections, Watched{Name: "new"}) }, []string{`"new" is new`}},
		"collection removed": {func(_ *Checkpoint, n *Watch) { n.Collections = n.Collections[:1] }, []string{`"carts" is no longer followed`}},
		"order only":         {func(_ *Checkpoint, n *Watch) { n.Collections[0], n.Collections[1] = n.Collections[1], n.Collections[0] }, nil},
	} {
		stored := Checkpoint{Version: 2, Watch: watch()}
		now := watch()
		c.change(&stored, &now)
		got := ""
		if m := p.mismatches(stored, now); m != nil {
			got = strings.Join(m.Differs, "; ")
		}
		if len(c.want) == 0 && got != "" {
			t.Errorf("%s: %s", name, got)
		}
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: %q does not say %q", name, got, w)
			}
		}
	}
	stored := Checkpoint{Version: 1, Watch: watch()}
	now := watch()
	now.Database = "shop2"
	now.Collections = append(now.Collections[:1], Watched{Name: "new"})
	if got := p.mismatches(stored, now); len(got.Differs) != 4 {
		t.Errorf("of 4 differences %d are told: %q", len(got.Differs), got.Differs)
	}
}

// A rebuild is for a later Version and for another source; an earlier release must not
// rebuild what a later one has built, and a difference under one Version is a mistake.
func TestMismatchesThatARebuildMends(t *testing.T) {
	p := &plan{projection: "p", version: 2}
	orders := func(binding string) Watch {
		return Watch{ReplicaSet: bson.ObjectID{1}, Database: "shop", Collections: []Watched{{Name: "orders", Bindings: []string{binding}}}}
	}
	elsewhere := orders("mirror")
	elsewhere.ReplicaSet[0] = 2
	for name, c := range map[string]struct {
		version int
		now     Watch
		want    bool
	}{
		"later version":                   {1, orders("mirror"), true},
		"later version, other binding":    {1, orders("rollup"), true},
		"same version, other binding":     {2, orders("rollup"), false},
		"earlier version":                 {3, orders("mirror"), false},
		"another source":                  {2, elsewhere, true},
		"another source, earlier version": {3, elsewhere, false},
	} {
		m := p.mismatches(Checkpoint{Version: c.version, Watch: orders("mirror")}, c.now)
		if m == nil || m.Rebuild != c.want {
			t.Errorf("%s: %+v, want Rebuild %v", name, m, c.want)
		}
	}
}
