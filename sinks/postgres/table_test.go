package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

type count struct {
	Status string `row:"status,key"`
	N      int64  `row:"n,sum"`
}

var counts = postgres.Table[count]{Name: "counts"}

func add[R any](table postgres.Table[R], minus, plus []R) func(context.Context, *postgres.Tx) error {
	return func(ctx context.Context, tx *postgres.Tx) error { return table.Add(ctx, tx, minus, plus) }
}

func put[R any](table postgres.Table[R], remove, rows []projector.Row[R]) func(context.Context, *postgres.Tx) error {
	return func(ctx context.Context, tx *postgres.Tx) error { return table.Put(ctx, tx, remove, rows) }
}

// owned is a row of the document whose _id is the string owner.
func owned[R any](owner string, r R) projector.Row[R] {
	return projector.Row[R]{Owner: id(owner), Row: &r}
}

func id(s string) bson.RawValue {
	typ, b, err := bson.MarshalValue(s)
	if err != nil {
		panic(err)
	}
	return bson.RawValue{Type: typ, Value: b}
}

func TestAdd(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	const rows = `select status, n, contributions from model.counts order by 1`
	for _, step := range []struct {
		minus, plus []count
		want        string
	}{
		{nil, []count{{"open", 1}, {"open", 2}, {"done", 1}}, "done 1 1\nopen 3 2"},
		{[]count{{"open", 1}}, []count{{"done", 1}}, "done 2 2\nopen 2 1"},
		{[]count{{"open", 2}}, []count{{"open", 2}}, "done 2 2\nopen 2 1"},
		{[]count{{"open", 2}}, []count{{"open", 7}}, "done 2 2\nopen 7 1"},
		{[]count{{"open", 7}}, nil, "done 2 2"},
		{nil, []count{{"open", 0}}, "done 2 2\nopen 0 1"},
		{[]count{{"open", 0}, {"done", 1}, {"done", 1}}, nil, ""},
		{nil, nil, ""},
	} {
		var err error
		cp, err = commit(t, d.sink, cp, add(counts, step.minus, step.plus))
		must(t, err)
		equal(t, "rows", d.rows(t, rows), step.want)
	}
}

func TestCheck(t *testing.T) {
	type keyed struct {
		K string `row:"k,key"`
		V string `row:"v"`
	}
	type plain struct {
		V string `row:"v"`
	}
	type mixed struct {
		K string `row:"k,key"`
		N int64  `row:"n,sum"`
		V string `row:"v"`
	}
	type floats struct {
		N float64 `row:"n,sum"`
	}
	type total struct {
		N int64 `row:"n,sum"`
	}
	for _, c := range []struct {
		target interface{ Check(projector.Form) error }
		form   projector.Form
		says   []string
	}{
		{counts, projector.FormRollup, nil},
		{counts, projector.FormUpsert, []string{"only a Rollup adds up"}},
		{counts, projector.FormMirror, []string{"only a Rollup adds up", "drop `key`"}},
		{counts, projector.FormOn, []string{`form "on" can't write`}},
		{postgres.Table[keyed]{Name: "t"}, projector.FormRollup, []string{"a Rollup needs a sum", "tag field V"}},
		{postgres.Table[keyed]{Name: "t"}, projector.FormUpsert, nil},
		{postgres.Table[keyed]{Name: "t"}, projector.FormMirror, []string{"rows of a Mirror are keyed by the document's _id; drop `key`, or use an Upsert"}},
		{postgres.Table[plain]{Name: "t"}, projector.FormRollup, []string{"a Rollup needs a key", "a Rollup needs a sum", "tag field V"}},
		{postgres.Table[plain]{Name: "t"}, projector.FormUpsert, []string{"an Upsert needs a key"}},
		{postgres.Table[plain]{Name: "t"}, projector.FormMirror, nil},
		{postgres.Table[mixed]{Name: "t"}, projector.FormRollup, []string{"a Rollup has keys and sums only"}},
		{postgres.Table[floats]{Name: "Bad Name"}, projector.FormRollup, []string{"sums of floats depend on their order", `bad table name "Bad Name"`}},
		{postgres.Table[total]{Name: "t"}, projector.FormRollup, []string{"a Rollup needs a key"}},
		{postgres.Table[int]{}, projector.FormMirror, []string{"int is no struct", `bad table name ""`}},
	} {
		err := c.target.Check(c.form)
		if len(c.says) == 0 {
			must(t, err)
			continue
		}
		wantError(t, err, c.says...)
	}
}

