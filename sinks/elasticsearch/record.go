package elasticsearch

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// record is the document of a projection in the index of checkpoints. All generations
// are in one, since a document is all that Elasticsearch changes in one step. Every write
// is a compare-and-set: by the sequence number that the document had when it was read.
type record struct {
	Projection  string        `json:"projection"`
	Term        int64         `json:"term"`
	Owner       string        `json:"owner"`
	Generations []*generation `json:"generations"`
	Served      int64         `json:"served"`            // how often the indices that readers see were changed
	Pending     *pending      `json:"pending,omitempty"` // what has been decided and is not carried out yet
	Highest     int64         `json:"highest"`           // generation ever begun
	Begun       int64         `json:"begun"`             // generations ever begun
	Loads       int64         `json:"loads"`             // reads, which have to write
	CommittedAt string        `json:"committed_at,omitempty"`

	seqNo, primaryTerm int64 // of the document as read
}

// generation is a generation's entry.
type generation struct {
	Generation int64             `json:"generation"`
	Sequence   int64             `json:"sequence"`
	Phase      projector.Phase   `json:"phase"` // as in body
	Place      string            `json:"place"` // as in body
	Indices    map[string]string `json:"indices"`
	Attempt    string            `json:"attempt"` // of the last commit, so that it is known again
	Body       string            `json:"body"`    // what Checkpoint.Encode wrote, byte for byte
}

// pending is what follows from a record: the aliases are to be where the live
// generation is, and these indices are to go. Whoever reads a record with it does that
// first.
type pending struct {
	Serve    bool              `json:"serve,omitempty"`    // the aliases are to move, not only Drop to go
	Replaced map[string]string `json:"replaced,omitempty"` // indices by those whose place they take: users' own aliases follow
	Drop     []string          `json:"drop,omitempty"`
}

const recordMapping = `{
	"settings": {"index.number_of_shards": 1, "index.auto_expand_replicas": "0-1"},
	"mappings": {"dynamic": "strict", "properties": {
		"projection": {"type": "keyword"},
		"term": {"type": "long"},
		"owner": {"type": "keyword", "ignore_above": 1024},
		"generations": {"type": "object", "enabled": false},
		"served": {"type": "long"},
		"pending": {"type": "object", "enabled": false},
		"highest": {"type": "long"},
		"begun": {"type": "long"},
		"loads": {"type": "long"},
		"committed_at": {"type": "date"}
	}}
}`

func (s *Sink) store() string { return s.prefix + "tidemark-checkpoints" }

// createStore makes the index of the checkpoints. One with another mapping comes from a
// write that met none: the server makes one for it, even where the write is then refused
// for its sequence number (8.19). Empty, it is removed.
func (s *Sink) createStore(ctx context.Context) error {
	var found map[string]mapped
	err := s.call(ctx, http.MethodGet, "/"+s.store()+"/_mapping", nil, &found) // a HEAD would not say what is wrong
	if err == nil && found[s.store()].Mappings.Dynamic != "strict" {
		err = s.removeEmpty(ctx, s.store())
	} else if statusOf(err) != http.StatusNotFound {
		return err
	}
	if err != nil && statusOf(err) != http.StatusNotFound {
		return err
	}
	err = s.call(ctx, http.MethodPut, "/"+s.store(), []byte(recordMapping), nil)
	if typeOf(err) == alreadyExists {
		return nil
	}
	return err
}

// removeEmpty removes an index that has the checkpoints' name and not their mapping.
func (s *Sink) removeEmpty(ctx context.Context, index string) error {
	if err := s.refresh(ctx, []string{index}); err != nil {
		return err
	}
	var documents struct {
		Count int64 `json:"count"`
	}
	if err := s.call(ctx, http.MethodGet, "/"+index+"/_count", nil, &documents); err != nil {
		return err
	}
	if documents.Count > 0 {
		return &setupError{fmt.Errorf("tidemark/elasticsearch: index %s, which is for checkpoints, has %d documents and not the mapping that the sink gives it; "+
			"put back the right one, or give the sink a Prefix, or remove the index", index, documents.Count)}
	}
	return s.deleteIndices(ctx, []string{index})
}

