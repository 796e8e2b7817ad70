package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

func init() {
	roles["kill"] = func(ctx context.Context) error { return inChild(runOrders(ctx)) }
	roles["ledger"] = func(ctx context.Context) error { return inChild(runLedger(ctx)) }
}

// runOrders is the process that is killed: a Group of the four projections of the
// orders, with nothing added to it but a note of each point that it passes.
func runOrders(ctx context.Context) func(childSetup, *mongo.Database, *pgxpool.Pool) error {
	return func(s childSetup, db *mongo.Database, pool *pgxpool.Pool) error {
		p, unmap, err := openPage(s.Page)
		if err != nil {
			return err
		}
		defer unmap()
		var stages slots
		fault.Global.OnReach(func(at fault.Point) {
			if at == fault.StreamOpen || at == fault.StreamReopens {
				return
			}
			if slot, ok := stages.current(); ok {
				p.note(slot, at)
			}
		})
		ledger, batch := orderLedger(nil), 500
		if s.Outside {
			ledger, batch = orderLedger(func(ctx context.Context, _ *postgres.Tx, sql string, args ...any) error {
				_, err := pool.Exec(ctx, outside(sql), args...)
				return err
			}), 20
		}
		var group projector.Group
		for slot, projection := range []postgres.Projection{orderTotals, orderMirror, orderHandles, ledger} {
			r, err := projector.New(db, postgres.New(pool), projection, projector.Options{
				Start: projector.FromNow(), Logger: stages.logger(slot), BatchChanges: batch,
			})
			if err != nil {
				return err
			}
			group = append(group, r)
		}
		return group.Run(ctx)
	}
}

