package integration_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/tidemark-go/tidemark/integration/internal/chaos"
	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// The tests of servers and networks that fail run over every sink, and every place that
// a model can have in it. They keep the orders of model_test.go by one projection of all
// four forms, order_ledger: a Rollup, a Mirror, an Upsert, and an On that increments.

// place is where a model is kept.
type place string

const (
	inPostgres place = "postgres"
	inMongoDB  place = "mongodb"         // another cluster than the source, or another database
	inSource   place = "mongodb_watched" // the watched database itself

	inRedis         place = "redis"
	inElasticsearch place = "elasticsearch"
)

// places are those whose sink has transactions that a handler is in the middle of, on a
// connection that can hang there. The tests of that run over these; what befalls the other
// sinks is in redis_test.go and elastic_test.go.
var places = []place{inPostgres, inMongoDB, inSource}

// everySink is a place in each sink.
var everySink = []place{inPostgres, inMongoDB, inRedis, inElasticsearch}

const orderPlace = "order_ledger" // the projection, and so its schema or the beginning of its collections' names

// orderModel is a model of the orders in one of the sinks.
type orderModel interface {
	// runner follows the orders of source, by the connections that are put under fire.
	runner(source *mongo.Database, o projector.Options) (*projector.Runner, error)
	// rows reads the model, and counts the changes that were applied more than once.
	rows() (r orderRows, twice int64, err error)
	checkpoint(ctx context.Context) (projector.Checkpoint, error)
	// forget removes the checkpoint.
	forget() error
}

// handled counts the calls of the models' handlers, which a commit without changes does
// not make.
var handled atomic.Int64

type postgresModel struct {
	t         testing.TB
	pool, way *pgxpool.Pool // the test's own; the runner's
}

func (m *postgresModel) runner(source *mongo.Database, o projector.Options) (*projector.Runner, error) {
	p := orderLedger(nil)
	for _, more := range []postgres.Projection{orderTotals, orderMirror, orderHandles} {
		p.Bindings = append(p.Bindings, more.Bindings...)
	}
	// The transaction is opened by the handler, not by the last round trip alone.
	p.Bindings = append(p.Bindings, projector.On("orders", func(ctx context.Context, tx *postgres.Tx, _ []projector.Touch) error {
		handled.Add(1)
		_, err := tx.Exec(ctx, "select 1")
		return err
	}))
	return projector.New(source, postgres.New(m.way), p, o)
}

func (m *postgresModel) rows() (orderRows, int64, error) {
	m.pool.Reset() // its connections may be of a server that is gone
	twice := selectOne[int64](m.t, m.pool, "select count(*) from order_ledger.journal where times <> 1")
	return storedIn(m.t, m.pool, orderPlace, orderPlace, orderPlace, orderPlace), twice, nil
}

func (m *postgresModel) checkpoint(ctx context.Context) (projector.Checkpoint, error) {
	all, err := checkpoints(ctx, m.pool)
	return all[orderPlace], err
}

func (m *postgresModel) forget() error {
	_, err := m.pool.Exec(m.t.Context(), "delete from tidemark.checkpoints")
	return err
}

type mongoModel struct {
	t       testing.TB
	db, way *mongo.Database // the test's own; the runner's
	opts    []mongodb.Option
}

// mongoLedger is orderLedger in MongoDB.
var mongoLedger = mongodb.Projection{
	Name: orderPlace, Version: 1,
	Setup: func(ctx context.Context, tx *mongodb.Tx) error {
		return errors.Join(tx.Collection("balances").Create(ctx), tx.Collection("journal").Create(ctx))
	},
	Bindings: mongodb.Bindings{
		projector.On("orders", func(_ context.Context, tx *mongodb.Tx, changes []projector.Change[order]) error {
			handled.Add(1)
			up := func(collection, id string, inc bson.D) {
				tx.Collection(collection).Queue(mongo.NewUpdateOneModel().SetUpsert(true).
					SetFilter(bson.D{{Key: "_id", Value: id}}).SetUpdate(bson.D{{Key: "$inc", Value: inc}}))
			}
			sums, ids := posted(changes)
			for kind, sum := range sums {
				up("balances", kind, bson.D{{Key: "orders", Value: sum[0]}, {Key: "amount", Value: sum[1]}})
			}
			for _, id := range ids {
				up("journal", id, bson.D{{Key: "times", Value: int64(1)}})
			}
			return nil
		}),
		projector.Rollup("orders", order.totals, mongodb.Collection[total]{Name: "totals"}),
		projector.Mirror("orders", order.mirrored, mongodb.Collection[mirrored]{Name: "orders"}),
		projector.Upsert("orders", order.holders, mongodb.Collection[holder]{Name: "handles"}),
	},
}

