package projector

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"
	"golang.org/x/sync/semaphore"

	"github.com/tidemark-go/tidemark/internal/fault"
)

const (
	// chunkEvents is how many events are decoded as one piece of work.
	chunkEvents = 512
	// replyEvents and replyBytes limit one reply; the second is aimed at, from the
	// size of the events seen so far.
	replyEvents, replyBytes = 5000, 4 << 20
	// openWait and idleWait are how long the server waits for an event: briefly while
	// the last group may have to be closed by an empty reply or someone waits for the
	// position to move, else long.
	openWait, idleWait = 50 * time.Millisecond, 500 * time.Millisecond
)

// chunk is what the stream hands to the commit stage: changes in the order of the
// stream, or word of an empty reply, or the error that the stream ends with.
type chunk struct {
	raw     []bson.Raw
	changes []change
	bytes   int64         // of the budget, given back when the chunk is taken
	ready   chan struct{} // closed when changes are decoded
	more    bool          // the next one is at hand, as far as is known
	empty   bool          // a getMore brought nothing: every group before it is closed
	token   bson.Raw      // of the empty reply
	opening bool          // the token is the one that the stream was opened with
	err     error
}

// stream reads ahead of the commit stage: a goroutine that reads replies, and a few
// that decode them. What is read and not yet taken is bounded by bytes.
type stream struct {
	source  *source
	decoder *decoder
	status  *status
	awaited *arrivals
	log     *slog.Logger
	backoff backoff
	budget  *semaphore.Weighted
	size    int64
	chunks  chan *chunk // to the commit stage, in order
	work    chan *chunk // to the decoders
	average int         // bytes of an event, as seen of late
	brief   bool        // empty replies are wanted soon, always
}

func newStream(s *source, d *decoder, st *status, a *arrivals, log *slog.Logger, bufferBytes int) *stream {
	return &stream{
		source: s, decoder: d, status: st, awaited: a, log: log,
		budget: semaphore.NewWeighted(int64(bufferBytes)), size: int64(bufferBytes),
		// The budget is the bound; the capacities only have to exceed what small
		// chunks it admits, so that events flow while a commit runs.
		chunks: make(chan *chunk, 1024), work: make(chan *chunk, 1024),
		average: 1024,
	}
}

// run reads from pos until the context ends or the stream does. A broken stream is
// opened again after the last event read, which keeps the order unbroken: nothing
// that waits for its commit is dropped.
func (s *stream) run(ctx context.Context, pos Position) {
	defer close(s.work)
	defer close(s.chunks)
	for {
		err := s.follow(ctx, &pos)
		if ctx.Err() != nil {
			return
		}
		if s.source.splitOn(ctx, err) {
			continue
		}
		if end := s.end(ctx, err, pos); end != nil {
			_ = s.send(ctx, &chunk{err: end})
			return
		}
		fault.Global.Reach(fault.StreamReopens)
		s.status.retrying(followingSource, err)
		s.log.Warn("the change stream broke, it is opened again", "projection", s.source.plan.projection, "error", err)
		if s.backoff.wait(ctx) != nil {
			return
		}
		if fault.Global.Off(fault.StreamResume) {
			pos = Position{}
			pos.Time, _ = s.source.now(ctx)
		}
	}
}

// end is the error that ends the stream at pos; nil for one that opening it again mends.
func (s *stream) end(ctx context.Context, err error, pos Position) error {
	switch {
	case errors.Is(err, errCursorClosed):
		return &ReplacedError{
			Projection: s.source.plan.projection,
			Namespace:  Namespace{Database: s.source.db.Name()}, Event: "invalidate", At: pos,
		}
	case errors.Is(err, errMalformedEvent):
		return &SourceError{Projection: s.source.plan.projection, Doing: "read the stream", Err: err}
	}
	return s.source.terminal(ctx, err, pos)
}

