package postgres_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// order is a row of about 200 bytes.
type order struct {
	ID       bson.ObjectID `row:"id,key"`
	Customer string        `row:"customer"`
	Status   string        `row:"status"`
	Total    int64         `row:"total"`
	Placed   time.Time     `row:"placed_at"`
	Note     *string       `row:"note"`
}

var orders = postgres.Table[order]{Name: "orders"}

func someOrders(n int, status string) []projector.Row[order] {
	note := "leave it at the neighbour's, the one with the green door; ring twice, the dog is harmless"
	rows := make([]projector.Row[order], n)
	for i := range rows {
		oid := bson.NewObjectID()
		typ, b, _ := bson.MarshalValue(oid)
		rows[i] = projector.Row[order]{
			Owner: bson.RawValue{Type: typ, Value: b},
			Row:   &order{oid, fmt.Sprintf("customer-%d", i%977), status, int64(i), time.UnixMilli(1_700_000_000_000 + int64(i)), &note},
		}
	}
	return rows
}

const benchBatch = 5000

// reportRows turns commits into rows per second.
func reportRows(b *testing.B) {
	b.ReportMetric(float64(b.N)*benchBatch/b.Elapsed().Seconds(), "rows/s")
}

// BenchmarkPut commits batches of 5,000 rows: new ones, the same again, and removals.
func BenchmarkPut(b *testing.B) {
	b.Run("new", func(b *testing.B) {
		d := newDatabase(b)
		cp := d.acquired(b, orders.Create)
		for b.Loop() {
			b.StopTimer()
			rows := someOrders(benchBatch, "new")
			b.StartTimer()
			var err error
			cp, err = commit(b, d.sink, cp, put(orders, nil, rows))
			must(b, err)
		}
		reportRows(b)
	})
	b.Run("existing", func(b *testing.B) {
		d := newDatabase(b)
		rows := someOrders(benchBatch, "new")
		cp := d.acquired(b, orders.Create, put(orders, nil, rows))
		for b.Loop() {
			var err error
			cp, err = commit(b, d.sink, cp, put(orders, nil, rows))
			must(b, err)
		}
		reportRows(b)
	})
	b.Run("remove", func(b *testing.B) {
		d := newDatabase(b)
		cp := d.acquired(b, orders.Create)
		for b.Loop() {
			b.StopTimer()
			rows := someOrders(benchBatch, "new")
			var err error
			cp, err = commit(b, d.sink, cp, put(orders, nil, rows))
			must(b, err)
			b.StartTimer()
			cp, err = commit(b, d.sink, cp, put(orders, rows, nil))
			must(b, err)
		}
		reportRows(b)
	})
}

// BenchmarkAdd commits batches of 5,000 contributions, spread over few or many rows.
func BenchmarkAdd(b *testing.B) {
	for _, groups := range []int{10, 5000} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, counts.Create)
			plus := make([]count, benchBatch)
			for i := range plus {
				plus[i] = count{fmt.Sprintf("status-%d", i%groups), 1}
			}
			for b.Loop() {
				var err error
				cp, err = commit(b, d.sink, cp, add(counts, nil, plus))
				must(b, err)
			}
			reportRows(b)
		})
	}
	b.Run("moves", func(b *testing.B) { // each takes off what the one before has added
		d := newDatabase(b)
		cp := d.acquired(b, counts.Create)
		batches := [2][]count{}
		for i := range benchBatch {
			batches[0] = append(batches[0], count{fmt.Sprintf("a-%d", i), 1})
			batches[1] = append(batches[1], count{fmt.Sprintf("b-%d", i), 1})
		}
		cp, err := commit(b, d.sink, cp, add(counts, nil, batches[1]))
		must(b, err)
		n := 0
		for b.Loop() {
			cp, err = commit(b, d.sink, cp, add(counts, batches[(n+1)%2], batches[n%2]))
			must(b, err)
			n++
		}
		reportRows(b)
	})
}

