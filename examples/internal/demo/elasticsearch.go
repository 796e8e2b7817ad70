package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// inElasticsearch is behind a prefix of the demo's own.
type inElasticsearch struct {
	*elasticsearch.Sink
	client             *elastictransport.Client
	connections        *http.Transport
	prefix, projection string
}

func openElasticsearch(_ context.Context, w *World) (sink, error) {
	server, err := url.Parse(w.servers.elasticsearch)
	if err != nil {
		return nil, err
	}
	s := inElasticsearch{connections: &http.Transport{}, prefix: w.servers.prefix(), projection: w.demo.Projection}
	s.client, err = elastictransport.NewClient(elastictransport.WithURLs(server), elastictransport.WithTransport(s.connections))
	s.Sink = elasticsearch.New(s.client, elasticsearch.Prefix(s.prefix))
	return s, err
}

// errMissing: an index or a document is not there, or can't be read yet.
var errMissing = errors.New("not there")

func (s inElasticsearch) ask(ctx context.Context, method, path string, body, out any) error {
	var b bytes.Buffer
	if body != nil {
		if err := json.NewEncoder(&b).Encode(body); err != nil {
			return err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, "/"+path, &b)
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := s.client.Perform(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode == http.StatusNotFound, response.StatusCode == http.StatusServiceUnavailable:
		return fmt.Errorf("%s: %w: %s", path, errMissing, answer)
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s: %s", path, response.Status, answer)
	}
	return json.Unmarshal(answer, out)
}

func (s inElasticsearch) glance(ctx context.Context) (projector.Checkpoint, error) {
	var found struct {
		Source struct {
			Term        int64 `json:"term"`
			Generations []struct {
				Sequence int64  `json:"sequence"`
				Phase    string `json:"phase"`
				Body     string `json:"body"`
			} `json:"generations"`
		} `json:"_source"`
	}
	err := s.ask(ctx, http.MethodGet, s.prefix+"tidemark-checkpoints/_doc/"+s.projection, nil, &found)
	if err != nil && !errors.Is(err, errMissing) {
		return projector.Checkpoint{}, err
	}
	for _, g := range found.Source.Generations {
		if g.Phase == string(projector.Live) {
			return stored(s.projection, found.Source.Term, g.Sequence, []byte(g.Body), nil)
		}
	}
	return projector.Checkpoint{}, nil
}

func (s inElasticsearch) column(ctx context.Context, target, key, column string) (map[string]int64, error) {
	if err := s.Refresh(ctx, s.projection); err != nil {
		return nil, err
	}
	var found struct {
		Hits struct {
			Hits []struct {
				ID     string         `json:"_id"`
				Source map[string]any `json:"_source"`
			} `json:"hits"`
		} `json:"hits"`
	}
	all := map[string]any{"size": 10_000} // the most that a search gives
	if err := s.ask(ctx, http.MethodPost, s.Alias(s.projection, target)+"/_search", all, &found); err != nil {
		return nil, err
	}
	values := map[string]int64{}
	for _, h := range found.Hits.Hits {
		k := h.ID
		if key != "_id" {
			k = fmt.Sprint(h.Source[key])
		}
		v, ok := h.Source[column].(float64)
		if !ok {
			return nil, fmt.Errorf("%s: unexpected document %v", target, h)
		}
		values[k] = int64(v)
	}
	return values, nil
}

func (s inElasticsearch) close(ctx context.Context) error {
	defer s.connections.CloseIdleConnections()
	var indices map[string]any
	err := s.ask(ctx, http.MethodGet, s.prefix+"*/_alias", nil, &indices)
	for index := range indices {
		err = errors.Join(err, s.ask(ctx, http.MethodDelete, index, nil, new(any)))
	}
	return err
}
