package order

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math"
	"math/bits"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"
)

func compareNumbers(at bson.Type, a []byte, bt bson.Type, b []byte) int {
	switch {
	case at == bson.TypeDecimal128 || bt == bson.TypeDecimal128:
		c := compareDecimals(asDecimal(at, a), asDecimal(bt, b))
		switch {
		case c != 0:
			return c
		case at == bson.TypeDouble:
			return beyond(double(a))
		case bt == bson.TypeDouble:
			return -beyond(double(b))
		}
		return 0
	case at == bson.TypeDouble && bt == bson.TypeDouble:
		return cmp.Compare(double(a), double(b)) // NaN is the lowest and equals NaN, 0 equals -0
	case at == bson.TypeDouble:
		return -compareToDouble(whole(bt, b), double(a))
	case bt == bson.TypeDouble:
		return compareToDouble(whole(at, a), double(b))
	}
	return cmp.Compare(whole(at, a), whole(bt, b))
}

func double(b []byte) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(b)) }

// whole is the value of an int32 or int64.
func whole(t bson.Type, b []byte) int64 {
	if t == bson.TypeInt32 {
		return int64(length(b))
	}
	return integer(b)
}

// compareToDouble is exact, where the next double to n may be another number.
func compareToDouble(n int64, f float64) int {
	switch {
	case math.IsNaN(f) || f < -1<<63:
		return 1
	case f >= 1<<63:
		return -1
	}
	below := math.Floor(f)
	if c := cmp.Compare(n, int64(below)); c != 0 || f == below {
		return c
	}
	return -1
}

// decimal is a number in a form that compares: kind first; then, of finite numbers other
// than 0, the exponent and the coefficient, which has 34 digits always, in reverse where
// the kind is negative.
type decimal struct {
	kind     kind
	exponent int
	hi, lo   uint64
}

type kind int

const (
	nan kind = iota
	minusInfinity
	negative
	zero
	positive
	infinity
)

func compareDecimals(a, b decimal) int {
	if c := cmp.Compare(a.kind, b.kind); c != 0 || a.kind != negative && a.kind != positive {
		return c
	}
	if a.kind == negative {
		a, b = b, a
	}
	return cmp.Or(cmp.Compare(a.exponent, b.exponent), cmp.Compare(a.hi, b.hi), cmp.Compare(a.lo, b.lo))
}

func asDecimal(t bson.Type, b []byte) decimal {
	switch t {
	case bson.TypeDecimal128:
		return ofDecimal128(binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b))
	case bson.TypeDouble:
		return ofDouble(double(b))
	}
	n := whole(t, b)
	if n < 0 {
		return normal(true, 0, 0, -uint64(n))
	}
	return normal(false, 0, 0, uint64(n))
}

// ofDecimal128 reads the binary form of IEEE 754.
func ofDecimal128(hi, lo uint64) decimal {
	minus := hi>>63 == 1
	switch hi >> 58 & 31 {
	case 31:
		return decimal{kind: nan}
	case 30:
		if minus {
			return decimal{kind: minusInfinity}
		}
		return decimal{kind: infinity}
	}
	if hi>>61&3 == 3 { // a coefficient that is too large, which counts as 0
		return decimal{kind: zero}
	}
	exponent := int(hi>>49&(1<<14-1)) - 6176
	hi &= 1<<49 - 1
	if !less(hi, lo, topHi, topLo) {
		return decimal{kind: zero} // the same
	}
	return normal(minus, exponent, hi, lo)
}

// ofDouble rounds to 34 digits, which keeps the order to any decimal but the one that
// comes of it.
func ofDouble(f float64) decimal {
	switch {
	case math.IsNaN(f):
		return decimal{kind: nan}
	case math.IsInf(f, 0):
		if f < 0 {
			return decimal{kind: minusInfinity}
		}
		return decimal{kind: infinity}
	}
	var buf [48]byte
	s := strconv.AppendFloat(buf[:0], math.Abs(f), 'e', 33, 64) // d.ddd…e±dd
	var hi, lo uint64
	for i, c := range s {
		switch c {
		case '.':
		case 'e':
			exponent, _ := strconv.Atoi(string(s[i+1:]))
			return normal(f < 0, exponent-33, hi, lo)
		default:
			hi, lo = timesTen(hi, lo)
			var carry uint64
			lo, carry = bits.Add64(lo, uint64(c-'0'), 0)
			hi += carry
		}
	}
	panic("a double without an exponent")
}

// beyond compares a double to what it is when rounded to 34 digits.
func beyond(f float64) int {
	if f == 0 || math.IsNaN(f) || math.IsInf(f, 0) {
		return 0
	}
	const shown = len("d.") + 33
	var buf [800]byte
	minus, f := f < 0, math.Abs(f)
	exact := strconv.AppendFloat(buf[:0], f, 'e', 766, 64) // no double has more digits
	c := 1
	switch {
	case !bytes.HasPrefix(strconv.AppendFloat(nil, f, 'e', 33, 64), exact[:shown]): // rounded up
		c = -1
	case len(bytes.TrimLeft(exact[shown:bytes.IndexByte(exact, 'e')], "0")) == 0:
		c = 0
	}
	if minus {
		return -c
	}
	return c
}

// normal fills the coefficient up to 34 digits.
func normal(minus bool, exponent int, hi, lo uint64) decimal {
	if hi == 0 && lo == 0 {
		return decimal{kind: zero}
	}
	for less(hi, lo, fullHi, fullLo) {
		hi, lo = timesTen(hi, lo)
		exponent--
	}
	k := positive
	if minus {
		k = negative
	}
	return decimal{k, exponent, hi, lo}
}

// 10^33, the least of 34 digits, and 10^34, the least of 35.
const (
	fullHi, fullLo = 0x314dc6448d93, 0x38c15b0a00000000
	topHi, topLo   = 0x1ed09bead87c0, 0x378d8e6400000000
)

func less(aHi, aLo, bHi, bLo uint64) bool { return aHi < bHi || aHi == bHi && aLo < bLo }

func timesTen(hi, lo uint64) (uint64, uint64) {
	carry, lo := bits.Mul64(lo, 10)
	return hi*10 + carry, lo
}
