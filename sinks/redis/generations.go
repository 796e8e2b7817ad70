package redis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// beginScript adds a generation, for the owner of KEYS[1]. It returns the owner's term and
// name and, where they are the right ones, what is stored for the generation.
var beginScript = goredis.NewScript(`
local live = redis.call('HMGET', KEYS[1], 'term', 'owner')
if live[1] ~= ARGV[1] or live[2] ~= ARGV[2] then return {live[1], live[2], {}} end
redis.call('SADD', KEYS[3], ARGV[3])
if redis.call('EXISTS', KEYS[2]) == 0 then
	redis.call('HSET', KEYS[2], 'term', ARGV[1], 'sequence', '0', 'owner', ARGV[2], 'body', ARGV[4])
end
return {live[1], live[2], redis.call('HGETALL', KEYS[2])}
`)

func (s *Sink) begin(ctx context.Context, live projector.Checkpoint, generation int64) (projector.Checkpoint, error) {
	body, err := fresh(live.Projection, generation, projector.Building).Encode()
	if err != nil {
		return projector.Checkpoint{}, err
	}
	p := live.Projection
	answer, err := s.run(ctx, beginScript,
		[]string{checkpointKey(p, live.Generation), checkpointKey(p, generation), generationsKey(p)},
		live.Term, live.Owner, generation, string(body))
	if err != nil {
		return projector.Checkpoint{}, err
	}
	hash, _ := answer[2].([]any)
	if len(hash) == 0 {
		return projector.Checkpoint{}, fencedBy(live, answer[0], answer[1])
	}
	d, err := decode(p, flat(hash))
	if err != nil {
		return projector.Checkpoint{}, err
	}
	if d.checkpoint.Term != live.Term || d.checkpoint.Owner != live.Owner {
		return projector.Checkpoint{}, fenced(live, d.checkpoint.Term, d.checkpoint.Owner)
	}
	return d.checkpoint, nil
}

// switchScript: KEYS are the checkpoints of from and to, the pointer and the set of
// generations; ARGV three times term, owner and sequence of from, those of to, their next
// sequences, their bodies (that of from "" to remove it), from's number and to's place.
var switchScript = goredis.NewScript(`
for i = 1, 2 do
	local c = redis.call('HMGET', KEYS[i], 'term', 'owner', 'sequence')
	for k = 1, 3 do
		if c[k] ~= ARGV[3 * (i - 1) + k] then return {c[1], c[2]} end
	end
end
if ARGV[9] == '' then
	redis.call('DEL', KEYS[1])
	redis.call('SREM', KEYS[4], ARGV[11])
else
	redis.call('HSET', KEYS[1], 'sequence', ARGV[7], 'body', ARGV[9])
end
redis.call('HSET', KEYS[2], 'sequence', ARGV[8], 'body', ARGV[10])
redis.call('SET', KEYS[3], ARGV[12])
return {}
`)

func (s *Sink) switchTo(ctx context.Context, from, to projector.Checkpoint) error {
	p := from.Projection
	now, err := s.read(ctx, from)
	if err != nil {
		return err
	}
	then, err := s.read(ctx, to)
	if err != nil {
		return err
	}
	gone, err := s.sample(ctx, then)
	if err != nil {
		return err
	}
	if gone != "" {
		return s.damage(ctx, to, gone)
	}
	was := ""
	if from.Sequence > 0 {
		// That it is still this body the script sees by the sequence.
		retired := now.checkpoint
		retired.Phase = projector.Retired
		body, err := retired.Encode()
		if err != nil {
			return err
		}
		was = string(body)
	}
	to.Phase = projector.Live
	body, err := to.Encode()
	if err != nil {
		return err
	}
	answer, err := s.run(ctx, switchScript,
		[]string{checkpointKey(p, from.Generation), checkpointKey(p, to.Generation), liveKey(p), generationsKey(p)},
		from.Term, from.Owner, from.Sequence, to.Term, to.Owner, to.Sequence, from.Sequence+1, to.Sequence+1,
		was, string(body), from.Generation, to.Place)
	if err != nil {
		return err
	}
	if len(answer) > 0 {
		return fencedBy(from, answer[0], answer[1])
	}
	return nil
}

