package elasticsearch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// writeAlias is an alias of every index, which never moves. All writes name it, with
// require_alias: a write that comes when its index is gone is then refused, where the
// server would else make a new index of that name, with whatever mapping it guesses.
func writeAlias(index string) string { return index + "-write" }

// newAlias is an alias that an index has until readers see it for the first time. Its
// removal must succeed, which refuses the same request when it comes a second time, late.
func newAlias(index string) string { return index + "-new" }

// readAliases are the names by which readers find an index, called name: "orders", or
// "orders-eu" for a route of it.
func (s *Sink) readAliases(projection, name string) []string {
	aliases := []string{s.Alias(projection, name)}
	if target, _, routed := strings.Cut(name, "-"); routed {
		aliases = append(aliases, s.Alias(projection, target))
	}
	return aliases
}

// token is an alias of the indices that readers see, with another number each time they
// change. A change of the aliases removes the token before, which must be there: so a
// request that is late by a whole switch is refused.
func (s *Sink) token(projection string, served int64) string {
	return s.tokens(projection) + strconv.FormatInt(served, 10)
}

func (s *Sink) tokens(projection string) string { return s.prefix + projection + ".served-" }

// aliased is what the server tells about the aliases of an index.
type aliased struct {
	Aliases map[string]map[string]any `json:"aliases"`
}

// isServed reports whether readers see an index.
func (s *Sink) isServed(projection string, a aliased) bool {
	for alias := range a.Aliases {
		if strings.HasPrefix(alias, s.tokens(projection)) {
			return true
		}
	}
	return false
}

// settle carries out what is pending, and stores that it is.
func (s *Sink) settle(ctx context.Context, projection string) error {
	r, err := s.follow(ctx, projection)
	if r == nil || r.Pending == nil {
		return err
	}
	if _, gone := errors.AsType[*goneError](err); err != nil && (!gone || r.Pending.Serve) {
		return err
	}
	if err := s.deleteIndices(ctx, r.Pending.Drop); err != nil {
		return err
	}
	r.Pending = nil
	_, err = s.put(ctx, r)
	return err
}

// goneError is a live generation whose indices are not all there.
type goneError struct{ indices []string }

func (e *goneError) Error() string {
	return fmt.Sprintf("tidemark/elasticsearch: the live generation has lost its indices %s; put them back from a snapshot, "+
		"or remove the projection's document from the index of checkpoints, so that the model is built again", strings.Join(e.indices, ", "))
}

// follow moves the aliases to where the record says that the model is, and gives the
// record that it went by, with a goneError too.
//
// The aliases are read first. So if somebody changes them after that, for a later record,
// the request is refused: the token that it removes is no longer there.
func (s *Sink) follow(ctx context.Context, projection string) (*record, error) {
	for wait := (backoff{}); ; {
		var current map[string]aliased
		if err := s.call(ctx, http.MethodGet, "/"+s.places(projection)+"*/_alias", nil, &current); err != nil {
			return nil, err
		}
		r, err := s.get(ctx, projection)
		if err != nil || r == nil {
			return r, err
		}
		actions := s.aliasActions(r, current)
		if len(actions) == 0 {
			return r, nil
		}
		var gone []string
		for index := range s.wantedAliases(r) {
			if _, there := current[index]; !there {
				gone = append(gone, index)
			}
		}
		if len(gone) == 0 {
			fault.Global.Reach(fault.AliasSend)
			body, err := json.Marshal(map[string]any{"actions": actions})
			if err != nil {
				return nil, err
			}
			err = s.call(ctx, http.MethodPost, "/_aliases", body, nil)
			if t := typeOf(err); t != noAlias && t != noIndex {
				return r, err
			}
		}
		// Somebody else was faster; or something is gone for good.
		now, err := s.get(ctx, projection)
		if err != nil {
			return nil, err
		}
		if len(gone) > 0 && now != nil && now.seqNo == r.seqNo {
			slices.Sort(gone)
			return now, &goneError{gone}
		}
		if err := wait.wait(ctx, errors.New("the aliases of projection "+strconv.Quote(projection)+" are changed by others all the time")); err != nil {
			return nil, err
		}
	}
}

// aliasActions are the changes that bring the aliases to where the record wants them.
func (s *Sink) aliasActions(r *record, current map[string]aliased) (actions []any) {
	act := func(do string, fields map[string]any) { actions = append(actions, map[string]any{do: fields}) }
	wanted := s.wantedAliases(r)
	if len(wanted) == 0 {
		return nil // there is no model yet; what readers see, if anything, is of a lost checkpoint
	}
	tokens := s.tokens(r.Projection)
	ours := func(alias string) bool {
		return strings.HasPrefix(alias, tokens) || slices.ContainsFunc(r.Generations, func(g *generation) bool {
			for name := range g.Indices {
				if slices.Contains(s.readAliases(r.Projection, name), alias) {
					return true
				}
			}
			return false
		})
	}
	var replaced map[string]string
	if r.Pending != nil {
		replaced = r.Pending.Replaced
	}
	for index, has := range current {
		for alias, properties := range has.Aliases {
			by := replaced[index]
			switch {
			case slices.Contains(wanted[index], alias) || alias == writeAlias(index):
				continue
			case alias == newAlias(index):
				if wanted[index] == nil || fault.Global.Off(fault.AliasToken) {
					continue
				}
			case ours(alias):
			case by != "": // a user's own
				moved := map[string]any{"index": by, "alias": alias}
				for k, v := range properties {
					moved[k] = v
				}
				act("add", moved)
			default:
				continue
			}
			act("remove", map[string]any{"index": index, "alias": alias, "must_exist": !fault.Global.Off(fault.AliasToken)})
		}
	}
	for index, aliases := range wanted {
		for _, alias := range aliases {
			if _, has := current[index].Aliases[alias]; !has {
				act("add", map[string]any{"index": index, "alias": alias})
			}
		}
	}
	return actions
}

// wantedAliases are those of the live generation, by index.
func (s *Sink) wantedAliases(r *record) map[string][]string {
	wanted := map[string][]string{}
	if g := r.live(); g != nil {
		for name, index := range g.Indices {
			wanted[index] = s.readAliases(r.Projection, name)
			if !fault.Global.Off(fault.AliasToken) {
				wanted[index] = append(wanted[index], s.token(r.Projection, r.Served))
			}
		}
	}
	return wanted
}
