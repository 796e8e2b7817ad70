package sinktest

import (
	"bytes"
	"errors"
	"reflect"

	"github.com/tidemark-go/tidemark/projector"
)

func checkpointChecks[Tx any]() []definition[Tx] {
	return []definition[Tx]{
		{"checkpoint/byte-for-byte", nil, checkpointBytes[Tx]},
		{"checkpoint/malformed", nil, checkpointMalformed[Tx]},
		{"checkpoint/newer-format", nil, checkpointNewer[Tx]},
	}
}

func checkpointBytes[Tx any](e *env[Tx]) {
	o := e.begin()
	for range 2 {
		next := full(o.stored)
		e.must("Commit", o.sink.Commit(e.ctx, o.stored, next, all[Tx]()))
		o.stored = next
		want, err := next.Encode()
		e.must("encode", err)
		got, err := e.Checkpoint(e.ctx, projection, 1)
		e.must("read the stored bytes", err)
		if !bytes.Equal(got, want) {
			e.Errorf("stored are\n  %s\nwant the bytes of Encode\n  %s", got, want)
		}
		decoded, err := projector.DecodeCheckpoint(projection, want)
		e.must("decode", err)
		decoded.Term, decoded.Sequence, decoded.Owner = next.Term, next.Sequence, next.Owner
		if loaded := e.load(projection); !reflect.DeepEqual(loaded, decoded) {
			e.Errorf("Load gives\n  %+v\nwant\n  %+v", loaded, decoded)
		}
		// The term is raised beside the bytes.
		acquired := e.begin()
		after, err := e.Checkpoint(e.ctx, projection, 1)
		e.must("read the stored bytes", err)
		if !bytes.Equal(after, want) {
			e.Errorf("Acquire has changed the stored bytes to\n  %s\nfrom\n  %s", after, want)
		}
		o = acquired
	}
}

func checkpointMalformed[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	good, err := e.Checkpoint(e.ctx, projection, 1)
	e.must("read the stored bytes", err)
	other := following(o.stored)
	other.Projection = "another"
	foreign, err := other.Encode()
	e.must("encode", err)
	nowhere := following(o.stored)
	nowhere.Place = ""
	placeless, err := nowhere.Encode()
	e.must("encode", err)
	for name, body := range map[string][]byte{
		"nothing":                    {},
		"no JSON":                    []byte("position 17"),
		"an empty document":          []byte("{}"),
		"cut short":                  good[:len(good)/2],
		"another projection's":       foreign,
		"one without a place":        placeless,
		"one with a word for number": bytes.Replace(good, []byte(`"generation":{"$numberLong":"1"}`), []byte(`"generation":"one"`), 1),
	} {
		o.refusesStored(name, body, good, func(err error) bool {
			var malformed *projector.CheckpointError
			return errors.As(err, &malformed) && malformed.Projection == projection
		}, "a CheckpointError")
	}
	o.mustCommit(e.effect("after"))
	o.leftNothing("after the checkpoint was restored", "before", "after")
}

func checkpointNewer[Tx any](e *env[Tx]) {
	o := e.begin()
	o.mustCommit(e.effect("before"))
	good, err := e.Checkpoint(e.ctx, projection, 1)
	e.must("read the stored bytes", err)
	for _, body := range []string{
		`{"format":{"$numberInt":"2"},"projection":"sinktest"}`,
		`{"format": 99, "what this release": ["can't", "know"]}`,
	} {
		o.refusesStored("one of a newer format", []byte(body), good, func(err error) bool {
			var format *projector.FormatError
			return errors.As(err, &format) && format.Projection == projection && format.Known == projector.CheckpointFormat
		}, "a FormatError")
	}
}

// refusesStored puts body in the place of good, and wants Acquire and Load to refuse
// it and to leave it and the term alone.
func (o *owner[Tx]) refusesStored(name string, body, good []byte, want func(error) bool, what string) {
	o.Helper()
	o.must("write the stored bytes", o.SetCheckpoint(o.ctx, projection, 1, body))
	for _, sink := range []projector.Sink[Tx]{o.sink, o.Sink(o.T)} {
		_, err := acquireLive(o.ctx, sink, projection, "refused")
		if !want(err) {
			o.Errorf("Acquire with a stored checkpoint that is %s: want %s, got: %v", name, what, err)
		}
		if _, err = sink.Load(o.ctx, projection, 1); !want(err) {
			o.Errorf("Load with a stored checkpoint that is %s: want %s, got: %v", name, what, err)
		}
		if err != nil && sink.Classify(err) == projector.Transient {
			o.Errorf("the class of %v is Transient, but it does not pass", err)
		}
	}
	stored, err := o.Checkpoint(o.ctx, projection, 1)
	o.must("read the stored bytes", err)
	if !bytes.Equal(stored, body) {
		o.Errorf("a stored checkpoint that is %s has become\n  %s\nfrom\n  %s", name, stored, body)
	}
	o.must("write the stored bytes", o.SetCheckpoint(o.ctx, projection, 1, good))
	if cp := o.load(projection); cp.Term != o.stored.Term || cp.Owner != o.stored.Owner {
		o.Errorf("a stored checkpoint that is %s: the term has become %d of %q, it was %d of %q", name, cp.Term, cp.Owner, o.stored.Term, o.stored.Owner)
	}
}
