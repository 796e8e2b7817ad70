package projector

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// CheckpointFormat is the number of the checkpoint's layout that this version of
// the library writes. A stored checkpoint with a higher one is refused with a
// FormatError: an older release must not guess at what a newer one has written.
const CheckpointFormat = 1

// Checkpoint is where a model stands: the position in the source that its rows
// correspond to, and everything needed to go on from there. It is committed
// together with the rows. Term, Sequence and Owner are for the fence; sinks keep
// them beside the encoded rest, where they can be compared and updated alone.
type Checkpoint struct {
	Term     int64  `bson:"-"` // number of the ownership; grows with each Acquire
	Sequence int64  `bson:"-"` // number of commits; 0: nothing committed yet
	Owner    string `bson:"-"` // who took the term, for people to read

	Format      int            `bson:"format"`
	Projection  string         `bson:"projection"`
	Version     int            `bson:"version"`    // of the projection that wrote it
	Generation  int64          `bson:"generation"` // number of the build of this model
	Place       string         `bson:"place"`      // where the sink keeps this generation; the sink's own words
	Phase       Phase          `bson:"phase"`
	Position    Position       `bson:"position"`
	Settled     bool           `bson:"settled"`        // the rows are the source at Position.Time: no group is Open, no key Pending, and nothing Ahead
	Open        bool           `bson:"open,omitempty"` // the position is, or may be, within a group
	Watch       Watch          `bson:"watch"`
	Samples     []Sample       `bson:"samples,omitempty"` // hashes that betray a changed handler
	Rebuild     *Rebuild       `bson:"rebuild,omitempty"` // how far a rebuild has come that fills this generation; nil: none does
	Pending     []Pending      `bson:"pending,omitempty"` // keys touched and not recomputed yet
	Ahead       bson.Timestamp `bson:"ahead,omitempty"`   // a Refresh has read the source as of this time, which is later than Position.Time; zero: no
	Since       time.Time      `bson:"since,omitempty"`   // when a switch made this generation the live one; zero: none did
	CommittedAt time.Time      `bson:"committedAt"`       // the committing process's clock
}

// Phase says where a generation of a model is in its life.
type Phase string

// The phases of a generation. At most one of a projection's is Live.
const (
	Live     Phase = "live"     // readers see it
	Building Phase = "building" // a rebuild fills it, beside the live one
	Retired  Phase = "retired"  // readers saw it before the last switch
)

// Position is a place in the source's change stream.
type Position struct {
	// Token is the resume token of the last change applied, or of an empty reply
	// after it. Nil: nothing was read yet, the stream starts at Time, inclusive.
	Token bson.Raw `bson:"token,omitempty"`
	// Time is the cluster time of the last change applied, or the time to start at.
	Time bson.Timestamp `bson:"time"`
}

// String gives the time, and the token's beginning, for logs and errors.
func (p Position) String() string {
	if p.Token == nil {
		return fmt.Sprintf("start of %s", timeText(p.Time))
	}
	token, _ := p.Token.Lookup("_data").StringValueOK()
	return fmt.Sprintf("%s, token %.24s…", timeText(p.Time), token)
}

func timeText(t bson.Timestamp) string {
	return fmt.Sprintf("(%d,%d) %s", t.T, t.I, time.Unix(int64(t.T), 0).UTC().Format(time.RFC3339))
}

// Watch is what the stream was asked for. Resuming with another filter or on
// another cluster is accepted by the server in silence, so it is compared at start.
type Watch struct {
	ReplicaSet  bson.ObjectID `bson:"replicaSet"` // zero where the right to read it is missing
	Database    string        `bson:"database"`
	Collections []Watched     `bson:"collections"`
}

// Watched is one collection of a Watch, with the bindings that follow it.
type Watched struct {
	Name     string      `bson:"name"`
	UUID     bson.Binary `bson:"uuid"` // zero where the collection does not exist yet
	Before   bool        `bson:"before"`
	After    bool        `bson:"after"`
	Bindings []string    `bson:"bindings"` // "rollup into counts (status text key, n int sum)"
}

// Sample is a document that the handlers have been seen to turn into something.
type Sample struct {
	Collection string    `bson:"collection"`
	Key        StoredKey `bson:"key"`
	Document   int64     `bson:"document"` // hash of the document
	Result     int64     `bson:"result"`   // hash of what the handlers make of it
}

// Mode is how a rebuild treats the model that readers see.
type Mode string

// The modes of a rebuild.
const (
	// Shadow fills a new generation beside the live one and then switches: readers see
	// the old model until one moment, and the new one from then on.
	Shadow Mode = "shadow"
	// Reset clears the live model and fills it again, for a sink without the right to
	// make a place beside it. Readers see what has been filled so far; where the sink can't
	// clear any number of rows in one commit (MongoDB), they see some of the old ones first.
	Reset Mode = "reset"
	// InPlace writes over the live rows and removes those that are left over, for Mirror
	// and Upsert. Readers see old and new rows beside each other meanwhile.
	InPlace Mode = "in place"
)

// Rebuild is how far a rebuild has come. The model is then, at each commit, exactly what
// the projection makes of those documents of the source, as of the position, whose keys
// are at or below the frontier; before the first is copied in a Reset, there may be old rows.
type Rebuild struct {
	Mode  Mode      `bson:"mode"`
	Mark  int64     `bson:"mark,omitempty"` // above all earlier marks; what the rows are marked with that are written meanwhile, InPlace; 0 in a Shadow
	Began time.Time `bson:"began"`
	Cause string    `bson:"cause"`  // for people to read
	Read  []Copied  `bson:"copied"` // per collection begun, in the order of Watch.Collections
}

