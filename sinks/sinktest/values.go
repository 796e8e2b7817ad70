package sinktest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

func valueChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"values/round-trip", values, valuesRoundTrip[Tx]},
		{"values/exact-or-refused", values, valuesExtreme[Tx]},
	}
}

// plain is a row with an ordinary value in every column.
func plain() Values {
	at := time.Date(2026, 11, 29, 12, 30, 0, 123e6, time.UTC)
	return Values{
		Text: "text", Word: "word", Flag: true, Int: 42, Small: -7, Unsigned: 7, Float: 1.25, Time: at,
		Bytes: []byte("bytes"), ObjectID: bson.ObjectID{1, 2, 3}, Decimal: decimal("12.50"),
		JSON:      map[string]any{"list": []any{"a", 1.0, nil, true}, "nested": map[string]any{"b": "c"}},
		MaybeText: new("text"), MaybeFlag: new(true), MaybeInt: new(int64(42)), MaybeFloat: new(1.25), MaybeTime: new(at),
		MaybeBytes: new([]byte("bytes")), MaybeObjectID: new(bson.ObjectID{4, 5, 6}), MaybeDecimal: new(decimal("-0.001")),
	}
}

// ordinary are rows that every sink must be able to store.
func ordinary() map[string]Values {
	rows := map[string]Values{"plain": plain(), "zero": {Time: time.Unix(0, 0), Decimal: decimal("0")}}
	with := func(name string, change func(*Values)) {
		v := plain()
		change(&v)
		rows[name] = v
	}
	with("empty ones that are not null", func(v *Values) {
		v.MaybeText, v.MaybeFlag, v.MaybeInt, v.MaybeFloat = new(""), new(false), new(int64(0)), new(0.0)
		v.MaybeTime, v.MaybeBytes, v.MaybeObjectID, v.MaybeDecimal = new(time.UnixMilli(0)), new([]byte{}), new(bson.ObjectID{}), new(decimal("0"))
		v.JSON = map[string]any{}
	})
	with("texts", func(v *Values) {
		v.Text, v.Word = "\u00e4\u00f6 \U0001F30A \u2028 \"quoted\" 'single' \\back\\ {a,b} \t\r\n", "NULL"
		v.JSON = map[string]any{"\u00e4 \"key\"": "<&> \u2028 \\n", "": "empty", "$a.b": 1.0}
	})
	with("largest integers", func(v *Values) {
		v.Int, v.Small, v.Unsigned, v.MaybeInt = math.MaxInt64, math.MaxInt8, math.MaxUint32, new(int64(math.MinInt64))
	})
	with("integers beyond a double", func(v *Values) { v.Int, v.MaybeInt = 1<<53+1, new(int64(-1<<53-1)) })
	with("smallest integers", func(v *Values) { v.Int, v.Small, v.Unsigned = math.MinInt64, math.MinInt8, 0 })
	with("floats", func(v *Values) { v.Float, v.MaybeFloat = 0.1, new(math.MaxFloat64) })
	with("more floats", func(v *Values) { v.Float, v.MaybeFloat = -1.0/3, new(1e-300) })
	with("a time before 1970", func(v *Values) {
		v.Time, v.MaybeTime = time.UnixMilli(-1), new(time.Date(1492, 10, 12, 1, 2, 3, 4e6, time.UTC))
	})
	with("a time in another zone", func(v *Values) { v.Time = v.Time.In(time.FixedZone("elsewhere", -5*3600)) })
	with("a time below the millisecond", func(v *Values) { v.Time = v.Time.Add(999_999) })
	with("every byte", func(v *Values) {
		v.Bytes = make([]byte, 256)
		for i := range v.Bytes {
			v.Bytes[i] = byte(i)
		}
	})
	with("long ones", func(v *Values) { v.Text, v.Bytes = strings.Repeat("long ", 20_000), make([]byte, 100_000) })
	with("decimals", func(v *Values) {
		v.Decimal, v.MaybeDecimal = decimal("12345678901234567.890123456789"), new(decimal("-1E-20"))
	})
	return rows
}

