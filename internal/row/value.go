package row

import (
	"encoding/binary"
	"reflect"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Value gives the field's value of a row, and false for null. The row must be
// addressable, as reflect.ValueOf(&r).Elem() is: that is what keeps the functions
// below from allocating.
func (f *Field) Value(row reflect.Value) (reflect.Value, bool) {
	v := row.Field(f.index)
	if !f.Nullable {
		return v, true
	}
	if v.IsNil() {
		return reflect.Value{}, false
	}
	if f.pointer {
		return v.Elem(), true
	}
	return v, true
}

// IntOf is the value of an Int field.
func IntOf(v reflect.Value) int64 {
	if v.CanInt() {
		return v.Int()
	}
	return int64(v.Uint())
}

// MillisOf is the value of a Time field in milliseconds since 1970, rounded down:
// the resolution of BSON dates, so that every sink holds the same.
func MillisOf(v reflect.Value) int64 { return v.Addr().Interface().(*time.Time).UnixMilli() }

// ObjectIDOf is the value of an ObjectID field.
func ObjectIDOf(v reflect.Value) *bson.ObjectID { return v.Addr().Interface().(*bson.ObjectID) }

// DecimalOf is the value of a Decimal field.
func DecimalOf(v reflect.Value) bson.Decimal128 { return *v.Addr().Interface().(*bson.Decimal128) }

// AppendKey appends the binary form of a row's key: two rows have equal bytes if and
// only if their keys are equal, and the bytes sort like the keys, field by field.
func (s *Schema) AppendKey(dst []byte, row reflect.Value) []byte {
	for i := range s.Keys {
		dst = s.Keys[i].appendKey(dst, row.Field(s.Keys[i].index))
	}
	return dst
}

func (f *Field) appendKey(dst []byte, v reflect.Value) []byte {
	switch f.Kind {
	case Text:
		return appendText(dst, v.String())
	case Bool:
		if v.Bool() {
			return append(dst, 1)
		}
		return append(dst, 0)
	case Int:
		return appendInt(dst, IntOf(v))
	case Time:
		return appendInt(dst, MillisOf(v))
	default: // ObjectID; parse lets nothing else be a key
		return append(dst, ObjectIDOf(v)[:]...)
	}
}

// appendText ends the text with 0 0, and writes a zero byte inside it as 0 1: so no
// text is the beginning of another, and order is kept.
func appendText(dst []byte, s string) []byte {
	for {
		i := strings.IndexByte(s, 0)
		if i < 0 {
			dst = append(dst, s...)
			return append(dst, 0, 0)
		}
		dst = append(append(dst, s[:i]...), 0, 1)
		s = s[i+1:]
	}
}

func appendInt(dst []byte, n int64) []byte {
	return binary.BigEndian.AppendUint64(dst, uint64(n)^(1<<63)) // the flipped sign bit sorts negatives first
}
