package sinktest_test

import (
	"context"
	"fmt"
	"math/big"
	"reflect"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// memoryTable is a target of the reference.
type memoryTable[R any] struct {
	name   string
	form   projector.Form
	key    func(R) string
	plus   func(m *memory, a *R, b R, sign int64) error // adds b to a
	broken string
}

func (t memoryTable[R]) Target() string { return t.name }

func (t memoryTable[R]) Check(form projector.Form) error {
	if form != t.form && t.broken != "every form fits" {
		return fmt.Errorf("table %s is for a %s", t.name, t.form)
	}
	return nil
}

// write does something to the tables now, or at the commit of a versioned sink.
func (tx *memoryTx) write(f func(tables) error) error {
	tx.pending = append(tx.pending, f)
	if tx.versioned {
		return nil
	}
	return f(tx.tables)
}

func (t memoryTable[R]) Create(_ context.Context, tx *memoryTx) error {
	return tx.write(func(all tables) error {
		there := all[t.name] != nil
		switch {
		case there && (t.broken == "failed first commit leaves its tables" || t.broken == "trial leaves its tables"):
			return fmt.Errorf("table %s exists already", t.name)
		case !there || t.broken == "create clears":
			all[t.name] = map[string]memoryRow{}
		}
		return nil
	})
}

func (t memoryTable[R]) Clear(_ context.Context, tx *memoryTx) error {
	return tx.write(func(all tables) error {
		if t.broken != "clear does nothing" {
			all[t.name] = map[string]memoryRow{}
		}
		return nil
	})
}

// rows is write for the table's rows.
func (t memoryTable[R]) rows(tx *memoryTx, f func(map[string]memoryRow) error) error {
	return tx.write(func(all tables) error {
		switch {
		case all[t.name] == nil && tx.versioned:
			all[t.name] = map[string]memoryRow{}
		case all[t.name] == nil:
			return fmt.Errorf("there is no table %s: %w", t.name, errFatal)
		}
		return f(all[t.name])
	})
}

func (t memoryTable[R]) Add(_ context.Context, tx *memoryTx, minus, plus []R) error {
	return t.rows(tx, func(rows map[string]memoryRow) error {
		touched := map[string]memoryRow{}
		for _, c := range []struct {
			rows []R
			sign int64
		}{{minus, -1}, {plus, 1}} {
			for _, r := range c.rows {
				if err := t.add(tx.memory, rows, touched, r, c.sign); err != nil {
					return err
				}
			}
		}
		return t.store(rows, touched)
	})
}

func (t memoryTable[R]) add(m *memory, rows, touched map[string]memoryRow, r R, sign int64) error {
	key := t.key(r)
	row, ok := touched[key]
	if !ok || t.broken == "last contribution of a batch wins" {
		row = rows[key]
	}
	sum, ok := row.row.(R)
	if !ok {
		sum = r
		if err := t.plus(m, &sum, r, -1); err != nil {
			return err
		}
	}
	if err := t.plus(m, &sum, r, sign); err != nil {
		return err
	}
	touched[key] = memoryRow{row: sum, contributions: row.contributions + sign}
	return nil
}

// store puts sums where they are, unless they can't be.
func (t memoryTable[R]) store(rows, touched map[string]memoryRow) error {
	for key, row := range touched {
		zero := row.row.(R)
		_ = t.plus(nil, &zero, zero, -1)
		isZero := t.zero(row.row.(R), zero)
		switch {
		case row.contributions < 0 && t.broken == "drift accepted":
		case row.contributions < 0, row.contributions == 0 && !isZero:
			return fmt.Errorf("table %s: more was taken off than there is: %w", t.name, errFatal)
		case row.contributions == 0 && t.broken != "emptied rows are kept", isZero && t.broken == "zero sums are dropped":
			delete(rows, key)
			continue
		}
		rows[key] = row
	}
	return nil
}

func (t memoryTable[R]) zero(sum, zero R) bool { return reflect.DeepEqual(sum, zero) }

func (t memoryTable[R]) Put(_ context.Context, tx *memoryTx, remove, put []projector.Row[R]) error {
	for _, r := range put {
		if err := storable(r.Row); err != nil && t.broken != "texts cut at NUL" {
			return err
		}
	}
	if t.broken == "large batches are cut" {
		put = put[:min(len(put), 10_000)]
	}
	return t.rows(tx, func(rows map[string]memoryRow) error {
		first, kept := map[string]bool{}, map[string]bool{}
		for _, r := range put {
			kept[t.keyOf(r)] = tx.versioned // whatever the versions, what is put is put
		}
		removals := func() {
			for _, r := range remove {
				if r.Row == nil && t.form != projector.FormMirror || !kept[t.keyOf(r)] {
					t.remove(tx.memory, rows, r)
				}
			}
		}
		if t.broken != "removal after put" {
			removals()
		}
		for _, r := range put {
			key := t.keyOf(r)
			if t.broken == "first put wins" && first[key] {
				continue
			}
			first[key] = true
			t.put(tx, rows, key, r)
		}
		if t.broken == "removal after put" {
			removals()
		}
		return nil
	})
}

func (t memoryTable[R]) put(tx *memoryTx, rows map[string]memoryRow, key string, r projector.Row[R]) {
	if held, ok := rows[key]; ok && tx.versioned && held.version > r.Version && t.broken != "versions ignored" {
		return
	}
	row := memoryRow{row: t.damaged(*r.Row), owner: t.ownerOf(r.Owner), version: r.Version, mark: tx.mark}
	if t.broken == "put does not mark" {
		row.mark = rows[key].mark
	}
	rows[key] = row
}

func (t memoryTable[R]) Load(_ context.Context, tx *memoryTx, put []projector.Row[R]) error {
	for _, r := range put {
		if err := storable(r.Row); err != nil && t.broken != "load stores what put refuses" {
			return err
		}
	}
	return t.rows(tx, func(rows map[string]memoryRow) error {
		for _, r := range put {
			owned := r
			if t.broken == "load forgets owners" {
				owned.Owner = bson.RawValue{Type: bson.TypeNull}
			}
			t.put(tx, rows, t.keyOf(r), owned)
		}
		return nil
	})
}

// Prepare has nothing to do: every row has a mark.
func (t memoryTable[R]) Prepare(context.Context, *memoryTx) error { return nil }

func (t memoryTable[R]) Sweep(_ context.Context, tx *memoryTx, limit int) (int, error) {
	if t.broken == "sweep without limit" {
		limit = 1 << 30
	}
	var left []string
	for key, r := range tx.tables[t.name] {
		old := r.mark != tx.mark
		if t.broken == "sweep spares older marks" {
			old = r.mark == 0
		}
		if !r.gone && old && len(left) < limit {
			left = append(left, key)
		}
	}
	return len(left), t.rows(tx, func(rows map[string]memoryRow) error {
		for _, key := range left {
			delete(rows, key)
		}
		for key, r := range rows {
			if t.broken == "sweep forgets owners" {
				r.owner = ""
				rows[key] = r
			}
		}
		return nil
	})
}

func (t memoryTable[R]) Count(_ context.Context, tx *memoryTx) (n int64, err error) {
	for _, r := range tx.tables[t.name] {
		if !r.gone {
			n++
		}
	}
	return n, nil
}

func (t memoryTable[R]) remove(m *memory, rows map[string]memoryRow, r projector.Row[R]) {
	owner := t.ownerOf(r.Owner)
	if m.versioned {
		key := t.keyOf(r)
		if held, ok := rows[key]; (!ok || held.version <= r.Version) && t.broken != "versions ignored" {
			rows[key] = memoryRow{version: r.Version, gone: true}
		} else if t.broken == "versions ignored" {
			delete(rows, key)
		}
		return
	}
	if r.Row != nil && t.broken == "owners ignored" {
		delete(rows, t.keyOf(r))
		return
	}
	if r.Row == nil && t.broken == "removal of all ignored" {
		return
	}
	if t.form == projector.FormMirror {
		delete(rows, owner)
		return
	}
	for key, held := range rows {
		if held.owner == owner && (r.Row == nil || key == t.keyOf(r)) {
			delete(rows, key)
		}
	}
}

func (t memoryTable[R]) keyOf(r projector.Row[R]) string {
	if t.form == projector.FormMirror {
		return t.ownerOf(r.Owner)
	}
	return t.key(*r.Row)
}

func (t memoryTable[R]) ownerOf(owner bson.RawValue) string {
	text := projector.KeyText(owner)
	switch t.broken {
	case "ids without their type":
		if s, ok := owner.StringValueOK(); ok {
			return s
		}
	case "ids with their number's type":
		return fmt.Sprintf("%s %s", owner.Type, text)
	case "long ids cut":
		return text[:min(len(text), 1000)]
	}
	return text
}

// storable refuses what the reference has no form for, as a real store would.
func storable(row any) error {
	if v, ok := row.(*sinktest.Values); ok && strings.Contains(v.Text, "\x00") {
		return &refusedError{"for a NUL"}
	}
	return nil
}

// damaged is what a store makes of a row that is broken in its values.
func (t memoryTable[R]) damaged(row R) any {
	v, ok := any(row).(sinktest.Values)
	if !ok {
		return row
	}
	switch t.broken {
	case "times in seconds":
		v.Time = v.Time.Truncate(time.Second)
	case "null is zero":
		if v.MaybeInt == nil {
			v.MaybeInt = new(int64(0))
		}
	case "texts cut at NUL":
		v.Text, _, _ = strings.Cut(v.Text, "\x00")
	}
	return v
}

func (t memoryTable[R]) adding(m *memory) sinktest.Adding[*memoryTx, R] {
	return sinktest.Adding[*memoryTx, R]{Target: t, Rows: func(_ context.Context, place string) ([]sinktest.Sum[R], error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		var sums []sinktest.Sum[R]
		for _, r := range m.places[place][t.name] {
			sums = append(sums, sinktest.Sum[R]{Row: r.row.(R), Contributions: r.contributions})
		}
		return sums, nil
	}}
}

func (t memoryTable[R]) putting(m *memory) sinktest.Putting[*memoryTx, R] {
	return sinktest.Putting[*memoryTx, R]{Target: t, Rows: func(_ context.Context, place string) ([]sinktest.Kept[R], error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		var kept []sinktest.Kept[R]
		for _, r := range m.places[place][t.name] {
			if !r.gone {
				kept = append(kept, sinktest.Kept[R]{Row: r.row.(R), Owner: r.owner})
			}
		}
		return kept, nil
	}}
}

func plusCount(m *memory, a *sinktest.Count, b sinktest.Count, sign int64) error {
	wraps := m == nil || m.broken == "sums wrap"
	for _, s := range []struct {
		to *int64
		by int64
	}{{&a.N, b.N}, {&a.Total, b.Total}} {
		sum := new(big.Int).Mul(big.NewInt(s.by), big.NewInt(sign))
		if sum.Add(sum, big.NewInt(*s.to)); !sum.IsInt64() && !wraps {
			return &refusedError{"for an overflow"}
		}
		*s.to += s.by * sign
	}
	return nil
}

func plusAmount(m *memory, a *sinktest.Amount, b sinktest.Amount, sign int64) error {
	x, expX, errX := a.Total.BigInt()
	y, expY, errY := b.Total.BigInt()
	if errX != nil || errY != nil {
		return &refusedError{"for a sum that is no number"}
	}
	if m != nil && m.broken == "decimals as floats" {
		return plusFloat(a, x, expX, y, expY, sign)
	}
	y.Mul(y, big.NewInt(sign))
	exp := min(expX, expY)
	scale(x, expX-exp)
	scale(y, expY-exp)
	x.Add(x, y)
	for m != nil && m.broken == "decimals rounded" && len(x.String()) > 34 {
		x.Quo(x, big.NewInt(10))
		exp++
	}
	sum, ok := bson.ParseDecimal128FromBigInt(x, exp)
	if !ok {
		return &refusedError{"for too many digits"}
	}
	if x.Sign() == 0 {
		sum = bson.Decimal128{}
	}
	a.Total = sum
	return nil
}

func scale(n *big.Int, digits int) {
	n.Mul(n, new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(digits)), nil))
}

func plusFloat(a *sinktest.Amount, x *big.Int, expX int, y *big.Int, expY int, sign int64) error {
	float := func(n *big.Int, exp int) float64 {
		var f float64
		_, _ = fmt.Sscanf(fmt.Sprintf("%sE%d", n, exp), "%g", &f)
		return f
	}
	sum, err := bson.ParseDecimal128(fmt.Sprintf("%.17g", float(x, expX)+float64(sign)*float(y, expY)))
	a.Total = sum
	return err
}
