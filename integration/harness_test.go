package integration_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
)

// roles are what this test binary does when it is started again as another process,
// named by roleVariable. Such a process sets its own hooks; it has no tests.
var roles = map[string]func(context.Context) error{}

const roleVariable = "TIDEMARK_TEST_ROLE"

// Tests that set no hook, switch no guard off and measure nothing of the whole process are
// parallel: they run when the others have ended, and their waiting costs no time.

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		f, ok := roles[role]
		if !ok {
			fmt.Fprintln(os.Stderr, "unknown role", role)
			os.Exit(2)
		}
		if err := f(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	code := m.Run()
	if err := errors.Join(closeClients(), serve.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var (
	clientsMu sync.Mutex
	clients   = map[string]*mongo.Client{}
)

// client connects to a server once per test binary.
func client(t testing.TB, uri string) *mongo.Client {
	t.Helper()
	clientsMu.Lock()
	defer clientsMu.Unlock()
	if c := clients[uri]; c != nil {
		return c
	}
	c, err := mongo.Connect(options.Client().ApplyURI(uri).SetWriteConcern(writeconcern.Majority()))
	if err != nil {
		t.Fatal(err)
	}
	clients[uri] = c
	return c
}

// closeClients disconnects them all at once: one whose server is gone waits for it, to
// end its sessions there.
func closeClients() error {
	clientsMu.Lock()
	defer clientsMu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	errs := make(chan error)
	for _, c := range clients {
		go func() { errs <- c.Disconnect(ctx) }()
	}
	var all []error
	for range clients {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

func unique(prefix string) string {
	var b [5]byte
	_, _ = rand.Read(b[:])
	return prefix + hex.EncodeToString(b[:])
}

// source is a database of its own on the shared MongoDB.
func source(t testing.TB) *mongo.Database {
	t.Helper()
	uri, err := serve.MongoDB(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return sourceOn(t, uri)
}

// sourceOn is a database of its own on the server at uri.
func sourceOn(t testing.TB, uri string) *mongo.Database {
	t.Helper()
	db := client(t, uri).Database(unique("src_"))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = db.Drop(ctx)
	})
	return db
}

// withImages creates collections that keep pre- and post-images.
func withImages(t testing.TB, db *mongo.Database, names ...string) {
	t.Helper()
	for _, name := range names {
		err := db.CreateCollection(t.Context(), name, options.CreateCollection().SetChangeStreamPreAndPostImages(bson.D{{Key: "enabled", Value: true}}))
		if err != nil {
			t.Fatal(err)
		}
	}
}

// postgresDSN is a database of its own on the shared PostgreSQL.
func postgresDSN(t testing.TB) string {
	t.Helper()
	dsn, err := serve.Postgres(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return databaseOn(t, dsn)
}

// databaseOn creates a database of its own on the server at dsn.
func databaseOn(t testing.TB, dsn string) string {
	t.Helper()
	admin, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	name := unique("t_")
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		p, err := pgxpool.New(ctx, dsn)
		if err != nil {
			return
		}
		defer p.Close()
		_, _ = p.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	})
	return u.String()
}

// poolOn connects to a PostgreSQL database.
func poolOn(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	p, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// pool is a pool on a PostgreSQL database of its own.
func pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return poolOn(t, postgresDSN(t))
}

// quiet is a logger for tests that expect what would be logged.
func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// running is a Runner under way.
type running struct {
	*projector.Runner
	t      testing.TB
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// run starts a runner; it is stopped at the end of the test, if it has not ended.
func run(t testing.TB, r *projector.Runner) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	g := &running{Runner: r, t: t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(g.done)
		g.err = r.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-g.done })
	return g
}

// stop ends the runner and fails the test where it ends with an error.
func (g *running) stop() {
	g.t.Helper()
	g.cancel()
	if err := g.wait(30 * time.Second); err != nil {
		g.t.Fatalf("the runner ended with %v", err)
	}
}

// wait waits for the runner to end by itself and returns its error.
func (g *running) wait(limit time.Duration) error {
	g.t.Helper()
	select {
	case <-g.done:
		return g.err
	case <-time.After(limit):
		g.t.Fatalf("the runner has not ended within %s: %+v", limit, g.Status())
		return nil
	}
}

// level waits until everything written to db so far is in the model.
func (g *running) level(db *mongo.Database) {
	g.t.Helper()
	t := operationTime(g.t, db)
	ctx, cancel := context.WithTimeout(g.t.Context(), 60*time.Second)
	defer cancel()
	waited := make(chan error, 1)
	go func() { waited <- g.WaitFor(ctx, t) }()
	select {
	case err := <-waited:
		if err != nil {
			g.t.Fatalf("waiting for the model: %v: %+v", err, g.Status())
		}
	case <-g.done:
		cancel()
		<-waited
		g.t.Fatalf("the runner ended while it was waited for: %v", g.err)
	}
}

// operationTime is the time of the last majority-committed write.
func operationTime(t testing.TB, db *mongo.Database) bson.Timestamp {
	t.Helper()
	at, err := majorityTime(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func majorityTime(ctx context.Context, db *mongo.Database) (at bson.Timestamp, err error) {
	reply, err := db.RunCommand(ctx, bson.D{
		{Key: "find", Value: "tidemark_marker"},
		{Key: "limit", Value: 1},
		{Key: "singleBatch", Value: true},
		{Key: "readConcern", Value: bson.D{{Key: "level", Value: "majority"}}},
	}).Raw()
	if err == nil {
		at.T, at.I, _ = reply.Lookup("operationTime").TimestampOK()
	}
	return at, err
}
