package sinktest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Check is one check of a sink. It opens a store of its own.
type Check struct {
	// Name is unique and stable: what is checked, and of it what.
	Name string
	Run  func(T)
}

// Run runs every check that the features ask for, each as a subtest.
func Run[Tx any](t *testing.T, s Subject[Tx]) {
	t.Helper()
	for _, c := range Checks(s) {
		t.Run(c.Name, func(t *testing.T) { c.Run(t) })
	}
}

// Checks are the checks that the features ask for, one by one. A subject that
// contradicts itself gets a single check, which says so.
func Checks[Tx any](s Subject[Tx]) []Check {
	if err := s.fault(); err != nil {
		return []Check{{"subject", func(t T) { t.Helper(); t.Fatalf("%v", err) }}}
	}
	var checks []Check
	for _, d := range definitions[Tx]() {
		if d.needs == nil || d.needs(s.Features) {
			checks = append(checks, Check{d.name, func(t T) { d.run(newEnv(t, s)) }})
		}
	}
	return checks
}

// definition is a check before it knows its subject.
type definition[Tx any] struct {
	name  string
	needs func(Features) bool // nil: every sink has it
	run   func(*env[Tx])
}

func definitions[Tx any]() []definition[Tx] {
	return slices.Concat(
		making("", ownershipChecks[Tx]()), commitChecks[Tx](),
		making("", fenceChecks[Tx]()), making("", unknownChecks[Tx]()), making("", frozenChecks[Tx]()), making("", checkpointChecks[Tx]()),
		placeChecks[Tx](), generationChecks[Tx](), switchChecks[Tx](),
		making("Amounts", addChecks[Tx]()), making("Entries", putChecks[Tx]()), making("Entries Keys", keyChecks[Tx]()),
		making("Values", valueChecks[Tx]()), making("Values", loaderChecks[Tx]()), making("Entries", sweeperChecks[Tx]()),
	)
}

// making has checks that write to a few targets only make no others. Those that don't say
// so make all of them: Refused may write to any.
func making[Tx any](targets string, checks []definition[Tx]) []definition[Tx] {
	for i, d := range checks {
		checks[i].run = func(e *env[Tx]) {
			e.models = e.of(targets)
			d.run(e)
		}
	}
	return checks
}

func transactional(f Features) bool { return f.Transactions }
func versioned(f Features) bool     { return !f.Transactions }
func trials(f Features) bool        { return f.Transactions || f.Trials }
func loadWaits(f Features) bool     { return f.LoadWaits }
func adds(f Features) bool          { return f.Adds }
func decimalSums(f Features) bool   { return f.DecimalSums }
func keyed(f Features) bool         { return f.Keys }
func owners(f Features) bool        { return f.Owners }
func values(f Features) bool        { return f.Values }

// Faults runs the check and returns what it has found, instead of failing a test.
// That is for controls: with a guard of the sink switched off, the check that the
// guard is there for must find something. Logs get lost.
func (c Check) Faults(ctx context.Context) []string {
	ctx, cancel := context.WithCancel(ctx)
	r := &recorder{ctx: ctx}
	done := make(chan struct{})
	go func() { // Fatalf ends its goroutine
		defer close(done)
		c.Run(r)
	}()
	<-done
	cancel()
	for len(r.cleanups) > 0 {
		last := len(r.cleanups) - 1
		f := r.cleanups[last]
		r.cleanups = r.cleanups[:last]
		f()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.faults
}

// recorder is a T that keeps what goes wrong.
type recorder struct {
	ctx      context.Context
	cleanups []func()

	mu     sync.Mutex
	faults []string
}

func (r *recorder) Helper()                  {}
func (r *recorder) Context() context.Context { return r.ctx }
func (r *recorder) Cleanup(f func())         { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Logf(string, ...any)      {}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults = append(r.faults, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func newEnv[Tx any](t T, s Subject[Tx]) *env[Tx] {
	t.Helper()
	seed := s.Seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	e := &env[Tx]{
		T: t, Store: s.Open(t), features: s.Features, ctx: t.Context(),
		rng: rand.New(rand.NewPCG(seed, 0)), patience: s.patience(), rounds: s.rounds(), //nolint:gosec // to be repeatable
	}
	if err := e.fault(s.Features); err != nil {
		t.Fatalf("%v", err)
	}
	e.models = e.of("Amounts Entries Keys Values")
	e.version.Store(time.Now().UnixMilli())
	return e
}

func lines(rows []string) string {
	const most = 30
	if len(rows) == 0 {
		return "  (none)"
	}
	if len(rows) > most {
		rows = append(slices.Clone(rows[:most]), fmt.Sprintf("and %d more", len(rows)-most))
	}
	return "  " + strings.Join(rows, "\n  ")
}
