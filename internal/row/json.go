package row

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// JSONOf is the value of a JSON field, for all sinks alike. What has a Go type of its own
// goes by encoding/json, so that it can be read back by it. What stands in an any, a bson.D,
// a bson.M or a bson.Raw… is what the source's document happened to have: it has the form that
// appendValue gives it, however deep it stands.
//
// Invalid UTF-8 is an error: encoding/json would put U+FFFD in its place.
func JSONOf(v reflect.Value) ([]byte, error) {
	settled, err := settleDynamic(v, 0)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(settled.Addr().Interface())
	if err != nil {
		return nil, err
	}
	if HasEscape(b, "fffd") {
		return nil, errors.New("it has a string that is not valid UTF-8")
	}
	return b, nil
}

// HasEscape reports whether a JSON text has the escape \uXXXX of these four
// lower-case digits. (encoding/json writes U+FFFD itself as it is, and escapes only
// the one that it puts in place of invalid UTF-8.)
func HasEscape(text []byte, digits string) bool {
	for i := 0; i+1 < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		i++ // the escaped character; an escaped backslash escapes nothing
		if text[i] == 'u' && i+5 <= len(text) && strings.EqualFold(string(text[i+1:i+5]), digits) {
			return true
		}
	}
	return false
}

// maxDepth is far beyond what a BSON document can have, and ends values that hold themselves.
const maxDepth = 1000

var errDepth = fmt.Errorf("it is nested more than %d levels deep, or holds itself", maxDepth)

// settleDynamic gives v with every dynamic value in it replaced by its JSON text, which
// encoding/json then copies; v itself where there is none. The rest of v, and so the tags of
// its structs, is left to encoding/json.
func settleDynamic(v reflect.Value, depth int) (reflect.Value, error) {
	t := v.Type()
	switch {
	case !dynamic(t):
		return v, nil
	case depth > maxDepth:
		return v, errDepth
	case isRaw(t):
		text, err := appendValue(nil, v.Interface(), depth)
		if err != nil {
			return v, err
		}
		out := reflect.New(reflect.TypeFor[json.RawMessage]()).Elem()
		out.SetBytes(text)
		return out, nil
	}
	out := reflect.New(t).Elem()
	out.Set(v)
	into := func(to, from reflect.Value) error {
		settled, err := settleDynamic(from, depth+1)
		if err == nil {
			to.Set(settled)
		}
		return err
	}
	switch t.Kind() {
	case reflect.Interface:
		if v.IsNil() {
			return v, nil
		}
		text, err := appendValue(nil, v.Interface(), depth)
		out.Set(reflect.ValueOf(json.RawMessage(text)))
		return out, err
	case reflect.Pointer:
		if v.IsNil() {
			return v, nil
		}
		out.Set(reflect.New(t.Elem()))
		return out, into(out.Elem(), v.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() && dynamic(f.Type) {
				if err := into(out.Field(i), v.Field(i)); err != nil {
					return out, err
				}
			}
		}
	case reflect.Map:
		if v.IsNil() {
			return v, nil
		}
		out.Set(reflect.MakeMapWithSize(t, v.Len()))
		for each := v.MapRange(); each.Next(); {
			settled, err := settleDynamic(each.Value(), depth+1)
			if err != nil {
				return out, err
			}
			out.SetMapIndex(each.Key(), settled)
		}
	case reflect.Slice:
		if v.IsNil() {
			return v, nil
		}
		if t == reflect.TypeFor[bson.D]() {
			v = reflect.ValueOf(lastOfEach(v.Interface().(bson.D)))
		}
		out.Set(reflect.MakeSlice(t, v.Len(), v.Len()))
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			if err := into(out.Index(i), v.Index(i)); err != nil {
				return out, err
			}
		}
	}
	return out, nil
}

var dynamicTypes sync.Map // reflect.Type → bool

