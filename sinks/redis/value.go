package redis

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/row"
)

const timeLayout = "2006-01-02T15:04:05.000Z"

// fieldText is a field of a row as text; false: it is null.
func fieldText(f *row.Field, r reflect.Value) (string, bool, error) {
	v, ok := f.Value(r)
	if !ok {
		return "", false, nil
	}
	switch f.Kind {
	case row.Text:
		return v.String(), true, nil
	case row.Bool:
		return strconv.FormatBool(v.Bool()), true, nil
	case row.Int:
		return strconv.FormatInt(row.IntOf(v), 10), true, nil
	case row.Float:
		return strconv.FormatFloat(v.Float(), 'g', -1, v.Type().Bits()), true, nil
	case row.Time:
		return timeText(row.MillisOf(v)), true, nil
	case row.Bytes:
		return string(v.Bytes()), true, nil
	case row.ObjectID:
		return row.ObjectIDOf(v).Hex(), true, nil
	case row.Decimal:
		return row.DecimalOf(v).String(), true, nil
	case row.JSON:
		text, err := row.JSONOf(v)
		if err != nil {
			return "", false, fmt.Errorf("field %q: %w", f.Name, err)
		}
		return string(text), true, nil
	}
	return "", false, fmt.Errorf("field %q: kind %d can't be stored", f.Name, f.Kind)
}

// timeText is a time with the years that have four digits, else its milliseconds.
func timeText(ms int64) string {
	t := time.UnixMilli(ms).UTC()
	if y := t.Year(); y < 0 || y > 9999 {
		return strconv.FormatInt(ms, 10)
	}
	return t.Format(timeLayout)
}

func parseTime(text string) (time.Time, error) {
	if ms, err := strconv.ParseInt(text, 10, 64); err == nil {
		return time.UnixMilli(ms).UTC(), nil
	}
	return time.Parse(timeLayout, text)
}

// decodeRow makes a row of a stored hash. Fields that are not there are null.
func decodeRow(s *row.Schema, stored map[string]string, r reflect.Value) error {
	for i := range s.Fields {
		f := &s.Fields[i]
		text, ok := stored[f.Name]
		if !ok {
			if f.Nullable {
				continue
			}
			return fmt.Errorf("field %q is missing", f.Name)
		}
		v := r.FieldByName(f.GoName)
		if v.Kind() == reflect.Pointer && f.Kind != row.JSON {
			v.Set(reflect.New(v.Type().Elem()))
			v = v.Elem()
		}
		if err := setText(f, text, v); err != nil {
			return fmt.Errorf("field %q: %w", f.Name, err)
		}
	}
	return nil
}

func setText(f *row.Field, text string, v reflect.Value) error {
	switch f.Kind {
	case row.Text:
		v.SetString(text)
	case row.Bool:
		b, err := strconv.ParseBool(text)
		v.SetBool(b)
		return err
	case row.Int:
		return setInt(text, v)
	case row.Float:
		n, err := strconv.ParseFloat(text, v.Type().Bits())
		v.SetFloat(n)
		return err
	case row.Time:
		t, err := parseTime(text)
		v.Set(reflect.ValueOf(t))
		return err
	case row.Bytes:
		v.SetBytes([]byte(text))
	case row.ObjectID:
		id, err := bson.ObjectIDFromHex(text)
		v.Set(reflect.ValueOf(id))
		return err
	case row.Decimal:
		d, err := bson.ParseDecimal128(text)
		v.Set(reflect.ValueOf(d))
		return err
	case row.JSON:
		return json.Unmarshal([]byte(text), v.Addr().Interface())
	}
	return nil
}

func setInt(text string, v reflect.Value) error {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return err
	}
	if v.CanInt() {
		if v.OverflowInt(n) {
			return errors.New("it does not fit the field's type")
		}
		v.SetInt(n)
		return nil
	}
	if n < 0 || v.OverflowUint(uint64(n)) {
		return errors.New("it does not fit the field's type")
	}
	v.SetUint(uint64(n))
	return nil
}

// argument is a value that a handler writes, as text.
func argument(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case []byte:
		return string(v), nil
	case bool:
		return strconv.FormatBool(v), nil
	case time.Time:
		return timeText(v.UnixMilli()), nil
	case bson.ObjectID:
		return v.Hex(), nil
	case bson.Decimal128:
		return v.String(), nil
	}
	switch r := reflect.ValueOf(v); {
	case !r.IsValid():
	case r.CanInt():
		return strconv.FormatInt(r.Int(), 10), nil
	case r.CanUint():
		return strconv.FormatUint(r.Uint(), 10), nil
	case r.CanFloat():
		return strconv.FormatFloat(r.Float(), 'g', -1, r.Type().Bits()), nil
	case r.Kind() == reflect.String:
		return r.String(), nil
	}
	return "", fmt.Errorf("a value of type %T can't be stored; give a string, []byte, bool, number, time.Time, bson.ObjectID or bson.Decimal128", v)
}
