package integration_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// shape is what a projection of the orders consists of. The zero value has all forms.
type shape struct {
	version   int   // 0: 1
	worth     int64 // the totals have so many times the amounts: another code; 0: once
	rowsOnly  bool  // no totals: it can be rebuilt in place
	noRebuild bool
}

// recovery is a source of orders and a model of them that has to be rebuilt.
type recovery struct {
	*testing.T
	shape
	place  place
	db     *mongo.Database // the source
	way    *mongo.Database // the runner's way to it
	model  orderModel
	pool   *pgxpool.Pool   // of the sink, in PostgreSQL
	sink   *mongo.Database // the sink, in MongoDB
	writer *orderWriter
	opened *openings
}

// newRecovery makes a source with documents, and a place for a model in a sink of its own.
func newRecovery(t *testing.T, uri string, p place, documents int) *recovery {
	t.Helper()
	db := sourceOn(t, uri)
	createOrders(t, db)
	r := recoveryOf(t, uri, db.Name(), p)
	r.insert(documents)
	return r
}

// recoveryOf is a further model of a source that is there.
func recoveryOf(t *testing.T, uri, name string, p place) *recovery {
	t.Helper()
	r := &recovery{T: t, place: p, db: client(t, uri).Database(name), opened: &openings{at: map[string]int{}}}
	r.writer = newOrderWriter(r.db, seeded(t))
	r.way = r.opened.client(t, uri).Database(name)
	switch p {
	case inPostgres:
		r.pool = pool(t)
		r.model = &postgresModel{t: t, pool: r.pool, way: r.pool}
		return r
	case inRedis:
		r.model = newRedisModel(t)
		return r
	case inElasticsearch:
		r.model = newElasticModel(t)
		return r
	}
	shared, err := serve.MongoDB(t.Context())
	must(t, err)
	r.sink = client(t, shared).Database(unique("sink_"))
	t.Cleanup(func() { _ = r.sink.Drop(context.Background()) })
	r.model = &mongoModel{t: t, db: r.sink, way: r.sink}
	return r
}

func (r *recovery) insert(n int) {
	r.Helper()
	if n > 0 {
		_, err := r.writer.orders.InsertMany(r.Context(), r.writer.many(n))
		must(r, err)
	}
}

// step makes n changes.
func (r *recovery) step(n int) {
	r.Helper()
	for range n {
		must(r, r.writer.step(r.Context()))
	}
}

// shapedBindings are what a shape consists of.
func shapedBindings[Tx any](s shape, totals projector.Adder[Tx, total], rows projector.Putter[Tx, mirrored], handles projector.Putter[Tx, holder]) []projector.Binding[Tx] {
	all := []projector.Binding[Tx]{projector.Mirror("orders", order.mirrored, rows), projector.Upsert("orders", order.holders, handles)}
	if s.rowsOnly {
		return all
	}
	return append(all, projector.Rollup("orders", func(o order) []total {
		sums := o.totals()
		for i := range sums {
			sums[i].Amount *= max(1, s.worth)
		}
		return sums
	}, totals))
}

func (r *recovery) runner(o projector.Options) (*projector.Runner, error) {
	if o.Logger == nil {
		o.Logger = quiet()
	}
	version := max(1, r.version)
	if r.place == inPostgres {
		return projector.New(r.way, postgres.New(r.pool), postgres.Projection{
			Name: orderPlace, Version: version, NoRebuild: r.noRebuild,
			Bindings: shapedBindings(r.shape, postgres.Table[total]{Name: "totals"}, postgres.Table[mirrored]{Name: "orders"}, postgres.Table[holder]{Name: "handles"}),
		}, o)
	}
	switch m := r.model.(type) {
	case *redisModel:
		return projector.New(r.way, redis.New(m.way), redis.Projection{
			Name: orderPlace, Version: version, NoRebuild: r.noRebuild, Bindings: shapedBindings(r.shape, redisTotals, redisMirror, redisHandles),
		}, o)
	case *elasticModel: // a Refresh does for the Rollup
		p := elasticsearch.Projection{Name: orderPlace, Version: version, NoRebuild: r.noRebuild, Bindings: elasticLedger.Bindings[:2:2]}
		if !r.rowsOnly {
			p.Bindings = append(p.Bindings, elasticSums(max(1, r.worth)))
		}
		return projector.New(r.way, m.sink(), p, o)
	}
	return projector.New(r.way, mongodb.New(r.sink), mongodb.Projection{
		Name: orderPlace, Version: version, NoRebuild: r.noRebuild,
		Bindings: shapedBindings(r.shape, mongodb.Collection[total]{Name: "totals"}, mongodb.Collection[mirrored]{Name: "orders"}, mongodb.Collection[holder]{Name: "handles"}),
	}, o)
}

