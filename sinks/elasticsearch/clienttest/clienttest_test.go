// Package clienttest tests the sink with the whole client of go-elasticsearch: its addresses,
// credentials and TLS, and what it makes of another product. It is apart because that
// client's typed API takes longer to compile than all else together. All other tests of the
// sink use the client's transport, which is what the client sends by.
package clienttest

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	elastic "github.com/elastic/go-elasticsearch/v8"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := serve.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const (
	key, password = "c2VjcmV0LWFwaS1rZXk=", "secret-password"
	model         = "model"
)

type thing struct {
	N int64 `row:"n"`
}

var things = elasticsearch.Index[thing]{Name: "things"}

// TestCredentials: API keys, passwords and TLS are the client's, and no error tells them.
// A proxy ends TLS and checks the header, since the test's server has no security.
func TestCredentials(t *testing.T) {
	at := server(t)
	proxy, another := newProxy(t, at)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: proxy.Certificate().Raw})
	prefix := "t" + bson.NewObjectID().Hex()[8:] + "-"
	t.Cleanup(func() { removeIndices(t, at, prefix) })
	acquire := func(t *testing.T, client elasticsearch.Client) (sink *elasticsearch.Sink, live projector.Checkpoint, err error) {
		sink = elasticsearch.New(client, elasticsearch.Prefix(prefix))
		all, err := sink.Acquire(t.Context(), model, "test")
		if err == nil && (len(all) != 1 || all[0].Phase != projector.Live) {
			t.Fatalf("not the one live checkpoint: %+v", all)
		}
		if err == nil {
			live = all[0]
		}
		return sink, live, err
	}
	refused := func(t *testing.T, client elasticsearch.Client, want projector.Class) error {
		t.Helper()
		sink, _, err := acquire(t, client)
		if err == nil {
			t.Fatal("no error")
		}
		if got := sink.Classify(err); got != want {
			t.Errorf("class %v, want %v, of: %v", got, want, err)
		}
		for _, secret := range []string{key, password, "wrong-secret"} {
			if strings.Contains(err.Error(), secret) {
				t.Errorf("the error tells a credential: %v", err)
			}
		}
		return err
	}

	withPassword := strings.Replace(proxy.URL, "https://", "https://tidemark:"+password+"@", 1)
	for name, config := range map[string]elastic.Config{
		"API key":             {Addresses: []string{proxy.URL}, APIKey: key},
		"password":            {Addresses: []string{proxy.URL}, Username: "tidemark", Password: password},
		"password in address": {Addresses: []string{withPassword}},
	} {
		t.Run(name, func(t *testing.T) {
			sink, prev, err := acquire(t, client(t, config, ca))
			must(t, err)
			next := prev
			next.Sequence++
			next.Position.Time = bson.Timestamp{T: 1_700_000_000, I: uint32(next.Sequence)} //nolint:gosec // small
			must(t, sink.Commit(t.Context(), prev, next, func(ctx context.Context, tx *elasticsearch.Tx) error {
				if prev.Sequence == 0 {
					return things.Create(ctx, tx)
				}
				id := bson.RawValue{Type: bson.TypeString, Value: []byte("\x02\x00\x00\x00a\x00")}
				return things.Put(ctx, tx, nil, []projector.Row[thing]{{Owner: id, Version: 1, Row: &thing{1}}})
			}))
		})
	}
	for name, config := range map[string]elastic.Config{
		"wrong password": {Addresses: []string{proxy.URL}, Username: "tidemark", Password: "wrong-secret"},
		"no right":       {Addresses: []string{proxy.URL}, APIKey: "reader"},
	} {
		t.Run(name, func(t *testing.T) {
			says(t, refused(t, client(t, config, ca), projector.Fatal), "security_exception")
		})
	}
	t.Run("unreachable", func(t *testing.T) {
		proxy.CloseClientConnections()
		for _, address := range []string{withPassword, "https://tidemark:" + password + "@127.0.0.1:1"} {
			// It trusts nobody who has signed the proxy's certificate.
			_ = refused(t, client(t, elastic.Config{Addresses: []string{address}}, nil), projector.Transient)
		}
	})
	t.Run("another product", func(t *testing.T) {
		another.Store(true)
		defer another.Store(false)
		says(t, refused(t, client(t, elastic.Config{Addresses: []string{proxy.URL}}, ca), projector.Fatal), "not Elasticsearch")
	})
	// Who has closed it does not want to wait for it.
	t.Run("closed", func(t *testing.T) {
		es := client(t, elastic.Config{Addresses: []string{at}}, nil)
		must(t, es.Close(t.Context()))
		_ = refused(t, es, projector.Fatal)
		transport, ok := es.Transport.(*elastictransport.Client)
		if !ok {
			t.Fatalf("its transport is a %T", es.Transport)
		}
		_ = refused(t, transport, projector.Fatal)
	})
}