// Copied is the frontier in one collection: the documents up to Last have been copied,
// all of them if Done.
type Copied struct {
	Collection string    `bson:"collection"`
	Last       StoredKey `bson:"last,omitempty"` // zero: none yet
	Rows       int64     `bson:"rows"`           // documents copied
	Done       bool      `bson:"done"`           // also what comes after Last: its upper bound is open
}

// Pending is a key of a Refresh that was touched and waits for its recomputation.
type Pending struct {
	Binding int       `bson:"binding"`
	Key     StoredKey `bson:"key"`
}

// StoredKey is a document's _id in a checkpoint. Extended JSON does not bring back every
// value as it was (a document {"$oid": …}, invalid UTF-8, a NaN's bits), so all but the
// simplest are stored as binary.
type StoredKey bson.RawValue

// storedAs is the subtype of a binary that holds a type and a value.
const storedAs = 0x80

// IsZero reports whether there is no key.
func (k StoredKey) IsZero() bool { return bson.RawValue(k).IsZero() }

// Equal reports whether two keys are the same, type included.
func (k StoredKey) Equal(o StoredKey) bool { return bson.RawValue(k).Equal(bson.RawValue(o)) }

// MarshalBSONValue implements bson.ValueMarshaler.
func (k StoredKey) MarshalBSONValue() (byte, []byte, error) {
	switch k.Type {
	case bson.TypeObjectID, bson.TypeInt32, bson.TypeInt64:
		return byte(k.Type), k.Value, nil
	case bson.TypeString:
		if s, ok := bson.RawValue(k).StringValueOK(); ok && utf8.ValidString(s) {
			return byte(k.Type), k.Value, nil
		}
	}
	t, b, err := bson.MarshalValue(bson.Binary{Subtype: storedAs, Data: append([]byte{byte(k.Type)}, k.Value...)})
	return byte(t), b, err
}

// UnmarshalBSONValue implements bson.ValueUnmarshaler.
func (k *StoredKey) UnmarshalBSONValue(t byte, b []byte) error {
	*k = StoredKey{Type: bson.Type(t), Value: bytes.Clone(b)}
	if k.Type != bson.TypeBinary {
		return nil
	}
	subtype, data, ok := bson.RawValue(*k).BinaryOK()
	if !ok || subtype != storedAs || len(data) == 0 {
		return errors.New("a key is malformed")
	}
	*k = StoredKey{Type: bson.Type(data[0]), Value: data[1:]}
	return nil
}

// Encode is the checkpoint as canonical extended JSON, without Term, Sequence and
// Owner. Sinks store these bytes as they are.
func (c Checkpoint) Encode() ([]byte, error) {
	c.Format = CheckpointFormat
	b, err := bson.MarshalExtJSON(c, true, false)
	if err != nil {
		return nil, fmt.Errorf("tidemark: encode the checkpoint of %q: %w", c.Projection, err)
	}
	return b, nil
}

// DecodeCheckpoint reads what Encode wrote. Anything else is a CheckpointError, and
// a newer format a FormatError; a sink that gets one must leave the stored bytes alone.
func DecodeCheckpoint(projection string, b []byte) (Checkpoint, error) {
	malformed := func(err error) (Checkpoint, error) {
		return Checkpoint{}, &CheckpointError{Projection: projection, Err: err}
	}
	// The driver's reader loops for ever over a text that is cut off inside a value
	// that it skips (seen with 2.10).
	if !json.Valid(b) {
		return malformed(errors.New("it is no JSON"))
	}
	var f struct {
		Format int `bson:"format"`
	}
	if err := bson.UnmarshalExtJSON(b, true, &f); err != nil {
		return malformed(err)
	}
	if f.Format > CheckpointFormat {
		return Checkpoint{}, &FormatError{Projection: projection, Stored: f.Format, Known: CheckpointFormat}
	}
	var c Checkpoint
	if err := bson.UnmarshalExtJSON(b, true, &c); err != nil {
		return malformed(err)
	}
	switch {
	case c.Format < 1:
		return malformed(errors.New("it has no format number"))
	case c.Projection != projection:
		return malformed(fmt.Errorf("it belongs to projection %q", c.Projection))
	case c.Generation < 1:
		return malformed(errors.New("it has no generation"))
	case c.Place == "":
		return malformed(errors.New("it does not say where the model is"))
	case c.Phase != Live && c.Phase != Building && c.Phase != Retired:
		return malformed(fmt.Errorf("unknown phase %q", c.Phase))
	}
	return c, nil
}

// settle derives Settled.
func (c *Checkpoint) settle() {
	at, closed := c.exactAt()
	if !c.Ahead.After(at) {
		c.Ahead = bson.Timestamp{}
	}
	c.Settled = closed && len(c.Pending) == 0 && c.Ahead.IsZero()
}

// same reports whether two checkpoints are the same commit.
func (c Checkpoint) same(o Checkpoint) bool {
	return c.Term == o.Term && c.Sequence == o.Sequence &&
		c.Position.Time == o.Position.Time && bytes.Equal(c.Position.Token, o.Position.Token) &&
		c.Settled == o.Settled && c.CommittedAt.Equal(o.CommittedAt) &&
		c.Rebuild.rows() == o.Rebuild.rows() && len(c.Pending) == len(o.Pending)
}
