package integration_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// says fails the test where an error's text lacks one of the words.
func says(t testing.TB, err error, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(fmt.Sprint(err), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// A server that can't be reached is named, with what to look at.
func TestBadInputNoServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	addr := l.Addr().String()
	must(t, l.Close())
	f := newThings(t)
	soon := projector.Options{ConnectTimeout: 500 * time.Millisecond}

	nowhere := *f
	nowhere.db = client(t, "mongodb://"+addr+"/?replicaSet=rs0").Database("d")
	e := ends[*projector.ConnectError](t, run(t, nowhere.runner(mirror("bad"), soon)))
	if e.Server != "source" {
		t.Errorf("it names the %s", e.Server)
	}
	says(t, e, "address", addr)

	nowhere = *f
	nowhere.pool = poolOn(t, "postgres://u:secret@"+addr+"/none?sslmode=disable")
	e = ends[*projector.ConnectError](t, run(t, nowhere.runner(mirror("bad"), soon)))
	if e.Server != "sink" {
		t.Errorf("it names the %s", e.Server)
	}
	says(t, e, "address", strings.Split(addr, ":")[1])
	if strings.Contains(e.Error(), "secret") {
		t.Errorf("it tells the password: %v", e)
	}
}

// A database or a user that the sink does not have is not waited for.
func TestBadInputNoDatabase(t *testing.T) {
	f := newThings(t)
	config := f.pool.Config().ConnConfig
	f.pool = poolOn(t, fmt.Sprintf("postgres://%s@%s:%d/nosuch?sslmode=disable", config.User, config.Host, config.Port))
	says(t, ends[*projector.SinkError](t, f.run(mirror("bad"))), "nosuch")
}

// A user without the right to read the source is told which right is missing.
func TestBadInputNoRight(t *testing.T) {
	m := throwaway(t, serve.MongodOptions{Auth: true})
	f := newThingsOn(t, sourceOn(t, m.AdminURI()), pool(t))
	uri, err := m.CreateUser(t.Context(), "guest", "secret", bson.D{{Key: "role", Value: "readWrite"}, {Key: "db", Value: "elsewhere"}})
	must(t, err)
	guest := *f
	guest.db = client(t, uri).Database(f.db.Name())
	e := ends[*projector.ConfigError](t, guest.run(mirror("bad")))
	says(t, e, f.db.Name(), "grantRolesToUser", "read")

	wrong := *f
	wrong.db = client(t, strings.Replace(uri, "secret", "guessed", 1)).Database(f.db.Name())
	if e := ends[*projector.SourceError](t, wrong.run(mirror("bad"))); strings.Contains(e.Error(), "guessed") {
		t.Errorf("it tells the password: %v", e)
	}

	// The right to read is enough: nothing more is asked of the source.
	uri, err = m.CreateUser(t.Context(), "reader", "secret", bson.D{{Key: "role", Value: "read"}, {Key: "db", Value: f.db.Name()}})
	must(t, err)
	reader := *f
	reader.db = client(t, uri).Database(f.db.Name())
	g := reader.run(mirror("good"))
	f.add(3)
	g.level(reader.db)
	f.same("good")
	// One that is taken away while the stream runs ends it, and says what is missing.
	admin(t, f.db, bson.D{{Key: "revokeRolesFromUser", Value: "reader"}, {Key: "roles", Value: bson.A{bson.D{{Key: "role", Value: "read"}, {Key: "db", Value: f.db.Name()}}}}})
	says(t, ends[*projector.SourceError](t, g), "grantRolesToUser")
}

// Collections that can't be followed are all named at once, each with what to do.
// (CASES B23: images missing where they are needed.)
func TestBadInputCollections(t *testing.T) {
	f := newThings(t)
	must(t, f.db.CreateCollection(t.Context(), "plain"))
	must(t, f.db.CreateView(t.Context(), "view", "things", mongo.Pipeline{}))
	must(t, f.db.CreateCollection(t.Context(), "series", options.CreateCollection().SetTimeSeriesOptions(options.TimeSeries().SetTimeField("at"))))
	p := postgres.Projection{Name: "bad", Version: 1}
	for _, coll := range []string{"plain", "missing", "view", "series"} {
		p.Bindings = append(p.Bindings, projector.Rollup(coll, thing.sums, postgres.Table[sumRow]{Name: coll}))
	}
	e := ends[*projector.ConfigError](t, f.run(p))
	if len(e.Faults) != 4 {
		t.Errorf("%d faults: %v", len(e.Faults), e)
	}
	says(t, e, `collMod: "plain"`, `createCollection("missing"`, `"view" is a view`, `"series" is a timeseries`)
	// A plain mirror by look-up needs no images.
	g := f.run(mirror("good", projector.Lookup()))
	f.add(1)
	g.level(f.db)
	f.same("good")
	g.stop()
}

type floating struct {
	Name  string  `row:"name,key"`
	Total float64 `row:"total,sum"`
}

// Everything that is wrong with a projection by itself comes in one error, from New.
func TestBadInputProjections(t *testing.T) {
	f := newThings(t)
	counts := postgres.Table[sumRow]{Name: "counts"}
	_, err := projector.New(f.db, postgres.New(f.pool), postgres.Projection{
		Name: "Bad Name", Version: 0,
		Bindings: postgres.Bindings{
			projector.Rollup("things", thing.sums, counts),
			projector.Rollup("others", thing.sums, counts),
			projector.Rollup("things", func(thing) []floating { return nil }, postgres.Table[floating]{Name: "floats"}),
			projector.Mirror[thing, thingRow]("things", nil, postgres.Table[thingRow]{Name: "nofunc"}),
			projector.Mirror("system.users", thing.row, postgres.Table[thingRow]{Name: "users"}),
			{},
		},
	}, projector.Options{BatchChanges: -1, IdleInterval: -time.Second})
	var config *projector.ConfigError
	if !errors.As(err, &config) {
		t.Fatalf("got %T: %v", err, err)
	}
	t.Log(err)
	says(t, err, "Name", "Version", "write to one target", "sums of floats", "the function is nil", "system.users", "binding 5 is empty",
		"Options.Start", "Options.BatchChanges", "Options.IdleInterval")
	if len(config.Faults) != 10 {
		t.Errorf("%d faults, not 10", len(config.Faults))
	}
	if _, err := projector.New[*postgres.Tx](nil, nil, mirror("bad"), projector.Options{}); !errors.As(err, &config) || len(config.Faults) != 3 {
		t.Errorf("without source, sink and start: %v", err)
	}
}

// A document that does not fit the handler's type stops the projection before it, with
// all its neighbours applied; a handler that takes it goes on from there. (CASES B63.)
func TestBadInputDocument(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("bad"))
	f.add(10)
	_, err := f.coll().InsertOne(t.Context(), bson.D{{Key: "_id", Value: "odd"}, {Key: "n", Value: "eleven"}})
	must(t, err)
	f.add(10)
	e := ends[*projector.PoisonError](t, g)
	if e.Key != "odd" || e.Op != projector.Insert || e.Namespace.String() != f.db.Name()+".things" || e.Projection != "bad" {
		t.Errorf("it says %+v", e)
	}
	says(t, e, "odd", "key n", "string")
	if n := len(f.rows("bad")); n != 10 {
		t.Errorf("there are %d rows, not the 10 before it", n)
	}
	if at := f.checkpoint("bad").Position.Time; !at.Before(e.At.Time) {
		t.Errorf("the checkpoint at %v is not before the change at %v", at, e.At)
	}
	// Mending the document is not enough, since its insert is still in the stream.
	_, err = f.coll().UpdateByID(t.Context(), "odd", set("n", 11))
	must(t, err)
	if again := ends[*projector.PoisonError](t, f.run(mirror("bad"))); again.Key != "odd" {
		t.Errorf("after a restart it names %s", again.Key)
	}
	type lenient struct {
		Name string        `bson:"name"`
		N    bson.RawValue `bson:"n"`
	}
	p := mirror("bad")
	p.Bindings[0] = projector.Mirror("things", func(d lenient) (thingRow, bool) {
		n, _ := d.N.AsInt64OK()
		return thingRow{Name: d.Name, N: n}, true
	}, postgres.Table[thingRow]{Name: "things"})
	g = f.run(p)
	g.level(f.db)
	f.same("bad")
	g.stop()
}

