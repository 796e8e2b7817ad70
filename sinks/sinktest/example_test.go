package sinktest_test

import (
	"context"
	"fmt"
	"time"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// A sink's author runs all checks in a test, by sinktest.Run. Here they run one by
// one, without a test. The sink is this package's reference, which is in memory.
func Example() {
	// It has transactions, and its targets can add.
	features := sinktest.Features{Transactions: true, LoadWaits: true, Adds: true}
	s := sinktest.Subject[*memoryTx]{
		Features: features,
		// Each check gets an empty store.
		Open: func(t sinktest.T) sinktest.Store[*memoryTx] {
			m := newMemory("", features)
			t.Cleanup(m.close)
			documents := memoryTable[sinktest.Document]{name: "documents", form: projector.FormMirror}
			counts := memoryTable[sinktest.Count]{name: "counts", form: projector.FormRollup, key: countKey, plus: plusCount}
			return sinktest.Store[*memoryTx]{
				// As many instances on the store as the check likes.
				Sink: func(sinktest.T) projector.Sink[*memoryTx] { return m.open() },
				// The targets, each with a function that reads its rows.
				Documents: documents.putting(m),
				Counts:    counts.adding(m),
				// The place that a reader of the model reads now.
				Live: m.livePlace,
				// The stored bytes of a checkpoint, around the sink.
				Checkpoint:    m.checkpoint,
				SetCheckpoint: m.setCheckpoint,
				// What the sink refuses for its content.
				Refused: refusals(),
			}
		},
		Rounds:   10,
		Patience: time.Second, // it is in memory
	}
	for _, c := range sinktest.Checks(s) {
		for _, fault := range c.Faults(context.Background()) {
			fmt.Printf("%s: %s\n", c.Name, fault)
		}
	}
	fmt.Println("done")
	// Output: done
}