// follow reads one cursor, and moves pos along with every event that is whole.
func (s *stream) follow(ctx context.Context, pos *Position) error {
	cur, err := openCursor(ctx, s.source, *pos)
	if err != nil {
		return err
	}
	s.status.opened()
	defer cur.close()
	wait := openWait
	reached := s.reached(ctx, *pos)
	var parts fragments
	for {
		ask := max(1, min(replyEvents, replyBytes/s.average))
		r, err := cur.next(ask, wait)
		if err != nil {
			return err
		}
		s.backoff.reset()
		s.status.read(r.time)
		if len(r.events) == 0 {
			// Only this proves that no more of the last group will come: neither the
			// number of events in a reply nor its token does.
			if wait = idleWait; s.brief || s.awaited.awaited() {
				wait = openWait
			}
			reached = reached || !bytes.Equal(r.token, cur.first)
			if r.token == nil || !reached {
				continue
			}
			pos.Token = clone(r.token)
			if err := s.send(ctx, &chunk{empty: true, token: pos.Token, opening: bytes.Equal(r.token, cur.first)}); err != nil {
				return err
			}
			continue
		}
		wait, reached = openWait, true
		s.average = max(1, (s.average+r.bytes/len(r.events))/2)
		events := r.events
		if s.source.split.Load() {
			if events, err = parts.join(events); err != nil {
				return err
			}
		}
		if len(events) == 0 {
			continue
		}
		last := bsoncore.Document(events[len(events)-1])
		pos.Token = clone(bson.Raw(last.Lookup("_id").Data))
		pos.Time.T, pos.Time.I, _ = last.Lookup("clusterTime").TimestampOK()
		for at := 0; at < len(events); at += chunkEvents {
			part := events[at:min(at+chunkEvents, len(events))]
			c := &chunk{raw: part, ready: make(chan struct{}), more: len(r.events) >= ask || at+len(part) < len(events)}
			for _, e := range part {
				c.bytes += int64(len(e))
			}
			if err := s.send(ctx, c); err != nil {
				return err
			}
		}
	}
}

// reached reports whether the server has committed what pos has read. After a failover it
// may not have come to that place yet, and then an empty reply proves nothing, as long as
// its token is the one that the cursor was opened with.
func (s *stream) reached(ctx context.Context, pos Position) bool {
	if pos.Token == nil {
		return false // a time of which nothing was read
	}
	now, err := s.source.now(ctx)
	return err == nil && !now.Before(pos.Time)
}

func clone(r bson.Raw) bson.Raw { return append(bson.Raw(nil), r...) }

// send waits for room, then queues the chunk for the decoders and the commit stage.
func (s *stream) send(ctx context.Context, c *chunk) error {
	c.bytes = min(c.bytes, s.size) // one that is larger than the budget takes all of it
	if err := s.budget.Acquire(ctx, c.bytes); err != nil {
		return err
	}
	if c.raw != nil {
		select {
		case s.work <- c:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case s.chunks <- c:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// taken gives a chunk's room back.
func (s *stream) taken(c *chunk) { s.budget.Release(c.bytes) }

// decodeAll is the work of one decoder.
func (s *stream) decodeAll() {
	for c := range s.work {
		c.changes = make([]change, len(c.raw))
		for i, raw := range c.raw {
			s.decoder.event(raw, &c.changes[i])
		}
		c.raw = nil
		close(c.ready)
	}
}

// decoders is how many goroutines decode: they share the processors with the reader
// and the commit stage.
func decoders() int { return max(1, runtime.GOMAXPROCS(0)/2) }

// fragments puts events together that the server has split since they exceed 16 MB
// with their images. The pieces follow one another, each with a token of its own; the
// whole gets the last one's, so that a restart in between begins with the first.
type fragments struct {
	elements []byte
	next     int32
}

func (f *fragments) join(events []bson.Raw) ([]bson.Raw, error) {
	out := events[:0]
	for _, e := range events {
		split, err := bsoncore.Document(e).LookupErr("splitEvent")
		if err != nil {
			if f.next > 0 {
				return nil, fmt.Errorf("%w: another event follows fragment %d", errMalformedEvent, f.next)
			}
			out = append(out, e)
			continue
		}
		d, _ := split.DocumentOK()
		n, ok1 := d.Lookup("fragment").AsInt32OK()
		of, ok2 := d.Lookup("of").AsInt32OK()
		if !ok1 || !ok2 || n != f.next+1 || n > of {
			return nil, fmt.Errorf("%w: fragment %d of %d follows fragment %d", errMalformedEvent, n, of, f.next)
		}
		f.next = n
		_, rem, _ := bsoncore.ReadLength(e)
		for len(rem) > 1 {
			var el bsoncore.Element
			var ok bool
			if el, rem, ok = bsoncore.ReadElement(rem); !ok {
				return nil, errMalformedEvent
			}
			if k := string(el.KeyBytes()); k == "splitEvent" || k == "_id" && n < of {
				continue
			}
			f.elements = append(f.elements, el...)
		}
		if n == of {
			// Over 16 MB is more than BSON's own length field minds, and it never
			// goes back to a server.
			out = append(out, bson.Raw(bsoncore.BuildDocument(nil, f.elements)))
			*f = fragments{}
		}
	}
	return out, nil
}
