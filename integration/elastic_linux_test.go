package integration_test

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// frozenProcess has a process stopped by SIGSTOP when it comes to a point, for longer than
// another one needs to take over and to change and delete the same documents, and continued.
func frozenProcess(t *testing.T, point fault.Point, without ...fault.Guard) (c *kept, next *running, process *child) {
	c = keep(t, inElasticsearch, keeping{})
	_, path := newPage(t)
	setup := childSetup{
		MongoDB: c.uri, Database: c.db.Name(), Page: path,
		Point: point, Freeze: filepath.Join(t.TempDir(), "freeze"), Without: without,
	}
	setup.keeps(inElasticsearch, c.model, c.sinkURI)
	process = startChild(t, "ledger", setup)
	c.committed(process, 1)
	c.step(100)
	if diff := c.caughtUp(process); diff != "" {
		t.Fatalf("the index differs from the source (-source +index):\n%s", diff)
	}
	must(t, os.WriteFile(setup.Freeze, nil, 0o600))
	everyOrder := func() { // in one commit, as it is one transaction
		must(t, inTransaction(t.Context(), c.db, func(ctx context.Context) error {
			_, err := c.writer.orders.UpdateMany(ctx, bson.D{}, add("amount", 1000))
			return err
		}))
	}
	everyOrder()
	until(t, time.Minute, "the process has stopped", process.stopped)

	next = c.start(projector.Options{})
	everyOrder()
	_, err := c.writer.orders.DeleteMany(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$mod", Value: bson.A{3, 0}}}}})
	must(t, err)
	c.step(100)
	c.exact(next)
	if len(without) > 0 { // it stops again after that commit, or the rest of its stream would mend the harm
		must(t, os.WriteFile(setup.Freeze, nil, 0o600))
	}
	must(t, process.Process.Signal(syscall.SIGCONT))
	return c, next, process
}

// A whole process is stopped before it sends its documents, and before it sends its
// checkpoint. When it is continued it ends, and the index is as it was.
func TestElasticFrozenProcess(t *testing.T) {
	t.Parallel()
	points := []fault.Point{fault.HandlerEnd, fault.CommitSend}
	if effort.Rounds(2) < 2 {
		points = []fault.Point{points[rand.IntN(2)]}
	}
	for _, point := range points {
		t.Run(string(point), func(t *testing.T) {
			c, next, process := frozenProcess(t, point)
			if out := process.end(t, time.Minute); !strings.Contains(out, "FENCED by term 2") || !process.ProcessState.Success() {
				t.Errorf("the stopped process ended by %s:\n%s", process.ProcessState, out)
			}
			c.exact(next)
			next.stop()
		})
	}
	// Without a look at the checkpoint, and without versions, what it sends does harm.
	t.Run("control", func(t *testing.T) {
		c, next, _ := frozenProcess(t, fault.HandlerEnd, fault.FenceTerm, fault.FenceSequence, fault.RowVersion)
		until(t, 30*time.Second, "the index is wrong", func() bool { return c.compare() != "" })
		next.stop()
	})
}
