package row_test

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/row"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type status string

type everything struct {
	Text    string          `row:"text,key"`
	Bool    bool            `row:"bool,key"`
	Int     int16           `row:"int,key"`
	Uint    uint32          `row:"uint,key"`
	Time    time.Time       `row:"time,key"`
	ID      bson.ObjectID   `row:"id,key"`
	Named   status          `row:"named,key"`
	N       int64           `row:"n,sum"`
	Revenue bson.Decimal128 `row:"revenue,sum"`
	Float   float64         `row:"float"`
	Bytes   []byte          `row:"bytes"`
	Maybe   *string         `row:"maybe"`
	Tags    []string        `row:"tags,json"`
	Skipped int             `row:"-"`
	private int
}

func TestSchema(t *testing.T) {
	s, err := row.Of[everything]()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range s.Fields {
		got = append(got, fmt.Sprint(f.Name, f.Role, f.Kind, f.Nullable))
	}
	want := []string{
		fmt.Sprint("text", row.Key, row.Text, false), fmt.Sprint("bool", row.Key, row.Bool, false),
		fmt.Sprint("int", row.Key, row.Int, false), fmt.Sprint("uint", row.Key, row.Int, false),
		fmt.Sprint("time", row.Key, row.Time, false), fmt.Sprint("id", row.Key, row.ObjectID, false),
		fmt.Sprint("named", row.Key, row.Text, false), fmt.Sprint("n", row.Sum, row.Int, false),
		fmt.Sprint("revenue", row.Sum, row.Decimal, false), fmt.Sprint("float", row.Plain, row.Float, false),
		fmt.Sprint("bytes", row.Plain, row.Bytes, false), fmt.Sprint("maybe", row.Plain, row.Text, true),
		fmt.Sprint("tags", row.Plain, row.JSON, true),
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if again, _ := row.Of[everything](); again != s {
		t.Error("the schema is not cached")
	}
	_ = everything{}.private
}

type base struct{ A string }

// bad has every fault that a field can have.
type bad struct {
	base
	NoTag    string
	hidden   string          `row:"hidden"`
	Empty    string          `row:""`
	Upper    string          `row:"Upper"`
	Long     string          `row:"a123456789012345678901234567890123456789x"`
	Reserved string          `row:"tm_x"`
	ID       string          `row:"_id"`
	Contrib  int64           `row:"contributions,sum"`
	Option   string          `row:"option,keys"`
	Both     int64           `row:"both,key,sum"`
	Twice    string          `row:"same"`
	Again    string          `row:"same"`
	FloatSum float64         `row:"floatsum,sum"`
	TextSum  string          `row:"textsum,sum"`
	NullSum  *int64          `row:"nullsum,sum"`
	NullKey  *string         `row:"nullkey,key"`
	BytesKey []byte          `row:"byteskey,key"`
	JSONKey  [2]int          `row:"jsonkey,key,json"`
	FloatKey float32         `row:"floatkey,key"`
	DecKey   bson.Decimal128 `row:"deckey,key"`
	Big      uint64          `row:"big"`
	Map      map[string]int  `row:"map"`
	Deep     **string        `row:"deep"`
	Two      string          `row:"Two,keys"`
}

func TestFaults(t *testing.T) {
	_, err := row.Of[bad]()
	if err == nil {
		t.Fatal("no error")
	}
	for _, says := range []string{
		"field base: embedded structs", "field NoTag: it has no row tag; tag it", "field hidden: it has a row tag but is not exported",
		`field Empty: bad column name ""`, `bad column name "Upper"`, `bad column name "a1234`, `bad column name "tm_x": it is reserved`,
		`bad column name "_id"`, `bad column name "contributions": it is reserved`, `field Option: unknown option "keys"`,
		"field Both: a column is either key or sum", `fields Twice and Again both have column "same"`,
		"field FloatSum: sums of floats depend on their order; use int64 or bson.Decimal128", "field TextSum: a sum must be an int64",
		"field NullSum: a sum must be", "field NullKey: a key must not be null", "field BytesKey: a key must be", "field JSONKey: a key must be",
		"field FloatKey: a key must have one form", "field DecKey: a key must have one form", "field Big: uint64 can exceed",
		"field Map: type map[string]int can't be stored", "field Deep: type *string can't",
		`field Two: bad column name "Two"`, `field Two: unknown option "keys"`,
	} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("not said: %s", says)
		}
	}
	if n := strings.Count(err.Error(), "\n") + 1; n != 25 {
		t.Errorf("%d faults:\n%v", n, err)
	}
	_ = bad{}.hidden
}

