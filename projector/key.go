package projector

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"math"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// KeyText is the text form of a document's _id, which sinks use as the key of its
// rows. It is readable, and no two values that MongoDB holds apart share one:
//
//	ObjectID          65f1c0ffee65f1c0ffee65f1     24 lower-case hex digits
//	string            order-17                     as it is, where it can't be mistaken for another form
//	string            "42"  "true"  "a\nb"         else quoted, as Go quotes strings
//	number            42  number(1.5)              bare if it is an int64; whatever its type, since MongoDB
//	                                               takes equal numbers for the same _id; doubles exactly
//	boolean, null     true  null
//	date              date(2026-11-29T12:00:00.000Z), or date(ms) outside the years 0 to 9999
//	UUID              uuid(…)                      binary of subtype 4
//	other binary      binary(subtype,base64)
//	timestamp         timestamp(seconds,increment)
//	document          {"a":1,"b":["x"]}            strings in it always quoted
//	min/max key       minKey  maxKey
//	anything else     bson(type,base64)
//
// A string and a symbol, which MongoDB takes for the same _id, are held apart.
func KeyText(v bson.RawValue) string {
	switch v.Type {
	case bson.TypeObjectID:
		if id, ok := v.ObjectIDOK(); ok {
			return id.Hex()
		}
	case bson.TypeString:
		if s, ok := v.StringValueOK(); ok {
			return stringText(s)
		}
	case bson.TypeInt32, bson.TypeInt64:
		if n, ok := v.AsInt64OK(); ok {
			return strconv.FormatInt(n, 10)
		}
	case bson.TypeDouble:
		if f, ok := v.DoubleOK(); ok {
			return doubleText(f)
		}
	case bson.TypeDecimal128:
		if d, ok := v.Decimal128OK(); ok {
			return decimalText(d)
		}
	case bson.TypeBoolean:
		if b, ok := v.BooleanOK(); ok {
			return strconv.FormatBool(b)
		}
	case bson.TypeNull:
		return "null"
	case bson.TypeMinKey:
		return "minKey"
	case bson.TypeMaxKey:
		return "maxKey"
	case bson.TypeDateTime:
		if ms, ok := v.DateTimeOK(); ok {
			t := time.UnixMilli(ms).UTC()
			if t.Year() < 0 || t.Year() > 9999 {
				return "date(" + strconv.FormatInt(ms, 10) + ")"
			}
			return "date(" + t.Format("2006-01-02T15:04:05.000Z") + ")"
		}
	case bson.TypeBinary:
		if sub, b, ok := v.BinaryOK(); ok {
			if sub == bson.TypeBinaryUUID && len(b) == 16 {
				h := hex.EncodeToString(b)
				return "uuid(" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:] + ")"
			}
			return fmt.Sprintf("binary(%d,%s)", sub, base64.StdEncoding.EncodeToString(b))
		}
	case bson.TypeTimestamp:
		if t, i, ok := v.TimestampOK(); ok {
			return fmt.Sprintf("timestamp(%d,%d)", t, i)
		}
	case bson.TypeEmbeddedDocument:
		if text, ok := documentText(v.Value, false); ok {
			return text
		}
	}
	return fmt.Sprintf("bson(%d,%s)", v.Type, base64.StdEncoding.EncodeToString(v.Value))
}

// ambiguous matches strings that look like the text form of another type, or like
// a quoted string.
var ambiguous = regexp.MustCompile(`^(|[0-9a-f]{24}|-?[0-9]+|true|false|null|minKey|maxKey|["{].*|[a-z]+\(.*)$`)

func stringText(s string) string {
	plain := utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
	if plain && (fault.Global.Off(fault.InjectiveKeys) || !mightBeAmbiguous(s) || !ambiguous.MatchString(s)) {
		return s
	}
	return strconv.Quote(s)
}

// mightBeAmbiguous spares most strings the regular expression.
func mightBeAmbiguous(s string) bool {
	return len(s) == 0 || len(s) == 24 || s[0] == '"' || s[0] == '{' || s[0] == '-' || s[0] <= '9' ||
		s == "true" || s == "false" || s == "null" || s == "minKey" || s == "maxKey" || strings.IndexByte(s, '(') > 0
}

// doubleText writes a double as the exact number that it is, so that a decimal of the
// same value, which MongoDB takes for the same _id, has the same text.
func doubleText(f float64) string {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return specialText(math.IsNaN(f), math.IsInf(f, -1))
	}
	mantissa, exp := math.Frexp(f)
	n := big.NewInt(int64(mantissa * (1 << 53))) // f = n · 2^(exp-53)
	if exp -= 53; exp >= 0 {
		return numberText(n.Lsh(n, uint(exp)), 0)
	}
	return numberText(n.Mul(n, new(big.Int).Exp(big.NewInt(5), big.NewInt(int64(-exp)), nil)), exp)
}

func decimalText(d bson.Decimal128) string {
	n, exp, err := d.BigInt()
	if err != nil {
		return specialText(d.IsNaN(), d.IsInf() < 0)
	}
	return numberText(n, exp)
}

func specialText(nan, negative bool) string {
	switch {
	case nan:
		return "number(NaN)"
	case negative:
		return "number(-Infinity)"
	}
	return "number(Infinity)"
}

// numberText writes n · 10^exp: bare where it is an int64.
func numberText(n *big.Int, exp int) string {
	if n.Sign() == 0 {
		return "0"
	}
	all := new(big.Int).Abs(n).String()
	digits := strings.TrimRight(all, "0")
	exp += len(all) - len(digits)
	sign := ""
	if n.Sign() < 0 {
		sign = "-"
	}
	if exp >= 0 && len(digits)+exp <= 19 {
		whole := sign + digits + strings.Repeat("0", exp)
		if _, err := strconv.ParseInt(whole, 10, 64); err == nil {
			return whole
		}
	}
	if exp < 0 && -exp <= 60 { // as people write it; anything longer keeps its exponent
		if pad := -exp - len(digits) + 1; pad > 0 {
			digits = strings.Repeat("0", pad) + digits
		}
		point := len(digits) + exp
		return "number(" + sign + digits[:point] + "." + digits[point:] + ")"
	}
	if exp >= 0 && exp <= 20 {
		return "number(" + sign + digits + strings.Repeat("0", exp) + ")"
	}
	return fmt.Sprintf("number(%s%sE%d)", sign, digits, exp)
}

// documentText is like JSON, with strings quoted as Go quotes them and other values in
// their text form, so that what holds for those holds for the document.
func documentText(doc bson.Raw, array bool) (string, bool) {
	elements, err := doc.Elements()
	if err != nil {
		return "", false
	}
	var b strings.Builder
	for i, e := range elements {
		if i > 0 {
			b.WriteByte(',')
		}
		if !array {
			b.WriteString(strconv.Quote(e.Key()) + ":")
		}
		v := e.Value()
		text, ok := "", true
		switch v.Type {
		case bson.TypeString:
			text, ok = v.StringValueOK()
			text = strconv.Quote(text)
		case bson.TypeEmbeddedDocument, bson.TypeArray:
			text, ok = documentText(v.Value, v.Type == bson.TypeArray)
		default:
			text = KeyText(v)
		}
		if !ok {
			return "", false
		}
		b.WriteString(text)
	}
	if array {
		return "[" + b.String() + "]", true
	}
	return "{" + b.String() + "}", true
}
