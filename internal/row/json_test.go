package row_test

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/row"
)

// jsonOf is the JSON text of a value in a field of its own type.
func jsonOf[V any](v V) (string, error) {
	type doc struct {
		V V `row:"v,json"`
	}
	s, err := row.Of[doc]()
	if err != nil {
		return "", err
	}
	d := doc{v}
	value, ok := s.Fields[0].Value(reflect.ValueOf(&d).Elem())
	if !ok {
		return "null", nil
	}
	b, err := row.JSONOf(value)
	return string(b), err
}

type held struct {
	Any   any            `json:"any,omitempty"`
	M     bson.M         `json:"m,omitempty"`
	D     bson.D         `json:"d,omitempty"`
	Map   map[string]any `json:"map,omitempty"`
	Next  *held          `json:"next,omitempty"`
	Two   [2]any         `json:"two"`
	ID    bson.ObjectID  `json:"id,omitzero"`
	Own   bson.Regex     `json:"own,omitzero"`
	Float *float64       `json:"float,omitempty"`
	inner any
}

// Every BSON type has one JSON form, wherever in a dynamic value it stands: by itself, in
// arrays and documents of either kind, as raw BSON, and within a user's struct.
func TestJSONForms(t *testing.T) {
	id := bson.ObjectID{0xab, 11: 1}
	forms := []struct {
		v    any
		want string
	}{
		{nil, `null`},
		{bson.Null{}, `null`},
		{true, `true`},
		{int32(1), `1`},
		{int64(math.MaxInt64), `9223372036854775807`},
		{0.1, `0.1`},
		{1e300, `1e+300`},
		{math.NaN(), `{"$numberDouble":"NaN"}`},
		{math.Inf(1), `{"$numberDouble":"Infinity"}`},
		{math.Inf(-1), `{"$numberDouble":"-Infinity"}`},
		{dec(t, "0.10"), `"0.10"`},
		{dec(t, "NaN"), `"NaN"`},
		{"<a>\x00", `"\u003ca\u003e\u0000"`},
		{id, `"` + id.Hex() + `"`},
		{bson.DateTime(0), `"1970-01-01T00:00:00Z"`},
		{bson.NewDateTimeFromTime(time.Date(0, 2, 29, 1, 2, 3, 45e6, time.UTC)), `"0000-02-29T01:02:03.045Z"`},
		{bson.NewDateTimeFromTime(time.Date(-5, 6, 1, 0, 0, 0, 1e6, time.UTC)), `"-000005-06-01T00:00:00.001Z"`},
		{bson.NewDateTimeFromTime(time.Date(275760, 9, 13, 0, 0, 0, 0, time.UTC)), `"+275760-09-13T00:00:00Z"`},
		{bson.DateTime(math.MaxInt64), `"+292278994-08-17T07:12:55.807Z"`},
		{bson.Timestamp{T: 7, I: 3}, `{"$timestamp":{"t":7,"i":3}}`},
		{bson.Binary{Subtype: 4, Data: []byte{1, 2, 255}}, `{"$binary":{"base64":"AQL/","subType":"04"}}`},
		{bson.Binary{Subtype: 0x80}, `{"$binary":{"base64":"","subType":"80"}}`},
		{bson.Regex{Pattern: `^a"\d`, Options: "i"}, `{"$regularExpression":{"pattern":"^a\"\\d","options":"i"}}`},
		{bson.MinKey{}, `{"$minKey":1}`},
		{bson.MaxKey{}, `{"$maxKey":1}`},
		{bson.Undefined{}, `{"$undefined":true}`},
		{bson.Symbol("s"), `{"$symbol":"s"}`},
		{bson.JavaScript("f()"), `{"$code":"f()"}`},
		{bson.CodeWithScope{Code: "f()", Scope: bson.D{{Key: "x", Value: math.NaN()}}}, `{"$code":"f()","$scope":{"x":{"$numberDouble":"NaN"}}}`},
		{bson.DBPointer{DB: "d.c", Pointer: id}, `{"$dbPointer":{"$ref":"d.c","$id":{"$oid":"` + id.Hex() + `"}}}`},
		{bson.D{{Key: "$ref", Value: "c"}, {Key: "$id", Value: id}}, `{"$ref":"c","$id":"` + id.Hex() + `"}`},
		{bson.D{{Key: "b.c", Value: int32(1)}, {Key: "$a", Value: int32(2)}, {Key: "", Value: int32(3)}}, `{"b.c":1,"$a":2,"":3}`},
		{bson.D{{Key: "a", Value: int32(1)}, {Key: "b", Value: int32(2)}, {Key: "a", Value: int32(3)}}, `{"b":2,"a":3}`},
	}
	same := func(what string, v any, got string, err error, want string) {
		t.Helper()
		if err != nil || got != want {
			t.Errorf("%s of %T: %s, want %s (%v)", what, v, got, want, err)
		}
	}
	for _, f := range forms {
		got, err := jsonOf(f.v)
		same("any", f.v, got, err, f.want)
		got, err = jsonOf([]any{f.v, bson.A{f.v}})
		same("array", f.v, got, err, `[`+f.want+`,[`+f.want+`]]`)
		got, err = jsonOf(bson.D{{Key: "x", Value: f.v}})
		same("D", f.v, got, err, `{"x":`+f.want+`}`)
		got, err = jsonOf(bson.M{"x": map[string]any{"y": f.v}})
		same("M", f.v, got, err, `{"x":{"y":`+f.want+`}}`)
		got, err = jsonOf([]map[string]*any{{"x": &f.v}})
		same("own types", f.v, got, err, `[{"x":`+f.want+`}]`)
		if f.v != nil && !reflect.DeepEqual(f.v, bson.Null{}) { // or omitempty and null would differ
			h := held{Any: f.v, M: bson.M{"x": f.v}, D: bson.D{{Key: "x", Value: f.v}}, Map: map[string]any{"x": f.v}, Two: [2]any{f.v, nil}, inner: f.v}
			want := `"any":` + f.want + `,"m":{"x":` + f.want + `},"d":{"x":` + f.want + `},"map":{"x":` + f.want + `}`
			got, err = jsonOf(held{Next: &h})
			same("struct", f.v, got, err, `{"next":{`+want+`,"two":[`+f.want+`,null]},"two":[null,null]}`)
			got, err = jsonOf([]any{h})
			same("struct in any", f.v, got, err, `[{`+want+`,"two":[`+f.want+`,null]}]`)
		}
		if v, ok := f.v.(string); ok && strings.Contains(v, "\x00") {
			continue
		}
		raw, err := bson.Marshal(bson.D{{Key: "x", Value: f.v}})
		if err != nil {
			t.Fatal(err)
		}
		got, err = jsonOf(bson.Raw(raw))
		same("Raw", f.v, got, err, `{"x":`+f.want+`}`)
		got, err = jsonOf(bson.Raw(raw).Lookup("x"))
		same("RawValue", f.v, got, err, f.want)
	}
	if _, err := jsonOf(held{Own: bson.Regex{Pattern: "a"}, ID: id}); err != nil {
		t.Error(err)
	}
}

