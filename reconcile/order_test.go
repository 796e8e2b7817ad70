package reconcile_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/order"
	"github.com/tidemark-go/tidemark/internal/order/ordertest"
)

// orderOn is a database on a server of the test's own.
func orderOn(t *testing.T) *mongo.Database {
	t.Helper()
	m, err := serve.StartMongod(t.Context(), serve.MongodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	client, err := mongo.Connect(options.Client().ApplyURI(m.URI()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Disconnect(context.Background()); err != nil {
			t.Error(err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return client.Database("tidemark_order")
}

func orderValues(t *testing.T, n int, value func(*rand.Rand) bson.RawValue) []bson.RawValue {
	t.Helper()
	seed, err := strconv.ParseUint(os.Getenv("TIDEMARK_SEED"), 10, 64)
	if err != nil {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	values := make([]bson.RawValue, n)
	for i := range values {
		values[i] = value(rng)
	}
	return values
}

// orderRanks gives each value a number: the same for those that compare equal, otherwise
// in their order.
func orderRanks(values []bson.RawValue, compare func(a, b bson.RawValue) int) []int64 {
	sorted := make([]int, len(values))
	for i := range sorted {
		sorted[i] = i
	}
	slices.SortFunc(sorted, func(i, j int) int { return compare(values[i], values[j]) })
	ranks, rank := make([]int64, len(values)), int64(0)
	for n, i := range sorted {
		if n == 0 || compare(values[sorted[n-1]], values[i]) != 0 {
			rank++
		}
		ranks[i] = rank
	}
	return ranks
}

// orderDiffers says where two rankings differ first, and in how many places.
func orderDiffers(values []bson.RawValue, got, want []int64) string {
	n, first := 0, -1
	for i := range values {
		if got[i] == want[i] {
			continue
		}
		if n++; first < 0 || want[i] < want[first] {
			first = i
		}
	}
	if n == 0 {
		return ""
	}
	text := fmt.Sprintf("%d of %d values; the lowest is %v, rank %d by Compare, %d on the server, where these are next to it:", n, len(values), values[first], got[first], want[first])
	shown := 0
	for i, v := range values {
		if d := want[i] - want[first]; d >= -1 && d <= 1 && shown < 12 {
			text += fmt.Sprintf("\n%+d: %v %x (by Compare %d)", d, v.Type, v.Value, got[i])
			shown++
		}
	}
	return text
}

// orderByFloat is what Compare must not be: numbers by way of a float64.
func orderByFloat(a, b bson.RawValue) int {
	return order.Compare(orderFloat(a), orderFloat(b))
}

func orderFloat(v bson.RawValue) bson.RawValue {
	if n, ok := v.AsInt64OK(); ok && v.IsNumber() {
		_, b, _ := bson.MarshalValue(float64(n))
		return bson.RawValue{Type: bson.TypeDouble, Value: b}
	}
	return v
}

// Compare ranks values of all types as the server does, in sorts and comparisons of an
// aggregation, in an index, and as keys of a unique one.
func TestOrder(t *testing.T) {
	db := orderOn(t)
	t.Run("sort", func(t *testing.T) { orderInSort(t, db.Collection("values")) })
	t.Run("ids", func(t *testing.T) {
		ids := insertOrderIDs(t, db.Collection("ids"), ordertest.Value)
		ids.greater(t, "$gt", func(x bson.RawValue) (int64, error) {
			gt := bson.D{{Key: "$gt", Value: bson.A{"$_id", bson.D{{Key: "$literal", Value: x}}}}}
			return ids.docs.CountDocuments(t.Context(), bson.D{{Key: "$expr", Value: gt}})
		})
		ids.greater(t, "min", ids.beyond(t))
	})
	t.Run("odd ids", func(t *testing.T) {
		ids := insertOrderIDs(t, db.Collection("odd"), ordertest.Odd)
		ids.greater(t, "min", ids.beyond(t))
	})
	t.Run("lists", func(t *testing.T) { orderInLists(t, db.Collection("lists")) })
}

// orderInSort has the server rank values in an aggregation, and sort them in a find.
func orderInSort(t *testing.T, docs *mongo.Collection) {
	values := orderValues(t, effort.Values(100_000), ordertest.Nested)
	all := make([]any, len(values))
	for i, v := range values { // in a document, or an array would count for its elements
		all[i] = bson.D{{Key: "_id", Value: i}, {Key: "d", Value: bson.D{{Key: "v", Value: v}}}}
	}
	if _, err := docs.InsertMany(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	cur, err := docs.Aggregate(t.Context(), bson.A{
		bson.D{{Key: "$setWindowFields", Value: bson.D{
			{Key: "sortBy", Value: bson.D{{Key: "d", Value: 1}}},
			{Key: "output", Value: bson.D{{Key: "rank", Value: bson.D{{Key: "$denseRank", Value: bson.D{}}}}}},
		}}},
		bson.D{{Key: "$project", Value: bson.D{{Key: "rank", Value: 1}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var ranked []struct {
		ID   int `bson:"_id"`
		Rank int64
	}
	if err := cur.All(t.Context(), &ranked); err != nil {
		t.Fatal(err)
	}
	want := make([]int64, len(values))
	for _, r := range ranked {
		want[r.ID] = r.Rank
	}
	ranks := orderRanks(values, order.Compare)
	if diff := orderDiffers(values, ranks, want); diff != "" {
		t.Error(diff)
	}
	if diff := orderDiffers(values, orderRanks(values, orderByFloat), want); diff == "" {
		t.Error("a comparison by way of a float64 is not noticed: the test proves nothing")
	} else {
		t.Logf("by way of a float64 %.60s…", diff)
	}

	cur, err = docs.Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "d", Value: 1}}).SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		t.Fatal(err)
	}
	ranked = nil
	if err := cur.All(t.Context(), &ranked); err != nil {
		t.Fatal(err)
	}
	for n := 1; n < len(ranked); n++ {
		if a, b := ranked[n-1].ID, ranked[n].ID; ranks[a] > ranks[b] {
			t.Fatalf("find sorts %v before %v", values[a], values[b])
		}
	}
}

// orderInLists has the server find _ids by $in, in the lists that In makes of them. A list
// of decimals is the control.
func orderInLists(t *testing.T, docs *mongo.Collection) {
	ids := insertOrderIDs(t, docs, ordertest.Odd)
	var decimals []bson.RawValue
	for n := range 20 {
		d, err := bson.ParseDecimal128(fmt.Sprintf("-%d.%d", 9007199254740992+n%4, 5+10*n))
		if err != nil {
			t.Fatal(err)
		}
		typ, b, _ := bson.MarshalValue(d)
		decimals = append(decimals, bson.RawValue{Type: typ, Value: b})
		if _, err := docs.InsertOne(t.Context(), bson.D{{Key: "_id", Value: d}}); err != nil && !mongo.IsDuplicateKeyError(err) {
			t.Fatal(err)
		}
	}
	find := func(list []bson.RawValue) (n int, err error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		cur, err := docs.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: list}}}})
		if err != nil {
			return 0, err
		}
		var found []bson.Raw
		err = cur.All(ctx, &found)
		return len(found), err
	}
	for _, values := range [][]bson.RawValue{decimals, ids.found[:effort.Values(len(ids.found))]} {
		found := 0
		for _, list := range order.In(values) {
			n, err := find(list)
			if err != nil {
				t.Fatalf("%v: %v", list, err)
			}
			found += n
		}
		if found != len(values) {
			t.Errorf("%d of %d documents are found", found, len(values))
		}
	}
	if n, err := find(decimals); err == nil && n == len(decimals) {
		t.Error("by one list all decimals are found: the test proves nothing")
	} else {
		t.Logf("by one list %d of %d decimals are found: %v", n, len(decimals), err)
	}
}

// orderIDs are values as _ids of documents on the server.
type orderIDs struct {
	docs   *mongo.Collection
	values []bson.RawValue
	found  []bson.RawValue // those that are distinct, as the index has them
}

// insertOrderIDs inserts values as _ids: what equals another is refused, and the rest
// come from the index in their order.
func insertOrderIDs(t *testing.T, docs *mongo.Collection, value func(*rand.Rand) bson.RawValue) *orderIDs {
	t.Helper()
	ids := &orderIDs{docs: docs, values: orderValues(t, max(5000, effort.Values(20_000)), value)}
	all := make([]any, len(ids.values))
	for i, v := range ids.values {
		all[i] = bson.D{{Key: "_id", Value: v}}
	}
	_, err := docs.InsertMany(t.Context(), all, options.InsertMany().SetOrdered(false))
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		t.Fatal(err)
	}
	cur, err := docs.Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}).SetHint("_id_"))
	if err != nil {
		t.Fatal(err)
	}
	var found []struct {
		ID bson.RawValue `bson:"_id"`
	}
	if err := cur.All(t.Context(), &found); err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		ids.found = append(ids.found, f.ID)
	}
	if distinct := slices.Max(orderRanks(ids.values, order.Compare)); int64(len(found)) != distinct {
		t.Errorf("%d _ids are distinct on the server, %d by Compare", len(found), distinct)
	}
	if n, first := ids.wrong(order.Compare); n > 0 {
		t.Errorf("%d of %d _ids come in the wrong order: %s", n, len(found), first)
	}
	if n, first := ids.wrong(orderByFloat); n == 0 {
		t.Error("a comparison by way of a float64 is not noticed: the test proves nothing")
	} else {
		t.Logf("by way of a float64 %d of %d _ids come in the wrong order: %s", n, len(found), first)
	}
	return ids
}

