package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"
	"golang.org/x/sync/errgroup"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

// The index of the mirror, and of what it is compared with.
const (
	elasticMapping  = `{"number": {"type": "long"}, "customer": {"type": "keyword"}, "status": {"type": "keyword"}, "amount": {"type": "long"}}`
	elasticSettings = `{"number_of_replicas": 0}`
	elasticAlias    = "orders-orders"
)

func elasticClient(address string) (*elastictransport.Client, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	return elastictransport.NewClient(elastictransport.WithURLs(u))
}

// elasticDo makes a request; answer may be nil.
func elasticDo(ctx context.Context, method, address, body string, answer any) error {
	req, err := http.NewRequestWithContext(ctx, method, address, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s: %.300s", resp.Status, text)
	}
	if err != nil || answer == nil {
		return err
	}
	return json.Unmarshal(text, answer)
}

// withElastic gives f an Elasticsearch without indices. It is started, and made warm, for the first drain that needs
// it: a cold Java machine takes a quarter of what it takes later.
func (b *bench) withElastic(ctx context.Context, f func(target) error) (err error) {
	if b.elastic == nil {
		if b.elastic, err = serve.StartElasticsearch(ctx, serve.ElasticsearchOptions{HeapMB: 1024}); err != nil {
			return err
		}
		fmt.Println("warming Elasticsearch up")
		for range 3 {
			if err := b.removeIndices(ctx); err != nil {
				return err
			}
			if err := sendBulks(ctx, b.elastic.URL(), bulkBodies(b.events/2, 5000)); err != nil {
				return err
			}
		}
	}
	if err := b.removeIndices(ctx); err != nil {
		return err
	}
	return f(target{uri: b.elastic.URL(), elastic: true})
}

func (b *bench) removeIndices(ctx context.Context) error {
	var indices map[string]any
	if err := elasticDo(ctx, http.MethodGet, b.elastic.URL()+"/*?expand_wildcards=all", "", &indices); err != nil {
		return err
	}
	for name := range indices {
		if err := elasticDo(ctx, http.MethodDelete, b.elastic.URL()+"/"+name, "", nil); err != nil {
			return err
		}
	}
	return nil
}

// rawElasticBulk is the limit that a mirror into Elasticsearch is measured by: the change stream is read to its end,
// nothing decoded, and beside it the documents that the mirror writes are sent by two workers, encoded beforehand.
func rawElasticBulk(ctx context.Context, j job, _ *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	bodies := bulkBodies(j.Events/2, int(j.BatchSize))
	prepared := ownCPU()
	begin := time.Now()
	both, bctx := errgroup.WithContext(ctx)
	both.Go(func() error { return readStream(bctx, db, j) })
	both.Go(func() error { return sendBulks(bctx, j.Target, bodies) })
	if err := both.Wait(); err != nil {
		return r, err
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()-prepared
	r.RSS, err = peakRSS()
	return r, errors.Join(err, db.Client().Disconnect(ctx))
}

// bulkBodies are the mirror's writes as bodies of bulk requests, in two lanes: all versions of a document are in one.
func bulkBodies(orders, size int) (lanes [2][][]byte) {
	var open [2]bytes.Buffer
	var count [2]int
	add := func(n int, o order, version int) {
		l := n % 2
		fmt.Fprintf(&open[l], `{"index":{"_index":%q,"_id":%q,"version":%d,"version_type":"external_gte"}}`+"\n"+
			`{"number":%d,"customer":%q,"status":%q,"amount":%d}`+"\n", elasticAlias, o.ID.Hex(), version, o.Number, o.Customer, o.Status, o.Amount)
		if count[l]++; count[l] == size {
			lanes[l] = append(lanes[l], bytes.Clone(open[l].Bytes()))
			open[l].Reset()
			count[l] = 0
		}
	}
	for n := range orders {
		add(n, orderAt(n), 1)
	}
	for _, n := range updateOrder(orders) {
		add(n, changedOrder(n), 2)
	}
	for l := range open {
		if open[l].Len() > 0 {
			lanes[l] = append(lanes[l], open[l].Bytes())
		}
	}
	return lanes
}

// sendBulks makes the index and sends each lane's bodies one after the other.
func sendBulks(ctx context.Context, address string, lanes [2][][]byte) error {
	index := fmt.Sprintf(`{"settings": %s, "mappings": {"dynamic": "strict", "properties": %s}}`, elasticSettings, elasticMapping)
	if err := elasticDo(ctx, http.MethodPut, address+"/"+elasticAlias, index, nil); err != nil {
		return err
	}
	workers, wctx := errgroup.WithContext(ctx)
	for _, bodies := range lanes {
		workers.Go(func() error {
			for _, body := range bodies {
				var answer struct {
					Errors bool `json:"errors"`
				}
				if err := elasticDo(wctx, http.MethodPost, address+"/_bulk?filter_path=errors", string(body), &answer); err != nil {
					return err
				}
				if answer.Errors {
					return errors.New("a bulk request has failed items")
				}
			}
			return nil
		})
	}
	return workers.Wait()
}

// elasticOrders reads the mirror by its alias, page by page.
func elasticOrders(ctx context.Context, address string) (map[orderRow]bool, error) {
	if err := elasticDo(ctx, http.MethodPost, address+"/"+elasticAlias+"/_refresh", "", nil); err != nil {
		return nil, err
	}
	got := map[orderRow]bool{}
	for after := int64(-1); ; {
		var page struct {
			Hits struct {
				Hits []struct {
					Source struct {
						Number   int64  `json:"number"`
						Customer string `json:"customer"`
						Status   string `json:"status"`
						Amount   int64  `json:"amount"`
					} `json:"_source"`
				} `json:"hits"`
			} `json:"hits"`
		}
		query := fmt.Sprintf(`{"size": 10000, "sort": ["number"], "search_after": [%d]}`, after)
		if err := elasticDo(ctx, http.MethodPost, address+"/"+elasticAlias+"/_search", query, &page); err != nil {
			return nil, err
		}
		if len(page.Hits.Hits) == 0 {
			return got, nil
		}
		for _, h := range page.Hits.Hits {
			got[orderRow(h.Source)] = true
			after = h.Source.Number
		}
	}
}
