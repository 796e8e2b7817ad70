package integration_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// replacement is a way to replace or remove a collection as a whole.
type replacement struct {
	name  string
	event string
	do    func(f *things)
}

func rename(f *things, from, to string) {
	admin(f.t, f.db, bson.D{{Key: "renameCollection", Value: from}, {Key: "to", Value: to}, {Key: "dropTarget", Value: true}})
}

func insertInto(f *things, db *mongo.Database, coll string) {
	f.t.Helper()
	withImages(f.t, db, coll)
	_, err := db.Collection(coll).InsertMany(f.t.Context(), []any{bson.D{{Key: "_id", Value: "a"}}, bson.D{{Key: "_id", Value: "b"}}})
	must(f.t, err)
}

var replacements = []replacement{
	{"renamed over", "rename", func(f *things) {
		insertInto(f, f.db, "fresh")
		rename(f, f.db.Name()+".fresh", f.db.Name()+".things")
	}},
	{"out", "rename", func(f *things) {
		insertInto(f, f.db, "fresh")
		_, err := f.db.Collection("fresh").Aggregate(f.t.Context(), bson.A{bson.D{{Key: "$out", Value: "things"}}})
		must(f.t, err)
	}},
	{"renamed over from another database", "rename", func(f *things) {
		other := f.db.Client().Database(f.db.Name() + "_other")
		f.t.Cleanup(func() { _ = other.Drop(context.Background()) })
		insertInto(f, other, "fresh")
		rename(f, other.Name()+".fresh", f.db.Name()+".things")
	}},
	{"renamed away", "rename", func(f *things) { rename(f, f.db.Name()+".things", f.db.Name()+".old") }},
	{"dropped", "drop", func(f *things) { must(f.t, f.coll().Drop(f.t.Context())) }},
	{"database dropped", "drop", func(f *things) { must(f.t, f.db.Drop(f.t.Context())) }},
}

// stillReplaced demands an error that names the collection: that it is another one, or,
// before that is looked at, that there is none.
func stillReplaced(f *things, g *running) {
	f.t.Helper()
	err := g.wait(30 * time.Second)
	var replaced *projector.ReplacedError
	if !errors.As(err, &replaced) {
		f.t.Errorf("after a restart the runner ended with %v", err)
	} else if replaced.Namespace != (projector.Namespace{Database: f.db.Name(), Collection: "things"}) {
		f.t.Errorf("after a restart it names %s", replaced.Namespace)
	}
}

// A collection that is replaced or removed as a whole ends the projection with an error
// that names it, with everything before it applied and the position still before it.
// (CASES B14, B15: a consumer that dies, or silently stops listening, at a drop or
// rename; restore tools do it all the time.)
func TestReplacedCollectionEndsTheProjection(t *testing.T) {
	for _, r := range replacements {
		t.Run(r.name, func(t *testing.T) {
			f := newThings(t)
			g := f.run(mirror("replaced"))
			f.add(5)
			g.level(f.db)
			f.add(3) // not waited for: they must be committed all the same
			want := f.documents()
			r.do(f)
			err := ends[*projector.ReplacedError](t, g)
			if err.Namespace != (projector.Namespace{Database: f.db.Name(), Collection: "things"}) || err.Event != r.event {
				t.Errorf("it names %s, %s", err.Namespace, err.Event)
			}
			if diff := cmp.Diff(want, f.rows("replaced")); diff != "" {
				t.Errorf("rows (+) are not what was there before (-):\n%s", diff)
			}
			at := f.checkpoint("replaced").Position
			if !at.Time.Before(err.At.Time) {
				t.Errorf("the checkpoint at %s is not before the event at %s", at, err.At)
			}
			if n := g.Status().StreamsOpened; n > 2 {
				t.Errorf("%d streams were opened", n)
			}

			// Again, and a third time: the same, with the collection gone or another.
			for range 2 {
				g = f.run(mirror("replaced"))
				stillReplaced(f, g)
				if n := g.Status().StreamsOpened; n > 2 {
					t.Errorf("%d streams were opened after a restart", n)
				}
			}
			if now := f.checkpoint("replaced").Position; now.String() != at.String() {
				t.Errorf("the position has moved from %s to %s", at, now)
			}
		})
	}
}