// small is a reconciler whose rebuilds take some chunks.
var small = reconcile.Snapshot{ChunkRows: 40}

func (r *recovery) start(o projector.Options) *running {
	r.Helper()
	runner, err := r.runner(o)
	must(r, err)
	return run(r, runner)
}

// rebuilding runs with a reconciler.
func (r *recovery) rebuilding() *running {
	r.Helper()
	return r.start(projector.Options{Reconcile: small})
}

// rows is the model.
func (r *recovery) rows() orderRows {
	r.Helper()
	if r.place != inPostgres {
		rows, _, err := r.model.rows()
		must(r, err)
		rows.Balances = map[string][2]int64{} // the shapes have none, though sums of Elasticsearch look like it
		return rows
	}
	rows := newOrderRows()
	if !r.rowsOnly {
		for _, one := range selectAll[total](r, r.pool, "select grp, orders, amount from order_ledger.totals") {
			rows.Totals[one.Group] = one
		}
	}
	for _, one := range selectAll[mirrored](r, r.pool, "select id, grp, state, amount, handle from order_ledger.orders") {
		rows.Mirror[one.ID] = one
	}
	for _, one := range selectAll[holder](r, r.pool, "select handle, id, amount from order_ledger.handles") {
		rows.Handles[one.Handle] = one
	}
	return rows
}

// wanted is what the model should be: a fresh aggregation over the source.
func (r *recovery) wanted() orderRows {
	r.Helper()
	rows := computed(r, r.db)
	rows.Balances = map[string][2]int64{}
	if r.rowsOnly {
		rows.Totals = map[string]total{}
	}
	for group, sum := range rows.Totals {
		sum.Amount *= max(1, r.worth)
		rows.Totals[group] = sum
	}
	return rows
}

func (r *recovery) same() {
	r.Helper()
	if diff := cmp.Diff(r.wanted(), r.rows()); diff != "" {
		r.Fatalf("%s: the model differs from the source (-source +model):\n%.3000s", r.place, diff)
	}
}

// exact compares the model with the source, once it has caught up.
func (r *recovery) exact(g *running) {
	r.Helper()
	g.level(r.db)
	r.same()
}

// stored is the live generation's checkpoint.
func (r *recovery) stored() projector.Checkpoint {
	r.Helper()
	c, err := r.model.checkpoint(r.Context())
	must(r, err)
	return c
}

// live demands that a generation is the live one.
func (r *recovery) live(generation int64) {
	r.Helper()
	if c := r.stored(); c.Generation != generation {
		r.Fatalf("generation %d is live, not %d", c.Generation, generation)
	}
}

// untouched demands that neither checkpoint nor rows have changed, but for the term.
func (r *recovery) untouched(before projector.Checkpoint, rows orderRows) {
	r.Helper()
	now := r.stored()
	now.Term, now.Owner = before.Term, before.Owner
	if diff := cmp.Diff(fmt.Sprintf("%+v", before), fmt.Sprintf("%+v", now)); diff != "" {
		r.Errorf("the checkpoint has changed:\n%s", diff)
	}
	if diff := cmp.Diff(rows, r.rows()); diff != "" {
		r.Errorf("the rows have changed:\n%.3000s", diff)
	}
}

// begun is a model that was filled and is level, and whose runner was stopped.
func (r *recovery) begun() (stored projector.Checkpoint, rows orderRows) {
	r.Helper()
	g := r.rebuilding()
	r.exact(g)
	g.stop()
	return r.stored(), r.rows()
}

