package integration_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
)

// docs/types.md says what becomes of each BSON type in each sink. Here is the same as one
// table, and all of it goes into all four sinks, by the stream and by a rebuild.

// typesDoc is a document: each case sets one field of it.
type typesDoc struct {
	ID      bson.RawValue    `bson:"_id"`
	Text    *string          `bson:"text"`
	Flag    *bool            `bson:"flag"`
	Whole   *int64           `bson:"whole"`
	Double  *float64         `bson:"double"`
	At      *time.Time       `bson:"at"`
	Bytes   *[]byte          `bson:"bytes"`
	OID     *bson.ObjectID   `bson:"oid"`
	Dec     *bson.Decimal128 `bson:"dec"`
	Dynamic any              `bson:"dynamic"`
	Own     *typesOwn        `bson:"own"`
	Word    *string          `bson:"word"` // with day, the key of a row of its own
	Day     *time.Time       `bson:"day"`

	mended bool
}

// typesOwn is a type of the user's own in a field with the option json.
type typesOwn struct {
	Floats []float64        `bson:"floats" json:"floats,omitempty"`
	At     *time.Time       `bson:"at" json:"at,omitempty"`
	Dec    *bson.Decimal128 `bson:"dec" json:"dec,omitempty"`
	Any    any              `bson:"any" json:"any,omitempty"`
}

type typesRow struct {
	Text    *string          `row:"text"`
	Flag    *bool            `row:"flag"`
	Whole   *int64           `row:"whole"`
	Double  *float64         `row:"double"`
	At      *time.Time       `row:"at"`
	Bytes   *[]byte          `row:"bytes"`
	OID     *bson.ObjectID   `row:"oid"`
	Dec     *bson.Decimal128 `row:"dec"`
	Dynamic any              `row:"dynamic,json"`
	Own     *typesOwn        `row:"own,json"`
}

type typesKey struct {
	Word string    `row:"word,key"`
	Day  time.Time `row:"day,key"`
	Doc  string    `row:"doc"`
}

// typesMended are the documents that the user's code has learned to leave out, by the text
// forms of their _ids. It is changed while nothing runs.
var typesMended map[string]bool

func (d *typesDoc) UnmarshalBSON(b []byte) error {
	d.ID = bson.Raw(b).Lookup("_id")
	if d.mended = typesMended[projector.KeyText(d.ID)]; d.mended {
		return nil
	}
	type plain typesDoc
	return bson.Unmarshal(b, (*plain)(d))
}

func (d typesDoc) row() (typesRow, bool) {
	return typesRow{d.Text, d.Flag, d.Whole, d.Double, d.At, d.Bytes, d.OID, d.Dec, d.Dynamic, d.Own}, !d.mended
}

func (d typesDoc) keys() []typesKey {
	if d.mended || d.Word == nil {
		return nil
	}
	key := typesKey{Word: *d.Word, Day: time.UnixMilli(0), Doc: projector.KeyText(d.ID)}
	if d.Day != nil {
		key.Day = *d.Day
	}
	return []typesKey{key}
}

// poison is the form of what a sink, or the decoder before it, refuses: the projection
// stops before that document, with a PoisonError that names it.
const poison = "poison"

// forms are what a value is in each sink, as typesSink reads it. MongoDB's are in extended
// JSON; "" is null.
type forms struct{ postgres, mongodb, redis, elasticsearch string }

func (f forms) in(p place) string {
	return map[place]string{inPostgres: f.postgres, inMongoDB: f.mongodb, inRedis: f.redis, inElasticsearch: f.elasticsearch}[p]
}

func everywhere(form string) forms { return forms{form, form, form, form} }

// typesCase is a document with one odd value, and what becomes of it.
type typesCase struct {
	name, field string
	value       any
	want        forms
}

func date(year int) bson.DateTime {
	return bson.NewDateTimeFromTime(time.Date(year, 6, 1, 0, 0, 0, 1e6, time.UTC))
}

func long(n string) string   { return `{"$numberLong":"` + n + `"}` }
func double(n string) string { return `{"$numberDouble":"` + n + `"}` }
func dec(n string) string    { return `{"$numberDecimal":"` + n + `"}` }
func millis(d bson.DateTime) string {
	return fmt.Sprintf(`{"$date":{"$numberLong":"%d"}}`, int64(d))
}

// invalid is a string that is not UTF-8; MongoDB takes it.
const invalid = "a\xff\xfeb"