// dynamic reports whether values of a type can hold what only the document decides.
func dynamic(t reflect.Type) bool {
	if known, ok := dynamicTypes.Load(t); ok {
		return known.(bool)
	}
	found := walkType(t, func(t reflect.Type) bool { return t == reflect.TypeFor[any]() || isRaw(t) })
	dynamicTypes.Store(t, found)
	return found
}

func isRaw(t reflect.Type) bool {
	return t == reflect.TypeFor[bson.RawValue]() || t == reflect.TypeFor[bson.Raw]() || t == reflect.TypeFor[bson.RawArray]()
}

// nestedRaw reports whether a type has a bson.Raw… inside, where it could not be replaced.
func nestedRaw(t reflect.Type) bool { return !isRaw(t) && walkType(t, isRaw) }

// walkType reports whether a type, or one that it is made of, satisfies is. It does not look
// into types that marshal themselves.
func walkType(t reflect.Type, is func(reflect.Type) bool) bool {
	seen := map[reflect.Type]bool{}
	var walk func(reflect.Type) bool
	walk = func(t reflect.Type) bool {
		if is(t) {
			return true
		}
		if seen[t] || t != reflect.TypeFor[bson.D]() && marshalsItself(t) {
			return false
		}
		seen[t] = true
		switch t.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
			return walk(t.Elem())
		case reflect.Struct:
			for i := range t.NumField() {
				if f := t.Field(i); f.IsExported() && walk(f.Type) {
					return true
				}
			}
		}
		return false
	}
	return walk(t)
}

func marshalsItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[json.Marshaler]()) || p.Implements(reflect.TypeFor[interface{ MarshalText() ([]byte, error) }]())
}

// appendValue appends the JSON form of a dynamic value. JSON's own types are themselves, an
// ObjectID is its hex digits, a Decimal128 and a date are strings; for what JSON has no form
// for, it is that of MongoDB's relaxed extended JSON.
func appendValue(dst []byte, value any, depth int) ([]byte, error) {
	if depth > maxDepth {
		return dst, errDepth
	}
	switch v := value.(type) {
	case nil, bson.Null:
		return append(dst, "null"...), nil
	case bool:
		return strconv.AppendBool(dst, v), nil
	case int32:
		return strconv.AppendInt(dst, int64(v), 10), nil
	case int64:
		return strconv.AppendInt(dst, v, 10), nil
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return append(append(append(dst, `{"$numberDouble":"`...), infinite(v)...), `"}`...), nil
		}
	case bson.DateTime:
		return appendDate(dst, v), nil
	case bson.D:
		if v == nil {
			return append(dst, "null"...), nil
		}
		return appendObject(dst, lastOfEach(v), depth)
	case bson.M:
		return appendMap(dst, v, depth)
	case map[string]any:
		return appendMap(dst, v, depth)
	case bson.A:
		return appendArray(dst, v, depth)
	case []any:
		return appendArray(dst, v, depth)
	case bson.RawValue, bson.Raw, bson.RawArray:
		return appendRaw(dst, v, depth)
	case bson.Binary:
		return fmt.Appendf(dst, `{"$binary":{"base64":"%s","subType":"%02x"}}`, base64.StdEncoding.EncodeToString(v.Data), v.Subtype), nil
	case bson.Timestamp:
		return fmt.Appendf(dst, `{"$timestamp":{"t":%d,"i":%d}}`, v.T, v.I), nil
	case bson.MinKey:
		return append(dst, `{"$minKey":1}`...), nil
	case bson.MaxKey:
		return append(dst, `{"$maxKey":1}`...), nil
	case bson.Undefined:
		return append(dst, `{"$undefined":true}`...), nil
	case bson.Symbol:
		return appendObject(dst, bson.D{{Key: "$symbol", Value: string(v)}}, depth)
	case bson.JavaScript:
		return appendObject(dst, bson.D{{Key: "$code", Value: string(v)}}, depth)
	case bson.CodeWithScope:
		return appendObject(dst, bson.D{{Key: "$code", Value: string(v.Code)}, {Key: "$scope", Value: v.Scope}}, depth)
	case bson.Regex:
		return appendObject(dst, bson.D{{Key: "$regularExpression", Value: bson.D{{Key: "pattern", Value: v.Pattern}, {Key: "options", Value: v.Options}}}}, depth)
	case bson.DBPointer:
		id := bson.D{{Key: "$oid", Value: v.Pointer.Hex()}}
		return appendObject(dst, bson.D{{Key: "$dbPointer", Value: bson.D{{Key: "$ref", Value: v.DB}, {Key: "$id", Value: id}}}}, depth)
	}
	// Strings, finite doubles, ObjectIDs and decimals; and what a function has put there.
	held := reflect.New(reflect.TypeOf(value)).Elem()
	held.Set(reflect.ValueOf(value))
	settled, err := settleDynamic(held, depth)
	if err != nil {
		return dst, err
	}
	text, err := json.Marshal(settled.Addr().Interface())
	return append(dst, text...), err
}

