package redis_test

import (
	"fmt"
	"testing"

	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

const benchBatch = 5000

// reportRows turns commits into rows per second.
func reportRows(b *testing.B) {
	b.ReportMetric(float64(b.N)*benchBatch/b.Elapsed().Seconds(), "rows/s")
}

func someTickets(b *testing.B) []projector.Row[ticket] {
	rows := make([]projector.Row[ticket], benchBatch)
	for i := range rows {
		rows[i] = projector.Row[ticket]{Owner: value(b, bson.NewObjectID()), Row: &ticket{Title: fmt.Sprintf("ticket number %d", i)}}
	}
	return rows
}

// BenchmarkPut commits batches of 5,000 rows, new ones and the same again, each beside a
// plain pipeline of the same HSETs.
func BenchmarkPut(b *testing.B) {
	for _, existing := range []bool{false, true} {
		rows := someTickets(b)
		next := func(b *testing.B) {
			if !existing {
				b.StopTimer()
				rows = someTickets(b)
				b.StartTimer()
			}
		}
		name := map[bool]string{false: "new", true: "existing"}[existing]
		b.Run(name+"/sink", func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, tickets.Create, put(tickets, nil, rows))
			for b.Loop() {
				next(b)
				cp = committed(b, d.sink, cp, put(tickets, nil, rows))
			}
			reportRows(b)
			b.StopTimer()
			must(b, d.FlushDB(b.Context()).Err())
		})
		b.Run(name+"/raw", func(b *testing.B) {
			d := newDatabase(b)
			for b.Loop() {
				next(b)
				_, err := d.Pipelined(b.Context(), func(pipe goredis.Pipeliner) error {
					for _, r := range rows {
						pipe.HSet(b.Context(), projector.KeyText(r.Owner), "title", r.Row.Title)
					}
					return nil
				})
				must(b, err)
			}
			reportRows(b)
			b.StopTimer()
			must(b, d.FlushDB(b.Context()).Err())
		})
	}
}

// BenchmarkAdd commits batches of 5,000 contributions, spread over few or many rows; raw is
// a plain pipeline of HINCRBYs of the folded sums.
func BenchmarkAdd(b *testing.B) {
	for _, groups := range []int{10, 5000} {
		b.Run(fmt.Sprintf("groups=%d/sink", groups), func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, counts.Create)
			plus := make([]count, benchBatch)
			for i := range plus {
				plus[i] = count{fmt.Sprintf("status-%d", i%groups), 1}
			}
			for b.Loop() {
				cp = committed(b, d.sink, cp, add(counts, nil, plus))
			}
			reportRows(b)
		})
		b.Run(fmt.Sprintf("groups=%d/raw", groups), func(b *testing.B) {
			d := newDatabase(b)
			for b.Loop() {
				_, err := d.Pipelined(b.Context(), func(pipe goredis.Pipeliner) error {
					for i := range groups {
						key := fmt.Sprintf("status-%d", i)
						pipe.HIncrBy(b.Context(), key, "n", 1)
						pipe.HIncrBy(b.Context(), key, "contributions", 1)
					}
					return nil
				})
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
		cp = committed(b, d.sink, cp, add(counts, nil, batches[1]))
		n := 0
		for b.Loop() {
			cp = committed(b, d.sink, cp, add(counts, batches[(n+1)%2], batches[n%2]))
			n++
		}
		reportRows(b)
	})
}

// BenchmarkCommit is the latency of a small batch.
func BenchmarkCommit(b *testing.B) {
	for name, f := range map[string]apply{
		"empty": all(),
		"add":   add(counts, nil, []count{{"open", 1}}),
		"move":  add(counts, []count{{"open", 1}}, []count{{"open", 1}, {"open", 0}, {"x", 1}}),
	} {
		b.Run(name, func(b *testing.B) {
			d := newDatabase(b)
			cp := d.acquired(b, counts.Create)
			if name == "move" {
				cp = committed(b, d.sink, cp, add(counts, nil, []count{{"open", 1}}))
			}
			for b.Loop() {
				cp = committed(b, d.sink, cp, f)
			}
		})
	}
}