// What has a Go type of its own is what encoding/json makes of it.
func TestJSONOfOwnTypes(t *testing.T) {
	got, err := jsonOf(held{Own: bson.Regex{Pattern: "a"}})
	if want := `{"two":[null,null],"own":{"Pattern":"a","Options":""}}`; err != nil || got != want {
		t.Errorf("%s, want %s (%v)", got, want, err)
	}
	nan := math.NaN()
	for _, v := range []any{held{Float: &nan}, []float64{nan}, time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)} {
		if got, err := jsonOf(v); err == nil {
			t.Errorf("%v: %s, want an error", v, got)
		}
	}
	if got, err := jsonOf(bson.RawValue{}); err != nil || got != "null" {
		t.Errorf("a field that is missing: %s, %v", got, err)
	}
	if _, err := jsonOf([]bson.RawValue{}); err == nil || !strings.Contains(err.Error(), "use any") {
		t.Errorf("a RawValue inside another type: %v", err)
	}
}

// Invalid text is refused wherever it stands, and so is what never ends.
func TestJSONRefused(t *testing.T) {
	bad := "a\xffb"
	self := map[string]any{}
	self["self"] = self
	ring := &held{}
	ring.Next = ring
	for name, v := range map[string]any{
		"string": bad, "name": bson.M{bad: 1}, "name in D": bson.D{{Key: bad, Value: 1}}, "array": bson.A{bson.A{bad}},
		"regex": bson.Regex{Pattern: bad}, "symbol": bson.Symbol(bad), "code": bson.JavaScript(bad), "map of itself": self, "ring": ring,
	} {
		if got, err := jsonOf(v); err == nil {
			t.Errorf("%s: %q", name, got)
		}
	}
	deep, want := any(int32(1)), "1"
	for range 200 {
		deep, want = bson.D{{Key: "d", Value: bson.A{deep}}}, `{"d":[`+want+`]}`
	}
	if got, err := jsonOf(deep); err != nil || got != want {
		t.Errorf("400 levels: %.80s, %v", got, err)
	}
}
