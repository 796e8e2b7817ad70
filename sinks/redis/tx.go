package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// Tx is what a handler writes through: a queue of commands, which are carried out together
// with the checkpoint, by one EXEC, or not at all. It can't read: a transaction of Redis
// gives its answers at the end. It is for one goroutine, and for the duration of the
// handler's call.
//
// Each key has a name, and is the model's own: in the generation that is being written it
// is {projection}:g<generation>:on:<name>. What is wrong with a command, such as a value
// that can't be stored, a sum that overflows, or a key that holds something else, is the
// commit's error, and then nothing is written.
type Tx struct {
	sink       *Sink
	conn       *goredis.Tx // watches the checkpoint
	checkpoint projector.Checkpoint
	place      string
	mark       int64 // of a rebuild in place
	first      bool  // the generation's first commit
	begins     bool  // a rebuild begins in this generation: what is missing of it is no matter
	partly     bool  // the EXEC was carried out, all but a command

	targets []*target
	on      queue
	outside queue
	closed  bool
	err     error // the first
}

func (s *Sink) newTx(conn *goredis.Tx, prev, next projector.Checkpoint) *Tx {
	tx := &Tx{sink: s, conn: conn, checkpoint: prev, place: next.Place, first: prev.Sequence == 0}
	tx.on = queue{tx: tx, prefix: rowPrefix(tx.place, onTarget), cleared: tx.first}
	tx.outside = queue{tx: tx, prefix: outsidePrefix(prev.Projection)}
	if next.Rebuild != nil {
		tx.mark = next.Rebuild.Mark
		tx.begins = begins(prev, next)
	}
	return tx
}

// begins reports whether a rebuild begins in the generation, be it in the middle of another.
func begins(prev, next projector.Checkpoint) bool {
	return next.Rebuild != nil && next.Rebuild.Mode != projector.Shadow &&
		(prev.Rebuild == nil || !prev.Rebuild.Began.Equal(next.Rebuild.Began))
}

// target is what the transaction does to a target.
func (tx *Tx) target(name string, p *plan) *target {
	if i := slices.IndexFunc(tx.targets, func(t *target) bool { return t.name == name }); i >= 0 {
		return tx.targets[i]
	}
	t := &target{tx: tx, name: name, p: p}
	tx.targets = append(tx.targets, t)
	return t
}

var errOver = errors.New("tidemark/redis: the transaction is over; a Tx must not be kept after the handler's return")

// fail remembers the first error.
func (tx *Tx) fail(err error) error {
	if err != nil && tx.err == nil {
		tx.err = err
	}
	return err
}

func (tx *Tx) close() { tx.closed = true }

// plan is the commands of the transaction, and the number of rows of the targets in it.
func (tx *Tx) plan(ctx context.Context) (commands [][]any, rows map[string]int64, err error) {
	rows = map[string]int64{}
	for _, t := range tx.targets {
		c, n, err := t.plan(ctx)
		if err != nil {
			return nil, nil, err
		}
		commands, rows[t.name] = append(commands, c...), n
	}
	if tx.on.used() {
		c, n, err := tx.on.plan(ctx)
		if err != nil {
			return nil, nil, failed("what handlers write", err)
		}
		commands, rows[onTarget] = append(commands, c...), n
	}
	if tx.outside.used() {
		c, _, err := tx.outside.plan(ctx)
		if err != nil {
			return nil, nil, failed("what handlers write outside", err)
		}
		commands = append(commands, c...)
	}
	return commands, rows, nil
}

