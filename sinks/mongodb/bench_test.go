package mongodb_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// purchase is a row of about 200 bytes.
type purchase struct {
	Customer string    `row:"customer"  bson:"customer"`
	Status   string    `row:"status"    bson:"status"`
	Total    int64     `row:"total"     bson:"total"`
	Placed   time.Time `row:"placed_at" bson:"placed_at"`
	Note     *string   `row:"note"      bson:"note"`
}

var purchases = mongodb.Collection[purchase]{Name: "purchases"}

func somePurchases(b *testing.B, n int) []projector.Row[purchase] {
	note := "leave it at the neighbour's, the one with the green door; ring twice, the dog is harmless"
	rows := make([]projector.Row[purchase], n)
	for i := range rows {
		rows[i] = projector.Row[purchase]{
			Owner: value(b, bson.NewObjectID()),
			Row:   &purchase{fmt.Sprintf("customer-%d", i%977), "new", int64(i), time.UnixMilli(1_700_000_000_000 + int64(i)), &note},
		}
	}
	return rows
}

const benchBatch = 5000

// reportRows turns commits into rows per second.
func reportRows(b *testing.B) {
	b.ReportMetric(float64(b.N)*benchBatch/b.Elapsed().Seconds(), "rows/s")
}

// raw writes the same documents by the driver alone: an unordered bulkWrite, without
// a transaction or a checkpoint.
func raw(b *testing.B, d *database, rows []projector.Row[purchase]) {
	b.Helper()
	models := make([]mongo.WriteModel, len(rows))
	for i := range rows {
		models[i] = mongo.NewReplaceOneModel().SetFilter(bson.D{{Key: "_id", Value: rows[i].Owner}}).SetReplacement(rows[i].Row).SetUpsert(true)
	}
	coll := d.Collection("raw", options.Collection().SetWriteConcern(writeconcern.Majority()))
	_, err := coll.BulkWrite(b.Context(), models, options.BulkWrite().SetOrdered(false))
	must(b, err)
}

// BenchmarkPut commits batches of 5,000 rows, new ones and the same again, each beside
// a raw bulkWrite of the same documents.
func BenchmarkPut(b *testing.B) {
	for _, existing := range []bool{false, true} {
		rows := somePurchases(b, benchBatch)
		next := func(b *testing.B) {
			if !existing {
				b.StopTimer()
				rows = somePurchases(b, benchBatch)
				b.StartTimer()
			}
		}
		name := map[bool]string{false: "new", true: "existing"}[existing]
		b.Run(name+"/sink", func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, purchases.Create, put(purchases, nil, rows))
			for b.Loop() {
				next(b)
				var err error
				cp, err = commit(b, d.sink, cp, put(purchases, nil, rows))
				must(b, err)
			}
			reportRows(b)
		})
		b.Run(name+"/raw", func(b *testing.B) {
			d := newDatabase(b)
			raw(b, d, rows)
			for b.Loop() {
				next(b)
				raw(b, d, rows)
			}
			reportRows(b)
		})
	}
	b.Run("new/load", func(b *testing.B) { // as a rebuild writes a new generation's
		d := newDatabase(b)
		cp := d.acquired(b, purchases.Create)
		for b.Loop() {
			b.StopTimer()
			rows := somePurchases(b, benchBatch)
			b.StartTimer()
			var err error
			cp, err = commit(b, d.sink, cp, func(ctx context.Context, tx *mongodb.Tx) error { return purchases.Load(ctx, tx, rows) })
			must(b, err)
		}
		reportRows(b)
	})
	b.Run("remove", func(b *testing.B) {
		d := newDatabase(b)
		cp := d.acquired(b, purchases.Create)
		for b.Loop() {
			b.StopTimer()
			rows := somePurchases(b, benchBatch)
			var err error
			cp, err = commit(b, d.sink, cp, put(purchases, nil, rows))
			must(b, err)
			for i := range rows {
				rows[i].Row = nil
			}
			b.StartTimer()
			cp, err = commit(b, d.sink, cp, put(purchases, rows, nil))
			must(b, err)
		}
		reportRows(b)
	})
}

// BenchmarkAdd commits batches of 5,000 contributions, spread over few or many rows;
// raw is the driver's bulkWrite of the folded sums.
func BenchmarkAdd(b *testing.B) {
	contributions := func(groups int) []count {
		plus := make([]count, benchBatch)
		for i := range plus {
			plus[i] = count{fmt.Sprintf("status-%d", i%groups), 1}
		}
		return plus
	}
	for _, groups := range []int{10, 5000} {
		b.Run(fmt.Sprintf("groups=%d/sink", groups), func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, counts.Create)
			plus := contributions(groups)
			for b.Loop() {
				var err error
				cp, err = commit(b, d.sink, cp, add(counts, nil, plus))
				must(b, err)
			}
			reportRows(b)
		})
		b.Run(fmt.Sprintf("groups=%d/raw", groups), func(b *testing.B) {
			d := newDatabase(b)
			coll := d.Collection("raw", options.Collection().SetWriteConcern(writeconcern.Majority()))
			models := make([]mongo.WriteModel, groups)
			for b.Loop() {
				for i := range models {
					models[i] = mongo.NewUpdateOneModel().SetUpsert(true).
						SetFilter(bson.D{{Key: "_id", Value: bson.D{{Key: "status", Value: fmt.Sprintf("status-%d", i)}}}}).
						SetUpdate(bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: int64(1)}, {Key: "contributions", Value: int64(1)}}}})
				}
				_, err := coll.BulkWrite(b.Context(), models, options.BulkWrite().SetOrdered(false))
				must(b, err)
			}
			reportRows(b)
		})
	}
	b.Run("decimals", func(b *testing.B) { // with the sums read beforehand
		d := newDatabase(b)
		cp := d.acquired(b, sales.Create)
		plus := make([]sale, benchBatch)
		for i := range plus {
			plus[i] = sale{Shop: fmt.Sprintf("shop-%d", i), Revenue: bson.NewDecimal128(0x3040000000000000, uint64(i)+1)}
		}
		for b.Loop() {
			var err error
			cp, err = commit(b, d.sink, cp, add(sales, nil, plus))
			must(b, err)
		}
		reportRows(b)
	})
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
	for name, f := range map[string]func(context.Context, *mongodb.Tx) error{
		"empty": all(),
		"add":   add(counts, nil, []count{{"open", 1}}),
		"move":  add(counts, []count{{"open", 1}}, []count{{"open", 1}, {"open", 0}, {"x", 1}}),
	} {
		b.Run(name, func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, counts.Create)
			for b.Loop() {
				var err error
				cp, err = commit(b, d.sink, cp, f)
				must(b, err)
			}
		})
	}
}