func typesCases(t *testing.T) []typesCase {
	t.Helper()
	d := func(s string) bson.Decimal128 { return decimal128(t, s) }
	id := bson.ObjectID{0xab, 11: 7}
	ascii, uuid := []byte{0, 1, 255}, bytes.Repeat([]byte{0x1f}, 16)
	cases := []typesCase{ // the first are those that a checkpoint's samples are taken of
		{"plain 1", "text", "a", forms{"a", `"a"`, "a", `"a"`}},
		{"plain 2", "whole", int32(1), forms{"1", long("1"), "1", "1"}},
		{"plain 3", "dec", d("1.5"), forms{"1.5", dec("1.5"), "1.5", `"1.5"`}},
		{"plain 4", "flag", true, forms{"true", "true", "true", "true"}},
		{"plain 5", "dynamic", "a", everywhere(`"a"`)},
		{"plain 6", "own", bson.D{{Key: "any", Value: "a"}}, everywhere(`{"any":"a"}`)},

		{"null", "text", nil, everywhere("")},
		{"undefined", "text", bson.Undefined{}, everywhere("")},
		{"empty text", "text", "", forms{"", `""`, "", `""`}},
		{"text", "text", "ü\U0001F30A \"<&>\" \\ \t\n\u2028", forms{"ü\U0001F30A \"<&>\" \\ \t\n\u2028", `"ü🌊 \"\u003c\u0026\u003e\" \\ \t\n\u2028"`, "ü\U0001F30A \"<&>\" \\ \t\n\u2028", "\"ü\U0001F30A \\\"<&>\\\" \\\\ \\t\\n\\u2028\""}},
		{"a symbol", "text", bson.Symbol("s"), forms{"s", `"s"`, "s", `"s"`}},
		{"text with NUL", "text", "a\x00b", forms{poison, `"a\u0000b"`, "a\x00b", `"a\u0000b"`}},
		{"text that is not UTF-8", "text", invalid, forms{poison, poison, invalid, poison}},
		{"text of 40,000 bytes", "text", strings.Repeat("long", 10_000), forms{
			strings.Repeat("long", 10_000), `"` + strings.Repeat("long", 10_000) + `"`, strings.Repeat("long", 10_000), `"` + strings.Repeat("long", 10_000) + `"`,
		}},
		{"number for a text", "text", int32(1), everywhere(poison)},

		{"long", "whole", int64(math.MinInt64), forms{"-9223372036854775808", long("-9223372036854775808"), "-9223372036854775808", "-9223372036854775808"}},
		{"long beyond a double", "whole", int64(1<<53 + 1), forms{"9007199254740993", long("9007199254740993"), "9007199254740993", "9007199254740993"}},
		{"whole double", "whole", 2.0, forms{"2", long("2"), "2", "2"}},
		{"broken double for a whole number", "whole", 1.5, everywhere(poison)},
		{"decimal for a whole number", "whole", d("1"), everywhere(poison)},
		{"text for a number", "whole", "1", everywhere(poison)},

		{"double", "double", 0.1, forms{"0.1", double("0.1"), "0.1", "0.1"}},
		{"int for a double", "double", int32(7), forms{"7", double("7"), "7", "7"}},
		{"long for a double", "double", int64(1<<53 + 1), forms{"9.007199254740992e+15", double("9.007199254740992e+15"), "9.007199254740992e+15", "9.007199254740992e+15"}},
		{"negative zero", "double", math.Copysign(0, -1), forms{"-0", double("-0"), "-0", "-0"}},
		{"smallest double", "double", math.SmallestNonzeroFloat64, forms{"5e-324", double("5e-324"), "5e-324", "5e-324"}},
		{"NaN", "double", math.NaN(), forms{"NaN", double("NaN"), "NaN", poison}},
		{"infinity", "double", math.Inf(1), forms{"Infinity", double("+Inf"), "+Inf", poison}},
		{"negative infinity", "double", math.Inf(-1), forms{"-Infinity", double("-Inf"), "-Inf", poison}},

		{"decimal", "dec", d("-0.10"), forms{"-0.10", dec("-0.10"), "-0.10", `"-0.10"`}},
		{"decimal NaN", "dec", d("NaN"), forms{"NaN", dec("NaN"), "NaN", `"NaN"`}},
		{"decimal infinity", "dec", d("-Infinity"), forms{"-Infinity", dec("-Infinity"), "-Infinity", `"-Infinity"`}},
		{"decimal zero", "dec", d("-0E+3"), forms{"0", dec("-0E+3"), "-0E+3", `"-0E+3"`}},
		{"large decimal", "dec", d("1E+60"), forms{"1" + strings.Repeat("0", 60), dec("1E+60"), "1E+60", `"1E+60"`}},
		{"largest decimal", "dec", d("9.999999999999999999999999999999999E+6144"), forms{
			strings.Repeat("9", 34) + strings.Repeat("0", 6111), dec("9.999999999999999999999999999999999E+6144"),
			"9.999999999999999999999999999999999E+6144", `"9.999999999999999999999999999999999E+6144"`,
		}},
		{"smallest decimal", "dec", d("1E-6176"), forms{"0." + strings.Repeat("0", 6175) + "1", dec("1E-6176"), "1E-6176", `"1E-6176"`}},
		{"int for a decimal", "dec", int32(1), everywhere(poison)},

		{"date", "at", bson.DateTime(1795953600123), forms{"2026-11-29 12:00:00.123", millis(1795953600123), "2026-11-29T12:00:00.123Z", `"2026-11-29T12:00:00.123Z"`}},
		{"year 275760", "at", date(275760), forms{"275760-06-01 00:00:00.001", millis(date(275760)), fmt.Sprint(int64(date(275760))), poison}},
		{"year -5", "at", date(-5), forms{"0006-06-01 00:00:00.001 BC", millis(date(-5)), fmt.Sprint(int64(date(-5))), poison}},
		{"year 0", "at", date(0), forms{"0001-06-01 00:00:00.001 BC", millis(date(0)), "0000-06-01T00:00:00.001Z", `"0000-06-01T00:00:00.001Z"`}},
		{"year 1", "at", date(1), forms{"0001-06-01 00:00:00.001", millis(date(1)), "0001-06-01T00:00:00.001Z", `"0001-06-01T00:00:00.001Z"`}},
		{"year 9999", "at", date(9999), forms{"9999-06-01 00:00:00.001", millis(date(9999)), "9999-06-01T00:00:00.001Z", `"9999-06-01T00:00:00.001Z"`}},
		{"year 10000", "at", date(10000), forms{"10000-06-01 00:00:00.001", millis(date(10000)), fmt.Sprint(int64(date(10000))), poison}},
		{"year -5 again", "at", date(-5), forms{"0006-06-01 00:00:00.001 BC", millis(date(-5)), fmt.Sprint(int64(date(-5))), poison}},
		{"largest date", "at", bson.DateTime(math.MaxInt64), forms{poison, millis(math.MaxInt64), "9223372036854775807", poison}},
		{"smallest date", "at", bson.DateTime(math.MinInt64), forms{poison, millis(math.MinInt64), "-9223372036854775808", poison}},
		{"timestamp for a date", "at", bson.Timestamp{T: 1795953600, I: 3}, forms{"2026-11-29 12:00:00", millis(1795953600000), "2026-11-29T12:00:00.000Z", `"2026-11-29T12:00:00.000Z"`}},

		{"binary", "bytes", bson.Binary{Data: ascii}, forms{`\x0001ff`, `{"$binary":{"base64":"AAH/","subType":"00"}}`, "\x00\x01\xff", `"AAH/"`}},
		{"binary of subtype 2", "bytes", bson.Binary{Subtype: 2, Data: ascii}, forms{`\x0001ff`, `{"$binary":{"base64":"AAH/","subType":"00"}}`, "\x00\x01\xff", `"AAH/"`}},
		{"empty binary", "bytes", bson.Binary{Data: []byte{}}, forms{`\x`, `{"$binary":{"base64":"","subType":"00"}}`, "", `""`}},
		{"UUID for bytes", "bytes", bson.Binary{Subtype: 4, Data: uuid}, everywhere(poison)},
		{"ObjectID", "oid", id, forms{id.Hex(), `{"$oid":"` + id.Hex() + `"}`, id.Hex(), `"` + id.Hex() + `"`}},

		{"own floats", "own", bson.D{{Key: "floats", Value: bson.A{0.5, 1.0}}}, everywhere(`{"floats":[0.5,1]}`)},
		{"own NaN", "own", bson.D{{Key: "floats", Value: bson.A{math.NaN()}}}, everywhere(poison)},
		{"own NaN in any", "own", bson.D{{Key: "any", Value: bson.A{math.NaN()}}}, everywhere(`{"any":[{"$numberDouble":"NaN"}]}`)},
		{"own year 10000", "own", bson.D{{Key: "at", Value: date(10000)}}, everywhere(poison)},
		{"own decimal", "own", bson.D{{Key: "dec", Value: d("NaN")}}, everywhere(`{"dec":"NaN"}`)},
	}

	// The keys of a row with keys of its own.
	word := func(s string) forms { return forms{s, raw(t, s).String(), s, jsonText(t, s)} }
	nul := word("a\x00b")
	nul.postgres = poison
	cases = append(cases,
		typesCase{"key", "word", `|a|\%"$.`, word(`|a|\%"$.`)},
		typesCase{"empty key", "word", "", word("")},
		typesCase{"key with NUL", "word", "a\x00b", nul},
		typesCase{"key that is not UTF-8", "word", invalid, forms{poison, poison, invalid, poison}},
	)
	day := func(d bson.DateTime, postgres, redis, elasticsearch string) typesCase {
		return typesCase{"day " + redis, "day", d, forms{postgres, millis(d), redis, elasticsearch}}
	}
	cases = append(cases,
		day(date(1), "0001-06-01 00:00:00.001", "0001-06-01T00:00:00.001Z", `"0001-06-01T00:00:00.001Z"`),
		day(date(10000), "10000-06-01 00:00:00.001", fmt.Sprint(int64(date(10000))), poison),
		day(math.MaxInt64, poison, "9223372036854775807", poison),
	)

	// What stands in an any, with the option json.
	dynamic := func(name string, v any, text string) typesCase {
		return typesCase{"any: " + name, "dynamic", v, everywhere(canonicalJSON(t, text))}
	}
	nested := func(name string, pairs int) typesCase {
		v, text := any("deep"), `"deep"`
		for range pairs {
			v, text = bson.D{{Key: "d", Value: bson.A{v}}}, `{"d":[`+text+`]}`
		}
		return dynamic(name, v, text)
	}
	withoutNUL := dynamic("text with NUL", "a\x00b", `"a\u0000b"`)
	withoutNUL.want.postgres = poison
	inside := dynamic("text with NUL inside", bson.D{{Key: "a", Value: bson.A{"\x00"}}}, `{"a":["\u0000"]}`)
	inside.want.postgres = poison
	huge := dynamic("large double", 1e300, "1e+300")
	huge.want.postgres = "1" + strings.Repeat("0", 300)
	negativeZero := dynamic("negative zero", math.Copysign(0, -1), "-0")
	negativeZero.want.postgres, negativeZero.want.mongodb = "0", "0"
	cases = append(cases, withoutNUL, inside, huge, negativeZero,
		dynamic("null", nil, `null`), dynamic("bool", false, `false`), dynamic("int", int32(-1), `-1`),
		dynamic("long", int64(math.MaxInt64), `9223372036854775807`), dynamic("whole double", 3.0, `3`), dynamic("double", 0.1, `0.1`),
		dynamic("NaN", math.NaN(), double("NaN")), dynamic("infinity", math.Inf(-1), double("-Infinity")),
		// (CASES B81)
		dynamic("NaN inside", bson.D{{Key: "x", Value: math.NaN()}, {Key: "a", Value: bson.A{int32(1), math.Inf(1), bson.D{{Key: "y", Value: math.Inf(-1)}}}}, {Key: "d", Value: d("NaN")}},
			`{"x":`+double("NaN")+`,"a":[1,`+double("Infinity")+`,{"y":`+double("-Infinity")+`}],"d":"NaN"}`),
		dynamic("decimal", d("0.10"), `"0.10"`), dynamic("ObjectID", id, `"`+id.Hex()+`"`),
		dynamic("date", bson.DateTime(1795953600120), `"2026-11-29T12:00:00.12Z"`),
		dynamic("year -5", date(-5), `"-000005-06-01T00:00:00.001Z"`), dynamic("year 0", date(0), `"0000-06-01T00:00:00.001Z"`),
		dynamic("year 9999", date(9999), `"9999-06-01T00:00:00.001Z"`), dynamic("year 10000", date(10000), `"+010000-06-01T00:00:00.001Z"`),
		dynamic("largest date", bson.DateTime(math.MaxInt64), `"+292278994-08-17T07:12:55.807Z"`),
		// (CASES B84)
		dynamic("DBRef", bson.D{{Key: "$ref", Value: "c"}, {Key: "$id", Value: id}, {Key: "$db", Value: "d"}}, `{"$ref":"c","$id":"`+id.Hex()+`","$db":"d"}`),
		dynamic("timestamp", bson.Timestamp{T: 7, I: 3}, `{"$timestamp":{"t":7,"i":3}}`),
		dynamic("binary", bson.Binary{Data: ascii}, `{"$binary":{"base64":"AAH/","subType":"00"}}`),
		dynamic("old UUID", bson.Binary{Subtype: 3, Data: uuid}, `{"$binary":{"base64":"`+base64.StdEncoding.EncodeToString(uuid)+`","subType":"03"}}`),
		dynamic("UUID", bson.Binary{Subtype: 4, Data: uuid}, `{"$binary":{"base64":"`+base64.StdEncoding.EncodeToString(uuid)+`","subType":"04"}}`),
		dynamic("min key", bson.MinKey{}, `{"$minKey":1}`), dynamic("max key", bson.MaxKey{}, `{"$maxKey":1}`),
		dynamic("symbol", bson.Symbol("s"), `{"$symbol":"s"}`), dynamic("code", bson.JavaScript("f()"), `{"$code":"f()"}`),
		dynamic("code with scope", bson.CodeWithScope{Code: "f()", Scope: bson.D{{Key: "x", Value: int32(1)}}}, `{"$code":"f()","$scope":{"x":1}}`),
		dynamic("regex", bson.Regex{Pattern: `^a"\d`, Options: "im"}, `{"$regularExpression":{"pattern":"^a\"\\d","options":"im"}}`),
		dynamic("undefined", bson.Undefined{}, `{"$undefined":true}`),
		dynamic("DBPointer", bson.DBPointer{DB: "d.c", Pointer: id}, `{"$dbPointer":{"$ref":"d.c","$id":{"$oid":"`+id.Hex()+`"}}}`),
		dynamic("everything in arrays", bson.A{bson.A{}, bson.D{}, bson.A{bson.MinKey{}, nil, bson.Regex{Pattern: "a"}}}, `[[],{},[{"$minKey":1},null,{"$regularExpression":{"pattern":"a","options":""}}]]`),
		dynamic("names", bson.D{{Key: "a.b", Value: int32(1)}, {Key: "$c", Value: int32(2)}, {Key: "", Value: bson.D{{Key: "$d.e", Value: int32(3)}, {Key: ".", Value: int32(4)}}}}, `{"a.b":1,"$c":2,"":{"$d.e":3,".":4}}`),
		dynamic("one name twice", bson.D{{Key: "a", Value: int32(1)}, {Key: "a", Value: int32(2)}}, `{"a":2}`),
		nested("100 levels", 50), nested("as deep as MongoDB goes", 89), // 180 levels, with the document's own
		typesCase{"any: text that is not UTF-8", "dynamic", bson.A{invalid}, everywhere(poison)},
		typesCase{"any: name that is not UTF-8", "dynamic", bson.D{{Key: invalid, Value: int32(1)}}, everywhere(poison)},
	)
	for i := range cases {
		cases[i].name = "case " + cases[i].name // no other _id of the test
		if cases[i].want == everywhere("null") {
			cases[i].want = everywhere("") // which is the same as none
		}
	}
	return cases
}