func (r *record) find(n int64) *generation {
	for _, g := range r.Generations {
		if g.Generation == n {
			return g
		}
	}
	return nil
}

func (r *record) live() *generation {
	for _, g := range r.Generations {
		if g.Phase == projector.Live {
			return g
		}
	}
	return nil
}

func (r *record) remove(n int64) {
	r.Generations = slices.DeleteFunc(r.Generations, func(g *generation) bool { return g.Generation == n })
}

// serve makes the aliases follow the live generation.
func (r *record) serve(replaced map[string]string) {
	r.Served++
	r.pend().Serve, r.pend().Replaced = true, replaced
}

func (r *record) drop(indices ...string) {
	if len(indices) > 0 {
		r.pend().Drop = append(r.pend().Drop, indices...)
	}
}

func (r *record) pend() *pending {
	if r.Pending == nil {
		r.Pending = &pending{}
	}
	return r.Pending
}

// indices are the names of a generation's indices, sorted.
func (g *generation) indices() []string {
	names := make([]string, 0, len(g.Indices))
	for _, index := range g.Indices {
		names = append(names, index)
	}
	slices.Sort(names)
	return names
}

// checkpoint decodes the checkpoint of a generation.
func (r *record) checkpoint(g *generation) (projector.Checkpoint, error) {
	cp, err := projector.DecodeCheckpoint(r.Projection, []byte(g.Body))
	if err != nil {
		return projector.Checkpoint{}, err
	}
	if cp.Generation != g.Generation {
		return projector.Checkpoint{}, &projector.CheckpointError{Projection: r.Projection, Err: fmt.Errorf("generation %d is stored as %d", cp.Generation, g.Generation)}
	}
	cp.Term, cp.Owner, cp.Sequence = r.Term, r.Owner, g.Sequence
	return cp, nil
}

// checkpoints decodes all of them.
func (r *record) checkpoints() (all []projector.Checkpoint, err error) {
	for _, g := range r.Generations {
		cp, err := r.checkpoint(g)
		if err != nil {
			return nil, err
		}
		all = append(all, cp)
	}
	slices.SortFunc(all, func(a, b projector.Checkpoint) int { return int(a.Generation - b.Generation) })
	return all, nil
}

// owns compares term and owner with those that a caller believes are stored.
func (r *record) owns(cp projector.Checkpoint) error {
	if fault.Global.Off(fault.FenceTerm) || r.Term == cp.Term && r.Owner == cp.Owner {
		return nil
	}
	return r.fenced(cp)
}

// holds compares the sequence too, and gives the generation's entry.
func (r *record) holds(cp projector.Checkpoint) (*generation, error) {
	if err := r.owns(cp); err != nil {
		return nil, err
	}
	g := r.find(cp.Generation)
	if g == nil || g.Sequence != cp.Sequence && !fault.Global.Off(fault.FenceSequence) {
		return nil, r.fenced(cp)
	}
	return g, nil
}

func (r *record) fenced(cp projector.Checkpoint) error {
	return &projector.FencedError{Projection: cp.Projection, Term: cp.Term, Theirs: r.Term, Owner: r.Owner}
}

// set stores a checkpoint in its entry.
func (g *generation) set(cp projector.Checkpoint, attempt string) error {
	body, err := cp.Encode()
	if err != nil {
		return err
	}
	g.Sequence, g.Phase, g.Place, g.Attempt, g.Body = cp.Sequence, cp.Phase, cp.Place, attempt, string(body)
	return nil
}

// errNoRecord: there is no document of the projection.
var errNoRecord = errors.New("the projection is not known")

// errUnchanged makes update leave the document as it is.
var errUnchanged = errors.New("nothing to write")

