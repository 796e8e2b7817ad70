package fault_test

import (
	"testing"

	"github.com/tidemark-go/tidemark/internal/fault"
)

type target struct{ switches *fault.Switches }

func TestSwitchesOfOneTargetLeaveOthersAlone(t *testing.T) {
	fault.Register(func(into *target, switches *fault.Switches) { into.switches = switches })
	var broken, sound target
	fault.Install(new(fault.Switches), &broken)

	var reached []fault.Point
	broken.switches.OnReach(func(point fault.Point) { reached = append(reached, point) })
	restore := broken.switches.Disable(fault.FenceTerm)

	for _, each := range []target{broken, sound} {
		each.switches.Reach(fault.CommitSend)
	}
	if len(reached) != 1 || reached[0] != fault.CommitSend {
		t.Errorf("reached %v, want one commit.send", reached)
	}
	if !broken.switches.Off(fault.FenceTerm) || broken.switches.Off(fault.FenceSequence) || sound.switches.Off(fault.FenceTerm) {
		t.Error("other guards are off than the one disabled")
	}

	restore()
	if broken.switches.Off(fault.FenceTerm) {
		t.Error("the guard is still off once restored")
	}
}
