package projector

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var seedFlag = flag.Uint64("seed", 0, "seed of the property tests; 0: a new one each time")

// random is a source whose seed is printed, so that a failure can be had again.
func random(t testing.TB) *rand.Rand {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano()) //nolint:gosec // any bits will do
	}
	t.Logf("seed %d (-seed %[1]d repeats it)", seed)
	return rand.New(rand.NewPCG(seed, seed))
}
