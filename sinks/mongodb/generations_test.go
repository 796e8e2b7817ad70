package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// begun is a live generation with rows in counts, and a second one beside it.
func (d *database) begun(t *testing.T) (live, shadow projector.Checkpoint) {
	t.Helper()
	live = d.acquired(t, counts.Create, add(counts, nil, []count{{"old", 1}}))
	shadow, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	shadow, err = commit(t, d.sink, shadow, counts.Create, add(counts, nil, []count{{"new", 1}}))
	must(t, err)
	return live, shadow
}

// switched is what d.sink.Switch stores.
func (d *database) switched(t *testing.T, from, to projector.Checkpoint) (live, retired projector.Checkpoint) {
	t.Helper()
	must(t, d.sink.Switch(t.Context(), from, to))
	return d.load(t, to.Generation), d.load(t, from.Generation)
}

func (d *database) load(t *testing.T, generation int64) projector.Checkpoint {
	t.Helper()
	cp, err := d.sink.Load(t.Context(), model, generation)
	must(t, err)
	return cp
}

func (d *database) live(t *testing.T) string {
	t.Helper()
	coll, err := mongodb.Live(t.Context(), d.Database, model, "counts")
	must(t, err)
	return coll.Name()
}

func (d *database) names(t *testing.T) string {
	t.Helper()
	names, err := d.ListCollectionNames(t.Context(), bson.D{})
	must(t, err)
	slices.Sort(names)
	return strings.Join(names, " ")
}

func brief(cps ...projector.Checkpoint) string {
	var b strings.Builder
	for _, c := range cps {
		fmt.Fprintf(&b, "%d %s %s term %d seq %d %s\n", c.Generation, c.Place, c.Phase, c.Term, c.Sequence, c.Owner)
	}
	return b.String()
}

func TestGenerations(t *testing.T) {
	d := newDatabase(t)
	live, shadow := d.begun(t)
	equal(t, "begun", brief(live, shadow), "1 model live term 1 seq 1 test\n2 model.g2 building term 1 seq 1 test\n")
	again, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	equal(t, "begun again", brief(again), brief(shadow))
	equal(t, "live", d.live(t), "model.counts")
	// Names like the model's that are not the model's.
	live, err = commit(t, d.sink, live, func(_ context.Context, tx *mongodb.Tx) error {
		for _, name := range []string{"model.outbox", "model.g2.outbox", "model.g22.counts", "modelXg2.counts"} {
			tx.Outside(name).Queue(mongo.NewInsertOneModel().SetDocument(id(1)))
		}
		return nil
	}, inc("implicit"))
	must(t, err)
	now, retired := d.switched(t, live, shadow)
	equal(t, "switched", brief(now, retired), "2 model.g2 live term 1 seq 2 test\n1 model retired term 1 seq 3 test\n")
	equal(t, "live", d.live(t), "model.g2.counts")
	err = d.sink.Discard(t.Context(), now)
	wantError(t, err, "generation 2 of projection \"model\" is live")
	wantClass(t, d.sink, err, projector.Fatal)
	// Both go on, and back again.
	now, err = commit(t, d.sink, now, add(counts, nil, []count{{"new", 1}}))
	must(t, err)
	retired, err = commit(t, d.sink, retired, add(counts, nil, []count{{"old", 1}}))
	must(t, err)
	retired, now = d.switched(t, now, retired)
	equal(t, "live", d.live(t), "model.counts")
	now, retired = d.switched(t, retired, now)
	all, err := d.other(t).Acquire(t.Context(), model, "next")
	must(t, err)
	equal(t, "acquired", brief(all...), "1 model retired term 2 seq 6 next\n2 model.g2 live term 2 seq 5 next\n")
	wantFenced(t, d.sink.Discard(t.Context(), retired))
	_, err = d.sink.Begin(t.Context(), now, 3)
	wantFenced(t, err)
	wantFenced(t, d.sink.Switch(t.Context(), now, retired))

	must(t, d.sink.Discard(t.Context(), all[0]))
	must(t, d.sink.Discard(t.Context(), all[0]))
	equal(t, "loaded", brief(d.load(t, 1)), "1 model live term 0 seq 0 \n")
	equal(t, "collections", d.names(t), "model.g2.counts model.g2.outbox model.g22.counts model.outbox modelXg2.counts tidemark.checkpoints")
	_, err = commit(t, d.sink, all[0])
	wantFenced(t, err)
	// The first number again, since nothing forbids it.
	first, err := d.sink.Begin(t.Context(), all[1], 1)
	must(t, err)
	_, err = commit(t, d.sink, first, counts.Create)
	must(t, err)
	all, err = d.sink.Acquire(t.Context(), model, "last")
	must(t, err)
	equal(t, "acquired", brief(all...), "1 model building term 3 seq 1 last\n2 model.g2 live term 3 seq 5 last\n")
}