func infinite(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	return "NaN"
}

// appendDate writes a date as encoding/json writes a time.Time, but one outside of the years
// 0 to 9999 as ISO 8601 and JavaScript do, with a sign and six digits or more: still a string.
func appendDate(dst []byte, d bson.DateTime) []byte {
	t := d.Time().UTC()
	if y := t.Year(); y < 0 || y > 9999 {
		dst = fmt.Appendf(dst, `"%+07d`, y)
		return append(t.AppendFormat(dst, "-01-02T15:04:05.999Z"), '"')
	}
	return append(t.AppendFormat(append(dst, '"'), time.RFC3339Nano), '"')
}

func appendObject(dst []byte, d bson.D, depth int) ([]byte, error) {
	dst = append(dst, '{')
	for i, e := range d {
		if i > 0 {
			dst = append(dst, ',')
		}
		name, err := json.Marshal(e.Key)
		if err != nil {
			return dst, err
		}
		if dst, err = appendValue(append(append(dst, name...), ':'), e.Value, depth+1); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

// lastOfEach keeps the last of several fields with one name, as a bson.M does. BSON allows
// them; the stores differ in what they would make of them.
func lastOfEach(d bson.D) bson.D {
	last := make(map[string]int, len(d))
	for i, e := range d {
		last[e.Key] = i
	}
	if len(last) == len(d) {
		return d
	}
	out := make(bson.D, 0, len(last))
	for i, e := range d {
		if last[e.Key] == i {
			out = append(out, e)
		}
	}
	return out
}

func appendMap(dst []byte, m map[string]any, depth int) ([]byte, error) {
	if m == nil {
		return append(dst, "null"...), nil
	}
	d := make(bson.D, 0, len(m))
	for _, name := range slices.Sorted(maps.Keys(m)) {
		d = append(d, bson.E{Key: name, Value: m[name]})
	}
	return appendObject(dst, d, depth)
}

func appendArray(dst []byte, a []any, depth int) ([]byte, error) {
	if a == nil {
		return append(dst, "null"...), nil
	}
	dst = append(dst, '[')
	for i, v := range a {
		if i > 0 {
			dst = append(dst, ',')
		}
		var err error
		if dst, err = appendValue(dst, v, depth+1); err != nil {
			return dst, err
		}
	}
	return append(dst, ']'), nil
}

// appendRaw decodes what was left as BSON. A RawValue without a type is a field that the
// document did not have.
func appendRaw(dst []byte, raw any, depth int) ([]byte, error) {
	var v bson.RawValue
	switch raw := raw.(type) {
	case bson.RawValue:
		v = raw
	case bson.Raw:
		v = bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: raw}
	case bson.RawArray:
		v = bson.RawValue{Type: bson.TypeArray, Value: raw}
	}
	if v.Type == 0 || v.Value == nil && v.Type == bson.TypeEmbeddedDocument {
		return append(dst, "null"...), nil
	}
	var decoded any
	if err := v.Unmarshal(&decoded); err != nil {
		return dst, err
	}
	return appendValue(dst, decoded, depth)
}