// runLedger is the process that is killed, or stopped, in every sink: it keeps order_ledger,
// and notes the points that it passes. At Point it stops itself if the file Freeze is there.
func runLedger(ctx context.Context) func(childSetup, *mongo.Database, *pgxpool.Pool) error {
	return func(s childSetup, db *mongo.Database, pool *pgxpool.Pool) error {
		p, unmap, err := openPage(s.Page)
		if err != nil {
			return err
		}
		defer unmap()
		defer fault.Global.Disable(s.Without...)()
		fault.Global.OnReach(func(at fault.Point) {
			if slices.Contains(pagePoints, at) {
				p.note(0, at)
				p.count(at)
			}
			if at != s.Point || s.Freeze == "" || os.Rename(s.Freeze, s.Freeze+" done") != nil {
				return
			}
			stopThread()
		})
		model, err := s.model(pool)
		if err != nil {
			return err
		}
		r, err := model.runner(db, projector.Options{Start: projector.FromNow(), BatchChanges: 500, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
		if err != nil {
			return err
		}
		err = r.Run(ctx)
		if fenced, ok := errors.AsType[*projector.FencedError](err); ok {
			fmt.Printf("FENCED by term %d\n", fenced.Theirs)
			return nil
		}
		return fmt.Errorf("the runner ended with %w", err)
	}
}

// stopThread stops the process by a signal to the calling thread: with another one to take
// it, this one would go on for a moment.
func stopThread() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = syscall.Tgkill(os.Getpid(), syscall.Gettid(), syscall.SIGSTOP)
}

// ledgerSlot is the slot of the projection that the control breaks.
const ledgerSlot = 3

// backlog is how many steps the writer makes before a killed process starts again.
const backlog = 100

// killing is a process under fire, and what goes on around it.
type killing struct {
	t      *testing.T
	db     *mongo.Database
	pool   *pgxpool.Pool
	rng    *rand.Rand
	page   page
	setup  childSetup
	child  *child
	writer *orderWriter
	begin  bson.Timestamp

	writing sync.Mutex // held by the writer for each step
	written atomic.Int64
	failed  atomic.Pointer[error]
	stored  map[string]projector.Checkpoint // the last ones seen
	deaths  map[fault.Point]int
}

func newKilling(t *testing.T, outside bool) *killing {
	t.Helper()
	uri, err := serve.MongoDB(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dsn := postgresDSN(t)
	k := &killing{t: t, db: source(t), pool: poolOn(t, dsn), rng: seeded(t), deaths: map[fault.Point]int{}, stored: map[string]projector.Checkpoint{}}
	createOrders(t, k.db)
	var path string
	k.page, path = newPage(t)
	k.setup = childSetup{MongoDB: uri, Database: k.db.Name(), Postgres: dsn, Page: path, Outside: outside}
	k.writer = newOrderWriter(k.db, rand.New(rand.NewPCG(k.rng.Uint64(), 1)))
	k.begin = operationTime(t, k.db)
	// Every projection has stored where it begins before the first change is made.
	k.start()
	until(t, time.Minute, "the projections begin", func() bool {
		k.child.alive(t)
		found, err := checkpoints(t.Context(), k.pool)
		if err != nil || len(found) < len(orderModels) {
			return false
		}
		for _, c := range found {
			if c.Sequence == 0 {
				return false
			}
		}
		return true
	})
	k.write()
	return k
}

func (k *killing) start() {
	k.page.reset()
	k.child = startChild(k.t, "kill", k.setup)
}

// write keeps changing the source until the test ends.
func (k *killing) write() {
	var ended atomic.Bool // a step is not cut off: its transaction might stay open for a minute, in the way of cleaning up
	var wg sync.WaitGroup
	wg.Go(func() {
		for !ended.Load() {
			k.writing.Lock()
			err := k.writer.step(context.Background())
			k.writing.Unlock()
			k.written.Add(1)
			if err != nil {
				k.failed.Store(&err)
				return
			}
		}
	})
	k.t.Cleanup(func() { ended.Store(true); wg.Wait() })
}

// kill ends the child when the commit stage of a projection has passed the target, and
// then some: at a random moment where there is none. It gives the point that the
// stage had in fact passed last when the process died.
func (k *killing) kill(slot int, target fault.Point) fault.Point {
	k.t.Helper()
	_, began := k.page.last(slot)
	skip := began + uint64(k.rng.IntN(40))
	later := time.Duration(k.rng.Int64N(int64(250 * time.Microsecond)))
	if target == "" {
		later = time.Duration(k.rng.Int64N(int64(200 * time.Millisecond)))
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		at, n := k.page.last(slot)
		if n > skip && (target == "" || at == target) {
			break
		}
		if time.Now().After(deadline) {
			k.child.alive(k.t)
			k.t.Fatalf("no commit of %s to kill in 30 s; the last point was %q", orderModels[slot], at)
		}
		time.Sleep(20 * time.Microsecond)
	}
	time.Sleep(later)
	k.child.alive(k.t)
	k.child.kill()
	at, _ := k.page.last(slot)
	k.deaths[at]++
	k.sequences()
	return at
}

// restart starts the child again once there is a backlog for it.
func (k *killing) restart() {
	k.t.Helper()
	enough := k.written.Load() + backlog
	until(k.t, time.Minute, "the writer goes on", func() bool {
		if err := k.failed.Load(); err != nil {
			k.t.Fatal(*err)
		}
		return k.written.Load() >= enough
	})
	k.start()
}

// sequences fails the test where a stored checkpoint has gone back.
func (k *killing) sequences() {
	k.t.Helper()
	found, err := checkpoints(k.t.Context(), k.pool)
	if err != nil {
		k.t.Fatal(err)
	}
	for name, was := range k.stored {
		is := found[name]
		if is.Sequence < was.Sequence || is.Term < was.Term || is.Position.Time.Before(was.Position.Time) {
			k.t.Fatalf("the checkpoint of %s went back from term %d, sequence %d, %s to term %d, sequence %d, %s",
				name, was.Term, was.Sequence, was.Position, is.Term, is.Sequence, is.Position)
		}
	}
	k.stored = found
}

// compare lets the child catch up with a source that is still for a moment, and
// compares.
func (k *killing) compare() string {
	k.t.Helper()
	k.writing.Lock()
	defer k.writing.Unlock()
	mark, err := k.writer.mark(k.t.Context())
	if err != nil {
		k.t.Fatal(err)
	}
	until(k.t, 2*time.Minute, "the projections catch up", func() bool {
		k.child.alive(k.t)
		found, err := checkpoints(k.t.Context(), k.pool)
		if err != nil {
			k.t.Fatal(err)
		}
		for _, name := range orderModels {
			if c := found[name]; !c.Settled || c.Position.Time.Before(mark) {
				return false
			}
		}
		return true
	})
	k.sequences()
	return difference(k.t, k.db, k.pool)
}

// changesSince counts the changes of the orders, by a stream of the test's own.
func (k *killing) changesSince() (n int64) {
	k.t.Helper()
	end := operationTime(k.t, k.db)
	cmd := bson.D{
		{Key: "aggregate", Value: "orders"},
		{Key: "pipeline", Value: bson.A{bson.D{{Key: "$changeStream", Value: bson.D{{Key: "startAtOperationTime", Value: k.begin}}}}}},
		{Key: "cursor", Value: bson.D{}},
	}
	batch := "firstBatch"
	for {
		reply, err := k.db.RunCommand(k.t.Context(), cmd).Raw()
		if err != nil {
			k.t.Fatal(err)
		}
		events, err := reply.Lookup("cursor", batch).Array().Values()
		if err != nil {
			k.t.Fatal(err)
		}
		for _, e := range events {
			var at bson.Timestamp
			if at.T, at.I = e.Document().Lookup("clusterTime").Timestamp(); at.After(end) {
				return n
			}
			n++
		}
		if batch == "nextBatch" && len(events) == 0 {
			return n
		}
		batch = "nextBatch"
		cmd = bson.D{{Key: "getMore", Value: reply.Lookup("cursor", "id").Int64()}, {Key: "collection", Value: "orders"}}
	}
}

// A process with four projections is killed by SIGKILL again and again, most often
// between the entry of a handler and the answer to its COMMIT, while the source goes on
// changing; nothing is added to the code to widen that window. Afterwards every row is
// what the documents say, plain SQL increments too; every change was applied once; no
// checkpoint has ever gone back. Reports of the kind: Eventuous/eventuous#25 and
// JasperFx/marten#1845 (the position moved, the effect was lost),
// commanded/commanded-ecto-projections PR#49 (applied twice), PeerDB-io/peerdb#3090
// (killed between two changes of one transaction).
func TestKill(t *testing.T) {
	k := newKilling(t, false)
	targets := []fault.Point{fault.HandlerBegin, fault.HandlerEnd, fault.CommitSend, fault.CommitSend}
	n, inside := max(10, effort.Rounds(50)), 0
	for round := range n {
		slot := k.rng.IntN(len(orderModels))
		target := fault.Point("")
		if round%6 < 5 {
			target = targets[k.rng.IntN(len(targets))]
		}
		at := k.kill(slot, target)
		if committing(at) {
			inside++
		}
		aimed := string(target)
		if target == "" {
			aimed = "any moment"
		}
		t.Logf("kill %d: %s, aimed at %s, died after %q", round+1, orderModels[slot], aimed, at)
		k.restart()
		if round%3 == 2 || round == n-1 {
			if diff := k.compare(); diff != "" {
				t.Fatalf("after %d kills the models differ from the source (-source +model):\n%s", round+1, diff)
			}
		}
	}
	t.Logf("%d kills, %d between the handler's entry and the answer to COMMIT: %v", n, inside, k.deaths)
	least := 30
	if n < 50 {
		least = n * 3 / 10 // of few the share says little
	}
	if inside < least {
		t.Errorf("only %d of %d kills landed between the handler's entry and the answer to COMMIT", inside, n)
	}

	k.writing.Lock()
	defer k.writing.Unlock()
	changes := k.changesSince()
	applied := selectOne[int64](t, k.pool, "select count(*) from order_ledger.journal")
	twice := selectOne[int64](t, k.pool, "select count(*) from order_ledger.journal where times <> 1")
	t.Logf("%d changes of the source, %d applied, %d more than once; the writer's steps: %v", changes, applied, twice, k.writer.done)
	if applied != changes || twice != 0 {
		t.Errorf("%d changes of the source, %d applied, %d of them more than once", changes, applied, twice)
	}
	for name, c := range k.stored {
		t.Logf("%s: term %d, sequence %d", name, c.Term, c.Sequence)
	}
}

// The same over the other sinks, with one projection of all forms that the sink has.
func TestKillOtherSinks(t *testing.T) {
	t.Parallel()
	for _, p := range everySink {
		if p != inPostgres {
			t.Run(string(p), func(t *testing.T) { killIn(t, p) })
		}
	}
}

func killIn(t *testing.T, p place) {
	c := keep(t, p, keeping{})
	page, path := newPage(t)
	setup := childSetup{MongoDB: c.uri, Database: c.db.Name(), Page: path}
	setup.keeps(p, c.model, c.sinkURI)
	start := func() *child {
		page.reset()
		return startChild(t, "ledger", setup)
	}
	process := start()
	c.committed(process, 1) // where it begins
	c.write()
	targets := []fault.Point{"", fault.HandlerBegin, fault.HandlerEnd, fault.CommitSend, fault.CommitSend, fault.CommitAnswer}
	n, deaths := max(3, effort.Rounds(20)), map[fault.Point]int{}
	stored := c.stored()
	for round := range n {
		target := targets[c.rng.IntN(len(targets))]
		skip, later := uint64(c.rng.IntN(10*effort.Rounds(4))), time.Duration(c.rng.Int64N(int64(2*time.Millisecond)))
		// A point may be left again between two looks: it is enough that it was passed since the last.
		before := page.passed(target)
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Microsecond) {
			passed := page.passed(target)
			if _, n := page.last(0); n > skip && (target == "" || passed != before) {
				break
			}
			before = passed
			if time.Now().After(deadline) {
				process.alive(t)
				t.Fatalf("no commit to kill at %q within a minute", target)
			}
		}
		process.alive(t)
		time.Sleep(later)
		process.kill()
		at, _ := page.last(0)
		deaths[at]++
		now := c.stored()
		if now.Sequence < stored.Sequence || now.Term < stored.Term || now.Position.Time.Before(stored.Position.Time) {
			t.Fatalf("the checkpoint went back from term %d, sequence %d, %s to term %d, sequence %d, %s",
				stored.Term, stored.Sequence, stored.Position, now.Term, now.Sequence, now.Position)
		}
		stored = now
		c.goOn(backlog)
		process = start()
		if round%3 == 2 || round == n-1 {
			if diff := c.caughtUp(process); diff != "" {
				t.Fatalf("after %d kills the model differs from the source (-source +model):\n%s", round+1, diff)
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.Logf("%d kills: %v; term %d, sequence %d; the writer's steps: %v", n, deaths, stored.Term, stored.Sequence, c.writer.done)
}

// caughtUp lets a process catch up with a source that is still for a moment, and compares.
func (c *kept) caughtUp(process *child) string {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	mark, err := c.writer.mark(c.t.Context())
	must(c.t, err)
	until(c.t, 2*time.Minute, "the process catches up", func() bool {
		process.alive(c.t)
		now := c.stored()
		return now.Settled && !now.Position.Time.Before(mark)
	})
	return c.compare()
}

// The control: a handler that writes outside of the transaction loses exactness by the
// first kill or two, and the comparison above sees it; the models beside it stay exact.
func TestKillControl(t *testing.T) {
	k := newKilling(t, true)
	for round := range 20 {
		at := k.kill(ledgerSlot, fault.HandlerBegin)
		k.start()
		diff := k.compare()
		t.Logf("kill %d: died after %q, models differ: %t", round+1, at, diff != "")
		if diff == "" {
			continue
		}
		want, got := computed(t, k.db), stored(t, k.pool)
		if fmt.Sprint(want.Balances) == fmt.Sprint(got.Balances) {
			t.Errorf("another model differs than the one that was broken (-source +model):\n%s", diff)
		}
		return
	}
	t.Error("increments outside of the transaction stayed exact over 20 kills: the comparison proves nothing")
}
