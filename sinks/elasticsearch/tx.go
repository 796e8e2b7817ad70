package elasticsearch

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"sync"
	"time"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Tx collects what a handler writes, by an [Index]'s Put. It is for one goroutine, and for
// the duration of the handler's call. Nothing is sent before the handler returns, unless
// there is more than fits into memory; of several writes to one document the last is sent.
type Tx struct {
	sink       *Sink
	prev, next projector.Checkpoint
	trial      string // a name for scratch indices; "": this is no trial

	indices  map[string]string // of the generation, by name
	replaced map[string]string // by Clear: old index → new one
	made     []string          // indices that nobody knows unless the commit succeeds
	known    map[string]*target
	scratch  []string // indices of the trial

	lanes [lanes]lane
	where map[docKey]spot
	round int // counts the calls of Put
	bytes int

	mu     sync.Mutex
	seen   *record // the checkpoint's document as of the last look
	seenAt time.Time

	closed bool
	err    error // the first error of a write
}

// lanes is how many bulk requests are under way at a time. A document is always in the
// same lane, so that its writes stay in order.
const lanes = 2

// Limits of one bulk request, and of what a Tx keeps in memory.
const (
	bulkItems = 6000
	bulkBytes = 8 << 20
	txBytes   = 32 << 20
)

// lane is a queue of bulk requests.
type lane struct{ chunks []*chunk }

// chunk is the body of a bulk request.
type chunk struct {
	buf  []byte
	ops  []op
	dead int

	failed bool // a request with it has failed
}

// op is one item of a bulk request: the bytes from start to end.
type op struct {
	start, end int
	target     *target
	id         string
	dead       bool // a later write to the document has taken its place
}

// target is an index as a Tx writes to it.
type target struct {
	plan        *plan
	name, index string
	put, remove []byte // how items begin
}

type docKey struct {
	target *target
	id     string
}

// spot is where the queue has a document's write.
type spot struct {
	chunk   *chunk
	op      int
	round   int
	version int64
}

var chunks = sync.Pool{New: func() any { return &chunk{} }}

var seed = maphash.MakeSeed()

func (s *Sink) newTx(prev, next projector.Checkpoint, r *record) *Tx {
	tx := &Tx{sink: s, prev: prev, next: next, replaced: map[string]string{}, known: map[string]*target{}, where: map[docKey]spot{}, indices: map[string]string{}}
	tx.look(r)
	if g := r.find(prev.Generation); g != nil {
		maps.Copy(tx.indices, g.Indices)
	}
	return tx
}

func (tx *Tx) look(r *record) { tx.seen, tx.seenAt = r, time.Now() }

var errOver = &setupError{errors.New("tidemark/elasticsearch: the commit is over; a Tx must not be kept after the handler's return")}

// fail remembers the first error.
func (tx *Tx) fail(err error) error {
	if err != nil && tx.err == nil {
		tx.err = err
	}
	return err
}

func (tx *Tx) meta(name string) (m meta) {
	m.Tidemark.Projection, m.Tidemark.Place, m.Tidemark.Name = tx.prev.Projection, tx.prev.Place, name
	return m
}

// create adds an index to the generation.
func (tx *Tx) create(ctx context.Context, p *plan, name string) error {
	if tx.closed {
		return errOver
	}
	if tx.indices[name] != "" {
		return nil
	}
	if tx.trial != "" {
		tx.indices[name] = tx.prev.Place + "-" + name
		return nil
	}
	if err := tx.sink.checkAliases(ctx, tx.prev.Projection, name); err != nil {
		return err
	}
	index, err := tx.add(ctx, p, name)
	if err == nil {
		tx.indices[name] = index
	}
	return err
}

// add makes an index with a name that none had before it. One that is there already is
// never taken over: where the checkpoint was lost, or put back to an earlier one, it may
// be full, and its versions would refuse what is written now.
func (tx *Tx) add(ctx context.Context, p *plan, name string) (string, error) {
	index := tx.prev.Place + "-" + name
	if !fault.Global.Off(fault.IndexNames) {
		index += "-" + nonce()
	}
	tx.made = append(tx.made, index) // whatever the answer
	keep := keepDeletes
	if len(p.names) > 1 && tx.prev.Phase == projector.Building {
		keep = buildDeletes
	}
	return index, tx.sink.createIndex(ctx, p, index, tx.meta(name), keep, false)
}

