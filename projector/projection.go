package projector

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Projection describes one read model. Sinks offer it with their own transaction
// type filled in, such as postgres.Projection.
type Projection[Tx any] struct {
	// Name identifies the model: its checkpoint, its place in the sink, its logs.
	// Lower-case letters, digits and underscores, a letter first, at most 40 bytes.
	Name string
	// Version of the handlers, 1 or more. Raise it with every change of what the
	// model would contain, or the old rows and the new code would disagree.
	Version int
	// Bindings are the collections that the model follows, and what to do with
	// their changes.
	Bindings []Binding[Tx]
	// Setup creates what On handlers write to; it runs once for each generation of
	// the model, in the transaction that stores its first checkpoint. It may only
	// check, where someone else owns the definitions. Nil: nothing to create.
	Setup func(context.Context, Tx) error
	// Reset clears what On handlers write to, before a rebuild. Nil: nothing to clear.
	Reset func(context.Context, Tx) error
	// NoRebuild declares that the model is not a function of the source's current
	// documents (an audit log, say), so that a rebuild could not restore it.
	NoRebuild bool
}

// Binding ties a collection of the source to a handler. Make one with Rollup,
// Upsert, Mirror, Refresh or On.
type Binding[Tx any] struct {
	form       Form
	collection string
	target     string // "" for On
	layout     string // of the target's rows, "" where it doesn't tell
	images     images
	lookup     bool
	faults     []error

	more          []Binding[Tx]   // of a Refresh: its further collections
	refresh       *refreshing[Tx] // of a Refresh's first; nil for all others
	create, clear func(context.Context, Tx) error
	emptier       Emptier[Tx] // nil: clear does it
	sweeper       Sweeper[Tx] // nil: the target can't be rebuilt in place
	// decode runs beside the commit of earlier batches: it decodes a change and
	// computes the form's pure function. Nothing in it may touch the sink.
	decode func(*decoder, *change) (any, error)
	// sample is what a pure function makes of a document; nil for On.
	sample func(*decoder, bson.Raw) ([]any, error)
	// fetch completes a batch's items with documents of the source; for lookup only.
	fetch func(context.Context, *mongo.Collection, bson.Timestamp, *decoder, []any) error
	// apply writes a batch's items, in the order of the stream.
	apply func(context.Context, Tx, []any) error
	// load is apply for documents of which the target has nothing yet; nil: apply will do.
	load func(context.Context, Tx, []any) error
}

// Form names the kind of a binding.
type Form string

// The forms.
const (
	FormRollup Form = "rollup"
	FormUpsert Form = "upsert"
	FormMirror Form = "mirror"
	FormOn     Form = "on"

	FormRefresh Form = "refresh" // writes as a Mirror does
)

// Model is what every target of a pure form can do: a table, a collection, an index.
// Sinks implement it; so may users, for a target of their own.
type Model[Tx any] interface {
	// Target names the model within its projection; two bindings must not share one.
	Target() string
	// Check reports what makes the target unfit for the form, all faults joined: a
	// row type that the sink can't store, missing or superfluous keys, float sums.
	Check(Form) error
	// Create makes the empty model; it does nothing where the model exists already.
	Create(context.Context, Tx) error
	// Clear removes every row.
	Clear(context.Context, Tx) error
}

// Layout is what a Model may have as well: its rows in words, such as "status text key,
// n bigint sum". It is stored with the checkpoint, so that a row type that was changed
// without raising Version is noticed at the next start.
type Layout interface{ Layout() string }

// Adder is a target that can add: its rows have keys and sums.
type Adder[Tx, R any] interface {
	Model[Tx]
	// Add takes the contributions minus off the rows of their keys and adds plus. A
	// row exists if and only if it has a contribution; the number of them is kept
	// beside the sums. To take off more than there is, or all contributions but not
	// all of a sum, is an error that is not Transient: the model has drifted.
	Add(ctx context.Context, tx Tx, minus, plus []R) error
}

// Putter is a target that can put whole rows.
type Putter[Tx, R any] interface {
	Model[Tx]
	// Put removes rows and then writes rows, each owned by a document of the source.
	// A row that is both removed and put is put. Only rows that still belong to the
	// owner are removed; a row that is put belongs to its new owner. Where put has two
	// rows of one key, the later wins.
	Put(ctx context.Context, tx Tx, remove, put []Row[R]) error
}

// Loader is what a Putter may have as well: a faster way for rows of which nothing is
// stored yet, neither the rows nor others of their owners. A rebuild gives it the rows of
// a Mirror in a new generation.
type Loader[Tx, R any] interface {
	Load(ctx context.Context, tx Tx, rows []Row[R]) error
}

// Sweeper is a Putter that can be rebuilt in place. While a commit's checkpoint has a
// Rebuild with a Mark, Put marks the rows that it writes with it.
type Sweeper[Tx any] interface {
	// Prepare makes the target fit for marks; it does nothing where it is.
	Prepare(ctx context.Context, tx Tx) error
	// Sweep removes up to limit rows without a mark or with another than the commit's, and
	// reports how many it has removed.
	Sweep(ctx context.Context, tx Tx, limit int) (int, error)
	// Count is the number of rows.
	Count(ctx context.Context, tx Tx) (int64, error)
}

// Emptier is what a Model may have as well, where a transaction can't delete any number of
// rows: a rebuild in mode Reset then calls Empty instead of Clear, in a commit after the
// other, before it fills the model.
type Emptier[Tx any] interface {
	// Empty removes up to limit rows, and reports how many it has removed.
	Empty(ctx context.Context, tx Tx, limit int) (int, error)
}

// Row is a row of a Putter together with the document that it comes from.
type Row[R any] struct {
	Owner   bson.RawValue // the document's _id
	Version int64         // of the change, for sinks that keep a version per row
	Row     *R            // nil in a removal: every row of the owner
}
