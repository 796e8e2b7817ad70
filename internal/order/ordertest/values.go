// Package ordertest makes BSON values that are hard to compare.
package ordertest

import (
	"encoding/binary"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Value is a random value that may be an _id: of any type but array, regular expression
// and undefined, which are inside of documents only. Every few values are equal to
// others, or all but equal.
func Value(rng *rand.Rand) bson.RawValue { return id(maker{rng, false}) }

// Odd is Value with what an aggregation, as opposed to an index, puts in an order of its
// own: DBPointers of many namespaces, and documents that have a name twice.
func Odd(rng *rand.Rand) bson.RawValue { return id(maker{rng, true}) }

// Nested is Value of any type.
func Nested(rng *rand.Rand) bson.RawValue { return raw(nested(maker{rng, false}, 3)) }

// Number is a random number.
func Number(rng *rand.Rand) bson.RawValue { return raw(number(maker{rng, false})) }

type maker struct {
	*rand.Rand
	odd bool
}

func raw(v any) bson.RawValue {
	d, err := bson.Marshal(bson.D{{Key: "v", Value: v}})
	if err != nil {
		panic(err) // by a mistake in this package
	}
	return bson.Raw(d).Lookup("v")
}

func id(rng maker) bson.RawValue {
	for {
		v := nested(rng, 3)
		switch v.(type) {
		case bson.A, bson.Regex, bson.Undefined:
			continue
		}
		return raw(v)
	}
}

func nested(rng maker, depth int) any {
	n := rng.IntN(24)
	if depth == 0 && n >= 20 {
		n = rng.IntN(20)
	}
	switch n {
	case 0:
		return one(rng, any(bson.MinKey{}), any(bson.MaxKey{}), any(nil), any(bson.Undefined{}))
	case 1:
		return rng.IntN(2) == 0
	case 2:
		return bson.DateTime(near(rng))
	case 3:
		return bson.Timestamp{T: uint32(near(rng)), I: uint32(near(rng))}
	case 4, 5:
		return objectID(rng)
	case 6:
		return bson.Regex{Pattern: withoutNUL(rng), Options: one(rng, "", "i", "im", "m", "s", "imsx")}
	case 7:
		p := bson.DBPointer{DB: "a", Pointer: objectID(rng)}
		if rng.odd {
			p.DB = withoutNUL(rng)
		}
		return p
	case 8:
		return bson.JavaScript(text(rng))
	case 9:
		return bson.CodeWithScope{Code: bson.JavaScript(text(rng)), Scope: document(rng, min(depth, 1))}
	case 10, 11:
		return bson.Binary{Subtype: one(rng, byte(0), 1, 2, 3, 4, 5, 0x80, 0xff), Data: []byte(text(rng))}
	case 12:
		return bson.Symbol(text(rng))
	case 13, 14:
		return text(rng)
	case 20, 21:
		return document(rng, depth)
	case 22, 23:
		a := bson.A{}
		for range rng.IntN(4) {
			a = append(a, nested(rng, depth-1))
		}
		return a
	}
	return number(rng)
}

func document(rng maker, depth int) bson.D {
	d := bson.D{}
	if depth == 0 {
		return d
	}
	names := []string{"a", "b", "", "ab", "ä", "\xff", "0", "1"}
	for range rng.IntN(4) {
		n := rng.IntN(len(names))
		d = append(d, bson.E{Key: names[n], Value: nested(rng, depth-1)})
		if !rng.odd {
			names = slices.Delete(names, n, n+1)
		}
	}
	return d
}

func one[T any](rng maker, of ...T) T { return of[rng.IntN(len(of))] }

func objectID(rng maker) (id bson.ObjectID) {
	binary.BigEndian.PutUint64(id[:], uint64(near(rng)))
	id[11] = byte(rng.IntN(3))
	return id
}

// text is of bytes that sort badly: NUL, those beyond ASCII, and such as no UTF-8 has.
func text(rng maker) string {
	s := one(rng, "", "a", "ab", strings.Repeat("x", 500))
	for range rng.IntN(4) {
		s += one(rng, "\x00", "a", "b", "B", "z", "\x7f", "ä", "\U0001F600", "\xff", "\x01")
	}
	return s
}

func withoutNUL(rng maker) string { return strings.ReplaceAll(text(rng), "\x00", "") }

// near is an integer close to where something changes.
func near(rng maker) int64 {
	n := one(rng, 0, 1<<24, 1<<31, 1<<32, 1<<53, 1<<54, 1<<62, math.MaxInt64, math.MinInt64, int64(rng.Uint64()), 1e15, 1e16, 1e18, 100)
	if rng.IntN(3) == 0 {
		n = -n
	}
	return n + rng.Int64N(7) - 3 // around the ends it comes out at the other one
}

func number(rng maker) any {
	switch rng.IntN(8) {
	case 0: // any bits: payloads of NaN, denormals, coefficients that are too large
		return one(rng, any(math.Float64frombits(rng.Uint64())), any(bson.NewDecimal128(rng.Uint64(), rng.Uint64())),
			any(bson.NewDecimal128(0x7c<<56|rng.Uint64()>>8|rng.Uint64()&(1<<63), rng.Uint64())),
			any(math.Float64frombits(0x7ff<<52|rng.Uint64()>>12|rng.Uint64()&(1<<63))),
			any(bson.NewDecimal128(3<<61|rng.Uint64()>>3, rng.Uint64())), any(int64(rng.Uint64())), any(int32(rng.Uint32())))
	case 1, 2, 3: // an integer in any type, or what is next to it
		n := near(rng)
		switch rng.IntN(4) {
		case 0:
			return int32(n)
		case 1:
			return ulps(rng, float64(n))
		case 2:
			return lastDigits(rng, new(big.Rat).SetInt64(n))
		}
		return n
	}
	f := one(rng, 0, 0.1, 0.5, 1.1, 1e-7, 1e22, 1e23, 1e300, math.SmallestNonzeroFloat64, math.MaxFloat64, 0x1p-1022,
		1.0/3, 2.0/3, 123456789012345, 0.123456789012345, 1e100, 0x1p-100, 0x1p200, 9007199254740993, math.Inf(1), math.NaN())
	if rng.IntN(3) == 0 {
		f = -f
	}
	f = ulps(rng, f)
	switch {
	case rng.IntN(2) == 0:
		return f
	case math.IsNaN(f):
		return bson.NewDecimal128(0x7c<<56, 0)
	case math.IsInf(f, 0):
		return bson.NewDecimal128(math.Float64bits(f)&(1<<63)|0x78<<56, 0)
	}
	return lastDigits(rng, new(big.Rat).SetFloat64(f))
}

// ulps is f or a double next to it.
func ulps(rng maker, f float64) float64 {
	switch rng.IntN(4) {
	case 0:
		return math.Nextafter(f, math.Inf(1))
	case 1:
		return math.Nextafter(f, math.Inf(-1))
	}
	return f
}

// lastDigits is x as a decimal, rounded to as many digits as matter to somebody, and
// sometimes off by a little in the last.
func lastDigits(rng maker, x *big.Rat) bson.Decimal128 {
	digits := one(rng, 15, 16, 17, 18, 33, 34, 34, 34)
	f := new(big.Float).SetPrec(2000).SetMode(one(rng, big.ToNearestEven, big.ToZero)).SetRat(x)
	mantissa, exponent, _ := strings.Cut(f.Text('e', digits-1), "e")
	n, ok := new(big.Int).SetString(strings.Replace(mantissa, ".", "", 1), 10)
	if !ok {
		panic(mantissa)
	}
	exp, ok := new(big.Int).SetString(exponent, 10)
	if !ok {
		panic(exponent)
	}
	n.Add(n, big.NewInt(one[int64](rng, 0, 0, 0, 1, -1)))
	exp.Sub(exp, big.NewInt(int64(digits-1)))
	if d, ok := bson.ParseDecimal128FromBigInt(n, int(exp.Int64())); ok {
		return d
	}
	return bson.NewDecimal128(0, 0)
}
