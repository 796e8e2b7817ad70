package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// queue is the commands that handlers write by, on keys that begin with prefix.
type queue struct {
	tx       *Tx
	prefix   string
	cleared  bool
	commands []command
}

// command is one of a queue's, with what has to be known to be sure that it can't fail.
type command struct {
	name  string // of the key, without the prefix
	typ   string // that the key must have
	drops bool   // the key goes, whatever it is
	args  []any

	field    string // of a hash
	hasField bool
	set      *string // the value that it or the string gets
	unset    bool
	isAdd    bool
	adds     int64
}

// txKey is a key of a queue.
type txKey struct {
	queue *queue
	name  string
	typ   string
}

func (q *queue) key(name, typ string) txKey { return txKey{q, name, typ} }

func (q *queue) add(c command, do string, args ...any) {
	switch {
	case q.tx.closed:
		_ = q.tx.fail(errOver)
	case c.name == "":
		_ = q.tx.fail(fmt.Errorf("tidemark/redis: a key to %s has no name", do))
	default:
		c.args = append([]any{do, q.prefix + c.name}, args...)
		q.commands = append(q.commands, c)
	}
}

func (k txKey) add(c command, do string, args ...any) {
	c.name, c.typ = k.name, k.typ
	k.queue.add(c, do, args...)
}

// argument is a value's text; false: it is refused.
func (k txKey) argument(v any) (string, bool) {
	text, err := argument(v)
	if err != nil {
		_ = k.queue.tx.fail(fmt.Errorf("tidemark/redis: %s %q: %w", k.typ, k.name, err))
	}
	return text, err == nil
}

// many queues a command of several members.
func (k txKey) many(do string, members []any) {
	args := make([]any, 0, len(members))
	for _, m := range members {
		text, ok := k.argument(m)
		if !ok {
			return
		}
		args = append(args, text)
	}
	if len(args) > 0 {
		k.add(command{}, do, args...)
	}
}

// clear drops what is queued, and removes what is stored.
func (q *queue) clear() { q.cleared, q.commands = true, nil }

func (q *queue) used() bool { return q.cleared || len(q.commands) > 0 }

// state is what is known of a key while its commands are gone through.
type state struct {
	typ     string             // "none" where there is none
	numbers map[string]*string // by field, or "" for a string; nil: there is none
}

// plan is the commands, and the number of keys in the index after them.
func (q *queue) plan(ctx context.Context) (commands [][]any, keys int64, err error) {
	names, states, err := q.types(ctx)
	if err != nil {
		return nil, 0, err
	}
	indexed := q.prefix != outsidePrefix(q.tx.checkpoint.Projection)
	entries := make([]any, len(names))
	if indexed {
		if keys, entries, err = q.tx.entries(ctx, onTarget, names, q.cleared); err != nil {
			return nil, 0, err
		}
		for i, name := range names {
			switch st := states[name]; {
			case st.typ == "none" && stays(entries[i]) && !q.cleared && !q.tx.begins && !fault.Global.Off(fault.CountRows):
				return nil, 0, damaged(q.tx.checkpoint, fmt.Sprintf("the %s %q of a handler is gone", entries[i], name))
			case entries[i] != nil || st.typ == "none":
			case q.cleared: // the index was lost
				commands = append(commands, []any{"unlink", q.prefix + name})
			default:
				return nil, 0, foreign(q.prefix+name, st.typ+" of somebody else's", "key of its own")
			}
		}
	}
	if q.cleared {
		commands = append(commands, q.tx.clearing(onTarget))
		keys, entries = 0, make([]any, len(names))
		for _, s := range states {
			s.typ = "none"
		}
	}
	if err := q.numbers(ctx, states); err != nil {
		return nil, 0, err
	}
	for i := range q.commands {
		c := &q.commands[i]
		if err := c.check(states[c.name], q.prefix); err != nil {
			return nil, 0, err
		}
		commands = append(commands, c.args)
	}
	if !indexed {
		return commands, 0, nil
	}
	var set, gone []any
	for i, name := range names {
		s := states[name]
		switch {
		case s.typ == "none" && entries[i] != nil:
			gone = append(gone, name)
			keys--
		case s.typ != "none" && entries[i] == nil:
			keys++
			fallthrough
		case s.typ != "none" && entries[i] != s.typ:
			set = append(set, name, s.typ)
		}
	}
	index := indexKey(q.tx.place, onTarget)
	commands = append(commands, wide(set, "hset", index)...)
	return append(commands, wide(gone, "hdel", index)...), keys, nil
}