// openings counts how often change streams were asked for, by where they were to begin.
type openings struct {
	mu sync.Mutex
	at map[string]int
}

func openingAt(p projector.Position) string {
	if p.Token == nil {
		return fmt.Sprint(p.Time)
	}
	return p.Token.Lookup("_data").String()
}

// client is a client of the runner's own, whose change streams are counted.
func (o *openings) client(t testing.TB, uri string) *mongo.Client {
	t.Helper()
	c, err := mongo.Connect(options.Client().ApplyURI(uri).SetAppName(appName).SetHeartbeatInterval(500 * time.Millisecond).SetMonitor(&event.CommandMonitor{
		Started: func(_ context.Context, e *event.CommandStartedEvent) {
			stage, err := e.Command.LookupErr("pipeline", "0", "$changeStream")
			if e.CommandName != "aggregate" || err != nil {
				return
			}
			var p projector.Position
			var token struct {
				StartAfter           bson.Raw       `bson:"startAfter"`
				StartAtOperationTime bson.Timestamp `bson:"startAtOperationTime"`
			}
			if stage.Unmarshal(&token) == nil {
				p.Token, p.Time = token.StartAfter, token.StartAtOperationTime
				o.mu.Lock()
				defer o.mu.Unlock()
				o.at[openingAt(p)]++
			}
		},
	}))
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		must(t, c.Disconnect(ctx))
	})
	return c
}

func (o *openings) count(p projector.Position) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at[openingAt(p)]
}

// mostOpenings is how often a dead position may be asked for in a minute.
const mostOpenings = 5

// handful demands that a position which is lost was tried a few times only, in a test
// that takes less than a minute.
func (r *recovery) handful(dead projector.Position) {
	r.Helper()
	if n := r.opened.count(dead); n == 0 || n > mostOpenings {
		r.Errorf("a stream was asked for at the dead position %d times", n)
	}
}

// barrier holds a runner up at a point of the code.
type barrier struct {
	t       testing.TB
	reached chan struct{}
	release func()
}

// holdAt holds up whoever comes to the point first once skip have passed, until release is called.
func holdAt(t testing.TB, point fault.Point, skip int64) *barrier {
	released := make(chan struct{})
	b := &barrier{t: t, reached: make(chan struct{}), release: sync.OnceFunc(func() { close(released) })}
	var passed atomic.Int64
	fault.Global.OnReach(func(p fault.Point) {
		if p == point && passed.Add(1) == skip+1 {
			close(b.reached)
			<-released
		}
	})
	t.Cleanup(func() { b.release(); fault.Global.OnReach(nil) })
	return b
}

func (b *barrier) wait() {
	b.t.Helper()
	wait(b.t, "the runner comes to the point where it is held", b.reached)
}

// failing has a server fail commands of the runner.
type failing struct {
	t     testing.TB
	admin *mongo.Database
}

func failingOn(t testing.TB, uri string) failing {
	f := failing{t, client(t, uri).Database("admin")}
	t.Cleanup(func() {
		_ = f.admin.RunCommand(context.Background(), bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}})
	})
	return f
}

// set gives how often the fail point has been met before.
func (f failing) set(mode any, commands bson.A, data ...bson.E) (count int) {
	f.t.Helper()
	var reply struct{ Count int }
	must(f.t, f.admin.RunCommand(f.t.Context(), bson.D{
		{Key: "configureFailPoint", Value: "failCommand"},
		{Key: "mode", Value: mode},
		{Key: "data", Value: append(bson.D{{Key: "appName", Value: appName}, {Key: "failCommands", Value: commands}}, data...)},
	}).Decode(&reply))
	return reply.Count
}

// times fails the next n commands.
func (f failing) times(n int, command string, data ...bson.E) (met func()) {
	f.t.Helper()
	count := f.set(bson.D{{Key: "times", Value: n}}, bson.A{command}, data...)
	return func() {
		f.t.Helper()
		must(f.t, f.admin.RunCommand(f.t.Context(), bson.D{
			{Key: "waitForFailPoint", Value: "failCommand"}, {Key: "timesEntered", Value: count + n}, {Key: "maxTimeMS", Value: 30_000},
		}).Err())
	}
}

