package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

const (
	goalRSS   = 150    // MB, the most that a model may take
	largeBody = 50_000 // bytes of a large document
	stallRate = 2000   // writes a second while the sink is stopped
)

// large drains documents of 50 KB, of which the models read a few small fields.
func (b *bench) large(ctx context.Context) error {
	rows := []drain{
		{name: "rollup of 50 KB documents into postgres", sink: sinkPostgres, model: "by_status"},
		{name: "mirror of 50 KB documents into postgres", sink: sinkPostgres, model: "orders"},
	}
	var log backlog
	for _, d := range rows {
		if !b.wants(d.name) {
			continue
		}
		if log.orders == 0 {
			var err error
			if log, err = b.write(ctx, "large", b.documents, largeBody); err != nil {
				return err
			}
		}
		o, err := b.drain(ctx, d, log, true)
		if err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
		r := summary([]outcome{o}, nil)
		r.Name, r.mostRSS = d.name, goalRSS
		b.report.add(r)
	}
	return nil
}

// stalled stops PostgreSQL under load, and takes the memory at its highest and how fast the model catches up: the
// rate is of the writes made while PostgreSQL stood, over the time from its return until all of them are in the model.
func (b *bench) stalled(ctx context.Context) error {
	name := fmt.Sprintf("sink stopped for %.0f s under load", b.stall.Seconds())
	if !b.wants(name) {
		return nil
	}
	const collection = "stalled"
	start, err := b.create(ctx, collection)
	if err != nil {
		return err
	}
	err = b.withPostgres(ctx, func(t target) error {
		c, err := b.spawn(ctx, job{Role: "stall", Sink: sinkPostgres, Target: t.uri, Collection: collection, Start: start, Model: "by_status"})
		if err != nil {
			return err
		}
		if err := c.ready(); err != nil {
			return err
		}
		fmt.Println("stopping PostgreSQL for", b.stall)
		written, back, err := b.loadAndStall(ctx, b.db.Collection(collection))
		if err != nil {
			return c.end(err)
		}
		last, err := b.now(ctx, collection)
		if err != nil {
			return c.end(err)
		}
		if err := c.in.Encode(last); err != nil {
			return c.end(err)
		}
		r, err := c.result()
		if err != nil {
			return err
		}
		caughtUp := time.Since(back)
		fmt.Printf("%d writes meanwhile; caught up %.1f s after PostgreSQL came back\n", written, caughtUp.Seconds())
		b.report.add(row{Name: name, Rate: float64(written) / caughtUp.Seconds(), RSS: r.RSS, mostRSS: goalRSS})
		return models["by_status"].check(ctx, t, b.db.Collection(collection))
	})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// loadAndStall writes while PostgreSQL runs, and goes on while it stands for the time given. Written is how many writes
// were made while it stood, back when it ran again.
func (b *bench) loadAndStall(ctx context.Context, coll *mongo.Collection) (written int, back time.Time, err error) {
	wctx, stop := context.WithCancel(ctx)
	defer stop()
	var total atomic.Int64
	failed := make(chan error, 1)
	go func() { failed <- load(wctx, coll, &total) }()
	meanwhile := func(d time.Duration) error {
		select {
		case err := <-failed:
			return fmt.Errorf("the writer ended: %w", err)
		case <-time.After(d):
			return nil
		}
	}
	if err := meanwhile(2 * time.Second); err != nil {
		return 0, back, err
	}
	before := total.Load()
	if err := b.postgres.Pause(); err != nil {
		return 0, back, err
	}
	if err := meanwhile(b.stall); err != nil {
		return 0, back, err
	}
	if err := b.postgres.Resume(); err != nil {
		return 0, back, err
	}
	back = time.Now()
	stop()
	err = <-failed
	return int(total.Load() - before), back, err
}

// load writes at stallRate until the context ends: inserts, and as many updates of earlier orders.
func load(ctx context.Context, coll *mongo.Collection, written *atomic.Int64) error {
	const tick = 10 * time.Millisecond
	const inserts = int(stallRate * tick / time.Second / 2)
	random := rand.New(rand.NewPCG(3, 4))
	begin := time.Now()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(begin.Add(time.Duration(i) * tick))):
		}
		var batch []mongo.WriteModel
		for n := i * inserts; n < (i+1)*inserts; n++ {
			batch = append(batch, mongo.NewInsertOneModel().SetDocument(orderAt(n)))
		}
		for range inserts {
			batch = append(batch, mongo.NewUpdateOneModel().
				SetFilter(bson.D{{Key: "_id", Value: orderID(random.IntN((i + 1) * inserts))}}).
				SetUpdate(bson.D{
					{Key: "$set", Value: bson.D{{Key: "status", Value: statuses[random.IntN(len(statuses))]}}},
					{Key: "$inc", Value: bson.D{{Key: "amount", Value: int64(1)}}},
				}))
		}
		// Not cut short: what is written must be known.
		if _, err := coll.BulkWrite(context.WithoutCancel(ctx), batch, options.BulkWrite().SetOrdered(true)); err != nil {
			return err
		}
		written.Add(int64(len(batch)))
	}
}

// modelStall follows the source until the parent says how far.
func modelStall(ctx context.Context, j job, p *parent) (r result, err error) {
	m, err := open(ctx, j)
	if err != nil {
		return r, err
	}
	if err := m.follow(ctx); err != nil {
		return r, err
	}
	if err := p.ready(); err != nil {
		return r, err
	}
	level := make(chan struct{})
	go func() {
		select {
		case t := <-p.told:
			if m.WaitFor(ctx, t) == nil {
				close(level)
			}
		case <-ctx.Done():
		}
	}()
	if err := m.until(ctx, level); err != nil {
		return r, err
	}
	if r.RSS, err = peakRSS(); err != nil {
		return r, err
	}
	return r, m.close(ctx)
}
