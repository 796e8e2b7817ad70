package sinktest

import (
	"context"
	"fmt"
	"math"
	"math/big"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

func addChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"add/rows-exist-by-contributions", adds, addExistence[Tx]},
		{"add/random-against-a-model", adds, addRandom[Tx]},
		{"add/more-off-than-there-is", adds, addDrift[Tx]},
		{"add/overflow", adds, addOverflow[Tx]},
		{"add/decimals", decimalSums, addDecimals[Tx]},
		{"add/decimals-exact-or-refused", decimalSums, addDecimalExtremes[Tx]},
	}
}

// add is a commit's contributions to the counts.
func (e *env[Tx]) add(minus, plus []Count) apply[Tx] {
	return func(ctx context.Context, tx Tx) error { return e.Counts.Target.Add(ctx, tx, minus, plus) }
}

func (e *env[Tx]) counts(place string) []string {
	e.Helper()
	return sums(e, e.Counts, place)
}

func sums[Tx, R any](e *env[Tx], a Adding[Tx, R], place string) []string {
	e.Helper()
	rows, err := a.Rows(e.ctx, place)
	e.must("read "+a.Target.Target(), err)
	texts := make([]string, len(rows))
	for i, r := range rows {
		texts[i] = sumText(r)
	}
	return texts
}

func countText(region string, n, total, contributions int64) string {
	return sumText(Sum[Count]{Count{region, "s", n, total}, contributions})
}

// addExistence goes through what the number of contributions is there for.
func addExistence[Tx any](e *env[Tx]) {
	o := e.begin()
	c := func(region string, n, total int64) Count { return Count{region, "s", n, total} }
	for _, step := range []struct {
		what        string
		minus, plus []Count
		want        []string
	}{
		{"one key several times in a batch", nil, []Count{c("a", 1, 10), c("a", 2, 0), c("b", 1, 1)}, []string{countText("a", 3, 10, 2), countText("b", 1, 1, 1)}},
		{"a change within one key", []Count{c("a", 1, 10)}, []Count{c("a", 5, 10)}, []string{countText("a", 7, 10, 2), countText("b", 1, 1, 1)}},
		{"a change that changes nothing", []Count{c("a", 5, 10)}, []Count{c("a", 5, 10)}, []string{countText("a", 7, 10, 2), countText("b", 1, 1, 1)}},
		{"a move to another key", []Count{c("b", 1, 1)}, []Count{c("c", 1, 1)}, []string{countText("a", 7, 10, 2), countText("c", 1, 1, 1)}},
		{"the last contribution gone", []Count{c("c", 1, 1)}, nil, []string{countText("a", 7, 10, 2)}},
		{"a contribution of zero", nil, []Count{c("z", 0, 0)}, []string{countText("a", 7, 10, 2), countText("z", 0, 0, 1)}},
		{"sums that cancel out", nil, []Count{c("a", -7, -10)}, []string{countText("a", 0, 0, 3), countText("z", 0, 0, 1)}},
		{"the contribution of zero gone", []Count{c("z", 0, 0)}, nil, []string{countText("a", 0, 0, 3)}},
		{"a key revived", nil, []Count{c("c", 4, 4)}, []string{countText("a", 0, 0, 3), countText("c", 4, 4, 1)}},
		{"a key emptied and revived in one batch", []Count{c("c", 4, 4)}, []Count{c("c", 1, 2)}, []string{countText("a", 0, 0, 3), countText("c", 1, 2, 1)}},
		{"one that comes and goes in one batch", []Count{c("d", 3, 3)}, []Count{c("d", 3, 3)}, []string{countText("a", 0, 0, 3), countText("c", 1, 2, 1)}},
		{"all gone", []Count{c("a", 2, 0), c("a", 5, 10), c("a", -7, -10), c("c", 1, 2)}, nil, nil},
		{"an empty batch", nil, nil, nil},
	} {
		o.mustCommit(e.add(step.minus, step.plus))
		e.wantRows("after "+step.what, e.counts(o.place()), step.want)
	}
	// Several Adds of one commit see each other.
	o.mustCommit(e.add(nil, []Count{c("a", 1, 1)}), e.add([]Count{c("a", 1, 1)}, nil), e.add(nil, []Count{c("a", 2, 2)}))
	e.wantRows("after three Adds in one commit", e.counts(o.place()), []string{countText("a", 2, 2, 1)})
}

// awkward are texts for keys that a careless encoding would confuse.
var awkward = []string{"", "a", "A", "a ", " a", "ä", "a\u0308", "a|b", "a\nb", "\"a\"", "null", "1", "01", "$a", "a.b", "\U0001F30A", "<&>"}

