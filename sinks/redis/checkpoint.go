package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// The fields of a checkpoint's hash:
//
//	term, sequence, owner
//	body          what Checkpoint.Encode wrote, byte for byte
//	rows.<target> the number of rows of a target, as its index should have them
//	damaged       what of the model was found to be gone; absent: nothing
//	loads         counts the reads by Load, which have to write
const (
	fieldTerm     = "term"
	fieldSequence = "sequence"
	fieldOwner    = "owner"
	fieldBody     = "body"
	fieldDamaged  = "damaged"
	rowsPrefix    = "rows."
)

// stored is a checkpoint's hash.
type stored struct {
	checkpoint projector.Checkpoint
	body       string
	damaged    string
	rows       map[string]int64 // by target
}

// decode reads a checkpoint's hash. Whatever of it can't be read is a CheckpointError, or a
// FormatError where a newer release has written it.
func decode(projection string, hash map[string]string) (stored, error) {
	malformed := func(text string) (stored, error) {
		return stored{}, &projector.CheckpointError{Projection: projection, Err: errors.New(text)}
	}
	d := stored{body: hash[fieldBody], damaged: hash[fieldDamaged], rows: map[string]int64{}}
	var err error
	if d.checkpoint, err = projector.DecodeCheckpoint(projection, []byte(d.body)); err != nil {
		return stored{}, err
	}
	if d.checkpoint.Term, err = strconv.ParseInt(hash[fieldTerm], 10, 64); err != nil {
		return malformed("its field term is missing, or no number")
	}
	if d.checkpoint.Sequence, err = strconv.ParseInt(hash[fieldSequence], 10, 64); err != nil {
		return malformed("its field sequence is missing, or no number")
	}
	d.checkpoint.Owner = hash[fieldOwner]
	for field, value := range hash {
		if target, ok := strings.CutPrefix(field, rowsPrefix); ok {
			if d.rows[target], err = strconv.ParseInt(value, 10, 64); err != nil {
				return malformed(fmt.Sprintf("its field %s is no number", field))
			}
		}
	}
	return d, nil
}

// flat is a hash from the list of its names and values, as scripts give it.
func flat(list []any) map[string]string {
	hash := make(map[string]string, len(list)/2)
	for i := 0; i+1 < len(list); i += 2 {
		hash[fmt.Sprint(list[i])] = fmt.Sprint(list[i+1])
	}
	return hash
}

// fresh is the checkpoint of a generation that has committed nothing yet.
func fresh(projection string, generation int64, phase projector.Phase) projector.Checkpoint {
	return projector.Checkpoint{
		Format: projector.CheckpointFormat, Projection: projection, Generation: generation,
		Place: placeOf(projection, generation), Phase: phase,
	}
}

// run runs a script, by its digest where the server knows it.
func (s *Sink) run(ctx context.Context, script *goredis.Script, keys []string, args ...any) ([]any, error) {
	return script.Run(ctx, s.client, keys, args...).Slice()
}

// takeScript raises the terms of all generations to ARGV[1], for owner ARGV[2], where they
// are the ones that were read, and none has come or gone. ARGV[3] is how many those are, and
// then come three for each: the term, the number, and the body of a new checkpoint where it
// has none, for which the term "" was read. That is marked as damaged: what the generation
// has is found by its keys' beginning, when it is discarded. The last two arguments are the
// body and the number of a generation that is added, unless "".
//
// It asks for the terms only: an owner that commits without a pause changes the rest all
// the time.
var takeScript = goredis.NewScript(`
local n = tonumber(ARGV[3])
if redis.call('SCARD', KEYS[1]) ~= n then return false end
for i = 1, n do
	local term = redis.call('HGET', KEYS[i + 1], 'term') or ''
	if term ~= ARGV[1 + 3 * i] or redis.call('SISMEMBER', KEYS[1], ARGV[2 + 3 * i]) == 0 then return false end
end
local body, number = ARGV[4 + 3 * n], ARGV[5 + 3 * n]
if body ~= '' and redis.call('EXISTS', KEYS[n + 2]) == 1 then
	redis.call('SADD', KEYS[1], number)
	return false
end
local out = {}
for i = 1, n do
	redis.call('HSET', KEYS[i + 1], 'term', ARGV[1], 'owner', ARGV[2])
	if ARGV[1 + 3 * i] == '' then
		redis.call('HSET', KEYS[i + 1], 'sequence', '0', 'body', ARGV[3 + 3 * i], 'damaged', 'its checkpoint was lost')
	end
	out[#out + 1] = redis.call('HGETALL', KEYS[i + 1])
end
if body ~= '' then
	redis.call('SADD', KEYS[1], number)
	redis.call('HSET', KEYS[n + 2], 'term', ARGV[1], 'sequence', '0', 'owner', ARGV[2], 'body', body)
	out[#out + 1] = redis.call('HGETALL', KEYS[n + 2])
end
return out
`)

