package row

import (
	"bytes"
	"fmt"
	"math/big"
	"math/bits"
	"reflect"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Deltas is what a batch of contributions does to each row, sorted by key.
type Deltas struct {
	schema      *Schema
	minus, plus reflect.Value // the contributions
	index       map[string]int32
	keys        []byte
	groups      []group
	order       []int32      // of the groups that are left
	ints        []int128     // per group, its int sums
	decimals    []bigDecimal // per group, its decimal sums
	slots       []int        // per sum, its place among the ints or the decimals of a group
	nInts       int
	nDecs       int
	buf         []byte
}

// group has no pointers, which the collector would have to follow.
type group struct {
	start, end int // of its key
	count      int64
	row        int32 // one of its contributions, those of plus after those of minus
}

// Fold takes minus off and adds plus, per key. Of a key whose sums and number of
// contributions all come to zero nothing is left; if only some do, it stays. Sums are
// exact in between, whatever the order, and must fit an int64 in the end.
func Fold[R any](s *Schema, minus, plus []R) (*Deltas, error) {
	n := min(len(minus)+len(plus), 1024)
	d := &Deltas{
		schema: s, minus: reflect.ValueOf(minus), plus: reflect.ValueOf(plus),
		index: make(map[string]int32, n), groups: make([]group, 0, n),
	}
	for i := range s.Sums {
		if s.Sums[i].Kind == Int {
			d.slots, d.nInts = append(d.slots, d.nInts), d.nInts+1
		} else {
			d.slots, d.nDecs = append(d.slots, d.nDecs), d.nDecs+1
		}
	}
	for i := range minus {
		if err := d.add(reflect.ValueOf(&minus[i]).Elem(), i, -1); err != nil {
			return nil, err
		}
	}
	for i := range plus {
		if err := d.add(reflect.ValueOf(&plus[i]).Elem(), len(minus)+i, 1); err != nil {
			return nil, err
		}
	}
	return d, d.settle()
}

func (d *Deltas) add(row reflect.Value, n int, sign int64) error {
	d.buf = d.schema.AppendKey(d.buf[:0], row)
	g, ok := d.index[string(d.buf)]
	if !ok {
		g = d.newGroup(n)
	}
	d.groups[g].count += sign
	for i := range d.schema.Sums {
		f := &d.schema.Sums[i]
		v := row.Field(f.index)
		if f.Kind == Int {
			d.ints[int(g)*d.nInts+d.slots[i]].add(IntOf(v), sign)
			continue
		}
		if err := d.decimals[int(g)*d.nDecs+d.slots[i]].add(DecimalOf(v), sign); err != nil {
			return fmt.Errorf("column %q: %w", f.Name, err)
		}
	}
	return nil
}

func (d *Deltas) newGroup(row int) int32 {
	g := int32(len(d.groups)) //nolint:gosec // a batch is far smaller
	start := len(d.keys)
	d.keys = append(d.keys, d.buf...)
	d.groups = append(d.groups, group{start: start, end: len(d.keys), row: int32(row)}) //nolint:gosec // likewise
	for range d.nInts {
		d.ints = append(d.ints, int128{})
	}
	for range d.nDecs {
		d.decimals = append(d.decimals, bigDecimal{})
	}
	d.index[string(d.buf)] = g
	return g
}

func (d *Deltas) settle() error {
	d.order = make([]int32, 0, len(d.groups))
	for g := range int32(len(d.groups)) { //nolint:gosec // likewise
		if !d.nothing(int(g)) {
			d.order = append(d.order, g)
		}
	}
	slices.SortFunc(d.order, func(a, b int32) int {
		x, y := &d.groups[a], &d.groups[b]
		return bytes.Compare(d.keys[x.start:x.end], d.keys[y.start:y.end])
	})
	for i := range d.schema.Sums {
		if d.schema.Sums[i].Kind != Int {
			continue
		}
		for _, g := range d.order {
			if !d.ints[int(g)*d.nInts+d.slots[i]].fits() {
				return fmt.Errorf("column %q: the sum exceeds an int64", d.schema.Sums[i].Name)
			}
		}
	}
	return nil
}

func (d *Deltas) nothing(g int) bool {
	if d.groups[g].count != 0 {
		return false
	}
	for _, n := range d.ints[g*d.nInts:][:d.nInts] {
		if n != (int128{}) {
			return false
		}
	}
	for i := range d.decimals[g*d.nDecs:][:d.nDecs] {
		if d.decimals[g*d.nDecs+i].coefficient.Sign() != 0 {
			return false
		}
	}
	return true
}

// Len is the number of rows that change.
func (d *Deltas) Len() int { return len(d.order) }

// Row is a row with the key of delta i; only its key fields mean anything.
func (d *Deltas) Row(i int) reflect.Value {
	n := int(d.groups[d.order[i]].row)
	if n < d.minus.Len() {
		return d.minus.Index(n)
	}
	return d.plus.Index(n - d.minus.Len())
}

// Count is how many contributions delta i adds, less those it takes off.
func (d *Deltas) Count(i int) int64 { return d.groups[d.order[i]].count }

// Int is delta i of the schema's given sum, which must be an Int.
func (d *Deltas) Int(i, sum int) int64 {
	return int64(d.ints[int(d.order[i])*d.nInts+d.slots[sum]].lo) //nolint:gosec // settle has checked that it fits
}

// Decimal is delta i of the schema's given sum, which must be a Decimal:
// coefficient × 10^exponent, the coefficient to be read only.
func (d *Deltas) Decimal(i, sum int) (coefficient *big.Int, exponent int) {
	n := &d.decimals[int(d.order[i])*d.nDecs+d.slots[sum]]
	return &n.coefficient, n.exponent
}

// int128 is wide enough for the sum of any batch.
type int128 struct {
	hi int64
	lo uint64
}

func (n *int128) add(v, sign int64) {
	var carry uint64
	if sign > 0 {
		n.lo, carry = bits.Add64(n.lo, uint64(v), 0)
		n.hi += v>>63 + int64(carry)
		return
	}
	n.lo, carry = bits.Sub64(n.lo, uint64(v), 0)
	n.hi -= v>>63 + int64(carry)
}

func (n int128) fits() bool { return n.hi == int64(n.lo)>>63 }

type bigDecimal struct {
	coefficient big.Int
	exponent    int
}

func (n *bigDecimal) add(v bson.Decimal128, sign int64) error {
	if v.IsNaN() || v.IsInf() != 0 {
		return fmt.Errorf("%s can't be added up; leave such documents out, or count them in a column of their own", v)
	}
	c, exp, err := v.BigInt()
	if err != nil {
		return err
	}
	switch {
	case c.Sign() == 0:
		return nil // whatever its exponent, which could be thousands of digits away
	case n.coefficient.Sign() == 0:
		n.exponent = exp
	case exp < n.exponent:
		n.coefficient.Mul(&n.coefficient, power(n.exponent-exp))
		n.exponent = exp
	case exp > n.exponent:
		c.Mul(c, power(exp-n.exponent))
	}
	if sign > 0 {
		n.coefficient.Add(&n.coefficient, c)
	} else {
		n.coefficient.Sub(&n.coefficient, c)
	}
	return nil
}

func power(n int) *big.Int { return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(n)), nil) }