// entries asks a target's index for the number of its rows, and for some of them; nil for
// one that it has not. An index that has another number than it should have was lost, and
// with it the rows; lenient: they are to go.
func (tx *Tx) entries(ctx context.Context, target string, keys []string, lenient bool) (rows int64, entries []any, err error) {
	cp := tx.checkpoint
	index := indexKey(tx.place, target)
	pipe := tx.conn.Pipeline()
	want := pipe.HGet(ctx, checkpointKey(cp.Projection, cp.Generation), rowsPrefix+target)
	have := pipe.HLen(ctx, index)
	if _, err := pipe.Exec(ctx); err != nil && !serverError(err) {
		return 0, nil, err
	}
	if rows, err = have.Result(); err != nil {
		return 0, nil, tx.notHash(ctx, index, err)
	}
	expected, err := want.Int64()
	if err != nil && !errors.Is(err, goredis.Nil) {
		return 0, nil, err
	}
	if rows != expected && !lenient && !tx.begins && !fault.Global.Off(fault.CountRows) {
		return 0, nil, damaged(cp, countText(target, rows, expected))
	}
	entries = make([]any, 0, len(keys))
	chunks := slices.Collect(slices.Chunk(keys, step))
	err = each(ctx, tx.conn, len(chunks),
		func(pipe goredis.Pipeliner, i int) *goredis.SliceCmd { return pipe.HMGet(ctx, index, chunks[i]...) },
		func(_ int, c *goredis.SliceCmd) error {
			entries = append(entries, c.Val()...)
			return c.Err()
		})
	return rows, entries, err
}

// clearScript removes all rows of an index, and the index. ARGV: what the rows' keys begin
// with.
const clearScript = `
local cursor = '0'
repeat
	local r = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', 1000)
	cursor = r[1]
	for i = 1, #r[2], 2 do redis.call('UNLINK', ARGV[1] .. r[2][i]) end
until cursor == '0'
redis.call('UNLINK', KEYS[1])
return 0
`

// clearing is a command that removes all of a target. The script goes with it: a server
// that does not know its digest would say so in the middle of the EXEC.
func (tx *Tx) clearing(target string) []any {
	return []any{"eval", clearScript, 1, indexKey(tx.place, target), rowPrefix(tx.place, target)}
}

// Clear removes everything that handlers have written in this generation: for a
// projection's Reset.
func (tx *Tx) Clear() { tx.on.clear() }

// Outside gives keys that do not belong to a generation and survive a rebuild, such as an
// outbox: {projection}:outside:<name>.
func (tx *Tx) Outside() Outside { return Outside{tx} }

// Outside is the part of a Tx for keys that belong to no generation.
type Outside struct{ tx *Tx }

// Delete removes a key.
func (tx *Tx) Delete(name string) { tx.on.add(command{name: name, drops: true}, "unlink") }

// Delete removes a key.
func (o Outside) Delete(name string) { o.tx.outside.add(command{name: name, drops: true}, "unlink") }

// Hash is a hash of the handler's own.
func (tx *Tx) Hash(name string) TxHash { return TxHash{tx.on.key(name, "hash")} }

// Hash is a hash of the handler's own.
func (o Outside) Hash(name string) TxHash { return TxHash{o.tx.outside.key(name, "hash")} }

// String is a string of the handler's own, or a number.
func (tx *Tx) String(name string) TxString { return TxString{tx.on.key(name, "string")} }

// String is a string of the handler's own, or a number.
func (o Outside) String(name string) TxString { return TxString{o.tx.outside.key(name, "string")} }

// Set is a set of the handler's own.
func (tx *Tx) Set(name string) TxSet { return TxSet{tx.on.key(name, "set")} }

// Set is a set of the handler's own.
func (o Outside) Set(name string) TxSet { return TxSet{o.tx.outside.key(name, "set")} }

// SortedSet is a sorted set of the handler's own.
func (tx *Tx) SortedSet(name string) TxSortedSet { return TxSortedSet{tx.on.key(name, "zset")} }

// SortedSet is a sorted set of the handler's own.
func (o Outside) SortedSet(name string) TxSortedSet {
	return TxSortedSet{o.tx.outside.key(name, "zset")}
}

// List is a list of the handler's own.
func (tx *Tx) List(name string) TxList { return TxList{tx.on.key(name, "list")} }

// List is a list of the handler's own.
func (o Outside) List(name string) TxList { return TxList{o.tx.outside.key(name, "list")} }

// Stream is a stream of the handler's own.
func (tx *Tx) Stream(name string) TxStream { return TxStream{tx.on.key(name, "stream")} }

