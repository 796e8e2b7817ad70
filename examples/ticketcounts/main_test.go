package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := errors.Join(serve.Close(), goleak.Find()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// models are where the counts can be kept, and how they are read there.
var models = map[string]func(context.Context, *mongo.Database) (map[string]int64, error){
	"postgres": countsInPostgres,
	"mongodb":  countsInMongoDB,
}

// Tickets exist before the projection starts for the first time, and are written at
// random while it is stopped and started again: the counts are those of an aggregation.
func TestCountsEqualTheSource(t *testing.T) {
	for sink, counts := range models {
		t.Run(sink, func(t *testing.T) {
			db := servers(t, sink)
			images := bson.D{{Key: "enabled", Value: true}}
			err := db.CreateCollection(t.Context(), "tickets", options.CreateCollection().SetChangeStreamPreAndPostImages(images))
			if err != nil {
				t.Fatal(err)
			}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			w := &writer{t: t, coll: db.Collection("tickets"), random: rand.New(rand.NewPCG(seed, 0))} //nolint:gosec // no secret

			w.write(60)
			stop := start(t, db.Name(), sink)
			for range 4 {
				w.write(60)
				stop() // while what was written last may not be committed, or the first load not be over
				w.write(60)
				stop = start(t, db.Name(), sink)
			}
			want := aggregation(t, db)
			eventually(t, func() error {
				got, err := counts(t.Context(), db)
				if err == nil && !maps.Equal(got, want) {
					err = fmt.Errorf("the model has %v, the source %v", got, want)
				}
				return err
			})
			stop()
		})
	}
}

func TestFaultsAreNamed(t *testing.T) {
	for sink := range models {
		db := servers(t, sink)
		err := run(t.Context(), db.Name(), sink)
		if err == nil || !strings.Contains(err.Error(), `db.createCollection("tickets", {changeStreamPreAndPostImages: {enabled: true}})`) {
			t.Errorf("%s, without the collection: %v", sink, err)
		}
	}
	if err := run(t.Context(), "helpdesk", "mysql"); err == nil || !strings.Contains(err.Error(), `no sink "mysql"`) {
		t.Errorf("without a sink: %v", err)
	}
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
	db := client.Database("ticketcounts_" + bson.NewObjectID().Hex())
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

// createPostgres creates a database, and returns its connection string.
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
	if _, err := conn.Exec(t.Context(), "create database "+name); err != nil {
		t.Fatal(err)
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

// start runs the command; stop ends it as a signal does.
func start(t *testing.T, database, sink string) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, database, sink) }()
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

func countsInPostgres(ctx context.Context, _ *mongo.Database) (map[string]int64, error) {
	got := map[string]int64{}
	err := query(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, "select status, n from ticket_counts.counts")
		if err != nil {
			return err
		}
		var c Count
		_, err = pgx.ForEachRow(rows, []any{&c.Status, &c.N}, func() error { got[c.Status] = c.N; return nil })
		return err
	})
	return got, err
}

func query(ctx context.Context, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, os.Getenv("POSTGRES_DSN"))
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(ctx))
}

func countsInMongoDB(ctx context.Context, db *mongo.Database) (map[string]int64, error) {
	counts, err := mongodb.Live(ctx, db, "ticket_counts", "counts")
	if err != nil {
		return nil, err
	}
	cur, err := counts.Find(ctx, bson.D{})
	if err != nil {
		return nil, err
	}
	var rows []struct {
		Key struct {
			Status string `bson:"status"`
		} `bson:"_id"`
		N int64 `bson:"n"`
	}
	if err := cur.All(ctx, &rows); err != nil {
		return nil, err
	}
	got := map[string]int64{}
	for _, r := range rows {
		got[r.Key.Status] = r.N
	}
	return got, nil
}

// aggregation is what the counts should be.
func aggregation(t *testing.T, db *mongo.Database) map[string]int64 {
	t.Helper()
	cur, err := db.Collection("tickets").Aggregate(t.Context(), mongo.Pipeline{{{Key: "$sortByCount", Value: "$status"}}})
	if err != nil {
		t.Fatal(err)
	}
	var groups []struct {
		Status string `bson:"_id"`
		Count  int64  `bson:"count"`
	}
	if err := cur.All(t.Context(), &groups); err != nil {
		t.Fatal(err)
	}
	want := map[string]int64{}
	for _, g := range groups {
		want[g.Status] = g.Count
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

// writer writes tickets at random.
type writer struct {
	t      *testing.T
	coll   *mongo.Collection
	random *rand.Rand
	ids    []bson.ObjectID
}

func (w *writer) write(n int) {
	w.t.Helper()
	for range n {
		if err := w.one(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *writer) one(ctx context.Context) error {
	status := []string{"new", "open", "solved"}[w.random.IntN(3)]
	if len(w.ids) == 0 || w.random.IntN(2) == 0 {
		id := bson.NewObjectID()
		w.ids = append(w.ids, id)
		_, err := w.coll.InsertOne(ctx, bson.D{{Key: "_id", Value: id}, {Key: "status", Value: status}})
		return err
	}
	i := w.random.IntN(len(w.ids))
	id := bson.D{{Key: "_id", Value: w.ids[i]}}
	if w.random.IntN(3) == 0 {
		w.ids[i] = w.ids[len(w.ids)-1]
		w.ids = w.ids[:len(w.ids)-1]
		_, err := w.coll.DeleteOne(ctx, id)
		return err
	}
	_, err := w.coll.UpdateOne(ctx, id, bson.D{{Key: "$set", Value: bson.D{{Key: "status", Value: status}}}})
	return err
}