// stays reports whether a key of this type goes only when it is deleted. The others go with
// their last member, by a handler's Remove, so that one which is not there tells nothing.
func stays(typ any) bool { return typ == "string" || typ == "stream" }

// types asks what each key holds.
func (q *queue) types(ctx context.Context) (names []string, states map[string]*state, err error) {
	states = map[string]*state{}
	for i := range q.commands {
		if name := q.commands[i].name; states[name] == nil {
			states[name] = &state{numbers: map[string]*string{}}
			names = append(names, name)
		}
	}
	err = each(ctx, q.tx.conn, len(names),
		func(pipe goredis.Pipeliner, i int) *goredis.StatusCmd { return pipe.Type(ctx, q.prefix+names[i]) },
		func(i int, c *goredis.StatusCmd) error {
			states[names[i]].typ = c.Val()
			return c.Err()
		})
	return names, states, err
}

// numbers asks for the values that are to be added to.
func (q *queue) numbers(ctx context.Context, states map[string]*state) error {
	var asked []*command
	for i := range q.commands {
		c := &q.commands[i]
		if _, known := states[c.name].numbers[c.field]; c.isAdd && !known && states[c.name].typ == c.typ {
			states[c.name].numbers[c.field] = nil
			asked = append(asked, c)
		}
	}
	return each(ctx, q.tx.conn, len(asked),
		func(pipe goredis.Pipeliner, i int) *goredis.StringCmd {
			c := asked[i]
			cmd := goredis.NewStringCmd(ctx, "get", q.prefix+c.name)
			if c.hasField {
				cmd = goredis.NewStringCmd(ctx, "hget", q.prefix+c.name, c.field)
			}
			_ = pipe.Process(ctx, cmd)
			return cmd
		},
		func(i int, c *goredis.StringCmd) error {
			text, err := c.Result()
			if err == nil {
				states[asked[i].name].numbers[asked[i].field] = &text
			}
			if errors.Is(err, goredis.Nil) {
				return nil
			}
			return err
		})
}

// check says why the command would fail, and what its key holds after it.
func (c *command) check(s *state, prefix string) error {
	if c.drops {
		*s = state{typ: "none", numbers: map[string]*string{}}
		return nil
	}
	if s.typ != "none" && s.typ != c.typ {
		return foreign(prefix+c.name, s.typ, c.typ)
	}
	s.typ = c.typ
	switch {
	case c.set != nil:
		s.numbers[c.field] = c.set
	case c.unset:
		delete(s.numbers, c.field)
	case c.isAdd:
		was := int64(0)
		if text := s.numbers[c.field]; text != nil {
			n, err := strconv.ParseInt(*text, 10, 64)
			if err != nil || strconv.FormatInt(n, 10) != *text { // the server is stricter than ParseInt
				return fmt.Errorf("tidemark/redis: %s %q %s: it holds %q, which is no int64, and %d can't be added", c.typ, c.name, c.field, *text, c.adds)
			}
			was = n
		}
		sum, ok := plus(was, c.adds)
		if !ok {
			return fmt.Errorf("tidemark/redis: %s %q %s: %d and %d exceed an int64", c.typ, c.name, c.field, was, c.adds)
		}
		text := strconv.FormatInt(sum, 10)
		s.numbers[c.field] = &text
	}
	return nil
}
