package redis

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strconv"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/row"
)

// Live finds the place of the generation that readers of a model should read: what the keys
// of its rows begin with, before a colon, the target's name, a colon and the row's key. A
// reader that asks for the place and then for rows may find that the place was discarded in
// between, a grace period after a switch; [Read] and [Hash.Get] ask for both at once.
func Live(ctx context.Context, client goredis.Cmdable, projection string) (string, error) {
	place, err := client.Get(ctx, liveKey(projection)).Result()
	if errors.Is(err, goredis.Nil) {
		return "", noModel(projection)
	}
	if err != nil {
		return "", failed("find the live model of projection "+strconv.Quote(projection), err)
	}
	return place, nil
}

func noModel(projection string) error {
	return fmt.Errorf("tidemark/redis: there is no model of projection %q; check the name, and that the projection has been started", projection)
}

// readScript reads rows of the generation that is live: all of the same one.
var readScript = goredis.NewScript(`
local place = redis.call('GET', KEYS[1])
if not place then return false end
local index = place .. ':' .. ARGV[1]
local out = {}
for i = 2, #ARGV do
	out[i - 1] = false
	if redis.call('HEXISTS', index, ARGV[i]) == 1 then out[i - 1] = redis.call('HGETALL', index .. ':' .. ARGV[i]) end
end
return out
`)

// Read reads rows of a target by the texts of their keys ([Hash.Key], or
// [projector.KeyText] of the _id for a Mirror), as they are stored; nil for one that is not
// there. It asks for the pointer and the rows at once, by one script, so all rows are of one
// generation and of one moment. Rows of two targets, or what handlers of On have written,
// want a script of the reader's own: GET {projection}:live is the beginning of the keys.
func Read(ctx context.Context, client goredis.Scripter, projection, target string, keys ...string) ([]map[string]string, error) {
	args := make([]any, 0, len(keys)+1)
	args = append(args, target)
	for _, k := range keys {
		args = append(args, k)
	}
	found, err := readScript.Run(ctx, client, []string{liveKey(projection)}, args...).Slice()
	if errors.Is(err, goredis.Nil) {
		return nil, noModel(projection)
	}
	if err != nil {
		return nil, failed("read "+strconv.Quote(target), err)
	}
	rows := make([]map[string]string, len(found))
	for i, f := range found {
		if list, ok := f.([]any); ok {
			rows[i] = flat(list)
		}
	}
	return rows, nil
}

// Key is the text of a row's key, of which only the key's columns have to be set. Rows of a
// Mirror have none of their own: theirs is [projector.KeyText] of the document's _id.
func (h Hash[R]) Key(r R) (string, error) {
	p, err := h.plan()
	if err != nil {
		return "", fmt.Errorf("tidemark/redis: %w", err)
	}
	if p.kind == mirrored {
		return "", fmt.Errorf("tidemark/redis: rows of hash %q are keyed by their document's _id: use projector.KeyText", h.Name)
	}
	return keyText(p.schema, reflect.ValueOf(&r).Elem())
}

// Get reads rows by the texts of their keys, as [Read] does; nil for one that is not there.
func (h Hash[R]) Get(ctx context.Context, client goredis.Scripter, projection string, keys ...string) ([]*R, error) {
	p, err := h.plan()
	if err != nil {
		return nil, fmt.Errorf("tidemark/redis: %w", err)
	}
	found, err := Read(ctx, client, projection, h.Name, keys...)
	if err != nil {
		return nil, err
	}
	rows := make([]*R, len(found))
	for i, f := range found {
		if f == nil {
			continue
		}
		if rows[i], err = decodeAs[R](p.schema, f); err != nil {
			return nil, fmt.Errorf("tidemark/redis: row %q of hash %q does not fit %s: %w", keys[i], h.Name, p.schema.Type, err)
		}
	}
	return rows, nil
}

func decodeAs[R any](s *row.Schema, stored map[string]string) (*R, error) {
	r := new(R)
	return r, decodeRow(s, stored, reflect.ValueOf(r).Elem())
}

// pageScript reads some rows of a place, from a cursor on, while the generation is there.
// Its checkpoint goes last: one that readers are not led to any more and that has fewer rows
// than it should have is being discarded.
var pageScript = goredis.NewScript(`
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local all = tonumber(redis.call('HGET', KEYS[1], ARGV[3]) or 0)
if redis.call('HLEN', KEYS[2]) ~= all and redis.call('GET', KEYS[3]) ~= ARGV[4] then return false end
local r = redis.call('HSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
local rows = {}
for i = 1, #r[2], 2 do rows[#rows + 1] = {r[2][i], redis.call('HGETALL', KEYS[2] .. ':' .. r[2][i])} end
return {r[1], rows}
`)

// All hands every row of the generation that is live to f, with the text of its key, in no
// order, until f returns an error. It reads some hundred rows at a time, so the rows are not
// of one moment: one that is written meanwhile comes as it was or as it is, and one may come
// twice. They are of one generation: where that is discarded before the end, All fails.
func (h Hash[R]) All(ctx context.Context, client goredis.Cmdable, projection string, f func(key string, row R) error) error {
	p, err := h.plan()
	if err != nil {
		return fmt.Errorf("tidemark/redis: %w", err)
	}
	place, err := Live(ctx, client, projection)
	if err != nil {
		return err
	}
	keys := []string{checkpointKey(projection, generationOf(projection, place)), indexKey(place, h.Name), liveKey(projection)}
	for cursor := any("0"); ; {
		page, err := pageScript.Run(ctx, client, keys, cursor, 200, rowsPrefix+h.Name, place).Slice()
		if errors.Is(err, goredis.Nil) {
			return fmt.Errorf("tidemark/redis: the generation of projection %q at %q was discarded while it was read; begin again", projection, place)
		}
		if err != nil {
			return failed("read hash "+strconv.Quote(h.Name), err)
		}
		rows, _ := page[1].([]any)
		for _, r := range rows {
			pair, _ := r.([]any)
			stored, _ := pair[1].([]any)
			if len(stored) == 0 {
				continue
			}
			key, _ := pair[0].(string)
			row, err := decodeAs[R](p.schema, flat(stored))
			if err != nil {
				return fmt.Errorf("tidemark/redis: row %q of hash %q does not fit %s: %w", key, h.Name, p.schema.Type, err)
			}
			if err := f(key, *row); err != nil {
				return err
			}
		}
		if cursor = page[0]; cursor == "0" {
			return nil
		}
	}
}
