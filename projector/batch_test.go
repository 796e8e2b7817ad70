package projector

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
)

var errStop = errors.New("this change can't be applied")

// randomChanges is a stream: groups of one to eight changes, half of them transactions,
// one in twenty streams with a change that can't be applied.
func randomChanges(r *rand.Rand) []change {
	var all []change
	for g := range 1 + r.IntN(12) {
		var txn *TxnID
		if r.IntN(2) == 0 {
			txn = &TxnID{Number: int64(g)}
		}
		size := 1 + r.IntN(40)
		for range 1 + r.IntN(8) {
			all = append(all, change{Event: Event{ClusterTime: bson.Timestamp{T: uint32(g + 1)}, Txn: txn}, size: size})
		}
	}
	if r.IntN(20) == 0 {
		all[r.IntN(len(all))].err = errStop
	}
	return all
}

// groupOf is the run of changes with one cluster time around i, and its bytes.
func groupOf(changes []*change, i int) (start, end, bytes int) {
	for start = i; start > 0 && changes[start-1].ClusterTime == changes[i].ClusterTime; start-- {
	}
	for end = start; end < len(changes) && changes[end].ClusterTime == changes[i].ClusterTime; end++ {
		bytes += changes[end].size
	}
	return start, end, bytes
}

// checkCut states what a cut must keep, whatever is in the queue.
func checkCut(q *queue, l limits, settle bool, n int, settled bool) error {
	all := q.changes
	if n < 0 || n > len(all) {
		return fmt.Errorf("cuts %d of %d", n, len(all))
	}
	if len(all) == 0 {
		return nil
	}
	if q.stop >= 0 {
		if start, _, _ := groupOf(all, q.stop); n > start {
			return fmt.Errorf("cuts %d, past the group at %d of a change that can't be applied", n, start)
		}
	}
	if q.closed && n == 0 && q.stop < 0 {
		return errors.New("cuts nothing though every group is closed: no progress")
	}
	if n == 0 {
		return nil
	}
	boundary := n < len(all) && all[n-1].ClusterTime != all[n].ClusterTime || n == len(all) && q.closed
	if settled != boundary {
		return fmt.Errorf("cuts %d, settled %v, though its end is a closed group's: %v", n, settled, boundary)
	}
	start, _, bytes := groupOf(all, n-1)
	if n < len(all) && !boundary {
		return fmt.Errorf("cuts %d, inside the group that begins at %d", n, start)
	}
	if !boundary {
		// A part of a group that may go on: allowed where waiting would cost latency
		// and nothing is torn, or memory.
		over := bytes > l.transaction && q.end == nil
		switch {
		case over:
		case all[n-1].Txn != nil:
			return fmt.Errorf("cuts %d: commits a transaction that may go on", n)
		case settle && q.end == nil:
			return fmt.Errorf("cuts %d: an open group, though a settled commit is due", n)
		}
	}
	if start > 0 {
		total := 0
		for _, c := range all[:n] {
			total += c.size
		}
		if n > l.changes || total > l.bytes {
			return fmt.Errorf("cuts %d changes, %d bytes: over the limits %d, %d with more than one group", n, total, l.changes, l.bytes)
		}
	}
	return nil
}