// A first load: readers are told that there is nothing yet, and the first generation,
// which never had a model, is gone after the switch.
func TestFirstLoad(t *testing.T) {
	d := newDatabase(t)
	_, err := mongodb.Live(t.Context(), d.Database, model, "counts")
	wantError(t, err, "no model of projection")
	empty, err := acquire(t.Context(), d.sink, "test")
	must(t, err)
	shadow, err := d.sink.Begin(t.Context(), empty, 2)
	must(t, err)
	shadow, err = commit(t, d.sink, shadow, counts.Create)
	must(t, err)
	_, err = mongodb.Live(t.Context(), d.Database, model, "counts")
	if !errors.Is(err, mongodb.ErrNotBuilt) {
		t.Error(err)
	}
	now, gone := d.switched(t, empty, shadow)
	equal(t, "switched", brief(now, gone), "2 model.g2 live term 1 seq 2 test\n1 model live term 0 seq 0 \n")
	equal(t, "live", d.live(t), "model.g2.counts")
	all, err := d.sink.Acquire(t.Context(), model, "next")
	must(t, err)
	equal(t, "acquired", brief(all...), "2 model.g2 live term 2 seq 2 next\n")
}

// An Acquire that found nothing, and inserts the first checkpoint when the projection is
// in its second generation.
func TestLateFirstAcquire(t *testing.T) {
	for _, guarded := range []bool{true, false} {
		d := newDatabase(t)
		if !guarded {
			disable(t, fault.DiscardNote)
		}
		late := d.other(t)
		wake := pausedCall(t, 1, func(ctx context.Context) ([]projector.Checkpoint, error) { return late.Acquire(ctx, model, "late") })
		empty, err := acquire(t.Context(), d.sink, "test")
		must(t, err)
		shadow, err := d.sink.Begin(t.Context(), empty, 2)
		must(t, err)
		shadow, err = commit(t, d.sink, shadow, counts.Create)
		must(t, err)
		must(t, d.sink.Switch(t.Context(), empty, shadow))
		all, err := wake()
		if !guarded {
			if _, err := mongodb.Live(t.Context(), d.Database, model, "counts"); err == nil {
				t.Error("without the note one generation is live")
			}
			continue
		}
		must(t, err)
		equal(t, "acquired", brief(all...), "2 model.g2 live term 2 seq 2 late\n")
		equal(t, "live", d.live(t), "model.g2.counts")
	}
}

// pausedCall runs f until it has passed the nth step of a change of generations, and
// gives what lets it go on and returns what f returns.
func pausedCall[T any](t *testing.T, n int, f func(context.Context) (T, error)) (wake func() (T, error)) {
	t.Helper()
	type result struct {
		v   T
		err error
	}
	stopped, woken, ended := make(chan struct{}), make(chan struct{}), make(chan result, 1)
	var passed atomic.Int64
	fault.Global.OnReach(func(p fault.Point) {
		if p == fault.GenerationStep && passed.Add(1) == int64(n) {
			close(stopped)
			<-woken
		}
	})
	ctx := context.WithoutCancel(t.Context())
	go func() {
		v, err := f(ctx)
		ended <- result{v, err}
	}()
	select {
	case <-stopped:
	case <-time.After(20 * time.Second):
		t.Fatal("it does not come to that step")
	}
	fault.Global.OnReach(nil)
	return func() (T, error) {
		close(woken)
		r := <-ended
		return r.v, r.err
	}
}

func none(err error) (struct{}, error) { return struct{}{}, err }

