package postgres

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/tidemark-go/tidemark/internal/row"
)

// array is a column of values on their way to the server: an array parameter in
// PostgreSQL's binary format, written straight from the rows. Numerics go as a text
// literal, where they need no quoting.
type array struct {
	buf     []byte
	n       uint32
	null    bool
	textual bool
	element uint32 // oid
}

var arrays = sync.Pool{New: func() any { return new(array) }}

// header is the length of a binary array's: dimensions, has nulls, element type, and
// the one dimension's length and lower bound.
const header = 20

func newArray(t *columnType) *array {
	a := arrays.Get().(*array)
	*a = array{buf: a.buf[:0], textual: t.textual, element: t.element}
	if a.textual {
		a.buf = append(a.buf, '{')
	} else {
		a.buf = append(a.buf, make([]byte, header)...)
	}
	return a
}

// bytes is the finished parameter and its format.
func (a *array) bytes() ([]byte, int16) {
	if a.textual {
		a.buf = append(a.buf, '}')
		return a.buf, pgtype.TextFormatCode
	}
	binary.BigEndian.PutUint32(a.buf, 1)
	if a.null {
		binary.BigEndian.PutUint32(a.buf[4:], 1)
	}
	binary.BigEndian.PutUint32(a.buf[8:], a.element)
	binary.BigEndian.PutUint32(a.buf[12:], a.n)
	binary.BigEndian.PutUint32(a.buf[16:], 1)
	return a.buf, pgtype.BinaryFormatCode
}

func (a *array) addNull() {
	a.null = true
	if a.textual {
		a.separate()
		a.buf = append(a.buf, "NULL"...)
		return
	}
	a.length(-1)
}

func (a *array) length(n int) {
	a.n++
	a.buf = binary.BigEndian.AppendUint32(a.buf, uint32(n))
}

func (a *array) separate() {
	if a.n++; a.n > 1 {
		a.buf = append(a.buf, ',')
	}
}

func (a *array) addText(s string) error {
	if strings.IndexByte(s, 0) >= 0 {
		return errNUL
	}
	if !utf8.ValidString(s) {
		return errors.New("it is not valid UTF-8, which PostgreSQL can't store")
	}
	a.length(len(s))
	a.buf = append(a.buf, s...)
	return nil
}

var errNUL = errors.New("it has a NUL character, which PostgreSQL can't store")

func (a *array) addInt(n int64) {
	a.length(8)
	a.buf = binary.BigEndian.AppendUint64(a.buf, uint64(n))
}

// The range of timestamptz, in milliseconds since 1970: 4714-11-24 BC, and the
// beginning of year 294277 (exclusive).
const (
	epoch2000 = 946_684_800_000
	minMillis = -211_813_488_000_000 + epoch2000
	endMillis = 9_223_371_331_200_000 + epoch2000
)

func (a *array) addMillis(ms int64) error {
	if ms < minMillis || ms >= endMillis {
		return fmt.Errorf("the date of %d ms since 1970 is outside of PostgreSQL's range (%s to year 294276)", ms, "4714-11-24 BC")
	}
	a.addInt((ms - epoch2000) * 1000)
	return nil
}

func (a *array) addDecimal(coefficient *big.Int, exponent int) {
	a.separate()
	a.buf = coefficient.Append(a.buf, 10)
	a.buf = fmt.Appendf(a.buf, "E%d", exponent)
}

