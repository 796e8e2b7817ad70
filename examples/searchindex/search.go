package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// found is an entry that fits a search.
type found struct {
	ID    string `json:"_id"`
	Entry struct {
		Title  string   `json:"title"`
		Tags   []string `json:"tags"`
		Cents  int64    `json:"cents"`
		Market string   `json:"market"`
	} `json:"_source"`
}

// search prints what fits some words best.
func search(ctx context.Context, es elasticsearch.Client, prefix, market, words string) error {
	entries, err := find(ctx, es, prefix, market, words)
	for _, f := range entries {
		fmt.Printf("%s  %s: %s  %d.%02d\n", f.ID, f.Entry.Market, f.Entry.Title, f.Entry.Cents/100, f.Entry.Cents%100)
	}
	if err == nil && len(entries) == 0 {
		fmt.Println("nothing found")
	}
	return err
}

// find searches by the alias of the catalogue, or of its part for a market: whatever
// indices a rebuild puts behind it. All words must be in the title.
func find(ctx context.Context, es elasticsearch.Client, prefix, market, words string) ([]found, error) {
	index := elasticsearch.New(es, elasticsearch.Prefix(prefix)).Alias(Catalogue.Name, "products")
	if market != "" {
		index += "-" + market
	}
	query, err := json.Marshal(map[string]any{"size": 20, "query": map[string]any{"match": map[string]any{
		"title": map[string]any{"query": words, "operator": "and"},
	}}})
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "/"+index+"/_search", bytes.NewReader(query))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := es.Perform(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("search %s: %s: %s", index, response.Status, answer)
	}
	var result struct {
		Hits struct {
			Hits []found `json:"hits"`
		} `json:"hits"`
	}
	err = json.Unmarshal(answer, &result)
	return result.Hits.Hits, err
}
