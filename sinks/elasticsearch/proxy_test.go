package elasticsearch_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// proxy stands between a sink and the server. Meddle may answer a request itself, and
// then says true.
type proxy struct {
	*httptest.Server
	to     string
	meddle atomic.Pointer[func(w http.ResponseWriter, r *http.Request, body []byte) bool]
}

func newProxy(t testing.TB, to string, start func(*httptest.Server)) *proxy {
	t.Helper()
	p := &proxy{to: to}
	transport := &http.Transport{}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		if f := p.meddle.Load(); f != nil && (*f)(w, r, body) {
			return
		}
		p.forward(transport, w, r, body)
	}))
	p.Config.ErrorLog = log.New(io.Discard, "", 0) // connections are cut off on purpose
	start(p.Server)
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
		transport.CloseIdleConnections()
	})
	return p
}

// behind is a sink on the cluster through a proxy.
func (c *cluster) behind(t testing.TB) (*proxy, *elasticsearch.Sink) {
	t.Helper()
	p := newProxy(t, c.url, (*httptest.Server).Start)
	return p, c.through(t, p.URL)
}

// on sets what the proxy does, nil for nothing.
func (p *proxy) on(f func(w http.ResponseWriter, r *http.Request, body []byte) bool) {
	if f == nil {
		p.meddle.Store(nil)
		return
	}
	p.meddle.Store(&f)
}

func (p *proxy) forward(rt http.RoundTripper, w http.ResponseWriter, r *http.Request, body []byte) {
	resp, err := p.pass(rt, r, body)
	if err != nil {
		cut(w)
		return
	}
	defer resp.Body.Close()
	for k, v := range resp.Header {
		w.Header()[k] = v
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
}

func (p *proxy) pass(rt http.RoundTripper, r *http.Request, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(r.Context(), r.Method, p.to+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = r.Header.Clone()
	req.Header.Del("Authorization")
	req.Header.Del("Accept-Encoding") // or the answer would be compressed
	return rt.RoundTrip(req)
}

// cut breaks the connection off.
func cut(w http.ResponseWriter) {
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		_ = conn.Close()
	}
}

// answer is an answer of the proxy's own.
func answer(w http.ResponseWriter, status int, body string) {
	w.Header().Set("X-Elastic-Product", "Elasticsearch")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

func isBulk(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/_bulk") }

// isCheckpoint reports a write to the checkpoints.
func isCheckpoint(r *http.Request) bool {
	return r.Method == http.MethodPut && strings.Contains(r.URL.Path, "tidemark-checkpoints/_doc/")
}

// bulkItems cuts a bulk request into its items.
func bulkItems(body []byte) (items []string) {
	lines := strings.SplitAfter(string(body), "\n")
	for i := 0; i < len(lines) && lines[i] != ""; i++ {
		item := lines[i]
		if strings.HasPrefix(item, `{"index"`) {
			i++
			item += lines[i]
		}
		items = append(items, item)
	}
	return items
}

// refuseItems answers some items of a bulk request with a status, and passes the others on.
func (p *proxy) refuseItems(w http.ResponseWriter, r *http.Request, body []byte, status int, refuse func(item string) bool) {
	items := bulkItems(body)
	var rest []string
	for _, item := range items {
		if !refuse(item) {
			rest = append(rest, item)
		}
	}
	var result struct {
		Errors bool              `json:"errors"`
		Items  []json.RawMessage `json:"items"`
	}
	if len(rest) > 0 {
		resp, err := p.pass(http.DefaultTransport, r, []byte(strings.Join(rest, "")))
		if err != nil {
			cut(w)
			return
		}
		err = json.NewDecoder(resp.Body).Decode(&result)
		_ = resp.Body.Close()
		if err != nil {
			cut(w)
			return
		}
	}
	merged := make([]json.RawMessage, 0, len(items))
	for _, item := range items {
		if refuse(item) {
			merged = append(merged, fmt.Appendf(nil, `{"index":{"status":%d,"error":{"type":"es_rejected_execution_exception","reason":"injected"}}}`, status))
			continue
		}
		merged = append(merged, result.Items[0])
		result.Items = result.Items[1:]
	}
	b, _ := json.Marshal(map[string]any{"items": merged})
	answer(w, http.StatusOK, `{"errors":true,`+string(b[1:]))
}
