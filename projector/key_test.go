package projector

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
)

func valueOf(v any) bson.RawValue {
	t, b, err := bson.MarshalValue(v)
	if err != nil {
		panic(err)
	}
	return bson.RawValue{Type: t, Value: b}
}

// A string is built by hand, since the driver would mend invalid UTF-8.
func stringValue(s string) bson.RawValue {
	return bson.RawValue{Type: bson.TypeString, Value: bsoncore.AppendString(nil, s)}
}

func TestKeyTextIsReadable(t *testing.T) {
	decimal := func(s string) bson.RawValue {
		d, err := bson.ParseDecimal128(s)
		if err != nil {
			t.Fatal(err)
		}
		return valueOf(d)
	}
	id, _ := bson.ObjectIDFromHex("65f1c0ffee65f1c0ffee65f1")
	for _, c := range []struct {
		v    bson.RawValue
		want string
	}{
		{valueOf(id), "65f1c0ffee65f1c0ffee65f1"},
		{stringValue("65f1c0ffee65f1c0ffee65f1"), `"65f1c0ffee65f1c0ffee65f1"`},
		{stringValue("65F1C0FFEE65F1C0FFEE65F1"), "65F1C0FFEE65F1C0FFEE65F1"},
		{stringValue("order-17"), "order-17"},
		{stringValue("Zürich (Altstadt)"), "Zürich (Altstadt)"},
		{stringValue(""), `""`},
		{stringValue("42"), `"42"`},
		{stringValue("-"), "-"},
		{stringValue("4.2"), "4.2"},
		{stringValue("true"), `"true"`},
		{stringValue("a\nb"), `"a\nb"`},
		{stringValue("a\x00b"), `"a\x00b"`},
		{stringValue("\xff"), `"\xff"`},
		{stringValue("date(1)"), `"date(1)"`},
		{stringValue(`"x`), `"\"x"`},
		{valueOf(int32(42)), "42"},
		{valueOf(int64(42)), "42"},
		{valueOf(42.0), "42"},
		{valueOf(math.Copysign(0, -1)), "0"},
		{valueOf(1.5), "number(1.5)"},
		{valueOf(math.Inf(-1)), "number(-Infinity)"},
		{valueOf(float64(1 << 63)), "number(9223372036854775808)"},
		{decimal("42.00"), "42"},
		{decimal("4.2E1"), "42"},
		{decimal("-1.50"), "number(-1.5)"},
		{decimal("0.001"), "number(0.001)"},
		{decimal("1E+40"), "number(1E40)"},
		{decimal("-0E-20"), "0"},
		{valueOf(true), "true"},
		{valueOf(bson.Null{}), "null"},
		{valueOf(bson.DateTime(1795953600000)), "date(2026-11-29T12:00:00.000Z)"},
		{valueOf(bson.DateTime(math.MaxInt64)), "date(9223372036854775807)"},
		{valueOf(bson.Binary{Subtype: 4, Data: bytes.Repeat([]byte{0xab}, 16)}), "uuid(abababab-abab-abab-abab-abababababab)"},
		{valueOf(bson.Binary{Subtype: 0, Data: []byte("hi")}), "binary(0,aGk=)"},
		{valueOf(bson.Timestamp{T: 7, I: 3}), "timestamp(7,3)"},
		{valueOf(bson.D{{Key: "a", Value: int32(1)}}), `{"a":1}`},
		{valueOf(bson.MinKey{}), "minKey"},
		{valueOf(bson.MaxKey{}), "maxKey"},
	} {
		if got := KeyText(c.v); got != c.want {
			t.Errorf("%s: got %s, want %s", c.v, got, c.want)
		}
	}
}

// Two values that MongoDB holds apart never share a text form: an _id "42" beside an
// _id 42, a string that spells another value's form, NaN, invalid UTF-8, documents
// whose names are extended JSON's own. (CASES B81, B84, B85.)
func TestNoTwoKeysShareATextForm(t *testing.T) {
	r := random(t)
	if a, b, ok := collision(r, effort.Values(300_000)); ok {
		t.Errorf("%s shared by %v and %v", KeyText(a), show(a), show(b))
	}
	t.Run("control without "+string(fault.InjectiveKeys), func(t *testing.T) {
		defer fault.Global.Disable(fault.InjectiveKeys)()
		a, b, ok := collision(r, effort.Values(300_000))
		if !ok {
			t.Fatal("nothing notices that the guard is off")
		}
		t.Logf("noticed: %s shared by %v and %v", KeyText(a), show(a), show(b))
	})
}

func show(v bson.RawValue) string { return fmt.Sprintf("%s %x", v.Type, v.Value) }

