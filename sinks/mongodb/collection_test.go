package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

type count struct {
	Status string `row:"status,key"`
	N      int64  `row:"n,sum"`
}

var counts = mongodb.Collection[count]{Name: "counts"}

func TestAddFoldsAndRemovesEmptiedRows(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	step := func(minus, plus []count, want string) {
		t.Helper()
		var err error
		cp, err = commit(t, d.sink, cp, add(counts, minus, plus))
		must(t, err)
		equal(t, "rows", d.rows(t, "counts"), want)
	}
	step(nil, []count{{"open", 1}, {"open", 1}, {"closed", 1}},
		`{"_id":{"status":"closed"},"contributions":1,"n":1}`+"\n"+`{"_id":{"status":"open"},"contributions":2,"n":2}`)
	// A delta of nothing is dropped; the row that is emptied goes.
	step([]count{{"closed", 1}, {"open", 1}}, []count{{"open", 1}},
		`{"_id":{"status":"open"},"contributions":2,"n":2}`)
	// It exists while it has a contribution, whatever the sum.
	step([]count{{"open", 1}}, []count{{"closed", 0}},
		`{"_id":{"status":"closed"},"contributions":1,"n":0}`+"\n"+`{"_id":{"status":"open"},"contributions":1,"n":1}`)
	// The sum alone may change.
	step([]count{{"closed", 0}}, []count{{"closed", -5}},
		`{"_id":{"status":"closed"},"contributions":1,"n":-5}`+"\n"+`{"_id":{"status":"open"},"contributions":1,"n":1}`)
	step([]count{{"closed", -5}, {"open", 1}}, nil, ``)
	step(nil, []count{{"closed", 3}}, `{"_id":{"status":"closed"},"contributions":1,"n":3}`)
}

func TestDriftIsAnError(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, []count{{"open", 1}, {"open", 2}}))
	before := d.rows(t, "counts")
	for name, minus := range map[string][]count{
		"unknown row":          {{"closed", 0}},
		"more than there are":  {{"open", 1}, {"open", 1}, {"open", 1}},
		"sum left":             {{"open", 1}, {"open", 1}},
		"sum of an empty row":  {{"closed", 7}},
		"beside good ones too": {{"open", 1}, {"closed", 1}},
	} {
		var plus []count
		if strings.HasPrefix(name, "sum of") {
			plus = []count{{"closed", 8}}
		}
		_, err := commit(t, d.sink, cp, add(counts, minus, plus))
		drift, ok := errors.AsType[*mongodb.DriftError](err)
		if !ok {
			t.Fatalf("%s: no DriftError: %v", name, err)
		}
		equal(t, "collection", drift.Collection, "model.counts")
		wantError(t, err, "rebuild the model", `{"status":`)
		wantClass(t, d.sink, err, projector.Fatal)
		equal(t, name, d.rows(t, "counts"), before)
	}
}

type sale struct {
	Shop    string          `row:"shop,key"`
	Day     time.Time       `row:"day,key"`
	Revenue bson.Decimal128 `row:"revenue,sum"`
}

var sales = mongodb.Collection[sale]{Name: "sales"}

func TestDecimalSums(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, sales.Create)
	day := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	of := func(amounts ...string) (rows []sale) {
		for _, a := range amounts {
			v, err := bson.ParseDecimal128(a)
			must(t, err)
			rows = append(rows, sale{"a", day, v})
		}
		return rows
	}
	step := func(minus, plus []sale, want string) {
		t.Helper()
		var err error
		cp, err = commit(t, d.sink, cp, add(sales, minus, plus))
		must(t, err)
		equal(t, "rows", d.rows(t, "sales"), want)
	}
	row := func(sum string, n int) string {
		return fmt.Sprintf(`{"_id":{"shop":"a","day":{"$date":"2026-01-02T00:00:00Z"}},"contributions":%d,"revenue":{"$numberDecimal":%q}}`, n, sum)
	}
	step(nil, of("0.10", "0.2"), row("0.30", 2))
	step(nil, of("1E+3", "-0.30"), row("1000.00", 4))
	// 34 digits are the most that there are.
	step(nil, of("1234567890123456789012345678901"), row("1234567890123456789012345679901.00", 5))
	for _, one := range []string{"0.0001", "1E+40"} {
		_, err := commit(t, d.sink, cp, add(sales, nil, of(one)))
		wantError(t, err, "34 digits", `"revenue"`)
		wantClass(t, d.sink, err, projector.Poison)
	}
	_, err := commit(t, d.sink, cp, add(sales, nil, of("1E+40", "1")))
	wantError(t, err, "34 digits")
	_, err = commit(t, d.sink, cp, add(sales, nil, of("NaN")))
	wantError(t, err, "can't be added up")
	step(of("1234567890123456789012345678901"), nil, row("1000.00", 4))
	// Back to exactly nothing, whatever the exponents were.
	step(of("0.1", "0.200", "1000", "-0.3"), nil, ``)
}

