package integration_test

import (
	"context"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/internal/chaos"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// proxied is a proxy in front of a PostgreSQL server, and a pool of one connection
// through it, which the test that cuts and holds it knows to be the commit's.
func proxied(t testing.TB, dsn string) (*chaos.Proxy, *pgxpool.Pool) {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := chaos.NewProxy(u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			t.Error(err)
		}
	})
	u.Host = proxy.Addr()
	config, err := pgxpool.ParseConfig(u.String())
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 1
	p, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return proxy, p
}

// ambush does something the next time that the code comes to a point, once, on the
// goroutine that comes there first.
type ambush struct {
	mu    sync.Mutex
	point fault.Point
	do    func()
}

func newAmbush(t testing.TB) *ambush {
	a := new(ambush)
	fault.Global.OnReach(func(at fault.Point) {
		a.mu.Lock()
		do := a.do
		if do == nil || a.point != at {
			a.mu.Unlock()
			return
		}
		a.do = nil
		a.mu.Unlock()
		do()
	})
	t.Cleanup(func() { fault.Global.OnReach(nil) })
	return a
}

func (a *ambush) at(p fault.Point, do func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.point, a.do = p, do
}

// freeze is an ambush that keeps the goroutine at the point, until it is thawed.
func (a *ambush) freeze(t testing.TB, p fault.Point) *frozen {
	f := &frozen{arrived: make(chan struct{}), wake: make(chan struct{})}
	a.at(p, func() { close(f.arrived); <-f.wake })
	t.Cleanup(f.thaw)
	return f
}

type frozen struct {
	arrived, wake chan struct{}
	once          sync.Once
}

func (f *frozen) thaw() { f.once.Do(func() { close(f.wake) }) }

// wait waits for what a test expects to happen.
func wait(t testing.TB, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		t.Fatalf("not within 30 s: %s", what)
	}
}

// hit is a document of the source that is counted.
type hit struct {
	ID   int64  `bson:"_id"`
	Page string `bson:"page"`
	N    int64  `bson:"n"`
}

type hits struct {
	Page string `row:"page,key"`
	Docs int64  `row:"docs,sum"`
	N    int64  `row:"n,sum"`
}

func (h hit) count() []hits { return []hits{{h.Page, 1, h.N}} }

// style is how a projection of the hits writes: what it has sent before its COMMIT.
type style string

const (
	queued style = "queued" // nothing: all of it goes in one round trip
	opened style = "opened" // increments one by one, the transaction open
	copied style = "copied" // increments, and rows by COPY
)

// copyRows is how many rows the copied style writes for a hit of the page "copied".
const copyRows = 5_000

// projection counts hits per page into hits.hits, so that whatever is applied twice,
// or not at all, shows.
func (s style) projection() postgres.Projection {
	p := postgres.Projection{Name: "hits", Version: 1}
	if s == queued {
		p.Bindings = postgres.Bindings{projector.Rollup("hits", hit.count, postgres.Table[hits]{Name: "hits"})}
		return p
	}
	p.Setup = func(ctx context.Context, tx *postgres.Tx) error {
		_, err := tx.Exec(ctx, `create table hits (page text primary key, docs bigint not null, n bigint not null)`)
		if err == nil {
			_, err = tx.Exec(ctx, `create table copies (id bigint, text text)`)
		}
		return err
	}
	count := func(ctx context.Context, tx *postgres.Tx, h *hit, sign int64) error {
		if h == nil {
			return nil
		}
		_, err := tx.Exec(ctx, `insert into hits as h values ($1, $2, $3)
on conflict (page) do update set docs = h.docs + excluded.docs, n = h.n + excluded.n`, h.Page, sign, sign*h.N)
		return err
	}
	p.Bindings = postgres.Bindings{projector.On("hits", projector.Each(func(ctx context.Context, tx *postgres.Tx, c projector.Change[hit]) error {
		if err := count(ctx, tx, c.Before, -1); err != nil {
			return err
		}
		if err := count(ctx, tx, c.After, 1); err != nil || s != copied || c.After == nil || c.After.Page != "copied" {
			return err
		}
		i := 0
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"copies"}, []string{"id", "text"}, pgx.CopyFromFunc(func() ([]any, error) {
			if i++; i > copyRows {
				return nil, nil
			}
			return []any{c.After.ID, "some text that is long enough to make a COPY of a few megabytes out of some ten thousand rows of it"}, nil
		}))
		return err
	}))}
	return p
}

