package order_test

import (
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/order"
	"github.com/tidemark-go/tidemark/internal/order/ordertest"
)

func seeded(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func value(t testing.TB, v any) bson.RawValue {
	t.Helper()
	d, err := bson.Marshal(bson.D{{Key: "v", Value: v}})
	if err != nil {
		t.Fatal(err)
	}
	return bson.Raw(d).Lookup("v")
}

func sign(n int) int { return max(-1, min(n, 1)) }

func decimal(s string) bson.Decimal128 {
	d, err := bson.ParseDecimal128(s)
	if err != nil {
		panic(err)
	}
	return d
}

// Each line is equal values; the lines ascend.
func TestCompare(t *testing.T) {
	id := bson.ObjectID{1}
	lines := [][]any{
		{bson.MinKey{}},
		{bson.Undefined{}},
		{nil},
		{math.NaN(), -math.NaN(), math.Float64frombits(0xfff8000000000123), decimal("NaN"), bson.NewDecimal128(0xfe<<56, 7)},
		{math.Inf(-1), decimal("-Infinity")},
		{decimal("-9.999999999999999999999999999999999E+6144")},
		{-math.MaxFloat64},
		{-0x1p63, int64(math.MinInt64), decimal("-9223372036854775808")},
		{-1.5, decimal("-1.5"), decimal("-1.50")},
		{int32(-1), int64(-1), -1.0, decimal("-1"), decimal("-1.000")},
		{-math.SmallestNonzeroFloat64},
		{int32(0), int64(0), 0.0, math.Copysign(0, -1), decimal("0"), decimal("-0"), decimal("0E+6000"), bson.NewDecimal128(3<<61, 1)},
		{decimal("1E-6176")},
		{math.SmallestNonzeroFloat64},
		{decimal("0.1")},
		{decimal("0.1000000000000000055511151231257826")},
		{decimal("0.1000000000000000055511151231257827")},
		{0.1}, // 0.1000000000000000055511151231257827021…
		{decimal("0.1000000000000000055511151231257828")},
		{int64(1<<53 - 1)},
		{int64(1 << 53), 0x1p53, decimal("9007199254740992")},
		{decimal("9007199254740992.5")},
		{int64(1<<53 + 1), decimal("9007199254740993")},
		{int64(math.MaxInt64 - 1)},
		{int64(math.MaxInt64), decimal("9223372036854775807")},
		{decimal("9223372036854775807.5")},
		{0x1p63, decimal("9223372036854775808")},
		{math.MaxFloat64},
		{decimal("9.999999999999999999999999999999999E+6144")},
		{math.Inf(1), decimal("Infinity")},
		{"", bson.Symbol("")},
		{"\x00"},
		{"A"},
		{"a", bson.Symbol("a")},
		{"a\x00"},
		{"aa"},
		{"\xff"},
		{bson.D{}},
		{bson.D{{Key: "z", Value: nil}}}, // type before name
		{bson.D{{Key: "z", Value: nil}, {Key: "a", Value: nil}}},
		{bson.D{{Key: "a", Value: 1}}, bson.D{{Key: "a", Value: 1.0}}},
		{bson.D{{Key: "a", Value: 2}}},
		{bson.D{{Key: "b", Value: 1}}}, // name before value
		{bson.A{}},
		{bson.A{1}},
		{bson.A{1, 0}},
		{bson.A{2}},
		{bson.A{bson.D{}}},
		{bson.Binary{}},
		{bson.Binary{Subtype: 0, Data: []byte{2}}},
		{bson.Binary{Subtype: 0x80, Data: []byte{1}}},
		{bson.Binary{Subtype: 0, Data: []byte{0, 0}}},
		{id},
		{bson.ObjectID{0xff}},
		{false},
		{true},
		{bson.DateTime(-1)},
		{bson.DateTime(0)},
		{bson.Timestamp{}},
		{bson.Timestamp{T: 1, I: math.MaxUint32}},
		{bson.Timestamp{T: math.MaxUint32}},
		{bson.Regex{Pattern: "a", Options: "i"}},
		{bson.Regex{Pattern: "a", Options: "im"}},
		{bson.Regex{Pattern: "aa"}},
		{bson.DBPointer{DB: "b", Pointer: id}},
		{bson.DBPointer{DB: "aa", Pointer: id}},
		{bson.JavaScript("a")},
		{bson.JavaScript("b")},
		{bson.CodeWithScope{Code: "a", Scope: bson.D{}}},
		{bson.CodeWithScope{Code: "a", Scope: bson.D{{Key: "a", Value: 1}}}},
		{bson.CodeWithScope{Code: "aa", Scope: bson.D{}}},
		{bson.MaxKey{}},
	}
	for i, line := range lines {
		for j, other := range lines {
			for _, a := range line {
				for _, b := range other {
					if got, want := order.Compare(value(t, a), value(t, b)), sign(i-j); sign(got) != want {
						t.Errorf("%T %[1]v and %T %[2]v: %d, want %d", a, b, got, want)
					}
				}
			}
		}
	}
}

// It is an order: what Compare says of two values is the reverse the other way round, and
// holds of those between. The values are equal, and all but equal, often.
func TestCompareIsAnOrder(t *testing.T) {
	rng := seeded(t)
	for _, make := range []func(*rand.Rand) bson.RawValue{ordertest.Nested, ordertest.Number} {
		values := []bson.RawValue{}
		for range 700 {
			values = append(values, make(rng))
		}
		slices.SortFunc(values, order.Compare)
		for i, a := range values {
			for j, b := range values[i:] {
				c := sign(order.Compare(a, b))
				if c > 0 || c != -sign(order.Compare(b, a)) || j == 0 && c != 0 {
					t.Fatalf("%v and %v, %d places after it when sorted: %d, and the other way round %d", a, b, j, c, order.Compare(b, a))
				}
				// What is equal has nothing unequal in between, and is equal to the same.
				if j > 1 && (c == 0) != (order.Compare(a, values[i+j-1]) == 0 && order.Compare(values[i+j-1], b) == 0) {
					t.Fatalf("%v, %v and %v are not in order", a, values[i+j-1], b)
				}
			}
		}
	}
}

// Numbers compare as the exact numbers that they are.
func TestCompareNumbersExactly(t *testing.T) {
	rng := seeded(t)
	compared := 0
	for range effort.Values(100_000) {
		a, b := ordertest.Number(rng), ordertest.Number(rng)
		x, y := exact(a), exact(b)
		if x == nil || y == nil {
			continue
		}
		compared++
		if got, want := sign(order.Compare(a, b)), x.Cmp(y); got != want {
			t.Fatalf("%v and %v: %d, want %d", a, b, got, want)
		}
	}
	t.Logf("%d compared", compared)
}

// exact is nil for what is no number, or has too many digits to write out.
func exact(v bson.RawValue) *big.Rat {
	switch v.Type {
	case bson.TypeDouble:
		return new(big.Rat).SetFloat64(v.Double())
	case bson.TypeDecimal128:
		n, exp, err := v.Decimal128().BigInt()
		if err != nil || exp < -400 || exp > 400 {
			return nil
		}
		hi, _ := v.Decimal128().GetBytes()
		if hi>>61&3 == 3 || len(new(big.Int).Abs(n).Text(10)) > 34 { // too large for a decimal: 0
			return new(big.Rat)
		}
		ten := new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(exp, -exp))), nil))
		x := new(big.Rat).SetInt(n)
		if exp < 0 {
			return x.Quo(x, ten)
		}
		return x.Mul(x, ten)
	}
	n, _ := v.AsInt64OK()
	return new(big.Rat).SetInt64(n)
}

