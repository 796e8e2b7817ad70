// Package fault is where this module's own tests reach into running code.
//
// Points are named places at which a test may pause, kill or count. Guards are checks
// that a test switches off to prove that it would notice their absence. A test sets
// both in the Switches of one Runner or one sink, so that tests don't disturb each
// other. They are set from Go code of this module only, never from the environment, so
// that a production process has no way to switch a guard off.
package fault

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
)

// Switches are the faults that a test wants in one Runner or sink. The zero value and
// nil mean none: every guard is on, and nobody is told of points. They may be changed
// while the code runs.
type Switches struct {
	disabled atomic.Pointer[[]Guard]
	onReach  atomic.Pointer[func(Point)]
}

// Off reports whether a test has switched the guard off.
func (s *Switches) Off(guard Guard) bool {
	if s == nil {
		return false
	}

	disabled := s.disabled.Load()
	return disabled != nil && slices.Contains(*disabled, guard)
}

// Reach tells the test that the code has come to a point. The test's function runs on
// the calling goroutine.
func (s *Switches) Reach(point Point) {
	if s == nil {
		return
	}

	if tell := s.onReach.Load(); tell != nil {
		(*tell)(point)
	}
}

// OnReach sets the function that Reach calls; nil for none.
func (s *Switches) OnReach(tell func(Point)) {
	if tell == nil {
		s.onReach.Store(nil)
		return
	}
	s.onReach.Store(&tell)
}

// Disable switches guards off until the returned function is called.
func (s *Switches) Disable(guards ...Guard) (restore func()) {
	before := s.disabled.Load()
	all := slices.Clone(guards)
	if before != nil {
		all = append(all, *before...)
	}

	s.disabled.Store(&all)
	return func() { s.disabled.Store(before) }
}

// installers has, by type, how Switches are put into a Runner or a sink. The packages of
// these types fill it in their init functions, so that nothing of it shows in their API.
var installers sync.Map // reflect.Type → func(any, *Switches)

// Register says how Switches are put into a T.
func Register[T any](install func(T, *Switches)) {
	installers.Store(reflect.TypeFor[T](), func(target any, switches *Switches) {
		install(target.(T), switches)
	})
}

// Install puts the switches into Runners and sinks, before these are used.
func Install(switches *Switches, targets ...any) {
	for _, target := range targets {
		install, ok := installers.Load(reflect.TypeOf(target))
		if !ok {
			panic(fmt.Sprintf("fault: nothing is registered for %T", target))
		}
		install.(func(any, *Switches))(target, switches)
	}
}

// Global is for tests that don't install switches of their own yet.
var Global = new(Switches)