// jsonText is a string in JSON, as canonicalJSON writes it.
func jsonText(t *testing.T, s string) string {
	t.Helper()
	b, err := json.Marshal(s)
	must(t, err)
	return canonicalJSON(t, string(b))
}

// typesIDs are documents of which only the _id is odd.
func typesIDs(t *testing.T) []bson.RawValue {
	return append(everyKey(t), raw(t, strings.Repeat("long", 200)), raw(t, "sha256:looks like a hash"))
}

// typesOutcome is what a sink should have and refuse.
type typesOutcome struct {
	rows, keyed map[string]oddRow
	refused     map[string]bool
}

func typesWant(t *testing.T, p place, cases []typesCase, ids []bson.RawValue) typesOutcome {
	t.Helper()
	want := typesOutcome{map[string]oddRow{}, map[string]oddRow{}, map[string]bool{}}
	for _, c := range cases {
		form := c.want.in(p)
		if form == poison {
			want.refused[c.name] = true
			continue
		}
		row := oddRow{}
		want.rows[c.name] = row
		switch c.field {
		case "word":
			want.keyed[c.name] = oddRow{"word": form, "day": forms{"1970-01-01 00:00:00", millis(0), "1970-01-01T00:00:00.000Z", `"1970-01-01T00:00:00.000Z"`}.in(p)}
		case "day":
			quoted := `"` + c.name + `"`
			want.keyed[c.name] = oddRow{"word": forms{c.name, quoted, c.name, quoted}.in(p), "day": form}
		default:
			if form != "" || c.value == "" || strings.HasSuffix(c.name, "empty binary") {
				row[c.field] = form
			}
		}
		if p == inMongoDB {
			row["_id"] = idText(raw(t, c.name))
		}
	}
	for _, id := range ids {
		want.rows[projector.KeyText(id)] = oddRow{}
		if p == inMongoDB {
			want.rows[projector.KeyText(id)]["_id"] = idText(id)
		}
	}
	return want
}

