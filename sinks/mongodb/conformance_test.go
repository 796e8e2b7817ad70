package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// TestConformance runs the checks beside each other: they wait more than they compute.
func TestConformance(t *testing.T) {
	for _, c := range sinktest.Checks(conformance(t)) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			c.Run(t)
		})
	}
}

// TestConformanceNotices: the suite finds the sink without its guards.
func TestConformanceNotices(t *testing.T) {
	for _, n := range []struct {
		guard fault.Guard
		name  string
	}{
		{fault.FenceTerm, "fence/term"},
		{fault.FenceSequence, "fence/sequence"},
		{fault.FenceRaises, "fence/term"},
		{fault.FenceTerm, "generations/switch-fenced"},
		{fault.FenceSequence, "generations/switch-fenced"},
		{fault.FenceRaises, "generations/switch-fenced"},
	} {
		guard, name := n.guard, n.name
		t.Run(string(guard)+" "+name, func(t *testing.T) {
			disable(t, guard)
			notices(t, guard, name)
		})
	}
}

func notices(t *testing.T, guard fault.Guard, name string) {
	t.Helper()
	for _, c := range sinktest.Checks(conformance(t)) {
		if c.Name == name && len(c.Faults(t.Context())) == 0 {
			t.Errorf("without %s, %s finds nothing", guard, name)
		}
	}
}

// conformance is the sink for the suite. Its databases live as long as t, or as the
// check where that is a test of its own.
func conformance(t *testing.T) sinktest.Subject[*mongodb.Tx] {
	return sinktest.Subject[*mongodb.Tx]{
		Rounds: max(8, effort.Values(40)),
		Features: sinktest.Features{
			Transactions: true, Trials: true, LoadWaits: true, Adds: true, DecimalSums: true, Keys: true, Owners: true, Values: true,
		},
		Open: func(c sinktest.T) sinktest.Store[*mongodb.Tx] {
			tb := testing.TB(t)
			if own, ok := c.(testing.TB); ok {
				tb = own
			}
			d := newDatabase(tb)
			c.Cleanup(func() { d.nothingOpen(c) })
			return conformanceStore(d)
		},
	}
}

// client is one that the server knows by its database: other checks have theirs.
func (d *database) client() (*mongo.Client, error) {
	return mongo.Connect(options.Client().ApplyURI(d.uri).SetAppName(d.Name()))
}

