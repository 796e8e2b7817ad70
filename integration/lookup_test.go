package integration_test

import (
	"context"
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
)

// A collection without images is mirrored by looking documents up: whatever becomes of
// a document between its change and the look-up, the rows are right in the end.
// (CASES B19: update followed at once by delete; B20: lookups that see a later version.)
func TestLookupMirrorsCollectionsWithoutImages(t *testing.T) {
	t.Parallel()
	f := plainThings(t, source(t), pool(t))
	p := mirror("looked_up", projector.Lookup())
	g := f.run(p)
	ctx := t.Context()
	documents := 5_000 * effort.Rounds(4)
	f.add(documents)
	_, err := f.coll().UpdateMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: documents / 2}}}}, add("n", 1))
	must(t, err)
	g.level(f.db)
	f.same("looked_up")

	r := seeded(t)
	for i := range effort.Rounds(60) {
		var models []mongo.WriteModel
		for range 50 {
			id := bson.D{{Key: "_id", Value: r.Int64N(2000)}}
			update := mongo.NewUpdateOneModel().SetFilter(id).SetUpdate(bson.D{{Key: "$set", Value: bson.D{{Key: "name", Value: fmt.Sprint("round ", i)}}}})
			switch r.IntN(5) {
			case 0:
				models = append(models, mongo.NewReplaceOneModel().SetFilter(id).SetUpsert(true).SetReplacement(bson.D{{Key: "name", Value: "replaced"}, {Key: "n", Value: i}}))
			case 1:
				models = append(models, mongo.NewDeleteOneModel().SetFilter(id))
			case 2:
				models = append(models, update, mongo.NewDeleteOneModel().SetFilter(id)) // at once
			case 3:
				models = append(models, update.SetUpsert(true), mongo.NewDeleteOneModel().SetFilter(id), update)
			default:
				models = append(models, update)
			}
		}
		write := func(ctx context.Context) error {
			_, err := f.coll().BulkWrite(ctx, models)
			return err
		}
		if i%3 == 0 {
			must(t, inTransaction(ctx, f.db, write))
		} else {
			must(t, write(ctx))
		}
		if r.IntN(15) == 0 { // a stop in the middle
			g.stop()
			g = f.run(p)
		}
	}
	g.level(f.db)
	f.same("looked_up")

	// Deleted while the runner is down: its look-ups find nothing.
	g.stop()
	_, err = f.coll().UpdateMany(ctx, bson.D{}, set("name", "the last"))
	must(t, err)
	_, err = f.coll().DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$gte", Value: 100}}}})
	must(t, err)
	g = f.run(p)
	g.level(f.db)
	f.same("looked_up")
	g.stop()
}

// A document that can't be decoded when it is looked up is named like any other.
func TestLookupNamesTheDocumentThatCannotBeRead(t *testing.T) {
	f := plainThings(t, source(t), pool(t))
	f.add(1000)
	for id := range 1000 {
		if id == 600 {
			_, err := f.coll().UpdateByID(t.Context(), id, set("n", "six hundred"))
			must(t, err)
		}
		if id%100 == 0 && id != 600 {
			_, err := f.coll().UpdateByID(t.Context(), id, set("n", -1))
			must(t, err)
		}
	}
	err := ends[*projector.PoisonError](t, f.run(mirror("looked_up", projector.Lookup())))
	if err.Key != "600" || err.Op != projector.Update || err.Namespace.Collection != "things" {
		t.Errorf("it names %s of %s in %s", err.Op, err.Key, err.Namespace)
	}
	if n := len(f.rows("looked_up")); n != 1000 {
		t.Errorf("there are %d rows of the 1000 inserted before it", n)
	}
	if n := selectOne[int](t, f.pool, "select count(*) from looked_up.things where n = -1"); n < 6 {
		t.Errorf("of the 6 updates before it %d are applied", n)
	}
}
