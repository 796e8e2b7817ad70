package integration_test

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// noLog keeps the client's log of lost connections out of the tests' output.
type noLog struct{}

func (noLog) Printf(context.Context, string, ...any) {}

func init() { goredis.SetLogger(noLog{}) }

// redisModel is a model of the orders in Redis.
type redisModel struct {
	t        testing.TB
	own, way *goredis.Client    // the test's own; the runner's
	server   *serve.RedisServer // which starts in a moment, so every model has one
}

// newRedisModel starts a server, which keeps what was written as far as appendfsync says.
func newRedisModel(t testing.TB) *redisModel {
	t.Helper()
	s, err := serve.StartRedis(t.Context(), serve.RedisOptions{Params: map[string]string{"appendfsync": "everysec"}})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return &redisModel{t: t, own: redisClient(t, s.URL()), way: redisClient(t, s.URL()), server: s}
}

func redisClient(t testing.TB, uri string) *goredis.Client {
	t.Helper()
	c, err := redisAt(uri)
	must(t, err)
	t.Cleanup(func() { must(t, c.Close()) })
	return c
}

func redisAt(uri string) (*goredis.Client, error) {
	o, err := goredis.ParseURL(uri)
	if err != nil {
		return nil, err
	}
	o.ContextTimeoutEnabled = true
	return goredis.NewClient(o), nil
}

var (
	redisTotals  = redis.Hash[total]{Name: "totals"}
	redisMirror  = redis.Hash[mirrored]{Name: "orders"}
	redisHandles = redis.Hash[holder]{Name: "handles"}
)

// redisLedger is orderLedger in Redis.
var redisLedger = redis.Projection{
	Name: orderPlace, Version: 1,
	Bindings: redis.Bindings{
		projector.On("orders", func(_ context.Context, tx *redis.Tx, changes []projector.Change[order]) error {
			handled.Add(1)
			sums, ids := posted(changes)
			for kind, sum := range sums {
				tx.Hash("balance_orders").Add(kind, sum[0])
				tx.Hash("balance_amounts").Add(kind, sum[1])
			}
			for _, id := range ids {
				tx.Hash("journal").Add(id, 1)
			}
			return nil
		}),
		projector.Rollup("orders", order.totals, redisTotals),
		projector.Mirror("orders", order.mirrored, redisMirror),
		projector.Upsert("orders", order.holders, redisHandles),
	},
}

func (m *redisModel) runner(source *mongo.Database, o projector.Options) (*projector.Runner, error) {
	return projector.New(source, redis.New(m.way), redisLedger, o)
}

func (m *redisModel) rows() (got orderRows, twice int64, err error) {
	ctx, got := m.t.Context(), newOrderRows()
	place, err := redis.Live(ctx, m.own, orderPlace)
	if err != nil {
		return got, 0, err
	}
	err = errors.Join(
		redisTotals.All(ctx, m.own, orderPlace, func(_ string, r total) error { got.Totals[r.Group] = r; return nil }),
		redisMirror.All(ctx, m.own, orderPlace, func(_ string, r mirrored) error { got.Mirror[r.ID] = r; return nil }),
		redisHandles.All(ctx, m.own, orderPlace, func(_ string, r holder) error { got.Handles[r.Handle] = r; return nil }),
	)
	numbers := func(name string) map[string]int64 {
		all := map[string]int64{}
		texts, wrong := m.own.HGetAll(ctx, place+":on:"+name).Result()
		err = errors.Join(err, wrong)
		for field, text := range texts {
			n, wrong := strconv.ParseInt(text, 10, 64)
			all[field], err = n, errors.Join(err, wrong)
		}
		return all
	}
	amounts := numbers("balance_amounts")
	for kind, n := range numbers("balance_orders") {
		if n != 0 || amounts[kind] != 0 {
			got.Balances[kind] = [2]int64{n, amounts[kind]}
		}
	}
	for _, times := range numbers("journal") {
		if times != 1 {
			twice++
		}
	}
	return got, twice, err
}