// get reads the document, nil where there is none. It is realtime: no refresh is needed.
func (s *Sink) get(ctx context.Context, projection string) (*record, error) {
	var found struct {
		SeqNo       int64           `json:"_seq_no"`
		PrimaryTerm int64           `json:"_primary_term"`
		Source      json.RawMessage `json:"_source"`
	}
	err := s.call(ctx, http.MethodGet, "/"+s.store()+"/_doc/"+url.PathEscape(projection), nil, &found)
	if statusOf(err) == http.StatusNotFound {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(found.Source, r); err != nil {
		return nil, &projector.CheckpointError{Projection: projection, Err: err}
	}
	if r.Projection != projection || slices.Contains(r.Generations, nil) {
		return nil, &projector.CheckpointError{Projection: projection, Err: fmt.Errorf("the document of index %s is incomplete, or belongs to projection %q", s.store(), r.Projection)}
	}
	r.seqNo, r.primaryTerm = found.SeqNo, found.PrimaryTerm
	return r, nil
}

// read is get, with what is pending carried out first.
func (s *Sink) read(ctx context.Context, projection string) (*record, error) {
	again := false
	for wait := (backoff{}); ; {
		r, err := s.get(ctx, projection)
		if err != nil || r == nil || r.Pending == nil {
			return r, err
		}
		if _, err := r.checkpoints(); err != nil {
			return nil, err // it is left alone
		}
		if again {
			if err := wait.wait(ctx, errors.New("others change the projection's generations all the time")); err != nil {
				return nil, err
			}
		}
		if err := s.settle(ctx, projection); err != nil {
			return nil, err
		}
		again = true
	}
}

// put stores the document where it still is as it was read, and reports whether.
func (s *Sink) put(ctx context.Context, r *record) (bool, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return false, err
	}
	path := "/" + s.store() + "/_doc/" + url.PathEscape(r.Projection)
	switch {
	case r.primaryTerm == 0:
		path += "?op_type=create"
	case !fault.Global.Off(fault.CompareAndSet):
		path += "?if_seq_no=" + strconv.FormatInt(r.seqNo, 10) + "&if_primary_term=" + strconv.FormatInt(r.primaryTerm, 10)
	}
	var stored struct {
		SeqNo       int64 `json:"_seq_no"`
		PrimaryTerm int64 `json:"_primary_term"`
	}
	err = s.call(ctx, http.MethodPut, path, body, &stored)
	if statusOf(err) == http.StatusConflict {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	r.seqNo, r.primaryTerm = stored.SeqNo, stored.PrimaryTerm
	return true, nil
}

// addRecord stores the document of a projection that has none.
func (s *Sink) addRecord(ctx context.Context, projection string) error {
	r, err := s.get(ctx, projection)
	if err != nil || r != nil {
		return err
	}
	r = &record{Projection: projection, Highest: 1, Begun: 1, Generations: []*generation{{Generation: 1}}}
	if err := r.Generations[0].set(s.fresh(projection, 1), ""); err != nil {
		return err
	}
	_, err = s.put(ctx, r) // if somebody else has stored one, that is as good
	return err
}

// update changes the document: change is given what is stored, and may be called again
// where somebody else was faster. Seen is what was read just before, nil for nothing.
func (s *Sink) update(ctx context.Context, projection string, seen *record, change func(*record) error) (*record, error) {
	for wait := (backoff{}); ; {
		r := seen
		if seen = nil; r == nil {
			var err error
			if r, err = s.read(ctx, projection); err != nil {
				return nil, err
			}
		}
		if r == nil {
			return nil, errNoRecord
		}
		if err := change(r); err != nil {
			if errors.Is(err, errUnchanged) {
				err = nil
			}
			return r, err
		}
		done, err := s.put(ctx, r)
		if err != nil || done {
			return r, err
		}
		if err := wait.wait(ctx, errors.New("the checkpoint's document is changed by others all the time")); err != nil {
			return nil, err
		}
	}
}

// nonce is a name that nobody else has.
func nonce() string { return strings.ToLower(rand.Text()[:12]) }