// extreme are rows that a store may have no form for. It must refuse them then.
func extreme() map[string]Values {
	rows := map[string]Values{}
	with := func(name string, change func(*Values)) {
		v := plain()
		change(&v)
		rows[name] = v
	}
	with("a text with NUL", func(v *Values) { v.Text = "a\x00b" })
	with("a text that is not UTF-8", func(v *Values) { v.Text = "a\xff\xfeb" })
	with("JSON with NUL", func(v *Values) { v.JSON = map[string]any{"a": "b\x00c"} })
	with("JSON with NUL in a name", func(v *Values) { v.JSON = map[string]any{"a\x00b": 1.0} })
	with("JSON that is not UTF-8", func(v *Values) { v.JSON = map[string]any{"a": "b\xff"} })
	with("JSON with a large number", func(v *Values) { v.JSON = map[string]any{"a": 1e300, "b": 1e-300} })
	for _, f := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.SmallestNonzeroFloat64} {
		with(fmt.Sprint("float ", f), func(v *Values) { v.Float, v.MaybeFloat = f, &f })
	}
	for _, s := range []string{"NaN", "Infinity", "-Infinity", "9999999999999999999999999999999999", "1E+6144", "1E-6176", "-9.999999999999999999999999999999999E+6144", "0E+6000"} {
		with("decimal "+s, func(v *Values) { v.Decimal, v.MaybeDecimal = decimal(s), new(decimal(s)) })
	}
	for _, year := range []int{-5000, -1, 0, 1, 9999, 10_000, 200_000, 290_000, 300_000, 290_000_000} {
		with(fmt.Sprint("year ", year), func(v *Values) { v.Time = time.Date(year, 6, 1, 0, 0, 0, 1e6, time.UTC) })
	}
	with("no time", func(v *Values) { v.Time, v.MaybeTime = time.Time{}, new(time.Time{}) })
	return rows
}

func valuesRoundTrip[Tx any](e *env[Tx]) {
	o := e.begin()
	var want []string
	var rows []projector.Row[Values]
	for name, v := range ordinary() {
		rows = append(rows, projector.Row[Values]{Owner: id(name), Version: e.version.Add(1), Row: &v})
		want = append(want, keptText(Kept[Values]{v, projector.KeyText(id(name))}, true))
	}
	// Null and not null in one batch, and each alone.
	o.mustCommit(put(e.Values, nil, rows))
	e.wantRows("with all of them in one batch", e.values(o.place()), slices.Clone(want))
	for _, r := range rows {
		r.Version = e.version.Add(1)
		o.mustCommit(put(e.Values, nil, []projector.Row[Values]{r}))
	}
	e.wantRows("after each was put again", e.values(o.place()), slices.Clone(want))
	// A row is replaced as a whole: what was there becomes null.
	empty := Values{Time: time.Unix(0, 0), Decimal: decimal("0")}
	for i := range rows {
		rows[i].Row, rows[i].Version = &empty, e.version.Add(1)
		want[i] = keptText(Kept[Values]{empty, projector.KeyText(rows[i].Owner)}, true)
	}
	o.mustCommit(put(e.Values, nil, rows))
	e.wantRows("after each became null", e.values(o.place()), want)
}

func (e *env[Tx]) values(place string) []string {
	e.Helper()
	rows, err := e.Values.Rows(e.ctx, place)
	e.must("read the values", err)
	return keptTexts(rows, true)
}

// valuesExtreme: what can't be stored as it is must be refused as poison. Stored as
// something else it would be a difference that nobody is told of.
func valuesExtreme[Tx any](e *env[Tx]) {
	o := e.begin()
	var want []string
	for name, v := range extreme() {
		row := projector.Row[Values]{Owner: id(name), Version: e.version.Add(1), Row: &v}
		err := o.commit(e.ctx, put(e.Values, nil, []projector.Row[Values]{row}))
		if err == nil {
			want = append(want, keptText(Kept[Values]{v, projector.KeyText(row.Owner)}, true))
		} else {
			e.Logf("refused: %s", name)
			e.wantClass(name, o.sink, err, projector.Poison)
			o.stands("after " + name + " was refused")
		}
	}
	e.wantRows("of the extreme values that were not refused", e.values(o.place()), want)
}