func (m *mongoModel) runner(source *mongo.Database, o projector.Options) (*projector.Runner, error) {
	return projector.New(source, mongodb.New(m.way, m.opts...), mongoLedger, o)
}

// readAll reads a collection of the model.
func readAll[R any](m *mongoModel, name string, filter bson.D) (all []R, err error) {
	live, err := mongodb.Live(m.t.Context(), m.db, orderPlace, name)
	if err != nil { // its checkpoint was removed: it is where it began
		live = m.db.Collection(orderPlace + "." + name)
	}
	cur, err := live.Find(m.t.Context(), filter)
	if err == nil {
		err = cur.All(m.t.Context(), &all)
	}
	return all, err
}

func (m *mongoModel) rows() (got orderRows, twice int64, err error) {
	got = newOrderRows()
	totals, err1 := readAll[struct {
		Key struct {
			Group string `bson:"grp"`
		} `bson:"_id"`
		Orders, Amount int64
	}](m, "totals", bson.D{})
	for _, r := range totals {
		got.Totals[r.Key.Group] = total{r.Key.Group, r.Orders, r.Amount}
	}
	mirror, err2 := readAll[struct {
		ID     int64
		Group  string `bson:"grp"`
		State  string
		Amount int64
		Handle string
	}](m, "orders", bson.D{})
	for _, r := range mirror {
		got.Mirror[r.ID] = mirrored(r)
	}
	handles, err3 := readAll[struct {
		Key        struct{ Handle string } `bson:"_id"`
		ID, Amount int64
	}](m, "handles", bson.D{})
	for _, r := range handles {
		got.Handles[r.Key.Handle] = holder{r.Key.Handle, r.ID, r.Amount}
	}
	balances, err4 := readAll[struct {
		Kind           string `bson:"_id"`
		Orders, Amount int64
	}](m, "balances", bson.D{{Key: "$or", Value: bson.A{nonZero("orders"), nonZero("amount")}}})
	for _, r := range balances {
		got.Balances[r.Kind] = [2]int64{r.Orders, r.Amount}
	}
	again, err5 := readAll[bson.Raw](m, "journal", bson.D{{Key: "times", Value: bson.D{{Key: "$ne", Value: 1}}}})
	return got, int64(len(again)), errors.Join(err1, err2, err3, err4, err5)
}

func nonZero(field string) bson.D {
	return bson.D{{Key: field, Value: bson.D{{Key: "$ne", Value: 0}}}}
}

// checkpoint is what no kill of the server takes back: not what is just not yet on the disk.
func (m *mongoModel) checkpoint(ctx context.Context) (projector.Checkpoint, error) {
	var found struct {
		Term, Sequence int64
		Body           string
	}
	stored := m.db.Collection("tidemark.checkpoints", options.Collection().SetReadConcern(readconcern.Majority()))
	err := stored.FindOne(ctx, bson.D{{Key: "projection", Value: orderPlace}, {Key: "phase", Value: "live"}}).Decode(&found)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return projector.Checkpoint{}, nil
	}
	if err != nil {
		return projector.Checkpoint{}, err
	}
	c, err := projector.DecodeCheckpoint(orderPlace, []byte(found.Body))
	c.Term, c.Sequence = found.Term, found.Sequence
	return c, err
}

func (m *mongoModel) forget() error {
	_, err := m.db.Collection("tidemark.checkpoints").DeleteMany(m.t.Context(), bson.D{{Key: "projection", Value: orderPlace}})
	return err
}

// ordering is a source of orders, and a writer that changes it.
type ordering struct {
	t   *testing.T
	uri string
	db  *mongo.Database
	rng *rand.Rand

	mu     sync.Mutex // held for each step
	writer *orderWriter
	steps  atomic.Int64
	failed atomic.Int64
}

func newOrdering(t *testing.T, uri string) *ordering {
	t.Helper()
	o := &ordering{t: t, uri: uri, db: sourceOn(t, uri), rng: seeded(t)}
	createOrders(t, o.db)
	o.writer = newOrderWriter(o.db, rand.New(rand.NewPCG(o.rng.Uint64(), 1)))
	return o
}