// The wrong call on a table is an error, not a statement.
func TestWrongForm(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, orders.Create)
	_, err := commit(t, d.sink, cp, put(counts, nil, []projector.Row[count]{owned("a", count{"open", 1})}))
	wantError(t, err, "rows can only be added")
	_, err = commit(t, d.sink, cp, add(orders, nil, []order{{}}))
	wantError(t, err, "rows can only be put")
}

func decimal(t testing.TB, s string) bson.Decimal128 {
	t.Helper()
	v, err := bson.ParseDecimal128(s)
	must(t, err)
	return v
}

type sale struct {
	Shop    string          `row:"shop,key"`
	Day     time.Time       `row:"day,key"`
	Orders  int64           `row:"orders,sum"`
	Revenue bson.Decimal128 `row:"revenue,sum"`
}

var sales = postgres.Table[sale]{Name: "sales"}

// Decimal sums are exact, and come back to exactly nothing.
func TestDecimalSums(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, sales.Create)
	day := time.Date(2026, 11, 29, 1, 2, 3, 4_999_999, time.FixedZone("", 3600))
	var rows []sale
	for _, amount := range []string{"0.1", "0.2", "-0.3000", "1E+30", "1E-30", "-9.999999999999999999999999999999999E+6144", "1E-6176", "12.50", "0E+6000"} {
		rows = append(rows, sale{"a", day, 1, decimal(t, amount)})
	}
	for _, r := range rows {
		var err error
		cp, err = commit(t, d.sink, cp, add(sales, nil, []sale{r}))
		must(t, err)
	}
	equal(t, "day", d.text(t, "select day at time zone 'UTC' from model.sales"), "2026-11-29 00:02:03.004")
	cp, err := commit(t, d.sink, cp, add(sales, rows[:5], nil))
	must(t, err)
	equal(t, "revenue", d.text(t, "select revenue = '-9.999999999999999999999999999999999E+6144'::numeric + '1E-6176' + 12.5 from model.sales"), "true")
	for _, r := range rows[5:] {
		cp, err = commit(t, d.sink, cp, add(sales, []sale{r}, nil))
		must(t, err)
	}
	equal(t, "rows", d.rows(t, "select * from model.sales"), "")
	for _, v := range []string{"NaN", "Infinity"} {
		_, err = commit(t, d.sink, cp, add(sales, nil, []sale{{Revenue: decimal(t, v)}}))
		wantError(t, err, `column "revenue"`, v)
		wantClass(t, d.sink, err, projector.Poison)
	}
}

// A model that disagrees with the source never goes on in silence.
func TestDrift(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, []count{{"open", 5}, {"done", 1}}))
	before := d.rows(t, "select * from model.counts order by 1")
	for name, f := range map[string]handler{
		"below nothing":       add(counts, []count{{"open", 3}, {"open", 2}}, nil),
		"a sum is left":       add(counts, []count{{"open", 4}}, nil),
		"no such row":         add(counts, []count{{"new", 1}}, nil),
		"no such row to move": add(counts, []count{{"new", 1}}, []count{{"new", 2}}),
	} {
		_, err := commit(t, d.sink, cp, f, add(counts, nil, one))
		wantError(t, err, `table "counts" disagrees with the source`, "rebuild")
		var drift *postgres.DriftError
		if !errors.As(err, &drift) || drift.Table != "counts" {
			t.Errorf("%s: %v", name, err)
		}
		wantClass(t, d.sink, err, projector.Fatal)
		equal(t, name, d.rows(t, "select * from model.counts order by 1"), before)
	}
	// Sums that exceed a bigint are the batch's fault.
	_, err := commit(t, d.sink, cp, add(counts, nil, []count{{"open", math.MaxInt64}}))
	wantError(t, err, "22003")
	wantClass(t, d.sink, err, projector.Poison)
	_, err = commit(t, d.sink, cp, add(counts, nil, []count{{"open", math.MaxInt64}, {"open", 1}}))
	wantError(t, err, `column "n": the sum exceeds an int64`)
	wantClass(t, d.sink, err, projector.Poison)
}

type status string

