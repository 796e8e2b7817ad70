package sinktest

import (
	"encoding/base64"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// text is a row as a line, with one form for each value: two rows are the same if and
// only if their texts are. Times count in milliseconds, decimals by value.
func text(row any) string {
	v := reflect.ValueOf(row)
	var b []byte
	for i, name := range columns(v.Type()) {
		if i > 0 {
			b = append(b, ' ')
		}
		b = append(append(b, name...), '=')
		switch f := v.Field(i); {
		case f.Kind() == reflect.String: // most are, and there are many
			b = strconv.AppendQuote(b, f.String())
		case f.CanInt():
			b = strconv.AppendInt(b, f.Int(), 10)
		default:
			b = append(b, valueText(f)...)
		}
	}
	return string(b)
}

var columnsOf sync.Map

// columns are the names of a row type's columns.
func columns(row reflect.Type) []string {
	if names, ok := columnsOf.Load(row); ok {
		return names.([]string)
	}
	names := make([]string, row.NumField())
	for i := range names {
		names[i] = strings.ToLower(row.Field(i).Name)
	}
	columnsOf.Store(row, names)
	return names
}

func valueText(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case time.Time:
		return strconv.FormatInt(x.UnixMilli(), 10) + "ms"
	case bson.ObjectID:
		return x.Hex()
	case bson.Decimal128:
		return decimalText(x)
	case []byte:
		return base64.StdEncoding.EncodeToString(x)
	case map[string]any:
		return jsonText(x)
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return "null"
		}
		return valueText(v.Elem())
	case reflect.String:
		return strconv.Quote(v.String())
	case reflect.Float64:
		return floatText(v.Float())
	}
	return fmt.Sprint(v.Interface())
}

// floatText takes both zeros for one, since not every store has two.
func floatText(f float64) string {
	if f == 0 {
		f = math.Abs(f)
	}
	return strconv.FormatFloat(f, 'g', -1, 64)
}

func decimalText(d bson.Decimal128) string {
	n, exp, err := d.BigInt()
	if err != nil { // NaN and the infinities
		return d.String()
	}
	digits := n.String()
	if digits == "0" {
		return "0"
	}
	for strings.HasSuffix(digits, "0") {
		digits, exp = digits[:len(digits)-1], exp+1
	}
	return digits + "E" + strconv.Itoa(exp)
}

// jsonText is not JSON, in which all invalid UTF-8 looks the same.
func jsonText(m map[string]any) string {
	if m == nil {
		return "null"
	}
	return fmt.Sprintf("%#v", m)
}

func sumText[R any](s Sum[R]) string {
	return text(s.Row) + " contributions=" + strconv.FormatInt(s.Contributions, 10)
}

// keptText leaves the owner out where the sink keeps none.
func keptText[R any](k Kept[R], owned bool) string {
	if !owned {
		return text(k.Row)
	}
	return text(k.Row) + " owner=" + strconv.Quote(k.Owner)
}
