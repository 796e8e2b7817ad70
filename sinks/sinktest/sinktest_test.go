package sinktest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	transactional = sinktest.Features{
		Transactions: true, LoadWaits: true, Adds: true, DecimalSums: true, Keys: true, Owners: true, Values: true,
	}
	versioned = sinktest.Features{Trials: true, Keys: true, Values: true}
)

// rounds are those of the checks at random moments.
var rounds = max(8, effort.Values(40))

// subject is the reference, broken in the way that is named.
func subject(f sinktest.Features, broken string) sinktest.Subject[*memoryTx] {
	return sinktest.Subject[*memoryTx]{
		Features: f, Patience: 300 * time.Millisecond, Rounds: rounds,
		Open: func(t sinktest.T) sinktest.Store[*memoryTx] {
			m := newMemory(broken, f)
			t.Cleanup(m.close)
			return m.store()
		},
	}
}

func (m *memory) store() sinktest.Store[*memoryTx] {
	b := m.broken
	return sinktest.Store[*memoryTx]{
		Sink:          func(sinktest.T) projector.Sink[*memoryTx] { return m.open() },
		Documents:     memoryTable[sinktest.Document]{name: "documents", form: projector.FormMirror, broken: b}.putting(m),
		Counts:        memoryTable[sinktest.Count]{name: "counts", form: projector.FormRollup, key: countKey, plus: plusCount, broken: b}.adding(m),
		Amounts:       memoryTable[sinktest.Amount]{name: "amounts", form: projector.FormRollup, key: amountKey, plus: plusAmount, broken: b}.adding(m),
		Entries:       memoryTable[sinktest.Entry]{name: "entries", form: projector.FormUpsert, key: m.entryKey, broken: b}.putting(m),
		Keys:          memoryTable[sinktest.Keys]{name: "keys", form: projector.FormUpsert, key: m.keysKey, broken: b}.putting(m),
		Values:        memoryTable[sinktest.Values]{name: "values", form: projector.FormMirror, broken: b}.putting(m),
		Live:          m.livePlace,
		Checkpoint:    m.checkpoint,
		SetCheckpoint: m.setCheckpoint,
		Refused:       refusals(),
		Freeze:        m.freeze,
	}
}

func countKey(c sinktest.Count) string   { return fmt.Sprintf("%q %q", c.Region, c.Status) }
func amountKey(a sinktest.Amount) string { return a.Shop }

func (m *memory) entryKey(e sinktest.Entry) string {
	if m.broken == "keys joined" {
		return e.Shelf + "|" + e.Slot
	}
	return fmt.Sprintf("%q %q", e.Shelf, e.Slot)
}

func (m *memory) keysKey(k sinktest.Keys) string {
	at := k.Time.UnixMilli()
	if m.broken == "key times in seconds" {
		at = k.Time.Unix()
	}
	return fmt.Sprintf("%q %t %d %d %s", k.Text, k.Flag, k.Int, at, k.ObjectID.Hex())
}

func TestReference(t *testing.T) {
	t.Parallel()
	run := func(name string, s sinktest.Subject[*memoryTx]) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sinktest.Run(t, s)
		})
	}
	run("transactional", subject(transactional, ""))
	run("versioned", subject(versioned, ""))
	queued := sinktest.Features{Transactions: true, Adds: true, Keys: true, Owners: true, Values: true}
	run("queued", subject(queued, "load without lock"))
	run("least", subject(sinktest.Features{}, ""))
}

type broken struct {
	features sinktest.Features
	how      string
	check    string
}