// everything has a field of every kind.
type everything struct {
	K     string           `row:"k,key"`
	B     bool             `row:"b,key"`
	I     int16            `row:"i,key"`
	T     time.Time        `row:"t,key"`
	ID    bson.ObjectID    `row:"id,key"`
	Named status           `row:"named"`
	U     uint32           `row:"u"`
	F     float64          `row:"f"`
	Bytes []byte           `row:"bytes"`
	D     bson.Decimal128  `row:"d"`
	J     map[string]any   `row:"j,json"`
	PS    *string          `row:"ps"`
	PB    *bool            `row:"pb"`
	PI    *int64           `row:"pi"`
	PF    *float32         `row:"pf"`
	PT    *time.Time       `row:"pt"`
	PBy   *[]byte          `row:"pby"`
	PID   *bson.ObjectID   `row:"pid"`
	PD    *bson.Decimal128 `row:"pd"`
	User  string           `row:"user"` // a reserved word of SQL
	Skip  func()           `row:"-"`
}

func TestTypes(t *testing.T) {
	d := newDatabase(t)
	table := postgres.Table[everything]{Name: "order"} // a reserved word as well
	cp := d.acquired(t, table.Create)
	oid := bson.ObjectID{1, 2, 3}
	at := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	s, b, i, f, by, dec := "it's \"é\"\\{},NULL", true, int64(math.MinInt64), float32(1.5), []byte{0, 1}, decimal(t, "NaN")
	_, err := commit(t, d.sink, cp, put(table, nil, []projector.Row[everything]{
		owned("full", everything{
			"k", true, -7, at, oid, "open", math.MaxUint32, math.Inf(1),
			[]byte{0xff, 0},
			decimal(t, "-1.50E+3"),
			map[string]any{"a": []any{1, "<é>", nil}},
			&s, &b, &i, &f, &at, &by, &oid, &dec, "u", nil,
		}),
		owned("zero", everything{}),
		owned("edge", everything{
			K: "edge", T: time.Date(294276, 12, 31, 23, 59, 59, 0, time.UTC), F: math.NaN(), D: decimal(t, "Infinity"),
			PD: ptr(decimal(t, "-Infinity")), PT: ptr(time.Date(-4712, 1, 1, 0, 0, 0, 0, time.UTC)),
		}),
	}))
	must(t, err)
	equal(t, "full", d.text(t, `select concat_ws(' | ', b, i, t at time zone 'UTC', id, named, u, f, bytes, d, j, ps, pb, pi, pf, pt at time zone 'UTC', pby, pid, pd, "user", _id) from model."order" where k = 'k'`),
		`t | -7 | 2026-11-29 12:00:00 | 010203000000000000000000 | open | 4294967295 | Infinity | \xff00 | -1500 | {"a": [1, "<é>", null]} | it's "é"\{},NULL | t | -9223372036854775808 | 1.5 | 2026-11-29 12:00:00 | \x0001 | 010203000000000000000000 | NaN | u | full`)
	equal(t, "zero", d.text(t, `select concat_ws(' | ', k, b, i, t at time zone 'UTC', id, named, u, f, bytes, d, j, ps, pb, pi, pf, pt, pby, pid, pd, "user", _id) from model."order" where k = ''`),
		` | f | 0 | 0001-01-01 00:00:00 | 000000000000000000000000 |  | 0 | 0 | \x | 0 |  | zero`)
	equal(t, "edge", d.text(t, `select concat_ws(' | ', t at time zone 'UTC', f, d, pd, pt at time zone 'UTC') from model."order" where k = 'edge'`),
		"294276-12-31 23:59:59 | NaN | Infinity | -Infinity | 4713-01-01 00:00:00 BC")
}

func ptr[T any](v T) *T { return &v }

