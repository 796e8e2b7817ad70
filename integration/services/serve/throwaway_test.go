package serve_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

func startMongod(t *testing.T, o serve.MongodOptions) *serve.Mongod {
	t.Helper()
	m, err := serve.StartMongod(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestThreeMembersElect(t *testing.T) {
	m := startMongod(t, serve.MongodOptions{Members: 3})
	first, err := m.Primary(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	insert(t, m.URI(), "kept")
	if err := first.Kill(); err != nil {
		t.Fatal(err)
	}
	second, err := m.Primary(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if second == first {
		t.Fatal("the killed member is primary")
	}
	if !holds(t, m.URI(), "kept") {
		t.Error("a majority write was lost")
	}
	if err := first.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if first.PID() == 0 || m.Members[0].Addr() == m.Members[1].Addr() {
		t.Error("the restarted member does not run")
	}
}

func insert(t *testing.T, uri, id string) {
	t.Helper()
	_, err := clientOf(t, uri).Database("serve").Collection("test").InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}})
	if err != nil {
		t.Fatal(err)
	}
}

func holds(t *testing.T, uri, id string) bool {
	t.Helper()
	n, err := clientOf(t, uri).Database("serve").Collection("test").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: id}})
	if err != nil {
		t.Fatal(err)
	}
	return n == 1
}

func TestMongodVersions(t *testing.T) {
	for _, version := range []string{"6.0.27", "6.0.5"} {
		m := startMongod(t, serve.MongodOptions{Version: version})
		var info struct{ Version string }
		err := clientOf(t, m.URI()).Database("admin").RunCommand(t.Context(), bson.D{{Key: "buildInfo", Value: 1}}).Decode(&info)
		if err != nil {
			t.Fatal(err)
		}
		if info.Version != version || m.Version() != version {
			t.Errorf("server says %s, Version %s, want %s", info.Version, m.Version(), version)
		}
	}
	if _, err := serve.StartMongod(t.Context(), serve.MongodOptions{Version: "3.2"}); err == nil {
		t.Error("a version that isn't there started")
	}
}

func TestMongodRestartKeepsData(t *testing.T) {
	m := startMongod(t, serve.MongodOptions{OplogMB: 8, SyncDelay: 1, Params: map[string]string{"enableTestCommands": "1"}})
	uri := m.URI()
	for id, end := range map[string]func() error{"killed": m.Kill, "stopped": m.Stop} {
		insert(t, uri, id)
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if m.Members[0].PID() != 0 {
			t.Errorf("%s: it runs", id)
		}
		if err := m.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !holds(t, uri, id) {
			t.Errorf("%s: the document is gone", id)
		}
	}
	command := bson.D{
		{Key: "configureFailPoint", Value: "failCommand"},
		{Key: "mode", Value: bson.D{{Key: "times", Value: 1}}},
		{Key: "data", Value: bson.D{{Key: "failCommands", Value: bson.A{"count"}}, {Key: "errorCode", Value: 2}}},
	}
	if err := clientOf(t, uri).Database("admin").RunCommand(t.Context(), command).Err(); err != nil {
		t.Errorf("test commands: %v", err)
	}
}

func TestMongodPause(t *testing.T) {
	m := startMongod(t, serve.MongodOptions{})
	client := clientOf(t, m.URI())
	if err := client.Ping(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := client.Ping(short, nil); err == nil {
		t.Error("a paused server answered")
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := client.Ping(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

func TestMongodAuth(t *testing.T) {
	m := startMongod(t, serve.MongodOptions{Auth: true})
	pingMongo(t, m.AdminURI())
	insert(t, m.AdminURI(), "secret")
	reader, err := m.CreateUser(t.Context(), "reader", "p@ss/word", bson.D{{Key: "role", Value: "read"}, {Key: "db", Value: "serve"}})
	if err != nil {
		t.Fatal(err)
	}
	if !holds(t, reader, "secret") {
		t.Error("the reader can't read")
	}
	for who, uri := range map[string]string{"reader": reader, "nobody": m.URI()} {
		_, err := clientOf(t, uri).Database("serve").Collection("test").InsertOne(t.Context(), bson.D{})
		if refused := (mongo.CommandError{}); !errors.As(err, &refused) || refused.Code != 13 {
			t.Errorf("%s may write: %v", who, err)
		}
	}
	if err := m.Restart(t.Context()); err != nil {
		t.Error(err)
	}
}

func startPostgres(t *testing.T, o serve.PostgresOptions) *serve.PostgresServer {
	t.Helper()
	s, err := serve.StartPostgres(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestPostgresKillAndRestore(t *testing.T) {
	s := startPostgres(t, serve.PostgresOptions{Params: map[string]string{"work_mem": "5MB"}})
	if got := queryRow(t, s.DSN(), "select current_setting('fsync') || current_setting('work_mem')"); got != "on5MB" {
		t.Errorf("fsync and work_mem are %s", got)
	}
	const count = "select count(*)::text from kept"
	execute(t, s.DSN(), "create table kept (id int); insert into kept values (1)")
	if err := s.CopyData(filepath.Join(t.TempDir(), "early")); err == nil {
		t.Error("a running server's data was copied")
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := queryRow(t, s.DSN(), count); got != "1" {
		t.Errorf("after a kill: %s rows", got)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	backup := filepath.Join(t.TempDir(), "backup")
	if err := s.CopyData(backup); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	execute(t, s.DSN(), "insert into kept values (2)")
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := s.RestoreData(backup); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := queryRow(t, s.DSN(), count); got != "1" {
		t.Errorf("after restoring the backup: %s rows", got)
	}
}

func execute(t *testing.T, dsn, statements string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), statements); err != nil {
		t.Fatal(err)
	}
}

func TestPostgresPause(t *testing.T) {
	s := startPostgres(t, serve.PostgresOptions{})
	conn, err := pgx.Connect(t.Context(), s.DSN())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := conn.Ping(short); err == nil {
		t.Error("a paused server answered")
	}
	_ = conn.Close(short) // broken by the deadline
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	if got := queryRow(t, s.DSN(), "select 'one'"); got != "one" {
		t.Errorf("got %q", got)
	}
	if err := s.Pause(); err != nil { // Close takes a paused server too
		t.Fatal(err)
	}
}

func TestPostgresErrorCarriesLog(t *testing.T) {
	_, err := serve.StartPostgres(t.Context(), serve.PostgresOptions{Params: map[string]string{"no_such_thing": "1"}})
	if err == nil || !strings.Contains(err.Error(), `unrecognized configuration parameter "no_such_thing"`) {
		t.Errorf("got %v", err)
	}
}

func TestRedisKillKeepsData(t *testing.T) {
	s, err := serve.StartRedis(t.Context(), serve.RedisOptions{Params: map[string]string{"appendfsync": "always"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := askRedis(t, s.Addr(), "SET kept 1"); got != "+OK" {
		t.Fatal(got)
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := askRedis(t, s.Addr(), "EXISTS kept"); got != ":1" {
		t.Errorf("after a kill EXISTS says %q", got)
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	if err := s.Restart(t.Context()); err == nil {
		t.Error("a closed server restarted")
	}
}
