package sinktest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

// projection is the one that the checks use, where one is enough.
const projection = "sinktest"

// env is a check under way.
type env[Tx any] struct {
	T
	Store[Tx]
	features Features
	ctx      context.Context
	rng      *rand.Rand // for the check's own goroutine
	patience time.Duration
	rounds   int
	version  atomic.Int64
	observer projector.Sink[Tx]    // an instance that only loads
	models   []projector.Model[Tx] // the targets that the check has made
}

// apply is what a commit does.
type apply[Tx any] = func(context.Context, Tx) error

// all is the applies one after the other.
func all[Tx any](applies ...apply[Tx]) apply[Tx] {
	return func(ctx context.Context, tx Tx) error {
		for _, a := range applies {
			if err := a(ctx, tx); err != nil {
				return err
			}
		}
		return nil
	}
}

// owner is who holds a projection's term, or thinks so.
type owner[Tx any] struct {
	*env[Tx]
	sink   projector.Sink[Tx]
	stored projector.Checkpoint // the one committed last
}

// acquire takes a projection's term with an instance of its own.
func (e *env[Tx]) acquire(name string) *owner[Tx] {
	e.Helper()
	sink := e.Sink(e.T)
	cp, err := acquireLive(e.ctx, sink, name, "first owner")
	e.must("Acquire", err)
	return &owner[Tx]{e, sink, cp}
}

// acquireLive is Acquire for checks that have to do with the live generation only.
func acquireLive[Tx any](ctx context.Context, sink projector.Sink[Tx], name, owner string) (projector.Checkpoint, error) {
	all, err := sink.Acquire(ctx, name, owner)
	if err != nil {
		return projector.Checkpoint{}, err
	}
	for _, cp := range all {
		if cp.Phase == projector.Live {
			return cp, nil
		}
	}
	return projector.Checkpoint{}, fmt.Errorf("sinktest: Acquire gives no live generation of %q: %v", name, all)
}

// begin takes the term, and commits the empty model where nothing is committed yet.
func (e *env[Tx]) begin() *owner[Tx] {
	e.Helper()
	o := e.acquire(projection)
	if o.stored.Sequence == 0 {
		o.mustCommit(e.create())
	}
	return o
}

// create makes the targets.
func (e *env[Tx]) create() apply[Tx] { return e.eachModel(projector.Model[Tx].Create) }

func (e *env[Tx]) clear() apply[Tx] { return e.eachModel(projector.Model[Tx].Clear) }

// of are the targets of these names that the features ask for, and those of effects.
func (e *env[Tx]) of(names string) []projector.Model[Tx] {
	models := []projector.Model[Tx]{e.Documents.Target}
	add := func(name string, wanted bool, m projector.Model[Tx]) {
		if wanted && strings.Contains(names, name) {
			models = append(models, m)
		}
	}
	add("", e.features.Adds, e.Counts.Target)
	add("Amounts", e.features.DecimalSums, e.Amounts.Target)
	add("Entries", e.features.Keys, e.Entries.Target)
	add("Keys", e.features.Keys, e.Keys.Target)
	add("Values", e.features.Values, e.Values.Target)
	return models
}

func (e *env[Tx]) eachModel(do func(projector.Model[Tx], context.Context, Tx) error) apply[Tx] {
	return func(ctx context.Context, tx Tx) error {
		for _, m := range e.models {
			if err := do(m, ctx, tx); err != nil {
				return err
			}
		}
		return nil
	}
}

// following is the checkpoint after prev.
func following(prev projector.Checkpoint) projector.Checkpoint {
	next := prev
	next.Sequence++
	next.Version = 1
	next.Settled = true
	next.Position = projector.Position{
		Token: document(bson.D{{Key: "_data", Value: fmt.Sprintf("82%016X", next.Sequence)}}),
		Time:  bson.Timestamp{T: 1_700_000_000, I: uint32(next.Sequence)}, //nolint:gosec // small
	}
	next.CommittedAt = time.Now().UTC().Truncate(time.Millisecond)
	return next
}

// commit applies and goes one further.
func (o *owner[Tx]) commit(ctx context.Context, applies ...apply[Tx]) error {
	next := following(o.stored)
	err := o.sink.Commit(ctx, o.stored, next, all(applies...))
	if err == nil {
		o.stored = next
	}
	return err
}

