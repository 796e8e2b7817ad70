package projector

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
)

const (
	samplesPerCollection = 3
	sampleBytes          = 64 << 10 // larger documents are not worth the time
)

// samples guards against the commonest mistake: a pure function that was changed
// without raising Version, so that what it makes of a pre-image is no longer what the
// old one had added. The checkpoint keeps hashes of a few documents and of what the
// functions make of them. At start, the documents that are still the same are put
// through the functions again; a difference is returned in words. It is a cheap net
// with wide meshes: trouble with reading documents is no reason not to start.
func (s *source) samples(ctx context.Context, d *decoder, stored []Sample) (now []Sample, differs []string) {
	for _, was := range stored {
		key := bson.RawValue(was.Key)
		doc, err := s.db.Collection(was.Collection, majority).FindOne(ctx, bson.D{{Key: "_id", Value: key}}).Raw()
		if err != nil || hashOf(doc) != was.Document {
			continue
		}
		result, ok := s.plan.sample(d, was.Collection, doc)
		if ok && result != was.Result {
			differs = append(differs, fmt.Sprintf("its functions make something else of document %s in %q than they did under the same Version (or they are not pure)", KeyText(key), was.Collection))
			continue
		}
		now = append(now, was)
	}
	return append(now, s.missingSamples(ctx, d, now)...), differs
}

// missingSamples takes more where a collection has too few.
func (s *source) missingSamples(ctx context.Context, d *decoder, have []Sample) (taken []Sample) {
	count := map[string]int{}
	for _, h := range have {
		count[h.Collection]++
	}
	for _, c := range s.plan.collections {
		if missing := samplesPerCollection - count[c.name]; missing > 0 {
			taken = append(taken, s.takeSamples(ctx, d, c.name, missing, have)...)
		}
	}
	return taken
}

func (s *source) takeSamples(ctx context.Context, d *decoder, collection string, n int, have []Sample) (taken []Sample) {
	cur, err := s.db.Collection(collection, majority).Find(ctx, bson.D{}, options.Find().SetLimit(2*samplesPerCollection))
	if err != nil {
		return nil
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	for len(taken) < n && cur.Next(ctx) {
		key := cur.Current.Lookup("_id")
		if len(cur.Current) > sampleBytes || sampled(have, collection, key) {
			continue
		}
		if result, ok := s.plan.sample(d, collection, cur.Current); ok {
			key.Value = append([]byte(nil), key.Value...)
			taken = append(taken, Sample{Collection: collection, Key: StoredKey(key), Document: hashOf(cur.Current), Result: result})
		}
	}
	return taken
}

func sampled(have []Sample, collection string, key bson.RawValue) bool {
	for _, s := range have {
		if s.Collection == collection && bson.RawValue(s.Key).Equal(key) {
			return true
		}
	}
	return false
}

var majority = options.Collection().SetReadConcern(readconcern.Majority())

// sample is a hash of what the pure functions on a collection make of a document;
// false where there is none, or they fail, which the stream will report.
func (p *plan) sample(d *decoder, collection string, doc bson.Raw) (hash int64, ok bool) {
	for _, b := range p.collections[p.byName[collection]].bindings {
		if p.bindings[b].sample == nil {
			continue
		}
		var rows []any
		err := safely(func() (err error) { rows, err = p.bindings[b].sample(d, doc); return err })
		if err != nil {
			return 0, false
		}
		for _, row := range rows {
			// JSON sorts what is in a map, and a sum does not mind the order of the rows: a
			// function that ranges over a map is pure all the same.
			text, err := json.Marshal(row)
			if err != nil {
				return 0, false
			}
			hash += hashOf(fmt.Appendf(nil, "%d %s", b, text))
		}
		ok = true
	}
	return hash, ok
}

func hashOf(b []byte) int64 {
	h := fnv.New64a()
	_, _ = h.Write(b)
	return int64(h.Sum64()) //nolint:gosec // a hash: every bit pattern will do
}