func idText(id bson.RawValue) string { return fmt.Sprintf("%s %x", id.Type, id.Value) }

// typesModel is a model in one of the sinks, by the stream or by a rebuild.
type typesModel struct {
	typesSink
	place place
	name  string
	o     projector.Options
	op    projector.Op // of the changes that fill it
	want  typesOutcome
}

// fill lets the model come level with the source. At each document that it is stopped by, the
// user's code is mended so as to leave that one out, and started again.
func (m *typesModel) fill(t *testing.T, db *mongo.Database) {
	t.Helper()
	typesMended = map[string]bool{}
	for began := time.Now(); ; {
		g := m.run(t, db)
		err := g.levelOr(db)
		if err == nil {
			g.stop()
			t.Logf("%s %s in %s, %d refused", m.place, m.name, time.Since(began), len(typesMended))
			break
		}
		e, ok := errors.AsType[*projector.PoisonError](err)
		if !ok || typesMended[e.Key] || e.Op != m.op || e.Namespace != (projector.Namespace{Database: db.Name(), Collection: "odd"}) {
			t.Fatalf("%s %s ended with %T: %v", m.place, m.name, err, err)
		}
		typesMended[e.Key] = true
	}
	m.compare(t)
}

// follow lets it come level once more, with the user's code as fill has left it.
func (m *typesModel) follow(t *testing.T, db *mongo.Database) {
	t.Helper()
	typesMended = m.want.refused
	g := m.run(t, db)
	g.level(db)
	g.stop()
	m.compare(t)
}