func (m *redisModel) checkpoint(ctx context.Context) (c projector.Checkpoint, err error) {
	place, err := m.own.Get(ctx, "{"+orderPlace+"}:live").Result()
	if errors.Is(err, goredis.Nil) {
		return c, nil
	}
	if err != nil {
		return c, err
	}
	_, generation, _ := strings.Cut(place, ":g")
	var found struct {
		Term     int64  `redis:"term"`
		Sequence int64  `redis:"sequence"`
		Body     string `redis:"body"`
	}
	if err := m.own.HGetAll(ctx, "{"+orderPlace+"}:checkpoint:"+generation).Scan(&found); err != nil || found.Body == "" {
		return c, err
	}
	c, err = projector.DecodeCheckpoint(orderPlace, []byte(found.Body))
	c.Term, c.Sequence = found.Term, found.Sequence
	return c, err
}

func (m *redisModel) forget() error {
	keys, err := m.own.Keys(m.t.Context(), "{"+orderPlace+"}:checkpoint:*").Result()
	if err != nil {
		return err
	}
	return m.own.Del(m.t.Context(), append(keys, "{"+orderPlace+"}:generations", "{"+orderPlace+"}:live")...).Err()
}

// The server is killed by SIGKILL in the middle of commits, among them such as take effect
// without an answer.
func TestRedisKilled(t *testing.T) {
	c := keep(t, inRedis, keeping{proxied: true})
	a := newAmbush(t)
	g := c.start(projector.Options{BatchChanges: 200})
	c.write()
	unknown := 0
	for round := range max(4, effort.Rounds(20)) {
		killed := make(chan struct{})
		kill := func() {
			if err := c.server.Kill(); err != nil {
				t.Error(err)
			}
			close(killed)
		}
		met := func() bool { return false }
		if round%2 == 0 {
			later := time.Duration(c.rng.Int64N(int64(3 * time.Millisecond)))
			a.at(fault.CommitSend, func() { time.AfterFunc(later, kill) })
		} else {
			met = c.unanswered(a, kill)
		}
		wait(t, "the server is killed", killed)
		c.goOn(20)
		must(t, c.server.Restart(t.Context()))
		c.commits(g, 2)
		if met() {
			unknown++
		}
		c.exact(g)
	}
	t.Logf("%d steps, %d retries, %d commits that took effect without an answer", c.steps.Load(), g.Status().Retries, unknown)
	g.stop()
	t.Run("control", func(t *testing.T) {
		without(t, fault.ReadBack, fault.FenceSequence)
		c := keep(t, inRedis, keeping{proxied: true})
		a := newAmbush(t)
		g := c.start(projector.Options{})
		c.step(50)
		c.exact(g)
		met := c.unanswered(a, func() {})
		c.nudge()
		until(t, time.Minute, "a commit takes effect without an answer", met)
		c.inexact(g)
	})
}

// A loss of power takes what appendfsync everysec has not brought to the disk yet. Rows and
// position go back together, under a runner that knows better.
func TestRedisPowerLost(t *testing.T) {
	c := keep(t, inRedis, keeping{})
	g := c.start(projector.Options{BatchChanges: 200})
	for range effort.Rounds(5) {
		c.step(100)
		c.exact(g)
		disk := filepath.Join(t.TempDir(), "disk")
		must(t, c.server.Stop())
		must(t, c.data.CopyData(disk))
		must(t, c.server.Restart(t.Context()))
		c.step(100)
		c.exact(g)
		before := c.stored()
		must(t, c.server.Kill())
		must(t, c.data.RestoreData(disk))
		must(t, c.server.Restart(t.Context()))
		if now := c.stored(); now.Sequence >= before.Sequence {
			t.Fatalf("sequence %d is stored, %d was before", now.Sequence, before.Sequence)
		}
		c.step(10)
		c.exact(g)
	}
	g.stop()
}

