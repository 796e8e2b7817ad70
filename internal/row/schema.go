// Package row knows the rows of read models: what the tags of a row type say, the
// binary form of a row's key, and how a batch of contributions or rows is folded
// before a sink writes it. All sinks share it, so that a row type means the same in
// each of them.
//
// A field takes part by its tag:
//
//	type Sale struct {
//		Shop    string          `row:"shop,key"`     // keys together identify the row
//		Day     time.Time       `row:"day,key"`
//		Orders  int64           `row:"orders,sum"`   // sums are what a Rollup adds up
//		Revenue bson.Decimal128 `row:"revenue,sum"`
//	}
//	type Customer struct {
//		Name string     `row:"name"`
//		Left *time.Time `row:"left_at"`              // a pointer: may be null
//		Tags []string   `row:"tags,json"`            // any Go type, as JSON
//		note string                                  // not exported: not stored
//		Temp int        `row:"-"`                    // not stored either
//	}
package row

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Contributions is the name of the column in which sinks count a rollup row's
// contributions; row types can't use it.
const Contributions = "contributions"

// Role is what a field is for.
type Role int

// The roles.
const (
	Plain Role = iota
	Key        // identifies the row, together with the other keys
	Sum        // is added up
)

// Kind says how a field's values are stored.
type Kind int

// The kinds, with the Go types that have them. Named types count as what they are
// made of, such as type Status string, except for structs and arrays.
const (
	Text     Kind = iota + 1 // string
	Bool                     // bool
	Int                      // int, int8 to int64, uint8 to uint32; as int64
	Float                    // float32, float64
	Time                     // time.Time, in milliseconds like a BSON date
	Bytes                    // []byte
	ObjectID                 // bson.ObjectID
	Decimal                  // bson.Decimal128
	JSON                     // anything, by the option json
)

// Field is a stored field of a row type.
type Field struct {
	Name     string // of the column
	GoName   string // of the struct field, for errors
	Role     Role
	Kind     Kind
	Nullable bool // a pointer, or a json field of a type that can be nil

	index   int
	pointer bool
}

// Schema is a row type's fields, in the order of the struct.
type Schema struct {
	Type   reflect.Type
	Fields []Field
	Keys   []Field
	Sums   []Field
	Plain  []Field
}

type parsed struct {
	schema *Schema
	err    error
}

var schemas sync.Map // reflect.Type → parsed

// Of gives the schema of row type R. The error joins all faults of the type.
func Of[R any]() (*Schema, error) {
	t := reflect.TypeFor[R]()
	if p, ok := schemas.Load(t); ok {
		return p.(parsed).schema, p.(parsed).err
	}
	s, err := parse(t)
	schemas.Store(t, parsed{s, err})
	return s, err
}

var columnName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,39}$`)

// ColumnName reports what is wrong with a name for a column or table, "" for nothing.
func ColumnName(name string) string {
	switch {
	case !columnName.MatchString(name):
		return "it must be lower-case letters, digits and underscores, a letter first, at most 40 of them"
	case strings.HasPrefix(name, "tm_"), name == Contributions:
		return "it is reserved for this library"
	}
	return ""
}

func parse(t reflect.Type) (*Schema, error) {
	if t.Kind() != reflect.Struct {
		return nil, fmt.Errorf("row type %s is no struct; use a struct whose fields have row tags", t)
	}
	s := &Schema{Type: t}
	var faults []error
	for i := range t.NumField() {
		f, wrong := parseField(t.Field(i))
		for _, err := range wrong {
			faults = append(faults, fmt.Errorf("row type %s, field %s: %w", t, t.Field(i).Name, err))
		}
		if f == nil {
			continue
		}
		f.index = i
		if j := slices.IndexFunc(s.Fields, func(o Field) bool { return o.Name == f.Name }); j >= 0 {
			faults = append(faults, fmt.Errorf("row type %s: fields %s and %s both have column %q; give each its own",
				t, s.Fields[j].GoName, f.GoName, f.Name))
		}
		s.add(*f)
	}
	if len(s.Fields) == 0 && len(faults) == 0 {
		faults = append(faults, fmt.Errorf("row type %s has no columns; tag its fields `row:\"column\"`", t))
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return s, nil
}

