package projector

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/order"
)

// Rollup keeps sums per key: f turns a document into its contributions, rows whose
// fields are keys and sums, and the library adds f(after) − f(before) for every
// change. A row exists while it has a contribution. A filter is an f that returns
// nothing for some documents.
//
// f must be a pure function of the document, and it is called for both images, which
// the collection must keep.
func Rollup[T, R, Tx any](collection string, f func(T) []R, into Adder[Tx, R]) Binding[Tx] {
	type delta struct{ minus, plus []R }
	b := formBinding[Tx](FormRollup, collection, into, f == nil)
	b.images = images{before: true, after: true}
	b.sample = sampleOf(f)
	b.decode = func(d *decoder, c *change) (any, error) {
		minus, plus, err := both(d, c, f)
		return &delta{minus, plus}, err
	}
	b.apply = func(ctx context.Context, tx Tx, items []any) error {
		minus, plus := make([]R, 0, len(items)), make([]R, 0, len(items))
		for _, i := range items {
			d := i.(*delta)
			minus, plus = append(minus, d.minus...), append(plus, d.plus...)
		}
		return into.Add(ctx, tx, minus, plus)
	}
	return b
}

// Upsert keeps rows with keys of their own: f turns a document into its rows, and
// the library writes f(after) and removes what f(before) had and f(after) has not.
// Each row belongs to the document that wrote it last; only its owner's changes
// remove it, so that a key can be handed from one document to another. Two documents
// must not claim one key at the same time: the later one would win, and the row would
// go when that one does. Of two rows with one key from one document the last wins.
//
// f must be a pure function of the document, and it is called for both images, which
// the collection must keep.
func Upsert[T, R, Tx any](collection string, f func(T) []R, into Putter[Tx, R]) Binding[Tx] {
	b := formBinding[Tx](FormUpsert, collection, into, f == nil)
	b.images = images{before: true, after: true}
	b.sample = sampleOf(f)
	everyRow := versioned(into)
	b.decode = func(d *decoder, c *change) (any, error) {
		before, after, err := both(d, c, f)
		return &rows[R]{owner: c.Key, version: c.Version, before: before, after: after}, err
	}
	b.apply = func(ctx context.Context, tx Tx, items []any) error {
		remove, put := foldRows[R](items, everyRow)
		return into.Put(ctx, tx, remove, put)
	}
	return b
}

// MirrorOption changes how Mirror gets at its documents.
type MirrorOption func(*mirrorOptions)

type mirrorOptions struct{ lookup bool }

// Lookup lets Mirror follow a collection that keeps no images: updated documents are
// read when their batch is applied, by one find per batch. The rows are then as of
// that moment, not of the change's, so a reader can see a part of a source
// transaction.
func Lookup() MirrorOption { return func(o *mirrorOptions) { o.lookup = true } }

