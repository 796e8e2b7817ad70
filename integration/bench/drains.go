package main

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// drain is a row of the report that drains the backlog.
type drain struct {
	name      string
	sink      string // "": nothing is written
	model     string // "": a raw drain or the loop
	loop      bool
	preImages bool
	base      string  // the raw row that this one is compared with
	goal      float64 // the least ratio to it; 0: none
}

const (
	rawBoth  = "raw drain"
	rawAfter = "raw drain, post-images only"
	rawBulk  = "raw bulkWrite into mongodb"

	rawElastic = "raw _bulk into elasticsearch"
)

var drainRows = []drain{
	{name: rawBoth, preImages: true, base: rawBoth},
	{name: "rollup 3 groups into postgres", sink: sinkPostgres, model: "by_status", preImages: true, base: rawBoth, goal: 0.90},
	{name: "rollup 10,000 groups into postgres", sink: sinkPostgres, model: "by_product", preImages: true, base: rawBoth, goal: 0.90},
	{name: "hand-written loop into postgres", sink: sinkPostgres, loop: true, preImages: true, base: rawBoth},
	{name: "rollup 3 groups into mongodb", sink: sinkMongoDB, model: "by_status", preImages: true, base: rawBoth, goal: 0.85},
	{name: "rollup 10,000 groups into mongodb", sink: sinkMongoDB, model: "by_product", preImages: true, base: rawBoth, goal: 0.85},
	{name: rawAfter, base: rawAfter},
	{name: "mirror into postgres", sink: sinkPostgres, model: "orders", base: rawAfter, goal: 0.85},
	{name: rawBulk, sink: sinkMongoDB, base: rawBulk},
	{name: "mirror into mongodb", sink: sinkMongoDB, model: "orders", base: rawBulk, goal: 0.80},
	{name: "rollup 3 groups into redis", sink: sinkRedis, model: "by_status", preImages: true, base: rawBoth, goal: 0.85},
	{name: "rollup 10,000 groups into redis", sink: sinkRedis, model: "by_product", preImages: true, base: rawBoth, goal: 0.85},
	{name: "mirror into redis", sink: sinkRedis, model: "orders", base: rawAfter},
	{name: rawElastic, sink: sinkElastic, base: rawElastic},
	{name: "mirror into elasticsearch", sink: sinkElastic, model: "orders", base: rawElastic, goal: 0.85},
}

func (d drain) raw() bool { return d.model == "" && !d.loop }

// drains runs the rows round after round, every other one backwards.
func (b *bench) drains(ctx context.Context) error {
	var rows []drain
	for _, d := range drainRows {
		needed := func(o drain) bool { return b.wants(o.name) && o.base == d.name }
		if b.wants(d.name) || slices.ContainsFunc(drainRows, needed) {
			rows = append(rows, d)
		}
	}
	if len(rows) == 0 {
		return nil
	}
	log, err := b.write(ctx, "orders", b.events/2, 0)
	if err != nil {
		return err
	}
	drained := map[string][]outcome{}
	for round := range b.rounds {
		for _, d := range rows {
			o, err := b.drain(ctx, d, log, round == b.rounds-1)
			if err != nil {
				return fmt.Errorf("%s: %w", d.name, err)
			}
			fmt.Printf("round %d: %-36s %9.0f events/s, %4.0f MB, CPU s %s\n", round+1, d.name, o.rate, o.rss, o.cpu)
			drained[d.name] = append(drained[d.name], o)
		}
		slices.Reverse(rows)
	}
	for _, d := range drainRows {
		if o := drained[d.name]; len(o) > 0 {
			r := summary(o, drained[d.base])
			r.Name, r.leastRatio = d.name, d.goal
			if d.model != "" {
				r.mostRSS = goalRSS
			}
			b.report.add(r)
		}
	}
	return nil
}

// outcome is what one drain gave.
type outcome struct {
	rate, rss float64
	cpu       cpu
}

// summary is the row of a drain's rounds, with the ratio to base round by round; without base it has none.
func summary(rounds, base []outcome) row {
	of := func(f func(round int) float64) float64 {
		var v []float64
		for i := range rounds {
			v = append(v, f(i))
		}
		return median(v)
	}
	r := row{
		Rate: of(func(i int) float64 { return rounds[i].rate }),
		CPU: &cpu{
			Own:    of(func(i int) float64 { return rounds[i].cpu.Own }),
			Mongod: of(func(i int) float64 { return rounds[i].cpu.Mongod }),
			Sink:   of(func(i int) float64 { return rounds[i].cpu.Sink }),
		},
	}
	for _, o := range rounds {
		r.RSS = max(r.RSS, o.rss)
	}
	if base != nil {
		r.Ratio = of(func(i int) float64 { return rounds[i].rate / base[i].rate })
	}
	return r
}

// drain runs one row once.
func (b *bench) drain(ctx context.Context, d drain, log backlog, last bool) (best outcome, err error) {
	j := job{Sink: d.sink, Collection: log.collection, Start: log.start, Events: log.events(), PreImages: d.preImages}
	switch {
	case d.raw():
		j.Role = "raw"
		switch d.sink {
		case sinkMongoDB:
			j.Role = "raw bulk"
		case sinkElastic:
			j.Role = "raw elastic"
		}
		for _, size := range rawBatchSizes {
			j.BatchSize = size
			o, err := b.measure(ctx, d, j, log)
			if err != nil {
				return best, err
			}
			if o.rate > best.rate {
				best = o
			}
		}
		return best, nil
	case d.loop:
		j.Role, j.Start, j.Events = "loop", log.middle, 2*(log.orders-log.tail)
	default:
		j.Role, j.Model = "drain", d.model
		if b.profiles != "" && last {
			j.Profile = filepath.Join(b.profiles, slug(d.name))
		}
	}
	return b.measure(ctx, d, j, log)
}

// measure runs a child that drains, and checks what it has written.
func (b *bench) measure(ctx context.Context, d drain, j job, log backlog) (o outcome, err error) {
	err = b.withTarget(ctx, d.sink, func(t target) error {
		j.Target = t.uri
		before := b.serverCPU(d.sink)
		r, err := b.do(ctx, j)
		if err != nil {
			return err
		}
		used := b.serverCPU(d.sink)
		o = outcome{
			rate: float64(j.Events) / r.Seconds, rss: r.RSS,
			cpu: cpu{Own: r.CPU, Mongod: used.Mongod - before.Mongod, Sink: used.Sink - before.Sink},
		}
		source := b.db.Collection(log.collection)
		switch {
		case d.loop:
			return checkLoop(ctx, t.conn, log)
		case d.name == rawBulk:
			return checkBulk(ctx, t, source)
		case d.name == rawElastic:
			return checkOrders(ctx, t, source)
		case d.model != "":
			return models[d.model].check(ctx, t, source)
		}
		return nil
	})
	return o, err
}

var notInSlug = regexp.MustCompile(`[^a-z0-9]+`)

func slug(name string) string { return strings.Trim(notInSlug.ReplaceAllString(name, "-"), "-") }