// counting is a source of hits, and the database that they are counted in.
type counting struct {
	t    testing.TB
	db   *mongo.Database
	dsn  string
	pool *pgxpool.Pool // the test's own
	next int64
}

func newCounting(t testing.TB) *counting {
	t.Helper()
	return newCountingOn(t, postgresDSN(t))
}

func newCountingOn(t testing.TB, dsn string) *counting {
	t.Helper()
	c := &counting{t: t, db: source(t), dsn: dsn, next: 1}
	c.pool = poolOn(t, c.dsn)
	withImages(t, c.db, "hits")
	return c
}

// runner is a runner of the hits on a pool.
func (c *counting) runner(p postgres.Projection, pool *pgxpool.Pool, o projector.Options) *projector.Runner {
	c.t.Helper()
	o.Start = projector.FromNow()
	if o.Logger == nil {
		o.Logger = quiet()
	}
	r, err := projector.New(c.db, postgres.New(pool), p, o)
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

// begun waits until a runner has stored where it begins.
func (c *counting) begun(g *running) *running {
	c.t.Helper()
	until(c.t, 30*time.Second, "the runner follows the source", func() bool { return g.Status().State == projector.Running })
	return g
}

// insert adds n hits of a page in one source transaction, so that they are one commit;
// a # in the page's name makes it a page for each.
func (c *counting) insert(page string, n int) {
	c.t.Helper()
	docs := make([]any, n)
	for i := range docs {
		docs[i] = hit{c.next, strings.ReplaceAll(page, "#", strconv.Itoa(i)), c.next}
		c.next++
	}
	err := inTransaction(c.t.Context(), c.db, func(ctx context.Context) error {
		_, err := c.db.Collection("hits").InsertMany(ctx, docs)
		return err
	})
	if err != nil {
		c.t.Fatal(err)
	}
}

// warm lets a runner make every kind of commit once, which prepares its statements:
// from here on a commit of the queued style is a single round trip.
func (c *counting) warm(g *running) {
	c.t.Helper()
	for range 2 {
		c.insert("warm", 3)
		c.insert("gone", 1)
		g.level(c.db)
		for _, change := range []func() error{
			func() error {
				_, err := c.db.Collection("hits").UpdateMany(c.t.Context(), bson.D{{Key: "page", Value: "warm"}}, add("n", 1))
				return err
			},
			func() error {
				_, err := c.db.Collection("hits").DeleteMany(c.t.Context(), bson.D{{Key: "page", Value: "gone"}})
				return err
			},
		} {
			if err := change(); err != nil {
				c.t.Fatal(err)
			}
			g.level(c.db)
		}
	}
	if diff := c.difference(); diff != "" {
		c.t.Fatalf("before any fault (-source +model):\n%s", diff)
	}
}

// difference is empty where the counts are what the documents say.
func (c *counting) difference() string {
	c.t.Helper()
	cur, err := c.db.Collection("hits").Find(c.t.Context(), bson.D{})
	if err != nil {
		c.t.Fatal(err)
	}
	var docs []hit
	if err := cur.All(c.t.Context(), &docs); err != nil {
		c.t.Fatal(err)
	}
	want, got := map[string]hits{}, map[string]hits{}
	for _, d := range docs {
		sum := want[d.Page]
		want[d.Page] = hits{d.Page, sum.Docs + 1, sum.N + d.N}
	}
	for _, r := range selectAll[hits](c.t, c.pool, "select page, docs, n from hits.hits where docs <> 0 or n <> 0") {
		got[r.Page] = r
	}
	return cmp.Diff(want, got)
}

// sequence is the stored number of commits.
func (c *counting) sequence() int64 {
	c.t.Helper()
	return selectOne[int64](c.t, c.pool, "select sequence from tidemark.checkpoints where projection = 'hits'")
}