func TestNoRow(t *testing.T) {
	for _, err := range []error{second(row.Of[int]()), second(row.Of[struct{}]()), second(row.Of[*everything]())} {
		if err == nil {
			t.Error("no error")
		}
	}
}

func second[A any](_ A, err error) error { return err }

type key struct {
	A string        `row:"a,key"`
	N int64         `row:"n,key"`
	B bool          `row:"b,key"`
	C string        `row:"c,key"`
	T time.Time     `row:"t,key"`
	I bson.ObjectID `row:"i,key"`
}

func (k key) compare(o key) int {
	for _, c := range []int{
		strings.Compare(k.A, o.A), int(sign(k.N, o.N)), boolCompare(k.B, o.B), strings.Compare(k.C, o.C),
		int(sign(k.T.UnixMilli(), o.T.UnixMilli())), bytes.Compare(k.I[:], o.I[:]),
	} {
		if c != 0 {
			return c
		}
	}
	return 0
}

func sign(a, b int64) int64 {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

func randomKey(r *rand.Rand) key {
	texts := []string{"", "a", "ab", "b", "\x00", "a\x00", "a\x00\x00", "a\x00\x01", "a\x01", "\xff", "a\xff", "é"}
	ints := []int64{0, 1, -1, math.MaxInt64, math.MinInt64, 255, 256, -256}
	return key{
		A: texts[r.IntN(len(texts))], N: ints[r.IntN(len(ints))], B: r.IntN(2) == 0, C: texts[r.IntN(len(texts))],
		T: time.Unix(ints[r.IntN(3)], r.Int64N(3)*400_000), I: bson.ObjectID{byte(r.IntN(2))},
	}
}

// Equal bytes mean equal keys, and the bytes sort like the keys.
func TestAppendKey(t *testing.T) {
	s, err := row.Of[key]()
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range effort.Values(200_000) {
		a, b := randomKey(r), randomKey(r)
		if r.IntN(2) == 0 { // close to each other
			b.A, b.N, b.B = a.A, a.N, a.B
		}
		ka := s.AppendKey(nil, reflect.ValueOf(&a).Elem())
		kb := s.AppendKey(nil, reflect.ValueOf(&b).Elem())
		if got, want := bytes.Compare(ka, kb), a.compare(b); got != want {
			t.Fatalf("%+v and %+v compare as %d, want %d", a, b, got, want)
		}
	}
}

type sale struct {
	Shop    string          `row:"shop,key"`
	Day     int             `row:"day,key"`
	Orders  int64           `row:"orders,sum"`
	Items   int32           `row:"items,sum"`
	Revenue bson.Decimal128 `row:"revenue,sum"`
}

func dec(t testing.TB, s string) bson.Decimal128 {
	t.Helper()
	d, err := bson.ParseDecimal128(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Fold is what adding up one by one gives.
func TestFold(t *testing.T) {
	s, err := row.Of[sale]()
	if err != nil {
		t.Fatal(err)
	}
	type key struct {
		shop string
		day  int
	}
	type total struct {
		orders, items, count int64
		revenue              *big.Rat
	}
	r := rand.New(rand.NewPCG(3, 4))
	amounts := []string{"0", "0.10", "0.1", "-0.1", "12.50", "1E+3", "1E-6176", "9.999999999999999999999999999999999E+40", "-0E+6111"}
	some := func(n int) (rows []sale) {
		for range n {
			rows = append(rows, sale{
				Shop: string(rune('a' + r.IntN(4))), Day: r.IntN(3), Orders: int64(r.IntN(3)), Items: int32(r.IntN(5) - 2),
				Revenue: dec(t, amounts[r.IntN(len(amounts))]),
			})
		}
		return rows
	}
	for range effort.Values(2000) {
		minus, plus := some(r.IntN(12)), some(r.IntN(12))
		want := map[key]*total{}
		apply := func(rows []sale, sign int64) {
			for _, x := range rows {
				k := key{x.Shop, x.Day}
				if want[k] == nil {
					want[k] = &total{revenue: new(big.Rat)}
				}
				w := want[k]
				w.orders, w.items, w.count = w.orders+sign*x.Orders, w.items+sign*int64(x.Items), w.count+sign
				c, exp, err := x.Revenue.BigInt()
				if err != nil {
					t.Fatal(err)
				}
				w.revenue.Add(w.revenue, new(big.Rat).Mul(rat(c, exp), big.NewRat(sign, 1)))
			}
		}
		apply(minus, -1)
		apply(plus, 1)
		for k, w := range want {
			if w.orders == 0 && w.items == 0 && w.count == 0 && w.revenue.Sign() == 0 {
				delete(want, k)
			}
		}
		got, err := row.Fold(s, minus, plus)
		if err != nil {
			t.Fatal(err)
		}
		if got.Len() != len(want) {
			t.Fatalf("%d rows, want %d", got.Len(), len(want))
		}
		var last key
		for i := range got.Len() {
			x := got.Row(i).Interface().(sale)
			k := key{x.Shop, x.Day}
			if i > 0 && (k.shop < last.shop || k.shop == last.shop && k.day <= last.day) {
				t.Fatalf("%v after %v", k, last)
			}
			last = k
			w := want[k]
			if got.Int(i, 0) != w.orders || got.Int(i, 1) != w.items || got.Count(i) != w.count {
				t.Fatalf("%v: %d %d %d, want %+v", k, got.Int(i, 0), got.Int(i, 1), got.Count(i), w)
			}
			if rat(got.Decimal(i, 2)).Cmp(w.revenue) != 0 {
				t.Fatalf("%v: revenue %v, want %v", k, rat(got.Decimal(i, 2)), w.revenue)
			}
		}
	}
}

func rat(c *big.Int, exp int) *big.Rat {
	p := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(exp, -exp))), nil)
	if exp < 0 {
		return new(big.Rat).SetFrac(c, p)
	}
	return new(big.Rat).SetInt(new(big.Int).Mul(c, p))
}

