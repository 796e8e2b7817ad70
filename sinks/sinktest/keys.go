package sinktest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

func keyChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"keys/ids-apart", nil, keysApart[Tx]},
		{"keys/equal-numbers-are-one-id", nil, keysEqual[Tx]},
		{"keys/long-ids", nil, keysLong[Tx]},
		{"keys/columns-apart", keyed, keysColumns[Tx]},
		{"keys/every-kind", keyed, keysKinds[Tx]},
	}
}

// keysApart mirrors documents with _ids of every type, and removes every other one.
func keysApart[Tx any](e *env[Tx]) {
	o := e.begin()
	all := ids()
	rows := make([]documentRow, len(all))
	want := make([]string, len(all))
	for i, v := range all {
		rows[i] = documentRow{Owner: v, Version: e.version.Add(1), Row: &Document{"d", int64(i)}}
		want[i] = keptText(Kept[Document]{*rows[i].Row, projector.KeyText(v)}, true)
	}
	o.mustCommit(put(e.Documents, nil, rows))
	e.wantRows("with _ids of every type", e.documents(o.place()), slices.Clone(want))
	var remove []documentRow
	var rest []string
	for i, r := range rows {
		if i%2 == 0 {
			remove = append(remove, documentRow{Owner: r.Owner, Version: e.version.Add(1)})
		} else {
			rest = append(rest, want[i])
		}
	}
	o.mustCommit(put(e.Documents, remove, nil))
	e.wantRows("after every other one was removed", e.documents(o.place()), rest)
}

// keysEqual: numbers that MongoDB takes for the same _id belong to one document.
func keysEqual[Tx any](e *env[Tx]) {
	o := e.begin()
	for i, v := range []any{int32(7), int64(7), 7.0, decimal("7"), decimal("7.00"), decimal("70E-1")} {
		row := documentRow{Owner: value(v), Version: e.version.Add(1), Row: &Document{"d", int64(i)}}
		o.mustCommit(put(e.Documents, nil, []documentRow{row}))
		e.wantRows(fmt.Sprintf("after the _id was a %T", v), e.documents(o.place()), []string{keptText(Kept[Document]{*row.Row, "7"}, true)})
	}
	o.mustCommit(put(e.Documents, []documentRow{{Owner: value(7.0), Version: e.version.Add(1)}}, nil))
	e.wantRows("after the removal", e.documents(o.place()), nil)
}

// keysLong: an _id is stored whole, or refused; cut off it would meet another.
func keysLong[Tx any](e *env[Tx]) {
	o := e.begin()
	var want []string
	for _, length := range []int{200, 600, 3_000, 20_000} {
		long := noise(e.rng, length)
		for _, end := range []string{"1", "2"} {
			row := documentRow{Owner: id(long + end), Version: e.version.Add(1), Row: &Document{"d", int64(length)}}
			err := o.commit(e.ctx, put(e.Documents, nil, []documentRow{row}))
			if err == nil {
				want = append(want, keptText(Kept[Document]{*row.Row, projector.KeyText(row.Owner)}, true))
			} else {
				e.wantClass(fmt.Sprintf("an _id of %d bytes", length), o.sink, err, projector.Poison)
				e.Logf("an _id of %d bytes is refused", length)
			}
			if err != nil && length <= 200 {
				e.Errorf("an _id of %d bytes is refused: %v", length, err)
			}
			o.stands("after a long _id")
			e.wantRows("after a long _id", e.documents(o.place()), slices.Clone(want))
		}
	}
}

// noise is a text that does not compress.
func noise(rng *rand.Rand, length int) string {
	var b strings.Builder
	for range length {
		b.WriteByte("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"[rng.IntN(64)])
	}
	return b.String()
}

// keysColumns: keys of two columns are told apart as pairs.
func keysColumns[Tx any](e *env[Tx]) {
	o := e.begin()
	var rows []entryRow
	for _, k := range [][2]string{
		{"a", "bc"},
		{"ab", "c"},
		{"abc", ""},
		{"", "abc"},
		{"", ""},
		{"a|b", "c"},
		{"a", "b|c"},
		{"a,b", "c"},
		{"a", "b,c"},
		{"a/b", "c"},
		{"a", "b/c"},
		{"a:b", "c"},
		{"a", "b:c"},
		{"a b", "c"},
		{"a", "b c"},
		{`a"`, "b"},
		{"a", `"b`},
		{"A", "bc"},
		{"a", "bc "},
		{"ä", "b"},
		{"a\u0308", "b"},
		{"a\x1f", "b"},
		{"a", "\x1fb"},
		{"a\n", "b"},
		{"a", "\nb"},
	} {
		rows = append(rows, e.entry("d", k[0], k[1], int64(len(rows))))
	}
	o.mustCommit(put(e.Entries, nil, rows))
	e.wantRows("with keys that look alike", e.entries(o.place()), e.entryTexts(rows...))
	var remove, rest []entryRow
	for i, r := range rows {
		r.Version = e.version.Add(1)
		if i%2 == 0 {
			remove = append(remove, r)
		} else {
			rest = append(rest, r)
		}
	}
	o.mustCommit(put(e.Entries, remove, nil))
	e.wantRows("after every other one was removed", e.entries(o.place()), e.entryTexts(rest...))
}

