// Package effort says how hard tests try: as hard as their figures say, or less where
// TIDEMARK_ROUNDS is set to a number, as `make test` does so that it ends soon.
package effort

import (
	"os"
	"strconv"
)

// Rounds is how often a test repeats what it is about: at most TIDEMARK_ROUNDS.
func Rounds(full int) int {
	if n, ok := limit(); ok {
		return min(n, full)
	}
	return full
}

// Values is how many random values a test tries: a twentieth per TIDEMARK_ROUNDS.
func Values(full int) int {
	if n, ok := limit(); ok {
		return min(max(1, full/20*n), full)
	}
	return full
}

func limit() (int, bool) {
	n, err := strconv.Atoi(os.Getenv("TIDEMARK_ROUNDS"))
	return n, err == nil && n > 0
}
