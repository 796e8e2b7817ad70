package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/reconcile"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// meddling is a Reconciler in which a test has a hand: it changes the source while a chunk
// is being read, so that what happens does not depend on chance.
type meddling struct {
	reconcile.Snapshot
	before func(projector.Range) error                 // the chunk is about to be read; an error takes the place of it
	after  func(projector.Range, *projector.Documents) // it has been read, and the rebuild has not got it; nil: it can't be read
	report func(projector.Progress)
}

func (m *meddling) Begin() (projector.Mode, projector.Reader) {
	mode, reader := m.Snapshot.Begin()
	return mode, &meddler{reader, m}
}

type meddler struct {
	projector.Reader
	m *meddling
}

func (r *meddler) Read(ctx context.Context, from projector.Range) (projector.Documents, error) {
	if r.m.before != nil {
		if err := r.m.before(from); err != nil {
			return projector.Documents{}, err
		}
	}
	docs, err := r.Reader.Read(ctx, from)
	read := &docs
	if err != nil {
		read = nil
	}
	if r.m.after != nil {
		r.m.after(from, read)
	}
	return docs, err
}

func (r *meddler) Report(p projector.Progress) {
	if r.m.report != nil {
		r.m.report(p)
	}
}

// settle is how long the stream has to deliver what was written. It only matters to the
// controls: with the guard on, the model is exact whenever it comes.
const settle = 200 * time.Millisecond

// controlled is a rebuild of 400 orders in chunks of 100, with _ids from 1.
type controlled struct {
	*rebuilder
	log    logged
	source *meddling
}

func newControlled(t *testing.T) *controlled {
	t.Helper()
	c := &controlled{rebuilder: newRebuilder(t, inMongoDB, 0), source: new(meddling)}
	c.source.ChunkRows = 100
	docs := c.writer.many(400)
	for _, d := range []int{4, 349} { // two that hand on what is unique
		o := docs[d].(order)
		o.Handle = fmt.Sprintf("unique %d", o.ID)
		docs[d] = o
	}
	_, err := c.writer.orders.InsertMany(t.Context(), docs)
	must(t, err)
	return c
}

// begin starts the first load, with c.source.
func (c *controlled) begin(o projector.Options) *running {
	c.Helper()
	o.Reconcile, o.Logger = c.source, slog.New(slog.NewTextHandler(&c.log, nil))
	return c.start(o)
}

func (c *controlled) do(_ any, err error) {
	c.Helper()
	if err != nil {
		c.Errorf("write: %v", err) // not on the test's own goroutine
	}
}

func byID(id int64) bson.D { return bson.D{{Key: "_id", Value: id}} }

// meddle changes documents of every chunk, and beyond the last.
func (c *controlled) meddle() {
	ctx, orders := context.Background(), c.writer.orders
	for _, id := range []int64{50, 150, 250, 350} {
		c.do(orders.UpdateOne(ctx, byID(id), bson.D{{Key: "$inc", Value: bson.D{{Key: "amount", Value: 1000}}}, {Key: "$set", Value: bson.D{{Key: "group", Value: "g1"}}}}))
		c.do(orders.DeleteOne(ctx, byID(id+1)))
	}
	for _, id := range []int64{0, 1001} { // before the first, and after the last
		c.do(orders.InsertOne(ctx, order{ID: id, Group: "g2", State: "paid", Amount: 1000, Handle: fmt.Sprint("new ", id)}))
	}
	c.do(nil, inTransaction(ctx, c.db, func(ctx context.Context) error { // two unique handles change places
		one, other := byID(5), byID(350)
		return errors.Join(c.writer.update(ctx, one, unset("handle")), c.writer.update(ctx, other, set("handle", "unique 5")), c.writer.update(ctx, one, set("handle", "unique 350")))
	}))
}

// meddled is a first load in whose first chunk the source was changed after it was read.
func (c *controlled) meddled() (wrong string) {
	var once sync.Once
	c.source.after = func(projector.Range, *projector.Documents) {
		once.Do(func() { c.meddle(); time.Sleep(settle) })
	}
	return c.wrong(c.begin(projector.Options{}))
}