// wrong is how many _ids come from the index before one that is not greater.
func (ids *orderIDs) wrong(compare func(a, b bson.RawValue) int) (n int, first string) {
	for i, b := range ids.found[1:] {
		a := ids.found[i]
		if c := compare(a, b); c >= 0 {
			if n++; n == 1 {
				first = fmt.Sprintf("%v %v is before %v %v, compared: %d", a.Type, a, b.Type, b, c)
			}
		}
	}
	return n, first
}

// greater compares what the server says of how many _ids are greater than some value.
func (ids *orderIDs) greater(t *testing.T, how string, count func(bson.RawValue) (int64, error)) {
	t.Helper()
	for _, x := range ids.values[:100] {
		got, err := count(x)
		if err != nil {
			t.Fatal(err)
		}
		if want := ids.count(func(id bson.RawValue) bool { return order.Compare(id, x) > 0 }); got != want {
			t.Errorf("by %s, %d _ids are greater than %v %v, by Compare %d", how, got, x.Type, x, want)
		}
	}
}

func (ids *orderIDs) count(f func(bson.RawValue) bool) (n int64) {
	for _, id := range ids.found {
		if f(id) {
			n++
		}
	}
	return n
}

// beyond counts from where the index has a value, which is one of those found. A find
// with min alone ends before the max key (tried on 6.0.27), whose document is added here.
func (ids *orderIDs) beyond(t *testing.T) func(bson.RawValue) (int64, error) {
	isMax := func(v bson.RawValue) bool { return v.Type == bson.TypeMaxKey }
	return func(x bson.RawValue) (n int64, err error) {
		if isMax(x) {
			return 0, nil
		}
		cur, err := ids.docs.Find(t.Context(), bson.D{}, options.Find().SetMin(bson.D{{Key: "_id", Value: x}}).SetHint("_id_").SetProjection(bson.D{{Key: "_id", Value: 1}}))
		if err != nil {
			return 0, err
		}
		var found []bson.Raw
		err = cur.All(t.Context(), &found)
		return int64(len(found)) - 1 + ids.count(isMax), err
	}
}