// A switch is refused by the term, owner and sequence of either side, and then has
// changed nothing; without the comparison it goes through.
func TestSwitchIsFenced(t *testing.T) {
	wrong := map[string]struct {
		guard  fault.Guard
		change func(*projector.Checkpoint)
	}{
		"term":     {fault.FenceTerm, func(c *projector.Checkpoint) { c.Term-- }},
		"owner":    {fault.FenceTerm, func(c *projector.Checkpoint) { c.Owner = "other" }},
		"sequence": {fault.FenceSequence, func(c *projector.Checkpoint) { c.Sequence-- }},
		"raises":   {fault.FenceRaises, func(c *projector.Checkpoint) { c.Sequence++ }},
	}
	for name, w := range wrong {
		for _, side := range []string{"from", "to"} {
			t.Run(name+"/"+side, func(t *testing.T) {
				d := newDatabase(t)
				from, to := d.begun(t)
				from, err := commit(t, d.sink, from)
				must(t, err)
				to, err = commit(t, d.sink, to)
				must(t, err)
				badFrom, badTo := from, to
				if side == "from" {
					w.change(&badFrom)
				} else {
					w.change(&badTo)
				}
				before := brief(d.load(t, 1), d.load(t, 2))
				wantFenced(t, d.sink.Switch(t.Context(), badFrom, badTo))
				equal(t, "stored", brief(d.load(t, 1), d.load(t, 2)), before)
				equal(t, "live", d.live(t), "model.counts")
				disable(t, w.guard)
				if err := d.sink.Switch(t.Context(), badFrom, badTo); err != nil {
					t.Errorf("without %s: %v", w.guard, err)
				}
			})
		}
	}
}

// The commits of two generations have no document in common.
func TestCommitsBesideEachOther(t *testing.T) {
	d := newDatabase(t)
	live, shadow := d.begun(t)
	wake := frozen(t, d.sink, live, fault.CommitSend, add(counts, nil, []count{{"old", 1}}))
	for range 3 {
		var err error
		shadow, err = commit(t, d.sink, shadow, add(counts, nil, []count{{"new", 1}}))
		must(t, err)
	}
	must(t, wake())
	var wg sync.WaitGroup
	live.Sequence++
	for _, cp := range []projector.Checkpoint{live, shadow} {
		wg.Go(func() {
			for range 20 {
				next := following(cp)
				if err := d.sink.Commit(t.Context(), cp, next, add(counts, nil, []count{{"x", 1}})); err != nil {
					t.Error(err)
					return
				}
				cp = next
			}
		})
	}
	wg.Wait()
	equal(t, "rows", d.rows(t, "counts"), `{"_id":{"status":"old"},"contributions":2,"n":2}`+"\n"+`{"_id":{"status":"x"},"contributions":20,"n":20}`)
	equal(t, "rows", d.rows(t, "g2.counts"), `{"_id":{"status":"new"},"contributions":4,"n":4}`+"\n"+`{"_id":{"status":"x"},"contributions":20,"n":20}`)
}

// An owner that is frozen in a commit to either generation, or in a switch, is ended.
func TestFrozenOwnerOfGenerations(t *testing.T) {
	for _, what := range []string{"live", "shadow", "switch"} {
		t.Run(what, func(t *testing.T) {
			d := newDatabase(t)
			live, shadow := d.begun(t)
			var wake func() error
			switch what {
			case "live":
				wake = frozen(t, d.sink, live, fault.CommitSend, inc("a"))
			case "shadow":
				wake = frozen(t, d.sink, shadow, fault.CommitSend, inc("a"))
			default:
				wake = frozenCall(t, fault.CommitSend, func(ctx context.Context) error { return d.sink.Switch(ctx, live, shadow) })
			}
			t.Parallel() // no hook is set any more, and a takeover waits
			began := time.Now()
			all, err := d.other(t).Acquire(t.Context(), model, "next")
			must(t, err)
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the takeover took %s", took)
			}
			equal(t, "acquired", brief(all...), "1 model live term 2 seq 1 next\n2 model.g2 building term 2 seq 1 next\n")
			for _, cp := range all {
				_, err = commit(t, d.other(t), cp, inc("next"))
				must(t, err)
			}
			err = wake()
			wantError(t, err)
			wantClass(t, d.sink, err, projector.Transient)
			equal(t, "live", d.live(t), "model.counts")
			equal(t, "rows", d.rows(t, "numbers")+d.rows(t, "g2.numbers"), `{"_id":"next","n":1}{"_id":"next","n":1}`)
		})
	}
}

