package projector

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
)

// The rows of a Putter, in memory, by key.
type ownedRow struct {
	owner string
	row   string
}

type testRow struct{ key, text string }

// put is what a Putter's Put must do.
func put(model map[string]ownedRow, remove, add []Row[testRow]) {
	for _, r := range remove {
		owner := KeyText(r.Owner)
		if r.Row == nil {
			maps.DeleteFunc(model, func(_ string, o ownedRow) bool { return o.owner == owner })
		} else if model[r.Row.key].owner == owner {
			delete(model, r.Row.key)
		}
	}
	for _, r := range add {
		model[r.Row.key] = ownedRow{KeyText(r.Owner), r.Row.text}
	}
}

// history makes random changes of a few documents. Each claims up to three of the keys
// that no other claims at the time, so keys are handed from document to document.
func history(r *rand.Rand, n int) []any {
	claimed := map[string]int{} // by key: the document
	docs := map[int][]testRow{}
	var items []any
	for i := range n {
		d := r.IntN(5)
		for _, old := range docs[d] {
			delete(claimed, old.key)
		}
		before := docs[d]
		var after []testRow
		if r.IntN(3) > 0 {
			for range r.IntN(4) {
				k := fmt.Sprintf("k%d", r.IntN(8))
				if _, taken := claimed[k]; !taken {
					claimed[k] = d
					after = append(after, testRow{k, fmt.Sprintf("change %d", i)})
				}
			}
		}
		docs[d] = after
		items = append(items, &rows[testRow]{owner: valueOf(int32(d)), version: int64(i), before: before, after: after}) //nolint:gosec // few
	}
	return items
}

// A batch folded per document leaves the rows that its changes leave one by one,
// wherever it is cut. (CASES B77: one key twice in a batch.)
func TestFoldedRowsAreThoseOfTheChangesOneByOne(t *testing.T) {
	r := random(t)
	for h := range 20_000 {
		items := history(r, 1+r.IntN(30))
		oneByOne, folded := map[string]ownedRow{}, map[string]ownedRow{}
		for _, i := range items {
			put(oneByOne, removals(i.(*rows[testRow])), additions(i.(*rows[testRow])))
		}
		for rest := items; len(rest) > 0; {
			n := 1 + r.IntN(len(rest))
			remove, add := foldRows[testRow](rest[:n], false)
			put(folded, remove, add)
			rest = rest[n:]
		}
		if !maps.Equal(oneByOne, folded) {
			t.Fatalf("history %d of %d changes: folded %v, one by one %v", h, len(items), folded, oneByOne)
		}
	}
}

func removals(i *rows[testRow]) (out []Row[testRow]) {
	for j := range i.before {
		out = append(out, Row[testRow]{Owner: i.owner, Row: &i.before[j]})
	}
	return out
}

func additions(i *rows[testRow]) (out []Row[testRow]) {
	for j := range i.after {
		out = append(out, Row[testRow]{Owner: i.owner, Row: &i.after[j]})
	}
	return out
}

// A Mirror's rows are their documents': one put or one removal of everything per
// document and batch, with the version of its last change.
func TestMirrorFoldsToTheLastState(t *testing.T) {
	r := random(t)
	for range effort.Values(5000) {
		docs := map[string]string{}
		folded := map[string]ownedRow{}
		var items []any
		for i := range 1 + r.IntN(20) {
			d := r.IntN(4)
			key := fmt.Sprintf("d%d", d)
			item := &rows[testRow]{owner: valueOf(key), version: int64(i), all: true}
			if delete(docs, key); r.IntN(3) > 0 {
				docs[key] = fmt.Sprint(i)
				item.after = []testRow{{key, docs[key]}}
			}
			items = append(items, item)
			if r.IntN(5) > 0 {
				continue
			}
			remove, add := foldRows[testRow](items, false)
			seen := map[string]int64{}
			for _, row := range append(remove, add...) {
				if _, twice := seen[KeyText(row.Owner)]; twice {
					t.Fatalf("%s is written twice in a batch", KeyText(row.Owner))
				}
				seen[KeyText(row.Owner)] = row.Version
			}
			for _, i := range items {
				if i := i.(*rows[testRow]); seen[KeyText(i.owner)] < i.version {
					t.Fatalf("%s has version %d, not its last change's %d", KeyText(i.owner), seen[KeyText(i.owner)], i.version)
				}
			}
			put(folded, remove, add)
			items = nil
		}
		remove, add := foldRows[testRow](items, false)
		put(folded, remove, add)
		if len(folded) != len(docs) {
			t.Fatalf("%d rows of %d documents", len(folded), len(docs))
		}
		for k, text := range docs {
			if folded[k].row != text {
				t.Fatalf("%s has %q, its document %q", k, folded[k].row, text)
			}
		}
	}
}

// The owner of rows is found again after a replacement that changed the type of the
// number that its _id is; any other two values are two owners.
func TestOwnersAreToldApartAsMongoDBDoes(t *testing.T) {
	d, err := bson.ParseDecimal128("1.0")
	if err != nil {
		t.Fatal(err)
	}
	one := []bson.RawValue{valueOf(int32(1)), valueOf(int64(1)), valueOf(1.0), valueOf(d)}
	for _, v := range one {
		if identity(v) != identity(one[0]) {
			t.Errorf("%s is another owner than %s", v, one[0])
		}
	}
	r := random(t)
	seen := map[string]bson.RawValue{}
	for range effort.Values(50_000) {
		v := randomKey(r, 0)
		if old, ok := seen[identity(v)]; ok && !equal(old, v) {
			t.Fatalf("%s and %s are one owner", show(old), show(v))
		}
		seen[identity(v)] = v
	}
}

// A sink without transactions may have rows of a batch whose checkpoint was not written.
// The batches that follow begin at the same place, end elsewhere, and leave nothing over.
func TestRowsOfALostCheckpointAreNotLeftOver(t *testing.T) {
	if wrong := leftOver(random(t), true); wrong > 0 {
		t.Errorf("%d histories have ended wrong", wrong)
	}
	if wrong := leftOver(random(t), false); wrong == 0 {
		t.Error("without the rows in between nothing ends wrong, too: the test proves nothing")
	}
}

func leftOver(r *rand.Rand, every bool) (wrong int) {
	type kept struct {
		version int64
		row     *testRow
	}
	for range effort.Values(20_000) {
		items := history(r, 1+r.IntN(30))
		oneByOne, versions := map[string]ownedRow{}, map[string]kept{}
		for _, i := range items {
			put(oneByOne, removals(i.(*rows[testRow])), additions(i.(*rows[testRow])))
		}
		write := func(batch []any) {
			remove, add := foldRows[testRow](batch, every)
			rows := map[string]kept{}
			for _, row := range remove {
				rows[row.Row.key] = kept{row.Version, nil}
			}
			for _, row := range add {
				rows[row.Row.key] = kept{row.Version, row.Row}
			}
			for k, row := range rows {
				if row.version >= versions[k].version {
					versions[k] = row
				}
			}
		}
		for rest := items; len(rest) > 0; {
			if r.IntN(3) == 0 {
				write(rest[:1+r.IntN(len(rest))]) // and its checkpoint is lost
				continue
			}
			n := 1 + r.IntN(len(rest))
			write(rest[:n])
			rest = rest[n:]
		}
		alive := 0
		same := true
		for k, row := range versions {
			if row.row != nil {
				alive++
				same = same && oneByOne[k].row == row.row.text
			}
		}
		if !same || alive != len(oneByOne) {
			wrong++
		}
	}
	return wrong
}