func code(n int) bson.E { return bson.E{Key: "errorCode", Value: n} }

// lossy is a server whose oplog rolls within seconds, with fail points. It writes an entry
// of its own into an idle oplog each second, rather than each ten: a position moves by them.
func lossy(t testing.TB) string {
	t.Helper()
	return throwaway(t, serve.MongodOptions{
		OplogMB: 8, SyncDelay: 1,
		Params: map[string]string{"expiredChangeStreamPreImageRemovalJobSleepSecs": "1", "enableTestCommands": "1", "periodicNoopIntervalSecs": "1"},
	}).URI()
}

// lose has the source lose everything up to now.
func (r *recovery) lose() {
	r.Helper()
	roll(r, r.db, operationTime(r, r.db))
}

// flood writes more than a stream reads ahead, and more than one reply has: the server's
// cursor stays behind.
func (r *recovery) flood() {
	r.Helper()
	for range 6 {
		docs := r.writer.many(500)
		for i, d := range docs {
			b, err := bson.Marshal(d)
			must(r, err)
			docs[i] = append(bson.D{{Key: "pad", Value: string(make([]byte, 8<<10))}}, fields(r, b)...)
		}
		_, err := r.writer.orders.InsertMany(r.Context(), docs)
		must(r, err)
	}
}

func fields(t testing.TB, b []byte) (d bson.D) {
	t.Helper()
	must(t, bson.Unmarshal(b, &d))
	return d
}

// The ways to lose history, each of which ends in a model that is rebuilt by itself and
// equals a fresh aggregation. (CASES B01, B03, B04, B05, B21, B25: a dead token that is
// sent again for ever; a loss that is swallowed; a start from now that leaves out what lay
// between; leftovers of documents deleted meanwhile.)
func TestHistoryLost(t *testing.T) {
	uri := lossy(t)
	for i, way := range []struct {
		name string
		lose func(t *testing.T, uri string, p place)
	}{
		{"while down", lostWhileDown},
		{"in the middle of the stream", lostMidStream},
		{"from an operation time", lostFromATime},
		{"again during the rebuild", lostAgain},
		{"three times in a row", lostThreeTimes},
		{"without a reconciler", lostWithout},
		{"of the retired generation", lostRetired},
		{"deleted meanwhile", lostDeletes},
		{"of the images", lostImages}, // the last: it changes the server
	} {
		sinks := []place{inMongoDB, inPostgres}
		if i%2 == 1 {
			slices.Reverse(sinks)
		}
		if sinks = sinks[:effort.Rounds(2)]; i < effort.Rounds(2) { // what matters is the same in every sink
			sinks = everySink
		}
		for _, p := range sinks {
			t.Run(way.name+" "+string(p), func(t *testing.T) { way.lose(t, uri, p) })
		}
	}
	t.Run("control without "+string(fault.TerminalCodes), func(t *testing.T) {
		without(t, fault.TerminalCodes)
		r := newRecovery(t, uri, inMongoDB, 100)
		dead, _ := r.begun()
		r.step(20)
		r.lose()
		g := r.rebuilding()
		until(t, 30*time.Second, "the dead position is tried again and again", func() bool { return r.opened.count(dead.Position) > mostOpenings })
		g.stop()
		r.live(dead.Generation)
	})
}

func lostWhileDown(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 200)
	dead, _ := r.begun()
	r.step(100) // inserts, updates and deletes
	r.lose()
	r.step(20)
	g := r.rebuilding()
	r.exact(g)
	r.live(dead.Generation + 1)
	if cause := r.stored().Rebuild; cause != nil {
		t.Errorf("the checkpoint still says that a rebuild fills it: %+v", cause)
	}
	r.step(20)
	r.exact(g)
	r.handful(dead.Position)
	g.stop()
	g = r.rebuilding() // goes on from the new position
	r.exact(g)
	r.live(dead.Generation + 1)
	g.stop()
}

