package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

const goalRebuildRSS = 200 // MB

// rebuilds measures how fast a model is filled from the documents that exist, against a plain find of them, and
// against one that is piped into a COPY into the same table.
func (b *bench) rebuilds(ctx context.Context) error {
	const collection = "copied"
	fmt.Printf("writing %d documents into %s\n", b.copied, collection)
	if _, err := b.create(ctx, collection); err != nil {
		return err
	}
	if err := insert(ctx, b.db.Collection(collection), 0, b.copied, 0); err != nil {
		return err
	}
	rows := []struct {
		name, role, model, raw string
		decode                 bool
		least                  float64
	}{
		{name: "find, not decoded", role: "raw find"},
		{name: "find, decoded", role: "raw find", decode: true},
		{name: "find piped into COPY", role: "raw copy"},
		{name: "rebuild of a mirror into postgres", role: "rebuild", model: "orders", raw: "find piped into COPY", least: 0.8},
		{name: "rebuild of a rollup into postgres", role: "rebuild", model: "by_status", raw: "find, decoded", least: 0.9},
	}
	outcomes := map[string][]float64{} // documents per second
	ratios := map[string][]float64{}
	peak := map[string]float64{}
	for round := range b.rounds {
		for _, r := range rows {
			err := b.withPostgres(ctx, func(t target) error {
				j := job{Role: r.role, Collection: collection, Events: b.copied, Decode: r.decode, Model: r.model, Sink: sinkPostgres, Target: t.uri}
				if b.profiles != "" && r.model != "" {
					j.Profile = fmt.Sprintf("%s/rebuild_%s", b.profiles, r.model)
				}
				got, err := b.do(ctx, j)
				if err != nil {
					return err
				}
				rate := float64(b.copied) / got.Seconds
				outcomes[r.name] = append(outcomes[r.name], rate)
				peak[r.name] = max(peak[r.name], got.RSS)
				if r.raw != "" {
					raw := outcomes[r.raw]
					ratios[r.name] = append(ratios[r.name], rate/raw[len(raw)-1])
				}
				fmt.Printf("round %d: %s: %.0f documents/s, %.0f MB\n", round+1, r.name, rate, got.RSS)
				if r.model == "" {
					return nil
				}
				return models[r.model].check(ctx, t, b.db.Collection(collection))
			})
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
		}
	}
	for _, r := range rows {
		w := row{Name: r.name, Rate: median(outcomes[r.name]), RSS: peak[r.name], leastRatio: r.least}
		if r.model != "" {
			w.Ratio, w.mostRSS = median(ratios[r.name]), goalRebuildRSS
		}
		b.report.add(w)
	}
	return b.report.finish()
}

// rawFind reads every document, and decodes what a rollup needs of it, or nothing.
func rawFind(ctx context.Context, j job, _ *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	begin := time.Now()
	cur, err := db.Collection(j.Collection).Find(ctx, bson.D{}, options.Find().SetBatchSize(5000))
	if err != nil {
		return r, err
	}
	n := 0
	var v statusView
	for ; cur.Next(ctx); n++ {
		if !j.Decode {
			continue
		}
		if err := cur.Decode(&v); err != nil {
			return r, err
		}
	}
	if n != j.Events {
		return r, errors.Join(fmt.Errorf("%d documents of %d", n, j.Events), cur.Err())
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()
	r.RSS, err = peakRSS()
	return r, errors.Join(err, db.Client().Disconnect(ctx))
}

// rawCopy pipes a find into a COPY, as a program does that is written for it.
func rawCopy(ctx context.Context, j job, _ *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	conn, err := pgx.Connect(ctx, j.Target)
	if err != nil {
		return r, err
	}
	const table = `create table orders (number bigint not null, customer text not null, status text not null, amount bigint not null, _id text collate "C" primary key)`
	if _, err := conn.Exec(ctx, table); err != nil {
		return r, err
	}
	begin := time.Now()
	cur, err := db.Collection(j.Collection).Find(ctx, bson.D{}, options.Find().SetBatchSize(5000))
	if err != nil {
		return r, err
	}
	n, err := conn.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"number", "customer", "status", "amount", "_id"}, &copySource{ctx: ctx, cur: cur})
	if err != nil {
		return r, err
	}
	if n != int64(j.Events) {
		return r, fmt.Errorf("%d documents of %d", n, j.Events)
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()
	r.RSS, err = peakRSS()
	return r, errors.Join(err, conn.Close(ctx), db.Client().Disconnect(ctx))
}

type copySource struct {
	ctx context.Context
	cur *mongo.Cursor
	doc struct {
		ID        bson.ObjectID `bson:"_id"`
		orderView `bson:",inline"`
	}
}

func (s *copySource) Next() bool { return s.cur.Next(s.ctx) }
func (s *copySource) Err() error { return s.cur.Err() }
func (s *copySource) Values() ([]any, error) {
	err := s.cur.Decode(&s.doc)
	return []any{s.doc.Number, s.doc.Customer, s.doc.Status, s.doc.Amount, s.doc.ID.Hex()}, err
}

// modelRebuild fills a model for the first time: from the start of Run to its switch.
func modelRebuild(ctx context.Context, j job, _ *parent) (r result, err error) {
	m, err := open(ctx, j)
	if err != nil {
		return r, err
	}
	stopProfile, err := profile(j.Profile)
	if err != nil {
		return r, err
	}
	begin := time.Now()
	m.start(ctx)
	if err := m.until(ctx, m.rebuilt); err != nil {
		return r, err
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()
	if r.RSS, err = peakRSS(); err != nil {
		return r, err
	}
	return r, errors.Join(stopProfile(), m.close(ctx))
}
