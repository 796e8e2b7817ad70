package mongodb

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/projector"
)

// obstacles is a RebuildError where a generation can't begin, or would better not be
// switched to: views read the model's collections by their names, or documents of
// someone else's are in the new place.
func (s *Sink) obstacles(ctx context.Context, cp projector.Checkpoint) error {
	ours, err := s.collectionsOf(ctx, cp.Projection)
	if err != nil {
		return err
	}
	specs, err := s.db.ListCollectionSpecifications(ctx, bson.D{})
	if err != nil {
		return err
	}
	var faults []error
	for _, spec := range specs {
		switch {
		case spec.Type == "view":
			if reads := mentions(spec.Options, ours); reads != "" {
				faults = append(faults, fmt.Errorf("view %q reads collection %q of the model, and would stay with the old one after the switch; "+
					"drop it, and let readers run its pipeline on the collection that mongodb.Live finds", spec.Name, reads))
			}
		case cp.Generation > 1 && strings.HasPrefix(spec.Name, cp.Place+"."):
			err := s.db.Collection(spec.Name).FindOne(ctx, bson.D{}).Err()
			if err == nil {
				faults = append(faults, fmt.Errorf("collection %q has documents, and its name is in the place of the new generation; rename or drop it", spec.Name))
			} else if !errors.Is(err, mongo.ErrNoDocuments) {
				return err
			}
		}
	}
	if len(faults) > 0 {
		return &projector.RebuildError{Projection: cp.Projection, Err: errors.Join(faults...)}
	}
	return nil
}

// collectionsOf is the whole names of the collections of all generations.
func (s *Sink) collectionsOf(ctx context.Context, projection string) (map[string]bool, error) {
	cur, err := s.checkpoints.Find(ctx, ofProjection(projection))
	if err != nil {
		return nil, err
	}
	var all []remains
	if err := cur.All(ctx, &all); err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, r := range all {
		for _, name := range r.Collections {
			names[r.Place+"."+name] = true
		}
	}
	return names, nil
}

// mentions finds one of the names among the values of a view's definition, "" if there
// is none: as what it is on, or in a stage such as $lookup.
func mentions(doc bson.Raw, names map[string]bool) string {
	values, _ := doc.Values()
	for _, v := range values {
		if s, ok := v.StringValueOK(); ok && names[s] {
			return s
		}
		if v.Type == bson.TypeEmbeddedDocument || v.Type == bson.TypeArray {
			if s := mentions(v.Value, names); s != "" {
				return s
			}
		}
	}
	return ""
}