// The sink is away for longer than the oplog lasts.
func lostMidStream(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 100)
	g := r.start(projector.Options{Reconcile: small, BufferBytes: 64 << 10})
	r.exact(g)
	generation := r.stored().Generation
	held := holdAt(t, fault.CommitBegin, 0)
	r.step(10)
	held.wait()
	r.flood()
	r.lose()
	held.release()
	until(t, 60*time.Second, "the model is rebuilt", func() bool { return r.stored().Generation == generation+1 })
	r.exact(g)
	g.stop()
}

// A checkpoint of which nothing was read yet is a time.
func lostFromATime(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 0)
	g := r.start(projector.Options{Reconcile: small, Start: projector.FromNow()})
	until(t, 30*time.Second, "the runner follows the source", func() bool { return g.Status().State == projector.Running })
	g.stop()
	dead := r.stored().Position
	if dead.Token != nil {
		t.Fatalf("a token was stored: %s", dead)
	}
	r.insert(50)
	r.step(50)
	r.lose()
	g = r.rebuilding()
	r.exact(g)
	r.live(2)
	r.handful(dead)
	g.stop()
}

// The rebuild's own stream is lost as well, once: the rebuild starts over.
func lostAgain(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 200)
	dead, _ := r.begun()
	r.step(50)
	r.lose()
	held := holdAt(t, fault.ChunkRead, 1)
	g := r.start(projector.Options{Reconcile: small, BufferBytes: 64 << 10})
	held.wait()
	r.flood()
	r.lose()
	held.release()
	until(t, 60*time.Second, "the model is rebuilt", func() bool { return r.stored().Generation > dead.Generation })
	r.exact(g)
	r.live(dead.Generation + 2) // the first one was given up
	g.stop()
}

// Three rebuilds in a row that lose what they need are an error, and the model is as
// before. When the source is well again, a start rebuilds it.
func lostThreeTimes(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 100)
	dead, rows := r.begun()
	r.step(20)
	f := failingOn(t, uri)
	f.set("alwaysOn", bson.A{"getMore"}, code(286))
	g := r.rebuilding()
	err := ends[*projector.RebuildError](t, g)
	if !errors.Is(err, projector.ErrHistoryLost) {
		t.Errorf("it is no ErrHistoryLost: %v", err)
	}
	if n := g.Status().StreamsOpened; n > 8 {
		t.Errorf("%d streams were opened", n)
	}
	r.untouched(dead, rows)
	f.set("off", bson.A{})
	g = r.rebuilding()
	r.exact(g)
	g.stop()
}

func lostWithout(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 100)
	dead, rows := r.begun()
	r.step(20)
	r.lose()
	for range 2 {
		g := r.start(projector.Options{Start: projector.FromNow()})
		if err := ends[*projector.HistoryLostError](t, g); err.Stored.String() != dead.Position.String() {
			t.Errorf("it names the stored position %s, not %s", err.Stored, dead.Position)
		}
		r.untouched(dead, rows)
	}
	// The same where the model can't be rebuilt, whatever the options say.
	r.noRebuild = true
	ends[*projector.HistoryLostError](t, r.start(projector.Options{Reconcile: small, Start: projector.FromNow()}))
	r.untouched(dead, rows)
	r.handful(dead.Position)
}

// A rollback to a generation that can't be caught up is an error; the live one goes on.
func lostRetired(t *testing.T, uri string, p place) {
	r := newRecovery(t, uri, p, 100)
	g := r.rebuilding()
	r.exact(g)
	generation := r.stored().Generation
	must(t, g.Rebuild(t.Context()))
	r.step(20)
	r.exact(g)
	r.lose()
	err := g.Rollback(t.Context())
	if _, ok := errors.AsType[*projector.RebuildError](err); !ok || !errors.Is(err, projector.ErrHistoryLost) {
		t.Errorf("the rollback ended with %v", err)
	}
	r.step(20)
	r.exact(g)
	r.live(generation + 1)
	g.stop()
}