func (e *env[Tx]) randomCount() Count {
	return Count{
		Region: awkward[e.rng.IntN(len(awkward))], Status: awkward[e.rng.IntN(4)],
		N: e.rng.Int64N(7) - 3, Total: e.rng.Int64N(1<<40) - 1<<39,
	}
}

// addRandom compares with a model that is as simple as it can be: the list of all
// contributions that are alive.
func addRandom[Tx any](e *env[Tx]) {
	o := e.begin()
	var alive []Count
	for round := range e.rounds {
		var minus, plus []Count
		for range e.rng.IntN(40) {
			switch n := len(alive); {
			case n == 0 || e.rng.IntN(5) < 2:
				plus = append(plus, e.randomCount())
			case e.rng.IntN(2) == 0: // a document that changes
				i := e.rng.IntN(n)
				changed := alive[i]
				changed.N++
				minus, plus = append(minus, alive[i]), append(plus, changed)
				alive = slices.Delete(alive, i, i+1)
			default:
				i := e.rng.IntN(n)
				minus, alive = append(minus, alive[i]), slices.Delete(alive, i, i+1)
			}
		}
		if round == e.rounds-1 {
			minus, alive = append(minus, alive...), nil
		}
		alive = append(alive, plus...)
		o.mustCommit(e.add(minus, plus))
		e.wantRows(fmt.Sprintf("after batch %d", round), e.counts(o.place()), summed(alive))
	}
}

// summed is what a rollup of contributions should hold.
func summed(contributions []Count) []string {
	rows := map[[2]string]*Sum[Count]{}
	for _, c := range contributions {
		k := [2]string{c.Region, c.Status}
		if rows[k] == nil {
			rows[k] = &Sum[Count]{Row: Count{Region: c.Region, Status: c.Status}}
		}
		rows[k].Row.N += c.N
		rows[k].Row.Total += c.Total
		rows[k].Contributions++
	}
	texts := make([]string, 0, len(rows))
	for _, r := range rows {
		texts = append(texts, sumText(*r))
	}
	return texts
}

// addDrift: the model and the source disagree, and adding on would hide it.
func addDrift[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.add(nil, []Count{{"a", "s", 1, 5}, {"b", "s", 2, 6}}))
	want := []string{countText("a", 1, 5, 1), countText("b", 2, 6, 1)}
	for what, minus := range map[string][]Count{
		"from a row that is not there":             {{"c", "s", 1, 1}},
		"of zero, from a row that is not there":    {{"c", "s", 0, 0}},
		"from a row that has less":                 {{"a", "s", 1, 5}, {"a", "s", 1, 5}},
		"from a row that has less, beside others":  {{"b", "s", 2, 6}, {"a", "s", 1, 5}, {"a", "s", 0, 0}},
		"the last one, so that sums would be left": {{"a", "s", 1, 4}},
	} {
		err := o.commit(e.ctx, e.add(minus, []Count{{"d", "s", 1, 1}}))
		if err == nil {
			e.Errorf("taking a contribution off %s was committed", what)
		} else if o.sink.Classify(err) == projector.Transient {
			e.Errorf("taking a contribution off %s is Transient, but it does not pass: %v", what, err)
		}
		o.stored = e.load(projection)
		if err != nil {
			e.wantRows("after taking a contribution off "+what, e.counts(o.place()), slices.Clone(want))
		}
	}
	// In one batch the order of plus and minus does not matter.
	o.mustCommit(e.add([]Count{{"e", "s", 1, 1}}, []Count{{"e", "s", 1, 1}}))
}

// addOverflow: a sum that no longer fits is an error, and no wrong number.
func addOverflow[Tx any](e *env[Tx]) {
	o := e.begin()
	largest := Count{"a", "s", 1, math.MaxInt64}
	o.mustCommit(e.add(nil, []Count{largest, {"b", "s", 1, math.MinInt64}}))
	want := []string{countText("a", 1, math.MaxInt64, 1), countText("b", 1, math.MinInt64, 1)}
	e.wantRows("with the largest sums", e.counts(o.place()), slices.Clone(want))
	for what, plus := range map[string][]Count{
		"beyond the largest":   {{"a", "s", 1, 1}},
		"beyond the smallest":  {{"b", "s", 1, -1}},
		"far, within a batch,": {{"c", "s", 1, math.MaxInt64}, {"c", "s", 1, math.MaxInt64}},
	} {
		err := o.commit(e.ctx, e.add(nil, plus))
		e.wantClass("a sum that goes "+what, o.sink, err, projector.Poison)
		o.stored = e.load(projection)
		e.wantRows("after a sum that went "+what, e.counts(o.place()), slices.Clone(want))
	}
	o.mustCommit(e.add([]Count{largest}, []Count{{"a", "s", 1, 1}}))
	e.wantRows("after the sum came back", e.counts(o.place()), []string{countText("a", 1, 1, 1), want[1]})
}