// wrong says what is wrong with a model that had the time to catch up, "" for nothing.
func (c *controlled) wrong(g *running) string {
	c.Helper()
	at := operationTime(c, c.db)
	ctx, cancel := context.WithTimeout(c.Context(), 20*time.Second)
	defer cancel()
	waited := make(chan error, 1)
	go func() { waited <- g.WaitFor(ctx, at) }()
	select {
	case err := <-waited:
		if err != nil {
			return fmt.Sprintf("it has not caught up: %v", err)
		}
	case <-g.done:
		cancel()
		<-waited
		return fmt.Sprintf("the runner has ended: %v", g.err)
	}
	rows, twice, err := c.model.rows()
	must(c, err)
	diff := cmp.Diff(computed(c, c.db), rows)
	if twice > 0 {
		diff += fmt.Sprintf("%d changes or documents were applied more than once", twice)
	}
	return diff
}

// startedOver says that the rebuild has noticed a change that came too late.
func (c *controlled) startedOver(wrong string) string {
	if wrong == "" && c.log.says("the rebuild has to start over") {
		return "the rebuild had to start over: " + c.log.tail()
	}
	return wrong
}

// Each rule that makes a rebuild of a source under way exact (PROTOCOLS, 4) is switched
// off, in the situation that it is there for: the model is wrong then, or something else
// notices that it would be. With the rule the same situation ends in an exact model.
func TestRebuildLiveControls(t *testing.T) {
	for _, control := range []struct {
		name  string
		guard fault.Guard
		run   func(*controlled) (wrong string)
	}{
		{"changes beyond the frontier are applied", fault.Frontier, (*controlled).meddled},
		{"a chunk is read at another time than its place", fault.ChunkAt, (*controlled).meddled},
		{"changes are applied while a chunk is read", fault.ChunkHold, (*controlled).meddled},
		{"the position moves on without proof", fault.ChunkProof, (*controlled).unproven},
		{"the last chunk has an upper bound", fault.ChunkDone, (*controlled).afterTheLast},
		{"a collection that is dropped is read by its name alone", fault.ChunkUUID, func(c *controlled) string {
			return c.replaced(func(ctx context.Context) error { return c.writer.orders.Drop(ctx) })
		}},
		{"a collection that is renamed is read by its name alone", fault.ChunkUUID, func(c *controlled) string {
			return c.replaced(func(ctx context.Context) error {
				name := c.db.Name() + ".orders"
				return c.db.Client().Database("admin").RunCommand(ctx, bson.D{{Key: "renameCollection", Value: name}, {Key: "to", Value: name + "_old"}}).Err()
			})
		}},
		{"rows and frontier are two commits", fault.ChunkFrontier, (*controlled).takenOver},
		{"a chunk is read in the middle of a transaction", fault.ChunkSettled, (*controlled).cutOpen},
		{"the switch goes back in time", fault.SwitchOrder, (*controlled).switched},
		{"what is left over stays", fault.Sweep, (*controlled).leftOver},
	} {
		t.Run(control.name, func(t *testing.T) {
			t.Run("with the guard", func(t *testing.T) {
				if wrong := control.run(newControlled(t)); wrong != "" {
					t.Fatalf("it is not exact (-source +model):\n%.3000s", wrong)
				}
			})
			for attempt := range 5 {
				wrong := ""
				t.Run("without", func(t *testing.T) {
					without(t, control.guard)
					wrong = control.run(newControlled(t))
				})
				if wrong != "" {
					t.Logf("attempt %d without the guard: %.300s", attempt+1, wrong)
					return
				}
			}
			t.Error("it is exact without the guard: the guard guards nothing")
		})
	}
}

// unproven has the server say that the position is too old to read at, while changes wait.
func (c *controlled) unproven() string {
	var once, old sync.Once
	c.source.after = func(projector.Range, *projector.Documents) {
		once.Do(func() { c.meddle(); time.Sleep(settle) })
	}
	c.source.before = func(from projector.Range) (err error) {
		if !from.After.IsZero() {
			old.Do(func() { err = mongo.CommandError{Code: 239, Name: "SnapshotTooOld"} })
		}
		return err
	}
	return c.startedOver(c.wrong(c.begin(projector.Options{BatchChanges: 1})))
}

// afterTheLast inserts, when the last chunk has been read.
func (c *controlled) afterTheLast() string {
	var once sync.Once
	c.source.after = func(_ projector.Range, docs *projector.Documents) {
		if docs != nil && docs.Done {
			once.Do(func() { c.meddle(); time.Sleep(settle) })
		}
	}
	return c.wrong(c.begin(projector.Options{}))
}

