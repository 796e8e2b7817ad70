package serve_test

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

func TestMongoDB(t *testing.T) {
	uri, err := serve.MongoDB(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pingMongo(t, uri)
	again, err := serve.MongoDB(t.Context())
	if err != nil || again != uri {
		t.Errorf("second use: %q, %v; want %q", again, err, uri)
	}
}

func pingMongo(t *testing.T, uri string) {
	t.Helper()
	if err := clientOf(t, uri).Ping(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

func clientOf(t *testing.T, uri string) *mongo.Client {
	t.Helper()
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(t.Context()) })
	return client
}

func TestPostgres(t *testing.T) {
	dsn, err := serve.Postgres(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := queryRow(t, dsn, "select 'one'"); got != "one" {
		t.Errorf("got %q", got)
	}
}

func queryRow(t *testing.T, dsn, query string) (value string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), query).Scan(&value); err != nil {
		t.Fatal(err)
	}
	return value
}

func TestRedis(t *testing.T) {
	address, err := serve.Redis(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	if got := askRedis(t, u.Host, "PING"); got != "+PONG" {
		t.Errorf("PING was answered by %q", got)
	}
}

// askRedis sends an inline command and returns the first line of the answer.
func askRedis(t *testing.T, addr, command string) string {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte(command + "\r\n")); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 1024)
	n, err := conn.Read(answer)
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(answer[:n]), "\r\n")
	return line
}

func TestElasticsearch(t *testing.T) {
	address, err := serve.Elasticsearch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if health := callElasticsearch(t, http.MethodGet, address+"/_cluster/health", ""); health["number_of_nodes"] != 1.0 {
		t.Errorf("health is %v", health)
	}
	callElasticsearch(t, http.MethodPut, address+"/serve-test/_doc/1", `{"colour":"green"}`)
	doc := callElasticsearch(t, http.MethodGet, address+"/serve-test/_doc/1", "")
	if source, _ := doc["_source"].(map[string]any); source["colour"] != "green" {
		t.Errorf("read back %v", doc)
	}
	callElasticsearch(t, http.MethodDelete, address+"/serve-test", "")
}

func callElasticsearch(t *testing.T, method, address, body string) (answer map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, address, bytes.NewBufferString(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode >= 300 {
		t.Fatalf("%s %s: %s: %v", method, address, resp.Status, answer)
	}
	return answer
}

// TestSecondUseDownloadsNothing starts every server with no program in the PATH that could download. It comes before what
// ends the servers of the tests above.
func TestSecondUseDownloadsNothing(t *testing.T) {
	for _, start := range []func(*testing.T){TestMongoDB, TestPostgres, TestRedis, TestElasticsearch} {
		start(t) // makes sure that all are in the cache
	}
	if err := serve.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, program := range []string{"redis-server", "java"} {
		path, err := exec.LookPath(program)
		if err != nil {
			t.Skipf("the servers are not native here: %v", err)
		}
		if err := os.Symlink(path, filepath.Join(dir, program)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	for _, start := range []func(*testing.T){TestMongoDB, TestPostgres, TestRedis, TestElasticsearch} {
		start(t)
	}
}

func TestEnvironmentVariableIsUsed(t *testing.T) {
	if err := serve.Close(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("POSTGRES_DSN", "postgres://elsewhere/db")
	got, err := serve.Postgres(t.Context())
	if err != nil || got != "postgres://elsewhere/db" {
		t.Errorf("got %q, %v", got, err)
	}
	if err := serve.Close(); err != nil { // forgets it
		t.Fatal(err)
	}
}

// TestDocker puts a program in the place of docker that writes down what it is asked.
func TestDocker(t *testing.T) {
	if err := serve.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	calls := filepath.Join(dir, "calls")
	script := "#!/bin/sh\necho \"$*\" >> '" + calls + "'\n"
	if err := os.WriteFile(filepath.Join(dir, "docker"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("REDIS_URL", "")
	t.Setenv("XDG_CACHE_HOME", dir)
	got, err := serve.Redis(t.Context())
	if err != nil || got != "redis://127.0.0.1:36379/0" {
		t.Errorf("got %q, %v", got, err)
	}
	if err := serve.Close(); err != nil { // forgets it
		t.Fatal(err)
	}
	if err := serve.Up(t.Context(), "redis"); err != nil {
		t.Fatal(err)
	}
	if lines, err := serve.Env(t.Context()); err != nil || len(lines) != 1 || lines[0] != "export REDIS_URL='"+got+"'" {
		t.Errorf("env is %q, %v", lines, err)
	}
	if err := serve.Down(t.Context(), "redis"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(calls)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"up --wait redis\n", "rm --stop --force --volumes redis\n"} {
		if !strings.Contains(string(text), "integration/compose.yaml "+want) {
			t.Errorf("docker was not asked to %sbut:\n%s", want, text)
		}
	}
}

func TestUpStaysUntilDown(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir()) // apart from what the user has up
	t.Setenv("REDIS_URL", "")
	ctx := t.Context()
	if out, err := again(t, "up").Output(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() { _ = serve.Down(t.Context()) })
	lines, err := serve.Env(ctx)
	if err != nil || len(lines) != 1 {
		t.Fatalf("env is %q, %v", lines, err)
	}
	address := strings.TrimSuffix(strings.TrimPrefix(lines[0], "export REDIS_URL='redis://"), "/0'")
	if got := askRedis(t, address, "PING"); got != "+PONG" {
		t.Errorf("PING was answered by %q", got)
	}
	if err := serve.Down(ctx, "redis"); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.DialTimeout("tcp", address, time.Second); err == nil {
		conn.Close()
		t.Errorf("%s still answers after down", address)
	}
	if lines, err := serve.Env(ctx); err != nil || len(lines) != 0 {
		t.Errorf("env is %q, %v", lines, err)
	}
	if err := serve.Up(ctx, "oracle"); err == nil || !strings.Contains(err.Error(), "there are mongodb") {
		t.Errorf("an unknown service: %v", err)
	}
}
