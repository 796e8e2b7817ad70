package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

func init() {
	roles["rebuild"] = func(ctx context.Context) error { return inChild(rebuildOrders(ctx)) }
}

// The slots of the page of a process that rebuilds.
const (
	rebuildSlot = iota // the rebuild's commit stage
	arrivedSlot        // it has come to where it is to be killed
	rebuiltSlot        // rebuilds that have ended
)

const liveChunk = 2000

// rebuildOrders is the process that is killed: it keeps a model of the orders and rebuilds
// it all the time.
func rebuildOrders(ctx context.Context) func(childSetup, *mongo.Database, *pgxpool.Pool) error {
	return func(s childSetup, db *mongo.Database, pool *pgxpool.Pool) error {
		p, unmap, err := openPage(s.Page)
		if err != nil {
			return err
		}
		defer unmap()
		var builder atomic.Uint64 // the rebuild's goroutine, as opposed to the one that keeps the live model
		passes := 0
		fault.Global.OnReach(func(at fault.Point) {
			if at == fault.ChunkRead || at == fault.SwitchBegin {
				builder.Store(goroutine())
			}
			if !slices.Contains(pagePoints, at) || goroutine() != builder.Load() {
				return
			}
			p.note(rebuildSlot, at)
			target, inFlight := where(s.Point)
			if at != target {
				return
			}
			if passes++; passes == s.Passes {
				p.note(arrivedSlot, at)
				if !inFlight {
					select {} // the live model goes on
				}
			}
		})
		model, err := s.model(pool)
		if err != nil {
			return err
		}
		r, err := model.runner(db, projector.Options{
			Reconcile: reconcile.Snapshot{ChunkRows: liveChunk}, BatchChanges: 500, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
			RefreshInterval: 5 * time.Second, // a recomputation reads all orders
		})
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
		defer stop()
		ended := make(chan error, 2)
		go func() { ended <- r.Run(ctx) }()
		go func() {
			for {
				if err := r.Rebuild(ctx); err != nil {
					if ctx.Err() == nil {
						ended <- fmt.Errorf("the rebuild has failed: %w", err)
					}
					return
				}
				p.note(rebuiltSlot, fault.SwitchDone)
			}
		}()
		return <-ended
	}
}

// liveWriters change orders, each in a way of its own. The _ids are spread, so that what is
// inserted is anywhere before and beyond a rebuild's frontier.
type liveWriters struct {
	db     *mongo.Database
	orders *mongo.Collection
	seed   uint64
	keep   int64        // about how many orders there are
	next   atomic.Int64 // number of the next order
	gate   sync.RWMutex // held for each step, and by whoever wants them to wait
	steps  atomic.Int64
	failed atomic.Int64
}

// The orders that a poller looks at. The number of the fixed ones never changes, nor does
// the sum of the purses; the counter only grows.
const (
	fixedOrders = 500
	purseSum    = 1_000_000
)

var counterOrder, purses = spread(fixedOrders + 1), [2]int64{0, 1 << 40} // before all others, and after them

const firstOrder = fixedOrders + 2 // of those that change

// spread is the _id of the nth order: no two have one.
func spread(n int64) int64 { return 1 + int64(uint32(n)*2654435761) }

func fixedIDs() (ids []int64) {
	for n := range fixedOrders {
		ids = append(ids, spread(int64(n+1)))
	}
	return ids
}

func newLiveWriters(t *testing.T, db *mongo.Database, rng *rand.Rand, documents int) *liveWriters {
	t.Helper()
	createOrders(t, db)
	w := &liveWriters{db: db, orders: db.Collection("orders"), seed: rng.Uint64(), keep: int64(documents)}
	w.next.Store(firstOrder)
	special := []any{
		order{ID: counterOrder, Group: "counter", State: "counter", Handle: "counter"},
		order{ID: purses[0], Group: "purses", State: "purse", Amount: purseSum},
		order{ID: purses[1], Group: "purses", State: "purse"},
	}
	for _, id := range fixedIDs() {
		special = append(special, order{ID: id, Group: "fixed", State: "fixed", Amount: 1})
	}
	_, err := w.orders.InsertMany(t.Context(), special)
	must(t, err)
	for documents > 0 {
		n := min(documents, 10_000)
		_, err := w.orders.InsertMany(t.Context(), w.many(rng, n), options.InsertMany().SetOrdered(false))
		must(t, err)
		documents -= n
	}
	return w
}