// collision makes n random values, each also as a string that spells its form, and
// looks for two that share one though MongoDB holds them apart.
func collision(r *rand.Rand, n int) (a, b bson.RawValue, found bool) {
	seen := make(map[string]bson.RawValue, n)
	try := func(v bson.RawValue) bool {
		text := KeyText(v)
		old, ok := seen[text]
		if !ok {
			seen[text] = v
			return false
		}
		if equal(old, v) {
			return false
		}
		a, b = old, v
		return true
	}
	for range n {
		v := randomKey(r, 0)
		if try(v) {
			return a, b, true
		}
		if text := KeyText(v); try(stringValue(text)) || try(stringValue(strings.Trim(text, `"`))) {
			return a, b, true
		}
	}
	return a, b, false
}

// alphabet is what strings are made of: pieces of other forms, and what quoting minds.
var alphabet = []string{
	"", "a", "4", "2", "-", "true", "null", "minKey", "date(", "uuid(", "binary(0,", "bson(2,", "double(", "decimal(", ")", "(", "{", "}",
	`"`, `\`, `\n`, "\n", "\x00", "\x7f", "\xff", "\xc3", "ü", "�", `�`, "\u2028", "65f1c0ffee65f1c0ffee65f1", ".", "E", " ", `{"a":1}`, "$oid",
}

func randomString(r *rand.Rand) string {
	var s strings.Builder
	for range r.IntN(4) {
		s.WriteString(alphabet[r.IntN(len(alphabet))])
	}
	return s.String()
}

var names = []string{"a", "b", "", "$oid", "$numberInt", "$date", "_id", "a.b", "ü", "\xff", `"`}

// randomKey is a value of any type that MongoDB takes as an _id, and at depth also of
// those that it takes only inside one. Values are drawn from few, so that they meet.
func randomKey(r *rand.Rand, depth int) bson.RawValue {
	types := 13
	if depth > 0 {
		types = 19
	}
	small := func() int64 {
		switch r.IntN(6) {
		case 0:
			return []int64{math.MinInt64, math.MaxInt64, 1 << 53, 1<<53 + 1, math.MinInt32, 1 << 62}[r.IntN(6)]
		case 1:
			return -int64(r.IntN(100))
		}
		return int64(r.IntN(100))
	}
	switch r.IntN(types) {
	case 0:
		return stringValue(randomString(r))
	case 1:
		return valueOf(small())
	case 2:
		return valueOf(int32(small())) //nolint:gosec // any will do
	case 3:
		f := []float64{float64(small()), float64(small()) / 4, math.Inf(1), math.Inf(-1), math.NaN(), math.Copysign(0, -1), 1 << 63, -(1 << 63), 1e300, 5e-324}
		if i := r.IntN(len(f) + 1); i < len(f) {
			return valueOf(f[i])
		}
		return valueOf(math.Float64frombits(r.Uint64()))
	case 4:
		texts := []string{"NaN", "Infinity", "-Infinity", "-0", "0E-6176", "1E6111", "9.999999999999999999999999999999999E6144", "9223372036854775807", "9223372036854775808", "-9223372036854775808"}
		if i := r.IntN(2 * len(texts)); i < len(texts) {
			d, _ := bson.ParseDecimal128(texts[i])
			return valueOf(d)
		}
		d, _ := bson.ParseDecimal128(fmt.Sprintf("%dE%d", small(), r.IntN(90)-45))
		return valueOf(d)
	case 5:
		var id bson.ObjectID
		id[11] = byte(r.IntN(8))
		return valueOf(id)
	case 6:
		return valueOf(r.IntN(2) == 0)
	case 7:
		return valueOf(bson.DateTime(small() * []int64{1, 1000, 86_400_000_000}[r.IntN(3)]))
	case 8:
		data := make([]byte, []int{0, 1, 2, 16}[r.IntN(4)])
		for i := range data {
			data[i] = byte(r.IntN(2))
		}
		return bson.RawValue{Type: bson.TypeBinary, Value: bsoncore.AppendBinary(nil, []byte{0, 2, 3, 4, 5, 128}[r.IntN(6)], data)}
	case 9:
		return valueOf(bson.Timestamp{T: uint32(r.IntN(3)), I: uint32(r.IntN(30))})
	case 10:
		return valueOf(bson.Null{})
	case 11:
		if r.IntN(2) == 0 {
			return valueOf(bson.MinKey{})
		}
		return valueOf(bson.MaxKey{})
	case 12:
		return randomDocument(r, depth, bson.TypeEmbeddedDocument)
	case 13:
		return randomDocument(r, depth, bson.TypeArray)
	case 14:
		return valueOf(bson.Regex{Pattern: []string{"a", "b/"}[r.IntN(2)], Options: []string{"", "i"}[r.IntN(2)]})
	case 15:
		return valueOf(bson.Symbol(randomString(r)))
	case 16:
		return valueOf(bson.JavaScript(randomString(r)))
	case 17:
		return valueOf(bson.Undefined{})
	default:
		return valueOf(bson.DBPointer{DB: "a", Pointer: bson.ObjectID{byte(r.IntN(2))}})
	}
}

func randomDocument(r *rand.Rand, depth int, as bson.Type) bson.RawValue {
	var elements []byte
	if depth < 3 {
		for i := range r.IntN(3) {
			v := randomKey(r, depth+1)
			name := names[r.IntN(len(names))]
			if as == bson.TypeArray {
				name = fmt.Sprint(i)
			}
			elements = bsoncore.AppendValueElement(elements, name, bsoncore.Value{Type: bsoncore.Type(v.Type), Data: v.Value})
		}
	}
	return bson.RawValue{Type: as, Value: bsoncore.BuildDocument(nil, elements)}
}

// equal is MongoDB's equality of two values, as its unique index on _id has it:
// numbers by value whatever their type, documents field by field in order.
func equal(a, b bson.RawValue) bool {
	if x, y := numberOf(a), numberOf(b); x != nil || y != nil {
		return x != nil && y != nil && (x.nan && y.nan || x.nan == y.nan && x.inf == y.inf && (x.inf != 0 || x.rat.Cmp(&y.rat) == 0))
	}
	text := func(t bson.Type) bool { return t == bson.TypeString || t == bson.TypeSymbol }
	switch {
	case text(a.Type) && text(b.Type):
		return bytes.Equal(a.Value, b.Value)
	case a.Type != b.Type:
		return false
	case a.Type != bson.TypeEmbeddedDocument && a.Type != bson.TypeArray:
		return bytes.Equal(a.Value, b.Value)
	}
	x, _ := bson.Raw(a.Value).Elements()
	y, _ := bson.Raw(b.Value).Elements()
	if len(x) != len(y) {
		return false
	}
	for i := range x {
		if x[i].Key() != y[i].Key() || !equal(x[i].Value(), y[i].Value()) {
			return false
		}
	}
	return true
}

type number struct {
	nan bool
	inf int
	rat big.Rat
}

func numberOf(v bson.RawValue) *number {
	n := new(number)
	switch v.Type {
	case bson.TypeInt32, bson.TypeInt64:
		n.rat.SetInt64(v.AsInt64())
	case bson.TypeDouble:
		switch f := v.Double(); {
		case math.IsNaN(f):
			n.nan = true
		case math.IsInf(f, 0):
			n.inf = int(math.Copysign(1, f))
		default:
			n.rat.SetFloat64(f)
		}
	case bson.TypeDecimal128:
		d := v.Decimal128()
		if d.IsNaN() {
			n.nan = true
			break
		}
		if n.inf = d.IsInf(); n.inf != 0 {
			break
		}
		c, exp, err := d.BigInt()
		if err != nil {
			panic(err)
		}
		if c.Sign() == 0 {
			break
		}
		p := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(exp, -exp))), nil)
		if exp < 0 {
			n.rat.SetFrac(c, p)
		} else {
			n.rat.SetInt(c.Mul(c, p))
		}
	default:
		return nil
	}
	return n
}

// Numbers that MongoDB takes for the same _id have one form, so that a document whose
// number changes its type stays the owner of its rows.
func TestWholeNumbersHaveOneFormWhateverTheirType(t *testing.T) {
	r := random(t)
	for range effort.Values(20_000) {
		n := int64(r.IntN(2001)-1000) * []int64{1, 1000, 1 << 40}[r.IntN(3)]
		d, err := bson.ParseDecimal128(fmt.Sprint(n))
		if err != nil {
			t.Fatal(err)
		}
		want := KeyText(valueOf(n))
		for _, v := range []any{float64(n), d} {
			if got := KeyText(valueOf(v)); got != want {
				t.Fatalf("%T %v: %s, as int64 %s", v, v, got, want)
			}
		}
	}
}

func FuzzKeyText(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		v := randomKey(r, 1)
		f.Add(byte(v.Type), v.Value)
	}
	f.Fuzz(func(t *testing.T, kind byte, value []byte) {
		text := KeyText(bson.RawValue{Type: bson.Type(kind), Value: value})
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			t.Errorf("%q can't be stored as text everywhere", text)
		}
	})
}
