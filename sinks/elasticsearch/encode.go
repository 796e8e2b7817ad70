package elasticsearch

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// maxID is the length in bytes of the longest _id that the server takes.
const maxID = 512

// hashed begins the ids that stand for longer ones.
const hashed = "sha256:"

// shorten gives an id that fits: itself, or the hash of one that is too long. One that
// looks like such a hash is hashed too, so that no two ids become one.
func shorten(id string) string {
	if len(id) <= maxID && !strings.HasPrefix(id, hashed) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hashed + hex.EncodeToString(sum[:])
}

// appendKey appends the text form of a row's key: its fields, with | between them. A | or
// \ in a text has a \ before it; a key that is nothing but an empty text is a single \.
func appendKey(dst []byte, s *row.Schema, r reflect.Value) ([]byte, error) {
	start := len(dst)
	for i := range s.Keys {
		f := &s.Keys[i]
		if i > 0 {
			dst = append(dst, '|')
		}
		v, _ := f.Value(r)
		switch f.Kind {
		case row.Text:
			if !utf8.ValidString(v.String()) {
				return dst, fmt.Errorf("field %q: %w", f.Name, errInvalidText)
			}
			dst = appendEscaped(dst, v.String())
		case row.Bool:
			dst = strconv.AppendBool(dst, v.Bool())
		case row.Int:
			dst = strconv.AppendInt(dst, row.IntOf(v), 10)
		case row.Time:
			t, err := appendTime(dst, v)
			if err != nil {
				return dst, fmt.Errorf("field %q: %w", f.Name, err)
			}
			dst = t
		default: // ObjectID; the schema lets nothing else be a key
			dst = hex.AppendEncode(dst, row.ObjectIDOf(v)[:])
		}
	}
	if len(dst) == start {
		dst = append(dst, '\\')
	}
	return dst, nil
}

