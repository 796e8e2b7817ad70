package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// oddRow is a row as its sink has it: the values that are not null, each in the sink's own
// text form, so that its type is seen too.
type oddRow map[string]string

// typesSink is a sink that the odd values go to.
type typesSink interface {
	runner(db *mongo.Database, name string, o projector.Options) (*projector.Runner, error)
	// rows reads the model, by the text forms of the documents' _ids.
	rows(name string) map[string]oddRow
	// keyed reads the rows that have keys of their own, by the text forms of those.
	keyed(name string) map[string]oddRow
}

func typesIn(t *testing.T, p place) typesSink {
	t.Helper()
	switch p {
	case inPostgres:
		return &typesInPostgres{t, pool(t)}
	case inMongoDB:
		db := source(t)
		return &typesInMongoDB{t, db}
	case inRedis:
		return &typesInRedis{t, newRedisModel(t).own}
	case inElasticsearch:
		return &typesInElasticsearch{t, newElasticModel(t)}
	}
	t.Fatalf("no sink %s", p)
	return nil
}

// columns are those of typesRow and typesKey.
var columns = []string{"text", "flag", "whole", "double", "at", "bytes", "oid", "dec", "dynamic", "own", "word", "day"}

type typesInPostgres struct {
	t    *testing.T
	pool *pgxpool.Pool
}

func (s *typesInPostgres) runner(db *mongo.Database, name string, o projector.Options) (*projector.Runner, error) {
	return projector.New(db, postgres.New(s.pool), postgres.Projection{Name: name, Version: 1, Bindings: postgres.Bindings{
		projector.Mirror("odd", typesDoc.row, postgres.Table[typesRow]{Name: "odd"}),
		projector.Upsert("odd", typesDoc.keys, postgres.Table[typesKey]{Name: "keyed"}),
	}}, o)
}

func (s *typesInPostgres) rows(name string) map[string]oddRow {
	s.t.Helper()
	return s.read("select _id, to_jsonb(array[text, flag::text, whole::text, double::text, (at at time zone 'UTC')::text, " +
		"bytes::text, oid, dec::text, dynamic::text, own::text]) from " + name + ".odd")
}

func (s *typesInPostgres) keyed(name string) map[string]oddRow {
	s.t.Helper()
	return s.read("select _id, to_jsonb(array[null, null, null, null, null, null, null, null, null, null, word, (day at time zone 'UTC')::text]) from " + name + ".keyed")
}

func (s *typesInPostgres) read(query string) map[string]oddRow {
	s.t.Helper()
	found, err := s.pool.Query(s.t.Context(), query)
	must(s.t, err)
	defer found.Close()
	rows := map[string]oddRow{}
	for found.Next() {
		var id string
		var texts []*string
		must(s.t, found.Scan(&id, &texts))
		row := oddRow{}
		for i, text := range texts {
			if text != nil {
				row[columns[i]] = *text
			}
		}
		rows[id] = row.canonical(s.t)
	}
	must(s.t, found.Err())
	return rows
}

type typesInMongoDB struct {
	t  *testing.T
	db *mongo.Database
}

func (s *typesInMongoDB) runner(db *mongo.Database, name string, o projector.Options) (*projector.Runner, error) {
	return projector.New(db, mongodb.New(s.db), mongodb.Projection{Name: name, Version: 1, Bindings: mongodb.Bindings{
		projector.Mirror("odd", typesDoc.row, mongodb.Collection[typesRow]{Name: "odd"}),
		projector.Upsert("odd", typesDoc.keys, mongodb.Collection[typesKey]{Name: "keyed"}),
	}}, o)
}

func (s *typesInMongoDB) rows(name string) map[string]oddRow {
	s.t.Helper()
	rows := map[string]oddRow{}
	for _, doc := range s.all(name, "odd") {
		id := doc.Lookup("_id")
		rows[projector.KeyText(id)] = bsonRow(s.t, doc)
		rows[projector.KeyText(id)]["_id"] = id.Type.String() + " " + fmt.Sprintf("%x", id.Value)
	}
	return rows
}