// Load of either generation ends what a lost switch of one's own has left open.
func TestLoadAfterLostSwitch(t *testing.T) {
	for _, generation := range []int64{1, 2} {
		d := newDatabase(t)
		live, shadow := d.begun(t)
		wake := frozenCall(t, fault.CommitSend, func(ctx context.Context) error { return d.sink.Switch(ctx, live, shadow) })
		equal(t, "sequence", d.load(t, generation).Sequence, 1)
		wantError(t, wake())
		equal(t, "live", d.live(t), "model.counts")
		must(t, d.sink.Switch(t.Context(), live, shadow))
		equal(t, "live", d.live(t), "model.g2.counts")
	}
}

// Old and new owner, one of them half-way through Acquire: nobody who comes later has a
// term that is not above all.
func TestAcquireHalfWay(t *testing.T) {
	d := newDatabase(t)
	live, shadow := d.begun(t)
	wake := pausedCall(t, 2, func(ctx context.Context) ([]projector.Checkpoint, error) {
		return d.other(t).Acquire(ctx, model, "half")
	})
	// The live one is taken, the other not yet.
	_, err := commit(t, d.sink, live)
	wantFenced(t, err)
	wantFenced(t, d.sink.Switch(t.Context(), live, shadow))
	_, err = d.sink.Begin(t.Context(), live, 3)
	wantFenced(t, err)
	_, err = commit(t, d.sink, shadow, add(counts, nil, []count{{"new", 1}}))
	must(t, err)
	// Another one does not wait for it to go on.
	all, err := d.sink.Acquire(t.Context(), model, "third")
	must(t, err)
	equal(t, "acquired", brief(all...), "1 model live term 3 seq 1 third\n2 model.g2 building term 3 seq 2 third\n")
	half, err := wake()
	must(t, err)
	for _, cp := range half {
		equal(t, "term", cp.Term, 2)
		_, err = commit(t, d.other(t), cp)
		wantFenced(t, err)
	}
	for _, cp := range all {
		_, err := commit(t, d.sink, cp)
		must(t, err)
	}
}

// A generation that begins while Acquire is under way is taken as well.
func TestBeginDuringAcquire(t *testing.T) {
	for _, guarded := range []bool{true, false} {
		d := newDatabase(t)
		if !guarded {
			disable(t, fault.AcquireAll)
		}
		live := d.acquired(t)
		wake := pausedCall(t, 1, func(ctx context.Context) ([]projector.Checkpoint, error) {
			return d.other(t).Acquire(ctx, model, "next")
		})
		shadow, err := d.sink.Begin(t.Context(), live, 2)
		must(t, err)
		all, err := wake()
		must(t, err)
		_, err = commit(t, d.sink, shadow)
		if !guarded {
			if err != nil || len(all) != 1 {
				t.Errorf("without the second look: %s, %v", brief(all...), err)
			}
			continue
		}
		wantFenced(t, err)
		equal(t, "acquired", brief(all...), "1 model live term 2 seq 1 next\n2 model.g2 building term 2 seq 0 next\n")
	}
}

func TestConcurrentAcquireOfGenerations(t *testing.T) {
	d := newDatabase(t)
	d.begun(t)
	var wg sync.WaitGroup
	results := make([][]projector.Checkpoint, 8)
	for i := range results {
		wg.Go(func() {
			all, err := d.other(t).Acquire(t.Context(), model, fmt.Sprint("owner ", i))
			if err != nil {
				t.Error(err)
				return
			}
			results[i] = all
		})
	}
	wg.Wait()
	now, good := []projector.Checkpoint{d.load(t, 1), d.load(t, 2)}, 0
	equal(t, "term", now[0].Term, now[1].Term)
	equal(t, "owner", now[0].Owner, now[1].Owner)
	seen := map[int64]bool{}
	for _, all := range results {
		if seen[all[0].Term] {
			t.Errorf("two have term %d", all[0].Term)
		}
		seen[all[0].Term] = true
		equal(t, "one term", all[0].Term, all[1].Term)
		if brief(all...) == brief(now...) {
			good++
		}
	}
	equal(t, "owners", good, 1)
}