// What PostgreSQL can't hold is refused for its document; the error names the column
// and the document, and neighbours are not touched by it.
func TestUnstorable(t *testing.T) {
	type doc struct {
		S string     `row:"s"`
		P *string    `row:"p"`
		J any        `row:"j,json"`
		T *time.Time `row:"t"`
	}
	table := postgres.Table[doc]{Name: "docs"}
	d := newDatabase(t)
	cp := d.acquired(t, table.Create)
	for _, c := range []struct {
		doc  doc
		says []string
	}{
		{doc{S: "a\x00b"}, []string{`column "s"`, "NUL"}},
		{doc{P: ptr("\x00")}, []string{`column "p"`, "NUL"}},
		{doc{S: "a\xffb"}, []string{`column "s"`, "UTF-8"}},
		{doc{J: map[string]any{"deep": []any{"a\x00"}}}, []string{`column "j"`, "NUL"}},
		{doc{J: map[string]any{"key\x00": 1}}, []string{`column "j"`, "NUL"}},
		{doc{J: "a\xff"}, []string{`column "j"`, "UTF-8"}},
		{doc{J: []float64{math.NaN()}}, []string{`column "j"`, "NaN"}},
		{doc{T: ptr(time.Date(294277, 1, 1, 0, 0, 0, 0, time.UTC))}, []string{`column "t"`, "range"}},
		{doc{T: ptr(time.Date(-4714, 1, 1, 0, 0, 0, 0, time.UTC))}, []string{`column "t"`, "range"}},
		{doc{T: ptr(time.Date(300_000_000, 1, 1, 0, 0, 0, 0, time.UTC))}, []string{`column "t"`, "range"}},
	} {
		_, err := commit(t, d.sink, cp, put(table, nil, []projector.Row[doc]{owned("good", doc{}), owned("bad-one", c.doc)}))
		wantError(t, err, append(c.says, `table "docs"`, "document bad-one")...)
		wantClass(t, d.sink, err, projector.Poison)
	}
	_, err := commit(t, d.sink, cp, add(counts, nil, []count{{"a\x00", 1}}))
	wantError(t, err, `table "counts", column "status"`, "NUL")
	_, err = commit(t, d.sink, cp, put(table, nil, []projector.Row[doc]{owned("good", doc{S: "\ufffd", J: `\u0000`})}))
	must(t, err)
	equal(t, "rows", d.rows(t, "select s, j, _id from model.docs"), "\ufffd \\u0000 good")
}

type seat struct {
	Hall string `row:"hall,key"`
	N    int64  `row:"n,key"`
	Name string `row:"name"`
}

var seats = postgres.Table[seat]{Name: "seats"}

func TestPutKeyed(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, seats.Create)
	type rows = []projector.Row[seat]
	all := projector.Row[seat]{Owner: id("ann")}
	for _, step := range []struct {
		what        string
		remove, put rows
		want        string
	}{
		{"new", nil, rows{owned("ann", seat{"a", 2, "Ann"}), owned("ann", seat{"a", 1, "Ann"}), owned("bob", seat{"b", 1, "Bob"})}, "a 1 Ann ann\na 2 Ann ann\nb 1 Bob bob"},
		{"twice: the later wins", nil, rows{owned("bob", seat{"b", 1, "Robert"}), owned("bob", seat{"b", 1, "Bobby"})}, "a 1 Ann ann\na 2 Ann ann\nb 1 Bobby bob"},
		{"removed and put", rows{owned("ann", seat{"a", 1, ""})}, rows{owned("ann", seat{"a", 1, "Anna"})}, "a 1 Anna ann\na 2 Ann ann\nb 1 Bobby bob"},
		{"handed over in one batch", rows{owned("ann", seat{"a", 1, ""})}, rows{owned("bob", seat{"a", 1, "Bob"})}, "a 1 Bob bob\na 2 Ann ann\nb 1 Bobby bob"},
		{"no longer the owner", rows{owned("ann", seat{"a", 1, ""})}, nil, "a 1 Bob bob\na 2 Ann ann\nb 1 Bobby bob"},
		{"two who remove, one who owns", rows{owned("ann", seat{"b", 1, ""}), owned("bob", seat{"b", 1, ""})}, nil, "a 1 Bob bob\na 2 Ann ann"},
		{"moved", rows{owned("ann", seat{"a", 2, ""})}, rows{owned("ann", seat{"a", 3, "Ann"})}, "a 1 Bob bob\na 3 Ann ann"},
		{"all of one", rows{all}, rows{owned("ann", seat{"c", 1, "Ann"})}, "a 1 Bob bob\nc 1 Ann ann"},
		{"all of one and single ones", rows{owned("bob", seat{"a", 1, ""}), all}, nil, ""},
		{"nothing", nil, nil, ""},
	} {
		var err error
		cp, err = commit(t, d.sink, cp, put(seats, step.remove, step.put))
		must(t, err)
		equal(t, step.what, d.rows(t, "select hall, n, name, _id from model.seats order by 1, 2"), step.want)
	}
	cp, err := commit(t, d.sink, cp, put(seats, nil, rows{owned("ann", seat{"a", 1, ""})}), seats.Clear)
	must(t, err)
	equal(t, "cleared", d.rows(t, "select * from model.seats"), "")
	_, err = commit(t, d.sink, cp, seats.Create)
	must(t, err)
}

