package integration_test

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/projector"
)

// Whatever stands where the checkpoint should be, the runner ends with an error of the
// fitting type, and the stored bytes are as they were: to start from now, or to
// overwrite them, would lose what they say. (CASES B04.)
func TestGarbageInTheCheckpointIsLeftAlone(t *testing.T) {
	f := newThings(t)
	g := f.run(mirror("garbage"))
	f.add(5)
	g.level(f.db)
	g.stop()
	f.add(5)
	good := f.stored("garbage")

	store := func(s storedCheckpoint) error {
		_, err := f.pool.Exec(t.Context(), "update tidemark.checkpoints set body = $2, sequence = $3 where projection = $1", "garbage", s.Body, s.Sequence)
		return err
	}
	altered := func(change func(*projector.Checkpoint)) string {
		c, err := projector.DecodeCheckpoint("garbage", []byte(good.Body))
		must(t, err)
		change(&c)
		b, err := c.Encode()
		must(t, err)
		return string(b)
	}
	token := func(change func(string) string) string {
		return altered(func(c *projector.Checkpoint) {
			b, err := bson.Marshal(bson.D{{Key: "_data", Value: change(c.Position.Token.Lookup("_data").StringValue())}})
			must(t, err)
			c.Position.Token = b
		})
	}
	newer := strings.Replace(good.Body, `"format":{"$numberInt":"1"}`, `"format":{"$numberInt":"2"}`, 1)
	if newer == good.Body {
		t.Fatalf("there is no format number in %s", good.Body)
	}
	malformed, position := is[*projector.CheckpointError], func(code int) func(error) bool {
		return func(err error) bool {
			var p *projector.PositionError
			return errors.As(err, &p) && p.Code == code
		}
	}
	var noise [300]byte
	_, _ = rand.Read(noise[:])
	for i := range noise {
		noise[i] = max(1, noise[i]&0x7f) // what a text column takes
	}
	for _, c := range []struct {
		name  string
		body  string
		right func(error) bool
	}{
		{"random bytes", string(noise[:]), malformed},
		{"empty", "", malformed},
		{"a third of it", good.Body[:len(good.Body)/3], malformed},
		{"all but the last byte", good.Body[:len(good.Body)-1], malformed},
		{"other JSON", `{"a": 1}`, malformed},
		{"another projection's", altered(func(c *projector.Checkpoint) { c.Projection = "other" }), malformed},
		{"no position", altered(func(c *projector.Checkpoint) { c.Position = projector.Position{} }), malformed},
		{"no generation", altered(func(c *projector.Checkpoint) { c.Generation = 0 }), malformed},
		{"newer format", newer, is[*projector.FormatError]},
		{"token no hex", token(func(string) string { return "not hex" }), position(9)},
		{"token cut off early", token(func(s string) string { return s[:20] }), position(15)},
		{"token cut off late", token(func(s string) string { return s[:len(s)/4*2] }), is[*projector.PositionError]},
		{"token altered", token(func(s string) string { return s[:18] + "FFFF" + s[22:] }), is[*projector.PositionError]},
		{"token empty", token(func(string) string { return "" }), is[*projector.PositionError]},
		{"other version", altered(func(c *projector.Checkpoint) { c.Version = 7 }), is[*projector.MismatchError]},
		{"other replica set", altered(func(c *projector.Checkpoint) { c.Watch.ReplicaSet = bson.NewObjectID() }), is[*projector.MismatchError]},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := storedCheckpoint{good.Sequence, c.body}
			if err := store(want); err != nil {
				if !json.Valid([]byte(c.body)) {
					t.Skipf("the column does not even take it: %v", err)
				}
				t.Fatal(err)
			}
			want = f.stored("garbage") // a jsonb column would have its own spelling
			for range 2 {
				opened := opens(t)
				err := run(t, f.runner(mirror("garbage"), projector.Options{})).wait(30 * time.Second)
				if !c.right(err) {
					t.Errorf("the runner ended with %T: %v", err, err)
				} else {
					t.Logf("%.300v", err)
				}
				if n := opened(); n > 5 {
					t.Errorf("the stream was opened %d times", n)
				}
			}
			if now := f.stored("garbage"); now != want {
				t.Errorf("the stored bytes have changed from\n%v to\n%v", want, now)
			}
			if n := len(f.rows("garbage")); n != 5 {
				t.Errorf("there are %d rows, not the 5 from before", n)
			}
		})
	}
	t.Run("negative sequence", func(t *testing.T) {
		if err := store(storedCheckpoint{-1, good.Body}); err != nil {
			t.Skipf("the column does not even take it: %v", err)
		}
		err := run(t, f.runner(mirror("garbage"), projector.Options{})).wait(30 * time.Second)
		if !malformed(err) {
			t.Errorf("the runner ended with %T: %v", err, err)
		}
		if now := f.stored("garbage"); now != (storedCheckpoint{-1, good.Body}) {
			t.Errorf("the stored bytes have changed to %v", now)
		}
	})
	// Control: nothing but its checks stands between the bytes and the runner: those of
	// the newer format are accepted, and overwritten, once they claim to be this one's.
	t.Run("control", func(t *testing.T) {
		must(t, store(storedCheckpoint{good.Sequence, strings.Replace(newer, `"format":{"$numberInt":"2"}`, `"format":{"$numberInt":"1"}`, 1)}))
		g := f.run(mirror("garbage"))
		g.level(f.db)
		f.same("garbage")
		g.stop()
		if f.stored("garbage") == good {
			t.Error("it was not overwritten")
		}
	})
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