// The same while the runner is down: the collection of that name is another one now.
func TestReplacedWhileDown(t *testing.T) {
	for _, r := range replacements {
		t.Run(r.name, func(t *testing.T) {
			f := newThings(t)
			g := f.run(mirror("replaced"))
			f.add(5)
			g.level(f.db)
			g.stop()
			before := f.stored("replaced")
			r.do(f)
			stillReplaced(f, f.run(mirror("replaced")))
			if now := f.stored("replaced"); now != before {
				t.Errorf("the checkpoint has changed from %v to %v", before, now)
			}
		})
	}
	t.Run("dropped and created again", func(t *testing.T) {
		f := newThings(t)
		g := f.run(mirror("replaced"))
		f.add(5)
		g.level(f.db)
		g.stop()
		must(t, f.coll().Drop(t.Context()))
		withImages(t, f.db, "things")
		f.add(2)
		ends[*projector.ReplacedError](t, f.run(mirror("replaced")))
	})
}

// Control: without the filter's to.coll a collection renamed over the followed one is
// missed, and the model goes on with rows of documents that are gone.
func TestReplacedIsMissedWithoutRenameTargets(t *testing.T) {
	for _, r := range replacements[:3] {
		t.Run(r.name, func(t *testing.T) {
			without(t, fault.RenameTarget)
			f := newThings(t)
			g := f.run(mirror("replaced"))
			f.add(5)
			g.level(f.db)
			r.do(f)
			g.level(f.db)
			if cmp.Equal(f.documents(), f.rows("replaced")) {
				t.Error("rows equal documents even so: the guard guards nothing")
			}
			g.stop() // without an error
		})
	}
}

// A database that goes away before the followed collection came into being delivers a
// dropDatabase and nothing else; the control shows that it has to be asked for.
func TestReplacedDatabaseOfACollectionToCome(t *testing.T) {
	event := func(t *testing.T) string {
		f := newThings(t)
		p := postgres.Projection{Name: "tocome", Version: 1, Bindings: postgres.Bindings{
			projector.On("later", func(context.Context, *postgres.Tx, []projector.Touch) error { return nil }),
		}}
		g := f.run(p)
		g.level(f.db)
		must(t, f.db.Drop(t.Context()))
		err := ends[*projector.ReplacedError](t, g)
		if err.Namespace.Database != f.db.Name() {
			t.Errorf("it names %s", err.Namespace)
		}
		if n := g.Status().StreamsOpened; n > 2 {
			t.Errorf("%d streams were opened", n)
		}
		return err.Event
	}
	if e := event(t); e != "dropDatabase" {
		t.Errorf("the event is %s", e)
	}
	t.Run("control without "+string(fault.DropDatabase), func(t *testing.T) {
		without(t, fault.DropDatabase)
		// The event is not seen: only the server closing its cursor tells that something was.
		if e := event(t); e == "dropDatabase" {
			t.Error("the event is seen even so: the guard guards nothing")
		}
	})
}

// A collection of the same name in another database, and a rename between two others,
// concern nobody.
func TestReplacedElsewhereIsNoConcern(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("replaced"))
	f.add(2)
	other := f.db.Client().Database(f.db.Name() + "_other")
	t.Cleanup(func() { _ = other.Drop(context.Background()) })
	insertInto(f, other, "things")
	must(t, other.Collection("things").Drop(t.Context()))
	insertInto(f, f.db, "a")
	insertInto(f, f.db, "b")
	rename(f, f.db.Name()+".a", f.db.Name()+".b")
	must(t, f.db.Collection("b").Drop(t.Context()))
	insertInto(f, other, "c")
	must(t, other.Drop(t.Context()))
	f.add(2)
	g.level(f.db)
	f.same("replaced")
	g.stop()
}
