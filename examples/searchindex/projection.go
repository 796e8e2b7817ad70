package main

import (
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
)

// Product is what the model needs of a document of the collection products.
type Product struct {
	Title  string   `bson:"title"`
	Tags   []string `bson:"tags"`
	Cents  int64    `bson:"cents"`
	Market string   `bson:"market"`
	Hidden bool     `bson:"hidden"`
}

// Entry is a document of the index; its id is the product's _id.
type Entry struct {
	Title  string   `row:"title"`
	Tags   []string `row:"tags,json"`
	Cents  int64    `row:"cents"`
	Market string   `row:"market"`
}

// Entry is a product as it can be found. Hidden ones, and those of markets without an
// index, can't.
func (p Product) Entry() (Entry, bool) {
	return Entry{p.Title, p.Tags, p.Cents, p.Market}, !p.Hidden && (p.Market == "eu" || p.Market == "us")
}

// Catalogue is the read model: an index for each market. Whoever changes it raises Version.
var Catalogue = elasticsearch.Projection{Name: "catalogue", Version: 1, Bindings: elasticsearch.Bindings{
	projector.Mirror("products", Product.Entry, elasticsearch.Index[Entry]{
		Name: "products", Routes: []string{"eu", "us"}, Route: func(e Entry) string { return e.Market },
		Mapping: `{"title": {"type": "text", "fields": {"raw": {"type": "keyword"}}}, "tags": {"type": "keyword"}}`,
	}),
}}
