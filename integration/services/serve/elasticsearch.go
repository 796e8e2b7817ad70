package serve

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"

	"github.com/tidemark-go/tidemark/internal/effort"
)

// ElasticsearchOptions says how StartElasticsearch starts a server. The zero value is the server's defaults, one node,
// with a heap of 512 MB.
type ElasticsearchOptions struct {
	// HeapMB is the Java heap in megabytes. 0 means 512.
	HeapMB int
	// Settings are node settings, such as {"indices.breaker.total.limit": "50%"}.
	Settings map[string]string

	home string // see Process.home
}

// ElasticsearchServer is one native Elasticsearch node, without the modules that aren't published for Maven: GET / is
// answered by 405, and there is no delete or update by query, painless, ingest, language analysis or security.
type ElasticsearchServer struct {
	*Process
}

// StartElasticsearch starts a throwaway Elasticsearch node and returns when it answers. ctx bounds the start only. End
// it by ElasticsearchServer.Close, or Close.
func StartElasticsearch(ctx context.Context, o ElasticsearchOptions) (*ElasticsearchServer, error) {
	s, err := startElasticsearch(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("start Elasticsearch: %w", err)
	}
	return s, nil
}

// URL is the node's address, without a slash at its end.
func (s *ElasticsearchServer) URL() string { return "http://" + s.Addr() }

func startElasticsearch(ctx context.Context, o ElasticsearchOptions) (*ElasticsearchServer, error) {
	home, java, err := fetchElasticsearch(ctx)
	if err != nil {
		return nil, err
	}
	p, err := newProcess("elasticsearch", o.home)
	if err != nil {
		return nil, err
	}
	s := &ElasticsearchServer{Process: p}
	heap := strconv.Itoa(orDefault(o.HeapMB, 512)) + "m"
	p.args = func(port int) []string {
		args := append([]string{java}, compiler()...)
		args = append(args,
			"-Xms"+heap, "-Xmx"+heap, "-Djava.io.tmpdir="+p.dir, "-XX:-UsePerfData",
			"--module-path", filepath.Join(home, "lib"), "--add-modules=ALL-MODULE-PATH",
			"-cp", filepath.Join(home, "classes"), "Launcher", home,
			"path.data="+p.dataPath(), "path.logs="+p.dir, "node.name=tidemark", "http.port="+strconv.Itoa(port),
			"transport.port=0", "network.host=127.0.0.1", "discovery.type=single-node",
			"cluster.routing.allocation.disk.threshold_enabled=false",
		)
		for name, value := range o.Settings {
			args = append(args, name+"="+value)
		}
		return args
	}
	p.ready = s.health
	err = os.Mkdir(p.dataPath(), 0o700)
	if err == nil {
		err = p.launch(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// compiler has a node of tests that are to end soon compile by the quick compiler alone: half of the CPU time of a node
// that lives for a minute goes into the other one.
func compiler() []string {
	if effort.Rounds(2) < 2 {
		return []string{"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"}
	}
	return nil
}

// health returns nil when the node is the master of its cluster and so serves requests.
func (s *ElasticsearchServer) health(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+"/_cluster/health?timeout=1s", nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true} // its own, so that no connection stays
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("elasticsearch answered %s", resp.Status)
	}
	return nil
}
