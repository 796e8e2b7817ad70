package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

const (
	latencyRate    = 500 // writes a second
	latencyWriters = 32  // that wait for their acknowledgements at once
	goalLatency    = 10  // ms, the most that a model's median may be over the server's own
)

// latencies takes the time from a write's acknowledgement until it is seen: first by the driver's change stream alone,
// then in a model. An event may arrive before the writer hears of its own write, so a latency can be negative.
func (b *bench) latencies(ctx context.Context) error {
	rows := []struct{ name, role, model string }{
		{name: fmt.Sprintf("write to event at %d/s, driver alone", latencyRate), role: "raw latency"},
		{name: fmt.Sprintf("write to visible at %d/s, mirror into postgres", latencyRate), role: "latency", model: "orders"},
	}
	if !b.wants(rows[0].name) && !b.wants(rows[1].name) {
		return nil
	}
	own := 0.0
	for i, r := range rows {
		collection := fmt.Sprintf("latency_%d", i)
		start, err := b.create(ctx, collection)
		if err != nil {
			return err
		}
		var res result
		var took []float64
		err = b.withPostgres(ctx, func(t target) error {
			j := job{Role: r.role, Sink: sinkPostgres, Target: t.uri, Collection: collection, Start: start, Events: b.writes, Model: r.model}
			if res, took, err = b.latency(ctx, j); err != nil || r.model == "" {
				return err
			}
			return models[r.model].check(ctx, t, b.db.Collection(collection))
		})
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		rep := row{Name: r.name, RSS: res.RSS, P50: percentile(took, 50), P99: percentile(took, 99), timed: true}
		if r.model == "" {
			own = rep.P50
		} else {
			rep.mostP50, rep.mostRSS = own+goalLatency, goalRSS
		}
		b.report.add(rep)
	}
	return nil
}

// latency runs the child and writes. It returns how many ms each write took to be seen.
func (b *bench) latency(ctx context.Context, j job) (result, []float64, error) {
	c, err := b.spawn(ctx, j)
	if err != nil {
		return result{}, nil, err
	}
	if err := c.ready(); err != nil {
		return result{}, nil, err
	}
	majority := options.Collection().SetWriteConcern(writeconcern.Majority())
	acked, err := writePaced(ctx, b.db.Collection(j.Collection, majority), j.Events)
	if err != nil {
		return result{}, nil, c.end(err)
	}
	r, err := c.result()
	if err != nil {
		return r, nil, err
	}
	took := make([]float64, len(acked))
	for i := range acked {
		if r.At[i] == 0 {
			return r, nil, fmt.Errorf("WRONG: write %d was never seen", i)
		}
		took[i] = time.Duration(r.At[i]-acked[i].UnixNano()).Seconds() * 1000
	}
	return r, took, nil
}

// writePaced inserts n orders at latencyRate, and tells when each was acknowledged by a majority. A write waits for
// its time, not for the write before.
func writePaced(ctx context.Context, coll *mongo.Collection, n int) ([]time.Time, error) {
	acked, due := make([]time.Time, n), make(chan int, n)
	errs := make([]error, latencyWriters)
	var writers sync.WaitGroup
	for w := range latencyWriters {
		writers.Go(func() {
			for i := range due {
				if errs[w] == nil {
					_, errs[w] = coll.InsertOne(ctx, orderAt(i))
				}
				acked[i] = time.Now()
			}
		})
	}
	begin := time.Now()
	for i := range n {
		time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / latencyRate)))
		due <- i
	}
	close(due)
	writers.Wait()
	if took := time.Since(begin); took > time.Duration(n)*time.Second/latencyRate*12/10+time.Second {
		fmt.Printf("the source did not take %d writes/s: %d in %.1f s\n", latencyRate, n, took.Seconds())
	}
	return acked, errors.Join(errs...)
}

// rawLatency notes when the driver's change stream gives each write.
func rawLatency(ctx context.Context, j job, p *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	cs, err := watch(ctx, db, j)
	if err != nil {
		return r, err
	}
	if err := p.ready(); err != nil {
		return r, err
	}
	r.At = make([]int64, j.Events)
	for range j.Events {
		if !cs.Next(ctx) {
			return r, errors.Join(errors.New("the stream has ended"), cs.Err())
		}
		at := time.Now().UnixNano()
		r.At[cs.Current.Lookup("fullDocument", "number").AsInt64()] = at
	}
	r.RSS, err = peakRSS()
	return r, errors.Join(err, cs.Close(ctx), db.Client().Disconnect(ctx))
}

// observed is a table that tells which orders are put into it.
type observed struct {
	postgres.Table[orderRow]
	put *[]int64 // by the transaction under way
}

// Put notes the orders of the transaction and puts them.
func (o observed) Put(ctx context.Context, tx *postgres.Tx, remove, put []projector.Row[orderRow]) error {
	*o.put = (*o.put)[:0]
	for _, r := range put {
		*o.put = append(*o.put, r.Row.Number)
	}
	return o.Table.Put(ctx, tx, remove, put)
}

// modelLatency notes when the runner learns that the commit with each write is done, which is a little after it is visible.
func modelLatency(ctx context.Context, j job, p *parent) (r result, err error) {
	r.At = make([]int64, j.Events)
	table := observed{postgres.Table[orderRow]{Name: "orders"}, new([]int64)}
	seen, all := 0, make(chan struct{})
	fault.Global.OnReach(func(point fault.Point) {
		if point != fault.CommitDone {
			return
		}
		at := time.Now().UnixNano()
		for _, n := range *table.put {
			r.At[n] = at
		}
		seen += len(*table.put)
		*table.put = (*table.put)[:0]
		if seen == j.Events {
			close(all)
		}
	})
	m, err := openPostgres(ctx, j, postgres.Bindings{projector.Mirror(j.Collection, orderView.row, table)})
	if err != nil {
		return r, err
	}
	if err := m.follow(ctx); err != nil {
		return r, err
	}
	if err := p.ready(); err != nil {
		return r, err
	}
	if err := m.until(ctx, all); err != nil {
		return r, err
	}
	if r.RSS, err = peakRSS(); err != nil {
		return r, err
	}
	return r, m.close(ctx)
}

// follow starts a model and waits until it follows the source.
func (r *running) follow(ctx context.Context) error {
	r.start(ctx)
	following := make(chan struct{})
	go func() {
		for r.Status().StreamsOpened == 0 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		close(following)
	}()
	return r.until(ctx, following)
}
