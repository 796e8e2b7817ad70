package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/pprof"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// What the models read of an order, and the rows that they make of it.
type (
	statusView struct {
		Status string `bson:"status"`
		Amount int64  `bson:"amount"`
	}
	statusRow struct {
		Status string `row:"status,key"`
		N      int64  `row:"n,sum"`
		Amount int64  `row:"amount,sum"`
	}
	productView struct {
		Product int64 `bson:"product"`
		Amount  int64 `bson:"amount"`
	}
	productRow struct {
		Product int64 `row:"product,key"`
		N       int64 `row:"n,sum"`
		Amount  int64 `row:"amount,sum"`
	}
	orderView struct {
		Number   int64  `bson:"number"`
		Customer string `bson:"customer"`
		Status   string `bson:"status"`
		Amount   int64  `bson:"amount"`
	}
	orderRow struct {
		Number   int64  `row:"number"`
		Customer string `row:"customer"`
		Status   string `row:"status"`
		Amount   int64  `row:"amount"`
	}
)

func (o statusView) rows() []statusRow   { return []statusRow{{o.Status, 1, o.Amount}} }
func (o productView) rows() []productRow { return []productRow{{o.Product, 1, o.Amount}} }

func (o orderView) row() (orderRow, bool) { return orderRow(o), true }

// model is a read model that is measured: its bindings in each sink, and what tells whether it is right.
type model struct {
	postgres func(collection string) postgres.Bindings
	mongodb  func(collection string) mongodb.Bindings
	redis    func(collection string) redis.Bindings
	elastic  func(collection string) elasticsearch.Bindings // nil: it adds
	check    func(context.Context, target, *mongo.Collection) error
}

// models are the models there are, by the name of their projection.
var models = map[string]model{
	"by_status": {
		func(c string) postgres.Bindings {
			return postgres.Bindings{projector.Rollup(c, statusView.rows, postgres.Table[statusRow]{Name: "counts"})}
		},
		func(c string) mongodb.Bindings {
			return mongodb.Bindings{projector.Rollup(c, statusView.rows, mongodb.Collection[statusRow]{Name: "counts"})}
		},
		func(c string) redis.Bindings {
			return redis.Bindings{projector.Rollup(c, statusView.rows, redis.Hash[statusRow]{Name: "counts"})}
		},
		nil,
		func(ctx context.Context, t target, coll *mongo.Collection) error {
			return checkSums(ctx, t, "by_status", "status", coll)
		},
	},
	"by_product": {
		func(c string) postgres.Bindings {
			return postgres.Bindings{projector.Rollup(c, productView.rows, postgres.Table[productRow]{Name: "counts"})}
		},
		func(c string) mongodb.Bindings {
			return mongodb.Bindings{projector.Rollup(c, productView.rows, mongodb.Collection[productRow]{Name: "counts"})}
		},
		func(c string) redis.Bindings {
			return redis.Bindings{projector.Rollup(c, productView.rows, redis.Hash[productRow]{Name: "counts"})}
		},
		nil,
		func(ctx context.Context, t target, coll *mongo.Collection) error {
			return checkSums(ctx, t, "by_product", "product", coll)
		},
	},
	"orders": {
		func(c string) postgres.Bindings {
			return postgres.Bindings{projector.Mirror(c, orderView.row, postgres.Table[orderRow]{Name: "orders"})}
		},
		func(c string) mongodb.Bindings {
			return mongodb.Bindings{projector.Mirror(c, orderView.row, mongodb.Collection[orderRow]{Name: "orders"})}
		},
		func(c string) redis.Bindings {
			return redis.Bindings{projector.Mirror(c, orderView.row, redis.Hash[orderRow]{Name: "orders"})}
		},
		func(c string) elasticsearch.Bindings {
			return elasticsearch.Bindings{projector.Mirror(c, orderView.row, elasticsearch.Index[orderRow]{Name: "orders", Mapping: elasticMapping, Settings: elasticSettings})}
		},
		checkOrders,
	},
}

