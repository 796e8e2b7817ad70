package redis

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/internal/row"
)

// target is what a transaction does to one target. Nothing is sent before the end of the
// handlers: then plan reads what is stored of the rows concerned and makes of it the
// commands, which can't fail.
type target struct {
	tx      *Tx
	name    string
	p       *plan
	cleared bool // before everything else

	// of a Rollup: the sum of all Adds, by key
	at     map[string]int
	keys   []string
	rows   []reflect.Value // one with the key's columns
	counts []int64         // of contributions
	sums   []int64         // those of keys[0], then those of keys[1], …

	// of the others: the Puts, in their order
	ops   []op
	swept map[string]bool
}

// op is one Put: the removals first.
type op struct {
	removals []removal
	puts     []putting
}

type removal struct {
	key, owner string
	all        bool // all rows of the owner, of a target with keys
	anyone     bool // whoever owns it
}

type putting struct {
	key   string
	entry string // of the index
	set   []any  // a whole command
	null  []any  // the fields that are to go
}

func (t *target) rowKey(key string) string { return rowPrefix(t.tx.place, t.name) + key }

func (t *target) clear() {
	*t = target{tx: t.tx, name: t.name, p: t.p, cleared: true}
}

// add adds the deltas to those of earlier Adds.
func (t *target) add(d *row.Deltas) error {
	if t.at == nil {
		t.at = make(map[string]int, d.Len())
	}
	nSums := len(t.p.schema.Sums)
	for i := range d.Len() {
		key, err := keyText(t.p.schema, d.Row(i))
		if err != nil {
			return err
		}
		n, ok := t.at[key]
		if !ok {
			n = len(t.keys)
			t.at[key] = n
			t.keys, t.rows, t.counts = append(t.keys, key), append(t.rows, d.Row(i)), append(t.counts, 0)
			for range nSums {
				t.sums = append(t.sums, 0)
			}
		}
		t.counts[n] += d.Count(i)
		for k := range nSums {
			sum, ok := plus(t.sums[n*nSums+k], d.Int(i, k))
			if !ok {
				return t.overflows(t.p.schema.Sums[k].Name, key)
			}
			t.sums[n*nSums+k] = sum
		}
	}
	return nil
}

// plus adds, false: the sum exceeds an int64.
func plus(a, b int64) (int64, bool) {
	if b > 0 && a > math.MaxInt64-b || b < 0 && a < math.MinInt64-b {
		return 0, false
	}
	return a + b, true
}

func (t *target) overflows(column, key string) error {
	return fmt.Errorf("tidemark/redis: hash %q: column %q of row %q: the sum exceeds an int64", t.name, column, key)
}

// plan is the commands, and the number of rows that the target has after them.
func (t *target) plan(ctx context.Context) (commands [][]any, rows int64, err error) {
	if t.p.kind == rollup {
		commands, rows, err = t.planSums(ctx)
	} else {
		commands, rows, err = t.planPuts(ctx)
	}
	if t.cleared {
		commands = append([][]any{t.tx.clearing(t.name)}, commands...)
	}
	if err != nil {
		err = failed(fmt.Sprintf("hash %q", t.name), err)
	}
	return commands, rows, err
}

// entries asks the index for the number of rows, and for these.
func (t *target) entries(ctx context.Context, keys []string) (rows int64, entries []any, err error) {
	if t.cleared {
		return 0, make([]any, len(keys)), nil
	}
	return t.tx.entries(ctx, t.name, keys, false)
}

