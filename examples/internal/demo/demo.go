// Package demo shows what an example's projection survives: that it is killed in the
// middle of a burst of writes, and that the source's history is lost while it is stopped.
// In the end the model is compared with the source. It starts the servers and the
// example's commands, and leaves nothing behind.
package demo

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	existing = 500  // writes before the projection starts for the first time
	burst    = 1000 // writes
	unmet    = 200  // of them that the projection must not have committed when it is killed
	attempts = 10   // to kill it at such a moment
	missed   = 300  // writes of which the source loses the history

	levelTimeout = 60 * time.Second
)

// Demo is an example and its model.
//
// The example has two commands: its own, in examples/Example, with the flags -database
// where there is a choice, -sink, and for Elasticsearch -prefix; and a generator in the folder generate there, with
// the flags -database, -create (the collection, and nothing else), -writes and -seed. A
// write of the generator's is one change of the collection.
type Demo struct {
	Example    string
	Projection string
	Collection string   // what the generator writes to
	Sinks      []string // where the model can be: postgres, mongodb, elasticsearch; the first is the default

	// Compare puts the model beside the source, when the projection is level and stopped.
	Compare func(context.Context, *World) error
	// Equal is what has been shown then, for the last line.
	Equal string
}

// Main runs a demo as a command, and ends the process.
func Main(d Demo) {
	sink := flag.String("sink", d.Sinks[0], "where the projection keeps its model: "+strings.Join(d.Sinks, " or "))
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := d.run(ctx, os.Stdout, *sink)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
	fmt.Println("demo:", d.Equal)
}