// handling is a projection whose handler runs h for each change and counts them.
func handling(h func(projector.Change[thing]) error) postgres.Projection {
	return postgres.Projection{
		Name: "bad", Version: 1,
		Setup: func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.Exec(ctx, "create table seen (id text primary key)")
			return err
		},
		Bindings: postgres.Bindings{projector.On("things", projector.Each(func(_ context.Context, tx *postgres.Tx, c projector.Change[thing]) error {
			if err := h(c); err != nil {
				return err
			}
			tx.Queue("insert into seen values ($1)", projector.KeyText(c.Key))
			return nil
		}))},
	}
}

// Of a thousand changes the handler's or the sink's refusal of one is pinned on that one,
// wherever it is, alone or inside a source transaction; everything before its group is
// applied and nothing after. (CASES B45, B63; B75: a value that the sink refuses.)
func TestBadInputHandlers(t *testing.T) {
	boom := errors.New("boom")
	refuse := map[string]func(projector.Change[thing]) error{
		"error": func(projector.Change[thing]) error { return fmt.Errorf("handle: %w", boom) },
		"panic": func(projector.Change[thing]) error { panic(boom) },
		"nil":   func(c projector.Change[thing]) error { _ = c.Before.N; return nil },
	}
	for name, h := range refuse {
		for _, inTxn := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, transaction %v", name, inTxn), func(t *testing.T) {
				f := newThings(t)
				f.add(480)
				write := func(ctx context.Context) error {
					for i := 480; i < 520; i++ {
						if _, err := f.coll().InsertOne(ctx, bson.D{{Key: "_id", Value: int64(i)}, {Key: "n", Value: i}}); err != nil {
							return err
						}
					}
					return nil
				}
				if inTxn {
					must(t, inTransaction(t.Context(), f.db, write))
				} else {
					must(t, write(t.Context()))
				}
				f.add(480)
				pick := func(c projector.Change[thing]) error {
					if projector.KeyText(c.Key) == "500" {
						return h(c)
					}
					return nil
				}
				g := f.run(handling(pick))
				e := ends[*projector.PoisonError](t, g)
				var panicked *projector.PanicError
				if e.Key != "500" || errors.Is(e, boom) != (name != "nil") || errors.As(e, &panicked) != (name != "error") {
					t.Errorf("it says %v", e)
				}
				if panicked != nil && !strings.Contains(string(panicked.Stack), "badinput_test.go") {
					t.Errorf("its stack does not lead here: %s", panicked.Stack)
				}
				want := map[bool]int{false: 500, true: 480}[inTxn]
				if n := selectOne[int](t, f.pool, "select count(*) from bad.seen"); n != want {
					t.Errorf("%d changes are applied, not the %d before its group", n, want)
				}
				g = f.run(handling(func(projector.Change[thing]) error { return nil }))
				g.level(f.db)
				if n := selectOne[int](t, f.pool, "select count(*) from bad.seen"); n != 1000 {
					t.Errorf("with the handler mended %d changes are applied", n)
				}
				g.stop()
			})
		}
	}
	t.Run("value that the sink refuses", func(t *testing.T) {
		f := newThings(t)
		f.add(5)
		_, err := f.coll().InsertOne(t.Context(), bson.D{{Key: "_id", Value: "nul"}, {Key: "name", Value: "a\x00b"}})
		must(t, err)
		f.add(5)
		e := ends[*projector.PoisonError](t, f.run(mirror("bad")))
		if e.Key != "nul" {
			t.Errorf("it names %s", e.Key)
		}
		says(t, e, "name")
		if n := len(f.rows("bad")); n != 5 {
			t.Errorf("there are %d rows, not the 5 before it", n)
		}
	})
}