// Mirror keeps one row per document: f turns a document into its row, or says false
// for a document that has none. Rows are keyed by the document's _id.
//
// f must be a pure function of the document. The collection must keep post-images,
// unless the option Lookup is given.
func Mirror[T, R, Tx any](collection string, f func(T) (R, bool), into Putter[Tx, R], opts ...MirrorOption) Binding[Tx] {
	var o mirrorOptions
	for _, opt := range opts {
		opt(&o)
	}
	b := formBinding[Tx](FormMirror, collection, into, f == nil)
	b.images = images{after: !o.lookup}
	b.lookup = o.lookup
	row := func(item *rows[R], doc *T) {
		item.after = nil
		if doc == nil {
			return
		}
		if r, ok := f(*doc); ok {
			item.after = []R{r}
		}
	}
	b.sample = sampleOf(func(doc T) []R {
		item := new(rows[R])
		row(item, &doc)
		return item.after
	})
	b.decode = func(d *decoder, c *change) (any, error) {
		item := &rows[R]{owner: c.Key, version: c.Version, all: true, missing: o.lookup && c.Op == Update}
		after, err := decode[T](d, c.after)
		if err != nil {
			return nil, err
		}
		row(item, after)
		return item, nil
	}
	if o.lookup {
		b.fetch = func(ctx context.Context, coll *mongo.Collection, at bson.Timestamp, d *decoder, items []any) error {
			missing := map[string]*rows[R]{}
			var ids []bson.RawValue
			for _, i := range items {
				item := i.(*rows[R])
				k := identity(item.owner)
				if item.missing && missing[k] == nil {
					ids = append(ids, item.owner)
				}
				delete(missing, k) // a later change of the document decides
				if item.missing {
					missing[k] = item
				}
			}
			return lookupDocuments(ctx, coll, at, ids, func(doc bson.Raw) error {
				item := missing[identity(doc.Lookup("_id"))]
				if item == nil {
					return nil
				}
				err := safely(func() error {
					after, err := decode[T](d, doc)
					row(item, after)
					return err
				})
				if err != nil {
					return &undecodable{item: item, err: err}
				}
				return nil
			})
		}
	}
	b.apply = func(ctx context.Context, tx Tx, items []any) error {
		remove, put := foldRows[R](items, false) // by owner, whatever it had
		return into.Put(ctx, tx, remove, put)
	}
	if loader, ok := into.(Loader[Tx, R]); ok {
		b.load = func(ctx context.Context, tx Tx, items []any) error {
			put := make([]Row[R], 0, len(items))
			for _, i := range items {
				item := i.(*rows[R])
				for j := range item.after {
					put = append(put, Row[R]{Owner: item.owner, Version: item.version, Row: &item.after[j]})
				}
			}
			return loader.Load(ctx, tx, put)
		}
	}
	return b
}

// rows is what one change does to the rows of its document.
type rows[R any] struct {
	owner         bson.RawValue
	version       int64
	all           bool // whatever rows the owner has go, before is not known
	missing       bool // the document has to be looked up
	before, after []R
}

// versioned reports whether a target keeps a version per row and commits without a
// transaction.
func versioned(target any) bool {
	v, ok := target.(interface{ Versioned() bool })
	return ok && v.Versioned()
}

// foldRows takes the changes of each document together: what it had before the first
// and has not after the last is removed. Put is in the order of the last changes.
//
// With every, also what it had in between is removed: a sink without transactions may
// have it, from a shorter batch that was written and whose checkpoint was not.
func foldRows[R any](items []any, every bool) (remove, put []Row[R]) {
	type span struct{ first, last *rows[R] }
	spans := make(map[string]*span, len(items))
	for _, i := range items {
		item := i.(*rows[R])
		k := identity(item.owner)
		if s := spans[k]; s != nil {
			s.last = item
		} else {
			spans[k] = &span{item, item}
		}
	}
	for _, i := range items {
		last := i.(*rows[R])
		s := spans[identity(last.owner)]
		if every && s.first != last {
			for j := range last.before {
				remove = append(remove, Row[R]{Owner: last.owner, Version: s.last.version, Row: &last.before[j]})
			}
		}
		if s.last != last {
			continue
		}
		if last.all && len(last.after) == 0 {
			remove = append(remove, Row[R]{Owner: last.owner, Version: last.version})
		}
		for j := range s.first.before {
			remove = append(remove, Row[R]{Owner: last.owner, Version: last.version, Row: &s.first.before[j]})
		}
		for j := range last.after {
			put = append(put, Row[R]{Owner: last.owner, Version: last.version, Row: &last.after[j]})
		}
	}
	return remove, put
}

// identity is a map key for an _id. A replacement can change the type of a number in it,
// so whole numbers have one whatever their type, as in KeyText.
func identity(v bson.RawValue) string {
	switch v.Type {
	case bson.TypeInt32, bson.TypeInt64, bson.TypeDouble, bson.TypeDecimal128, bson.TypeEmbeddedDocument:
		return "#" + KeyText(v)
	}
	return string(v.Type) + string(v.Value)
}