func TestPutMirrored(t *testing.T) {
	type person struct {
		Name *string `row:"name"`
	}
	table := postgres.Table[person]{Name: "people"}
	d := newDatabase(t)
	cp := d.acquired(t, table.Create)
	type rows = []projector.Row[person]
	ann, bob := owned("ann", person{ptr("Ann")}), owned("bob", person{})
	for _, step := range []struct {
		remove, put rows
		want        string
	}{
		{nil, rows{bob, owned("ann", person{ptr("?")}), ann}, "ann Ann\nbob <nil>"},
		{rows{{Owner: id("ann")}}, rows{owned("bob", person{ptr("Bob")})}, "bob Bob"},
		{rows{{Owner: id("ann")}, {Owner: id("bob")}}, rows{ann}, "ann Ann"},
		{rows{ann}, nil, ""},
	} {
		var err error
		cp, err = commit(t, d.sink, cp, put(table, step.remove, step.put))
		must(t, err)
		lines := d.rows(t, "select _id, coalesce(name, '<nil>') from model.people order by 1")
		equal(t, "rows", lines, step.want)
	}
}

// A table that is there must fit the row type.
func TestCreateExisting(t *testing.T) {
	for _, c := range []struct{ create, says string }{
		{`create table seats (hall text, n bigint, name text not null, _id text not null, primary key (hall, n))`, ""},
		{`create table seats (_id text, note text, at timestamptz not null default now(), upper text generated always as (upper(name)) stored, hall text, n bigint, name text, primary key (hall, n))`, ""},
		{`create table seats (hall text, n int, name text, _id text, primary key (hall, n))`, `column "n" is integer, not bigint`},
		{`create table seats (hall text, n bigint, _id text, primary key (hall, n))`, `column "name" is missing`},
		{`create table seats (hall text, n bigint, name text, _id text, extra text not null, primary key (hall, n))`, `column "extra" is not in the row type`},
		{`create table seats (hall text, n bigint, name text, _id text)`, `the primary key is not ("hall", "n")`},
		{`create table seats (hall text, n bigint, name text, _id text, primary key (n, hall))`, `the primary key is not ("hall", "n")`},
		{`create table seats (hall text, n bigint, name text, _id text, primary key (hall, n, name))`, `the primary key has 3 columns, not 2`},
	} {
		d := newDatabase(t)
		cp := d.acquired(t, run(c.create))
		cp, err := commit(t, d.sink, cp, seats.Create)
		if c.says != "" {
			wantError(t, err, "table model.seats does not fit row type", c.says)
			wantClass(t, d.sink, err, projector.Fatal)
			continue
		}
		must(t, err)
		_, err = commit(t, d.sink, cp, put(seats, nil, []projector.Row[seat]{owned("a", seat{"a", 1, "x"})}))
		must(t, err)
	}
}

// Random changes leave what a plain computation says.
func TestAddAgainstOracle(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	r := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
	docs := make([]*count, 40)
	for range 60 {
		var minus, plus []count
		for range r.IntN(20) {
			i := r.IntN(len(docs))
			if docs[i] != nil {
				minus = append(minus, *docs[i])
				docs[i] = nil
			}
			if r.IntN(3) > 0 {
				docs[i] = &count{fmt.Sprint("s", r.IntN(5)), int64(r.IntN(3) - 1)}
				plus = append(plus, *docs[i])
			}
		}
		var err error
		cp, err = commit(t, d.sink, cp, add(counts, minus, plus))
		must(t, err)
		sums := map[string][2]int64{}
		for _, x := range docs {
			if x != nil {
				sums[x.Status] = [2]int64{sums[x.Status][0] + x.N, sums[x.Status][1] + 1}
			}
		}
		var want []string
		for k, v := range sums {
			want = append(want, fmt.Sprint(k, v))
		}
		slices.Sort(want)
		equal(t, "rows", d.rows(t, "select status || '[' || n || ' ' || contributions || ']' from model.counts order by 1"), strings.Join(want, "\n"))
	}
}