type count struct {
	Status status `row:"status,key"`
	N      int64  `row:"n,sum"`
}

func TestFoldOverflow(t *testing.T) {
	s, err := row.Of[count]()
	if err != nil {
		t.Fatal(err)
	}
	const most, least = math.MaxInt64, math.MinInt64
	for _, c := range []struct {
		minus, plus []count
		want        int64
		overflows   bool
	}{
		{plus: []count{{"a", most}, {"a", 1}}, overflows: true},
		{plus: []count{{"a", least}, {"a", -1}}, overflows: true},
		{minus: []count{{"a", least}}, overflows: true},
		{plus: []count{{"a", most}, {"a", 1}, {"a", -1}}, want: most}, // only in between
		{minus: []count{{"a", least}}, plus: []count{{"a", -1}}, want: most},
		{minus: []count{{"a", most}}, plus: []count{{"a", -1}}, want: least},
		{minus: []count{{"a", -5}}, plus: []count{{"a", -7}}, want: -2},
	} {
		d, err := row.Fold(s, c.minus, c.plus)
		if (err != nil) != c.overflows {
			t.Fatalf("%+v: error %v", c, err)
		}
		if err != nil {
			if !strings.Contains(err.Error(), `column "n"`) {
				t.Errorf("the error does not name the column: %v", err)
			}
			continue
		}
		if got := d.Int(0, 0); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestFoldRefusesWhatHasNoSum(t *testing.T) {
	s, err := row.Of[sale]()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"NaN", "Infinity", "-Infinity"} {
		_, err := row.Fold(s, nil, []sale{{Revenue: dec(t, v)}})
		if err == nil || !strings.Contains(err.Error(), `column "revenue": `+v) {
			t.Errorf("%s: error %v", v, err)
		}
	}
}

// Settle keeps the last put of each key, and removals of keys that are not put.
func TestSettle(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range effort.Values(5000) {
		remove, put := make([]string, r.IntN(8)), make([]string, r.IntN(8))
		last := map[string]int{}
		for i := range remove {
			remove[i] = string(rune('a' + r.IntN(5)))
		}
		for i := range put {
			put[i] = string(rune('a' + r.IntN(5)))
			last[put[i]] = i
		}
		removed, kept := row.Settle(len(remove), len(put), func(dst []byte, isPut bool, i int) []byte {
			if isPut {
				return append(dst, put[i]...)
			}
			return append(dst, remove[i]...)
		})
		var wantRemoved, wantKept []int
		for i, k := range remove {
			if _, ok := last[k]; !ok {
				wantRemoved = append(wantRemoved, i)
			}
		}
		for i, k := range put {
			if last[k] == i {
				wantKept = append(wantKept, i)
			}
		}
		slices.SortStableFunc(wantRemoved, func(a, b int) int { return strings.Compare(remove[a], remove[b]) })
		slices.SortStableFunc(wantKept, func(a, b int) int { return strings.Compare(put[a], put[b]) })
		if !slices.Equal(removed, wantRemoved) || !slices.Equal(kept, wantKept) {
			t.Fatalf("remove %v put %v: removed %v kept %v", remove, put, removed, kept)
		}
	}
}

func TestJSON(t *testing.T) {
	type doc struct {
		V any `row:"v,json"`
	}
	s, err := row.Of[doc]()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		v                any
		want             string
		nul, fails, null bool
	}{
		{v: map[string]any{"a": []int{1}}, want: `{"a":[1]}`},
		{v: "\ufffd", want: "\"\ufffd\""},
		{v: "a\x00b", want: `"a\u0000b"`, nul: true},
		{v: map[string]int{"a\x00": 1}, want: `{"a\u0000":1}`, nul: true},
		{v: `a\u0000b`, want: `"a\\u0000b"`},
		{v: "\\\x00", want: `"\\\u0000"`, nul: true},
		{v: "a\xff", fails: true},
		{v: math.NaN(), want: `{"$numberDouble":"NaN"}`},
		{v: []float64{math.NaN()}, fails: true}, // a Go type of the user's own
		{v: nil, null: true},
	} {
		d := doc{c.v}
		v, ok := s.Fields[0].Value(reflect.ValueOf(&d).Elem())
		if !ok || c.null {
			if ok == c.null {
				t.Errorf("%v: null %v", c.v, !ok)
			}
			continue
		}
		b, err := row.JSONOf(v)
		if (err != nil) != c.fails {
			t.Errorf("%q: error %v", c.v, err)
		}
		if err == nil && (string(b) != c.want || row.HasEscape(b, "0000") != c.nul) {
			t.Errorf("%q: %s, NUL %v", c.v, b, row.HasEscape(b, "0000"))
		}
	}
}