func (t *target) planSums(ctx context.Context) (commands [][]any, rows int64, err error) {
	rows, entries, err := t.entries(ctx, t.keys)
	if err != nil {
		return nil, 0, err
	}
	s := t.p.schema
	fields := make([]string, 0, len(s.Sums)+1)
	for i := range s.Sums {
		fields = append(fields, s.Sums[i].Name)
	}
	fields = append(fields, row.Contributions)
	b := builder{t: t}
	err = each(ctx, t.tx.conn, len(t.keys),
		func(pipe goredis.Pipeliner, i int) *goredis.SliceCmd {
			return pipe.HMGet(ctx, t.rowKey(t.keys[i]), fields...)
		},
		func(i int, c *goredis.SliceCmd) error {
			values, err := c.Result()
			if err != nil {
				return t.tx.notHash(ctx, t.rowKey(t.keys[i]), err)
			}
			if t.cleared {
				clear(values)
			}
			was, err := t.stored(i, values, entries[i] != nil)
			if err != nil {
				return err
			}
			return t.sum(&b, i, was)
		})
	if err != nil {
		return nil, 0, err
	}
	commands, added := b.commands()
	return commands, rows + added, nil
}

// stored is what a row has, the sums and the contributions; nil where it is not there.
func (t *target) stored(i int, values []any, indexed bool) ([]int64, error) {
	have := 0
	was := make([]int64, len(values))
	for k, v := range values {
		text, ok := v.(string)
		if !ok {
			continue
		}
		have++
		var err error
		if was[k], err = strconv.ParseInt(text, 10, 64); err != nil {
			return nil, damaged(t.tx.checkpoint, fmt.Sprintf("row %q of %q holds %q where a number was", t.keys[i], t.name, text))
		}
	}
	switch {
	case have == 0 && !indexed:
		return nil, nil
	case have < len(values):
		return nil, damaged(t.tx.checkpoint, fmt.Sprintf("row %q of %q is gone, or a part of it", t.keys[i], t.name))
	case !indexed:
		return nil, damaged(t.tx.checkpoint, fmt.Sprintf("row %q of %q is not in the index", t.keys[i], t.name))
	}
	return was, nil
}

// sum adds delta i to what the row has.
func (t *target) sum(b *builder, i int, was []int64) error {
	s := t.p.schema
	n := len(s.Sums)
	is := make([]int64, n+1)
	copy(is, was)
	left := false
	for k := range n {
		sum, ok := plus(is[k], t.sums[i*n+k])
		if !ok {
			return t.overflows(s.Sums[k].Name, t.keys[i])
		}
		is[k], left = sum, left || sum != 0
	}
	is[n] += t.counts[i]
	switch {
	case is[n] < 0, is[n] == 0 && left:
		return &DriftError{Hash: t.name, Key: t.keys[i]}
	case is[n] == 0:
		b.remove(t.keys[i], was != nil)
		return nil
	case was != nil && t.counts[i] == 0 && !left && slices.Equal(is[:n], was[:n]):
		return nil
	}
	set := []any{"hset", t.rowKey(t.keys[i])}
	if was == nil {
		for k := range s.Keys {
			text, _, err := fieldText(&s.Keys[k], t.rows[i])
			if err != nil {
				return err
			}
			set = append(set, s.Keys[k].Name, text)
		}
	}
	for k := range n {
		set = append(set, s.Sums[k].Name, is[k])
	}
	b.put(t.keys[i], append(set, row.Contributions, is[n]), nil, "", was != nil)
	return nil
}

// outcome is what becomes of a key in the end.
type outcome struct {
	key     string
	indexed bool     // it was there before
	entry   string   // of the index, before
	owner   string   // now, "" where there is no row
	there   bool     // now
	put     *putting // nil: it is as it was, or gone
}

