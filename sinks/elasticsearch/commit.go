package elasticsearch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Commit implements projector.Sink, as far as a store without transactions can: the
// documents first, then the checkpoint. See the package's text.
func (s *Sink) Commit(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	tx, err := s.open(ctx, prev, next)
	if err != nil {
		return err
	}
	defer tx.close()
	stored := false
	defer func() {
		if !stored {
			s.discardIndices(ctx, tx.made)
		}
	}()
	if err := tx.run(ctx, apply); err != nil {
		return err
	}
	if err := tx.flush(ctx); err != nil {
		return failed("write documents of projection "+strconv.Quote(prev.Projection), err)
	}
	fault.Global.Reach(fault.CommitSend)
	// From here on what was made may be in use, whatever the error.
	stored = true
	if err := tx.store(ctx); err != nil {
		return failed("store the checkpoint of projection "+strconv.Quote(prev.Projection), err)
	}
	fault.Global.Reach(fault.CommitAnswer)
	return nil
}

// Try implements projector.Sink. What the server would refuse is known only to the server,
// so the documents are written to scratch indices of the same mappings, which are removed
// afterwards. It is slow, and only needed to find a document that is refused.
func (s *Sink) Try(ctx context.Context, prev projector.Checkpoint, apply func(context.Context, *Tx) error) error {
	next := prev
	next.Sequence++
	tx, err := s.open(ctx, prev, next)
	if err != nil {
		return err
	}
	defer tx.close()
	tx.trial = "try-" + nonce()
	defer func() { s.discardIndices(ctx, tx.scratch) }()
	if err := tx.run(ctx, apply); err != nil {
		return err
	}
	if err := tx.flush(ctx); err != nil {
		return failed("try documents of projection "+strconv.Quote(prev.Projection), err)
	}
	return nil
}

// open begins a commit: it compares what is stored with prev.
func (s *Sink) open(ctx context.Context, prev, next projector.Checkpoint) (*Tx, error) {
	r, err := s.read(ctx, prev.Projection)
	if err != nil {
		return nil, failed("read the checkpoint of projection "+strconv.Quote(prev.Projection), err)
	}
	if r == nil {
		r = &record{}
	}
	if _, err := r.holds(prev); err != nil {
		return nil, err
	}
	return s.newTx(prev, next, r), nil
}

// prepare makes the scratch indices of a trial, of those that are written to.
func (tx *Tx) prepare(ctx context.Context) error {
	if tx.trial == "" {
		return nil
	}
	for k := range tx.where {
		t := k.target
		if slices.Contains(tx.scratch, t.index) {
			continue
		}
		tx.scratch = append(tx.scratch, t.index)
		if err := tx.sink.createIndex(ctx, t.plan, t.index, tx.meta(t.name), keepDeletes, true); err != nil {
			return err
		}
	}
	return nil
}

// store stores the checkpoint.
func (tx *Tx) store(ctx context.Context) error {
	attempt := nonce()
	r, err := tx.sink.update(ctx, tx.prev.Projection, tx.seen, func(r *record) error {
		if g := r.find(tx.prev.Generation); g != nil && g.Attempt == attempt {
			return errUnchanged // done; the answer was lost, and the client has asked again
		}
		g, err := r.holds(tx.prev)
		if err != nil {
			return err
		}
		if err := g.set(tx.next, attempt); err != nil {
			return err
		}
		r.CommittedAt = time.Now().UTC().Format(time.RFC3339Nano)
		g.Indices = tx.indices
		if len(tx.made) > 0 && g.Phase == projector.Live {
			r.serve(tx.replaced)
		}
		for old := range tx.replaced {
			r.drop(old)
		}
		return nil
	})
	if err == nil && r.Pending != nil {
		_, err = tx.sink.read(ctx, tx.prev.Projection)
	}
	return unknown(err, tx.prev)
}

// unknown makes of a missing document that the caller was fenced: somebody has removed
// what it goes by.
func unknown(err error, cp projector.Checkpoint) error {
	if errors.Is(err, errNoRecord) {
		return (&record{}).fenced(cp)
	}
	return err
}

// discardIndices removes indices that nothing refers to. Should it fail, they go with
// their generation.
func (s *Sink) discardIndices(ctx context.Context, indices []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = s.deleteIndices(ctx, indices)
}

// deleteIndices removes indices, as far as they are there.
func (s *Sink) deleteIndices(ctx context.Context, indices []string) error {
	return inParts(indices, func(names string) error {
		err := s.call(ctx, http.MethodDelete, "/"+names+"?ignore_unavailable=true", nil, nil)
		if typeOf(err) == noIndex {
			return nil
		}
		return err
	})
}
