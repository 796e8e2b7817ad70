package projector

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// plan is what the runner knows of a projection: everything but the sink's
// transaction type.
type plan struct {
	projection  string
	version     int
	database    string
	collections []followed
	byName      map[string]int
	bindings    []planned
	lookups     bool // one of them looks its documents up
	noRebuild   bool
}

// followed is a collection of the source, and which bindings follow it.
type followed struct {
	name     string
	images   images
	bindings []int
	on       bool // one of them is an On
	refresh  bool // one of them is a Refresh
}

// planned is a binding without its sink.
type planned struct {
	form       Form
	name       string
	watched    string // as in Watched.Bindings
	collection string
	owner      int  // of a Refresh's further collections: the index of its first; else its own
	sweeps     bool // its target can be rebuilt in place
	decode     func(*decoder, *change) (any, error)
	sample     func(*decoder, bson.Raw) ([]any, error)
	fetch      func(context.Context, *mongo.Collection, bson.Timestamp, *decoder, []any) error
}

var projectionName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,39}$`)

// newPlan checks a projection; all faults are found at once.
func newPlan[Tx any](db *mongo.Database, p Projection[Tx]) (*plan, []error) {
	var faults []error
	if db == nil {
		return nil, []error{errors.New("the source database is nil")}
	}
	if !projectionName.MatchString(p.Name) {
		faults = append(faults, fmt.Errorf("Name is %q; it must be lower-case letters, digits and underscores, a letter first, at most 40 of them", p.Name))
	}
	if p.Version < 1 {
		faults = append(faults, fmt.Errorf("Version is %d; it must be 1 or more", p.Version))
	}
	if len(p.Bindings) == 0 {
		faults = append(faults, errors.New("it has no Bindings, so nothing to follow"))
	}
	pl := &plan{projection: p.Name, version: p.Version, database: db.Name(), byName: map[string]int{}, noRebuild: p.NoRebuild}
	targets := map[string]string{}
	owner := 0
	for i, b := range p.Bindings {
		name := fmt.Sprintf("%s (%s)", b, b.collection)
		for _, f := range b.faults {
			for _, f := range each(f) {
				faults = append(faults, fmt.Errorf("%s: %w", name, f))
			}
		}
		if b.form == "" {
			faults = append(faults, fmt.Errorf("binding %d is empty; make it with Rollup, Upsert, Mirror, Refresh or On", i))
			continue
		}
		if b.collection == "" || strings.HasPrefix(b.collection, "system.") {
			faults = append(faults, fmt.Errorf("%s: %q is not a collection that can be followed", name, b.collection))
		}
		if b.target != "" {
			if other, ok := targets[b.target]; ok {
				faults = append(faults, fmt.Errorf("%s and %s write to one target; give each its own, or use one On handler", other, name))
			}
			targets[b.target] = name
		}
		if b.form != FormRefresh || b.refresh != nil {
			owner = i
		}
		watched := b.String()
		if b.layout != "" {
			watched += " (" + b.layout + ")"
		}
		pl.bindings = append(pl.bindings, planned{b.form, b.String(), watched, b.collection, owner, b.sweeper != nil || owner != i, b.decode, b.sample, b.fetch})
		c, ok := pl.byName[b.collection]
		if !ok {
			c = len(pl.collections)
			pl.byName[b.collection] = c
			pl.collections = append(pl.collections, followed{name: b.collection})
		}
		f := &pl.collections[c]
		f.images, f.bindings = f.images.or(b.images), append(f.bindings, len(pl.bindings)-1)
		f.on = f.on || b.form == FormOn
		f.refresh = f.refresh || b.form == FormRefresh
		pl.lookups = pl.lookups || b.lookup
	}
	return pl, faults
}

// images says what the stream as a whole has to ask for.
func (p *plan) images() (i images) {
	for _, c := range p.collections {
		i = i.or(c.images)
	}
	return i
}

func (p *plan) names() (names bson.A) {
	for _, c := range p.collections {
		names = append(names, c.name)
	}
	return names
}

// filter lets pass what concerns the followed collections. A rename onto one of them,
// $out into it, and a rename from another database arrive only as a rename whose `to`
// is the collection; a dropDatabase and the end of the stream have no collection at
// all (all seen on MongoDB 6.0).
func (p *plan) filter() bson.D {
	anyOf := bson.A{bson.D{{Key: "ns.coll", Value: bson.D{{Key: "$in", Value: p.names()}}}}}
	if !fault.Global.Off(fault.RenameTarget) {
		anyOf = append(anyOf, bson.D{{Key: "to.coll", Value: bson.D{{Key: "$in", Value: p.names()}}}})
	}
	if !fault.Global.Off(fault.DropDatabase) {
		anyOf = append(anyOf, bson.D{{Key: "operationType", Value: bson.D{{Key: "$in", Value: bson.A{"dropDatabase", "invalidate"}}}}})
	}
	return bson.D{{Key: "$match", Value: bson.D{{Key: "$or", Value: anyOf}}}}
}

// affected names what a drop, rename or dropDatabase concerns: the followed
// collection, or the database.
func (p *plan) affected(e *envelope) Namespace {
	if _, ok := p.byName[e.to.Collection]; ok && e.to.Database == p.database {
		return e.to
	}
	if e.Namespace.Database == "" {
		return Namespace{Database: p.database}
	}
	return e.Namespace
}

// items sorts what a batch holds by binding.
func (p *plan) items(batch []*change) [][]any {
	items := make([][]any, len(p.bindings))
	for _, c := range batch {
		if c.collection < 0 {
			continue
		}
		for slot, i := range p.collections[c.collection].bindings {
			if c.items[slot] == nil {
				continue // beyond a rebuild's frontier
			}
			if items[i] == nil {
				items[i] = make([]any, 0, len(batch))
			}
			items[i] = append(items[i], c.items[slot])
		}
	}
	return items
}

// leaveOut takes a change out of its batch, but for the keys that it touches.
func (p *plan) leaveOut(c *change) {
	if !p.collections[c.collection].refresh {
		c.collection, c.items, c.err = -1, nil, nil
		return
	}
	for slot, i := range p.collections[c.collection].bindings {
		if p.bindings[i].form != FormRefresh {
			c.items[slot] = nil
		}
	}
}

// inPlace reports what can't be rebuilt in place.
func (p *plan) inPlace() error {
	var faults []error
	for _, b := range p.bindings {
		if !b.sweeps {
			faults = append(faults, fmt.Errorf("%s (%s) can't be rebuilt in place: only a Mirror, an Upsert or a Refresh can, into a target that marks its rows; use mode Shadow or Reset", b.name, b.collection))
		}
	}
	return errors.Join(faults...)
}

// poison is the error for a change that one of its handlers can't take.
func (p *plan) poison(c *change, err error) error {
	return &PoisonError{Projection: p.projection, Namespace: c.Namespace, Key: KeyText(c.Key), Op: c.Op, At: c.position(), Err: err}
}

// mismatches tells how a stored checkpoint differs from this projection; nil: it fits.
func (p *plan) mismatches(stored Checkpoint, now Watch) *MismatchError {
	e := &MismatchError{Projection: p.projection}
	add := func(format string, args ...any) { e.Differs = append(e.Differs, fmt.Sprintf(format, args...)) }
	was := stored.Watch
	if was.Database != now.Database {
		add("it follows database %q, this follows %q", was.Database, now.Database)
	}
	if !was.ReplicaSet.IsZero() && !now.ReplicaSet.IsZero() && was.ReplicaSet != now.ReplicaSet {
		add("the source is another replica set (%s, was %s)", now.ReplicaSet.Hex(), was.ReplicaSet.Hex())
	}
	// A rebuild makes a new model for another source and for a later Version. What changed
	// under the same Version is more likely a mistake.
	e.Rebuild = len(e.Differs) > 0 || stored.Version < p.version
	if stored.Version != p.version {
		add("it was written by Version %d, this is Version %d", stored.Version, p.version)
	}
	old := map[string]Watched{}
	for _, c := range was.Collections {
		old[c.Name] = c
	}
	code := len(e.Differs)
	for _, c := range now.Collections {
		o, ok := old[c.Name]
		delete(old, c.Name)
		if !ok {
			add("collection %q is new", c.Name)
			continue
		}
		if o.Before != c.Before || o.After != c.After {
			add("collection %q: other images are needed", c.Name)
		}
		if !slices.Equal(o.Bindings, c.Bindings) {
			add("collection %q: its bindings are %v, were %v", c.Name, c.Bindings, o.Bindings)
		}
	}
	for _, c := range was.Collections {
		if _, gone := old[c.Name]; gone {
			add("collection %q is no longer followed", c.Name)
		}
	}
	if stored.Version > p.version || stored.Version == p.version && len(e.Differs) > code {
		e.Rebuild = false
	}
	if len(e.Differs) == 0 {
		return nil
	}
	return e
}