// write has four writers at work until the test t ends.
func (w *liveWriters) write(t *testing.T) {
	var ended atomic.Bool
	var all sync.WaitGroup
	for i, step := range []func(context.Context, *rand.Rand) error{w.single, w.bulk, w.transactions, w.handles} {
		rng := rand.New(rand.NewPCG(w.seed, uint64(i)))
		all.Go(func() {
			for !ended.Load() {
				w.gate.RLock()
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				err := step(ctx, rng)
				cancel()
				w.gate.RUnlock()
				if err == nil {
					w.steps.Add(1)
					time.Sleep(20 * time.Millisecond) // or all else would wait for the processors
				} else if w.failed.Add(1); !mongo.IsDuplicateKeyError(err) {
					time.Sleep(10 * time.Millisecond) // there is an election
				}
			}
		})
	}
	t.Cleanup(func() { ended.Store(true); all.Wait() })
}

func (w *liveWriters) fresh(rng *rand.Rand) order {
	n := w.next.Add(1) - 1
	o := order{ID: spread(n), Group: fmt.Sprintf("g%d", rng.IntN(8)), State: []string{"new", "paid", "shipped", "hidden"}[rng.IntN(4)], Amount: rng.Int64N(1000)}
	if rng.IntN(3) > 0 {
		o.Handle = fmt.Sprintf("handle-%d", n)
	}
	return o
}

func (w *liveWriters) many(rng *rand.Rand, n int) []any {
	docs := make([]any, n)
	for i := range docs {
		docs[i] = w.fresh(rng)
	}
	return docs
}

// some are the _ids of n orders, most of which are there.
func (w *liveWriters) some(rng *rand.Rand, n int) bson.D {
	ids := bson.A{}
	next := w.next.Load()
	for range n {
		ids = append(ids, spread(next-1-rng.Int64N(min(next-firstOrder, w.keep))))
	}
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
}

func (w *liveWriters) update(ctx context.Context, filter, update bson.D) error {
	_, err := w.orders.UpdateOne(ctx, filter, update)
	return err
}

// single changes documents one by one, and counts.
func (w *liveWriters) single(ctx context.Context, rng *rand.Rand) (err error) {
	switch one := w.some(rng, 1); rng.IntN(10) {
	case 0, 1:
		_, err = w.orders.InsertOne(ctx, w.fresh(rng))
	case 2:
		_, err = w.orders.DeleteOne(ctx, one)
	case 3:
		o := w.fresh(rng)
		_, err = w.orders.ReplaceOne(ctx, one, bson.D{{Key: "group", Value: o.Group}, {Key: "state", Value: o.State}, {Key: "amount", Value: o.Amount}, {Key: "handle", Value: fmt.Sprintf("handle-%d", o.ID)}})
	case 4:
		err = w.update(ctx, one, unset("group"))
	case 5, 6:
		err = w.update(ctx, one, set("group", fmt.Sprintf("g%d", rng.IntN(8))))
	case 7:
		err = w.update(ctx, one, set("state", "hidden"))
	default:
		err = w.update(ctx, one, add("amount", rng.Int64N(100)-50))
	}
	return errors.Join(err, w.update(ctx, bson.D{{Key: "_id", Value: counterOrder}}, add("amount", 1)))
}

// bulk changes many documents by one command.
func (w *liveWriters) bulk(ctx context.Context, rng *rand.Rand) (err error) {
	switch rng.IntN(4) {
	case 0:
		_, err = w.orders.InsertMany(ctx, w.many(rng, 10))
	case 1:
		_, err = w.orders.DeleteMany(ctx, w.some(rng, 10))
	default:
		_, err = w.orders.UpdateMany(ctx, w.some(rng, 10), bson.D{{Key: "$inc", Value: bson.D{{Key: "amount", Value: 7}}}, {Key: "$set", Value: bson.D{{Key: "state", Value: "paid"}}}})
	}
	return err
}

