package elasticsearch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Projection, Bindings and Binding are the projector's, with this sink's Tx filled in.
type (
	Projection = projector.Projection[*Tx]
	Bindings   = []projector.Binding[*Tx]
	Binding    = projector.Binding[*Tx]
)

// Client is what the sink needs of a client: a *elasticsearch.Client or *TypedClient of
// github.com/elastic/go-elasticsearch/v8 has it, with addresses, credentials and TLS as
// configured there.
type Client interface {
	Perform(*http.Request) (*http.Response, error)
}

// Sink keeps read models in Elasticsearch. It is safe for use by several projections
// and goroutines.
type Sink struct {
	client Client
	prefix string
}

// Option changes how a Sink works.
type Option func(*Sink)

// Prefix begins the names of all indices and aliases, the checkpoints' included: for
// clusters that several teams share, and for users whose rights go by a pattern. Two
// sinks with different prefixes know nothing of each other. Default "".
func Prefix(p string) Option { return func(s *Sink) { s.prefix = p } }

// New makes a sink on a client, which stays the caller's to configure and to close.
func New(client Client, opts ...Option) *Sink {
	s := &Sink{client: client}
	for _, o := range opts {
		o(s)
	}
	return s
}

var _ projector.Sink[*Tx] = (*Sink)(nil)

// Versioned tells the runner that each row carries its change's version, so that every
// change may be applied at any time and any number of times.
func (s *Sink) Versioned() bool { return true }

// Alias is the name that readers of a model use: that of a target, or of one of its
// routes where the target is called "target-route".
func (s *Sink) Alias(projection, target string) string {
	return s.prefix + projection + "-" + target
}

// Refresh makes everything that has been committed to the live generation visible to
// searches. Getting documents by their id needs no refresh.
func (s *Sink) Refresh(ctx context.Context, projection string) error {
	r, err := s.read(ctx, projection)
	if err == nil && r != nil {
		if g := r.live(); g != nil {
			err = s.refresh(ctx, g.indices())
		}
	}
	if err != nil {
		return failed("refresh the indices of projection "+strconv.Quote(projection), err)
	}
	return nil
}

func (s *Sink) refresh(ctx context.Context, indices []string) error {
	return inParts(indices, func(names string) error {
		return s.call(ctx, http.MethodPost, "/"+names+"/_refresh", nil, nil)
	})
}

// Acquire implements projector.Sink.
func (s *Sink) Acquire(ctx context.Context, projection, owner string) ([]projector.Checkpoint, error) {
	doing := "take the term of projection " + strconv.Quote(projection)
	if s.client == nil {
		return nil, &setupError{errors.New("tidemark/elasticsearch: the client given to New is nil")}
	}
	if err := s.checkPrefix(); err != nil {
		return nil, &setupError{err}
	}
	if err := s.createStore(ctx); err != nil {
		return nil, failed(doing, err)
	}
	if err := s.addRecord(ctx, projection); err != nil {
		return nil, failed(doing, err)
	}
	var all []projector.Checkpoint
	_, err := s.update(ctx, projection, nil, func(r *record) (err error) {
		r.Term++
		r.Owner = owner
		all, err = r.checkpoints()
		return err
	})
	if err == nil && !fault.Global.Off(fault.AliasFollow) {
		// Where the checkpoints were put back to earlier ones, the aliases are elsewhere.
		_, err = s.follow(ctx, projection)
		if _, gone := errors.AsType[*goneError](err); gone {
			err = nil // the commits will tell; a rebuild must be able to begin
		}
	}
	if err != nil {
		return nil, failed(doing, err)
	}
	return all, nil
}

// Load implements projector.Sink. It writes to the checkpoint's document, so that what
// it has read is known to be what the cluster agrees on, and an attempt to commit that is
// still on its way finds another document than it has seen.
func (s *Sink) Load(ctx context.Context, projection string, generation int64) (projector.Checkpoint, error) {
	cp := s.fresh(projection, generation)
	_, err := s.update(ctx, projection, nil, func(r *record) (err error) {
		g := r.find(generation)
		if generation == 0 {
			g = r.live()
		}
		if g == nil {
			return errUnchanged
		}
		r.Loads++
		cp, err = r.checkpoint(g)
		return err
	})
	if err != nil && !errors.Is(err, errNoRecord) {
		return projector.Checkpoint{}, failed("read the checkpoint of projection "+strconv.Quote(projection), err)
	}
	return cp, nil
}

// fresh is the first checkpoint of a generation, which has committed nothing yet.
func (s *Sink) fresh(projection string, generation int64) projector.Checkpoint {
	phase := projector.Live
	if generation != 1 {
		phase = projector.Building
	}
	return projector.Checkpoint{
		Format: projector.CheckpointFormat, Projection: projection, Generation: generation,
		Place: s.places(projection) + strconv.FormatInt(generation, 10), Phase: phase,
	}
}

// places is how the places of all generations begin.
func (s *Sink) places(projection string) string { return s.prefix + projection + "-g" }

func (s *Sink) checkPrefix() error {
	for i, r := range s.prefix {
		ok := 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || i > 0 && (r == '-' || r == '_' || r == '.')
		if !ok || len(s.prefix) > 60 {
			return fmt.Errorf("tidemark/elasticsearch: the prefix %q can't begin an index's name; use lower-case letters, digits and -, _ or . inside, at most 60", s.prefix)
		}
	}
	return nil
}
