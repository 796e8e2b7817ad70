package elasticsearch_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// order is a row of about 200 bytes.
type order struct {
	Customer string    `row:"customer"`
	Status   string    `row:"status"`
	Total    int64     `row:"total"`
	Placed   time.Time `row:"placed_at"`
	Note     *string   `row:"note"`
}

var orders = elasticsearch.Index[order]{Name: "orders", Settings: `{"number_of_replicas": 0}`}

const benchBatch = 10_000 // two requests

func someOrders(version int64) []projector.Row[order] {
	note := "leave it at the neighbour's, the one with the green door; ring twice, the dog is harmless"
	rows := make([]projector.Row[order], benchBatch)
	for i := range rows {
		rows[i] = of(bson.NewObjectID(), version, order{fmt.Sprintf("customer-%d", i%977), "new", int64(i), time.UnixMilli(1_700_000_000_000 + int64(i)), &note})
	}
	return rows
}

// BenchmarkPut commits batches of new documents. In turn with them it sends what the sink
// would send, encoded beforehand, by as many requests at a time; vs-raw compares the two.
func BenchmarkPut(b *testing.B) {
	b.Run("new", func(b *testing.B) {
		c := newCluster(b)
		cp := c.acquired(b, orders.Create)
		var raw time.Duration
		for b.Loop() {
			b.StopTimer()
			rows, bodies := someOrders(1), c.encoded(b, someOrders(1))
			begin := time.Now()
			c.sendBulks(b, bodies)
			raw += time.Since(begin)
			b.StartTimer()
			cp = mustCommit(b, c.sink, cp, put(orders, nil, rows))
		}
		b.ReportMetric(float64(b.N)*benchBatch/b.Elapsed().Seconds(), "rows/s")
		b.ReportMetric(raw.Seconds()/b.Elapsed().Seconds(), "vs-raw")
	})
	b.Run("encode", func(b *testing.B) { // a trial of what is refused in the end does everything but send
		c := newCluster(b)
		cp := c.acquired(b, orders.Create)
		rows := someOrders(1)
		for b.Loop() {
			_ = c.sink.Try(b.Context(), cp, all(put(orders, nil, rows), put(orders, nil, list(of(1, 1, order{Customer: "\xff"})))))
		}
		b.ReportMetric(float64(b.N)*benchBatch/b.Elapsed().Seconds(), "rows/s")
	})
}

// encoded are the bodies of two bulk requests.
func (c *cluster) encoded(b *testing.B, rows []projector.Row[order]) (bodies [2]bytes.Buffer) {
	index := c.index(b, "model-g1-orders")
	for i, r := range rows {
		fmt.Fprintf(&bodies[i%2], `{"index":{"_index":"%s-write","_id":"%s","version":1,"version_type":"external_gte"}}`+"\n"+
			`{"customer":"%s","status":"new","total":%d,"placed_at":"%s","note":"%s"}`+"\n",
			index, projector.KeyText(r.Owner), r.Row.Customer, r.Row.Total, r.Row.Placed.UTC().Format("2006-01-02T15:04:05.000Z"), *r.Row.Note)
	}
	return bodies
}

func (c *cluster) sendBulks(b *testing.B, bodies [2]bytes.Buffer) {
	var wg sync.WaitGroup
	for i := range bodies {
		wg.Go(func() {
			resp, err := http.Post(c.url+"/_bulk?filter_path=errors,items.*.status,items.*.error", "application/json", &bodies[i])
			if err != nil {
				b.Error(err)
				return
			}
			answer, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if !bytes.HasPrefix(answer, []byte(`{"errors":false`)) {
				b.Errorf("%s: %.300s", resp.Status, answer)
			}
		})
	}
	wg.Wait()
}

// BenchmarkCommit is the latency of a batch of one document.
func BenchmarkCommit(b *testing.B) {
	c := newCluster(b)
	cp := c.acquired(b, orders.Create)
	rows := someOrders(1)[:1]
	for b.Loop() {
		cp = mustCommit(b, c.sink, cp, put(orders, nil, rows))
	}
}