// keysKinds: keys of every kind come back as they were, and tell rows apart by every
// column.
func keysKinds[Tx any](e *env[Tx]) {
	o := e.begin()
	base := Keys{Text: "t", Int: 1, Time: time.UnixMilli(1_700_000_000_123).UTC(), ObjectID: bson.ObjectID{1}}
	var rows []projector.Row[Keys]
	for i, change := range []func(*Keys){
		func(*Keys) {},
		func(k *Keys) { k.Text = "T" },
		func(k *Keys) { k.Text = "" },
		func(k *Keys) { k.Flag = true },
		func(k *Keys) { k.Int = -1 << 63 },
		func(k *Keys) { k.Int = 1<<63 - 1 },
		func(k *Keys) { k.Int = 1<<53 + 1 },
		func(k *Keys) { k.Int = 1 << 53 },
		func(k *Keys) { k.Time = k.Time.Add(time.Millisecond) },
		func(k *Keys) { k.Time = time.UnixMilli(-1).UTC() },
		func(k *Keys) { k.Time = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC) },
		func(k *Keys) { k.ObjectID = bson.ObjectID{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1} },
		func(k *Keys) { k.ObjectID = bson.ObjectID{} },
	} {
		k := base
		change(&k)
		k.N = int64(i)
		rows = append(rows, projector.Row[Keys]{Owner: id("d"), Version: e.version.Add(1), Row: &k})
	}
	o.mustCommit(put(e.Keys, nil, rows))
	o.wantKeys("with keys of every kind", rows)
	// The same moment by another clock, and below the millisecond, is the same key.
	zone := base
	zone.Time, zone.N = base.Time.In(time.FixedZone("elsewhere", 3600)).Add(999*time.Microsecond), 77
	rows[0] = projector.Row[Keys]{Owner: id("d"), Version: e.version.Add(1), Row: &zone}
	o.mustCommit(put(e.Keys, nil, rows[:1]))
	o.wantKeys("after the same key in another time zone", rows)
	half := make([]projector.Row[Keys], 0, len(rows))
	for _, r := range rows[:len(rows)/2] {
		r.Version = e.version.Add(1)
		half = append(half, r)
	}
	o.mustCommit(put(e.Keys, half, nil))
	o.wantKeys("after half were removed", rows[len(rows)/2:])
}

func (o *owner[Tx]) wantKeys(after string, rows []projector.Row[Keys]) {
	o.Helper()
	stored, err := o.Keys.Rows(o.ctx, o.place())
	o.must("read the keys", err)
	want := make([]string, len(rows))
	for i, r := range rows {
		want[i] = keptText(Kept[Keys]{*r.Row, projector.KeyText(r.Owner)}, o.features.Owners)
	}
	o.wantRows(after, keptTexts(stored, o.features.Owners), want)
}

// ids are _ids of every type that MongoDB allows, each of them apart from all others.
func ids() []bson.RawValue {
	oid := bson.ObjectID{0x65, 0xf1, 0xc0, 0xff, 0xee, 0x65, 0xf1, 0xc0, 0xff, 0xee, 0x65, 0xf1}
	all := []any{
		oid, oid.Hex(),
		bson.ObjectID{},
		"ObjectID(" + oid.Hex() + ")",
		int32(42), "42", int64(1) << 53, int64(1)<<53 + 1, int32(-1), "-1", int32(0), "", "0",
		1.5, "1.5", "double(1.5)", decimal("2.5"), "decimal(2.5)", decimal("1E+400"), decimal("NaN"), 1e300, "1e300",
		true, "true", false,
		bson.Null{},
		"null",
		bson.MinKey{},
		"minKey",
		bson.MaxKey{},
		bson.DateTime(1_700_000_000_123), int64(1_700_000_000_123), bson.DateTime(1_700_000_000_124),
		bson.DateTime(-1), bson.DateTime(1 << 60),
		bson.Timestamp{T: 1, I: 2},
		bson.Timestamp{T: 2, I: 1},
		"timestamp(1,2)",
		bson.Binary{Subtype: 4, Data: []byte("0123456789abcdef")},
		bson.Binary{Subtype: 3, Data: []byte("0123456789abcdef")},
		bson.Binary{Data: []byte("0123456789abcdef")},
		bson.Binary{Data: []byte{0, 255}},
		bson.Binary{},
		bson.D{},
		"{}",
		bson.D{{Key: "a", Value: "1"}},
		bson.D{{Key: "a", Value: int32(1)}},
		`{"a":"1"}`,
		bson.D{{Key: "a", Value: 1.5}, {Key: "b", Value: oid}},
		bson.D{{Key: "b", Value: oid}, {Key: "a", Value: 1.5}},
		bson.D{{Key: "a", Value: bson.D{{Key: "b", Value: nil}}}},
		bson.D{{Key: "a", Value: bson.A{"x", "y"}}},
		bson.D{{Key: "a", Value: "x,y"}},
		bson.JavaScript("f()"), "f()", bson.Symbol("s"), // which MongoDB takes for the same as the string "s"
		"a", "A", "a ", " a", "\u00e4", "a\u0308", "a\nb", "a\x00b", "a\x00c", "\x00", "\"a\"", "a'b", "a/b", "a?b=c#d", "_id", "$a", "\U0001F30A",
	}
	values := make([]bson.RawValue, len(all))
	for i, v := range all {
		values[i] = value(v)
	}
	return values
}