// Wherever Discard ends, the next step of anyone removes the rest.
func TestDiscardCrashes(t *testing.T) {
	for step := 1; step <= 4; step++ {
		for _, then := range []string{"Acquire", "Begin", "Discard"} {
			t.Run(fmt.Sprint(step, " ", then), func(t *testing.T) {
				d := newDatabase(t)
				live, shadow := d.begun(t)
				wake := pausedCall(t, step, func(ctx context.Context) (struct{}, error) { return none(d.sink.Discard(ctx, shadow)) })
				equal(t, "gone", d.load(t, 2).Term, 0)
				_, err := commit(t, d.sink, shadow)
				wantFenced(t, err)
				next := d.other(t)
				want := "model.counts tidemark.checkpoints"
				switch then {
				case "Acquire":
					all, err := next.Acquire(t.Context(), model, "next")
					must(t, err)
					equal(t, "acquired", brief(all...), "1 model live term 2 seq 1 next\n")
				case "Begin":
					again, err := next.Begin(t.Context(), live, 2)
					must(t, err)
					equal(t, "begun", brief(again), "2 model.g2 building term 1 seq 0 test\n")
					_, err = commit(t, next, again, counts.Create, add(counts, nil, []count{{"newer", 1}}))
					must(t, err)
					want = "model.counts model.g2.counts tidemark.checkpoints"
				default:
					must(t, next.Discard(t.Context(), shadow))
				}
				equal(t, "collections", d.names(t), want)
				_, err = wake() // and it does no harm that it goes on
				must(t, err)
				equal(t, "collections", d.names(t), want)
				if then == "Begin" {
					equal(t, "rows", d.rows(t, "g2.counts"), `{"_id":{"status":"newer"},"contributions":1,"n":1}`)
					equal(t, "loaded", d.load(t, 2).Sequence, 1)
				}
			})
		}
	}
}

// The control: by their names it would drop the new generation's collections.
func TestDiscardCrashesControl(t *testing.T) {
	d := newDatabase(t)
	live, shadow := d.begun(t)
	disable(t, fault.DiscardCheck)
	wake := pausedCall(t, 3, func(ctx context.Context) (struct{}, error) { return none(d.sink.Discard(ctx, shadow)) })
	again, err := d.other(t).Begin(t.Context(), live, 2)
	must(t, err)
	_, err = commit(t, d.other(t), again, counts.Create, add(counts, nil, []count{{"newer", 1}}))
	must(t, err)
	_, err = wake()
	must(t, err)
	equal(t, "rows", d.rows(t, "g2.counts"), "")
}

// Discard ends a transaction that holds the generation.
func TestDiscardOfFrozenGeneration(t *testing.T) {
	d := newDatabase(t)
	_, shadow := d.begun(t)
	wake := frozen(t, d.sink, shadow, fault.CommitSend, add(counts, nil, []count{{"new", 1}}))
	began := time.Now()
	must(t, d.sink.Discard(t.Context(), shadow))
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	wantError(t, wake())
	equal(t, "collections", d.names(t), "model.counts tidemark.checkpoints")
}

// Readers that poll see numbers that only grow, across switches to and fro.
func TestReadersThroughSwitches(t *testing.T) {
	d := newDatabase(t)
	live, shadow := d.begun(t)
	bump := func(n int64) func(context.Context, *mongodb.Tx) error {
		return func(ctx context.Context, tx *mongodb.Tx) error {
			_, err := tx.Collection("counts").UpdateOne(ctx, id("n"), bson.D{{Key: "$set", Value: bson.D{{Key: "n", Value: n}}}}, options.UpdateOne().SetUpsert(true))
			return err
		}
	}
	step := func(cp projector.Checkpoint, n int64) projector.Checkpoint {
		next, err := commit(t, d.sink, cp, bump(n))
		must(t, err)
		return next
	}
	live, shadow = step(live, 0), step(shadow, 0)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	plain := func(ctx context.Context) (int64, error) {
		coll, err := mongodb.Live(ctx, d.Database, model, "counts")
		if err != nil {
			return 0, err
		}
		var doc struct{ N int64 }
		err = coll.FindOne(ctx, id("n")).Decode(&doc)
		return doc.N, err
	}
	together := func(ctx context.Context) (n int64, err error) {
		err = d.Client().UseSession(ctx, func(ctx context.Context) error {
			sess := mongo.SessionFromContext(ctx)
			if err := sess.StartTransaction(options.Transaction().SetReadConcern(readconcern.Snapshot())); err != nil {
				return err
			}
			if n, err = plain(ctx); err != nil {
				return err
			}
			return sess.CommitTransaction(ctx)
		})
		return n, err
	}
	var wg sync.WaitGroup
	for name, read := range map[string]func(context.Context) (int64, error){"plain": plain, "in a transaction": together} {
		wg.Go(func() {
			last, reads := int64(0), 0
			for ctx.Err() == nil {
				n, err := read(context.WithoutCancel(ctx))
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				if n < last {
					t.Errorf("%s: from %d back to %d", name, last, n)
					return
				}
				last = n
				reads++
			}
			t.Logf("%s: %d reads, up to %d", name, reads, last)
		})
	}
	for n := int64(2); n <= 40; n += 2 {
		live, shadow = step(live, n-1), step(shadow, n) // the new one is ahead, as it may be
		live, shadow = d.switched(t, live, shadow)
	}
	stop()
	wg.Wait()
}