func TestSumsThatOverflow(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, add(counts, nil, []count{{"open", math.MaxInt64}}))
	_, err := commit(t, d.sink, cp, add(counts, nil, []count{{"open", 1}}))
	wantError(t, err, `collection "counts"`)
	wantClass(t, d.sink, err, projector.Poison)
	_, err = commit(t, d.sink, cp, add(counts, nil, []count{{"x", math.MaxInt64}, {"x", 1}}))
	wantError(t, err, "exceeds an int64")
	equal(t, "rows", d.rows(t, "counts"), `{"_id":{"status":"open"},"contributions":1,"n":9223372036854775807}`)
}

type line struct {
	Sku   string `row:"sku,key"`
	Price int64  `row:"price"`
}

var lines = mongodb.Collection[line]{Name: "lines"}

func TestPutHandsRowsFromOwnerToOwner(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, lines.Create)
	row := func(owner any, sku string, price int64) projector.Row[line] {
		return projector.Row[line]{Owner: value(t, owner), Row: &line{sku, price}}
	}
	type rows = []projector.Row[line]
	step := func(what string, remove, puts rows, want ...string) {
		t.Helper()
		var err error
		cp, err = commit(t, d.sink, cp, put(lines, remove, puts))
		must(t, err)
		equal(t, what, d.rows(t, "lines"), strings.Join(want, "\n"))
	}
	doc := func(owner, sku string, price int) string {
		return fmt.Sprintf(`{"_id":{"sku":%q},"price":%d,"_owner":%s}`, sku, price, owner)
	}
	step("new", nil, rows{row(1, "a", 10), row(1, "b", 20), row("x", "c", 30)},
		doc("1", "a", 10), doc("1", "b", 20), doc(`"x"`, "c", 30))
	step("the later of two", nil, rows{row(1, "a", 11), row(1, "a", 12)}, doc("1", "a", 12), doc("1", "b", 20), doc(`"x"`, "c", 30))
	step("handed over in one batch", rows{row(1, "a", 12)}, rows{row("x", "a", 13)}, doc(`"x"`, "a", 13), doc("1", "b", 20), doc(`"x"`, "c", 30))
	step("not the old owner's to remove", rows{row(1, "a", 12)}, nil, doc(`"x"`, "a", 13), doc("1", "b", 20), doc(`"x"`, "c", 30))
	step("all of an owner's, one of them put again", rows{{Owner: value(t, "x")}}, rows{row("x", "c", 31)}, doc("1", "b", 20), doc(`"x"`, "c", 31))
	step("an owner is known by value", rows{row(1.0, "b", 20)}, nil, doc(`"x"`, "c", 31))
	id := bson.D{{Key: "$a", Value: 1}} // as no server would store it, but nobody can be hurt by asking
	step("an owner like an operator", rows{row(id, "c", 0)}, rows{row(id, "d", 1)}, doc(`"x"`, "c", 31), doc(`{"$a":1}`, "d", 1))
}

type customer struct {
	Name    string          `row:"name"`
	Active  bool            `row:"active"`
	Age     int32           `row:"age"`
	Score   float64         `row:"score"`
	Joined  time.Time       `row:"joined"`
	Photo   []byte          `row:"photo"`
	Ref     bson.ObjectID   `row:"ref"`
	Balance bson.Decimal128 `row:"balance"`
	Left    *time.Time      `row:"left_at"`
	Extra   any             `row:"extra,json"`
}

var customers = mongodb.Collection[customer]{Name: "customers"}