// Code that does not fit the stored checkpoint is refused, and says how it differs; the
// code that wrote it goes on. (CASES B08.)
func TestBadInputChangedProjection(t *testing.T) {
	f := newThings(t)
	withImages(t, f.db, "others")
	g := f.run(mirror("bad"))
	f.add(5)
	g.level(f.db)
	g.stop()
	before := f.stored("bad")
	for name, c := range map[string]struct {
		change func(*postgres.Projection)
		says   string
	}{
		"version": {func(p *postgres.Projection) { p.Version = 2 }, "Version 2"},
		"binding": {func(p *postgres.Projection) { p.Bindings = append(p.Bindings, rollupOf("x").Bindings...) }, "rollup into sums"},
		"collection": {func(p *postgres.Projection) {
			p.Bindings = append(p.Bindings, projector.Rollup("others", thing.sums, postgres.Table[sumRow]{Name: "s"}))
		}, `"others" is new`},
		"lookup": {func(p *postgres.Projection) { *p = mirror("bad", projector.Lookup()) }, "mirror by lookup"},
	} {
		t.Run(name, func(t *testing.T) {
			p := mirror("bad")
			c.change(&p)
			says(t, ends[*projector.MismatchError](t, f.run(p)), c.says, "rebuil")
			if now := f.stored("bad"); now != before {
				t.Errorf("the checkpoint has changed to %v", now)
			}
		})
	}
	f.add(5)
	g = f.run(mirror("bad"))
	g.level(f.db)
	f.same("bad")
	g.stop()
}

// A client-wide timeout, which the driver applies to every operation, does not end a
// quiet stream.
func TestBadInputShortClientTimeout(t *testing.T) {
	f := newThings(t)
	uri, err := serve.MongoDB(t.Context())
	must(t, err)
	hasty, err := mongo.Connect(options.Client().ApplyURI(uri).SetTimeout(500 * time.Millisecond))
	must(t, err)
	t.Cleanup(func() { must(t, hasty.Disconnect(context.Background())) })
	impatient := *f
	impatient.db = hasty.Database(f.db.Name())
	g := impatient.run(mirror("patient"))
	f.add(1)
	g.level(f.db)
	// Idle for four such timeouts: the source's clock, as the stream's empty replies
	// tell it, shows that it is read on.
	began := time.Now()
	until(t, 30*time.Second, "the stream is idle for 2 s", func() bool { return time.Since(began) > 2*time.Second })
	f.add(1)
	g.level(f.db)
	f.same("patient")
	if s := g.Status(); s.StreamsOpened != 1 || s.Retries != 0 {
		t.Errorf("%d streams were opened, %d retries, %v", s.StreamsOpened, s.Retries, s.Err)
	}
	g.stop()
}
