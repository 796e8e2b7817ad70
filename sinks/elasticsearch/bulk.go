package elasticsearch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// fenceEvery is how old a look at the checkpoint may be when a bulk request is sent.
const fenceEvery = 250 * time.Millisecond

// fence sees that the commit may still go on: nobody has taken the term, or committed in
// its place. It keeps a process that was frozen from sending the rest of its batch. What
// was on its way already is refused by its versions.
func (tx *Tx) fence(ctx context.Context) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if time.Since(tx.seenAt) < fenceEvery {
		return nil
	}
	r, err := tx.sink.read(ctx, tx.prev.Projection)
	if err != nil {
		return err
	}
	if r == nil {
		r = &record{}
	}
	if _, err := r.holds(tx.prev); err != nil {
		return err
	}
	tx.look(r)
	return nil
}

// flush sends what is queued, all lanes at a time.
func (tx *Tx) flush(ctx context.Context) error {
	if err := tx.prepare(ctx); err != nil {
		return err
	}
	var errs [lanes]error
	var wg sync.WaitGroup
	for i := range tx.lanes {
		if len(tx.lanes[i].chunks) == 0 {
			continue
		}
		wg.Go(func() { errs[i] = tx.drain(ctx, &tx.lanes[i]) })
	}
	wg.Wait()
	err := errors.Join(errs[:]...)
	if err == nil {
		tx.reset()
	}
	return err
}

// drain sends a lane's requests, one after the other.
func (tx *Tx) drain(ctx context.Context, l *lane) error {
	for _, c := range l.chunks {
		items := make([]int, 0, len(c.ops))
		for i := range c.ops {
			if !c.ops[i].dead {
				items = append(items, i)
			}
		}
		if err := tx.bulk(ctx, c, items); err != nil {
			return err
		}
	}
	return nil
}

// bulk sends some items of a chunk until the server has taken each. Those that it is too
// busy for are sent again, they alone; a request that is too large for it, in halves.
func (tx *Tx) bulk(ctx context.Context, c *chunk, items []int) error {
	for wait := (backoff{}); len(items) > 0; {
		if err := tx.fence(ctx); err != nil {
			return err
		}
		answer, err := tx.sink.send(ctx, http.MethodPost, "/_bulk?require_alias=true&filter_path=errors,items.*.status,items.*.error,items.delete._index", c.body(items))
		c.failed = c.failed || err != nil
		switch status := statusOf(err); {
		case status == http.StatusRequestEntityTooLarge && len(items) > 1:
			half := len(items) / 2
			if err := tx.bulk(ctx, c, items[:half]); err != nil {
				return err
			}
			return tx.bulk(ctx, c, items[half:])
		case status == http.StatusRequestEntityTooLarge:
			o := &c.ops[items[0]]
			return &DocumentError{Index: o.target.name, ID: o.id, Type: "413", Reason: fmt.Sprintf("it has %d bytes, which is more than the server takes in one request (http.max_content_length)", o.end-o.start)}
		case busy(status):
		case err != nil:
			return tx.interpret(ctx, err)
		default:
			if items, err = tx.results(ctx, c, items, answer); len(items) == 0 || !busy(statusOf(err)) {
				return tx.interpret(ctx, err)
			}
		}
		if err := wait.wait(ctx, err); err != nil {
			return err
		}
	}
	return nil
}

// body joins items to a request's body.
func (c *chunk) body(items []int) []byte {
	if len(items) == len(c.ops) {
		return c.buf
	}
	var b []byte
	for _, i := range items {
		b = append(b, c.buf[c.ops[i].start:c.ops[i].end]...)
	}
	return b
}

// itemResult is the answer to an item; the server calls it by what was to be done.
type itemResult struct {
	Index, Delete *struct {
		In     string     `json:"_index"` // of deletions
		Status int        `json:"status"`
		Error  *itemError `json:"error"`
	}
}

// results reads the answer to a bulk request. It gives the items that are to be sent
// again, with the reason, or the reason why the batch can't go on.
func (tx *Tx) results(ctx context.Context, c *chunk, items []int, answer []byte) (again []int, err error) {
	// Nothing else in an answer ends like that, see strays.
	fine := bytes.HasPrefix(answer, []byte(`{"errors":false`)) && !bytes.Contains(answer, []byte(writeAlias("")+`"`))
	if fine || fault.Global.Off(fault.ItemResults) {
		return nil, nil
	}
	var result struct {
		Items []itemResult `json:"items"`
	}
	if err := json.Unmarshal(answer, &result); err != nil || len(result.Items) != len(items) {
		return nil, &unreachableError{fmt.Errorf("the answer to a bulk request of %d items has %d: %w", len(items), len(result.Items), err)}
	}
	if err := tx.strays(ctx, c, items, result.Items); err != nil {
		return nil, err
	}
	var refused []error
	for n, r := range result.Items {
		one := r.Index
		if one == nil {
			one = r.Delete
		}
		if one == nil || one.Error == nil { // done; or the delete of a document that was not there
			continue
		}
		o := &c.ops[items[n]]
		failure := &responseError{status: one.Status, typ: one.Error.Type, reason: one.Error.text()}
		switch {
		case one.Status == http.StatusConflict && one.Error.Type == conflict: // the index has a later version
		case busy(one.Status):
			again, err = append(again, items[n]), failure
		case one.Status == http.StatusBadRequest || one.Status == http.StatusRequestEntityTooLarge:
			refused = append(refused, &DocumentError{Index: o.target.name, ID: o.id, Type: one.Error.Type, Reason: one.Error.text()})
		case one.Error.Type == noIndex:
			return nil, o.target.gone(failure)
		default:
			return nil, fmt.Errorf("document %q of index %q: %w", o.id, o.target.name, failure)
		}
	}
	if len(refused) > 0 {
		return nil, errors.Join(refused[:min(len(refused), 10)]...)
	}
	return again, err
}

// strays removes indices that deletions have made. The server minds require_alias for
// documents only: for a deletion with a version that meets no index it makes one, by the
// name of the alias, to remember the version there (8.19). It does not remove what is an
// alias after all.
func (tx *Tx) strays(ctx context.Context, c *chunk, items []int, results []itemResult) (err error) {
	done := map[*target]bool{}
	for n, r := range results {
		t := c.ops[items[n]].target
		if r.Delete == nil || r.Delete.In != writeAlias(t.index) || done[t] {
			continue
		}
		if r.Delete.Error != nil && r.Delete.Error.Type != conflict {
			continue // it has met nothing
		}
		done[t] = true
		failure := tx.sink.deleteIndices(ctx, []string{writeAlias(t.index)})
		if failure != nil {
			failure = fmt.Errorf("index %s, which a deletion has made in its place, could not be removed: %w", writeAlias(t.index), failure)
		}
		err = errors.Join(err, t.gone(failure))
	}
	return err
}

func (t *target) gone(err error) error {
	text := fmt.Sprintf("tidemark/elasticsearch: index %s is gone, or its alias %s; the model must be rebuilt", t.index, writeAlias(t.index))
	if err == nil {
		return &setupError{errors.New(text)}
	}
	return &setupError{fmt.Errorf("%s: %w", text, err)}
}

// interpret looks again at the checkpoint where something is missing or not allowed: a
// commit whose generation has been discarded by another owner has been fenced.
func (tx *Tx) interpret(ctx context.Context, err error) error {
	if err == nil || tx.sink.Classify(err) != projector.Fatal {
		return err
	}
	tx.mu.Lock()
	tx.seenAt = time.Time{}
	tx.mu.Unlock()
	return errors.Join(tx.fence(ctx), err)
}