func TestCompareAllocatesNothing(t *testing.T) {
	for _, pair := range [][2]any{
		{bson.NewObjectID(), bson.NewObjectID()},
		{int32(1), int64(2)},
		{int64(1), 1.5},
		{"order-17", "order-18"},
		{decimal("1.5"), int64(1)},
		{decimal("1.5"), 1.6},
		{bson.D{{Key: "a", Value: 1}, {Key: "b", Value: bson.A{"x"}}}, bson.D{{Key: "a", Value: 1}, {Key: "b", Value: bson.A{"y"}}}},
	} {
		a, b := value(t, pair[0]), value(t, pair[1])
		if n := testing.AllocsPerRun(100, func() { order.Compare(a, b) }); n > 0 {
			t.Errorf("%v and %v: %v allocations", a, b, n)
		}
	}
}

func BenchmarkCompare(b *testing.B) {
	for name, pair := range map[string][2]any{
		"ObjectID": {bson.NewObjectID(), bson.NewObjectID()},
		"int":      {int64(17), int64(18)},
		"string":   {"order-17", "order-18"},
		"long":     {strings.Repeat("x", 1000), strings.Repeat("x", 1000)},
		"decimal":  {decimal("1.5"), decimal("1.6")},
		"mixed":    {decimal("1.5"), 1.6},
	} {
		x, y := value(b, pair[0]), value(b, pair[1])
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				order.Compare(x, y)
			}
		})
	}
}