// read reads the checkpoint that c is believed to be, and compares term, owner and
// sequence.
func (s *Sink) read(ctx context.Context, c projector.Checkpoint) (stored, error) {
	hash, err := s.client.HGetAll(ctx, checkpointKey(c.Projection, c.Generation)).Result()
	if err != nil {
		return stored{}, err
	}
	if len(hash) == 0 {
		return stored{}, fenced(c, 0, "")
	}
	d, err := decode(c.Projection, hash)
	if err == nil && (d.checkpoint.Term != c.Term || d.checkpoint.Owner != c.Owner || d.checkpoint.Sequence != c.Sequence) {
		err = fenced(c, d.checkpoint.Term, d.checkpoint.Owner)
	}
	return d, err
}

// step is how many rows are removed at a time.
const step = 1000

// purgeScript removes some rows of an index, KEYS[2], for the owner of KEYS[1] only: one
// that was frozen must not remove what the next has written. ARGV: term, owner, what the
// keys of rows begin with, a cursor and a number. It returns the next cursor, or false to
// who is not the owner.
var purgeScript = goredis.NewScript(`
local c = redis.call('HMGET', KEYS[1], 'term', 'owner')
if c[1] ~= ARGV[1] or c[2] ~= ARGV[2] then return false end
local r = redis.call('HSCAN', KEYS[2], ARGV[4], 'COUNT', ARGV[5])
for i = 1, #r[2], 2 do
	redis.call('UNLINK', ARGV[3] .. r[2][i])
	redis.call('HDEL', KEYS[2], r[2][i])
end
return {r[1]}
`)

// purge removes all rows of a target in steps, and with the last its index is gone.
func (s *Sink) purge(ctx context.Context, c projector.Checkpoint, target string) error {
	keys := []string{checkpointKey(c.Projection, c.Generation), indexKey(c.Place, target)}
	for cursor := any("0"); ; {
		answer, err := s.run(ctx, purgeScript, keys, c.Term, c.Owner, rowPrefix(c.Place, target), cursor, step)
		if errors.Is(err, goredis.Nil) {
			return fenced(c, 0, "")
		}
		if err != nil {
			return err
		}
		if cursor = answer[0]; cursor == "0" {
			return nil
		}
		fault.Global.Reach(fault.GenerationStep)
	}
}

// strayScript removes keys by what they begin with, where no index tells of them, for the
// owner of KEYS[1] only; with the last step the other KEYS. ARGV: term, owner, a cursor, a
// pattern, a number, and the beginnings. It looks at the keys of one node, that of KEYS[1],
// and returns as purgeScript does.
var strayScript = goredis.NewScript(`
local c = redis.call('HMGET', KEYS[1], 'term', 'owner')
if c[1] ~= ARGV[1] or c[2] ~= ARGV[2] then return false end
local r = redis.call('SCAN', ARGV[3], 'MATCH', ARGV[4], 'COUNT', ARGV[5])
for _, key in ipairs(r[2]) do
	for i = 6, #ARGV do
		if string.sub(key, 1, #ARGV[i]) == ARGV[i] then redis.call('UNLINK', key) end
	end
end
if r[1] == '0' then
	for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
end
return {r[1]}
`)

// globs escapes what has a meaning in a pattern.
var globs = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// removeStray removes the keys of a place that have one of these beginnings, and then the
// indexes. It walks through all keys of the node, some at a time, so it is only for rows
// that an index was lost of.
func (s *Sink) removeStray(ctx context.Context, c projector.Checkpoint, beginnings, indexes []string) error {
	if fault.Global.Off(fault.RemoveStray) {
		return nil
	}
	keys := append([]string{checkpointKey(c.Projection, c.Generation)}, indexes...)
	for cursor := any("0"); ; {
		args := []any{c.Term, c.Owner, cursor, globs.Replace(c.Place) + ":*", step}
		for _, b := range beginnings {
			args = append(args, b)
		}
		answer, err := s.run(ctx, strayScript, keys, args...)
		if errors.Is(err, goredis.Nil) {
			return fenced(c, 0, "")
		}
		if err != nil {
			return err
		}
		if cursor = answer[0]; cursor == "0" {
			return nil
		}
		fault.Global.Reach(fault.GenerationStep)
	}
}