// write keeps changing the source until the test ends. A step may fail, with an election
// say; whether it has happened all the same is for the comparison to see. None is cut off at
// the end: the server might hold its transaction open.
func (o *ordering) write() {
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-ended:
				return
			default:
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			o.mu.Lock()
			err := o.writer.step(ctx)
			o.mu.Unlock()
			cancel()
			if err == nil {
				o.steps.Add(1)
				breathe()
				continue
			}
			o.failed.Add(1)
			select { // it would only fail again
			case <-time.After(10 * time.Millisecond):
			case <-ended:
			}
		}
	})
	o.t.Cleanup(func() { close(ended); wg.Wait() })
}

// breathe is what writers without end do between two changes where `make test` runs several
// lists of tests at once: each would take a processor of its own.
func breathe() {
	if effort.Rounds(2) < 2 {
		time.Sleep(4 * time.Millisecond)
	}
}

// step makes n changes.
func (o *ordering) step(n int) {
	o.t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	for range n {
		must(o.t, o.writer.step(o.t.Context()))
	}
}

// nudge inserts an order now, or as soon as the source can be changed.
func (o *ordering) nudge() {
	var wg sync.WaitGroup
	ctx := o.t.Context()
	wg.Go(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		for ctx.Err() == nil {
			if _, err := o.writer.orders.InsertOne(ctx, o.writer.fresh()); err == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	o.t.Cleanup(wg.Wait)
}

// goOn waits until the writer has made n more changes.
func (o *ordering) goOn(n int64) {
	o.t.Helper()
	enough := o.steps.Load() + n
	until(o.t, time.Minute, "the writer goes on", func() bool { return o.steps.Load() >= enough })
}

// server is what is done to one.
type server interface {
	Stop() error
	Kill() error
	Pause() error
	Resume() error
	Restart(ctx context.Context) error
}

// kept is a source of orders and a model of them.
type kept struct {
	*ordering
	place  place
	way    *mongo.Database // to the source, the runner's
	model  orderModel
	server server         // the sink's, where it has one of its own
	data   *serve.Process // of that server
	log    *logged

	toSource, toSink *chaos.Proxy // where there are proxies
	sinkURI          string       // as the runner has it
}

// keeping says how a kept is made.
type keeping struct {
	own     bool                // the sink is a server of its own
	mongod  serve.MongodOptions // for that
	proxied bool                // both the source and the sink are behind proxies
	opts    []mongodb.Option
}

// keep makes a source of orders and a place for their model.
func keep(t *testing.T, p place, k keeping) *kept {
	t.Helper()
	uri, err := serve.MongoDB(t.Context())
	must(t, err)
	if p != inSource || !k.own {
		return keepOf(t, newOrdering(t, uri), p, k)
	}
	set := throwaway(t, k.mongod)
	kept := keepOf(t, newOrdering(t, set.URI()), p, k)
	kept.server, kept.data = set, set.Members[0]
	return kept
}

// keepOf makes a place for a model of the orders.
func keepOf(t *testing.T, o *ordering, p place, k keeping) *kept {
	t.Helper()
	c := &kept{ordering: o, place: p, log: new(logged)}
	uri := o.uri
	if k.proxied {
		c.toSource, uri = throughProxy(t, uri)
	}
	c.way = dedicated(t, uri).Database(o.db.Name())
	switch p {
	case inPostgres:
		c.inPostgres(k)
		return c
	case inRedis:
		c.inRedis(k)
		return c
	case inElasticsearch:
		c.inElasticsearch(k)
		return c
	}
	m := &mongoModel{t: t, opts: k.opts}
	c.model = m
	uri, name := o.uri, o.db.Name()
	if p == inMongoDB {
		name = unique("model_")
		var err error
		uri, err = serve.MongoDB(t.Context())
		must(t, err)
		if k.own {
			set := throwaway(t, k.mongod)
			c.server, c.data, uri = set, set.Members[0], set.URI()
		}
	}
	m.db = client(t, uri).Database(name)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if c.server == nil {
			_ = m.db.Drop(ctx)
		}
	})
	switch {
	case k.proxied:
		c.toSink, c.sinkURI = throughProxy(t, uri)
		m.way = dedicated(t, c.sinkURI).Database(name)
	case p == inSource: // by the same connections as well
		c.sinkURI, m.way = uri, c.way
	default:
		c.sinkURI, m.way = uri, dedicated(t, uri).Database(name)
	}
	return c
}