func (e *env[Tx]) addAmounts(minus, plus []Amount) apply[Tx] {
	return func(ctx context.Context, tx Tx) error { return e.Amounts.Target.Add(ctx, tx, minus, plus) }
}

// decimal reads a decimal; the checks write no wrong ones.
func decimal(s string) bson.Decimal128 {
	d, err := bson.ParseDecimal128(s)
	if err != nil {
		panic(fmt.Sprintf("sinktest: %q: %v", s, err))
	}
	return d
}

func amountText(shop, total string, contributions int64) string {
	return sumText(Sum[Amount]{Amount{shop, decimal(total)}, contributions})
}

// addDecimals adds amounts of up to 20 digits, of which every sum has a decimal.
func addDecimals[Tx any](e *env[Tx]) {
	o := e.begin()
	total := new(big.Int) // in units of 10^-6
	var alive []bson.Decimal128
	for round := range e.rounds {
		var minus, plus []Amount
		for range 1 + e.rng.IntN(10) {
			exp := -e.rng.IntN(7)
			units := big.NewInt(e.rng.Int64() - 1<<62)
			d, ok := bson.ParseDecimal128FromBigInt(units, exp)
			if !ok {
				e.Fatalf("no decimal for %s", units)
			}
			plus, alive = append(plus, Amount{"a", d}), append(alive, d)
			total.Add(total, microUnits(d))
		}
		if n := len(alive); e.rng.IntN(2) == 0 {
			i := e.rng.IntN(n)
			minus = append(minus, Amount{"a", alive[i]})
			total.Sub(total, microUnits(alive[i]))
			alive = slices.Delete(alive, i, i+1)
		}
		o.mustCommit(e.addAmounts(minus, plus))
		var want []string // no row without a contribution
		if len(alive) > 0 {
			sum, _ := bson.ParseDecimal128FromBigInt(total, -6)
			want = append(want, sumText(Sum[Amount]{Amount{"a", sum}, int64(len(alive))}))
		}
		e.wantRows(fmt.Sprintf("after batch %d", round), sums(e, e.Amounts, o.place()), want)
	}
	all := make([]Amount, len(alive))
	for i, d := range alive {
		all[i] = Amount{"a", d}
	}
	o.mustCommit(e.addAmounts(all, []Amount{{"b", decimal("0.1")}, {"b", decimal("0.2")}, {"c", decimal("0E+3")}}))
	e.wantRows("in the end", sums(e, e.Amounts, o.place()), []string{amountText("b", "0.3", 2), amountText("c", "0", 1)})
}

func microUnits(d bson.Decimal128) *big.Int {
	n, exp, _ := d.BigInt()
	return n.Mul(n, new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(exp+6)), nil))
}

// addDecimalExtremes: a sum that has no decimal is refused; rounding it would lose
// what is taken off again later.
func addDecimalExtremes[Tx any](e *env[Tx]) {
	o := e.begin()
	huge, tiny := []Amount{{"a", decimal("1E+30")}}, []Amount{{"a", decimal("1E-30")}}
	hugeText, tinyText := amountText("a", "1E+30", 1), amountText("a", "1E-30", 1)
	o.mustCommit(e.addAmounts(nil, huge))
	if o.exactOrRefused("a sum of 61 digits", e.addAmounts(nil, tiny), hugeText) {
		o.mustCommit(e.addAmounts(tiny, nil))
	}
	e.wantRows("after 1E+30 + 1E-30 - 1E-30", sums(e, e.Amounts, o.place()), []string{hugeText})
	// Stored are 31 digits before and after, but between them lie 61.
	if !o.exactOrRefused("a change of 61 digits", e.addAmounts(huge, tiny), hugeText) {
		o.mustCommit(e.addAmounts(huge, nil))
		o.mustCommit(e.addAmounts(nil, tiny))
	}
	e.wantRows("after the change", sums(e, e.Amounts, o.place()), []string{tinyText})
	for _, s := range []string{"NaN", "Infinity"} {
		if o.exactOrRefused("a sum with "+s, e.addAmounts(nil, []Amount{{"a", decimal(s)}}), tinyText) {
			e.Errorf("a sum with %s was accepted, and can't be taken off again", s)
		}
	}
}

// exactOrRefused says whether a commit was accepted; if not, it must be poison, and
// these rows must be left as they are.
func (o *owner[Tx]) exactOrRefused(what string, write apply[Tx], rows ...string) bool {
	o.Helper()
	err := o.commit(o.ctx, write)
	if err == nil {
		return true
	}
	o.Logf("refused: %s", what)
	o.wantClass(what, o.sink, err, projector.Poison)
	o.stands("after " + what + " was refused")
	o.wantRows("after "+what+" was refused", sums(o.env, o.Amounts, o.place()), rows)
	return false
}