// clear puts an empty index in the place of another.
func (tx *Tx) clear(ctx context.Context, p *plan, name string) error {
	old := tx.indices[name]
	if tx.closed {
		return errOver
	}
	if old == "" {
		return tx.create(ctx, p, name)
	}
	tx.forget(name)
	if tx.trial != "" {
		return nil
	}
	index, err := tx.add(ctx, p, name)
	if err == nil {
		tx.indices[name], tx.replaced[old] = index, index
	}
	return err
}

// forget drops what is queued for an index.
func (tx *Tx) forget(name string) {
	t := tx.known[name]
	delete(tx.known, name)
	for k, s := range tx.where {
		if k.target == t {
			s.chunk.kill(s.op)
			delete(tx.where, k)
		}
	}
}

// targets are the indices of a plan, as far as the generation has them.
func (tx *Tx) targets(p *plan) ([]*target, error) {
	if tx.closed {
		return nil, errOver
	}
	all := make([]*target, len(p.names))
	for i, name := range p.names {
		t := tx.known[name]
		if t == nil {
			index := tx.indices[name]
			if index == "" {
				return nil, &setupError{fmt.Errorf("tidemark/elasticsearch: the model has no index %q; a handler's own targets are to be made in Setup, by Create", name)}
			}
			if tx.trial != "" {
				index = tx.prev.Place + "-" + name + "-" + tx.trial
			}
			t = &target{plan: p, name: name, index: index}
			t.put = appendString([]byte(`{"index":{"_index":`), writeAlias(index))
			t.put = append(t.put, `,"_id":`...)
			t.remove = appendString([]byte(`{"delete":{"_index":`), writeAlias(index))
			t.remove = append(t.remove, `,"_id":`...)
			tx.known[name] = t
		}
		all[i] = t
	}
	return all, nil
}

// place finds where the write of a document goes, nil where a later one is queued
// already. Within one Put the later call counts, else the version.
func (tx *Tx) place(t *target, id string, version int64) *chunk {
	k := docKey{t, id}
	if s, ok := tx.where[k]; ok {
		if s.round != tx.round && version < s.version {
			return nil
		}
		s.chunk.kill(s.op)
	}
	l := &tx.lanes[maphash.String(seed, id)%lanes]
	n := len(l.chunks)
	if n == 0 || len(l.chunks[n-1].ops) >= bulkItems || len(l.chunks[n-1].buf) >= bulkBytes {
		l.chunks = append(l.chunks, chunks.Get().(*chunk))
		n++
	}
	c := l.chunks[n-1]
	tx.where[k] = spot{chunk: c, op: len(c.ops), round: tx.round, version: version}
	return c
}

// placed notes what was written to the end of a chunk.
func (tx *Tx) placed(c *chunk, start int, t *target, id string) {
	c.ops = append(c.ops, op{start: start, end: len(c.buf), target: t, id: id})
	tx.bytes += len(c.buf) - start
}

func (c *chunk) kill(op int) {
	if !c.ops[op].dead {
		c.ops[op].dead = true
		c.dead++
	}
}

// relieve sends what is queued where it is too much to keep. That it shows before the
// handler's end does no harm: it carries its versions, as everything does.
func (tx *Tx) relieve(ctx context.Context) error {
	if tx.bytes < txBytes {
		return nil
	}
	return tx.fail(tx.flush(ctx))
}

// run lets the handlers write.
func (tx *Tx) run(ctx context.Context, apply func(context.Context, *Tx) error) error {
	err := apply(ctx, tx)
	switch {
	case err == nil && tx.err != nil:
		return fmt.Errorf("tidemark/elasticsearch: a write of the handler failed, and the handler returned no error: %w", tx.err)
	case err != nil && tx.err != nil:
		return &handlerError{err, tx.err} // the cause decides whether to try again
	}
	return err
}

// handlerError is what a handler made of an error of its Tx, and that error.
type handlerError struct{ err, cause error }

func (e *handlerError) Error() string   { return e.err.Error() }
func (e *handlerError) Unwrap() []error { return []error{e.err, e.cause} }

// close ends the Tx: what is still queued is dropped.
func (tx *Tx) close() {
	tx.closed = true
	tx.lanes, tx.where = [lanes]lane{}, nil
}

// reset empties the queue once it is sent. A buffer is used again only where all of its
// requests were answered as they should: of one that has failed the client's transport may
// still be reading it.
func (tx *Tx) reset() {
	for i := range tx.lanes {
		for _, c := range tx.lanes[i].chunks {
			if c.failed {
				continue
			}
			clear(c.ops)
			c.buf, c.ops, c.dead = c.buf[:0], c.ops[:0], 0
			chunks.Put(c)
		}
		tx.lanes[i].chunks = tx.lanes[i].chunks[:0]
	}
	clear(tx.where)
	tx.bytes = 0
}