func (s *typesInMongoDB) keyed(name string) map[string]oddRow {
	s.t.Helper()
	rows := map[string]oddRow{}
	for _, doc := range s.all(name, "keyed") {
		row := bsonRow(s.t, doc.Lookup("_id").Document())
		owner, err := doc.LookupErr("_owner")
		must(s.t, err)
		rows[projector.KeyText(owner)] = row
	}
	return rows
}

func (s *typesInMongoDB) all(name, target string) (docs []bson.Raw) {
	s.t.Helper()
	live, err := mongodb.Live(s.t.Context(), s.db, name, target)
	must(s.t, err)
	cur, err := live.Find(s.t.Context(), bson.D{})
	must(s.t, err)
	must(s.t, cur.All(s.t.Context(), &docs))
	return docs
}

// bsonRow has the values as extended JSON, which tells their types. What the option json has
// made is told apart from real values of those types.
func bsonRow(t *testing.T, doc bson.Raw) oddRow {
	t.Helper()
	row := oddRow{}
	for _, c := range columns {
		v, err := doc.LookupErr(c)
		switch {
		case err != nil || v.Type == bson.TypeNull:
		case c == "dynamic" || c == "own":
			row[c] = plainJSON(t, v)
		case v.Type == bson.TypeDouble: // of which the driver makes 5E-324.0
			row[c] = double(strconv.FormatFloat(v.Double(), 'g', -1, 64))
		default:
			row[c] = v.String()
		}
	}
	return row.canonical(t)
}

// plainJSON is a value of the types that the option json has in MongoDB.
func plainJSON(t *testing.T, v bson.RawValue) string {
	t.Helper()
	nested := func(doc bson.Raw, open, end string, named bool) string {
		elements, err := doc.Elements()
		must(t, err)
		parts := make([]string, len(elements))
		for i, e := range elements {
			if named {
				name, err := json.Marshal(e.Key())
				must(t, err)
				parts[i] = string(name) + ":"
			}
			parts[i] += plainJSON(t, e.Value())
		}
		return open + strings.Join(parts, ",") + end
	}
	switch v.Type {
	case bson.TypeEmbeddedDocument:
		return nested(v.Document(), "{", "}", true)
	case bson.TypeArray:
		return nested(bson.Raw(v.Value), "[", "]", false)
	case bson.TypeString, bson.TypeBoolean, bson.TypeNull, bson.TypeInt64, bson.TypeDouble:
		var held any
		must(t, v.Unmarshal(&held))
		text, err := json.Marshal(held)
		must(t, err)
		return string(text)
	}
	t.Errorf("the option json has made a %s", v.Type)
	return ""
}

type typesInRedis struct {
	t      *testing.T
	client *goredis.Client
}

func (s *typesInRedis) runner(db *mongo.Database, name string, o projector.Options) (*projector.Runner, error) {
	return projector.New(db, redis.New(s.client), redis.Projection{Name: name, Version: 1, Bindings: redis.Bindings{
		projector.Mirror("odd", typesDoc.row, redis.Hash[typesRow]{Name: "odd"}),
		projector.Upsert("odd", typesDoc.keys, redis.Hash[typesKey]{Name: "keyed"}),
	}}, o)
}

func (s *typesInRedis) rows(name string) map[string]oddRow {
	s.t.Helper()
	rows := map[string]oddRow{}
	s.each(name, "odd", func(key, _ string, row oddRow) { rows[key] = row })
	return rows
}

func (s *typesInRedis) keyed(name string) map[string]oddRow {
	s.t.Helper()
	rows := map[string]oddRow{}
	s.each(name, "keyed", func(_, doc string, row oddRow) { rows[doc] = row })
	return rows
}