// take raises the term of all generations.
func (s *Sink) take(ctx context.Context, projection, owner string) ([]stored, error) {
	for {
		found, err := s.generations(ctx, projection)
		if err != nil {
			return nil, err
		}
		term, next, live := int64(1), int64(1), false
		keys := []string{generationsKey(projection)}
		var terms []any
		for _, g := range found {
			keys = append(keys, checkpointKey(projection, g.number))
			next = max(next, g.number+1)
			if g.missing {
				// It can't be gone on with: whoever cleans up discards it.
				lost, err := fresh(projection, g.number, projector.Building).Encode()
				if err != nil {
					return nil, err
				}
				terms = append(terms, "", g.number, string(lost))
				continue
			}
			terms = append(terms, g.checkpoint.Term, g.number, "")
			term = max(term, g.checkpoint.Term+1)
			live = live || g.checkpoint.Phase == projector.Live
		}
		var body []byte
		if !live { // a new projection; or somebody has deleted the checkpoint of the live generation
			if n, err := s.pointed(ctx, projection, found); err != nil {
				return nil, err
			} else if n > 0 {
				next = n
			}
			if body, err = fresh(projection, next, projector.Live).Encode(); err != nil {
				return nil, err
			}
			keys = append(keys, checkpointKey(projection, next))
		}
		args := append([]any{term, owner, len(found)}, terms...)
		taken, err := s.run(ctx, takeScript, keys, append(args, string(body), next)...)
		if errors.Is(err, goredis.Nil) {
			continue // somebody else was faster
		}
		if err != nil {
			return nil, err
		}
		return decodeAll(projection, taken)
	}
}

func decodeAll(projection string, hashes []any) ([]stored, error) {
	all := make([]stored, 0, len(hashes))
	for _, h := range hashes {
		list, _ := h.([]any)
		d, err := decode(projection, flat(list))
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b stored) int { return int(a.checkpoint.Generation - b.checkpoint.Generation) })
	return all, nil
}

// generation is one that the projection's set of them has.
type generation struct {
	stored
	number  int64
	missing bool // its checkpoint is
}

// generations reads and decodes all checkpoints, each as it was at some moment.
func (s *Sink) generations(ctx context.Context, projection string) ([]generation, error) {
	members, err := s.client.SMembers(ctx, generationsKey(projection)).Result()
	if err != nil {
		return nil, err
	}
	var found []generation
	for _, m := range members {
		n, err := strconv.ParseInt(m, 10, 64)
		if err != nil {
			return nil, &setupError{fmt.Errorf("tidemark/redis: key %q has a member %q, which is no number; remove it", generationsKey(projection), m)}
		}
		g := generation{number: n}
		hash, err := s.client.HGetAll(ctx, checkpointKey(projection, n)).Result()
		if err != nil {
			return nil, err
		}
		if g.missing = len(hash) == 0; !g.missing {
			if g.stored, err = decode(projection, hash); err != nil {
				return nil, err
			}
		}
		found = append(found, g)
	}
	return found, nil
}

// pointed is the generation that the readers' pointer names, where it has a checkpoint but
// is none of those found: the set of generations was lost. Else 0.
func (s *Sink) pointed(ctx context.Context, projection string, found []generation) (int64, error) {
	place, err := s.client.Get(ctx, liveKey(projection)).Result()
	if errors.Is(err, goredis.Nil) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	n := generationOf(projection, place)
	if n == 0 || slices.ContainsFunc(found, func(g generation) bool { return g.number == n }) {
		return 0, nil
	}
	exists, err := s.client.Exists(ctx, checkpointKey(projection, n)).Result()
	return n * exists, err
}

// loadScript reads a checkpoint and touches it, so that the EXEC of every commit fails that
// watches it by now.
var loadScript = goredis.NewScript(`
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
redis.call('HINCRBY', KEYS[1], 'loads', 1)
return redis.call('HGETALL', KEYS[1])
`)