// Stream is a stream of the handler's own.
func (o Outside) Stream(name string) TxStream { return TxStream{o.tx.outside.key(name, "stream")} }

// TxHash queues commands on a hash. Values are strings, byte slices, booleans, numbers,
// time.Time, bson.ObjectID or bson.Decimal128, in the text form that rows have.
type TxHash struct{ key txKey }

// Set sets a field.
func (h TxHash) Set(field string, value any) TxHash {
	text, ok := h.key.argument(value)
	if ok {
		h.key.add(command{field: field, hasField: true, set: &text}, "hset", field, text)
	}
	return h
}

// Add adds to a field, which is an int64, and 0 where it is not there.
func (h TxHash) Add(field string, n int64) TxHash {
	h.key.add(command{field: field, hasField: true, adds: n, isAdd: true}, "hincrby", field, n)
	return h
}

// Remove removes fields.
func (h TxHash) Remove(fields ...string) TxHash {
	for _, f := range fields {
		h.key.add(command{field: f, hasField: true, unset: true}, "hdel", f)
	}
	return h
}

// TxString queues commands on a string.
type TxString struct{ key txKey }

// Set sets the string.
func (s TxString) Set(value any) TxString {
	text, ok := s.key.argument(value)
	if ok {
		s.key.add(command{set: &text}, "set", text)
	}
	return s
}

// Add adds to the number that the string is, an int64, 0 where the key is not there.
func (s TxString) Add(n int64) TxString {
	s.key.add(command{adds: n, isAdd: true}, "incrby", n)
	return s
}

// TxSet queues commands on a set.
type TxSet struct{ key txKey }

// Add adds members.
func (s TxSet) Add(members ...any) TxSet {
	s.key.many("sadd", members)
	return s
}

// Remove removes members.
func (s TxSet) Remove(members ...any) TxSet {
	s.key.many("srem", members)
	return s
}

// TxSortedSet queues commands on a sorted set.
type TxSortedSet struct{ key txKey }

// Put adds a member, or gives it another score. A score that is not a number is refused.
func (s TxSortedSet) Put(member any, score float64) TxSortedSet {
	text, ok := s.key.argument(member)
	switch {
	case !ok:
	case score != score: //nolint:gocritic // NaN
		_ = s.key.queue.tx.fail(fmt.Errorf("tidemark/redis: sorted set %q: the score of %q is not a number", s.key.name, text))
	default:
		s.key.add(command{}, "zadd", strconv.FormatFloat(score, 'g', -1, 64), text)
	}
	return s
}

// Remove removes members.
func (s TxSortedSet) Remove(members ...any) TxSortedSet {
	s.key.many("zrem", members)
	return s
}

// TxList queues commands on a list.
type TxList struct{ key txKey }

// Push adds values at the end.
func (l TxList) Push(values ...any) TxList {
	l.key.many("rpush", values)
	return l
}

// Keep removes all but the last n values.
func (l TxList) Keep(n int64) TxList {
	if n <= 0 {
		l.key.queue.add(command{name: l.key.name, drops: true}, "unlink")
	} else {
		l.key.add(command{}, "ltrim", -n, -1)
	}
	return l
}

// TxStream queues commands on a stream.
type TxStream struct{ key txKey }

// Append adds an entry, of names and values in turn, under an ID of the server's.
func (s TxStream) Append(namesAndValues ...any) TxStream {
	if n := len(namesAndValues); n == 0 || n%2 != 0 {
		_ = s.key.queue.tx.fail(fmt.Errorf("tidemark/redis: stream %q: an entry needs names and values in turn, not %d arguments", s.key.name, n))
		return s
	}
	args := []any{"*"}
	for _, v := range namesAndValues {
		text, ok := s.key.argument(v)
		if !ok {
			return s
		}
		args = append(args, text)
	}
	s.key.add(command{}, "xadd", args...)
	return s
}

// Keep removes all but about the last n entries.
func (s TxStream) Keep(n int64) TxStream {
	s.key.add(command{}, "xtrim", "MAXLEN", "~", max(n, 0))
	return s
}