// cutAll feeds a random stream to a queue in random pieces, as the commit stage does,
// and checks every cut, and that all of it comes out, in order.
func cutAll(r *rand.Rand) error {
	stream := randomChanges(r)
	failing := slices.IndexFunc(stream, func(c change) bool { return c.err != nil })
	l := limits{changes: 1 + r.IntN(10), bytes: 1 + r.IntN(300), transaction: 1 + r.IntN(250)}
	q := newQueue()
	var out []*change
	parts := map[uint32]int{} // commits that a transaction went into
	taken, ended, idle := 0, false, 0
	for len(out) < len(stream) {
		if idle > 20 {
			return fmt.Errorf("stuck: %d of %d committed, %d in the queue", len(out), len(stream), len(q.changes))
		}
		before := len(q.changes)
		switch {
		case taken < len(stream) && r.IntN(4) > 0:
			n := min(1+r.IntN(9), len(stream)-taken)
			q.add(&chunk{changes: stream[taken : taken+n]})
			taken += n
		case taken == len(stream) || stream[taken-min(taken, 1)].ClusterTime != stream[taken].ClusterTime:
			// Only between groups can a reply be empty.
			if q.add(&chunk{empty: true, token: bson.Raw{1}}); !q.closed || q.token == nil {
				return errors.New("an empty reply does not close the queue")
			}
		}
		if taken == len(stream) && !ended && r.IntN(8) == 0 {
			ended = true
			q.add(&chunk{err: errStop})
		}
		settle := r.IntN(3) == 0
		n, settled := q.cut(l, settle, never)
		if err := checkCut(q, l, settle, n, settled); err != nil {
			return fmt.Errorf("queue of %d, closed %v, end %v, stop %d, settle %v, %+v: %w", len(q.changes), q.closed, q.end, q.stop, settle, l, err)
		}
		if n > 0 {
			for t := range timesOf(q.changes[:n]) {
				parts[t]++
			}
			out = append(out, q.changes[:n]...)
			q.drop(n)
			idle = 0
			continue
		}
		if q.failed(never) != nil {
			break
		}
		if idle++; len(q.changes) != before {
			idle = 0
		}
	}
	for i, c := range out {
		if c != &stream[i] {
			return fmt.Errorf("change %d came out as number %d", i, slices.IndexFunc(stream, func(o change) bool { return o.ClusterTime == c.ClusterTime }))
		}
	}
	for i := range stream {
		_, end, bytes := groupOf(pointers(stream), i)
		if c := &stream[i]; c.Txn != nil && bytes <= l.transaction && parts[c.ClusterTime.T] > 1 {
			return fmt.Errorf("the transaction that ends at %d was committed in %d parts", end, parts[c.ClusterTime.T])
		}
	}
	if failing < 0 && !ended && len(out) != len(stream) {
		return fmt.Errorf("%d of %d came out", len(out), len(stream))
	}
	return nil
}

func pointers(s []change) []*change {
	p := make([]*change, len(s))
	for i := range s {
		p[i] = &s[i]
	}
	return p
}

func timesOf(changes []*change) map[uint32]bool {
	m := map[uint32]bool{}
	for _, c := range changes {
		m[c.ClusterTime.T] = true
	}
	return m
}

// Batches are cut between groups only, never past a change that can't be applied, and
// always make progress. (CASES B57: eventuous and PeerDB met half a source transaction.)
func TestBatchesAreCutBetweenGroups(t *testing.T) {
	r := random(t)
	for i := range 20_000 {
		if err := cutAll(r); err != nil {
			t.Fatalf("history %d: %v", i, err)
		}
	}
	for _, guard := range []fault.Guard{fault.WholeGroups, fault.HoldGroup} {
		t.Run("control without "+string(guard), func(t *testing.T) {
			defer fault.Global.Disable(guard)()
			for range effort.Values(20_000) {
				if err := cutAll(r); err != nil {
					t.Log("noticed:", err)
					return
				}
			}
			t.Error("nothing notices that the guard is off")
		})
	}
}

// The boundary at which a refused batch is halved lies between groups, and exists
// wherever there is more than one.
func TestBatchesAreHalvedBetweenGroups(t *testing.T) {
	r := random(t)
	for range effort.Values(5000) {
		stream := randomChanges(r)
		batch := pointers(stream)
		batch = batch[:1+r.IntN(len(batch))]
		m := middle(batch)
		groups := len(timesOf(batch))
		switch {
		case groups == 1 && m != 0:
			t.Fatalf("a single group of %d is halved at %d", len(batch), m)
		case groups > 1 && (m <= 0 || m >= len(batch) || batch[m-1].ClusterTime == batch[m].ClusterTime):
			t.Fatalf("%d changes in %d groups are halved at %d", len(batch), groups, m)
		}
	}
}

// never is a frontier that everything is within.
func never(*change) bool { return false }