// transactions change several documents at once, those of the purses most of all.
func (w *liveWriters) transactions(ctx context.Context, rng *rand.Rand) error {
	n := rng.Int64N(100)
	from, to, gone := w.some(rng, 1), w.some(rng, 1), w.some(rng, 3)
	return inTransaction(ctx, w.db, func(ctx context.Context) error {
		if _, err := w.orders.InsertMany(ctx, w.many(rng, 3)); err != nil {
			return err
		}
		if _, err := w.orders.DeleteMany(ctx, gone); err != nil {
			return err
		}
		for _, u := range []struct {
			filter bson.D
			amount int64
		}{{bson.D{{Key: "_id", Value: purses[0]}}, -n}, {from, -n}, {bson.D{{Key: "_id", Value: purses[1]}}, n}, {to, n}} {
			if err := w.update(ctx, u.filter, add("amount", u.amount)); err != nil {
				return err
			}
		}
		return nil
	})
}

// handles hands unique handles from one order to another, or has two orders swap them.
func (w *liveWriters) handles(ctx context.Context, rng *rand.Rand) error {
	some := append(w.some(rng, 12), bson.E{Key: "handle", Value: bson.D{{Key: "$exists", Value: true}}})
	none := append(w.some(rng, 12), bson.E{Key: "handle", Value: bson.D{{Key: "$exists", Value: false}}})
	swaps := rng.IntN(2) == 0
	return inTransaction(ctx, w.db, func(ctx context.Context) error {
		var two, free []order
		for _, q := range []struct {
			filter bson.D
			found  *[]order
		}{{some, &two}, {none, &free}} {
			cur, err := w.orders.Find(ctx, q.filter, options.Find().SetLimit(2))
			if err != nil {
				return err
			}
			if err := cur.All(ctx, q.found); err != nil {
				return err
			}
		}
		if len(two) < 2 || len(free) < 1 {
			return nil
		}
		one, other := bson.D{{Key: "_id", Value: two[0].ID}}, bson.D{{Key: "_id", Value: two[1].ID}}
		updates := []struct{ filter, update bson.D }{
			{one, unset("handle")}, {other, set("handle", two[0].Handle)}, {one, set("handle", two[1].Handle)},
		}
		if !swaps {
			updates = updates[:1]
			updates = append(updates, struct{ filter, update bson.D }{bson.D{{Key: "_id", Value: free[0].ID}}, set("handle", two[0].Handle)})
		}
		for _, u := range updates {
			if err := w.update(ctx, u.filter, u.update); err != nil {
				return err
			}
		}
		return nil
	})
}

// glimpse is what a reader sees of a model at one moment.
type glimpse struct {
	Generation int64 // 0: no model was there yet
	Term       int64
	Position   bson.Timestamp
	Fixed      [2]int64 // how many there are, by the mirror and by the totals
	Purses     [2]int64 // their sum, by the same
	Counter    [4]int64 // by the mirror, the totals, the balances, and by its handle
}

// broken says what is wrong with a glimpse, or with its coming after another one.
func (g glimpse) broken(was glimpse) string {
	c := g.Counter
	switch {
	case g.Generation == 0:
		if was.Generation > 0 {
			return "the model is gone"
		}
		return ""
	case g.Generation < was.Generation, g.Term < was.Term, g.Position.Before(was.Position), c[0] < was.Counter[0]:
		return "it went back"
	case g.Fixed != [2]int64{fixedOrders, fixedOrders}, g.Purses != [2]int64{purseSum, purseSum}:
		return "it is not whole"
	case c[1] != c[0], c[2] != c[0], c[3] != c[0]:
		return "its parts are of different moments"
	}
	return ""
}

// glimpsed is a model of which a reader sees a moment.
type glimpsed interface {
	orderModel
	glimpse(ctx context.Context) (glimpse, error)
}