func TestMirrorKeepsNativeTypes(t *testing.T) {
	d := newDatabase(t)
	left := time.Date(2026, 3, 4, 5, 6, 7, 891_999_999, time.FixedZone("", 3600))
	ref, err := bson.ObjectIDFromHex("65f1c0ffee65f1c0ffee65f1")
	must(t, err)
	balance, err := bson.ParseDecimal128("12.30")
	must(t, err)
	full := customer{
		"Ada\x00", true, -7, 1.5, left,
		[]byte{1, 2},
		ref, balance, &left,
		map[string]any{"a": []any{1, 1.5, "x", nil, true}, "b": map[string]any{"$c.d": uint64(math.MaxUint64)}},
	}
	date := `{"$date":"2026-03-04T04:06:07.891Z"}`
	fullText := `"name":"Ada\u0000","active":true,"age":-7,"score":1.5,"joined":` + date + `,"photo":{"$binary":{"base64":"AQI=","subType":"00"}},` +
		`"ref":{"$oid":"65f1c0ffee65f1c0ffee65f1"},"balance":{"$numberDecimal":"12.30"},"left_at":` + date +
		`,"extra":{"a":[1,1.5,"x",null,true],"b":{"$c.d":{"$numberDecimal":"18446744073709551615"}}}}`
	emptyText := `"name":"","active":false,"age":0,"score":0.0,"joined":{"$date":{"$numberLong":"-62135596800000"}},"photo":{"$binary":{"base64":"","subType":"00"}},` +
		`"ref":{"$oid":"000000000000000000000000"},"balance":{"$numberDecimal":"0E-6176"},"left_at":null,"extra":null}`

	ids := []any{1, "one", ref, bson.D{{Key: "x", Value: 1}}, nil, left}
	var rows, gone []projector.Row[customer]
	for _, id := range ids {
		rows = append(rows, projector.Row[customer]{Owner: value(t, id), Row: &full})
		gone = append(gone, projector.Row[customer]{Owner: value(t, id)})
	}
	cp := d.acquired(t, customers.Create, put(customers, nil, rows))
	for i, line := range strings.Split(d.rows(t, "customers"), "\n") {
		if !strings.HasSuffix(line, fullText) {
			t.Errorf("row %d:\n got %s\nwant …%s", i, line, fullText)
		}
	}
	found, err := d.Collection("model.customers").FindOne(t.Context(), bson.D{{Key: "_id", Value: "one"}}).Raw()
	must(t, err)
	equal(t, "type of age", found.Lookup("age").Type, bson.TypeInt64)

	cp, err = commit(t, d.sink, cp, put(customers, gone[1:], []projector.Row[customer]{{Owner: value(t, 1.0), Row: &customer{}}, rows[1]}))
	must(t, err)
	equal(t, "rows", d.rows(t, "customers"), `{"_id":1,`+emptyText+"\n"+`{"_id":"one",`+fullText)
	_, err = commit(t, d.sink, cp, put(customers, gone, nil))
	must(t, err)
	equal(t, "rows", d.rows(t, "customers"), ``)
}

func TestValuesThatCantBeStored(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, customers.Create)
	for says, c := range map[string]customer{
		`field "name": it is not valid UTF-8 (document 1)`: {Name: "\xff"},
		`field "extra": a name in it has a NUL character`:  {Extra: map[string]int{"a\x00": 1}},
		`field "extra": it has a string that is not valid`: {Extra: "\xff"},
		`field "extra": json: unsupported type`:            {Extra: make(chan int)},
		`model.customers`:                                  {Name: strings.Repeat("x", 17<<20)},
	} {
		_, err := commit(t, d.sink, cp, put(customers, nil, []projector.Row[customer]{{Owner: value(t, 1), Row: &c}}))
		if says == "model.customers" {
			says = "put into collection"
		}
		wantError(t, err, says, `collection "customers"`)
		wantClass(t, d.sink, err, projector.Poison)
	}
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		form projector.Form
		m    interface{ Check(projector.Form) error }
		want string // "": fit
	}{
		{projector.FormRollup, counts, ""},
		{projector.FormUpsert, lines, ""},
		{projector.FormMirror, customers, ""},
		{projector.FormRollup, lines, "a Rollup needs a sum"},
		{projector.FormRollup, customers, "a Rollup needs a key"},
		{projector.FormUpsert, customers, "an Upsert needs a key"},
		{projector.FormUpsert, counts, "only a Rollup adds up"},
		{projector.FormMirror, lines, "keyed by the document's _id"},
		{projector.FormOn, lines, "can't write to a collection"},
		{projector.FormRollup, mongodb.Collection[count]{Name: "tm_x"}, "reserved"},
		{projector.FormRollup, mongodb.Collection[count]{Name: "a.b"}, "bad collection name"},
		{projector.FormRollup, mongodb.Collection[int]{Name: "a"}, "is no struct"},
	} {
		err := c.m.Check(c.form)
		if c.want == "" {
			must(t, err)
			continue
		}
		wantError(t, err, c.want)
	}
}