// BenchmarkCommit is the latency of a small batch.
func BenchmarkCommit(b *testing.B) {
	for name, f := range map[string]func(int) func(context.Context, *postgres.Tx) error{
		"empty": func(int) func(context.Context, *postgres.Tx) error { return all() },
		"add": func(int) func(context.Context, *postgres.Tx) error {
			return add(counts, nil, []count{{"open", 1}})
		},
		"move": func(int) func(context.Context, *postgres.Tx) error {
			return add(counts, []count{{"open", 1}}, []count{{"open", 1}, {"open", 0}, {"x", 1}})
		},
		"queue1000": func(i int) func(context.Context, *postgres.Tx) error {
			return func(_ context.Context, tx *postgres.Tx) error {
				for n := range 1000 {
					tx.Queue(`insert into counts values ($1, $2, 1) on conflict (status) do update set n = excluded.n`, fmt.Sprint(n), i)
				}
				return nil
			}
		},
	} {
		b.Run(name, func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, counts.Create)
			i := 0
			for b.Loop() {
				var err error
				cp, err = commit(b, d.sink, cp, f(i))
				must(b, err)
				i++
			}
		})
	}
}

// parcel is a row of four columns and about 200 bytes, its owner included.
type parcel struct {
	Customer string    `row:"customer"`
	Total    int64     `row:"total"`
	Placed   time.Time `row:"placed_at"`
	Note     string    `row:"note"`
}

var parcels = postgres.Table[parcel]{Name: "parcels"}

// BenchmarkLoad compares a commit with Load, and one with Put, with a plain COPY of the
// same rows, encoded beforehand, into the same table, in a transaction of its own; they
// take turns. Of-COPY is how much of the COPY's speed is left.
func BenchmarkLoad(b *testing.B) {
	d := newDatabase(b)
	cp := d.acquired(b, parcels.Create)
	conn, err := d.Pool.Acquire(b.Context())
	must(b, err)
	defer conn.Release()
	var copied, loaded, written time.Duration
	clear := queue("truncate parcels")
	timed := func(to *time.Duration, f func(context.Context, *postgres.Tx) error) {
		var err error
		cp, err = commit(b, d.sink, cp, clear)
		must(b, err)
		started := time.Now()
		cp, err = commit(b, d.sink, cp, f)
		*to += time.Since(started)
		must(b, err)
	}
	note := strings.Repeat("leave it with the neighbour ", 5)
	for b.Loop() {
		rows := make([]projector.Row[parcel], benchBatch)
		for i := range rows {
			typ, id, _ := bson.MarshalValue(bson.NewObjectID())
			rows[i] = projector.Row[parcel]{
				Owner: bson.RawValue{Type: typ, Value: id},
				Row:   &parcel{fmt.Sprintf("customer-%d", i%977), int64(i), time.UnixMilli(1_700_000_000_000 + int64(i)), note},
			}
		}
		// What COPY is given comes from COPY itself.
		timed(&loaded, load(parcels, rows))
		var raw bytes.Buffer
		_, err := conn.Conn().PgConn().CopyTo(b.Context(), &raw, "copy model.parcels to stdout with (format binary)")
		must(b, err)
		timed(&written, put(parcels, nil, rows))
		cp, err = commit(b, d.sink, cp, clear)
		must(b, err)
		started := time.Now()
		must(b, pgx.BeginFunc(b.Context(), conn, func(tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().CopyFrom(b.Context(), &raw, "copy model.parcels from stdin with (format binary)")
			return err
		}))
		copied += time.Since(started)
	}
	b.ReportMetric(float64(b.N)*benchBatch/loaded.Seconds(), "rows/s")
	b.ReportMetric(copied.Seconds()/loaded.Seconds(), "of-COPY")
	b.ReportMetric(copied.Seconds()/written.Seconds(), "put-of-COPY")
}