// running is a model under way in a child.
type running struct {
	*projector.Runner
	db       *mongo.Database
	closeOut func(context.Context) error // of the connection to the sink
	stop     context.CancelFunc
	done     chan error
	rebuilt  chan struct{} // closed when a first load has ended
}

// open makes the runner of the job's model in the job's sink; nothing runs yet.
func open(ctx context.Context, j job) (*running, error) {
	switch j.Sink {
	case sinkMongoDB:
		return openMongoDB(ctx, j, models[j.Model].mongodb(j.Collection))
	case sinkRedis:
		return openRedis(ctx, j, models[j.Model].redis(j.Collection))
	case sinkElastic:
		client, err := elasticClient(j.Target)
		if err != nil {
			return nil, err
		}
		return newRunning(ctx, j, elasticsearch.New(client), models[j.Model].elastic(j.Collection), func(context.Context) error { return nil })
	}
	return openPostgres(ctx, j, models[j.Model].postgres(j.Collection))
}

func openPostgres(ctx context.Context, j job, bindings postgres.Bindings) (*running, error) {
	pool, err := pgxpool.New(ctx, j.Target)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); err != nil {
		return nil, err
	}
	return newRunning(ctx, j, postgres.New(pool), bindings, func(context.Context) error { pool.Close(); return nil })
}

func openMongoDB(ctx context.Context, j job, bindings mongodb.Bindings) (*running, error) {
	out, err := connect(ctx, j.Target, sinkDatabase)
	if err != nil {
		return nil, err
	}
	return newRunning(ctx, j, mongodb.New(out), bindings, out.Client().Disconnect)
}

func openRedis(ctx context.Context, j job, bindings redis.Bindings) (*running, error) {
	o, err := goredis.ParseURL(j.Target)
	if err != nil {
		return nil, err
	}
	o.ContextTimeoutEnabled = true
	client := goredis.NewClient(o)
	return newRunning(ctx, j, redis.New(client), bindings, func(context.Context) error { return client.Close() })
}

func newRunning[Tx any](ctx context.Context, j job, sink projector.Sink[Tx], bindings []projector.Binding[Tx], closeOut func(context.Context) error) (*running, error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return nil, err
	}
	r := &running{db: db, closeOut: closeOut, done: make(chan error, 1), rebuilt: make(chan struct{})}
	o := projector.Options{Logger: slog.New(slog.DiscardHandler)}
	if j.Start.IsZero() {
		o.Reconcile = reconcile.Snapshot{OnProgress: func(p projector.Progress) {
			if p.Done {
				close(r.rebuilt)
			}
		}}
	} else {
		o.Start = projector.FromTime(j.Start)
	}
	r.Runner, err = projector.New(db, sink, projector.Projection[Tx]{Name: j.Model, Version: 1, Bindings: bindings}, o)
	return r, err
}

func (r *running) start(ctx context.Context) {
	ctx, r.stop = context.WithCancel(ctx)
	go func() { r.done <- r.Run(ctx) }()
}

// until waits for c, or for the runner to end before.
func (r *running) until(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case err := <-r.done:
		return errors.Join(errors.New("the runner has ended"), err)
	case <-ctx.Done():
		return fmt.Errorf("%w: %+v", context.Cause(ctx), r.Status())
	}
}

func (r *running) close(ctx context.Context) error {
	r.stop()
	err := <-r.done
	return errors.Join(err, r.closeOut(ctx), r.db.Client().Disconnect(ctx))
}

// modelDrain runs a model over the backlog. The time is that from the opening of its stream, which follows the making
// of the empty model, to the commit of the last change.
func modelDrain(ctx context.Context, j job, _ *parent) (r result, err error) {
	m, err := open(ctx, j)
	if err != nil {
		return r, err
	}
	var begin, end time.Time
	var made atomic.Bool
	drained := make(chan struct{})
	fault.Global.OnReach(func(p fault.Point) {
		switch {
		case p == fault.StreamOpen && made.Load():
			if begin.IsZero() {
				begin = time.Now()
			}
		case p == fault.CommitDone:
			made.Store(true)
			if end.IsZero() && m.Status().Changes >= int64(j.Events) {
				end = time.Now()
				close(drained)
			}
		}
	})
	stopProfile, err := profile(j.Profile)
	if err != nil {
		return r, err
	}
	m.start(ctx)
	if err := m.until(ctx, drained); err != nil {
		return r, err
	}
	r.Seconds, r.CPU = end.Sub(begin).Seconds(), ownCPU()
	if r.RSS, err = peakRSS(); err != nil {
		return r, err
	}
	return r, errors.Join(stopProfile(), m.close(ctx))
}

