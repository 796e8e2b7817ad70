package mongodb_test

import (
	"context"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// after is a sink whose client calls f when a command of this name has been answered, the
// first time.
func (d *database) after(t *testing.T, command string, f func()) *mongodb.Sink {
	t.Helper()
	var done atomic.Bool
	client, err := mongo.Connect(options.Client().ApplyURI(d.uri).SetMonitor(&event.CommandMonitor{
		Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
			if e.CommandName == command && !done.Swap(true) {
				f()
			}
		},
	}))
	must(t, err)
	t.Cleanup(func() { must(t, client.Disconnect(context.Background())) })
	return mongodb.New(client.Database(d.Name()))
}

// A switch, and a Discard as well, after Load has found which generation is live.
func TestLoadOfLiveDuringSwitch(t *testing.T) {
	for _, discarded := range []bool{false, true} {
		d := newDatabase(t)
		live, shadow := d.begun(t)
		s := d.after(t, "find", func() {
			now, retired := d.switched(t, live, shadow)
			if discarded {
				must(t, d.sink.Discard(t.Context(), retired))
			}
			_, err := commit(t, d.sink, now)
			must(t, err)
		})
		cp, err := s.Load(t.Context(), model, 0)
		must(t, err)
		equal(t, "loaded", brief(cp), "2 model.g2 live term 1 seq 3 test\n")
		equal(t, "phase", cp.Phase, projector.Live)
	}
}
