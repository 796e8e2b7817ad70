package integration_test

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// ddl makes an index and changes the collection's options.
func ddl(f *things) {
	f.t.Helper()
	_, err := f.coll().Indexes().CreateOne(f.t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "n", Value: 1}}})
	must(f.t, err)
	must(f.t, f.db.RunCommand(f.t.Context(), bson.D{
		{Key: "collMod", Value: "things"},
		{Key: "index", Value: bson.D{{Key: "keyPattern", Value: bson.D{{Key: "n", Value: 1}}}, {Key: "hidden", Value: true}}},
	}).Err())
	must(f.t, f.coll().Indexes().DropOne(f.t.Context(), "n_1"))
}

// Events of types that the library does not know are passed over, counted, and move the
// position. Ordinary streams have none, so the guard that leaves expanded events out is
// off here. (CASES B18: `modify` is fatal, an event without documentKey crashes.)
func TestUnknownEventsArePassedOver(t *testing.T) {
	without(t, fault.ExpandEvents)
	f := newThings(t)
	g := f.run(mirror("unknown"))
	f.add(1)
	ddl(f)
	g.level(f.db)
	after := operationTime(t, f.db)
	if n := g.Status().PassedOver; n != 3 {
		t.Errorf("%d events were passed over, not createIndexes, modify and dropIndexes", n)
	}
	if at := f.checkpoint("unknown").Position.Time; at.Compare(after) > 0 || at.Compare(f.from) <= 0 {
		t.Errorf("the position is %v, the DDL was before %v", at, after)
	}
	f.add(1)
	g.level(f.db)
	f.same("unknown")
	g.stop()
	ddl(f)
	f.add(1)
	g = f.run(mirror("unknown"))
	g.level(f.db)
	f.same("unknown")
	if n := g.Status().PassedOver; n != 3 {
		t.Errorf("%d events were passed over after the restart: the position was not past the first DDL, or the second not seen", n)
	}
	g.stop()
}

// Ordinary streams have no such events.
func TestUnknownEventsAreNotAskedFor(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("unknown"))
	f.add(1)
	ddl(f)
	f.add(1)
	g.level(f.db)
	f.same("unknown")
	if s := g.Status(); s.PassedOver != 0 || s.Changes != 2 {
		t.Errorf("%d events were passed over, %d applied", s.PassedOver, s.Changes)
	}
	g.stop()
}
