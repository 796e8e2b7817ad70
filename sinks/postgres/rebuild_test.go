package postgres_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func load[R any](table postgres.Table[R], rows []projector.Row[R]) func(context.Context, *postgres.Tx) error {
	return func(ctx context.Context, tx *postgres.Tx) error { return table.Load(ctx, tx, rows) }
}

// anything has a column of every kind.
type anything struct {
	Text    string            `row:"text"`
	Bool    bool              `row:"bool"`
	Int     int64             `row:"int"`
	Float   float64           `row:"float"`
	Time    time.Time         `row:"time"`
	Bytes   []byte            `row:"bytes"`
	ID      bson.ObjectID     `row:"oid"`
	Decimal bson.Decimal128   `row:"decimal"`
	JSON    map[string]any    `row:"json,json"`
	TextN   *string           `row:"text_n"`
	DecN    *bson.Decimal128  `row:"dec_n"`
	TimeN   *time.Time        `row:"time_n"`
	Odd     map[string]string `row:"odd,json"`
}

// Load stores what Put stores.
func TestLoadIsPut(t *testing.T) {
	d := newDatabase(t)
	a, b := postgres.Table[anything]{Name: "a"}, postgres.Table[anything]{Name: "b"}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var rows []projector.Row[anything]
	add := func(e anything) { rows = append(rows, owned(fmt.Sprint("document ", len(rows)), e)) }
	add(anything{})
	for _, s := range []string{
		"0", "-0", "0.00", "-0.0", "0E+3", "1", "-1", "10", "9999", "10000", "99999999", "100000000", "0.1", "0.0001", "0.00001", "-0.00010000",
		"12345.6789", "1E+5", "123E+7", "1E-7", "9.999999999999999999999999999999999E+6144", "1E-6176", "-1.0E-5", "10000.0000", "NaN", "Infinity", "-Infinity",
		"0.10", "1234567890.1234567890", "5E+3", "5E+4", "1000000000000000000000000000000000",
	} {
		add(anything{Decimal: decimal(t, s), DecN: ptr(decimal(t, s))})
	}
	for range 300 {
		dec := bson.NewDecimal128(r.Uint64()&(1<<63|1<<48-1)|uint64(6176+r.IntN(120)-60)<<49, r.Uint64())
		if _, _, err := dec.BigInt(); err != nil {
			continue
		}
		add(anything{
			Text: fmt.Sprint("t\té日", r.Int()), Bool: r.IntN(2) == 0, Int: int64(r.Uint64()), Float: math.Float64frombits(r.Uint64()), Time: time.UnixMilli(r.Int64N(1 << 45)),
			Bytes: []byte{0, byte(r.Int())}, ID: bson.NewObjectID(), Decimal: dec, JSON: map[string]any{"a": r.Int()}, TextN: ptr(""), TimeN: ptr(time.UnixMilli(-r.Int64N(1 << 40))),
		})
	}
	cp := d.acquired(t, a.Create, b.Create)
	cp, err := commit(t, d.sink, cp, put(a, nil, rows))
	must(t, err)
	cp, err = commit(t, d.sink, cp, load(b, nil), load(b, rows[:7]), queue("delete from b where _id = $1", "document 0"), load(b, rows[7:]), load(b, rows[:1]))
	must(t, err)
	equal(t, "rows", d.text(t, "select count(*) from model.b"), fmt.Sprint(len(rows)))
	equal(t, "difference", d.rows(t, `(select a::text from model.a except select b::text from model.b) union all (select b::text from model.b except select a::text from model.a)`), "")

	// What can't be stored is an error before anything is sent.
	for name, bad := range map[string]anything{"NUL": {Text: "a\x00"}, "UTF-8": {TextN: ptr("\xff")}, "date": {Time: time.UnixMilli(math.MaxInt64)}} {
		_, err = commit(t, d.sink, cp, load(b, []projector.Row[anything]{owned("fine", anything{}), owned("bad", bad)}))
		wantError(t, err, `table "b"`, "document bad")
		wantClass(t, d.sink, err, projector.Poison)
		equal(t, name, d.text(t, "select count(*) from model.b"), fmt.Sprint(len(rows)))
	}
	// What is there already is refused for its content.
	_, err = commit(t, d.sink, cp, load(b, rows[:1]))
	wantError(t, err, "23505")
	wantClass(t, d.sink, err, projector.Poison)
	_, err = commit(t, d.sink, cp, func(ctx context.Context, tx *postgres.Tx) error {
		_ = b.Load(ctx, tx, rows[:1])
		return nil
	})
	wantError(t, err, "23505", "returned no error")
	_, err = commit(t, d.sink, cp, func(ctx context.Context, tx *postgres.Tx) error { return counts.Add(ctx, tx, nil, nil) }, load(b, nil))
	must(t, err)
}

// A table with keys of its own is loaded with owners as well.
func TestLoadKeyed(t *testing.T) {
	d := newDatabase(t)
	rows := someOrders(50, "new")
	cp := d.acquired(t, orders.Create)
	cp, err := commit(t, d.sink, cp, load(orders, rows))
	must(t, err)
	equal(t, "rows", d.text(t, "select count(*) from model.orders where _id = id"), "50")
	_, err = commit(t, d.sink, cp, put(orders, rows, nil))
	must(t, err)
	equal(t, "rows", d.text(t, "select count(*) from model.orders"), "0")
}