func (t *target) planPuts(ctx context.Context) (commands [][]any, rows int64, err error) {
	at, all := map[string]int{}, false
	var keys []string
	note := func(key string) {
		if _, ok := at[key]; !ok {
			at[key] = len(keys)
			keys = append(keys, key)
		}
	}
	owners := map[string]bool{}
	for _, o := range t.ops {
		for _, r := range o.removals {
			if r.all {
				all, owners[r.owner] = true, true
			} else {
				note(r.key)
			}
		}
		for _, p := range o.puts {
			note(p.key)
		}
	}
	if all && !t.cleared {
		err := t.scan(ctx, func(key, entry string) bool {
			if owners[ownerOf(entry)] {
				note(key)
			}
			return true
		})
		if err != nil {
			return nil, 0, err
		}
	}
	rows, entries, err := t.entries(ctx, keys)
	if err != nil {
		return nil, 0, err
	}
	outcomes := make([]outcome, len(keys))
	for i, key := range keys {
		o := outcome{key: key}
		if entry, ok := entries[i].(string); ok {
			o.indexed, o.entry, o.there, o.owner = true, entry, true, t.ownerIn(key, entry)
		}
		outcomes[i] = o
	}
	t.replay(outcomes, at)
	commands, added, err := t.commands(ctx, outcomes)
	return commands, rows + added, err
}

func (t *target) ownerIn(key, entry string) string {
	if t.p.kind == mirrored {
		return key
	}
	return ownerOf(entry)
}

// replay does the Puts one after the other.
func (t *target) replay(outcomes []outcome, at map[string]int) {
	gone := func(o *outcome) { o.there, o.owner, o.put = false, "", nil }
	for n := range t.ops {
		for _, r := range t.ops[n].removals {
			if r.all {
				for i := range outcomes {
					if o := &outcomes[i]; o.there && o.owner == r.owner {
						gone(o)
					}
				}
				continue
			}
			if o := &outcomes[at[r.key]]; o.there && (r.anyone || o.owner == r.owner) {
				gone(o)
			}
		}
		for i := range t.ops[n].puts {
			p := &t.ops[n].puts[i]
			o := &outcomes[at[p.key]]
			o.there, o.put, o.owner = true, p, t.ownerIn(p.key, p.entry)
		}
	}
}

// commands writes the outcomes. What the keys hold that are put to is asked before: EXEC
// does not take back what it has done when one of its commands finds a list.
func (t *target) commands(ctx context.Context, outcomes []outcome) ([][]any, int64, error) {
	b := builder{t: t}
	puts := make([]*outcome, 0, len(outcomes))
	for i := range outcomes {
		o := &outcomes[i]
		switch {
		case o.put != nil:
			puts = append(puts, o)
			entry := o.put.entry
			if t.tx.mark != 0 && !marked(o.entry, t.tx.mark) {
				// The row may be of an earlier row type, with columns that are none any more.
				b.rows = append(b.rows, []any{"unlink", t.rowKey(o.key)})
			}
			b.put(o.key, o.put.set, o.put.null, entry, o.indexed && o.entry == entry)
			if o.indexed && o.entry != entry {
				b.added--
			}
		case o.indexed && !o.there:
			b.remove(o.key, true)
		}
	}
	if !fault.Global.Off(fault.CheckTypes) {
		keys := make([]string, len(puts))
		for i, o := range puts {
			keys[i] = t.rowKey(o.key)
		}
		if err := t.tx.wantHashes(ctx, keys); err != nil {
			return nil, 0, err
		}
	}
	commands, added := b.commands()
	return commands, added, nil
}

// sweep finds rows without the mark, and removes them.
func (t *target) sweep(ctx context.Context, limit int) (int, error) {
	put := map[string]bool{}
	for _, o := range t.ops {
		for _, p := range o.puts {
			put[p.key] = true
		}
	}
	if t.swept == nil {
		t.swept = map[string]bool{}
	}
	var o op
	if !t.cleared && limit > 0 {
		err := t.scan(ctx, func(key, entry string) bool {
			if !marked(entry, t.tx.mark) && !put[key] && !t.swept[key] {
				t.swept[key] = true
				o.removals = append(o.removals, removal{key: key, anyone: true})
			}
			return len(o.removals) < limit
		})
		if err != nil {
			return 0, err
		}
	}
	t.ops = append(t.ops, o)
	return len(o.removals), nil
}

