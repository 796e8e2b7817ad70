package elasticsearch_test

import (
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	elastic "github.com/elastic/go-elasticsearch/v8"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// TestCredentials: API keys, passwords and TLS are the client's, and no error tells them.
// A proxy ends TLS and checks the header, since the test's server has no security.
func TestCredentials(t *testing.T) {
	const key, password = "c2VjcmV0LWFwaS1rZXk=", "secret-password"
	c := newCluster(t)
	p := newProxy(t, c.url, (*httptest.Server).StartTLS)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate().Raw})
	p.on(func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		user, pass, basic := r.BasicAuth()
		switch authorization := strings.Replace(r.Header.Get("Authorization"), "APIKey ", "ApiKey ", 1); {
		case authorization == "ApiKey "+key, basic && user == "tidemark" && pass == password:
			return false
		case authorization == "ApiKey reader":
			answer(w, http.StatusForbidden, `{"error":{"type":"security_exception","reason":"action [indices:data/write/bulk] is unauthorized for API key"},"status":403}`)
		default:
			answer(w, http.StatusUnauthorized, `{"error":{"type":"security_exception","reason":"unable to authenticate"},"status":401}`)
		}
		return true
	})
	withPassword := strings.Replace(p.URL, "https://", "https://tidemark:"+password+"@", 1)
	for name, config := range map[string]elastic.Config{
		"API key":             {Addresses: []string{p.URL}, APIKey: key},
		"password":            {Addresses: []string{p.URL}, Username: "tidemark", Password: password},
		"password in address": {Addresses: []string{withPassword}},
	} {
		t.Run(name, func(t *testing.T) {
			sink := elasticsearch.New(secure(t, config, ca), elasticsearch.Prefix(c.prefix))
			cp := acquire(t, sink, "test")
			if cp.Sequence == 0 {
				cp = mustCommit(t, sink, cp, things.Create)
			}
			mustCommit(t, sink, cp, put(things, nil, manyThings(3, -1)))
		})
	}
	for name, config := range map[string]elastic.Config{
		"wrong password": {Addresses: []string{p.URL}, Username: "tidemark", Password: "wrong-secret"},
		"no right":       {Addresses: []string{p.URL}, APIKey: "reader"},
	} {
		t.Run(name, func(t *testing.T) {
			sink := elasticsearch.New(secure(t, config, ca), elasticsearch.Prefix(c.prefix))
			_, err := sink.Acquire(t.Context(), model, "test")
			wantClass(t, sink, err, projector.Fatal)
			wantError(t, err, "security_exception")
			tellsNothing(t, err, "wrong-secret")
		})
	}
	t.Run("unreachable", func(t *testing.T) {
		p.CloseClientConnections()
		for _, url := range []string{withPassword, "https://tidemark:" + password + "@127.0.0.1:1"} {
			pool := []byte(nil) // nobody who has signed the proxy's certificate
			sink := elasticsearch.New(secure(t, elastic.Config{Addresses: []string{url}}, pool), elasticsearch.Prefix(c.prefix))
			_, err := sink.Acquire(t.Context(), model, "test")
			wantClass(t, sink, err, projector.Transient)
			tellsNothing(t, err, password)
		}
	})
	t.Run("another product", func(t *testing.T) {
		p.on(func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
			w.WriteHeader(http.StatusOK)
			return true
		})
		sink := elasticsearch.New(secure(t, elastic.Config{Addresses: []string{p.URL}}, ca), elasticsearch.Prefix(c.prefix))
		_, err := sink.Acquire(t.Context(), model, "test")
		wantClass(t, sink, err, projector.Fatal)
		wantError(t, err, "not Elasticsearch")
	})
	// Who has closed it does not want to wait for it.
	t.Run("closed", func(t *testing.T) {
		es := client(t, elastic.Config{Addresses: []string{c.url}})
		must(t, es.Close(t.Context()))
		sink := elasticsearch.New(es, elasticsearch.Prefix(c.prefix))
		_, err := sink.Acquire(t.Context(), model, "test")
		wantClass(t, sink, err, projector.Fatal)
		transport, ok := es.Transport.(*elastictransport.Client)
		if !ok {
			t.Fatalf("its transport is a %T", es.Transport)
		}
		sink = elasticsearch.New(transport, elasticsearch.Prefix(c.prefix))
		_, err = sink.Acquire(t.Context(), model, "test")
		wantClass(t, sink, err, projector.Fatal)
	})
}

// secure is a client that trusts a certificate.
func secure(t *testing.T, config elastic.Config, ca []byte) *elastic.Client {
	t.Helper()
	config.DisableRetry = true
	transport := http.DefaultTransport.(*http.Transport).Clone()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport.TLSClientConfig.RootCAs = roots
	config.Transport = transport
	es, err := elastic.NewClient(config)
	must(t, err)
	t.Cleanup(transport.CloseIdleConnections)
	return es
}

func tellsNothing(t *testing.T, err error, secrets ...string) {
	t.Helper()
	for _, s := range secrets {
		if strings.Contains(err.Error(), s) {
			t.Errorf("the error tells a credential: %v", err)
		}
	}
}
