package mongodb_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// indexes are those of a collection but for the one on _id, sorted by name, a line each.
func (d *database) indexes(t *testing.T, name string) string {
	t.Helper()
	cur, err := d.Collection(name).Indexes().List(t.Context())
	must(t, err)
	var specs []bson.D
	must(t, cur.All(t.Context(), &specs))
	var lines []string
	for _, spec := range specs {
		var name, rest string
		for _, e := range spec {
			b, err := bson.MarshalExtJSON(bson.D{e}, false, false)
			must(t, err)
			switch e.Key {
			case "name":
				name = e.Value.(string)
			case "key", "sparse", "unique", "expireAfterSeconds":
				rest += " " + string(b)
			}
		}
		if name != "_id_" {
			lines = append(lines, name+rest)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// creating is a Setup that makes a collection, with indexes.
func creating(name string, indexes ...mongo.IndexModel) func(context.Context, *mongodb.Tx) error {
	return func(ctx context.Context, tx *mongodb.Tx) error { return tx.Collection(name).Create(ctx, indexes...) }
}

// What the projection makes itself comes before what the live collection has, wherever
// it makes it; the rest is taken over.
func TestOwnIndexesWin(t *testing.T) {
	on := func(field string) mongo.IndexModel { return mongo.IndexModel{Keys: bson.D{{Key: field, Value: 1}}} }
	with := func(m mongo.IndexModel, o *options.IndexOptionsBuilder) mongo.IndexModel {
		m.Options = o
		return m
	}
	for name, c := range map[string]struct {
		old, own mongo.IndexModel
		want     string
	}{
		"the same":   {on("s"), on("s"), `s_1 {"key":{"s":1}}`},
		"sparse":     {on("s"), with(on("s"), options.Index().SetSparse(true)), `s_1 {"key":{"s":1}} {"sparse":true}`},
		"unique":     {on("s"), with(on("s"), options.Index().SetUnique(true)), `s_1 {"key":{"s":1}} {"unique":true}`},
		"other name": {on("s"), with(on("s"), options.Index().SetName("x")), `x {"key":{"s":1}}`},
		"other keys": {with(on("s"), options.Index().SetName("x")), with(on("u"), options.Index().SetName("x")), `x {"key":{"u":1}}`},
		"by hand":    {with(on("s"), options.Index().SetExpireAfterSeconds(60)), on("s"), `s_1 {"key":{"s":1}}`},
		"text": {
			mongo.IndexModel{Keys: bson.D{{Key: "s", Value: "text"}}},
			mongo.IndexModel{Keys: bson.D{{Key: "u", Value: "text"}}},
			`u_text {"key":{"_fts":"text","_ftsx":1}}`,
		},
	} {
		for _, once := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				d := newDatabase(t)
				live := d.acquired(t, creating("a", c.old))
				_, err := d.Collection("model.a").Indexes().CreateOne(t.Context(), on("hand"))
				must(t, err)
				shadow, err := d.sink.Begin(t.Context(), live, 2)
				must(t, err)
				setup := []func(context.Context, *mongodb.Tx) error{creating("a", c.own)}
				if !once { // as a target does, and Setup after it
					setup = append([]func(context.Context, *mongodb.Tx) error{creating("a")}, setup...)
				}
				// Setup may write as well, after which the server makes no index.
				setup = append(setup, func(ctx context.Context, tx *mongodb.Tx) error {
					_, err := tx.Collection("a").InsertOne(ctx, bson.D{})
					return err
				})
				_, err = commit(t, d.sink, shadow, setup...)
				must(t, err)
				equal(t, "indexes", d.indexes(t, "model.g2.a"), `hand_1 {"key":{"hand":1}}`+"\n"+c.want)
			})
		}
	}
}

// A collection that comes to be by a handler's write takes over as well, in whichever
// commit of the new generation that is.
func TestWritesInherit(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, inc("a"), func(_ context.Context, tx *mongodb.Tx) error {
		for _, name := range []string{"first", "unused"} {
			tx.Collection(name).Queue(mongo.NewInsertOneModel().SetDocument(bson.D{}))
		}
		return nil
	})
	for _, name := range []string{"first", "numbers", "unused"} {
		_, err := d.Collection("model."+name).Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "n", Value: 1}}})
		must(t, err)
	}
	must(t, d.RunCommand(t.Context(), bson.D{{Key: "collMod", Value: "model.numbers"}, {Key: "validationAction", Value: "warn"}}).Err())
	shadow, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	shadow, err = commit(t, d.sink, shadow, func(ctx context.Context, tx *mongodb.Tx) error {
		_, err := tx.Collection("first").InsertOne(ctx, bson.D{})
		return err
	})
	must(t, err)
	for range 2 {
		shadow, err = commit(t, d.sink, shadow, inc("a"), inc("b"))
		must(t, err)
	}
	equal(t, "rows", d.rows(t, "g2.numbers"), `{"_id":"a","n":2}`+"\n"+`{"_id":"b","n":2}`)
	for _, name := range []string{"first", "numbers"} {
		equal(t, name, d.indexes(t, "model.g2."+name), `n_1 {"key":{"n":1}}`)
	}
	specs, err := d.ListCollectionSpecifications(t.Context(), bson.D{{Key: "name", Value: "model.g2.numbers"}})
	must(t, err)
	equal(t, "options", specs[0].Options.Lookup("validationAction").String(), `"warn"`)
	// One that another process goes on with, and one that was dropped by hand meanwhile.
	all, err := d.other(t).Acquire(t.Context(), model, "next")
	must(t, err)
	_, err = commit(t, d.other(t), all[1], inc("a"), func(ctx context.Context, tx *mongodb.Tx) error {
		_, err := tx.Collection("numbers").DeleteOne(ctx, id("b"))
		return err
	})
	must(t, err)
	equal(t, "rows", d.rows(t, "g2.numbers"), `{"_id":"a","n":3}`)
	equal(t, "collections", d.names(t), "model.first model.g2.first model.g2.numbers model.numbers model.unused tidemark.checkpoints")
}