// A hundred orders, of which seven are deleted while history is lost: 93 are left, in each
// mode, and the totals say so too.
func lostDeletes(t *testing.T, uri string, p place) {
	db := sourceOn(t, uri)
	createOrders(t, db)
	models := map[projector.Mode]*recovery{}
	for _, mode := range []projector.Mode{projector.Shadow, projector.Reset, projector.InPlace} {
		models[mode] = recoveryOf(t, uri, db.Name(), p)
	}
	models[projector.InPlace].rowsOnly = true
	writer := models[projector.Shadow].writer
	docs := writer.many(100)
	for i, d := range docs {
		o := d.(order)
		o.Group, o.State = fmt.Sprintf("g%d", i%4), "new"
		docs[i] = o
	}
	_, err := writer.orders.InsertMany(t.Context(), docs)
	must(t, err)
	before := map[projector.Mode]int64{}
	for mode, r := range models {
		c, _ := r.begun()
		before[mode] = c.Generation
		if n := len(r.rows().Mirror); n != 100 {
			t.Fatalf("there are %d rows", n)
		}
	}
	for id := range 7 {
		_, err := writer.orders.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: 10 * (id + 1)}})
		must(t, err)
	}
	roll(t, db, operationTime(t, db))
	for mode, r := range models {
		g := r.start(projector.Options{Reconcile: reconcile.Snapshot{Mode: mode, ChunkRows: 20}})
		r.exact(g)
		rows := r.rows()
		if n := len(rows.Mirror); n != 93 {
			t.Errorf("%s: there are %d rows, not 93", mode, n)
		}
		var sum int64
		for _, group := range rows.Totals {
			sum += group.Orders
		}
		if mode != projector.InPlace && sum != 93 {
			t.Errorf("%s: the groups have %d orders, not 93", mode, sum)
		}
		generation := before[mode]
		if mode == projector.Shadow {
			generation++
		}
		r.live(generation)
		g.stop()
	}
}

// Images that have expired are history lost, too.
func lostImages(t *testing.T, uri string, p place) {
	keep := func(seconds any) {
		admin(t, client(t, uri).Database("admin"), bson.D{{Key: "setClusterParameter", Value: bson.D{{Key: "changeStreamOptions", Value: bson.D{
			{Key: "preAndPostImages", Value: bson.D{{Key: "expireAfterSeconds", Value: seconds}}},
		}}}}})
	}
	r := newRecovery(t, uri, p, 100)
	before, _ := r.begun()
	r.insert(10)
	_, err := r.writer.orders.UpdateMany(t.Context(), bson.D{}, add("amount", 1))
	must(t, err)
	_, err = r.writer.orders.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: 5}})
	must(t, err)
	keep(1)
	defer keep("off")
	images := r.db.Client().Database("config").Collection("system.preimages")
	until(t, 60*time.Second, "the images expire", func() bool {
		n, err := images.CountDocuments(t.Context(), bson.D{})
		must(t, err)
		return n == 0
	})
	keep("off")
	g := r.rebuilding()
	r.exact(g)
	r.live(before.Generation + 1)
	g.stop()
}

// lostCodes are how a loss has shown in the field. (CASES B05)
var lostCodes = []struct {
	name string
	data []bson.E
}{
	{"ChangeStreamHistoryLost", []bson.E{code(286)}},
	{"ChangeStreamFatalError", []bson.E{code(280)}},
	{"CappedPositionLost", []bson.E{code(136)}},
	{"resume token not found", []bson.E{code(40576)}},
	{"resume point no longer in the oplog", []bson.E{code(40585)}},
	{"a label alone", []bson.E{code(2), {Key: "errorLabels", Value: bson.A{"NonResumableChangeStreamError"}}}},
}

// passingCodes are failures of servers and networks that are none.
var passingCodes = []struct {
	name string
	data bson.E
}{
	{"connection closed", bson.E{Key: "closeConnection", Value: true}},
	{"HostUnreachable", code(6)},
	{"CursorNotFound", code(43)},
	{"MaxTimeMSExpired", code(50)},
	{"NetworkTimeout", code(89)},
	{"ShutdownInProgress", code(91)},
	{"PrimarySteppedDown", code(189)},
	{"NotWritablePrimary", code(10107)},
	{"InterruptedAtShutdown", code(11600)},
}