// server is that of the environment, where there is one.
func server(t *testing.T) string {
	t.Helper()
	if at := os.Getenv("ELASTICSEARCH_URL"); at != "" {
		return strings.TrimSuffix(at, "/")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	n, err := serve.StartElasticsearch(ctx, serve.ElasticsearchOptions{})
	must(t, err)
	return n.URL()
}

// removeIndices removes those whose names begin with a prefix.
func removeIndices(t *testing.T, at, prefix string) {
	t.Helper()
	request := func(method, path string) []byte {
		req, err := http.NewRequestWithContext(context.Background(), method, at+path, nil)
		must(t, err)
		resp, err := http.DefaultClient.Do(req)
		must(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		must(t, err)
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s %s: %s: %s", method, path, resp.Status, body)
		}
		return body
	}
	var found map[string]any
	must(t, json.Unmarshal(request(http.MethodGet, "/"+prefix+"*/_alias"), &found))
	for index := range found {
		_ = request(http.MethodDelete, "/"+index)
	}
	http.DefaultClient.CloseIdleConnections()
}

// newProxy lets requests with the right credentials through, or is another product.
func newProxy(t *testing.T, to string) (proxy *httptest.Server, another *atomic.Bool) {
	t.Helper()
	target, err := url.Parse(to)
	must(t, err)
	transport, another := &http.Transport{}, &atomic.Bool{}
	forward := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Header.Del("Authorization")
	}}
	proxy = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, pass, basic := r.BasicAuth()
		switch authorization := strings.Replace(r.Header.Get("Authorization"), "APIKey ", "ApiKey ", 1); {
		case another.Load():
			w.WriteHeader(http.StatusOK)
		case authorization == "ApiKey "+key, basic && user == "tidemark" && pass == password:
			forward.ServeHTTP(w, r)
		case authorization == "ApiKey reader":
			answer(w, http.StatusForbidden, `{"error":{"type":"security_exception","reason":"action [indices:data/write/bulk] is unauthorized for API key"},"status":403}`)
		default:
			answer(w, http.StatusUnauthorized, `{"error":{"type":"security_exception","reason":"unable to authenticate"},"status":401}`)
		}
	}))
	proxy.Config.ErrorLog = log.New(io.Discard, "", 0) // connections are cut off on purpose
	proxy.StartTLS()
	t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
		transport.CloseIdleConnections()
	})
	return proxy, another
}

func answer(w http.ResponseWriter, status int, body string) {
	w.Header().Set("X-Elastic-Product", "Elasticsearch")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// client trusts a certificate.
func client(t *testing.T, config elastic.Config, ca []byte) *elastic.Client {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig.RootCAs = roots
	config.DisableRetry, config.Transport = true, transport
	es, err := elastic.NewClient(config)
	must(t, err)
	t.Cleanup(transport.CloseIdleConnections)
	return es
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func says(t *testing.T, err error, what string) {
	t.Helper()
	if !strings.Contains(err.Error(), what) {
		t.Errorf("error does not say %q: %v", what, err)
	}
}
