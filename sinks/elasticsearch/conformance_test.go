package elasticsearch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/elasticsearch"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

func TestConformance(t *testing.T) { sinktest.Run(t, conformance(t)) }

// TestConformanceNotices: the suite finds the sink without its guards.
func TestConformanceNotices(t *testing.T) {
	for guard, name := range map[fault.Guard]string{
		fault.FenceTerm:     "fence/term",
		fault.FenceSequence: "fence/sequence",
		fault.RowVersion:    "fence/late-writes-are-harmless",
		fault.CompareAndSet: "acquire/two-at-a-time",
	} {
		t.Run(string(guard), func(t *testing.T) {
			disable(t, guard)
			for _, c := range sinktest.Checks(conformance(t)) {
				if c.Name == name && len(c.Faults(t.Context())) == 0 {
					t.Errorf("without %s, %s finds nothing", guard, name)
				}
			}
		})
	}
}

func conformance(t *testing.T) sinktest.Subject[*elasticsearch.Tx] {
	return sinktest.Subject[*elasticsearch.Tx]{
		Features: sinktest.Features{Trials: true, Keys: true, Values: true},
		Rounds:   max(4, effort.Values(12)),
		Open: func(c sinktest.T) sinktest.Store[*elasticsearch.Tx] {
			tb := testing.TB(t)
			if own, ok := c.(testing.TB); ok {
				tb = own
			}
			return conformanceStore(newCluster(tb))
		},
	}
}

// strict is a target that the server refuses large numbers for.
type strict struct {
	N int64 `row:"n"`
}

var stricts = elasticsearch.Index[strict]{Name: "strict", Mapping: `{"n": {"type": "byte"}}`}

func conformanceStore(d *cluster) sinktest.Store[*elasticsearch.Tx] {
	documents := elasticsearch.Index[sinktest.Document]{Name: "documents"}
	return sinktest.Store[*elasticsearch.Tx]{
		Sink: func(t sinktest.T) projector.Sink[*elasticsearch.Tx] {
			return elasticsearch.New(client(t, d.url), elasticsearch.Prefix(d.prefix))
		},
		Documents: putting(d, documents),
		Entries:   putting(d, elasticsearch.Index[sinktest.Entry]{Name: "entries"}),
		Keys:      putting(d, elasticsearch.Index[sinktest.Keys]{Name: "keys"}),
		Values:    putting(d, elasticsearch.Index[sinktest.Values]{Name: "values"}),
		Live: func(_ context.Context, projection string) (string, error) {
			return d.prefix + projection, nil // how the aliases begin
		},
		Checkpoint: func(ctx context.Context, projection string, generation int64) ([]byte, error) {
			r, err := d.record(ctx, projection)
			if err != nil && strings.Contains(err.Error(), "404") {
				return nil, nil
			}
			for _, g := range r.Generations {
				if g.Generation == generation {
					return []byte(g.Body), err
				}
			}
			return nil, err
		},
		SetCheckpoint: d.setCheckpoint,
		Refused: []sinktest.Refusal[*elasticsearch.Tx]{
			{Name: "of a text, by the sink", Write: put(documents, nil, list(of(1, 1, sinktest.Document{Name: "a\xff"})))},
			{Name: "of a number, by the server", Write: all(stricts.Create, put(stricts, nil, list(of(1, 1, strict{1}), of(2, 1, strict{1000}))))},
		},
	}
}

func (c *cluster) setCheckpoint(ctx context.Context, projection string, generation int64, body []byte) error {
	var doc struct {
		Source map[string]any `json:"_source"`
	}
	path := c.prefix + "tidemark-checkpoints/_doc/" + projection
	if err := c.ask(ctx, http.MethodGet, path, nil, &doc); err != nil {
		return err
	}
	for _, g := range doc.Source["generations"].([]any) {
		if g := g.(map[string]any); g["generation"] == float64(generation) {
			g["body"] = string(body)
			return c.ask(ctx, http.MethodPut, path, doc.Source, nil)
		}
	}
	return fmt.Errorf("no generation %d", generation)
}

// putting reads an index of a generation's place, or what an alias shows.
func putting[R any](d *cluster, x elasticsearch.Index[R]) sinktest.Putting[*elasticsearch.Tx, R] {
	return sinktest.Putting[*elasticsearch.Tx, R]{Target: x, Rows: func(ctx context.Context, place string) (all []sinktest.Kept[R], err error) {
		index := place + "-" + x.Name
		projection, _, built := strings.Cut(strings.TrimPrefix(place, d.prefix), "-g")
		if built {
			index += "-*" // of a generation that is gone
		}
		r, err := d.record(ctx, projection)
		if err != nil && !strings.Contains(err.Error(), "404") {
			return nil, err
		}
		for _, g := range r.Generations {
			if g.Place == place && g.Indices[x.Name] != "" {
				index = g.Indices[x.Name]
			}
		}
		hits, err := d.hits(ctx, index)
		if err != nil {
			return nil, err
		}
		for _, h := range hits {
			kept, err := decodeRow[R](h)
			if err != nil {
				return nil, err
			}
			all = append(all, kept)
		}
		return all, nil
	}}
}

func decodeRow[R any](h hit) (k sinktest.Kept[R], err error) {
	var owner struct {
		Owner string `json:"tm_owner"`
	}
	if err := json.Unmarshal(h.Source, &owner); err != nil {
		return k, err
	}
	k.Owner = owner.Owner
	if k.Owner == "" {
		k.Owner = h.ID
	}
	if v, ok := any(&k.Row).(*sinktest.Values); ok {
		return k, decodeValues(h.Source, v)
	}
	return k, json.Unmarshal(h.Source, &k.Row)
}

// decodeValues: encoding/json knows no Decimal128 as a string.
func decodeValues(source []byte, v *sinktest.Values) error {
	type plain sinktest.Values
	shadow := struct {
		*plain
		Decimal, MaybeDecimal *string
	}{plain: (*plain)(v)}
	if err := json.Unmarshal(source, &shadow); err != nil {
		return err
	}
	parse := func(text *string) (*bson.Decimal128, error) {
		if text == nil {
			return nil, nil
		}
		d, err := bson.ParseDecimal128(*text)
		return &d, err
	}
	d, err := parse(shadow.Decimal)
	if err != nil {
		return err
	}
	v.Decimal = *d
	v.MaybeDecimal, err = parse(shadow.MaybeDecimal)
	return err
}
