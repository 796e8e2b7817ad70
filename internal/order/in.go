package order

import (
	"encoding/binary"
	"math"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"
)

// The size of one $in. A filter, like any document, may have 16 MB.
const (
	maxIn      = 10_000
	maxInBytes = 4 << 20
)

// In cuts values into lists for a $in each. A decimal or a double from 2⁵³ on, or what has
// one in it, goes alone: of a list that has more than one value the server loses decimals
// with a fraction beyond 2⁵³ (-9007199254740993.5, say), or searches for them without end,
// and a double beside the integer next to it (-9007199254740994.0 and -9007199254740993),
// for its scan over several ranges of an index doubts the keys that it has read there (seen
// on 6.0.27). Integers beside each other are found.
func In(values []bson.RawValue) (lists [][]bson.RawValue) {
	for start := 0; start < len(values); {
		end, size := start, 0
		for end < len(values) && end-start < maxIn {
			v := values[end]
			size += len(v.Value)
			alone := goesAlone(v.Type, v.Value)
			if end > start && (alone || size > maxInBytes) {
				break
			}
			if end++; alone {
				break
			}
		}
		lists = append(lists, values[start:end])
		start = end
	}
	return lists
}

func goesAlone(t bson.Type, value []byte) bool {
	switch t {
	case bson.TypeEmbeddedDocument, bson.TypeArray:
	case bson.TypeCodeWithScope:
		_, scope, _, ok := bsoncore.ReadCodeWithScope(value)
		return !ok || goesAlone(bson.TypeEmbeddedDocument, scope)
	case bson.TypeDouble:
		return math.Abs(math.Float64frombits(binary.LittleEndian.Uint64(value))) >= 1<<53
	default:
		return t == bson.TypeDecimal128
	}
	_, rest, _ := bsoncore.ReadLength(value)
	for len(rest) > 1 {
		el, r, ok := bsoncore.ReadElement(rest)
		if !ok {
			return true
		}
		if v := el.Value(); goesAlone(bson.Type(v.Type), v.Data) {
			return true
		}
		rest = r
	}
	return false
}
