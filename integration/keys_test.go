package integration_test

import (
	"math"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/tidemark-go/tidemark/projector"
)

// everyKey is an _id of every type that MongoDB takes as one, and strings that look
// like them.
func everyKey(t *testing.T) []bson.RawValue {
	decimal := func(s string) bson.Decimal128 {
		d, err := bson.ParseDecimal128(s)
		must(t, err)
		return d
	}
	id := bson.NewObjectID()
	var keys []bson.RawValue
	for _, v := range []any{
		id, int32(42), int64(1 << 40), int64(math.MinInt64), 1.5, -1e300, math.Inf(1), math.NaN(), float64(1 << 63),
		decimal("2.50"), decimal("1E+400"), decimal("-Infinity"), true, false,
		bson.Null{},
		bson.MinKey{},
		bson.MaxKey{},
		bson.DateTime(1795953600123), bson.DateTime(-1), bson.DateTime(math.MaxInt64),
		bson.Timestamp{T: 7, I: 3},
		bson.Binary{Subtype: 0, Data: []byte{0, 1, 255}},
		bson.Binary{Subtype: 4, Data: make([]byte, 16)},
		bson.Binary{Subtype: 3, Data: make([]byte, 16)},
		bson.Binary{Subtype: 2, Data: []byte("old")},
		bson.Binary{Subtype: 128, Data: nil},
		bson.D{},
		bson.D{{Key: "a", Value: 1}, {Key: "b", Value: "x"}},
		bson.D{{Key: "b", Value: "x"}, {Key: "a", Value: 1}},
		bson.D{{Key: "a", Value: bson.A{1, bson.D{{Key: "n", Value: math.NaN()}}}}},
		bson.D{{Key: "r", Value: bson.Regex{Pattern: "^a"}}},
		bson.JavaScript("1"), bson.Symbol("symbol"),
		bson.DBPointer{DB: "d", Pointer: id},
		bson.CodeWithScope{Code: "1", Scope: bson.D{}},
	} {
		keys = append(keys, raw(t, v))
	}
	texts := []string{"", "plain", "42x", "a\nb", "a\u0000b", "ü\u2028", `"`, `\`, "%", "\xff", "a\xc3", "�"}
	for _, k := range keys {
		texts = append(texts, projector.KeyText(k))
	}
	for _, s := range texts {
		keys = append(keys, bson.RawValue{Type: bson.TypeString, Value: bsoncore.AppendString(nil, s)})
	}
	return keys
}

// Documents whatever their _id is are mirrored, updated and deleted, each its own row.
// (CASES B81, B84, B85: odd values that stop a sync or run into each other.)
func TestKeysOfEveryType(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("keyed"))
	keys := everyKey(t)
	for i, k := range keys {
		_, err := f.coll().InsertOne(t.Context(), bson.D{{Key: "_id", Value: k}, {Key: "name", Value: k.Type.String()}, {Key: "n", Value: i}})
		if err != nil {
			t.Fatalf("%s: %v", projector.KeyText(k), err)
		}
	}
	g.level(f.db)
	if n := len(f.rows("keyed")); n != len(keys) {
		t.Errorf("%d documents have %d rows", len(keys), n)
	}
	f.same("keyed")
	for i, k := range keys {
		r, err := f.coll().UpdateOne(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$eq", Value: k}}}}, set("n", -i))
		if err != nil || r.MatchedCount != 1 {
			t.Fatalf("%s: %v, %+v", projector.KeyText(k), err, r)
		}
	}
	g.level(f.db)
	f.same("keyed")
	for i, k := range keys {
		if i%2 == 0 {
			r, err := f.coll().DeleteOne(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$eq", Value: k}}}})
			if err != nil || r.DeletedCount != 1 {
				t.Fatalf("%s: %v, %+v", projector.KeyText(k), err, r)
			}
		}
	}
	g.level(f.db)
	f.same("keyed")
	g.stop()
}

// MongoDB lets a replacement change the type of a number in an _id; the replacement's change
// still has the old _id, every later one the new. Equal numbers have one text form whatever
// their types, so the row stays its document's: it is updated, and goes with it, in one batch
// or in several.
func TestKeysWhoseNumberChangesItsType(t *testing.T) {
	f := newThings(t)
	changed := func(from, to any) {
		id := bson.D{{Key: "_id", Value: from}}
		_, err := f.coll().InsertOne(t.Context(), append(id, bson.E{Key: "n", Value: 1}))
		must(t, err)
		_, err = f.coll().ReplaceOne(t.Context(), id, bson.D{{Key: "_id", Value: to}, {Key: "n", Value: 2}})
		must(t, err)
	}
	for _, opts := range [][]projector.MirrorOption{nil, {projector.Lookup()}} {
		p := mirror(unique("keyed_"), opts...)
		g := f.run(p)
		changed(int32(1), 1.0)
		changed(int64(2), int32(2))
		changed(3.0, decimal128(t, "3.00"))
		changed(int64(4), 4.0)
		changed(6.5, decimal128(t, "6.50"))
		changed(bson.D{{Key: "a", Value: int32(7)}}, bson.D{{Key: "a", Value: 7.0}})
		_, err := f.coll().UpdateByID(t.Context(), 1, set("n", 3))
		must(t, err)
		g.level(f.db)
		f.same(p.Name)
		g.stop() // so that what follows is one batch
		_, err = f.coll().UpdateMany(t.Context(), bson.D{}, set("n", 4))
		must(t, err)
		changed(int32(5), 5.0)
		_, err = f.coll().DeleteMany(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: 2}}}})
		must(t, err)
		g = f.run(p)
		g.level(f.db)
		f.same(p.Name)
		g.stop()
		_, err = f.coll().DeleteMany(t.Context(), bson.D{})
		must(t, err)
	}
}

func decimal128(t *testing.T, s string) bson.Decimal128 {
	d, err := bson.ParseDecimal128(s)
	must(t, err)
	return d
}
