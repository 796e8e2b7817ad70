package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func TestMain(m *testing.M) {
	time.Local = In("Pacific/Auckland").zone // of the process, which must not matter
	code := m.Run()
	if err := errors.Join(serve.Close(), goleak.Find()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// shops are zones, and the moments at which their clocks change. In two of them the clocks
// go forward at midnight, so that a day begins at one.
var shops = map[string][]time.Time{
	"Europe/Berlin":     {at("2024-03-31T01:00:00Z"), at("2024-10-27T01:00:00Z")},
	"America/Sao_Paulo": {at("2018-11-04T03:00:00Z"), at("2019-02-17T02:00:00Z")},
	"Asia/Beirut":       {at("2022-03-26T22:00:00Z"), at("2022-10-29T21:00:00Z")},
}

func at(text string) time.Time {
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		panic(err)
	}
	return t
}

// sums are the rows of both targets, by day.
type sums struct {
	Summed    map[string]Summed
	Refreshed map[string]Refreshed
}

// models are where the revenue can be kept, and how it is read there.
var models = map[string]func(context.Context, *mongo.Database) (sums, error){
	"postgres": sumsInPostgres,
	"mongodb":  sumsInMongoDB,
}

// The changes of the clocks are what they are taken for.
func TestClocksChange(t *testing.T) {
	for zone, changes := range shops {
		for _, change := range changes {
			_, before := change.Add(-time.Millisecond).In(In(zone).zone).Zone()
			_, after := change.In(In(zone).zone).Zone()
			if before == after {
				t.Errorf("in %s the clocks don't change at %s", zone, change)
			}
		}
	}
	for _, zone := range []string{"America/Sao_Paulo", "Asia/Beirut"} {
		if begin := shops[zone][0].In(In(zone).zone); begin.Hour() != 1 || begin.Add(-time.Millisecond).Day() == begin.Day() {
			t.Errorf("in %s the day does not begin at one, but at %s", zone, begin)
		}
	}
}

// Orders around the changes of the clocks are written, back-dated, moved, changed and
// deleted, while the projection is stopped and started: both targets have, day by day,
// what the server adds up by its own knowledge of the zone. So they do when they have been
// rebuilt.
func TestRevenueEqualsTheSource(t *testing.T) {
	for sink, read := range models {
		for zone, changes := range shops {
			t.Run(sink+" "+zone, func(t *testing.T) {
				db := servers(t, sink)
				createOrders(t, db)
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				w := &writer{t: t, orders: db.Collection("orders"), random: rand.New(rand.NewPCG(seed, 0)), times: around36(changes)} //nolint:gosec // no secret
				equal := func() {
					t.Helper()
					want := aggregation(t, db, zone)
					eventually(t, func() error {
						got, err := read(t.Context(), db)
						if diff := cmp.Diff(want, got); err == nil && diff != "" {
							err = fmt.Errorf("the model (+) is not the source (-):\n%.3000s", diff)
						}
						return err
					})
				}

				half := len(w.times) / 2
				w.insert(w.times[:half])
				stop := start(t, func(ctx context.Context) error { return run(ctx, db.Name(), sink, In(zone)) })
				w.insert(w.times[half:])
				equal()
				w.change(100)
				stop() // while what was written last may not be committed, and days wait to be recomputed
				w.change(100)
				stop = start(t, func(ctx context.Context) error { return run(ctx, db.Name(), sink, In(zone)) })
				equal()
				stop()

				runner := runner(t, db, sink, In(zone))
				stop = start(t, runner.Run)
				w.change(20)
				if err := runner.Rebuild(t.Context()); err != nil {
					t.Fatal(err)
				}
				eventually(t, func() (err error) {
					if generation := runner.Status().Checkpoint.Generation; generation < 3 { // the first load made the second
						err = fmt.Errorf("the model is generation %d: it was not rebuilt", generation)
					}
					return err
				})
				equal()
				stop()
			})
		}
	}
}

func TestFaultsAreNamed(t *testing.T) {
	for sink := range models {
		db := servers(t, sink)
		err := run(t.Context(), db.Name(), sink, Shop)
		if err == nil || !strings.Contains(err.Error(), `db.createCollection("orders", {changeStreamPreAndPostImages: {enabled: true}})`) {
			t.Errorf("%s, without the collection: %v", sink, err)
		}
	}
	if err := run(t.Context(), "shop", "mysql", Shop); err == nil || !strings.Contains(err.Error(), `no sink "mysql"`) {
		t.Errorf("without a sink: %v", err)
	}
}

// A day of which the last order goes has no row, and one whose orders are worth nothing, or
// less, has one.
func TestRecompute(t *testing.T) {
	db := servers(t, "mongodb")
	createOrders(t, db)
	noon := at("2024-03-31T12:00:00Z")
	_, err := db.Collection("orders").InsertMany(t.Context(), []any{
		bson.D{{Key: "placed", Value: noon}, {Key: "cents", Value: -5}},
		bson.D{{Key: "placed", Value: noon.Add(time.Hour)}, {Key: "cents", Value: -7}},
		bson.D{{Key: "cents", Value: 1}}, // not placed yet
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := Shop.Recompute(t.Context(), db, []string{"2024-03-31", "2024-03-30", "1999-12-31"})
	if diff := cmp.Diff(map[string]Refreshed{"2024-03-31": {Orders: 2, Cents: -12, Largest: -5}}, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for _, placed := range []time.Time{{}, time.UnixMilli(1 << 48), time.UnixMilli(-1 << 48)} {
		if days := Shop.Of(Order{Placed: placed}); len(days) > 0 {
			t.Errorf("an order that is placed at %s has the days %v", placed, days)
		}
	}
}

// runner is the program's, to be told to rebuild.
func runner(t *testing.T, db *mongo.Database, sink string, days Calendar) *projector.Runner {
	t.Helper()
	o := projector.Options{Reconcile: reconcile.Snapshot{ChunkRows: 40}}
	var r *projector.Runner
	var err error
	if sink == "mongodb" {
		r, err = projector.New(db, mongodb.New(db), InMongoDB(days), o)
	} else {
		pool, poolErr := pgxpool.New(t.Context(), os.Getenv("POSTGRES_DSN"))
		if poolErr != nil {
			t.Fatal(poolErr)
		}
		t.Cleanup(pool.Close)
		r, err = projector.New(db, postgres.New(pool), InPostgres(days), o)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// servers gives the program its servers, with databases of the test's own. It returns
// the one to follow.
func servers(t *testing.T, sink string) *mongo.Database {
	t.Helper()
	source, err := serve.MongoDB(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	client, err := mongo.Connect(options.Client().ApplyURI(source))
	if err != nil {
		t.Fatal(err)
	}
	db := client.Database("rollup_" + bson.NewObjectID().Hex())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := errors.Join(db.Drop(ctx), client.Disconnect(ctx)); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("MONGODB_URI", source)
	if sink == "postgres" {
		t.Setenv("POSTGRES_DSN", createPostgres(t, db.Name()))
	}
	return db
}

// createPostgres creates a database whose sessions are in a far zone, and returns its
// connection string.
func createPostgres(t *testing.T, name string) string {
	t.Helper()
	admin, err := serve.Postgres(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), admin)
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{"create database %s", "alter database %s set timezone to 'America/Anchorage'"} {
		if _, err := conn.Exec(t.Context(), fmt.Sprintf(statement, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_, err := conn.Exec(ctx, "drop database "+name+" with (force)")
		if err := errors.Join(err, conn.Close(ctx)); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(admin)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}

func createOrders(t *testing.T, db *mongo.Database) {
	t.Helper()
	images := bson.D{{Key: "enabled", Value: true}}
	err := db.CreateCollection(t.Context(), "orders", options.CreateCollection().SetChangeStreamPreAndPostImages(images))
	if err != nil {
		t.Fatal(err)
	}
}

// start runs the command, or a runner; stop ends it as a signal does.
func start(t *testing.T, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stopped := false
	stop = func() {
		if cancel(); stopped {
			return
		}
		stopped = true
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

func sumsInPostgres(ctx context.Context, _ *mongo.Database) (got sums, err error) {
	conn, err := pgx.Connect(ctx, os.Getenv("POSTGRES_DSN"))
	if err != nil {
		return got, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	got = sums{map[string]Summed{}, map[string]Refreshed{}}
	rows, err := conn.Query(ctx, "select day, orders, cents from daily_revenue.summed")
	if err != nil {
		return got, err
	}
	var s Summed
	_, err = pgx.ForEachRow(rows, []any{&s.Day, &s.Orders, &s.Cents}, func() error { got.Summed[s.Day] = s; return nil })
	if err != nil {
		return got, err
	}
	rows, err = conn.Query(ctx, "select _id, orders, cents, largest from daily_revenue.refreshed")
	if err != nil {
		return got, err
	}
	var day string
	var r Refreshed
	_, err = pgx.ForEachRow(rows, []any{&day, &r.Orders, &r.Cents, &r.Largest}, func() error { got.Refreshed[day] = r; return nil })
	return got, err
}

func sumsInMongoDB(ctx context.Context, db *mongo.Database) (got sums, err error) {
	got = sums{map[string]Summed{}, map[string]Refreshed{}}
	var summed []struct {
		Key struct {
			Day string `bson:"day"`
		} `bson:"_id"`
		Orders, Cents int64
	}
	var refreshed []struct {
		Day                    string `bson:"_id"`
		Orders, Cents, Largest int64
	}
	for name, rows := range map[string]any{"summed": &summed, "refreshed": &refreshed} {
		live, err := mongodb.Live(ctx, db, "daily_revenue", name)
		if err != nil {
			return got, err
		}
		cur, err := live.Find(ctx, bson.D{})
		if err != nil {
			return got, err
		}
		if err := cur.All(ctx, rows); err != nil {
			return got, err
		}
	}
	for _, s := range summed {
		got.Summed[s.Key.Day] = Summed{s.Key.Day, s.Orders, s.Cents}
	}
	for _, r := range refreshed {
		got.Refreshed[r.Day] = Refreshed{r.Orders, r.Cents, r.Largest}
	}
	return got, nil
}

// aggregation is what the rows should be.
func aggregation(t *testing.T, db *mongo.Database, zone string) sums {
	t.Helper()
	day := bson.D{{Key: "date", Value: "$placed"}, {Key: "format", Value: "%Y-%m-%d"}, {Key: "timezone", Value: zone}}
	cur, err := db.Collection("orders").Aggregate(t.Context(), bson.A{bson.D{{Key: "$group", Value: bson.D{
		{Key: "_id", Value: bson.D{{Key: "$dateToString", Value: day}}},
		{Key: "orders", Value: bson.D{{Key: "$sum", Value: 1}}},
		{Key: "cents", Value: bson.D{{Key: "$sum", Value: "$cents"}}},
		{Key: "largest", Value: bson.D{{Key: "$max", Value: "$cents"}}},
	}}}})
	if err != nil {
		t.Fatal(err)
	}
	var groups []struct {
		Day                    string `bson:"_id"`
		Orders, Cents, Largest int64
	}
	if err := cur.All(t.Context(), &groups); err != nil {
		t.Fatal(err)
	}
	want := sums{map[string]Summed{}, map[string]Refreshed{}}
	for _, g := range groups {
		want.Summed[g.Day] = Summed{g.Day, g.Orders, g.Cents}
		want.Refreshed[g.Day] = Refreshed{g.Orders, g.Cents, g.Largest}
	}
	return want
}

func eventually(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// writer writes orders of some times.
type writer struct {
	t      *testing.T
	orders *mongo.Collection
	random *rand.Rand
	times  []time.Time
	ids    []bson.ObjectID
}

// around36 are the hours around some moments, and the last millisecond before each.
func around36(moments []time.Time) (times []time.Time) {
	for _, m := range moments {
		for h := -36; h <= 36; h++ {
			hour := m.Add(time.Duration(h) * time.Hour)
			times = append(times, hour.Add(-time.Millisecond), hour)
		}
	}
	return times
}

// insert writes an order for each of some times.
func (w *writer) insert(times []time.Time) {
	w.t.Helper()
	var orders []any
	for _, placed := range times {
		id := bson.NewObjectID()
		w.ids = append(w.ids, id)
		orders = append(orders, bson.D{{Key: "_id", Value: id}, {Key: "placed", Value: placed}, {Key: "cents", Value: w.cents()}})
	}
	if _, err := w.orders.InsertMany(w.t.Context(), orders); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) cents() int64 { return w.random.Int64N(10_000) }

func (w *writer) time() time.Time { return w.times[w.random.IntN(len(w.times))] }

// change makes n changes at random.
func (w *writer) change(n int) {
	w.t.Helper()
	for range n {
		i := w.random.IntN(len(w.ids))
		var err error
		switch w.random.IntN(6) {
		case 0: // written long after its day
			w.insert([]time.Time{w.time().AddDate(0, 0, -400)})
		case 1:
			err = w.update(i, "$set", "placed", w.time().AddDate(0, 0, -400))
		case 2:
			err = w.update(i, "$set", "placed", w.time())
		case 3:
			err = w.update(i, "$set", "cents", w.cents())
		case 4:
			err = w.update(i, "$inc", "cents", w.cents()-5000)
		default:
			_, err = w.orders.DeleteOne(w.t.Context(), bson.D{{Key: "_id", Value: w.ids[i]}})
			w.ids[i] = w.ids[len(w.ids)-1]
			w.ids = w.ids[:len(w.ids)-1]
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *writer) update(i int, operator, field string, value any) error {
	_, err := w.orders.UpdateByID(w.t.Context(), w.ids[i], bson.D{{Key: operator, Value: bson.D{{Key: field, Value: value}}}})
	return err
}