func TestObstacles(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, counts.Create, add(counts, nil, []count{{"old", 1}}))
	must(t, d.CreateView(t.Context(), "report", "model.counts", mongo.Pipeline{}))
	must(t, d.CreateView(t.Context(), "joined", "other", mongo.Pipeline{{{Key: "$lookup", Value: bson.D{
		{Key: "from", Value: "model.counts"}, {Key: "localField", Value: "x"}, {Key: "foreignField", Value: "_id"}, {Key: "as", Value: "y"},
	}}}}))
	must(t, d.CreateView(t.Context(), "harmless", "other", mongo.Pipeline{}))
	_, err := d.Collection("model.g2.archive").InsertOne(t.Context(), id(1))
	must(t, err)
	_, err = d.sink.Begin(t.Context(), live, 2)
	if _, ok := errors.AsType[*projector.RebuildError](err); !ok {
		t.Errorf("no RebuildError: %v", err)
	}
	wantError(t, err, `view "report" reads collection "model.counts"`, `view "joined" reads`, `collection "model.g2.archive" has documents`)
	if strings.Contains(err.Error(), "harmless") {
		t.Error(err)
	}
	for _, name := range []string{"report", "joined", "model.g2.archive"} {
		must(t, d.Collection(name).Drop(t.Context()))
	}
	_, err = d.sink.Begin(t.Context(), live, 2)
	must(t, err)
}

// What was added to the live collection by hand is there after a switch.
func TestNewGenerationInherits(t *testing.T) {
	d := newDatabase(t)
	live := d.acquired(t, lines.Create, counts.Create)
	validator := bson.D{{Key: "price", Value: bson.D{{Key: "$gte", Value: int32(0)}}}}
	must(t, d.RunCommand(t.Context(), bson.D{{Key: "collMod", Value: "model.lines"}, {Key: "validator", Value: validator}, {Key: "validationAction", Value: "warn"}}).Err())
	_, err := d.Collection("model.lines").Indexes().CreateMany(t.Context(), []mongo.IndexModel{
		{Keys: bson.D{{Key: "price", Value: -1}}, Options: options.Index().SetName("dear").SetSparse(true)},
		{Keys: bson.D{{Key: "_id.sku", Value: "hashed"}}},
	})
	must(t, err)
	shadow, err := d.sink.Begin(t.Context(), live, 2)
	must(t, err)
	_, err = commit(t, d.sink, shadow, lines.Create, counts.Create)
	must(t, err)
	indexes := func(name string) string {
		specs, err := d.Collection(name).Indexes().ListSpecifications(t.Context())
		must(t, err)
		var all []string
		for _, s := range specs {
			all = append(all, fmt.Sprint(s.Name, s.KeysDocument, s.Sparse != nil && *s.Sparse))
		}
		slices.Sort(all)
		return strings.Join(all, "\n")
	}
	equal(t, "indexes", indexes("model.g2.lines"), indexes("model.lines"))
	specs, err := d.ListCollectionSpecifications(t.Context(), bson.D{{Key: "name", Value: "model.g2.lines"}})
	must(t, err)
	equal(t, "options", specs[0].Options.String(), `{"validator": {"price": {"$gte": {"$numberInt":"0"}}},"validationLevel": "strict","validationAction": "warn"}`)
}