// peekScript is loadScript without its guard.
var peekScript = goredis.NewScript(`return redis.call('HGETALL', KEYS[1])`)

func (s *Sink) load(ctx context.Context, projection string, generation int64) (stored, error) {
	script := loadScript
	if fault.Global.Off(fault.LoadTouches) {
		script = peekScript
	}
	if generation == 0 {
		place, err := s.client.Get(ctx, liveKey(projection)).Result()
		if err != nil && !errors.Is(err, goredis.Nil) {
			return stored{}, err
		}
		generation = max(1, generationOf(projection, place))
	}
	list, err := s.run(ctx, script, []string{checkpointKey(projection, generation)})
	if err != nil {
		return stored{}, err
	}
	if len(list) == 0 {
		return stored{checkpoint: fresh(projection, generation, projector.Live)}, nil
	}
	return decode(projection, flat(list))
}

// damageScript notes what is gone of a generation, for its owner only. To anybody else it
// returns who that is.
var damageScript = goredis.NewScript(`
local c = redis.call('HMGET', KEYS[1], 'term', 'owner', 'sequence')
if c[1] ~= ARGV[1] or c[2] ~= ARGV[2] or c[3] ~= ARGV[3] then return {c[1] or '', c[2] or ''} end
redis.call('HSETNX', KEYS[1], 'damaged', ARGV[4])
return {}
`)

// note marks a generation as damaged, or tells that it is another owner's by now.
func (s *Sink) note(ctx context.Context, c projector.Checkpoint, what string) error {
	answer, err := s.run(ctx, damageScript, []string{checkpointKey(c.Projection, c.Generation)}, c.Term, c.Owner, c.Sequence, what)
	if err == nil && len(answer) > 0 && !fault.Global.Off(fault.FenceRaises) {
		err = fencedBy(c, answer[0], answer[1])
	}
	return err
}

// damageLimit is how long damage waits for an answer when nobody else does any more.
var damageLimit = 5 * time.Second

// damage notes and returns what is gone; or that the model is another owner's by now, whose
// writing was read. Where the connection is broken it says that: what is gone will be missed
// again.
func (s *Sink) damage(ctx context.Context, c projector.Checkpoint, what string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), damageLimit)
	defer cancel()
	if err := s.note(ctx, c, what); err != nil && !serverError(err) {
		return failed("note the damage of projection "+strconv.Quote(c.Projection), err)
	}
	return damaged(c, what)
}

func damaged(c projector.Checkpoint, what string) error {
	return &DamagedError{Projection: c.Projection, Generation: c.Generation, What: what}
}

// samples is how many rows of each target Acquire looks for.
const samples = 200

// sample looks whether the index of each target has as many rows as it should, and whether
// some rows taken at random are there, and tells what is gone, "" for nothing. Nobody writes
// meanwhile: every earlier owner's commit fails, and this one's has ended.
func (s *Sink) sample(ctx context.Context, d stored) (gone string, err error) {
	cp := d.checkpoint
	if cp.Sequence == 0 || d.damaged != "" || fault.Global.Off(fault.CountRows) {
		return d.damaged, nil
	}
	for target, want := range d.rows {
		index := indexKey(cp.Place, target)
		have, err := s.indexed(ctx, index)
		if err != nil {
			return "", err
		}
		if have != want {
			return countText(target, have, want), nil
		}
		if have == 0 {
			continue
		}
		picked, err := s.client.HRandFieldWithValues(ctx, index, samples).Result()
		if err != nil {
			return "", err
		}
		keys := make([]string, 0, len(picked))
		for _, p := range picked {
			if target != onTarget || stays(p.Value) {
				keys = append(keys, rowPrefix(cp.Place, target)+p.Key)
			}
		}
		if len(keys) == 0 {
			continue
		}
		there, err := s.client.Exists(ctx, keys...).Result()
		if err != nil {
			return "", err
		}
		if n := int64(len(keys)); there < n {
			return fmt.Sprintf("of %d rows of %q looked for, %d are gone", n, target, n-there), nil
		}
	}
	return "", nil
}

// indexed is how many rows an index has.
func (s *Sink) indexed(ctx context.Context, index string) (int64, error) {
	n, err := s.client.HLen(ctx, index).Result()
	if err != nil {
		err = notHash(ctx, s.client, index, err)
	}
	return n, err
}

func countText(target string, have, want int64) string {
	return fmt.Sprintf("the index of %q has %d rows, and should have %d", target, have, want)
}
