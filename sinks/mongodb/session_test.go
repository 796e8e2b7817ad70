package mongodb_test

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/projector"
)

// lsid is the session that the checkpoint names.
func (d *database) lsid(t *testing.T) string {
	t.Helper()
	return d.stored(t).Lookup("lsid").String()
}

// A sink that was set back by several terms, to what another process had stored, goes on
// in one session.
func TestOneSessionAfterSetBack(t *testing.T) {
	d := newDatabase(t)
	d.acquired(t)
	before := d.stored(t)
	for range 3 {
		_, err := acquire(t.Context(), d.sink, "test")
		must(t, err)
	}
	_, err := d.checkpoints().ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: model}}, before)
	must(t, err)
	cp, err := acquire(t.Context(), d.sink, "test")
	must(t, err)
	equal(t, "term", cp.Term, 2)
	cp, err = commit(t, d.sink, cp, inc("a"))
	must(t, err)
	was := d.lsid(t)
	for range 3 {
		cp, err = commit(t, d.sink, cp, inc("a"))
		must(t, err)
		equal(t, "session", d.lsid(t), was)
	}
}

// Who has the term, but is not the owner, leaves no trace.
func TestSessionOfAnotherOwner(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	was := d.lsid(t)
	cp.Owner = "other"
	_, err := commit(t, d.other(t), cp, inc("a"))
	wantFenced(t, err)
	equal(t, "session", d.lsid(t), was)
}

func TestTooManySessionsPass(t *testing.T) {
	d := newDatabase(t)
	wantClass(t, d.sink, mongo.CommandError{Code: 261, Name: "TooManyLogicalSessions"}, projector.Transient)
}
