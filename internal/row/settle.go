package row

import (
	"bytes"
	"slices"
)

// Settle folds the rows of a Put: of the rows put under one key the last is kept, and
// a removal whose key is put is dropped. Key appends the key of row i of remove or of
// put to dst. The indexes of what remains come back sorted by key, so that all
// writers lock rows in one order.
func Settle(remove, put int, key func(dst []byte, put bool, i int) []byte) (removed, kept []int) {
	entries := make([]entry, 0, remove+put)
	var keys []byte
	for i := range remove + put {
		start := len(keys)
		if i < remove {
			keys = key(keys, false, i)
		} else {
			keys = key(keys, true, i-remove)
		}
		entries = append(entries, entry{start: start, end: len(keys), i: i})
	}
	for i := range entries {
		entries[i].key = keys[entries[i].start:entries[i].end]
	}
	slices.SortFunc(entries, func(a, b entry) int {
		if c := bytes.Compare(a.key, b.key); c != 0 {
			return c
		}
		return a.i - b.i
	})
	removed, kept = make([]int, 0, remove), make([]int, 0, put)
	for len(entries) > 0 {
		n := 1
		for n < len(entries) && bytes.Equal(entries[n].key, entries[0].key) {
			n++
		}
		// Puts come after removals, so the last entry tells whether there is one.
		if last := entries[n-1].i; last >= remove {
			kept = append(kept, last-remove)
		} else {
			for _, e := range entries[:n] {
				removed = append(removed, e.i)
			}
		}
		entries = entries[n:]
	}
	return removed, kept
}

type entry struct {
	key        []byte
	start, end int
	i          int
}
