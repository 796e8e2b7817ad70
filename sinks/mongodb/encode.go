package mongodb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/tidemark-go/tidemark/internal/row"
)

// appendField appends a field of a row to a document under construction.
func appendField(dst []byte, f *row.Field, r reflect.Value) ([]byte, error) {
	v, ok := f.Value(r)
	if !ok {
		return bsoncore.AppendNullElement(dst, f.Name), nil
	}
	switch f.Kind {
	case row.Text:
		if !utf8.ValidString(v.String()) {
			return dst, fmt.Errorf("field %q: %w", f.Name, errInvalidText)
		}
		return bsoncore.AppendStringElement(dst, f.Name, v.String()), nil
	case row.Bool:
		return bsoncore.AppendBooleanElement(dst, f.Name, v.Bool()), nil
	case row.Int:
		return bsoncore.AppendInt64Element(dst, f.Name, row.IntOf(v)), nil
	case row.Float:
		return bsoncore.AppendDoubleElement(dst, f.Name, v.Float()), nil
	case row.Time:
		return bsoncore.AppendDateTimeElement(dst, f.Name, row.MillisOf(v)), nil
	case row.Bytes:
		return bsoncore.AppendBinaryElement(dst, f.Name, bson.TypeBinaryGeneric, v.Bytes()), nil
	case row.ObjectID:
		return bsoncore.AppendObjectIDElement(dst, f.Name, *row.ObjectIDOf(v)), nil
	case row.Decimal:
		return appendDecimal(dst, f.Name, row.DecimalOf(v)), nil
	case row.JSON:
		dst, err := appendJSON(dst, f.Name, v)
		if err != nil {
			return dst, fmt.Errorf("field %q: %w", f.Name, err)
		}
		return dst, nil
	}
	return dst, fmt.Errorf("field %q: kind %d can't be stored", f.Name, f.Kind)
}

// errInvalidText: the server would take such a string, but hardly a client would.
var errInvalidText = errors.New("it is not valid UTF-8")

func appendDecimal(dst []byte, name string, d bson.Decimal128) []byte {
	high, low := d.GetBytes()
	return bsoncore.AppendDecimal128Element(dst, name, high, low)
}

// appendSum appends a delta of a decimal sum.
func appendSum(dst []byte, name string, coefficient *big.Int, exponent int) ([]byte, error) {
	d, ok := bson.ParseDecimal128FromBigInt(coefficient, exponent)
	if !ok {
		return dst, fmt.Errorf("field %q: %w", name, errInexact)
	}
	return appendDecimal(dst, name, d), nil
}

// errInexact: the server would round such a sum, in silence.
var errInexact = errors.New("the sum needs more than the 34 digits of a Decimal128")

// appendJSON stores the JSON that a value is in other sinks too: an embedded document, an
// array, or a single value. Field names are thus the json ones, and what has no JSON form of
// its own, such as a date, is a string.
func appendJSON(dst []byte, name string, v reflect.Value) ([]byte, error) {
	text, err := row.JSONOf(v)
	if err != nil {
		return dst, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return appendNext(dst, name, d)
}

func appendNext(dst []byte, name string, d *json.Decoder) ([]byte, error) {
	token, err := d.Token()
	if err != nil {
		return dst, err
	}
	switch t := token.(type) {
	case nil:
		return bsoncore.AppendNullElement(dst, name), nil
	case bool:
		return bsoncore.AppendBooleanElement(dst, name, t), nil
	case string:
		return bsoncore.AppendStringElement(dst, name, t), nil
	case json.Number:
		return appendNumber(dst, name, t.String())
	case json.Delim:
		return appendNested(dst, name, t == '{', d)
	}
	return dst, fmt.Errorf("unexpected JSON token %v", token)
}

func appendNested(dst []byte, name string, document bool, d *json.Decoder) (_ []byte, err error) {
	var at int32
	if document {
		at, dst = bsoncore.AppendDocumentElementStart(dst, name)
	} else {
		at, dst = bsoncore.AppendArrayElementStart(dst, name)
	}
	for i := 0; d.More(); i++ {
		key := strconv.Itoa(i)
		if document {
			token, err := d.Token()
			if err != nil {
				return dst, err
			}
			key = token.(string)
			if strings.IndexByte(key, 0) >= 0 {
				return dst, errors.New("a name in it has a NUL character, which BSON can't hold")
			}
		}
		if dst, err = appendNext(dst, key, d); err != nil {
			return dst, err
		}
	}
	if _, err := d.Token(); err != nil { // the closing delimiter
		return dst, err
	}
	if document {
		return bsoncore.AppendDocumentEnd(dst, at)
	}
	return bsoncore.AppendArrayEnd(dst, at)
}

// appendNumber stores whole numbers as int64, as far as they go, others as double;
// what neither can hold is a Decimal128.
func appendNumber(dst []byte, name, text string) ([]byte, error) {
	whole := !strings.ContainsAny(text, ".eE")
	if whole {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return bsoncore.AppendInt64Element(dst, name, n), nil
		}
	} else if f, err := strconv.ParseFloat(text, 64); err == nil {
		return bsoncore.AppendDoubleElement(dst, name, f), nil
	}
	d, err := bson.ParseDecimal128(text)
	if err != nil {
		return dst, fmt.Errorf("number %s is too long: %w", text, err)
	}
	return appendDecimal(dst, name, d), nil
}
