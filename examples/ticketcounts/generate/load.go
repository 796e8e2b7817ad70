package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// load says how much is written, and how.
type load struct {
	writes  int     // documents in all; 0: no end
	rate    float64 // documents per second; 0: no limit
	workers int
	seed    uint64
}

// tally counts what was written.
type tally struct {
	inserts, updates, deletes int
	transactions, within      int // and how many of the writes were in them
	took                      time.Duration
}

func (t tally) String() string {
	return fmt.Sprintf("%d writes: %d inserts, %d changes of status, %d deletes; %d of them in %d transactions; took %s",
		t.inserts+t.updates+t.deletes, t.inserts, t.updates, t.deletes, t.within, t.transactions, t.took.Round(time.Millisecond))
}

func (t *tally) add(o tally) {
	t.inserts, t.updates, t.deletes = t.inserts+o.inserts, t.updates+o.updates, t.deletes+o.deletes
	t.transactions, t.within = t.transactions+o.transactions, t.within+o.within
}

// ticket is a document of the collection.
type ticket struct {
	ID     bson.ObjectID `bson:"_id"`
	Status string        `bson:"status"`
}

var statuses = []string{"new", "open", "waiting", "solved", "closed"}

// run shares the tickets that exist among the workers, so that no two write to one
// ticket, and lets them write. A context that ends is no error.
func (l load) run(ctx context.Context, coll *mongo.Collection) (done tally, err error) {
	begun := time.Now()
	cur, err := coll.Find(ctx, bson.D{})
	if err != nil {
		return done, err
	}
	var existing []ticket
	if err := cur.All(ctx, &existing); err != nil {
		return done, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	budget := &budget{limited: l.writes > 0}
	budget.left.Store(int64(l.writes))
	pace := &pace{rate: l.rate, next: time.Now()}
	workers := make([]*worker, max(1, l.workers))
	var wg sync.WaitGroup
	for i := range workers {
		w := &worker{coll: coll, random: rand.New(rand.NewPCG(l.seed, uint64(i)))} //nolint:gosec // i is not negative
		for j := i; j < len(existing); j += len(workers) {
			w.tickets = append(w.tickets, existing[j])
		}
		workers[i] = w
		wg.Go(func() {
			if err := w.run(ctx, budget, pace); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	for _, w := range workers {
		done.add(w.done)
	}
	done.took = time.Since(begun)
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return done, err
	}
	return done, nil
}

// budget is what is left to be written.
type budget struct {
	limited bool
	left    atomic.Int64
}

// take asks for n writes and gives as many of them as are left.
func (b *budget) take(n int) int {
	if !b.limited {
		return n
	}
	left := b.left.Add(-int64(n))
	return max(0, min(n, n+int(left)))
}

// pace holds the writers to a rate.
type pace struct {
	rate float64
	mu   sync.Mutex
	next time.Time
}

// wait returns when n more writes are due.
func (p *pace) wait(ctx context.Context, n int) error {
	if p.rate <= 0 {
		return ctx.Err()
	}
	p.mu.Lock()
	due := p.next
	p.next = p.next.Add(time.Duration(float64(n) / p.rate * float64(time.Second)))
	p.mu.Unlock()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Until(due)):
		return nil
	}
}

// worker writes to tickets of its own.
type worker struct {
	coll    *mongo.Collection
	random  *rand.Rand
	tickets []ticket
	done    tally
}

// write is one of a worker's writes: of a ticket that gets a status, or goes.
type write struct {
	ticket ticket
	insert bool
	remove bool
}

func (w *worker) run(ctx context.Context, b *budget, p *pace) error {
	for {
		n := 1
		if w.random.IntN(8) == 0 {
			n = 2 + w.random.IntN(4)
		}
		if n = b.take(n); n == 0 {
			return nil
		}
		if err := p.wait(ctx, n); err != nil {
			return err
		}
		writes := make([]write, n)
		for i := range writes {
			writes[i] = w.choose()
		}
		if err := w.perform(ctx, writes); err != nil {
			return err
		}
		w.count(writes)
	}
}

// choose decides on a write, and takes it for done.
func (w *worker) choose() write {
	if len(w.tickets) == 0 || w.random.IntN(10) < 5 {
		t := ticket{bson.NewObjectID(), statuses[0]}
		w.tickets = append(w.tickets, t)
		return write{ticket: t, insert: true}
	}
	i := w.random.IntN(len(w.tickets))
	t := &w.tickets[i]
	if w.random.IntN(10) < 3 {
		gone := *t
		last := len(w.tickets) - 1
		w.tickets[i] = w.tickets[last]
		w.tickets = w.tickets[:last]
		return write{ticket: gone, remove: true}
	}
	before := t.Status
	for t.Status == before { // a write that changes nothing is no change
		t.Status = statuses[w.random.IntN(len(statuses))]
	}
	return write{ticket: *t}
}

// perform carries writes out, several of them in one transaction.
func (w *worker) perform(ctx context.Context, writes []write) error {
	if len(writes) == 1 {
		return writes[0].do(ctx, w.coll)
	}
	session, err := w.coll.Database().Client().StartSession()
	if err != nil {
		return err
	}
	defer session.EndSession(context.WithoutCancel(ctx))
	_, err = session.WithTransaction(ctx, func(ctx context.Context) (any, error) {
		for _, x := range writes {
			if err := x.do(ctx, w.coll); err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
	return err
}

func (x write) do(ctx context.Context, coll *mongo.Collection) error {
	id := bson.D{{Key: "_id", Value: x.ticket.ID}}
	switch {
	case x.insert:
		_, err := coll.InsertOne(ctx, x.ticket)
		return err
	case x.remove:
		_, err := coll.DeleteOne(ctx, id)
		return err
	}
	_, err := coll.UpdateOne(ctx, id, bson.D{{Key: "$set", Value: bson.D{{Key: "status", Value: x.ticket.Status}}}})
	return err
}

func (w *worker) count(writes []write) {
	for _, x := range writes {
		switch {
		case x.insert:
			w.done.inserts++
		case x.remove:
			w.done.deletes++
		default:
			w.done.updates++
		}
	}
	if len(writes) > 1 {
		w.done.transactions++
		w.done.within += len(writes)
	}
}
