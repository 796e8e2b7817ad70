package mongodb_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

const victimVariable = "TIDEMARK_TEST_VICTIM"

// victim is another process that stops in the middle of a commit, its transaction
// open on the server, to be killed there. It never returns.
func victim(where string) {
	uri, name, _ := strings.Cut(where, " ")
	check := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	client, err := connect(uri)
	check(err)
	sink := mongodb.New(client.Database(name))
	cp, err := acquire(context.Background(), sink, "victim")
	check(err)
	fault.Global.OnReach(func(p fault.Point) {
		if p == fault.CommitSend {
			fmt.Println("open")
			select {}
		}
	})
	check(sink.Commit(context.Background(), cp, following(cp), inc("victim")))
	os.Exit(1)
}

// killed starts a victim and kills it, its transaction open.
func (d *database) killed(t *testing.T) {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), victimVariable+"="+d.uri+" "+d.Name())
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	said, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	equal(t, "the victim", said, "open\n")
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
}

// A client that is killed inside its transaction leaves the checkpoint locked for as
// long as the server lets transactions live.
func TestKilledOwner(t *testing.T) {
	d := newDatabase(t)
	d.killed(t)
	began := time.Now()
	cp, err := acquire(t.Context(), d.sink, "next")
	must(t, err)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the takeover took %s", took)
	}
	equal(t, "term", cp.Term, 2)
	equal(t, "sequence", cp.Sequence, 0)
	cp, err = commit(t, d.sink, cp, inc("next"))
	must(t, err)
	equal(t, "rows", d.rows(t, "numbers"), `{"_id":"next","n":1}`)
}

// The control: nothing else frees the checkpoint in that time. The suite's check finds it, too.
func TestKilledOwnerControl(t *testing.T) {
	d := newDatabase(t)
	d.killed(t)
	t.Run("without", func(t *testing.T) {
		disable(t, fault.EndBlockers)
		t.Run("killed", func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
			defer cancel()
			_, err := acquire(ctx, d.sink, "next")
			wantError(t, err, "take the term")
			wantClass(t, d.sink, err, projector.Transient)
		})
		t.Run("frozen", func(t *testing.T) {
			t.Parallel()
			notices(t, fault.EndBlockers, "frozen/process")
		})
	})
	_, err := acquire(t.Context(), d.sink, "next") // or the test's database can't be dropped
	must(t, err)
}

// frozen starts a commit that stops before it sends its last statement, and gives what
// wakes it up and returns its error.
func frozen(t *testing.T, s *mongodb.Sink, prev projector.Checkpoint, at fault.Point, f func(context.Context, *mongodb.Tx) error) (wake func() error) {
	t.Helper()
	return frozenCall(t, at, func(ctx context.Context) error { return s.Commit(ctx, prev, following(prev), f) })
}

// frozenCall is the same for any call.
func frozenCall(t *testing.T, at fault.Point, f func(context.Context) error) (wake func() error) {
	t.Helper()
	stopped, woken, result := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var once sync.Once
	fault.Global.OnReach(func(p fault.Point) {
		if p == at {
			once.Do(func() {
				close(stopped)
				<-woken
			})
		}
	})
	go func() { result <- f(context.WithoutCancel(t.Context())) }()
	<-stopped
	fault.Global.OnReach(nil)
	return func() error {
		close(woken)
		return <-result
	}
}

func TestFrozenOwnerWritesNothing(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	standby := d.other(t)
	for _, same := range []bool{false, true} {
		sink := standby
		if same { // one process that takes its own term again
			sink = d.sink
		}
		wake := frozen(t, d.sink, cp, fault.CommitSend, inc("frozen"))
		taken, err := acquire(t.Context(), sink, "standby")
		must(t, err)
		equal(t, "term", taken.Term, cp.Term+1)
		equal(t, "sequence", taken.Sequence, cp.Sequence)
		next, err := commit(t, sink, taken, inc("standby"))
		must(t, err)
		err = wake()
		wantError(t, err, "commit")
		wantClass(t, d.sink, err, projector.Transient)
		stored, err := d.sink.Load(t.Context(), model, 1)
		must(t, err)
		equal(t, "term", stored.Term, taken.Term)
		equal(t, "sequence", stored.Sequence, next.Sequence)
		_, err = commit(t, d.sink, cp, inc("frozen"))
		wantFenced(t, err)
		cp, err = acquire(t.Context(), d.sink, "test")
		must(t, err)
	}
	equal(t, "rows", d.rows(t, "numbers"), `{"_id":"standby","n":2}`)
}

// A late first attempt: a commit of which nothing was heard is under way when the
// checkpoint is read back. What Load says stays true.
func TestLateAttemptAfterLoad(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	wake := frozen(t, d.sink, cp, fault.CommitSend, inc("a"))
	stored, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "sequence", stored.Sequence, cp.Sequence)
	wantError(t, wake())
	next, err := commit(t, d.sink, cp, inc("a")) // in the same session, which was killed
	must(t, err)
	equal(t, "rows", d.rows(t, "numbers"), `{"_id":"a","n":1}`)

	// One that was carried out, of which the answer has not come yet.
	wake = frozen(t, d.sink, next, fault.CommitAnswer, inc("a"))
	stored, err = d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "sequence", stored.Sequence, next.Sequence+1)
	must(t, wake())
}

