package order_test

import (
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/order"
)

// Every value is in one list, in order; decimals are alone, and no list is too large.
func TestIn(t *testing.T) {
	d, err := bson.ParseDecimal128("-9007199254740993.5")
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 1<<20)
	for _, test := range []struct {
		name   string
		values []any
		want   []int // the lists' lengths
	}{
		{"none", nil, nil},
		{"one", []any{1}, []int{1}},
		{"a decimal", []any{d}, []int{1}},
		{"decimals", []any{1, "a", d, d, 2, bson.D{{Key: "a", Value: 1}}}, []int{2, 1, 1, 2}},
		{"decimals within", []any{bson.D{{Key: "a", Value: bson.A{1, d}}}, 1, bson.D{{Key: "a", Value: bson.D{{Key: "b", Value: d}}}}}, []int{1, 1, 1}},
		{"a decimal in a scope", []any{1, bson.CodeWithScope{Code: "f", Scope: bson.D{{Key: "a", Value: bson.A{d}}}}, bson.CodeWithScope{Code: "f", Scope: bson.D{{Key: "a", Value: 1}}}}, []int{1, 1, 1}},
		{"large doubles", []any{1.5, -9007199254740994.0, int64(-9007199254740993), int64(-9007199254740995)}, []int{1, 1, 2}},
		{"large", []any{long, long, long, long, long, 1}, []int{3, 3}},
		{"one too large", []any{1, strings.Repeat(long, 5), 2}, []int{1, 1, 1}},
		{"many", slices.Repeat([]any{1}, 25_000), []int{10_000, 10_000, 5000}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var values []bson.RawValue
			for _, v := range test.values {
				typ, b, err := bson.MarshalValue(v)
				if err != nil {
					t.Fatal(err)
				}
				values = append(values, bson.RawValue{Type: typ, Value: b})
			}
			at := 0
			for i, list := range order.In(values) {
				if i >= len(test.want) || len(list) != test.want[i] {
					t.Fatalf("list %d has %d values, want %v", i, len(list), test.want)
				}
				for _, v := range list {
					if !v.Equal(values[at]) {
						t.Fatalf("value %d is not in its place", at)
					}
					at++
				}
			}
			if at != len(values) {
				t.Errorf("%d of %d values", at, len(values))
			}
		})
	}
}
