package redis

import (
	"reflect"
	"strconv"
	"strings"

	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// The keys of a projection begin with its name in braces, the hash tag, so that a cluster
// keeps all of them in one slot:
//
//	{p}:generations        set of the numbers of the generations
//	{p}:checkpoint:1       hash, the checkpoint of generation 1
//	{p}:live               string, the place of the generation that readers see: {p}:g1
//	{p}:g1:counts          hash, the index of a target: a field for each row
//	{p}:g1:counts:open     hash, a row: the key's text is the end of the name
//	{p}:g1:on              hash, the index of what handlers of On have written
//	{p}:g1:on:top          any type, by a handler
//	{p}:outside:mail       any type, by a handler, of no generation
func tag(projection string) string { return "{" + projection + "}:" }

func generationsKey(projection string) string { return tag(projection) + "generations" }

func liveKey(projection string) string { return tag(projection) + "live" }

func checkpointKey(projection string, generation int64) string {
	return tag(projection) + "checkpoint:" + strconv.FormatInt(generation, 10)
}

func placeOf(projection string, generation int64) string {
	return tag(projection) + "g" + strconv.FormatInt(generation, 10)
}

// generationOf is the inverse of placeOf, 0 for anything else.
func generationOf(projection, place string) int64 {
	digits, ok := strings.CutPrefix(place, tag(projection)+"g")
	n, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil {
		return 0
	}
	return n
}

func indexKey(place, target string) string { return place + ":" + target }

// rowPrefix is what the key of each row of a target begins with.
func rowPrefix(place, target string) string { return place + ":" + target + ":" }

func outsidePrefix(projection string) string { return tag(projection) + "outside:" }

// onTarget is the target that holds what handlers of On write.
const onTarget = "on"

// separator stands between the columns of a key.
const separator = "|"

var escaper = strings.NewReplacer("%", "%25", separator, "%7C")

// keyText is the text of a row's key: the column's text as it is, or several, with
// percent signs and bars in them escaped, and bars between.
func keyText(s *row.Schema, r reflect.Value) (string, error) {
	if len(s.Keys) == 1 {
		text, _, err := fieldText(&s.Keys[0], r)
		return text, err
	}
	var b strings.Builder
	for i := range s.Keys {
		text, _, err := fieldText(&s.Keys[i], r)
		if err != nil {
			return "", err
		}
		if i > 0 {
			b.WriteString(separator)
		}
		if strings.ContainsAny(text, "%"+separator) {
			text = escaper.Replace(text)
		}
		b.WriteString(text)
	}
	return b.String(), nil
}

// owned is what the index holds for a row that was put: the mark of a rebuild in place,
// and the text of the owner's _id.
func owned(mark int64, owner string) string { return strconv.FormatInt(mark, 10) + " " + owner }

// ownerOf is the owner in an entry of the index.
func ownerOf(entry string) string {
	_, owner, _ := strings.Cut(entry, " ")
	return owner
}

// marked reports whether an entry of the index has the mark.
func marked(entry string, mark int64) bool {
	return strings.HasPrefix(entry, strconv.FormatInt(mark, 10)+" ")
}

// ownerText is the text of a row's owner.
func ownerText[R any](r projector.Row[R]) string { return projector.KeyText(r.Owner) }