// breaks are the ways in which the reference can be broken, and for each a check that
// must find it.
var breaks = []broken{
	{transactional, "first term is 0", "acquire/unknown-projection"},
	{transactional, "acquire loses the position", "acquire/raises-only-the-term"},
	{transactional, "projection introduced twice", "acquire/two-at-a-time"},
	{transactional, "load raises the term", "load/reads-only"},
	{transactional, "load without lock", "load/waits-for-a-commit"},
	{transactional, "fence without lock", "owners/concurrent"},
	{transactional, "writes lost", "commit/success-leaves-both"},
	{transactional, "apply's error swallowed", "commit/error-of-apply"},
	{transactional, "writes outside the transaction", "commit/error-of-apply"},
	{transactional, "refused write leaves the rest", "commit/refused-write"},
	{transactional, "failed transaction stores the checkpoint", "commit/swallowed-refusal"},
	{transactional, "one place for all", "commit/projections-apart"},
	{transactional, "instance knows one place", "commit/projections-on-one-instance"},
	{transactional, "large batches are cut", "commit/large-batch"},
	{transactional, "refusal is fatal", "poison/class"},
	{transactional, "refusal keeps the lock", "poison/neighbours"},
	{transactional, "trial commits", "try/tells-and-writes-nothing"},
	{transactional, "trial not fenced", "try/fenced"},
	{transactional, "term not compared", "fence/term"},
	{transactional, "owner not compared", "fence/owner"},
	{transactional, "sequence not compared", "fence/sequence"},
	{transactional, "fence without lock", "fence/begun-before-the-takeover"},
	{transactional, "late commit not fenced", "unknown/cancelled-commit"},
	{transactional, "cancelled commit leaves its rows", "unknown/cancelled-commit"},
	{transactional, "lost answer is poison", "unknown/cancelled-commit"},
	{transactional, "cancelled call loses its connection", "cancel/every-method"},
	{transactional, "context ignored", "cancel/while-waiting"},
	{transactional, "acquire waits for ever", "frozen/acquire"},
	{transactional, "load waits for ever", "frozen/load"},
	{transactional, "acquire waits for ever", "frozen/process"},
	{transactional, "checkpoint encoded anew", "checkpoint/byte-for-byte"},
	{transactional, "term raised before decoding", "checkpoint/malformed"},
	{transactional, "malformed checkpoint overwritten", "checkpoint/malformed"},
	{transactional, "format not looked at", "checkpoint/newer-format"},
	{transactional, "term raised before decoding", "checkpoint/newer-format"},
	{transactional, "first commit not fenced", "first-commit/two-at-a-time"},
	{transactional, "store created twice", "first-commit/many-projections-at-a-time"},
	{transactional, "failed first commit leaves its tables", "first-commit/again-after-a-failure"},
	{transactional, "trial leaves its tables", "first-commit/after-a-trial"},
	{transactional, "every form fits", "model/check"},
	{transactional, "create clears", "model/create-keeps-what-is-there"},
	{transactional, "clear does nothing", "model/clear"},
	{transactional, "begin gives the live place", "generations/begin"},
	{transactional, "begin starts over", "generations/begin"},
	{transactional, "begin compares the sequence", "generations/begin"},
	{transactional, "begin not fenced", "generations/begin"},
	{transactional, "one lock for all generations", "generations/commit-beside"},
	{transactional, "one place for all", "generations/commit-beside"},
	{transactional, "generations unsorted", "generations/acquire"},
	{transactional, "only the live term raised", "generations/acquire"},
	{transactional, "other generations not waited for", "generations/acquire"},
	{transactional, "begin not fenced", "generations/acquire"},
	{transactional, "discard not fenced", "generations/acquire"},
	{transactional, "switch not fenced", "generations/acquire"},
	{transactional, "generations not locked together", "generations/changed-during-acquire"},
	{transactional, "other generations not decoded", "generations/malformed"},
	{transactional, "term raised before decoding", "generations/malformed"},
	{transactional, "discard believes its caller", "generations/discard"},
	{transactional, "discard not fenced", "generations/discard"},
	{transactional, "discard leaves the place", "generations/discard"},
	{transactional, "switch leaves readers", "generations/switch"},
	{transactional, "switch keeps the sequence", "generations/switch"},
	{transactional, "switch stores what was stored", "generations/switch"},
	{transactional, "switch loses the retired rows", "generations/switch"},
	{transactional, "switch not fenced", "generations/switch-fenced"},
	{transactional, "switch compares from only", "generations/switch-fenced"},
	{transactional, "owner not compared", "generations/switch-fenced"},
	{transactional, "switch keeps a from without a model", "generations/switch-first"},
	{transactional, "generation 1 comes back", "generations/switch-first"},
	{transactional, "switch in two steps", "generations/switch-readers"},
	{transactional, "cancelled switch is half done", "generations/switch-unknown"},
	{transactional, "discard believes its caller", "generations/switch-and-discard"},
	{transactional, "generation 1 comes back", "generations/switch-and-discard"},
	{transactional, "load forgets owners", "loader/equals-put"},
	{transactional, "load stores what put refuses", "loader/values-equal-put"},
	{transactional, "put does not mark", "sweeper/documents"},
	{transactional, "sweep without limit", "sweeper/documents"},
	{transactional, "sweep spares older marks", "sweeper/documents"},
	{transactional, "put does not mark", "sweeper/keys"},
	{transactional, "sweep forgets owners", "sweeper/keys"},
	{transactional, "emptied rows are kept", "add/rows-exist-by-contributions"},
	{transactional, "zero sums are dropped", "add/rows-exist-by-contributions"},
	{transactional, "last contribution of a batch wins", "add/random-against-a-model"},
	{transactional, "drift accepted", "add/more-off-than-there-is"},
	{transactional, "sums wrap", "add/overflow"},
	{transactional, "decimals as floats", "add/decimals"},
	{transactional, "decimals rounded", "add/decimals-exact-or-refused"},
	{transactional, "first put wins", "put/later-wins"},
	{transactional, "removal of all ignored", "put/removal-of-all-rows-of-a-document"},
	{transactional, "removal after put", "put/put-beats-removal"},
	{transactional, "owners ignored", "put/removal-by-the-owner-only"},
	{transactional, "first put wins", "put/random-against-a-model"},
	{transactional, "owners ignored", "put/random-keys-against-a-model"},
	{transactional, "ids without their type", "keys/ids-apart"},
	{transactional, "ids with their number's type", "keys/equal-numbers-are-one-id"},
	{transactional, "long ids cut", "keys/long-ids"},
	{transactional, "keys joined", "keys/columns-apart"},
	{transactional, "key times in seconds", "keys/every-kind"},
	{transactional, "times in seconds", "values/round-trip"},
	{transactional, "null is zero", "values/round-trip"},
	{transactional, "texts cut at NUL", "values/exact-or-refused"},
	{versioned, "versions ignored", "fence/late-writes-are-harmless"},
	{versioned, "versions ignored", "put/replay-changes-nothing"},
	{versioned, "term not compared", "fence/term"},
	{versioned, "checkpoint not compared at the end", "fence/begun-before-the-takeover"},
	{versioned, "checkpoint not compared at the end", "first-commit/two-at-a-time"},
	{versioned, "first put wins", "put/random-keys-against-a-model"},
	{versioned, "begin starts over", "generations/begin"},
	{versioned, "only the live term raised", "generations/acquire"},
	{versioned, "discard leaves the place", "generations/discard"},
	{versioned, "switch leaves readers", "generations/switch"},
	{versioned, "switch not fenced", "generations/switch-fenced"},
	{versioned, "switch in two steps", "generations/switch-readers"},
	{versioned, "cancelled switch is half done", "generations/switch-unknown"},
	{versioned, "load forgets owners", "loader/equals-put"},
	{versioned, "put does not mark", "sweeper/documents"},
	{versioned, "put does not mark", "sweeper/keys"},
}