func TestConcurrentAcquire(t *testing.T) {
	d := newDatabase(t)
	sinks := []*mongodb.Sink{d.sink, d.other(t), d.other(t)}
	var wg sync.WaitGroup
	terms := make([]int64, 10)
	for i := range terms {
		wg.Go(func() {
			cp, err := acquire(t.Context(), sinks[i%len(sinks)], fmt.Sprint("owner ", i))
			if err != nil {
				t.Error(err)
			}
			terms[i] = cp.Term
		})
	}
	wg.Wait()
	slices.Sort(terms)
	for i, term := range terms {
		equal(t, "term", term, int64(i)+1)
	}
	now, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	equal(t, "term", now.Term, 10)
}

// An owner that commits without a pause does not keep others out.
func TestTakeoverFromBusyOwner(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	standby := d.other(t)
	ended := make(chan error, 1)
	go func() {
		for {
			next := following(cp)
			err := d.sink.Commit(t.Context(), cp, next, inc("a"))
			if errors.Is(err, projector.ErrFenced) {
				ended <- nil
				return
			}
			if err != nil && d.sink.Classify(err) != projector.Transient {
				ended <- err
				return
			}
			if err == nil {
				cp = next
			} else if now, err := d.sink.Load(t.Context(), model, 1); err == nil && now.Term == cp.Term {
				cp = now
			}
		}
	}()
	time.Sleep(50 * time.Millisecond) // into the middle of it
	began := time.Now()
	taken, err := acquire(t.Context(), standby, "standby")
	must(t, err)
	must(t, <-ended)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the takeover took %s", took)
	}
	equal(t, "rows", d.rows(t, "numbers"), fmt.Sprintf(`{"_id":"a","n":%d}`, taken.Sequence-1))
}

func TestRefusedCheckpointIsLeftAlone(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	coll := d.Collection("tidemark.checkpoints")
	good := d.stored(t)
	for name, set := range map[string]bson.D{
		"garbage":    {{Key: "body", Value: "{oops"}},
		"no string":  {{Key: "body", Value: 7}},
		"newer":      {{Key: "body", Value: `{"format": 99}`}},
		"other name": {{Key: "body", Value: strings.Replace(good.Lookup("body").StringValue(), `"projection":"model"`, `"projection":"x"`, 1)}},
		"term":       {{Key: "term", Value: "one"}},
		"sequence":   {{Key: "sequence", Value: nil}},
	} {
		_, err := coll.UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: set}})
		must(t, err)
		before := d.stored(t)
		_, err = acquire(t.Context(), d.sink, "test")
		if _, ok := errors.AsType[*projector.CheckpointError](err); !ok {
			if _, ok := errors.AsType[*projector.FormatError](err); !ok {
				t.Errorf("%s: %v", name, err)
			}
		}
		wantClass(t, d.sink, err, projector.Fatal)
		equal(t, name, d.stored(t).String(), before.String())
		_, err = d.sink.Load(t.Context(), model, 1)
		wantClass(t, d.sink, err, projector.Fatal)
		equal(t, name, d.stored(t).Lookup("body").String(), before.Lookup("body").String())
		_, err = coll.ReplaceOne(t.Context(), bson.D{}, good)
		must(t, err)
	}
	// Restored by hand, with doubles.
	_, err := coll.UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "term", Value: 7.0}, {Key: "sequence", Value: 9.0}}}})
	must(t, err)
	cp, err = acquire(t.Context(), d.sink, "test")
	must(t, err)
	equal(t, "term", cp.Term, 8)
	_, err = commit(t, d.sink, cp)
	must(t, err)
}

func TestCheckpointIsKeptByteForByte(t *testing.T) {
	d := newDatabase(t)
	cp, err := acquire(t.Context(), d.sink, "ada")
	must(t, err)
	equal(t, "first", fmt.Sprintln(cp.Term, cp.Sequence, cp.Owner, cp.Projection, cp.Format, cp.Generation, cp.Place, cp.Phase), "1 0 ada model 1 1 model live\n")
	next := following(cp)
	token, err := bson.Marshal(bson.D{{Key: "_data", Value: "82\u00e9\x00"}, {Key: "d", Value: 0.1}})
	must(t, err)
	next.Position.Token = token
	next.Samples = []projector.Sample{{Collection: "x", Key: projector.StoredKey(value(t, "\u2028<&>")), Document: -1}}
	next.CommittedAt = time.UnixMilli(1_700_000_000_123).UTC()
	must(t, d.sink.Commit(t.Context(), cp, next, all()))
	want, err := next.Encode()
	must(t, err)
	equal(t, "body", d.stored(t).Lookup("body").StringValue(), string(want))
	for _, read := range []func() (projector.Checkpoint, error){
		func() (projector.Checkpoint, error) { return d.sink.Load(t.Context(), model, 1) },
		func() (projector.Checkpoint, error) { return acquire(t.Context(), d.other(t), "bob") },
	} {
		got, err := read()
		must(t, err)
		b, err := got.Encode()
		must(t, err)
		equal(t, "round trip", string(b), string(want))
		equal(t, "sequence", got.Sequence, 1)
	}
	live, err := mongodb.Live(t.Context(), d.Database, model, "counts")
	must(t, err)
	equal(t, "live", live.Name(), "model.counts")
	_, err = mongodb.Live(t.Context(), d.Database, "nobody", "counts")
	wantError(t, err, "no model of projection")
	unknown, err := d.sink.Load(t.Context(), "nobody", 1)
	must(t, err)
	equal(t, "term", unknown.Term, 0)
	_, err = d.sink.Acquire(t.Context(), "tidemark", "test")
	wantError(t, err, "choose another name")
	wantClass(t, d.sink, err, projector.Fatal)
}