// each hands over a row with its key and, of typesKey, the document that it comes from.
func (s *typesInRedis) each(name, target string, f func(key, doc string, row oddRow)) {
	s.t.Helper()
	ctx := s.t.Context()
	at, err := redis.Live(ctx, s.client, name)
	must(s.t, err)
	keys, err := s.client.HKeys(ctx, at+":"+target).Result()
	must(s.t, err)
	for _, key := range keys {
		found, err := s.client.HGetAll(ctx, at+":"+target+":"+key).Result()
		must(s.t, err)
		row := oddRow{}
		for _, c := range columns {
			if text, ok := found[c]; ok {
				row[c] = text
			}
		}
		f(key, found["doc"], row.canonical(s.t))
	}
}

type typesInElasticsearch struct {
	t *testing.T
	m *elasticModel
}

func (s *typesInElasticsearch) runner(db *mongo.Database, name string, o projector.Options) (*projector.Runner, error) {
	sink := elasticsearch.New(s.m.way, elasticsearch.Prefix(s.m.prefix))
	return projector.New(db, sink, elasticsearch.Projection{Name: name, Version: 1, Bindings: elasticsearch.Bindings{
		projector.Mirror("odd", typesDoc.row, elasticsearch.Index[typesRow]{Name: "odd"}),
		projector.Upsert("odd", typesDoc.keys, elasticsearch.Index[typesKey]{Name: "keyed"}),
	}}, o)
}

func (s *typesInElasticsearch) rows(name string) map[string]oddRow {
	s.t.Helper()
	rows := map[string]oddRow{}
	s.each(name, "odd", func(id, owner string, row oddRow) {
		if hashed := strings.HasPrefix(id, "sha256:"); hashed != (owner != "") || hashed && len(id) > 512 {
			s.t.Errorf("id %q has the owner %.80q", id, owner)
		}
		if owner != "" {
			id = owner
		}
		rows[id] = row
	})
	return rows
}

func (s *typesInElasticsearch) keyed(name string) map[string]oddRow {
	s.t.Helper()
	rows := map[string]oddRow{}
	s.each(name, "keyed", func(_, owner string, row oddRow) { rows[owner] = row })
	return rows
}

func (s *typesInElasticsearch) each(name, target string, f func(id, owner string, row oddRow)) {
	s.t.Helper()
	must(s.t, s.m.each(s.m.alias(name, target), func(id string, source []byte) error {
		var found map[string]json.RawMessage
		if err := json.Unmarshal(source, &found); err != nil {
			return err
		}
		row, owner := oddRow{}, ""
		for _, c := range columns {
			if text, ok := found[c]; ok && string(text) != "null" {
				row[c] = canonicalJSON(s.t, string(text))
			}
		}
		if text, ok := found["tm_owner"]; ok {
			if err := json.Unmarshal(text, &owner); err != nil {
				return err
			}
		}
		f(id, owner, row)
		return nil
	}))
}

// canonical writes JSON columns in one way, numbers as they are.
func (r oddRow) canonical(t *testing.T) oddRow {
	t.Helper()
	for _, c := range []string{"dynamic", "own"} {
		if text, ok := r[c]; ok {
			r[c] = canonicalJSON(t, text)
		}
	}
	return r
}

func canonicalJSON(t *testing.T, text string) string {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	must(t, d.Decode(&v))
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		t.Errorf("more than one JSON value: %.200s", text)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	must(t, e.Encode(v))
	return strings.TrimSuffix(b.String(), "\n")
}

// levelOr waits until the model has all of the source, or the runner ends.
func (g *running) levelOr(db *mongo.Database) error {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), time.Minute)
	defer cancel()
	at := operationTime(g.t, db)
	waited := make(chan error, 1)
	go func() { waited <- g.WaitFor(ctx, at) }()
	select {
	case err := <-waited:
		if err != nil {
			select {
			case <-g.done: // it ends, which whoever waits learns a little earlier
				return g.err
			case <-time.After(10 * time.Second):
				g.t.Fatalf("waiting for the model: %v: %+v", err, g.Status())
			}
		}
		return nil
	case <-g.done:
		cancel()
		<-waited
		return g.err
	}
}