func appendEscaped(dst []byte, s string) []byte {
	if !strings.ContainsAny(s, `|\`) {
		return append(dst, s...)
	}
	for i := range len(s) {
		if s[i] == '|' || s[i] == '\\' {
			dst = append(dst, '\\')
		}
		dst = append(dst, s[i])
	}
	return dst
}

// appendSource appends a row as a JSON object, with its owner where there is one to tell.
func appendSource(dst []byte, s *row.Schema, r reflect.Value, owner string) ([]byte, error) {
	dst = append(dst, '{')
	for i := range s.Fields {
		f := &s.Fields[i]
		dst = append(append(append(dst, '"'), f.Name...), '"', ':') // columns need no escapes
		var err error
		if dst, err = appendValue(dst, f, r); err != nil {
			return dst, fmt.Errorf("field %q: %w", f.Name, err)
		}
		dst = append(dst, ',')
	}
	if owner != "" {
		dst = append(dst, `"`+ownerField+`":`...)
		return append(appendString(dst, owner), '}'), nil
	}
	dst[len(dst)-1] = '}' // in the place of the last comma
	return dst, nil
}

var (
	errInvalidText = errors.New("it is not valid UTF-8, which JSON can't hold")
	errNoNumber    = errors.New("JSON and Elasticsearch have no form for NaN and the infinities")
	errYear        = errors.New("Elasticsearch's dates have years from 0 to 9999")
)

func appendValue(dst []byte, f *row.Field, r reflect.Value) ([]byte, error) {
	v, ok := f.Value(r)
	if !ok {
		return append(dst, "null"...), nil
	}
	switch f.Kind {
	case row.Text:
		if !utf8.ValidString(v.String()) {
			return dst, errInvalidText
		}
		return appendString(dst, v.String()), nil
	case row.Bool:
		return strconv.AppendBool(dst, v.Bool()), nil
	case row.Int:
		return strconv.AppendInt(dst, row.IntOf(v), 10), nil
	case row.Float:
		if math.IsNaN(v.Float()) || math.IsInf(v.Float(), 0) {
			return dst, errNoNumber
		}
		return strconv.AppendFloat(dst, v.Float(), 'g', -1, v.Type().Bits()), nil
	case row.Time:
		dst, err := appendTime(append(dst, '"'), v)
		return append(dst, '"'), err
	case row.Bytes:
		return append(base64.StdEncoding.AppendEncode(append(dst, '"'), v.Bytes()), '"'), nil
	case row.ObjectID:
		return append(hex.AppendEncode(append(dst, '"'), row.ObjectIDOf(v)[:]), '"'), nil
	case row.Decimal:
		return appendString(dst, row.DecimalOf(v).String()), nil
	case row.JSON:
		text, err := row.JSONOf(v)
		return append(dst, text...), err
	}
	return dst, fmt.Errorf("kind %d can't be stored", f.Kind)
}

func appendTime(dst []byte, v reflect.Value) ([]byte, error) {
	t := time.UnixMilli(row.MillisOf(v)).UTC()
	if y := t.Year(); y < 0 || y > 9999 {
		return dst, errYear
	}
	return t.AppendFormat(dst, "2006-01-02T15:04:05.000Z"), nil
}

const hexDigits = "0123456789abcdef"

// appendString appends valid UTF-8 as a JSON string.
func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[start:i]...)
		start = i + 1
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, '\\', 'n')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return append(append(dst, s[start:]...), '"')
}

// writer writes the rows of one Put into a Tx's queue.
type writer struct {
	tx      *Tx
	plan    *plan
	targets []*target

	id      string // of the row that was identified last
	owner   string // that is to be stored with it
	version int64
	key     []byte
}

// identify finds the id of a row.
func (w *writer) identify(r erased) error {
	w.owner = ""
	switch {
	case len(w.plan.schema.Keys) == 0:
		text := projector.KeyText(r.owner)
		if w.id = shorten(text); w.id != text {
			w.owner = text
		}
	case !r.row.IsValid():
		return &setupError{fmt.Errorf("tidemark/elasticsearch: index %q: rows with keys are removed by their keys, not by their document alone", w.plan.name)}
	default:
		var err error
		w.key, err = appendKey(w.key[:0], w.plan.schema, r.row)
		w.id, w.owner = shorten(string(w.key)), projector.KeyText(r.owner)
		if err != nil {
			return w.refuse(err)
		}
	}
	if w.version = r.version; w.version <= 0 {
		return &setupError{fmt.Errorf("tidemark/elasticsearch: index %q: a row has no Version; give it its change's, by which late writes are told from later ones", w.plan.name)}
	}
	return nil
}

// rowStored is what an index has of a row.
type rowStored struct {
	owner   string
	version int64
}

// earlierPart reads the rows that removals name, where the commit before has ended within a
// source transaction. Its changes have one version all: where two documents have swapped
// their keys, the second one's old key has the first one's new row by now, which the removal
// must leave alone. Within a commit the order of the writes sees to that.
func (w *writer) earlierPart(ctx context.Context, n int, removal func(int) erased) (map[docKey]rowStored, error) {
	if !w.tx.prev.Open || w.tx.trial != "" || len(w.plan.schema.Keys) == 0 || n == 0 || fault.Global.Off(fault.KeyOwners) {
		return nil, nil
	}
	ids := make([]string, n)
	for i := range ids {
		if err := w.identify(removal(i)); err != nil {
			return nil, err
		}
		ids[i] = w.id
	}
	rows := map[docKey]rowStored{}
	for part := range slices.Chunk(ids, bulkItems) {
		body, err := json.Marshal(map[string]any{"ids": part})
		if err != nil {
			return nil, err
		}
		for _, t := range w.targets {
			var found struct {
				Docs []struct {
					ID      string            `json:"_id"`
					Version int64             `json:"_version"`
					Source  map[string]string `json:"_source"`
				} `json:"docs"`
			}
			// Realtime: it needs no refresh.
			path := "/" + t.index + "/_mget?_source_includes=" + ownerField + "&filter_path=docs._id,docs._version,docs._source"
			if err := w.tx.sink.call(ctx, http.MethodPost, path, body, &found); err != nil {
				return nil, err
			}
			for _, d := range found.Docs {
				rows[docKey{t, d.ID}] = rowStored{d.Source[ownerField], d.Version}
			}
		}
	}
	return rows, nil
}

func (w *writer) refuse(err error) error {
	return &DocumentError{Index: w.plan.name, ID: strings.ToValidUTF8(w.id, "\uFFFD"), Reason: err.Error()}
}

func (w *writer) remove(target int) {
	t := w.targets[target]
	c := w.tx.place(t, w.id, w.version)
	if c == nil {
		return
	}
	start := len(c.buf)
	c.buf = w.header(append(c.buf, t.remove...))
	w.tx.placed(c, start, t, w.id)
}

func (w *writer) put(target int, r erased) error {
	t := w.targets[target]
	c := w.tx.place(t, w.id, w.version)
	if c == nil {
		return nil
	}
	start := len(c.buf)
	buf, err := appendSource(w.header(append(c.buf, t.put...)), w.plan.schema, r.row, w.owner)
	if err != nil {
		c.buf = buf[:start]
		return w.refuse(err)
	}
	c.buf = append(buf, '\n')
	w.tx.placed(c, start, t, w.id)
	return nil
}

// header completes the line that says what to do with which document.
func (w *writer) header(dst []byte) []byte {
	dst = appendString(dst, w.id)
	if !fault.Global.Off(fault.RowVersion) {
		dst = strconv.AppendInt(append(dst, `,"version":`...), w.version, 10)
		dst = append(dst, `,"version_type":"external_gte"`...)
	}
	return append(dst, "}}\n"...)
}
