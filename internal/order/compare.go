package order

import (
	"bytes"
	"cmp"
	"encoding/binary"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Compare gives a negative number where a comes before b, 0 where the server holds them
// for equal (for the same _id, say), and a positive number where a comes after b. Both
// must be well-formed: as they come from a server. It does not allocate, except where a
// double is within 34 digits of a decimal.
func Compare(a, b bson.RawValue) int { return compare(a.Type, a.Value, b.Type, b.Value) }

// bracket is the place of a type among the others.
func bracket(t bson.Type) int {
	switch t {
	case bson.TypeMinKey:
		return -1
	case bson.TypeNull:
		return 5
	case bson.TypeInt32, bson.TypeInt64, bson.TypeDouble, bson.TypeDecimal128:
		return 10
	case bson.TypeString, bson.TypeSymbol:
		return 15
	case bson.TypeEmbeddedDocument:
		return 20
	case bson.TypeArray:
		return 25
	case bson.TypeBinary:
		return 30
	case bson.TypeObjectID:
		return 35
	case bson.TypeBoolean:
		return 40
	case bson.TypeDateTime:
		return 45
	case bson.TypeTimestamp:
		return 47
	case bson.TypeRegex:
		return 50
	case bson.TypeDBPointer:
		return 55
	case bson.TypeJavaScript:
		return 60
	case bson.TypeCodeWithScope:
		return 65
	case bson.TypeMaxKey:
		return 127
	}
	return 0 // undefined
}

func compare(at bson.Type, a []byte, bt bson.Type, b []byte) int {
	if at != bt {
		if c := cmp.Compare(bracket(at), bracket(bt)); c != 0 {
			return c
		}
	}
	switch at {
	case bson.TypeObjectID:
		return bytes.Compare(a, b)
	case bson.TypeInt32, bson.TypeInt64, bson.TypeDouble, bson.TypeDecimal128:
		return compareNumbers(at, a, bt, b)
	case bson.TypeString, bson.TypeSymbol, bson.TypeJavaScript:
		return bytes.Compare(text(a), text(b))
	case bson.TypeEmbeddedDocument:
		return compareElements(a, b, true)
	case bson.TypeArray:
		return compareElements(a, b, false)
	case bson.TypeBinary:
		// The length as it is sent, which for the old subtype 2 has a second one in it;
		// subtype and bytes follow each other.
		if c := cmp.Compare(length(a), length(b)); c != 0 {
			return c
		}
		return bytes.Compare(a[4:], b[4:])
	case bson.TypeDBPointer:
		if c := cmp.Compare(len(a), len(b)); c != 0 {
			return c
		}
		return bytes.Compare(a, b)
	case bson.TypeBoolean, bson.TypeRegex: // a regular expression's pattern and options each end in a NUL
		return bytes.Compare(a, b)
	case bson.TypeDateTime:
		return cmp.Compare(integer(a), integer(b))
	case bson.TypeTimestamp:
		return cmp.Compare(binary.LittleEndian.Uint64(a), binary.LittleEndian.Uint64(b))
	case bson.TypeCodeWithScope:
		a, b = a[4:], b[4:] // the length of all
		if c := bytes.Compare(text(a), text(b)); c != 0 {
			return c
		}
		return compareElements(a[4+length(a):], b[4+length(b):], true)
	}
	return 0 // types of one value
}

// compareElements compares documents, or arrays, whose elements' names are no part of
// their values.
func compareElements(a, b []byte, names bool) int {
	a, b = a[4:], b[4:] // the length of all
	for {
		at, bt := bson.Type(a[0]), bson.Type(b[0])
		switch {
		case at == 0 && bt == 0:
			return 0
		case at == 0:
			return -1
		case bt == 0:
			return 1
		}
		an, av, aRest := element(a)
		bn, bv, bRest := element(b)
		if names {
			if c := cmp.Compare(bracket(at), bracket(bt)); c != 0 {
				return c
			}
			if c := bytes.Compare(an, bn); c != 0 {
				return c
			}
		}
		if c := compare(at, av, bt, bv); c != 0 {
			return c
		}
		a, b = aRest, bRest
	}
}

// element takes the first element apart, whose type is the first byte.
func element(b []byte) (name, value, rest []byte) {
	end := 1 + bytes.IndexByte(b[1:], 0)
	name, rest = b[1:end], b[end+1:]
	n := size(bson.Type(b[0]), rest)
	return name, rest[:n], rest[n:]
}

// size is how many bytes the value takes that b begins with.
func size(t bson.Type, b []byte) int {
	switch t {
	case bson.TypeBoolean:
		return 1
	case bson.TypeInt32:
		return 4
	case bson.TypeInt64, bson.TypeDouble, bson.TypeDateTime, bson.TypeTimestamp:
		return 8
	case bson.TypeObjectID:
		return 12
	case bson.TypeDecimal128:
		return 16
	case bson.TypeString, bson.TypeSymbol, bson.TypeJavaScript:
		return 4 + length(b)
	case bson.TypeEmbeddedDocument, bson.TypeArray, bson.TypeCodeWithScope:
		return length(b)
	case bson.TypeBinary:
		return 4 + 1 + length(b)
	case bson.TypeDBPointer:
		return 4 + length(b) + 12
	case bson.TypeRegex:
		pattern := bytes.IndexByte(b, 0) + 1
		return pattern + bytes.IndexByte(b[pattern:], 0) + 1
	}
	return 0 // null, undefined, min and max key
}

func length(b []byte) int { return int(int32(binary.LittleEndian.Uint32(b))) }

// text is the string that b begins with, without the NUL that ends it.
func text(b []byte) []byte { return b[4 : 3+length(b)] }

func integer(b []byte) int64 { return int64(binary.LittleEndian.Uint64(b)) }