// profile begins a CPU profile; what it returns ends it and adds one of allocations.
func profile(path string) (stop func() error, err error) {
	if path == "" {
		return func() error { return nil }, nil
	}
	cpu, err := os.Create(path + ".cpu")
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, err
	}
	return func() error {
		pprof.StopCPUProfile()
		allocs, err := os.Create(path + ".allocs")
		if err != nil {
			return err
		}
		return errors.Join(pprof.Lookup("allocs").WriteTo(allocs, 0), allocs.Close(), cpu.Close())
	}, nil
}

// sums are the rows of a rollup: how many orders, and their amount, by key.
type sums map[string][2]int64

func (s sums) add(o order, sign int64) {
	v := s[o.Status]
	s[o.Status] = [2]int64{v[0] + sign, v[1] + sign*o.Amount}
}

func (s sums) differs(want sums) error {
	for k, w := range want {
		if s[k] != w {
			return fmt.Errorf("WRONG: row %q is %d, the source says %d", k, s[k], w)
		}
	}
	if len(s) != len(want) {
		return fmt.Errorf("WRONG: %d rows, the source says %d", len(s), len(want))
	}
	return nil
}

// checkSums compares a rollup's rows with an aggregation of the source by the field that is the rows' key.
func checkSums(ctx context.Context, t target, model, key string, coll *mongo.Collection) error {
	got, err := t.sums(ctx, model, key)
	if err != nil {
		return err
	}
	grouped, err := coll.Aggregate(ctx, mongo.Pipeline{{{Key: "$group", Value: bson.D{
		{Key: "_id", Value: bson.D{{Key: "$toString", Value: "$" + key}}},
		{Key: "n", Value: bson.D{{Key: "$sum", Value: 1}}},
		{Key: "amount", Value: bson.D{{Key: "$sum", Value: "$amount"}}},
	}}}})
	if err != nil {
		return err
	}
	want, err := allSums(ctx, grouped)
	if err != nil {
		return err
	}
	return got.differs(want)
}

// allSums reads documents of a key, a number and an amount.
func allSums(ctx context.Context, cur *mongo.Cursor) (sums, error) {
	var groups []struct {
		Key    string `bson:"_id"`
		N      int64  `bson:"n"`
		Amount int64  `bson:"amount"`
	}
	if err := cur.All(ctx, &groups); err != nil {
		return nil, err
	}
	all := sums{}
	for _, g := range groups {
		all[g.Key] = [2]int64{g.N, g.Amount}
	}
	return all, nil
}

// checkOrders compares a mirror's rows with the source.
func checkOrders(ctx context.Context, t target, coll *mongo.Collection) error {
	got, err := t.orders(ctx)
	if err != nil {
		return err
	}
	return sameOrders(ctx, got, coll)
}

func sameOrders(ctx context.Context, got map[orderRow]bool, source *mongo.Collection) error {
	cur, err := source.Find(ctx, bson.D{}, options.Find().SetProjection(bson.D{{Key: "body", Value: 0}}))
	if err != nil {
		return err
	}
	want := 0
	for ; cur.Next(ctx); want++ {
		var v orderView
		if err := cur.Decode(&v); err != nil {
			return err
		}
		if r, _ := v.row(); !got[r] {
			return fmt.Errorf("WRONG: there is no row %+v", r)
		}
	}
	if len(got) != want {
		return fmt.Errorf("WRONG: %d rows, the source has %d documents", len(got), want)
	}
	return cur.Err()
}