// TestEveryCheckFinds: each check fails for a sink that breaks its rule.
func TestEveryCheckFinds(t *testing.T) {
	t.Parallel()
	for _, b := range breaks {
		t.Run(fmt.Sprintf("%s/%s", b.how, b.check), func(t *testing.T) {
			t.Parallel()
			// A few races need luck: what two do at once, a slow machine does in turn.
			for range 20 * 40 / rounds {
				if faults := check(t, b.features, b.how, b.check).Faults(t.Context()); len(faults) > 0 {
					t.Logf("found: %s", faults[0])
					return
				}
			}
			t.Errorf("%s finds nothing", b.check)
		})
	}
	for _, f := range []sinktest.Features{transactional, versioned} {
		for _, c := range sinktest.Checks(subject(f, "")) {
			if !slices.ContainsFunc(breaks, func(b broken) bool { return b.check == c.Name }) {
				t.Errorf("no broken sink proves %s", c.Name)
			}
		}
	}
}

func check(t *testing.T, f sinktest.Features, broken, name string) sinktest.Check {
	t.Helper()
	for _, c := range sinktest.Checks(subject(f, broken)) {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("there is no check %q", name)
	return sinktest.Check{}
}

func TestContradictions(t *testing.T) {
	s := subject(sinktest.Features{Adds: true, Owners: true}, "")
	checks := sinktest.Checks(s)
	if len(checks) != 1 {
		t.Fatalf("%d checks of a subject that contradicts itself, want 1", len(checks))
	}
	faults := strings.Join(checks[0].Faults(t.Context()), "\n")
	for _, says := range []string{"Adds needs Transactions", "Owners needs Keys"} {
		if !strings.Contains(faults, says) {
			t.Errorf("it is not said that %s:\n%s", says, faults)
		}
	}
	s = subject(transactional, "")
	s.Open = func(sinktest.T) sinktest.Store[*memoryTx] { return sinktest.Store[*memoryTx]{} }
	faults = strings.Join(sinktest.Checks(s)[0].Faults(t.Context()), "\n")
	for _, says := range []string{"Store.Sink", "Store.Documents", "Store.Counts", "Store.Live", "Store.Refused"} {
		if !strings.Contains(faults, says) {
			t.Errorf("it is not said that %s is missing:\n%s", says, faults)
		}
	}
}
