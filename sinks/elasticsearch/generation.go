package elasticsearch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/tidemark-go/tidemark/projector"
)

// Begin implements projector.Sink.
func (s *Sink) Begin(ctx context.Context, live projector.Checkpoint, n int64) (cp projector.Checkpoint, err error) {
	_, err = s.update(ctx, live.Projection, nil, func(r *record) error {
		if err := r.owns(live); err != nil {
			return err
		}
		if g := r.find(n); g != nil {
			if cp, err = r.checkpoint(g); err == nil {
				err = errUnchanged
			}
			return err
		}
		cp = s.fresh(live.Projection, n)
		cp.Phase = projector.Building
		if r.Begun++; n <= r.Highest {
			// A number that comes again gets other names: what a frozen process still
			// does to the indices of the earlier one must not meet these.
			cp.Place += "r" + strconv.FormatInt(r.Begun, 10)
		}
		r.Highest = max(r.Highest, n)
		g := &generation{Generation: n}
		if err := g.set(cp, ""); err != nil {
			return err
		}
		r.Generations = append(r.Generations, g)
		cp.Term, cp.Owner = r.Term, r.Owner
		return nil
	})
	if err = unknown(err, live); err != nil {
		return projector.Checkpoint{}, failed(fmt.Sprintf("begin generation %d of projection %q", n, live.Projection), err)
	}
	return cp, nil
}

// Switch implements projector.Sink. What the record says decides: once it is stored, the
// aliases follow, whoever has to see to it.
func (s *Sink) Switch(ctx context.Context, from, to projector.Checkpoint) error {
	doing := fmt.Sprintf("switch projection %q from generation %d to %d", to.Projection, from.Generation, to.Generation)
	attempt := nonce()
	switched := func(r *record) error {
		if g := r.find(to.Generation); g != nil && g.Attempt == attempt {
			return errUnchanged
		}
		old, err := r.holds(from)
		if err != nil {
			return err
		}
		g, err := r.holds(to)
		if err != nil {
			return err
		}
		replaced := map[string]string{}
		for name, index := range old.Indices {
			if by := g.Indices[name]; by != "" {
				replaced[index] = by
			}
		}
		if from.Sequence == 0 {
			r.remove(from.Generation)
			r.drop(old.indices()...)
		} else {
			cp, err := r.checkpoint(old)
			if err != nil {
				return err
			}
			cp.Sequence++
			cp.Phase = projector.Retired
			if err := old.set(cp, attempt); err != nil {
				return err
			}
		}
		cp := to
		cp.Sequence++
		cp.Phase, cp.Place = projector.Live, g.Place
		r.serve(replaced)
		return g.set(cp, attempt)
	}
	r, err := s.read(ctx, to.Projection)
	if err == nil && r == nil {
		err = errNoRecord
	}
	if err == nil {
		if g := r.find(to.Generation); g != nil {
			if err = s.keepLonger(ctx, g.indices()); err == nil {
				err = s.refresh(ctx, g.indices()) // what readers are to see from the first moment
			}
		}
	}
	if err == nil {
		_, err = s.update(ctx, to.Projection, r, switched)
	}
	if err == nil {
		_, err = s.read(ctx, to.Projection)
	}
	if err = unknown(err, to); err != nil {
		return failed(doing, err)
	}
	return nil
}

// Discard implements projector.Sink.
func (s *Sink) Discard(ctx context.Context, c projector.Checkpoint) error {
	doing := fmt.Sprintf("discard generation %d of projection %q", c.Generation, c.Projection)
	left, err := s.left(ctx, c.Projection, c.Place)
	if err != nil {
		return failed(doing, err)
	}
	_, err = s.update(ctx, c.Projection, nil, func(r *record) error {
		if err := r.owns(c); err != nil {
			return err
		}
		g := r.find(c.Generation)
		switch {
		case g == nil:
			return errUnchanged
		case g.Phase == projector.Live:
			return &setupError{fmt.Errorf("tidemark/elasticsearch: %s: it is the live one", doing)}
		}
		r.remove(c.Generation)
		r.drop(g.indices()...)
		if g.Place == c.Place {
			r.drop(left...)
		}
		return nil
	})
	if err == nil {
		_, err = s.read(ctx, c.Projection)
	}
	if err != nil && !errors.Is(err, errNoRecord) {
		return failed(doing, err)
	}
	return nil
}

// left finds all indices of a place, those that failed commits and trials have left
// behind too. The name alone does not make an index the library's. What readers see stays:
// where a checkpoint was lost, it may be a place of the same name.
func (s *Sink) left(ctx context.Context, projection, place string) (indices []string, err error) {
	found := map[string]struct {
		aliased
		mapped
	}{}
	if err := s.call(ctx, http.MethodGet, "/"+place+"-*?filter_path=*.mappings._meta,*.aliases", nil, &found); err != nil {
		return nil, err
	}
	for index, f := range found {
		if f.Mappings.Meta.Tidemark.Place == place && !s.isServed(projection, f.aliased) {
			indices = append(indices, index)
		}
	}
	return indices, nil
}