// BenchmarkFold reports the time per contribution.
func BenchmarkFold(b *testing.B) {
	for _, groups := range []int{10, 5000} {
		b.Run(fmt.Sprintf("int/groups=%d", groups), func(b *testing.B) {
			s, _ := row.Of[count]()
			minus, plus := make([]count, 2500), make([]count, 2500)
			for i := range minus {
				minus[i] = count{status(fmt.Sprintf("status-%d", i%groups)), 1}
				plus[i] = count{status(fmt.Sprintf("status-%d", (i+2500)%groups)), 1}
			}
			benchmark(b, s, minus, plus)
		})
		b.Run(fmt.Sprintf("decimal/groups=%d", groups), func(b *testing.B) {
			s, _ := row.Of[sale]()
			minus, plus := make([]sale, 2500), make([]sale, 2500)
			for i := range minus {
				minus[i] = sale{"shop", i % groups, 1, 2, dec(b, "12.50")}
				plus[i] = sale{"shop", (i + 2500) % groups, 1, 3, dec(b, "7.5")}
			}
			benchmark(b, s, minus, plus)
		})
	}
}

func benchmark[R any](b *testing.B, s *row.Schema, minus, plus []R) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := row.Fold(s, minus, plus); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(minus)+len(plus)), "ns/contribution")
}