func (c *kept) inPostgres(k keeping) {
	c.t.Helper()
	m := &postgresModel{t: c.t}
	c.model = m
	if k.own {
		s, err := serve.StartPostgres(c.t.Context(), serve.PostgresOptions{})
		must(c.t, err)
		c.t.Cleanup(func() { must(c.t, s.Close()) })
		c.server, c.data, c.sinkURI = s, s.Process, s.DSN() // its database goes with it
	} else {
		c.sinkURI = postgresDSN(c.t)
	}
	m.pool = poolOn(c.t, c.sinkURI)
	if k.proxied {
		c.toSink, m.way = proxied(c.t, c.sinkURI)
		c.sinkURI = m.way.Config().ConnString()
		return
	}
	m.way = poolOn(c.t, c.sinkURI)
}

func (c *kept) inRedis(k keeping) {
	c.t.Helper()
	m := newRedisModel(c.t)
	c.model, c.server, c.data, c.sinkURI = m, m.server, m.server.Process, m.server.URL()
	if k.proxied {
		proxy, u := behindProxy(c.t, c.sinkURI)
		c.toSink, c.sinkURI = proxy, u.String()
		m.way = redisClient(c.t, c.sinkURI)
	}
}

func (c *kept) inElasticsearch(k keeping) {
	c.t.Helper()
	m := newElasticModel(c.t)
	c.model, c.sinkURI = m, m.url
	if k.proxied {
		proxy, u := behindProxy(c.t, c.sinkURI)
		c.toSink, c.sinkURI = proxy, u.String()
		m.way = elasticClient(c.t, c.sinkURI)
	}
}

// appName is the runner's, for the faults that are to hit nobody else.
const appName = "tidemark_under_fire"

// dedicated is a client of the runner's own. It notices soon that a server hangs, where
// the default takes 40 s.
func dedicated(t testing.TB, uri string) *mongo.Client {
	t.Helper()
	c, err := mongo.Connect(options.Client().ApplyURI(uri).SetAppName(appName).SetWriteConcern(writeconcern.Majority()).
		SetServerSelectionTimeout(2 * time.Second).SetConnectTimeout(time.Second).SetHeartbeatInterval(500 * time.Millisecond))
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		must(t, c.Disconnect(ctx))
	})
	return c
}

// throughProxy puts a proxy in front of a replica set of one.
func throughProxy(t testing.TB, uri string) (*chaos.Proxy, string) {
	t.Helper()
	proxy, u := behindProxy(t, uri)
	q := u.Query()
	q.Del("replicaSet") // or the driver would go where the set says that it is
	q.Set("directConnection", "true")
	u.RawQuery = q.Encode()
	return proxy, u.String()
}

// behindProxy puts a proxy in front of a server, and gives the address there.
func behindProxy(t testing.TB, uri string) (*chaos.Proxy, *url.URL) {
	t.Helper()
	u, err := url.Parse(uri)
	must(t, err)
	proxy, err := chaos.NewProxy(u.Host)
	must(t, err)
	t.Cleanup(func() { must(t, proxy.Close()) })
	u.Host = proxy.Addr()
	return proxy, u
}

// logged keeps what a runner logs.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logged) says(words string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), words)
}

func (l *logged) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.text.String()
	return s[max(0, len(s)-3000):]
}

func (c *kept) options(o projector.Options) projector.Options {
	o.Start, o.Logger = projector.FromNow(), slog.New(slog.NewTextHandler(c.log, nil))
	if o.CommitTimeout == 0 {
		o.CommitTimeout = 5 * time.Second
	}
	return o
}

// start runs the model, and waits until it has stored where it begins.
func (c *kept) start(o projector.Options) *running {
	c.t.Helper()
	r, err := c.model.runner(c.way, c.options(o))
	must(c.t, err)
	g := run(c.t, r)
	until(c.t, time.Minute, "the runner follows the source", func() bool {
		c.alive(g)
		return g.Status().State == projector.Running
	})
	return g
}

// alive fails the test where the runner has ended by itself.
func (c *kept) alive(g *running) {
	c.t.Helper()
	select {
	case <-g.done:
		c.t.Fatalf("%s: the runner has ended by itself: %v; it has logged\n%s", c.place, g.err, c.log.tail())
	default:
	}
}