// scan hands each row of the index to f, some twice, until it says false.
func (t *target) scan(ctx context.Context, f func(key, entry string) bool) error {
	var cursor uint64
	for {
		list, next, err := t.tx.conn.HScan(ctx, indexKey(t.tx.place, t.name), cursor, "", step).Result()
		if err != nil {
			return err
		}
		for i := 0; i+1 < len(list); i += 2 {
			if !f(list[i], list[i+1]) {
				return nil
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// builder makes the commands of a target. Those of the index take many rows each.
type builder struct {
	t      *target
	rows   [][]any
	index  []any // field and value of each row that is new to it, or changed
	gone   []any // keys of rows
	fields []any // of the index, that go with them
	added  int64
}

func (b *builder) put(key string, set, null []any, entry string, indexed bool) {
	b.rows = append(b.rows, set)
	if len(null) > 0 {
		b.rows = append(b.rows, append([]any{"hdel", set[1]}, null...))
	}
	if !indexed {
		b.index = append(b.index, key, entry)
		b.added++
	}
}

func (b *builder) remove(key string, indexed bool) {
	if indexed {
		b.gone, b.fields = append(b.gone, b.t.rowKey(key)), append(b.fields, key)
		b.added--
	}
}

func (b *builder) commands() ([][]any, int64) {
	index := indexKey(b.t.tx.place, b.t.name)
	all := b.rows
	all = append(all, wide(b.index, "hset", index)...)
	all = append(all, wide(b.gone, "unlink")...)
	all = append(all, wide(b.fields, "hdel", index)...)
	return all, b.added
}

// wide cuts a list of arguments into commands. The number is even, for HSET.
func wide(list []any, begin ...any) (commands [][]any) {
	for len(list) > 0 {
		n := min(len(list), 2*step)
		commands = append(commands, append(append(make([]any, 0, len(begin)+n), begin...), list[:n]...))
		list = list[n:]
	}
	return commands
}

// at a time, so that neither side has to hold too many answers.
const pipelined = 5000

// each asks n questions, some thousand in a round trip, and takes the answers in order. An
// error of the server is the command's own.
func each[C goredis.Cmder](ctx context.Context, conn *goredis.Tx, n int, ask func(goredis.Pipeliner, int) C, take func(int, C) error) error {
	for start := 0; start < n; start += pipelined {
		pipe := conn.Pipeline()
		asked := make([]C, min(pipelined, n-start))
		for i := range asked {
			asked[i] = ask(pipe, start+i)
		}
		if _, err := pipe.Exec(ctx); err != nil && !serverError(err) {
			return err
		}
		for i, c := range asked {
			if err := take(start+i, c); err != nil {
				return err
			}
		}
	}
	return nil
}

// typesScript finds the first of some keys that is there and is no hash.
var typesScript = goredis.NewScript(`
for i = 1, #KEYS do
	local is = redis.call('TYPE', KEYS[i]).ok
	if is ~= 'hash' and is ~= 'none' then return {KEYS[i], is} end
end
return {}
`)

// wantHashes asks by a script: a TYPE for each key would cost half as much as writing it.
func (tx *Tx) wantHashes(ctx context.Context, keys []string) error {
	for keys := range slices.Chunk(keys, step) {
		found, err := typesScript.Run(ctx, tx.conn, keys).StringSlice()
		if err != nil {
			return err
		}
		if len(found) > 0 {
			return foreign(found[0], found[1], "hash")
		}
	}
	return nil
}

// notHash tells what a key holds that does not take a hash's command.
func (tx *Tx) notHash(ctx context.Context, key string, err error) error {
	return notHash(ctx, tx.conn, key, err)
}

func notHash(ctx context.Context, client goredis.Cmdable, key string, err error) error {
	if !strings.HasPrefix(err.Error(), "WRONGTYPE") {
		return err
	}
	is, terr := client.Type(ctx, key).Result()
	if terr != nil {
		return errors.Join(err, terr)
	}
	return foreign(key, is, "hash")
}