func (m *postgresModel) glimpse(ctx context.Context) (g glimpse, err error) {
	var body *string
	var term *int64
	g.Fixed, g.Purses, g.Counter = [2]int64{}, [2]int64{}, [4]int64{}
	err = m.pool.QueryRow(ctx, `select
	(select term from tidemark.checkpoints where projection = 'order_ledger' and phase = 'live'),
	(select body from tidemark.checkpoints where projection = 'order_ledger' and phase = 'live'),
	(select count(*) from order_ledger.orders where id = any($2) and grp = 'fixed'), coalesce((select orders from order_ledger.totals where grp = 'fixed'), 0),
	(select coalesce(sum(amount), 0)::bigint from order_ledger.orders where id = any($3)), coalesce((select amount from order_ledger.totals where grp = 'purses'), 0),
	coalesce((select amount from order_ledger.orders where id = $1), -1), coalesce((select amount from order_ledger.totals where grp = 'counter'), -1),
	coalesce((select amount from order_ledger.balances where kind = 'group counter'), -1), coalesce((select amount from order_ledger.handles where handle = 'counter'), -1)`, counterOrder, fixedIDs(), purses[:]).
		Scan(&term, &body, &g.Fixed[0], &g.Fixed[1], &g.Purses[0], &g.Purses[1], &g.Counter[0], &g.Counter[1], &g.Counter[2], &g.Counter[3])
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "42P01" { // no such table
		return glimpse{}, nil
	}
	if err != nil {
		return g, err
	}
	if body == nil || term == nil {
		return g, errors.New("there is a model and no checkpoint")
	}
	c, err := projector.DecodeCheckpoint(orderPlace, []byte(*body))
	g.Generation, g.Term, g.Position = c.Generation, *term, c.Position.Time
	return g, err
}

func (m *mongoModel) glimpse(ctx context.Context) (g glimpse, err error) {
	sess, err := m.db.Client().StartSession()
	if err != nil {
		return g, err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	if err := sess.StartTransaction(options.Transaction().SetReadConcern(readconcern.Snapshot())); err != nil {
		return g, err
	}
	defer func() { _ = sess.AbortTransaction(context.WithoutCancel(ctx)) }()
	ctx = mongo.NewSessionContext(ctx, sess)
	mirror, err := mongodb.Live(ctx, m.db, orderPlace, "orders")
	if errors.Is(err, mongodb.ErrNotBuilt) || err != nil && strings.Contains(err.Error(), "has no model of projection") {
		return glimpse{}, nil
	}
	if err != nil {
		return g, err
	}
	var stored struct {
		Term int64
		Body string
	}
	err = m.db.Collection("tidemark.checkpoints").FindOne(ctx, bson.D{{Key: "projection", Value: orderPlace}, {Key: "phase", Value: "live"}}).Decode(&stored)
	if err != nil {
		return g, err
	}
	c, err := projector.DecodeCheckpoint(orderPlace, []byte(stored.Body))
	if err != nil {
		return g, err
	}
	g.Generation, g.Term, g.Position = c.Generation, stored.Term, c.Position.Time
	type line struct{ Orders, Amount int64 }
	one := func(name string, id any) (l line) {
		if err != nil {
			return l
		}
		var coll *mongo.Collection
		if coll, err = mongodb.Live(ctx, m.db, orderPlace, name); err == nil {
			err = coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&l)
		}
		if errors.Is(err, mongo.ErrNoDocuments) {
			l, err = line{-1, -1}, nil
		}
		return l
	}
	total := func(group string) line { return one("totals", bson.D{{Key: "grp", Value: group}}) }
	g.Fixed[1], g.Purses[1] = total("fixed").Orders, total("purses").Amount
	g.Purses[0] = one("orders", purses[0]).Amount + one("orders", purses[1]).Amount
	g.Counter = [4]int64{
		one("orders", counterOrder).Amount, total("counter").Amount, one("balances", "group counter").Amount,
		one("handles", bson.D{{Key: "handle", Value: "counter"}}).Amount,
	}
	if err == nil {
		g.Fixed[0], err = mirror.CountDocuments(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: fixedIDs()}}}, {Key: "grp", Value: "fixed"}})
	}
	return g, err
}

// redisGlimpse reads all of it by one script, as readers of several targets do.
var redisGlimpse = goredis.NewScript(`
local place = redis.call('GET', KEYS[1])
if not place then return false end
local checkpoint = '{order_ledger}:checkpoint:' .. string.match(place, '%d+$')
local function amount(key) return tonumber(redis.call('HGET', place .. key, 'amount') or -1) end
local out = {redis.call('HGET', checkpoint, 'body'), redis.call('HGET', checkpoint, 'term'), 0,
	tonumber(redis.call('HGET', place .. ':totals:fixed', 'orders') or 0),
	amount(':orders:' .. ARGV[1]) + amount(':orders:' .. ARGV[2]), amount(':totals:purses'),
	amount(':orders:' .. ARGV[3]), amount(':totals:counter'), tonumber(redis.call('HGET', place .. ':on:balance_amounts', 'group counter') or -1), amount(':handles:counter')}
for i = 4, #ARGV do
	if redis.call('HGET', place .. ':orders:' .. ARGV[i], 'grp') == 'fixed' then out[3] = out[3] + 1 end
end
return out
`)