func (o *owner[Tx]) mustCommit(applies ...apply[Tx]) {
	o.Helper()
	o.must("Commit", o.commit(o.ctx, applies...))
}

func (o *owner[Tx]) place() string { return o.stored.Place }

// load reads the checkpoint of generation 1.
func (e *env[Tx]) load(name string) projector.Checkpoint {
	e.Helper()
	return e.loadGeneration(name, 1)
}

// loadGeneration reads a checkpoint through another instance, and fails the check where
// that does not work.
func (e *env[Tx]) loadGeneration(name string, generation int64) projector.Checkpoint {
	e.Helper()
	if e.observer == nil {
		e.observer = e.Sink(e.T)
	}
	cp, err := e.observer.Load(e.ctx, name, generation)
	e.must("Load", err)
	return cp
}

// stands checks that the stored checkpoint is still the one committed last, which is
// what a commit that failed leaves behind.
func (o *owner[Tx]) stands(after string) {
	o.Helper()
	o.wantCheckpoint(after, o.loadGeneration(o.stored.Projection, o.stored.Generation), o.stored)
}

func (e *env[Tx]) wantCheckpoint(after string, got, want projector.Checkpoint) {
	e.Helper()
	if got.Term != want.Term || got.Sequence != want.Sequence {
		e.Errorf("%s the stored checkpoint has term %d and sequence %d, want %d and %d", after, got.Term, got.Sequence, want.Term, want.Sequence)
	}
	a, errA := got.Encode()
	b, errB := want.Encode()
	if err := errors.Join(errA, errB); err != nil {
		e.Errorf("encode a checkpoint: %v", err)
	} else if string(a) != string(b) {
		e.Errorf("%s the stored checkpoint is\n  %s\nwant\n  %s", after, a, b)
	}
}

// effect is a write that can be told from every other, and which shows how often it
// was applied where the sink can add.
func (e *env[Tx]) effect(name string) apply[Tx] {
	row := projector.Row[Document]{Owner: id(name), Version: e.version.Add(1), Row: &Document{Name: name, N: 1}}
	return func(ctx context.Context, tx Tx) error {
		err := e.Documents.Target.Put(ctx, tx, nil, []projector.Row[Document]{row})
		if err != nil || !e.features.Adds {
			return err
		}
		return e.Counts.Target.Add(ctx, tx, nil, []Count{{Region: name, Status: "effect", N: 1, Total: 7}})
	}
}

// effects are the names of the effects that show, sorted; one that was applied more
// than once, or in part, is a fault. Nothing must be under way.
func (e *env[Tx]) effects(place string) []string {
	e.Helper()
	rows, err := e.Documents.Rows(e.ctx, place)
	e.must("read the documents", err)
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = r.Row.Name
	}
	slices.Sort(names)
	if e.features.Adds {
		e.countedOnce(place, names)
	}
	return names
}

func (e *env[Tx]) countedOnce(place string, names []string) {
	e.Helper()
	sums, err := e.Counts.Rows(e.ctx, place)
	e.must("read the counts", err)
	counted := make([]string, 0, len(sums))
	for _, s := range sums {
		if s.Row.Status != "effect" {
			continue
		}
		counted = append(counted, s.Row.Region)
		if s.Row.N != 1 || s.Row.Total != 7 || s.Contributions != 1 {
			e.Errorf("the commit of %q was applied %d times", s.Row.Region, s.Row.N)
		}
	}
	slices.Sort(counted)
	if !slices.Equal(counted, names) {
		e.Errorf("of one commit two targets show different effects:\n%s\nand\n%s", lines(names), lines(counted))
	}
}

// wantEffects checks which effects show. In a versioned sink those of failed commits
// may show as well.
func (e *env[Tx]) wantEffects(after, place string, names ...string) {
	e.Helper()
	got, want := e.effects(place), slices.Sorted(slices.Values(names))
	if e.features.Transactions && !slices.Equal(got, want) {
		e.Errorf("%s these effects show:\n%s\nwant\n%s", after, lines(got), lines(want))
		return
	}
	for _, name := range want {
		if !slices.Contains(got, name) {
			e.Errorf("%s the effect %q does not show", after, name)
		}
	}
}