// nothingOpen checks that no call has left a transaction open on the server: it would
// hold its locks for a minute, and with them whoever drops, renames or indexes a
// collection of the database. What is found is ended, for the tests that follow.
func (d *database) nothingOpen(t sinktest.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
	defer cancel()
	admin := d.Client().Database("admin")
	var open []struct {
		Session struct {
			ID bson.Binary `bson:"id"`
		} `bson:"lsid"`
		Transaction bson.Raw `bson:"transaction"`
	}
	for range 30 {
		cur, err := admin.Aggregate(ctx, mongo.Pipeline{
			{{Key: "$currentOp", Value: bson.D{{Key: "idleSessions", Value: true}}}},
			{{Key: "$match", Value: bson.D{{Key: "appName", Value: d.Name()}, {Key: "transaction", Value: bson.D{{Key: "$exists", Value: true}}}}}},
		})
		if err == nil {
			err = cur.All(ctx, &open)
		}
		if err != nil {
			t.Errorf("look for open transactions: %v", err)
			return
		}
		if len(open) == 0 {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	for _, o := range open {
		t.Errorf("a transaction was left open on the server: %s", o.Transaction)
		_ = admin.RunCommand(ctx, bson.D{{Key: "killSessions", Value: bson.A{bson.D{{Key: "id", Value: o.Session.ID}}}}}).Err()
	}
}

func conformanceStore(d *database) sinktest.Store[*mongodb.Tx] {
	documents := mongodb.Collection[sinktest.Document]{Name: "documents"}
	return sinktest.Store[*mongodb.Tx]{
		Sink: func(t sinktest.T) projector.Sink[*mongodb.Tx] {
			client, err := d.client()
			if err != nil {
				t.Fatalf("%v", err)
			}
			t.Cleanup(func() { _ = client.Disconnect(context.Background()) })
			return mongodb.New(client.Database(d.Name()))
		},
		Documents: putting(d, documents),
		Counts:    adding(d, mongodb.Collection[sinktest.Count]{Name: "counts"}),
		Amounts:   adding(d, mongodb.Collection[sinktest.Amount]{Name: "amounts"}),
		Entries:   putting(d, mongodb.Collection[sinktest.Entry]{Name: "entries"}),
		Keys:      putting(d, mongodb.Collection[sinktest.Keys]{Name: "keys"}),
		Values:    putting(d, mongodb.Collection[sinktest.Values]{Name: "values"}),
		Live: func(ctx context.Context, projection string) (string, error) {
			coll, err := mongodb.Live(ctx, d.Database, projection, "x")
			if err != nil {
				return "", err
			}
			return strings.TrimSuffix(coll.Name(), ".x"), nil
		},
		Checkpoint: func(ctx context.Context, projection string, generation int64) ([]byte, error) {
			var found struct {
				Body string `bson:"body"`
			}
			err := d.checkpoints().FindOne(ctx, generationOf(projection, generation)).Decode(&found)
			if errors.Is(err, mongo.ErrNoDocuments) {
				return nil, nil
			}
			return []byte(found.Body), err
		},
		SetCheckpoint: func(ctx context.Context, projection string, generation int64, body []byte) error {
			_, err := d.checkpoints().UpdateOne(ctx, generationOf(projection, generation), bson.D{{Key: "$set", Value: bson.D{{Key: "body", Value: string(body)}}}})
			return err
		},
		Refused: []sinktest.Refusal[*mongodb.Tx]{
			{Name: "of a text, by the sink", Write: func(ctx context.Context, tx *mongodb.Tx) error {
				return put(documents, nil, []projector.Row[sinktest.Document]{{
					Owner: bson.RawValue{Type: bson.TypeInt32, Value: []byte{1, 0, 0, 0}}, Row: &sinktest.Document{Name: "a\xff"},
				}})(ctx, tx)
			}},
			{Name: "of a duplicate, by the server", Write: func(ctx context.Context, tx *mongodb.Tx) error {
				_, err := tx.Collection("strict").InsertMany(ctx, []any{bson.D{{Key: "_id", Value: 1}}, bson.D{{Key: "_id", Value: 1}}})
				return err
			}},
			{Name: "of a queued duplicate, by the server", Write: func(_ context.Context, tx *mongodb.Tx) error {
				for range 2 {
					tx.Collection("strict").Queue(mongo.NewInsertOneModel().SetDocument(bson.D{{Key: "_id", Value: 1}}))
				}
				return nil
			}},
		},
		Freeze: d.freeze,
	}
}

func (d *database) checkpoints() *mongo.Collection { return d.Collection("tidemark.checkpoints") }

// generationOf is the filter for a generation's checkpoint.
func generationOf(projection string, generation int64) bson.D {
	return bson.D{{Key: "projection", Value: projection}, {Key: "generation", Value: generation}}
}

// freeze leaves a transaction of an owner's session open.
func (d *database) freeze(ctx context.Context, cp projector.Checkpoint) (func(), error) {
	client, err := d.client()
	if err != nil {
		return nil, err
	}
	sess, err := client.StartSession()
	if err != nil {
		return nil, errors.Join(err, client.Disconnect(ctx))
	}
	thaw := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = sess.AbortTransaction(ctx) // it may have been killed
		_ = client.Disconnect(ctx)
	}
	id := generationOf(cp.Projection, cp.Generation)
	coll := client.Database(d.Name()).Collection("tidemark.checkpoints")
	_, err = coll.UpdateOne(ctx, id, bson.D{{Key: "$set", Value: bson.D{{Key: "lsid", Value: sess.ID()}}}})
	if err == nil {
		err = sess.StartTransaction()
	}
	if err == nil {
		_, err = coll.UpdateOne(mongo.NewSessionContext(ctx, sess), id, bson.D{{Key: "$inc", Value: bson.D{{Key: "frozen", Value: 1}}}})
	}
	if err != nil {
		thaw()
	}
	return thaw, err
}

func adding[R any](d *database, c mongodb.Collection[R]) sinktest.Adding[*mongodb.Tx, R] {
	return sinktest.Adding[*mongodb.Tx, R]{Target: c, Rows: func(ctx context.Context, place string) ([]sinktest.Sum[R], error) {
		return readAll(ctx, d, place, c.Name, func(r R, doc bson.Raw) (sinktest.Sum[R], error) {
			n, ok := doc.Lookup("contributions").Int64OK()
			if !ok {
				return sinktest.Sum[R]{}, fmt.Errorf("contributions is no int64 in %s", doc)
			}
			return sinktest.Sum[R]{Row: r, Contributions: n}, nil
		})
	}}
}

func putting[R any](d *database, c mongodb.Collection[R]) sinktest.Putting[*mongodb.Tx, R] {
	return sinktest.Putting[*mongodb.Tx, R]{Target: c, Rows: func(ctx context.Context, place string) ([]sinktest.Kept[R], error) {
		return readAll(ctx, d, place, c.Name, func(r R, doc bson.Raw) (sinktest.Kept[R], error) {
			owner, err := doc.LookupErr("_owner")
			if err != nil { // a Mirror's
				owner = doc.Lookup("_id")
			}
			return sinktest.Kept[R]{Row: r, Owner: projector.KeyText(owner)}, nil
		})
	}}
}

// readAll decodes rows from their document, and from their _id, which has the keys.
func readAll[R, S any](ctx context.Context, d *database, place, name string, with func(R, bson.Raw) (S, error)) (all []S, err error) {
	cur, err := d.Collection(place+"."+name).Find(ctx, bson.D{})
	if err != nil {
		return nil, err
	}
	defer cur.Close(ctx)
	for cur.Next(ctx) {
		var r R
		if err := bson.Unmarshal(cur.Current, &r); err != nil {
			return nil, err
		}
		if _, mirrored := any(r).(sinktest.Document); !mirrored {
			if keys, ok := cur.Current.Lookup("_id").DocumentOK(); ok {
				if err := bson.Unmarshal(keys, &r); err != nil {
					return nil, err
				}
			}
		}
		if v, ok := any(&r).(*sinktest.Values); ok {
			plainJSON(v)
		}
		s, err := with(r, append(bson.Raw(nil), cur.Current...))
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, cur.Err()
}

// plainJSON gives the json field the types that encoding/json has.
func plainJSON(v *sinktest.Values) {
	if v.JSON != nil {
		v.JSON = plain(v.JSON).(map[string]any)
	}
}

func plain(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = plain(v[k])
		}
	case bson.D:
		m := map[string]any{}
		for _, e := range v {
			m[e.Key] = plain(e.Value)
		}
		return m
	case bson.A:
		list := make([]any, len(v))
		for i := range v {
			list[i] = plain(v[i])
		}
		return list
	}
	if n := reflect.ValueOf(v); n.IsValid() && n.CanInt() {
		return float64(n.Int())
	}
	return v
}