// replaced has the collection go in the middle, and another one of its name come.
func (c *controlled) replaced(remove func(context.Context) error) string {
	var gone, back sync.Once
	var believed atomic.Int64
	c.source.before = func(from projector.Range) error {
		if !from.After.IsZero() {
			gone.Do(func() { c.do(nil, remove(context.Background())) })
		}
		return nil
	}
	c.source.after = func(from projector.Range, _ *projector.Documents) {
		if !from.After.IsZero() {
			back.Do(func() {
				createOrders(c, c.db)
				c.do(c.writer.orders.InsertMany(context.Background(), c.writer.many(50)))
			})
		}
	}
	c.source.report = func(p projector.Progress) {
		if p.Collection == "" && !p.Done && p.Rows > 50 && p.Rows < 400 {
			believed.Store(p.Rows)
		}
	}
	if wrong := c.wrong(c.begin(projector.Options{})); wrong != "" {
		return wrong
	}
	if n := believed.Load(); n > 0 {
		return fmt.Sprintf("%d of 400 documents were taken for all", n)
	}
	return ""
}

// takenOver freezes a runner at a chunk, for ever as far as the next one knows, which takes
// over; the first comes too late.
func (c *controlled) takenOver() string {
	frozen := &frozen{arrived: make(chan struct{}), wake: make(chan struct{})}
	var n atomic.Int64
	fault.Global.OnReach(func(at fault.Point) {
		if at == fault.ChunkRead && n.Add(1) == 2 {
			close(frozen.arrived)
			<-frozen.wake
		}
	})
	defer fault.Global.OnReach(nil)
	defer frozen.thaw()
	first := c.begin(projector.Options{})
	wait(c, "the second chunk", frozen.arrived)
	second := c.begin(projector.Options{})
	wrong := c.wrong(second)
	frozen.thaw()
	err := first.wait(30 * time.Second)
	var fenced *projector.FencedError
	if !errors.As(err, &fenced) {
		c.Errorf("the first runner ended with %v", err)
	}
	return wrong
}

// cutOpen has a transaction come in parts, in the middle.
func (c *controlled) cutOpen() string {
	var once sync.Once
	c.source.after = func(projector.Range, *projector.Documents) {
		once.Do(func() {
			c.do(nil, inTransaction(context.Background(), c.db, func(ctx context.Context) error {
				_, err := c.writer.orders.UpdateMany(ctx, bson.D{}, add("amount", 1000))
				if err == nil {
					_, err = c.writer.orders.InsertMany(ctx, c.writer.many(400))
				}
				return err
			}))
			time.Sleep(settle)
		})
	}
	return c.startedOver(c.wrong(c.begin(projector.Options{BatchChanges: 50, TransactionBytes: 10_000})))
}

// switched has the live model go on after the new one has caught up, and before it takes
// over.
func (c *controlled) switched() (wrong string) {
	amount := func() int64 {
		live, err := mongodb.Live(context.Background(), c.model.(*mongoModel).db, orderPlace, "orders")
		var o struct{ Amount int64 }
		if err == nil {
			err = live.FindOne(context.Background(), byID(2000)).Decode(&o)
		}
		c.do(nil, err)
		return o.Amount
	}
	c.source.ChunkRows = 1000
	c.do(c.writer.orders.InsertOne(c.Context(), order{ID: 2000, State: "paid"}))
	g := c.begin(projector.Options{})
	if wrong := c.wrong(g); wrong != "" {
		return wrong
	}
	var read atomic.Bool
	var passed, seen atomic.Int64
	fault.Global.OnReach(func(at fault.Point) {
		switch {
		case at == fault.ChunkRead:
			read.Store(true)
		case at == fault.CommitDone && read.Load() && passed.Add(1) == 2:
			// The source is still, so that the first was the only chunk's commit, and this is the
			// one of the time that the rebuild has caught up with.
			c.do(c.writer.orders.UpdateOne(context.Background(), byID(2000), add("amount", 1)))
			until(c, 20*time.Second, "the live model goes on", func() bool { seen.Store(amount()); return seen.Load() == 1 })
		case at == fault.SwitchDone:
			if before, now := seen.Load(), amount(); now < before {
				wrong = fmt.Sprintf("a reader saw %d, and %d after the switch", before, now)
			}
		}
	})
	defer fault.Global.OnReach(nil)
	must(c, g.Rebuild(c.Context()))
	if passed.Load() < 2 || seen.Load() != 1 {
		c.Errorf("it did not come to that: %d commits, %d seen", passed.Load(), seen.Load())
	}
	if wrong == "" {
		wrong = c.wrong(g)
	}
	return wrong
}

