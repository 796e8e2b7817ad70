package integration_test

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// amount takes numbers of every BSON type, each as the decimal that people see: a double is
// the shortest text that means it, so 0.1 is exactly 0.1. The text is from docs/types.md.
type amount struct{ bson.Decimal128 }

func (a *amount) UnmarshalBSONValue(typ byte, data []byte) (err error) {
	v := bson.RawValue{Type: bson.Type(typ), Value: data}
	switch v.Type {
	case bson.TypeDecimal128:
		a.Decimal128 = v.Decimal128()
	case bson.TypeInt32, bson.TypeInt64:
		a.Decimal128, err = bson.ParseDecimal128(strconv.FormatInt(v.AsInt64(), 10))
	case bson.TypeDouble:
		a.Decimal128, err = bson.ParseDecimal128(strconv.FormatFloat(v.Double(), 'g', -1, 64))
	default:
		err = fmt.Errorf("an amount is a number, not a %s", v.Type)
	}
	return err
}

type amountDoc struct {
	Amount amount `bson:"amount"`
}

type amountTotal struct {
	All   string          `row:"everything,key"`
	N     int64           `row:"n,sum"`
	Total bson.Decimal128 `row:"total,sum"`
}

func (d amountDoc) total() []amountTotal { return []amountTotal{{"all", 1, d.Amount.Decimal128}} }

// amounts is the model of a sum in one sink.
type amounts struct {
	runner func(name string, o projector.Options) (*projector.Runner, error)
	total  func(name string) (n int64, total *big.Rat) // 0, nil: there is no row
}

func amountsIn(t *testing.T, p place, db *mongo.Database) amounts {
	t.Helper()
	const binding = "amounts"
	if p == inPostgres {
		pool := pool(t)
		return amounts{
			func(name string, o projector.Options) (*projector.Runner, error) {
				return projector.New(db, postgres.New(pool), postgres.Projection{Name: name, Version: 1, Bindings: postgres.Bindings{
					projector.Rollup(binding, amountDoc.total, postgres.Table[amountTotal]{Name: "totals"}),
				}}, o)
			},
			func(name string) (n int64, total *big.Rat) {
				rows, err := pool.Query(t.Context(), "select n, total::text from "+name+".totals")
				must(t, err)
				defer rows.Close()
				for rows.Next() {
					var text string
					must(t, rows.Scan(&n, &text))
					total = rational(t, text)
				}
				must(t, rows.Err())
				return n, total
			},
		}
	}
	sink := source(t)
	return amounts{
		func(name string, o projector.Options) (*projector.Runner, error) {
			return projector.New(db, mongodb.New(sink), mongodb.Projection{Name: name, Version: 1, Bindings: mongodb.Bindings{
				projector.Rollup(binding, amountDoc.total, mongodb.Collection[amountTotal]{Name: "totals"}),
			}}, o)
		},
		func(name string) (int64, *big.Rat) {
			live, err := mongodb.Live(t.Context(), sink, name, "totals")
			must(t, err)
			cur, err := live.Find(t.Context(), bson.D{})
			must(t, err)
			var rows []struct {
				N     int64
				Total bson.Decimal128
			}
			must(t, cur.All(t.Context(), &rows))
			if len(rows) == 0 {
				return 0, nil
			}
			return rows[0].N, rational(t, rows[0].Total.String())
		},
	}
}

func rational(t *testing.T, text string) *big.Rat {
	t.Helper()
	r, ok := new(big.Rat).SetString(text)
	if !ok {
		t.Fatalf("%q is no number", text)
	}
	return r
}

// Amounts of every numeric type add up exactly, and come back to exactly 0. NaN stops the
// projection before its document, and leaves the total as it was. (CASES B81, B85.)
func TestTypesSums(t *testing.T) {
	t.Parallel()
	for _, p := range []place{inPostgres, inMongoDB} {
		t.Run(string(p), func(t *testing.T) {
			db := source(t)
			withImages(t, db, "amounts")
			coll := db.Collection("amounts")
			from := operationTime(t, db)
			from.I++
			m := amountsIn(t, p, db)
			runs := func(name string, o projector.Options) *running {
				t.Helper()
				o.Logger = quiet()
				r, err := m.runner(name, o)
				must(t, err)
				return run(t, r)
			}
			is := func(name string, n int64, want string) {
				t.Helper()
				got, total := m.total(name)
				if got != n || (total == nil) != (want == "") || total != nil && total.Cmp(rational(t, want)) != 0 {
					t.Errorf("%s: %d amounts make %v, not %d that make %q", name, got, total, n, want)
				}
			}
			byStream, byRebuild := projector.Options{Start: projector.FromTime(from)}, projector.Options{Reconcile: reconcile.Snapshot{}}
			g := runs("by_stream", byStream)
			step := func(n int64, want string) {
				t.Helper()
				g.level(db)
				is("by_stream", n, want)
				name := unique("rebuilt_") // the same, from the documents as they are
				r := runs(name, byRebuild)
				r.level(db)
				is(name, n, want)
				r.stop()
			}
			put := func(id int, v any) {
				t.Helper()
				_, err := coll.ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: id}}, bson.D{{Key: "amount", Value: v}}, options.Replace().SetUpsert(true))
				must(t, err)
			}
			d := func(s string) bson.Decimal128 { return decimal128(t, s) }
			for id, v := range []any{int32(1), int64(2), 0.1, d("0.1"), d("0.1"), d("0.10"), int32(0)} {
				put(id, v)
			}
			step(7, "3.4")
			put(0, 1.5)                  // another type than before
			put(1, d("-1E-15"))          // more places
			put(2, int64(1<<53+1))       // more digits than a double has
			put(3, 0.2)                  // 0.1 + 0.2 is 0.3
			put(4, d("0E+6000"))         // a zero of any exponent
			put(5, math.Copysign(0, -1)) // or sign
			step(7, "9007199254740994.699999999999999")
			_, err := coll.DeleteMany(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: 6}}}})
			must(t, err)
			step(1, "0")
			put(7, d("0.1"))
			step(2, "0.1")
			name := "by_stream"
			for i, bad := range []any{math.NaN(), math.Inf(1), d("NaN"), d("-Infinity"), "1"} {
				id := fmt.Sprint("bad ", i)
				_, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "amount", Value: bad}})
				must(t, err)
				if e := ends[*projector.PoisonError](t, g); e.Key != id || e.Op != projector.Insert {
					t.Errorf("%v: it names the %s of %s", bad, e.Op, e.Key)
				}
				is(name, 2, "0.1")
				if e := ends[*projector.PoisonError](t, runs("by_rebuild_"+strconv.Itoa(i), byRebuild)); e.Key != id || e.Op != projector.Snapshot {
					t.Errorf("%v: a rebuild names the %s of %s", bad, e.Op, e.Key)
				}
				// It stays in the stream, so another model goes on without it.
				_, err = coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: id}})
				must(t, err)
				name = "without_" + strconv.Itoa(i)
				g = runs(name, byRebuild)
				g.level(db)
				is(name, 2, "0.1")
			}
		})
	}
}