// marked is the commit after prev while a rebuild in place goes on; in the one after it,
// none does.
func marked(t *testing.T, d *database, prev projector.Checkpoint, mark int64, fs ...func(context.Context, *postgres.Tx) error) projector.Checkpoint {
	t.Helper()
	next := following(prev)
	next.Rebuild = &projector.Rebuild{Mode: projector.InPlace, Mark: mark}
	must(t, d.sink.Commit(t.Context(), prev, next, all(fs...)))
	next.Rebuild = nil
	return next
}

func TestSweep(t *testing.T) {
	for name, keyed := range map[string]bool{"keyed": true, "mirrored": false} {
		t.Run(name, func(t *testing.T) {
			if keyed {
				sweep(t, orders, func(ids ...int) (rows []projector.Row[order]) {
					for _, i := range ids {
						oid := bson.ObjectID{11: byte(i)}
						rows = append(rows, projector.Row[order]{Owner: id(fmt.Sprint("d", i)), Row: &order{ID: oid}})
					}
					return rows
				})
				return
			}
			type note struct {
				Text string `row:"text"`
			}
			sweep(t, postgres.Table[note]{Name: "orders"}, func(ids ...int) (rows []projector.Row[note]) {
				for _, i := range ids {
					rows = append(rows, projector.Row[note]{Owner: id(fmt.Sprint("d", i)), Row: &note{fmt.Sprint(i)}})
				}
				return rows
			})
		})
	}
}

func sweep[R any](t *testing.T, table postgres.Table[R], rows func(...int) []projector.Row[R]) {
	d := newDatabase(t)
	const ids = `select string_agg(_id || coalesce(':' || tidemark_build, ''), ' ' order by _id) from model.orders`
	cp := d.acquired(t, table.Create)
	cp, err := commit(t, d.sink, cp, put(table, nil, rows(1, 2, 3, 4, 5)))
	must(t, err)
	counted := func(want int64) func(context.Context, *postgres.Tx) error {
		return func(ctx context.Context, tx *postgres.Tx) error {
			n, err := table.Count(ctx, tx)
			equal(t, "count", n, want)
			return err
		}
	}
	sweeps := func(limit, want int) func(context.Context, *postgres.Tx) error {
		return func(ctx context.Context, tx *postgres.Tx) error {
			n, err := table.Sweep(ctx, tx, limit)
			equal(t, "swept", n, want)
			return err
		}
	}
	cp = marked(t, d, cp, 10, table.Prepare, table.Prepare, counted(5))
	cp = marked(t, d, cp, 10, table.Prepare, put(table, rows(1), rows(2)), load(table, rows(6, 3)))
	equal(t, "rows", d.text(t, ids), "d2:10 d3:10 d4 d5 d6:10")
	cp = marked(t, d, cp, 10, sweeps(1, 1), counted(4))
	cp = marked(t, d, cp, 10, sweeps(9, 1), sweeps(9, 0))
	equal(t, "rows", d.text(t, ids), "d2:10 d3:10 d6:10")
	// Afterwards rows are written without a mark, on the same connections.
	cp, err = commit(t, d.sink, cp, put(table, nil, rows(1, 2)))
	must(t, err)
	_, err = commit(t, d.sink, cp, sweeps(9, 0))
	wantError(t, err, "no mark")
	wantClass(t, d.sink, err, projector.Fatal)
	// The next rebuild has another mark.
	cp = marked(t, d, cp, 11, table.Prepare, put(table, nil, rows(2, 6)))
	marked(t, d, cp, 11, sweeps(9, 2), counted(2))
	equal(t, "rows", d.text(t, ids), "d2:11 d6:11")
	// A start on the table with the column, and with its rows, is no fault.
	must(t, d.sink.Try(t.Context(), d.acquired(t), table.Create))
}

// Prepare gives up behind a reader, rather than hold up all that come after, and needs
// the right to alter the table.
func TestPrepare(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	cp := d.acquired(t, orders.Create)
	reader, err := d.Begin(t.Context())
	must(t, err)
	_, err = reader.Exec(t.Context(), "select from model.orders")
	must(t, err)
	_, err = commit(t, d.sink, cp, orders.Prepare)
	wantError(t, err, "55P03")
	wantClass(t, d.sink, err, projector.Transient)
	must(t, reader.Rollback(t.Context()))

	config := d.role(t, "grant usage on schema tidemark, model to %s; grant select, insert, update, delete on tidemark.checkpoints, model.orders to %[1]s")
	sink := postgres.New(d.pool(t, config))
	_, err = commit(t, sink, cp, orders.Prepare)
	wantError(t, err, `alter table "model"."orders" add column`)
	wantClass(t, sink, err, projector.Fatal)
	must(t, counts.Check(projector.FormRollup))
	wantError(t, sink.Try(t.Context(), cp, counts.Prepare), "has sums")
}

func TestReservedColumn(t *testing.T) {
	type bad struct {
		V int64 `row:"tidemark_build"`
	}
	wantError(t, postgres.Table[bad]{Name: "t"}.Check(projector.FormMirror), "reserved")
}