func (m *redisModel) glimpse(ctx context.Context) (g glimpse, err error) {
	args := []any{purses[0], purses[1], counterOrder}
	for _, id := range fixedIDs() {
		args = append(args, id)
	}
	found, err := redisGlimpse.Run(ctx, m.own, []string{"{" + orderPlace + "}:live"}, args...).Slice()
	if errors.Is(err, goredis.Nil) {
		return g, nil
	}
	if err != nil {
		return g, err
	}
	body, ok := found[0].(string)
	if !ok {
		return g, errors.New("there is a model and no checkpoint")
	}
	c, err1 := projector.DecodeCheckpoint(orderPlace, []byte(body))
	term, err2 := strconv.ParseInt(fmt.Sprint(found[1]), 10, 64)
	g.Generation, g.Term, g.Position = c.Generation, term, c.Position.Time
	n := func(i int) int64 { return found[i].(int64) }
	g.Fixed, g.Purses, g.Counter = [2]int64{n(2), n(3)}, [2]int64{n(4), n(5)}, [4]int64{n(6), n(7), n(8), n(9)}
	return g, errors.Join(err1, err2)
}

// Elasticsearch has no reads of several documents at one moment, and its models are ahead
// of their checkpoint at times: what a reader sees of one generation by one search is whole
// where it does not change, and no document goes back.
func (m *elasticModel) glimpse(ctx context.Context) (g glimpse, err error) {
	var found elasticHits
	err = m.ask(ctx, http.MethodPost, m.alias(orderPlace, "orders")+"/_search?size=1&track_total_hits=true", map[string]any{"query": map[string]any{"term": map[string]string{"grp": "fixed"}}}, &found)
	if errors.Is(err, errMissing) {
		return g, nil
	}
	if err == nil && len(found.Hits.Hits) > 0 {
		_, number, _ := strings.Cut(strings.TrimPrefix(found.Hits.Hits[0].Index, m.prefix+orderPlace), "-g")
		number, _, _ = strings.Cut(number, "-")
		g.Generation, err = strconv.ParseInt(number, 10, 64)
	}
	if err != nil || g.Generation == 0 {
		return g, err
	}
	amount := func(target, id string) (orders, amount int64) {
		var doc struct {
			Source struct{ Orders, Amount int64 } `json:"_source"`
		}
		err = errors.Join(err, m.ask(ctx, http.MethodGet, m.alias(orderPlace, target)+"/_doc/"+url.PathEscape(id), nil, &doc))
		return doc.Source.Orders, doc.Source.Amount
	}
	fixed, _ := amount("sums", "group fixed")
	_, counter := amount("orders", strconv.FormatInt(counterOrder, 10))
	g.Fixed, g.Purses = [2]int64{found.Hits.Total.Value, fixed}, [2]int64{purseSum, purseSum}
	g.Counter = [4]int64{counter, counter, counter, counter}
	c, err2 := m.checkpoint(ctx)
	g.Term, g.Position = c.Term, c.Position.Time
	return g, errors.Join(err, err2)
}

// polling reads a model some fifty times a second.
type polling struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu          sync.Mutex
	seen, empty int
	failed      int
	err         error
	last        glimpse
	generations map[int64]int // how often each was seen
	broken      []string
}

func poll(t *testing.T, read func(context.Context) (glimpse, error)) *polling {
	ctx, cancel := context.WithCancel(context.Background())
	p := &polling{cancel: cancel, generations: map[int64]int{}}
	p.wg.Go(func() {
		for ctx.Err() == nil {
			rctx, cancel := context.WithTimeout(ctx, 20*time.Second)
			g, err := read(rctx)
			cancel()
			if ctx.Err() != nil {
				return
			}
			p.mu.Lock()
			switch {
			case err != nil:
				p.failed, p.err = p.failed+1, err
			default:
				if wrong := g.broken(p.last); wrong != "" && len(p.broken) < 10 {
					p.broken = append(p.broken, fmt.Sprintf("%s: %+v after %+v", wrong, g, p.last))
				}
				if p.last = g; g.Generation == 0 {
					p.empty++
				} else {
					p.seen++
					p.generations[g.Generation]++
				}
			}
			p.mu.Unlock()
			time.Sleep(20 * time.Millisecond) // or all else would wait for the processors
		}
	})
	t.Cleanup(p.stop)
	return p
}

