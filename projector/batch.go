package projector

import (
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// settleEvery is how old the last settled commit may be before the next one is made
// to be settled: under steady writes no reply is ever empty, and without this no
// commit would ever be known to end between groups.
const settleEvery = time.Second

// limits bound a commit.
type limits struct{ changes, bytes, transaction int }

// queue holds the changes that are taken from the stream and not committed.
//
// A group is the run of changes with one cluster time: a source transaction, say. It
// is closed by a change of another time, or by an empty getMore reply. A commit ends
// between groups, with two exceptions: the last group, while open, may be committed in
// parts if it is no transaction (an idle system would otherwise wait for each change's
// successor), and a transaction that exceeds its byte limit must be. Such a commit is
// not settled.
type queue struct {
	changes []*change
	bytes   int
	stop    int      // index of the first change with an error, -1: none
	closed  bool     // the last group is closed
	token   bson.Raw // of the empty reply that came last, nil once changes have followed, or where it says nothing new
	more    bool     // the stream has more at hand
	end     error    // the stream has ended with it
}

func newQueue() *queue { return &queue{stop: -1} }

func (q *queue) add(c *chunk) {
	switch {
	case c.err != nil:
		q.end = c.err
	case c.empty:
		q.closed, q.token, q.more = true, c.token, false
		if c.opening {
			// The stream has not moved on: an event just after the position may still come.
			q.token = nil
		}
	default:
		for i := range c.changes {
			ch := &c.changes[i]
			if ch.err != nil && q.stop < 0 {
				q.stop = len(q.changes)
			}
			q.changes = append(q.changes, ch)
			q.bytes += ch.size
		}
		q.closed, q.token, q.more = false, nil, c.more
	}
}

// full reports whether there is enough for a commit.
func (q *queue) full(l limits) bool {
	return len(q.changes) >= l.changes || q.bytes >= l.bytes || q.end != nil
}

// groupEnd is the end of the group that begins at i.
func (q *queue) groupEnd(i int) (end, bytes int) {
	for end = i; end < len(q.changes) && q.changes[end].ClusterTime == q.changes[i].ClusterTime; end++ {
		bytes += q.changes[end].size
	}
	return end, bytes
}

// cut says how many changes to commit now, 0 for none yet, and whether that commit is
// settled. With settle set, it waits for the last group to close rather than commit
// a part of it. Changes that are beyond a rebuild's frontier stop nothing.
func (q *queue) cut(l limits, settle bool, beyond func(*change) bool) (n int, settled bool) {
	bytes, stop := 0, q.firstError(beyond)
	for n < len(q.changes) {
		end, size := q.groupEnd(n)
		if stop >= 0 && stop < end {
			break // everything before the group of a change that can't be applied
		}
		if fault.Global.Off(fault.WholeGroups) && n == 0 {
			end = min(end, l.changes)
		}
		if n > 0 && (end > l.changes || bytes+size > l.bytes) {
			break
		}
		if end == len(q.changes) && !q.closed {
			transaction := q.changes[n].Txn != nil
			if q.end == nil && size > l.transaction {
				return end, false
			}
			if (transaction || settle && q.end == nil) && !fault.Global.Off(fault.HoldGroup) {
				break
			}
			return end, false
		}
		n, bytes = end, bytes+size
	}
	return n, n > 0
}

// firstError is the index of the first change with an error that counts, -1: none.
func (q *queue) firstError(beyond func(*change) bool) int {
	if q.stop < 0 {
		return -1
	}
	for i := q.stop; i < len(q.changes); i++ {
		if ch := q.changes[i]; ch.err != nil && !(ch.collection >= 0 && beyond(ch)) {
			return i
		}
	}
	return -1
}

// failed is the error that stands before everything else, nil: none.
func (q *queue) failed(beyond func(*change) bool) error {
	if stop := q.firstError(beyond); stop >= 0 {
		return q.changes[stop].err
	}
	return q.end
}

// drop forgets the first n changes, which are committed.
func (q *queue) drop(n int) {
	for _, c := range q.changes[:n] {
		q.bytes -= c.size
	}
	rest := copy(q.changes, q.changes[n:])
	clear(q.changes[rest:])
	q.changes = q.changes[:rest]
	if q.stop >= 0 && q.stop < n {
		q.stop = slices.IndexFunc(q.changes, func(c *change) bool { return c.err != nil })
	} else if q.stop >= 0 {
		q.stop -= n
	}
}