// faultyStream is a runner whose stream is made to fail where it is opened or goes on.
type faultyStream struct {
	*recovery
	failing
	g      *running
	ambush *ambush
}

// newFaultyStream has a server with fail points.
func newFaultyStream(t *testing.T) *faultyStream {
	t.Helper()
	uri := throwaway(t, serve.MongodOptions{Params: map[string]string{"enableTestCommands": "1", "periodicNoopIntervalSecs": "1"}}).URI()
	r := newRecovery(t, uri, inMongoDB, 50)
	s := &faultyStream{recovery: r, failing: failingOn(t, uri), ambush: newAmbush(t)}
	s.g = r.rebuilding()
	r.exact(s.g)
	return s
}

// meets has the stream meet the error once.
func (s *faultyStream) meets(at string, data ...bson.E) {
	s.Helper()
	if at == "getMore" {
		met := s.times(1, "getMore", data...)
		s.insert(1) // or the reply would come late
		met()
		return
	}
	// When it is opened again, after it was broken.
	armed := make(chan func(), 1)
	s.ambush.at(fault.StreamReopens, func() { armed <- s.times(1, "aggregate", data...) })
	s.times(1, "getMore", bson.E{Key: "closeConnection", Value: true})
	s.insert(1)
	select {
	case met := <-armed:
		met()
	case <-time.After(30 * time.Second):
		s.Fatal("the stream was not opened again")
	}
}

// Each error that says that history is lost leads to one rebuild, where a stream is opened
// and where it goes on, and not to the same request again and again.
func TestHistoryLostCodes(t *testing.T) {
	s := newFaultyStream(t)
	// The first 280 may be about a large event: the stream is opened again and asks for
	// such to be split.
	generation, before := s.stored().Generation, s.g.Status().StreamsOpened
	s.meets("getMore", code(280))
	until(t, 30*time.Second, "the stream is opened again", func() bool { return s.g.Status().StreamsOpened > before })
	s.insert(1)
	s.exact(s.g)
	s.live(generation)
	for i, c := range lostCodes {
		at := []string{"aggregate", "getMore"}
		if i%2 == 1 {
			slices.Reverse(at)
		}
		for _, at := range at[:effort.Rounds(2)] {
			before, dead := s.g.Status(), s.stored().Position
			alive := s.opened.count(dead) // streams that were asked for while it was not lost
			s.meets(at, c.data...)
			generation++
			until(t, 30*time.Second, fmt.Sprintf("the model is rebuilt after %s at %s", c.name, at), func() bool { return s.stored().Generation == generation })
			s.exact(s.g)
			s.live(generation)
			if n := s.g.Status().StreamsOpened - before.StreamsOpened; n > 4 {
				t.Errorf("%s at %s: %d streams were opened", c.name, at, n)
			}
			if n := s.opened.count(dead) - alive; n > mostOpenings {
				t.Errorf("%s at %s: a stream was asked for %d times at the position that is lost", c.name, at, n)
			}
		}
	}
	s.g.stop()
}

// What passes leads to none.
func TestHistoryLostNotByWhatPasses(t *testing.T) {
	s := newFaultyStream(t)
	generation := s.stored().Generation
	for i, c := range passingCodes {
		for j := range effort.Rounds(2) {
			at := []string{"aggregate", "getMore"}[(i+j)%2]
			before := s.g.Status()
			s.meets(at, c.data)
			s.insert(1)
			s.exact(s.g)
			now := s.g.Status()
			if now.Checkpoint.Generation != generation || now.Rebuild != nil || now.Checkpoint.Term != before.Checkpoint.Term {
				t.Errorf("%s at %s led to %+v", c.name, at, now)
			}
			if now.Retries == before.Retries {
				t.Errorf("%s at %s was not met", c.name, at)
			}
		}
	}
	s.live(generation)
	s.g.stop()
}