// removeLost is called before the commit that begins a rebuild in the generation's own
// place. It removes the rows of targets whose index was lost, and of all targets where the
// rebuild clears them: by the index alone they would stay. What is begun here and does not
// end leaves the generation marked as damaged, so that no other commit takes it for whole.
func (s *Sink) removeLost(ctx context.Context, prev projector.Checkpoint, mode projector.Mode) error {
	d, err := s.read(ctx, prev)
	if err != nil {
		return err
	}
	what := d.damaged
	var beginnings, indexes []string
	for _, target := range slices.Sorted(maps.Keys(d.rows)) {
		index := indexKey(prev.Place, target)
		have, err := s.indexed(ctx, index)
		if err != nil {
			return err
		}
		if have == d.rows[target] && (d.damaged == "" || mode != projector.Reset || target == onTarget) {
			continue
		}
		if what == "" {
			what = countText(target, have, d.rows[target])
		}
		beginnings, indexes = append(beginnings, rowPrefix(prev.Place, target)), append(indexes, index)
	}
	if len(beginnings) == 0 {
		return nil
	}
	if err := s.note(ctx, prev, what); err != nil {
		return err
	}
	return s.removeStray(ctx, prev, beginnings, indexes)
}

// endScript removes a generation's checkpoint.
var endScript = goredis.NewScript(`
local c = redis.call('HMGET', KEYS[1], 'term', 'owner')
if c[1] ~= ARGV[1] or c[2] ~= ARGV[2] then return false end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[3])
return {}
`)

// discard removes the rows first: while a part of them is left so is the checkpoint, and
// whoever comes next goes on.
func (s *Sink) discard(ctx context.Context, c projector.Checkpoint) error {
	key := checkpointKey(c.Projection, c.Generation)
	hash, err := s.client.HGetAll(ctx, key).Result()
	if err != nil {
		return err
	}
	if len(hash) == 0 {
		return nil
	}
	d, err := decode(c.Projection, hash)
	if err != nil {
		return err
	}
	if d.checkpoint.Term != c.Term || d.checkpoint.Owner != c.Owner {
		return fenced(c, d.checkpoint.Term, d.checkpoint.Owner)
	}
	if d.checkpoint.Phase == projector.Live {
		return &setupError{fmt.Errorf("tidemark/redis: generation %d of projection %q is the one that readers see, and can't be discarded", c.Generation, c.Projection)}
	}
	stray := d.damaged != ""
	for _, target := range slices.Sorted(maps.Keys(d.rows)) {
		have, err := s.indexed(ctx, indexKey(c.Place, target))
		if err != nil {
			return err
		}
		// Else the index was lost, or an earlier Discard has come as far as here.
		stray = stray || have != d.rows[target]
		if err := s.purge(ctx, d.checkpoint, target); err != nil {
			return err
		}
	}
	if stray {
		if err := s.removeStray(ctx, d.checkpoint, []string{d.checkpoint.Place + ":"}, nil); err != nil {
			return err
		}
	}
	_, err = s.run(ctx, endScript, []string{key, generationsKey(c.Projection)}, c.Term, c.Owner, c.Generation)
	if errors.Is(err, goredis.Nil) {
		return fenced(c, 0, "")
	}
	return err
}

// fenced is the error of an owner that is none any more.
func fenced(c projector.Checkpoint, term int64, owner string) error {
	return &projector.FencedError{Projection: c.Projection, Term: c.Term, Theirs: term, Owner: owner}
}

// fencedBy is fenced with what a script has found, of which all may be nil.
func fencedBy(c projector.Checkpoint, term, owner any) error {
	text, _ := term.(string)
	n, _ := strconv.ParseInt(text, 10, 64)
	name, _ := owner.(string)
	return fenced(c, n, name)
}