func (m *typesModel) run(t *testing.T, db *mongo.Database) *running {
	t.Helper()
	m.o.Logger = quiet()
	r, err := m.runner(db, m.name, m.o)
	must(t, err)
	return run(t, r)
}

func (m *typesModel) compare(t *testing.T) {
	t.Helper()
	got := typesOutcome{m.rows(m.name), m.keyed(m.name), typesMended}
	if diff := cmp.Diff(m.want, got, cmp.AllowUnexported(typesOutcome{})); diff != "" {
		t.Errorf("%s %s: documented (-) and stored (+) differ:\n%.6000s", m.place, m.name, diff)
	}
}

// Every BSON type and odd value becomes what is documented, in each sink, and the same by
// the stream and by a rebuild. What a sink can't hold stops the projection before that
// document, and no other. (CASES B81, B82, B84.)
func TestTypes(t *testing.T) {
	t.Parallel()
	db := source(t)
	withImages(t, db, "odd")
	from := operationTime(t, db)
	from.I++
	cases, ids := typesCases(t), typesIDs(t)
	var docs []any
	for _, c := range cases {
		doc := bson.D{{Key: "_id", Value: c.name}, {Key: c.field, Value: c.value}}
		if c.field == "day" {
			doc = append(doc, bson.E{Key: "word", Value: c.name})
		}
		docs = append(docs, doc)
	}
	for _, id := range ids {
		docs = append(docs, bson.D{{Key: "_id", Value: id}})
	}
	odd := db.Collection("odd")
	_, err := odd.InsertMany(t.Context(), docs)
	must(t, err)
	var models []*typesModel
	for _, p := range everySink {
		s, want := typesIn(t, p), typesWant(t, p, cases, ids)
		t.Logf("%s refuses %q", p, slices.Sorted(maps.Keys(want.refused)))
		models = append(models,
			&typesModel{s, p, "by_stream", projector.Options{Start: projector.FromTime(from)}, projector.Insert, want},
			// In small chunks: Elasticsearch looks for what it refuses in a chunk by trials in scratch indices.
			&typesModel{s, p, "by_rebuild", projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: 4}}, projector.Snapshot, want})
	}
	for _, m := range models {
		m.fill(t, db)
	}
	_, err = odd.UpdateMany(t.Context(), bson.D{}, set("touched", true))
	must(t, err)
	for _, m := range models {
		m.follow(t, db)
	}
	_, err = odd.DeleteMany(t.Context(), bson.D{})
	must(t, err)
	for _, m := range models {
		m.want.rows, m.want.keyed = map[string]oddRow{}, map[string]oddRow{}
		m.follow(t, db)
	}
}