// Everything is gone, under a running projection and while none runs: it is built again.
// The control: without a reconciler, that is an error which says so, and no start from now.
func TestRedisFlushed(t *testing.T) {
	r := newRebuilder(t, inRedis, 2000)
	m := r.model.(*redisModel)
	g := r.start(projector.Options{})
	r.exact(g)
	for range max(2, effort.Rounds(5)) {
		stop := r.write()
		g.level(r.db)
		must(t, m.own.FlushAll(t.Context()).Err())
		time.Sleep(time.Duration(r.rng.Int64N(int64(100 * time.Millisecond)))) // and writing goes on
		stop()
		r.exact(g)

		g.stop()
		must(t, m.own.FlushAll(t.Context()).Err())
		for range 20 {
			must(t, r.writer.step(t.Context()))
		}
		g = r.start(projector.Options{})
		r.exact(g)
	}
	g.stop()

	t.Run("without a reconciler", func(t *testing.T) {
		c := keep(t, inRedis, keeping{})
		g := c.start(projector.Options{})
		c.step(50)
		c.exact(g)
		must(t, c.model.(*redisModel).own.FlushAll(t.Context()).Err())
		c.nudge()
		says(t, ends[*projector.CheckpointError](t, g), "it was removed while the projection ran")
		must(t, c.model.(*redisModel).own.FlushAll(t.Context()).Err())
		r, err := c.model.runner(c.way, c.options(projector.Options{}))
		must(t, err)
		says(t, ends[*projector.ConfigError](t, run(t, r)), "has documents, which FromNow would leave out")
	})
}

// With memory full and noeviction the server refuses every transaction, as a whole, until
// there is room.
func TestRedisFull(t *testing.T) {
	c := keep(t, inRedis, keeping{})
	m := c.model.(*redisModel)
	must(t, m.own.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
	g := c.start(projector.Options{BatchChanges: 200})
	c.write()
	for range effort.Rounds(5) {
		c.commits(g, 2)
		must(t, m.own.ConfigSet(t.Context(), "maxmemory", "1").Err())
		until(t, 30*time.Second, "the runner says that it retries", func() bool {
			c.alive(g)
			return g.Status().State == projector.Retrying
		})
		if err := g.Status().Err; err == nil || !strings.Contains(err.Error(), "OOM") {
			t.Errorf("it retries because of %v", err)
		}
		stored := c.stored()
		c.goOn(50)
		if now := c.stored(); now.Sequence != stored.Sequence {
			t.Errorf("with memory full the sequence went from %d to %d", stored.Sequence, now.Sequence)
		}
		must(t, m.own.ConfigSet(t.Context(), "maxmemory", "0").Err())
		c.exact(g)
	}
	g.stop()
}

// foreign is a model where somebody else has put a list where the next order's row belongs.
func foreign(t *testing.T) (c *kept, m *redisModel, key string, err error) {
	c = keep(t, inRedis, keeping{})
	m = c.model.(*redisModel)
	g := c.start(projector.Options{})
	c.step(50)
	c.exact(g)
	o := c.writer.fresh()
	o.State = "paid" // which has a row
	key = c.stored().Place + ":orders:" + strconv.FormatInt(o.ID, 10)
	must(t, m.own.RPush(t.Context(), key, "foreign").Err())
	_, err = c.writer.orders.InsertOne(t.Context(), o)
	must(t, err)
	return c, m, key, g.wait(30 * time.Second)
}

// A key of the model holds another type: the projection ends with an error that names it,
// nothing is written, and it goes on where it was once the key is gone.
func TestRedisForeignType(t *testing.T) {
	c, m, key, err := foreign(t)
	if err == nil || errors.Is(err, projector.ErrHistoryLost) || !strings.Contains(err.Error(), key) {
		t.Errorf("the runner ended with %T: %v", err, err)
	}
	must(t, m.own.Del(t.Context(), key).Err())
	c.step(20)
	g := c.start(projector.Options{})
	c.exact(g)
	g.stop()
	t.Run("control", func(t *testing.T) {
		without(t, fault.CheckTypes)
		_, _, _, err := foreign(t)
		if !errors.Is(err, projector.ErrHistoryLost) {
			t.Errorf("without the check nothing is damaged: %v", err)
		}
	})
}