// inPlaceOrders is what of the orders can be rebuilt in place.
var inPlaceOrders = mongodb.Projection{Name: orderPlace, Version: 1, Bindings: mongodb.Bindings{
	projector.Mirror("orders", order.mirrored, mongodb.Collection[mirrored]{Name: "orders"}),
	projector.Upsert("orders", order.holders, mongodb.Collection[holder]{Name: "handles"}),
}}

// leftOver has rows in the model that no document of the source is behind.
func (c *controlled) leftOver() string {
	m := c.model.(*mongoModel)
	c.source.Mode = projector.InPlace
	r, err := projector.New(c.db, mongodb.New(m.way), inPlaceOrders, projector.Options{Reconcile: c.source, Logger: quiet()})
	must(c, err)
	g := run(c, r)
	g.level(c.db)
	for name, row := range map[string]any{
		"orders":  bson.D{{Key: "_id", Value: int64(5000)}, {Key: "id", Value: int64(5000)}, {Key: "amount", Value: int64(1)}},
		"handles": bson.D{{Key: "_id", Value: bson.D{{Key: "handle", Value: "left over"}}}, {Key: "id", Value: int64(5000)}, {Key: "owner", Value: int64(5000)}},
	} {
		live, err := mongodb.Live(c.Context(), m.db, orderPlace, name)
		must(c, err)
		c.do(live.InsertOne(c.Context(), row))
	}
	c.source.after = func(projector.Range, *projector.Documents) { c.meddle(); c.source.after = nil }
	must(c, g.Rebuild(c.Context()))
	g.level(c.db)
	got, _, err := m.rows()
	must(c, err)
	want := computed(c, c.db)
	want.Totals, want.Balances = got.Totals, got.Balances // there are none
	return cmp.Diff(want, got)
}

// ownerless is a target whose rows belong to nobody: whoever has put one before removes it.
type ownerless[R any] struct{ mongodb.Collection[R] }

func (o ownerless[R]) Put(ctx context.Context, tx *mongodb.Tx, remove, put []projector.Row[R]) error {
	for _, rows := range [][]projector.Row[R]{remove, put} {
		for i := range rows {
			rows[i].Owner = bson.RawValue{Type: bson.TypeNull}
		}
	}
	return o.Collection.Put(ctx, tx, remove, put)
}

// A row is removed by the document only that it belongs to: where a unique field is given to
// a document before another one has lost it, the loss comes too late to count.
func TestRebuildLiveOwners(t *testing.T) {
	wrong := func(t *testing.T, target projector.Putter[*mongodb.Tx, holder]) string {
		c := newControlled(t)
		ctx, orders := context.Background(), c.writer.orders
		c.do(nil, orders.Indexes().DropAll(ctx))
		var once sync.Once
		c.source.after = func(projector.Range, *projector.Documents) {
			once.Do(func() { // 350 is in the last chunk, the others are in this one
				c.do(nil, errors.Join(
					c.writer.update(ctx, byID(50), set("handle", "unique 5")), c.writer.update(ctx, byID(5), unset("handle")),
					c.writer.update(ctx, byID(60), set("handle", "unique 350")), c.writer.update(ctx, byID(350), unset("handle")),
				))
				time.Sleep(settle)
			})
		}
		m := c.model.(*mongoModel)
		p := mongodb.Projection{Name: orderPlace, Version: 1, Bindings: mongodb.Bindings{projector.Upsert("orders", order.holders, target)}}
		r, err := projector.New(c.db, mongodb.New(m.way), p, projector.Options{Reconcile: c.source, BatchChanges: 1, Logger: quiet()})
		must(t, err)
		run(t, r).level(c.db)
		got, _, err := m.rows()
		must(t, err)
		return cmp.Diff(computed(t, c.db).Handles, got.Handles)
	}
	handles := mongodb.Collection[holder]{Name: "handles"}
	if diff := wrong(t, handles); diff != "" {
		t.Errorf("the model differs from the source (-source +model):\n%s", diff)
	}
	if diff := wrong(t, ownerless[holder]{handles}); diff == "" {
		t.Error("it is exact with rows that belong to nobody: the test proves nothing")
	} else {
		t.Logf("with rows that belong to nobody: %s", diff)
	}
}