// commits waits for n more commits.
func (c *kept) commits(g *running, n int64) {
	c.t.Helper()
	enough := g.Status().Commits + n
	until(c.t, time.Minute, "the model goes on", func() bool {
		c.alive(g)
		return g.Status().Commits >= enough
	})
}

// catchUp waits until the model has everything written so far. A source that has just
// failed over answers some questions with an error; they are asked again.
func (c *kept) catchUp(g *running) {
	c.t.Helper()
	var err error
	for deadline := time.Now().Add(90 * time.Second); time.Now().Before(deadline); {
		c.alive(g)
		ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
		var at bson.Timestamp
		if at, err = majorityTime(ctx, c.db); err == nil {
			err = g.WaitFor(ctx, at)
		}
		cancel()
		if err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	c.t.Fatalf("%s: the model has not caught up: %v: %+v; it has logged\n%s", c.place, err, g.Status(), c.log.tail())
}

// difference lets the model catch up with a source that is still, and compares. What
// differs is looked at again: a step that failed for the writer may have been still
// under way on the server.
func (c *kept) difference(g *running) (diff string) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for range 2 {
		c.catchUp(g)
		if diff = c.compare(); diff == "" {
			return ""
		}
	}
	return diff
}

func (c *kept) compare() string {
	c.t.Helper()
	got, twice, err := c.model.rows()
	if err != nil { // a connection that has gone with its server
		got, twice, err = c.model.rows()
	}
	must(c.t, err)
	diff := cmp.Diff(computed(c.t, c.db), got)
	if twice > 0 {
		diff += "changes were applied more than once"
	}
	return diff
}

// stored is the checkpoint, of a server that may have just come back.
func (c *kept) stored() (now projector.Checkpoint) {
	c.t.Helper()
	until(c.t, time.Minute, "the checkpoint can be read", func() bool {
		var err error
		now, err = c.model.checkpoint(c.t.Context())
		return err == nil
	})
	return now
}

func (c *kept) exact(g *running) {
	c.t.Helper()
	if diff := c.difference(g); diff != "" {
		c.t.Fatalf("%s: the model differs from the source (-source +model):\n%s\nthe runner has logged\n%s", c.place, diff, c.log.tail())
	}
}

// inexact is for the controls: the model is wrong, or so far off that the sink refuses
// to take off what was never added.
func (c *kept) inexact(g *running) {
	c.t.Helper()
	at := operationTime(c.t, c.db)
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	waited := make(chan error, 1)
	go func() { waited <- g.WaitFor(ctx, at) }()
	select {
	case err := <-waited:
		must(c.t, err)
	case <-g.done:
		cancel()
		<-waited
		var sink *projector.SinkError
		if !errors.As(g.err, &sink) {
			c.t.Fatalf("the runner ended with %v", g.err)
		}
		c.t.Logf("with the guard off the model is wrong, which the sink notices: %v", g.err)
		return
	}
	diff := c.compare()
	if diff == "" {
		c.t.Fatal("the model is exact with the guard off: the test proves nothing")
	}
	c.t.Logf("with the guard off the model is wrong: %d lines of difference", strings.Count(diff, "\n"))
}

// tookEffect waits until the sink has carried out a commit, which it asks by a connection
// of the test's own.
func (c *kept) tookEffect(before int64) bool {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		now, err := c.model.checkpoint(ctx)
		cancel()
		if err == nil && now.Sequence > before {
			return true
		}
	}
	return false
}

// unanswered lets the next commit of changes take effect and keeps back the answer. Then
// it does what is given, and breaks the connection. Met tells whether it came to that.
func (c *kept) unanswered(a *ambush, then func()) (met func() bool) {
	var done atomic.Bool
	calls := handled.Load()
	var inCommit func()
	inCommit = func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		before, err := c.model.checkpoint(ctx)
		if err != nil || handled.Load() == calls {
			a.at(fault.CommitSend, inCommit)
			return
		}
		c.toSink.ToClient.HoldAfter(0)
		go func() {
			effect := c.tookEffect(before.Sequence)
			then()
			c.toSink.Cut()
			c.toSink.ToClient.Pass()
			done.Store(effect)
		}()
	}
	a.at(fault.CommitSend, inCommit)
	return done.Load
}

// heapInUse is after a collection.
func heapInUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}