func (d Demo) run(ctx context.Context, out io.Writer, sink string) (err error) {
	if !slices.Contains(d.Sinks, sink) {
		return fmt.Errorf("there is no sink %q, but %s", sink, strings.Join(d.Sinks, " and "))
	}
	w := &World{demo: d, out: out, sinkName: sink}
	defer func() {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		err = errors.Join(err, w.close())
	}()
	for _, step := range []func(context.Context) error{
		w.startServers, w.build, w.firstLoad, w.killInBursts, w.loseHistory, w.stopProjection,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return d.Compare(ctx, w)
}

// firstLoad starts the projection where there are documents already.
func (w *World) firstLoad(ctx context.Context) error {
	if _, err := output(w.program(ctx, "generate", "-create")); err != nil {
		return err
	}
	if err := w.generate(ctx, existing, 0); err != nil {
		return err
	}
	documents, err := w.Source.Collection(w.demo.Collection).EstimatedDocumentCount(ctx)
	if err != nil {
		return err
	}
	if err := w.startProjection(ctx); err != nil {
		return err
	}
	w.say("first load: the model is made of the %d documents that were there before it", documents)
	return nil
}

// killInBursts kills the projection in the middle of a burst, and starts it again.
func (w *World) killInBursts(ctx context.Context) error {
	for attempt := 1; attempt <= attempts; attempt++ {
		hit, err := w.killInBurst(ctx, attempt)
		if err != nil {
			return err
		}
		if err := w.startProjection(ctx); err != nil {
			return err
		}
		if err := w.level(ctx); err != nil || hit {
			return err
		}
	}
	return fmt.Errorf("in %d bursts the projection was never killed with a batch committed and %d writes not; nothing is shown by that", attempts, unmet)
}

// killInBurst lets the generator write a burst, kills the projection in the middle of
// it, and reports how far each had come; true if that was a moment worth showing.
func (w *World) killInBurst(ctx context.Context, attempt int) (bool, error) {
	before, err := w.sink.glance(ctx)
	if err != nil {
		return false, err
	}
	stream, err := w.watch(ctx, before.Position)
	if err != nil {
		return false, err
	}
	defer func() { _ = stream.Close(context.WithoutCancel(ctx)) }()
	burstEnd, err := w.generating(ctx, burst, attempt)
	if err != nil {
		return false, err
	}
	changes, err := w.read(ctx, stream, burst*2/5)
	if err == nil {
		err = w.committedSince(ctx, before.Sequence)
	}
	err = errors.Join(err, w.killProjection())
	killedAt, timeErr := w.sourceTime(ctx)
	// Under the lock of commits: one that was under way has happened or never will.
	after, loadErr := w.sink.Load(ctx, w.demo.Projection, before.Generation)
	if err := errors.Join(err, timeErr, loadErr, burstEnd()); err != nil {
		return false, err
	}
	rest, err := w.read(ctx, stream, burst-len(changes))
	if err != nil {
		return false, err
	}
	changes = append(changes, rest...)
	w.last = changes[burst-1]
	committed, written := 0, 0
	for _, c := range changes {
		if c.token <= tokenText(after.Position.Token) {
			committed++
		}
		if !c.time.After(killedAt) {
			written++
		}
	}
	hit := committed > 0 && burst-committed >= unmet
	w.say("burst %d: projection killed (SIGKILL): %d of %d writes were committed, in %d commits; %d were not (%d of them in MongoDB already, %d written after the kill)",
		attempt, committed, burst, after.Sequence-before.Sequence, burst-committed, written-committed, burst-written)
	if !hit {
		w.say("burst %d: that missed the window (at least 1 committed, at least %d not); another burst", attempt, unmet)
	}
	return hit, nil
}

// loseHistory stops the projection for longer than the source's oplog lasts.
func (w *World) loseHistory(ctx context.Context) error {
	if w.servers.own == nil {
		w.say("history is lost on purpose only on a MongoDB that the demo has started itself: that step is left out")
		return nil
	}
	if err := w.stopProjection(ctx); err != nil {
		return err
	}
	before, err := w.sink.glance(ctx)
	if err != nil {
		return err
	}
	if err := w.generate(ctx, missed, attempts+1); err != nil {
		return err
	}
	if err := w.rollOplog(ctx); err != nil {
		return err
	}
	w.say("MongoDB's oplog has rolled over: nothing tells of these writes any more")
	if err := w.startProjection(ctx); err != nil {
		return err
	}
	err = until(ctx, 10*time.Millisecond, levelTimeout, func() (bool, error) {
		now, err := w.sink.glance(ctx)
		return now.Generation > before.Generation, err
	})
	if err != nil {
		return w.withLog(fmt.Errorf("the model is not rebuilt: %w", err))
	}
	said := w.logged("history lost: ", ";")
	if said == "" {
		return w.withLog(errors.New("the projection does not say that history was lost"))
	}
	w.say("projection says: %s", said)
	w.say("projection has rebuilt the model from the documents: generation %d, was %d", before.Generation+1, before.Generation)
	return w.level(ctx)
}

// Equal prints columns of numbers beside those of the source, the last column, and tells
// where they differ. Of many rows it prints some.
func (w *World) Equal(key string, names []string, columns ...map[string]int64) error {
	source := columns[len(columns)-1]
	all := map[string]int64{}
	for _, c := range columns {
		maps.Copy(all, c)
	}
	table := w.table()
	fmt.Fprintf(table, "%s\t%s\t\n", key, strings.Join(names, "\t"))
	var differs []error
	for i, k := range slices.Sorted(maps.Keys(all)) {
		line := k + "\t"
		for j, c := range columns {
			line += fmt.Sprint(c[k], "\t")
			if _, ok := c[k]; !ok || c[k] != source[k] {
				differs = append(differs, fmt.Errorf("%s %s: %s has %d, the source %d", key, k, names[j], c[k], source[k]))
			}
		}
		switch edge := len(all) - shown/2; {
		case len(all) <= shown || i < shown/2 || i >= edge:
			fmt.Fprintln(table, line)
		case i == edge-1:
			fmt.Fprintf(table, "(%d more)\t%s\n", edge-shown/2, strings.Repeat("\t", len(columns)))
		}
	}
	_ = table.Flush()
	if len(source) == 0 {
		differs = append(differs, errors.New("the source is empty"))
	}
	return errors.Join(differs...)
}

// shown is how many rows Equal prints at most.
const shown = 10