// On is the open form: the handler gets the changes themselves, in the order of the
// stream, in runs of consecutive changes of this binding, and writes what it likes
// through tx. The element type C says which images it needs: Change[T] both, State[T]
// the one after, Touch none.
//
// The handler may run again for the same changes, with its earlier writes rolled
// back; it must do nothing that tx does not cover.
func On[C, Tx any, P delivered[C]](collection string, handler func(context.Context, Tx, []C) error) Binding[Tx] {
	b := Binding[Tx]{form: FormOn, collection: collection, images: P(nil).images()}
	if handler == nil {
		b.faults = append(b.faults, errors.New("the handler is nil"))
	}
	b.decode = func(d *decoder, c *change) (any, error) {
		p := P(new(C))
		return (*C)(p), p.deliver(d, c)
	}
	b.apply = func(ctx context.Context, tx Tx, items []any) error {
		changes := make([]C, len(items))
		for i, item := range items {
			changes[i] = *item.(*C)
		}
		return handler(ctx, tx, changes)
	}
	return b
}

// Each makes a handler of many changes from a handler of one.
func Each[C, Tx any](h func(context.Context, Tx, C) error) func(context.Context, Tx, []C) error {
	return func(ctx context.Context, tx Tx, changes []C) error {
		for _, c := range changes {
			if err := h(ctx, tx, c); err != nil {
				return err
			}
		}
		return nil
	}
}

// both is what a pure function makes of a change's two images.
func both[T, R any](d *decoder, c *change, f func(T) []R) (before, after []R, err error) {
	was, err := decode[T](d, c.before)
	if err != nil {
		return nil, nil, err
	}
	is, err := decode[T](d, c.after)
	if err != nil {
		return nil, nil, err
	}
	if was != nil {
		before = f(*was)
	}
	if is != nil {
		after = f(*is)
	}
	return before, after, nil
}

func formBinding[Tx any](form Form, collection string, into Model[Tx], noFunction bool) Binding[Tx] {
	b := Binding[Tx]{form: form, collection: collection}
	if noFunction {
		b.faults = append(b.faults, errors.New("the function is nil"))
	}
	if into == nil {
		b.faults = append(b.faults, errors.New("the target is nil"))
		return b
	}
	b.target = into.Target()
	written := form
	if form == FormRefresh {
		written = FormMirror
	}
	if err := into.Check(written); err != nil {
		b.faults = append(b.faults, err)
	}
	if l, ok := into.(Layout); ok {
		b.layout = l.Layout()
	}
	b.create, b.clear = into.Create, into.Clear
	if emptier, ok := into.(Emptier[Tx]); ok {
		b.emptier = emptier
	}
	if sweeper, ok := into.(Sweeper[Tx]); ok && form != FormRollup {
		b.sweeper = sweeper
	}
	return b
}

func sampleOf[T, R any](f func(T) []R) func(*decoder, bson.Raw) ([]any, error) {
	return func(d *decoder, raw bson.Raw) (rows []any, err error) {
		doc, err := decode[T](d, raw)
		if err != nil {
			return nil, err
		}
		for _, r := range f(*doc) {
			rows = append(rows, r)
		}
		return rows, nil
	}
}

// String names the binding in errors and in the checkpoint.
func (b Binding[Tx]) String() string {
	s := string(b.form)
	if b.lookup {
		s += " by lookup"
	}
	if b.target != "" {
		s += " into " + b.target
	}
	return s
}

// lookupDocuments finds documents by _id, not older than at, and hands each to f.
func lookupDocuments(ctx context.Context, coll *mongo.Collection, at bson.Timestamp, ids []bson.RawValue, f func(bson.Raw) error) error {
	// The changes are majority-committed, but a majority read may still be served from
	// a snapshot before them; a causally consistent session waits for at.
	sess, err := coll.Database().Client().StartSession(options.Session().SetCausalConsistency(true))
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	if err := sess.AdvanceOperationTime(&at); err != nil {
		return err
	}
	ctx = mongo.NewSessionContext(ctx, sess)
	for _, ids := range order.In(ids) {
		cur, err := coll.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, options.Find().SetBatchSize(10_000))
		if err != nil {
			return err
		}
		for cur.Next(ctx) {
			if err := f(cur.Current); err != nil {
				_ = cur.Close(ctx)
				return err
			}
		}
		if err := cur.Err(); err != nil {
			return fmt.Errorf("look up documents: %w", err)
		}
	}
	return nil
}

// undecodable is a looked-up document that its handler can't take.
type undecodable struct {
	item any // of the change that needed it
	err  error
}

func (u *undecodable) Error() string { return u.err.Error() }
func (u *undecodable) Unwrap() error { return u.err }