// addNumeric adds a decimal text in a numeric's binary form: how many digits of base
// 10,000, the power of the first one, the sign, the number of decimal places, the digits.
func (a *array) addNumeric(s string) error {
	field := func(weight int, sign uint16, scale int, digits []uint16) error {
		a.length(8 + 2*len(digits))
		for _, n := range []uint16{uint16(len(digits)), uint16(weight), sign, uint16(scale)} {
			a.buf = binary.BigEndian.AppendUint16(a.buf, n)
		}
		for _, d := range digits {
			a.buf = binary.BigEndian.AppendUint16(a.buf, d)
		}
		return nil
	}
	switch s {
	case "NaN":
		return field(0, 0xC000, 0, nil)
	case "Infinity":
		return field(0, 0xD000, 0, nil)
	case "-Infinity":
		return field(0, 0xF000, 0, nil)
	}
	s, negative := strings.CutPrefix(s, "-")
	mantissa, exponent, _ := strings.Cut(s, "E")
	whole, fraction, _ := strings.Cut(mantissa, ".")
	scale := len(fraction)
	if exponent != "" {
		e, err := strconv.Atoi(exponent)
		if err != nil {
			return fmt.Errorf("a malformed decimal: %w", err)
		}
		scale -= e
	}
	// All digits, with the point between two digits of base 10,000.
	all := whole + fraction
	if scale < 0 {
		all, scale = all+strings.Repeat("0", -scale), 0
	}
	places := (scale + 3) / 4 // digits of base 10,000 behind the point
	all += strings.Repeat("0", 4*places-scale)
	if short := max(4*places-len(all), -len(all)%4&3); short > 0 {
		all = strings.Repeat("0", short) + all
	}
	digits := make([]uint16, len(all)/4)
	for i := range digits {
		for _, c := range all[4*i : 4*i+4] {
			digits[i] = 10*digits[i] + uint16(c-'0')
		}
	}
	weight := len(digits) - places - 1
	for len(digits) > 0 && digits[0] == 0 {
		digits, weight = digits[1:], weight-1
	}
	for len(digits) > 0 && digits[len(digits)-1] == 0 {
		digits = digits[:len(digits)-1]
	}
	sign := uint16(0)
	switch {
	case len(digits) == 0:
		weight = 0
	case negative:
		sign = 0x4000
	}
	return field(weight, sign, scale, digits)
}

// columnType is how a kind of value is stored.
type columnType struct {
	sql     string
	array   uint32 // oid of the array type
	element uint32 // oid
	textual bool
	add     func(*array, reflect.Value) error
}

var types = map[row.Kind]*columnType{
	row.Text: {"text", pgtype.TextArrayOID, pgtype.TextOID, false, func(a *array, v reflect.Value) error {
		return a.addText(v.String())
	}},
	row.Bool: {"boolean", pgtype.BoolArrayOID, pgtype.BoolOID, false, func(a *array, v reflect.Value) error {
		a.length(1)
		if v.Bool() {
			a.buf = append(a.buf, 1)
		} else {
			a.buf = append(a.buf, 0)
		}
		return nil
	}},
	row.Int: {"bigint", pgtype.Int8ArrayOID, pgtype.Int8OID, false, func(a *array, v reflect.Value) error {
		a.addInt(row.IntOf(v))
		return nil
	}},
	row.Float: {"double precision", pgtype.Float8ArrayOID, pgtype.Float8OID, false, func(a *array, v reflect.Value) error {
		a.length(8)
		a.buf = binary.BigEndian.AppendUint64(a.buf, math.Float64bits(v.Float()))
		return nil
	}},
	row.Time: {"timestamp with time zone", pgtype.TimestamptzArrayOID, pgtype.TimestamptzOID, false, func(a *array, v reflect.Value) error {
		if t := v.Addr().Interface().(*time.Time); t.Year() < -4713 || t.Year() > 294276 {
			return fmt.Errorf("year %d is outside of PostgreSQL's range (4713 BC to 294276)", t.Year())
		}
		return a.addMillis(row.MillisOf(v))
	}},
	row.Bytes: {"bytea", pgtype.ByteaArrayOID, pgtype.ByteaOID, false, func(a *array, v reflect.Value) error {
		b := v.Bytes()
		a.length(len(b))
		a.buf = append(a.buf, b...)
		return nil
	}},
	row.ObjectID: {"text", pgtype.TextArrayOID, pgtype.TextOID, false, func(a *array, v reflect.Value) error {
		a.length(24)
		a.buf = hex.AppendEncode(a.buf, row.ObjectIDOf(v)[:])
		return nil
	}},
	row.Decimal: {"numeric", pgtype.NumericArrayOID, pgtype.NumericOID, true, func(a *array, v reflect.Value) error {
		s := row.DecimalOf(v).String()
		// The zero value is 0E-6176, which a numeric would hold with all its digits.
		if strings.HasPrefix(s, "0E") || strings.HasPrefix(s, "-0E") {
			s = "0"
		}
		if !a.textual {
			return a.addNumeric(s)
		}
		a.separate()
		a.buf = append(a.buf, s...)
		return nil
	}},
	row.JSON: {"jsonb", pgtype.JSONBArrayOID, pgtype.JSONBOID, false, func(a *array, v reflect.Value) error {
		b, err := row.JSONOf(v)
		if err != nil {
			return err
		}
		if row.HasEscape(b, "0000") {
			return errNUL
		}
		a.length(1 + len(b))
		a.buf = append(append(a.buf, 1), b...) // the version of jsonb's binary form
		return nil
	}},
}