// wantRows compares what is stored with what should be, each row as a line of text.
func (e *env[Tx]) wantRows(after string, got, want []string) {
	e.Helper()
	slices.Sort(got)
	slices.Sort(want)
	if slices.Equal(got, want) {
		return
	}
	e.Errorf("%s %d rows are stored, want %d\nsuperfluous or twice:\n%s\nmissing:\n%s",
		after, len(got), len(want), lines(without(got, want)), lines(without(want, got)))
}

// without is what sorted list a has and sorted list b has not, or not so often.
func without(a, b []string) (rest []string) {
	for _, s := range a {
		for len(b) > 0 && b[0] < s {
			b = b[1:]
		}
		if len(b) > 0 && b[0] == s {
			b = b[1:]
			continue
		}
		rest = append(rest, s)
	}
	return rest
}

func (e *env[Tx]) must(doing string, err error) {
	e.Helper()
	if err != nil {
		e.Fatalf("%s: %v", doing, err)
	}
}

func (e *env[Tx]) wantFenced(what string, err error) {
	e.Helper()
	if !errors.Is(err, projector.ErrFenced) {
		e.Errorf("%s: want an error that wraps ErrFenced, got: %v", what, err)
	}
}

func (e *env[Tx]) wantClass(what string, sink projector.Sink[Tx], err error, want projector.Class) {
	e.Helper()
	if err == nil {
		e.Errorf("%s: no error", what)
	} else if got := sink.Classify(err); got != want {
		e.Errorf("%s: class %s, want %s, of: %v", what, className(got), className(want), err)
	}
}

// wantInterrupted checks the error of a call that was cancelled or that another owner
// ended: the runner must read the checkpoint back after it. As poison it would be
// blamed on the batch, which may be in the sink already.
func (e *env[Tx]) wantInterrupted(what string, sink projector.Sink[Tx], err error) {
	e.Helper()
	switch {
	case err == nil, errors.Is(err, projector.ErrFenced), isContext(err), sink.Classify(err) == projector.Transient:
	default:
		e.Errorf("%s: class %s, want Transient or an error that wraps ErrFenced, of: %v", what, className(sink.Classify(err)), err)
	}
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

func className(c projector.Class) string {
	if name, ok := map[projector.Class]string{
		projector.Poison: "Poison", projector.Transient: "Transient", projector.Fatal: "Fatal",
	}[c]; ok {
		return name
	}
	return fmt.Sprintf("%d, which is none", c)
}

// promptly runs f, and reports it and goes on where it is not back after limit.
func (e *env[Tx]) promptly(what string, limit time.Duration, f func() error) (err error, back bool) {
	e.Helper()
	result := make(chan error, 1)
	begin := time.Now()
	go func() { result <- f() }()
	select {
	case err = <-result:
		return err, true
	case <-time.After(limit):
		e.Errorf("%s is not back after %s", what, time.Since(begin).Round(time.Millisecond))
		return nil, false
	}
}

// random is a duration up to limit.
func (e *env[Tx]) random(limit time.Duration) time.Duration {
	return time.Duration(e.rng.Int64N(int64(limit) + 1))
}

// ending is a context that ends after d, cancelled or timed out.
func (e *env[Tx]) ending(d time.Duration) (context.Context, context.CancelFunc) {
	if e.rng.IntN(2) == 0 {
		return context.WithTimeout(e.ctx, d)
	}
	ctx, cancel := context.WithCancel(e.ctx)
	timer := time.AfterFunc(d, cancel)
	return ctx, func() { timer.Stop(); cancel() }
}

// send makes what was written reach the server.
func (e *env[Tx]) send(ctx context.Context, tx Tx) error {
	if e.Send == nil {
		return nil
	}
	return e.Send(ctx, tx)
}

// value is any value as it is in a document.
func value(v any) bson.RawValue {
	typ, b, err := bson.MarshalValue(v)
	if err != nil {
		panic(fmt.Sprintf("sinktest: %v", err))
	}
	return bson.RawValue{Type: typ, Value: b}
}

func id(s string) bson.RawValue { return value(s) }

func document(d bson.D) bson.Raw {
	b, err := bson.Marshal(d)
	if err != nil {
		panic(fmt.Sprintf("sinktest: %v", err))
	}
	return b
}

// refusal names a refused write in messages.
func (e *env[Tx]) refusal(r Refusal[Tx]) string {
	return "the refused write " + strings.TrimSpace(r.Name)
}