func (p *polling) reads() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen
}

func (p *polling) seenGenerations() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.generations)
}

func (p *polling) sawBroken() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.broken) > 0
}

func (p *polling) stop() {
	p.cancel()
	p.wg.Wait()
}

// A process that rebuilds its model again and again, while four writers change the source,
// is killed by SIGKILL at every step of a rebuild, and the source elects another primary in
// the middle. The model equals the source afterwards, counters and unique keys as well, and
// at every moment a reader sees the old model or the new one, whole, and none that is older
// than what it has seen before.
func TestRebuildLive(t *testing.T) {
	t.Parallel()
	set := throwaway(t, serve.MongodOptions{Members: 3}) // with a cache that holds it all
	w := newLiveWriters(t, sourceOn(t, set.URI()), seeded(t), 5_000*effort.Rounds(40))
	sinks := everySink
	if effort.Rounds(2) < 2 { // one transactional sink and one other, by chance
		sinks = []place{everySink[rand.IntN(2)], everySink[2+rand.IntN(2)]}
	}
	for _, p := range sinks {
		t.Run(string(p), func(t *testing.T) { rebuildLive(t, set, w, p) })
	}
}

// The control: a rebuild that clears the model and fills it again is seen to be under way.
func TestRebuildLivePoller(t *testing.T) {
	db := source(t)
	newLiveWriters(t, db, seeded(t), 2000)
	p := pool(t)
	m := &postgresModel{t: t, pool: p, way: p}
	r, err := m.runner(db, projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: 100, Mode: projector.Reset}, Logger: quiet()})
	must(t, err)
	g := run(t, r)
	g.level(db)
	readers := poll(t, m.glimpse)
	until(t, time.Minute, "the model is read", func() bool { return readers.reads() > 0 })
	for n := 0; n < 10 && !readers.sawBroken(); n++ {
		must(t, g.Rebuild(t.Context()))
	}
	readers.stop()
	if len(readers.broken) == 0 {
		t.Errorf("%d reads have seen nothing of it: they prove nothing", readers.seen)
	} else {
		t.Logf("a reader saw this: %s", readers.broken[0])
	}
}

// liveTargets are where a rebuild is killed: between a chunk's read and its commit, in the
// commit, and before, in and after the switch, which ends the first of them.
var liveTargets = []fault.Point{
	fault.ChunkRead, fault.CommitSend, fault.SwitchBegin, inSwitch, fault.SwitchDone,
	fault.HandlerEnd, fault.ChunkRead, fault.CommitSend, fault.CommitBegin, fault.CommitAnswer,
	fault.HandlerBegin, fault.CommitSend, fault.ChunkRead, fault.HandlerEnd, fault.CommitSend,
	fault.CommitAnswer, fault.ChunkRead, fault.CommitBegin, fault.CommitSend, fault.ChunkRead,
}

// inSwitch is while the sink switches.
const inSwitch fault.Point = "in the switch"

// where is the hook's point of a target, and whether what follows it is on its way to a
// server, so that a process had better be killed a little later.
func where(target fault.Point) (at fault.Point, inFlight bool) {
	if target == inSwitch {
		return fault.SwitchBegin, true
	}
	return target, target == fault.CommitSend
}

