package elasticsearch

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// Index is an index of a model, in the place of the model's generation. Its fields follow
// from the row type R. The tag `row:"column"` names a field's column. After the name may
// stand ",key" (the keys together identify a row) or ",json" (any Go type, stored as
// JSON); "-" leaves the field out. Every exported field needs one. Which Go types
// there are, and how they are mapped, is in the package's documentation.
//
// What the index is for follows from R, too: a row type with keys makes one for an Upsert,
// one without keys one for a Mirror. There is none for a Rollup, since nothing can be
// added up safely where there are no transactions: it does not compile.
type Index[R any] struct {
	// Name of the target: lower-case letters, digits and underscores, a letter first.
	Name string
	// Mapping of fields by their columns, as a JSON object, such as
	//
	//	{"title": {"type": "text", "fields": {"raw": {"type": "keyword"}}}}
	//
	// Fields that are not named have what follows from their Go type. "": all of them.
	Mapping string
	// Lenient: what a document has and the mapping does not name is kept but can't be
	// searched (dynamic: false). By default such a document is refused (dynamic: strict).
	// It concerns what is inside of fields only, since the columns are all mapped.
	Lenient bool
	// Settings of the index as a JSON object: analysis, shards, replicas, and so on. "":
	// the server's own, but index.gc_deletes is 1h. What acknowledged writes rely on can't
	// be set: translog.durability is request, and there are no pipelines.
	Settings string
	// Routes splits the index: there is one for each of these names (formed like Name),
	// and Route says which one a row is in. Keep them few: a document that is written to
	// one of them is deleted from all others.
	Routes []string
	Route  func(R) string
}

var _ projector.Putter[*Tx, struct{}] = Index[struct{}]{}

// Target implements projector.Model.
func (x Index[R]) Target() string { return x.Name }

// Versioned tells the runner that removals must name every key that a document has had
// in a batch, not only what it had before: rows of a part of it may be there already.
func (x Index[R]) Versioned() bool { return true }

// Layout implements projector.Layout.
func (x Index[R]) Layout() string {
	fields := row.Layout[R]()
	if len(x.Routes) > 0 {
		fields += ", routed to " + strings.Join(x.Routes, " ")
	}
	if d := x.Mapping + "\x00" + x.Settings; len(d) > 1 || x.Lenient {
		fields += fmt.Sprintf(", definition %08x", crc32.ChecksumIEEE(fmt.Appendf(nil, "%s\x00%t", d, x.Lenient)))
	}
	return fields
}

// Check implements projector.Model.
func (x Index[R]) Check(form projector.Form) error {
	p, err := x.plan()
	if err != nil {
		return err
	}
	if form == projector.FormRollup {
		return fmt.Errorf("index %q can't be the target of a Rollup: Elasticsearch has no transactions, and a sum would count twice after a crash", x.Name)
	}
	return row.CheckForm(p.schema, form, "index", x.Name)
}

// plan is what follows from a target.
type plan struct {
	schema   *row.Schema
	name     string
	names    []string // of its indices: the target's own, or one for each route
	mapping  object
	settings object
	lenient  bool
}

func (x Index[R]) plan() (*plan, error) {
	s, err := row.Of[R]()
	fault := func(format string, args ...any) {
		err = errors.Join(err, fmt.Errorf("index %q: "+format, append([]any{x.Name}, args...)...))
	}
	if wrong := row.ColumnName(x.Name); wrong != "" {
		fault("bad name: %s", wrong)
	}
	if (x.Route == nil) != (len(x.Routes) == 0) {
		fault("Route and Routes go together; give both, or neither")
	}
	for i, r := range x.Routes {
		if wrong := row.ColumnName(r); wrong != "" {
			fault("bad route %q: %s", r, wrong)
		}
		if slices.Contains(x.Routes[:i], r) {
			fault("route %q is there twice", r)
		}
	}
	if err != nil {
		return nil, err
	}
	p := &plan{schema: s, name: x.Name, names: []string{x.Name}, lenient: x.Lenient}
	if len(x.Routes) > 0 {
		p.names = p.names[:0]
		for _, r := range x.Routes {
			p.names = append(p.names, x.Name+"-"+r)
		}
	}
	if wrong := p.checkDefinition(x.Mapping, x.Settings); wrong != nil {
		fault("%w", wrong)
	}
	return p, err
}

func (x Index[R]) planned() (*plan, error) {
	p, err := x.plan()
	if err != nil {
		return nil, &setupError{fmt.Errorf("tidemark/elasticsearch: %w", err)}
	}
	return p, nil
}

// Create implements projector.Model. The indices are made at once; readers see them, by
// their aliases, with the first commit of a live generation.
func (x Index[R]) Create(ctx context.Context, tx *Tx) error {
	p, err := x.planned()
	if err != nil {
		return err
	}
	for _, name := range p.names {
		if err := tx.create(ctx, p, name); err != nil {
			return tx.fail(failed("create index "+name, err))
		}
	}
	return nil
}

// Clear implements projector.Model: it puts new, empty indices in the place of those that
// are there, which readers go on seeing until the commit.
func (x Index[R]) Clear(ctx context.Context, tx *Tx) error {
	p, err := x.planned()
	if err != nil {
		return err
	}
	for _, name := range p.names {
		if err := tx.clear(ctx, p, name); err != nil {
			return tx.fail(failed("clear index "+name, err))
		}
	}
	return nil
}

// Put implements projector.Putter. Every row and every removal needs its change's
// Version, by which the server refuses what is late. A removal without a Row is for rows
// without keys only.
func (x Index[R]) Put(ctx context.Context, tx *Tx, remove, put []projector.Row[R]) error {
	p, err := x.planned()
	if err != nil {
		return tx.fail(err)
	}
	targets, err := tx.targets(p)
	if err != nil {
		return tx.fail(err)
	}
	tx.round++
	w := writer{tx: tx, plan: p, targets: targets}
	stored, err := w.earlierPart(ctx, len(remove), func(i int) erased { return erase(&remove[i]) })
	if err != nil {
		return tx.fail(failed("read rows of index "+strconv.Quote(x.Name), err))
	}
	for i := range remove {
		if err := w.identify(erase(&remove[i])); err != nil {
			return tx.fail(err)
		}
		for i, t := range targets {
			if s, there := stored[docKey{t, w.id}]; !there || s.version != w.version || s.owner == w.owner {
				w.remove(i)
			}
		}
	}
	for i := range put {
		r := erase(&put[i])
		if err := w.identify(r); err != nil {
			return tx.fail(err)
		}
		if !r.row.IsValid() {
			return tx.fail(&setupError{fmt.Errorf("tidemark/elasticsearch: index %q: a row to put is nil", x.Name)})
		}
		route := 0
		if x.Route != nil {
			name := x.Route(*put[i].Row)
			if route = slices.Index(x.Routes, name); route < 0 {
				return tx.fail(w.refuse(fmt.Errorf("Route says %q, which is none of Routes %q", name, x.Routes)))
			}
		}
		if err := w.put(route, r); err != nil {
			return tx.fail(err)
		}
		for other := range targets {
			if other != route && !fault.Global.Off(fault.RouteDelete) {
				w.remove(other)
			}
		}
	}
	return tx.relieve(ctx)
}

// erased is a projector.Row without its type.
type erased struct {
	owner   bson.RawValue
	version int64
	row     reflect.Value // invalid where Row is nil
}

func erase[R any](r *projector.Row[R]) erased {
	e := erased{owner: r.Owner, version: r.Version}
	if r.Row != nil {
		e.row = reflect.ValueOf(r.Row).Elem()
	}
	return e
}