func (s *Schema) add(f Field) {
	s.Fields = append(s.Fields, f)
	switch f.Role {
	case Key:
		s.Keys = append(s.Keys, f)
	case Sum:
		s.Sums = append(s.Sums, f)
	case Plain:
		s.Plain = append(s.Plain, f)
	}
}

// parseField returns nil for a field that is not stored. With faults the field may
// be there all the same, for the checks that concern several fields.
func parseField(sf reflect.StructField) (f *Field, faults []error) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	tag, tagged := sf.Tag.Lookup("row")
	switch {
	case tag == "-":
		return nil, nil
	case !sf.IsExported() && !sf.Anonymous:
		if tagged {
			fault("it has a row tag but is not exported; export it, or drop the tag")
		}
		return nil, faults
	case sf.Anonymous && !tagged:
		fault("embedded structs are not stored; write their fields out, or tag it `row:\"-\"`")
		return nil, faults
	case !tagged:
		fault("it has no row tag; tag it `row:\"column\"`, or `row:\"-\"` to leave it out")
		return nil, faults
	}
	f = &Field{GoName: sf.Name}
	name, rest, _ := strings.Cut(tag, ",")
	f.Name = name
	if wrong := ColumnName(name); wrong != "" {
		fault("bad column name %q: %s", name, wrong)
	}
	var json, key, sum bool
	for _, option := range strings.Split(rest, ",") {
		switch option {
		case "":
		case "key":
			key, f.Role = true, Key
		case "sum":
			sum, f.Role = true, Sum
		case "json":
			json = true
		default:
			fault("unknown option %q; there are key, sum and json", option)
		}
	}
	if key && sum {
		fault("a column is either key or sum, not both")
	}
	if json {
		f.Kind, f.Nullable = JSON, canBeNil(sf.Type)
		if nestedRaw(sf.Type) {
			fault("type %s has a bson.RawValue, bson.Raw or bson.RawArray inside, which has no JSON form there; use any in its place", sf.Type)
		}
	} else {
		f.setKind(sf.Type, fault)
	}
	if len(faults) == 0 {
		f.checkRole(fault)
	}
	return f, faults
}

func (f *Field) setKind(t reflect.Type, fault func(string, ...any)) {
	if t.Kind() == reflect.Pointer {
		f.pointer, f.Nullable = true, true
		t = t.Elem()
	}
	f.Kind = kindOf(t)
	switch {
	case f.Kind != 0:
	case t.Kind() == reflect.Uint || t.Kind() == reflect.Uint64:
		fault("%s can exceed the int64 that it would be stored as; use int64, bson.Decimal128 or string", t)
	default:
		fault("type %s can't be stored as it is; use a string, bool, integer, float, time.Time, []byte, bson.ObjectID or bson.Decimal128, or add the option json", t)
	}
}

func (f *Field) checkRole(fault func(string, ...any)) {
	switch {
	case f.Role == Key && f.Nullable:
		fault("a key must not be null; use a value that stands for null instead of a pointer")
	case f.Role == Key && (f.Kind == Float || f.Kind == Decimal):
		fault("a key must have one form for each value, which floats and decimals have not; use an integer or a string")
	case f.Role == Key && (f.Kind == Bytes || f.Kind == JSON):
		fault("a key must be a string, bool, integer, time.Time or bson.ObjectID")
	case f.Role == Sum && f.Kind == Float:
		fault("sums of floats depend on their order; use int64 or bson.Decimal128")
	case f.Role == Sum && (f.Nullable || f.Kind != Int && f.Kind != Decimal):
		fault("a sum must be an int64 or a bson.Decimal128")
	}
}

func canBeNil(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Interface:
		return true
	}
	return false
}

func kindOf(t reflect.Type) Kind {
	switch t {
	case reflect.TypeFor[time.Time]():
		return Time
	case reflect.TypeFor[bson.ObjectID]():
		return ObjectID
	case reflect.TypeFor[bson.Decimal128]():
		return Decimal
	}
	switch t.Kind() {
	case reflect.String:
		return Text
	case reflect.Bool:
		return Bool
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint8, reflect.Uint16, reflect.Uint32:
		return Int
	case reflect.Float32, reflect.Float64:
		return Float
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return Bytes
		}
	}
	return 0
}