func rebuildLive(t *testing.T, set *serve.Mongod, w *liveWriters, p place) {
	rng, db, kills := seeded(t), w.db, max(3, effort.Rounds(20))
	page, path := newPage(t)
	setup := childSetup{MongoDB: set.URI(), Database: db.Name(), Page: path}
	var model glimpsed
	uri := ""
	switch p {
	case inPostgres:
		uri = postgresDSN(t)
		model = &postgresModel{t: t, pool: poolOn(t, uri)}
	case inRedis:
		m := newRedisModel(t)
		uri, model = m.server.URL(), m
	case inElasticsearch:
		m := newElasticModel(t)
		uri, model = m.url, m
	default:
		at, err := serve.MongoDB(t.Context())
		must(t, err)
		m := client(t, at).Database(unique("model_"))
		t.Cleanup(func() { _ = m.Drop(context.Background()) })
		uri, model = at, &mongoModel{t: t, db: m}
	}
	setup.keeps(p, model, uri)
	w.write(t)
	began := time.Now()
	readers := poll(t, model.glimpse)
	elections := &shaken{ordering: &ordering{t: t, db: db}, set: set}
	deaths := map[fault.Point]int{}
	for n := range kills {
		setup.Point, setup.Passes = liveTargets[n%len(liveTargets)], 1
		switch setup.Point {
		case fault.SwitchBegin, inSwitch, fault.SwitchDone:
		default:
			setup.Passes += rng.IntN(min(10, int(w.keep)/liveChunk))
		}
		page.reset()
		enough := w.steps.Load() + 20 // also after an election
		until(t, time.Minute, "the writers go on", func() bool { return w.steps.Load() >= enough })
		c := startChild(t, "rebuild", setup)
		if n == kills/2 {
			elections.stepDown(false)
		}
		until(t, 15*time.Minute, "the rebuild comes to "+string(setup.Point), func() bool {
			c.alive(t)
			_, there := page.last(arrivedSlot)
			return there > 0
		})
		if _, inFlight := where(setup.Point); inFlight {
			time.Sleep(time.Duration(rng.Int64N(int64(2 * time.Millisecond))))
		}
		c.kill()
		at, _ := page.last(rebuildSlot)
		_, whole := page.last(rebuiltSlot)
		deaths[at]++
		t.Logf("kill %d: at %s, the %dth time, after %q, with %d rebuilds ended, %d steps; %s", n+1, setup.Point, setup.Passes, at, whole, w.steps.Load(), time.Since(began).Round(time.Millisecond))
	}
	setup.Point = ""
	page.reset()
	c := startChild(t, "rebuild", setup)
	until(t, 15*time.Minute, "a rebuild ends, and readers have seen enough to prove something", func() bool {
		c.alive(t)
		_, n := page.last(rebuiltSlot)
		return n > 0 && readers.seenGenerations() > 1 && readers.reads() >= 10*kills
	})
	t.Logf("a rebuild has ended; %s", time.Since(began).Round(time.Millisecond))
	w.gate.Lock() // the source is still
	defer w.gate.Unlock()
	diff := ""
	for range 2 { // a step that failed for the writer may have been still under way on the server
		mark := operationTime(t, db)
		_, err := w.orders.InsertOne(t.Context(), w.fresh(rng))
		must(t, err)
		until(t, 2*time.Minute, "the model catches up", func() bool {
			c.alive(t)
			stored, err := model.checkpoint(t.Context())
			must(t, err)
			return stored.Settled && stored.Position.Time.After(mark)
		})
		rows, twice, err := model.rows()
		must(t, err)
		diff = ""
		if want := computed(t, db); !reflect.DeepEqual(want, rows) { // which is much faster than Diff
			diff = cmp.Diff(want, rows)
		}
		if twice > 0 {
			diff += fmt.Sprintf("%d changes or documents were applied more than once", twice)
		}
		if diff == "" {
			break
		}
	}
	if diff != "" {
		t.Errorf("after %d kills the model differs from the source (-source +model):\n%.5000s", kills, diff)
	}
	// In good order: MongoDB keeps a killed client's transaction for a minute, and so a drop
	// of the database waiting.
	must(t, c.Process.Signal(syscall.SIGTERM))
	if out := c.end(t, time.Minute); !c.ProcessState.Success() {
		t.Errorf("the child ended with %s:\n%s", c.ProcessState, out)
	}
	readers.stop()
	t.Logf("%d documents, %d kills %v in %s; %d steps of the writers, %d failed", w.keep, kills, deaths, time.Since(began).Round(time.Second), w.steps.Load(), w.failed.Load())
	t.Logf("%d reads of the model, of %d generations, %d before there was one; %d reads failed, the last with %v",
		readers.seen, len(readers.generations), readers.empty, readers.failed, readers.err)
	for _, b := range readers.broken {
		t.Errorf("a reader saw a model that never was: %s", b)
	}
}