func TestCreate(t *testing.T) {
	t.Run("what is there must be fit and empty", func(t *testing.T) {
		d := newDatabase(t)
		cp, err := acquire(t.Context(), d.sink, "test")
		must(t, err)
		must(t, d.CreateCollection(t.Context(), "model.counts", options.CreateCollection().SetCollation(&options.Collation{Locale: "de"})))
		_, err = commit(t, d.sink, cp, counts.Create)
		wantError(t, err, "collation de", "model.counts")
		wantClass(t, d.sink, err, projector.Fatal)

		must(t, d.Collection("model.counts").Drop(t.Context()))
		must(t, d.CreateView(t.Context(), "model.counts", "x", bson.A{}))
		_, err = commit(t, d.sink, cp, counts.Create)
		wantError(t, err, "it is a view")

		must(t, d.Collection("model.counts").Drop(t.Context()))
		_, err = d.Collection("model.counts").InsertOne(t.Context(), bson.D{})
		must(t, err)
		_, err = commit(t, d.sink, cp, counts.Create)
		wantError(t, err, "has documents")
		wantClass(t, d.sink, err, projector.Fatal)

		_, err = d.Collection("model.counts").DeleteMany(t.Context(), bson.D{})
		must(t, err)
		_, err = commit(t, d.sink, cp, counts.Create, add(counts, nil, []count{{"a", 1}}))
		must(t, err)
	})
	t.Run("in the first commit, with its index", func(t *testing.T) {
		d := newDatabase(t)
		cp, err := acquire(t.Context(), d.sink, "test")
		must(t, err)
		boom := errors.New("boom")
		_, err = commit(t, d.sink, cp, lines.Create, func(context.Context, *mongodb.Tx) error { return boom })
		if !errors.Is(err, boom) {
			t.Fatal(err)
		}
		names, err := d.ListCollectionNames(t.Context(), bson.D{})
		must(t, err)
		equal(t, "collections", fmt.Sprint(names), "[tidemark.checkpoints]")
		cp, err = commit(t, d.sink, cp, lines.Create)
		must(t, err)
		specs, err := d.Collection("model.lines").Indexes().ListSpecifications(t.Context())
		must(t, err)
		equal(t, "indexes", len(specs), 2)
		equal(t, "index", specs[1].Name, "_owner_1")
		// Later on it may be there, and be filled.
		cp, err = commit(t, d.sink, cp, put(lines, nil, []projector.Row[line]{{Owner: value(t, 1), Row: &line{"a", 1}}}))
		must(t, err)
		cp, err = commit(t, d.sink, cp, lines.Create, counts.Create)
		must(t, err)
		_, err = commit(t, d.sink, cp, lines.Clear)
		must(t, err)
		equal(t, "rows", d.rows(t, "lines"), "")
	})
	t.Run("an index for one that was prepared", func(t *testing.T) {
		d := newDatabase(t)
		must(t, d.CreateCollection(t.Context(), "model.lines", options.CreateCollection().SetValidator(bson.D{{Key: "price", Value: bson.D{{Key: "$gt", Value: 0}}}})))
		cp := d.acquired(t, lines.Create)
		specs, err := d.Collection("model.lines").Indexes().ListSpecifications(t.Context())
		must(t, err)
		equal(t, "indexes", len(specs), 2)
		_, err = commit(t, d.sink, cp, put(lines, nil, []projector.Row[line]{{Owner: value(t, 1), Row: &line{"a", -1}}}))
		wantError(t, err, "validation")
		wantClass(t, d.sink, err, projector.Poison)
	})
}

func TestDoesNotFeedOnItself(t *testing.T) {
	d := newDatabase(t)
	cp, err := acquire(t.Context(), d.sink, "test")
	must(t, err)
	next := following(cp)
	next.Watch = projector.Watch{Database: d.Name(), Collections: []projector.Watched{{Name: "model.counts"}, {Name: "outbox"}}}
	for _, f := range []func(context.Context, *mongodb.Tx) error{
		counts.Create,
		add(counts, nil, []count{{"a", 1}}),
		func(_ context.Context, tx *mongodb.Tx) error {
			tx.Outside("outbox").Queue(mongo.NewInsertOneModel().SetDocument(bson.D{}))
			return nil
		},
		func(ctx context.Context, tx *mongodb.Tx) error {
			_, err := tx.Outside("outbox").InsertOne(ctx, bson.D{})
			return err
		},
	} {
		err := d.sink.Commit(t.Context(), cp, next, f)
		wantError(t, err, "which it follows")
		wantClass(t, d.sink, err, projector.Fatal)
	}
	// Another database's collection of the same name is another one.
	next.Watch.Database = "elsewhere"
	must(t, d.sink.Commit(t.Context(), cp, next, counts.Create))
}
