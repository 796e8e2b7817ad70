package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// account is a document of which source transactions keep a sum over all constant: a
// thousand to a block, each block's balances together zero. Its statement makes a
// transaction larger than one reply of the stream.
type account struct {
	ID        int64  `bson:"_id"`
	Branch    string `bson:"branch"`
	Balance   int64  `bson:"balance"`
	Statement string `bson:"statement"`
}

type branch struct {
	Name     string `row:"name,key"`
	Accounts int64  `row:"accounts,sum"`
	Balance  int64  `row:"balance,sum"`
}

type balance struct {
	ID      int64 `row:"id"`
	Balance int64 `row:"balance"`
}

func (a account) branch() []branch         { return []branch{{a.Branch, 1, a.Balance}} }
func (a account) balance() (balance, bool) { return balance{a.ID, a.Balance}, true }

var bank = postgres.Projection{Name: "bank", Version: 1, Bindings: postgres.Bindings{
	projector.Rollup("accounts", account.branch, postgres.Table[branch]{Name: "branches"}),
	projector.Mirror("accounts", account.balance, postgres.Table[balance]{Name: "balances"}),
}}

const blockSize, half = 1000, 500

// sign is positive for the first half of a block, so that only the whole of it, or of a
// transaction, comes to zero.
func sign(i int) int64 {
	if i < half {
		return 1
	}
	return -1
}

// transfers writes to the accounts in transactions of a thousand documents.
type transfers struct {
	t        *testing.T
	db       *mongo.Database
	accounts *mongo.Collection
	rng      *rand.Rand
	blocks   int64
}

// newBlock opens a thousand accounts whose balances come to zero.
func (w *transfers) newBlock() {
	w.t.Helper()
	docs := make([]any, blockSize)
	for i := range docs {
		n := int64(i % half)
		docs[i] = account{
			ID: w.blocks*blockSize + int64(i), Branch: fmt.Sprintf("branch %d", n%7), Balance: sign(i) * n,
			Statement: strings.Repeat(".", 4000),
		}
	}
	w.blocks++
	err := inTransaction(w.t.Context(), w.db, func(ctx context.Context) error {
		_, err := w.accounts.InsertMany(ctx, docs)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// transfer moves an amount from each account in the second half of a block to one in
// the first.
func (w *transfers) transfer() {
	w.t.Helper()
	first := w.rng.Int64N(w.blocks) * blockSize
	updates := make([]mongo.WriteModel, blockSize)
	var amounts [half]int64
	for i := range amounts {
		amounts[i] = 1 + w.rng.Int64N(1000)
	}
	for i := range updates {
		updates[i] = mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: first + int64(i)}}).
			SetUpdate(add("balance", sign(i)*amounts[i%half]))
	}
	err := inTransaction(w.t.Context(), w.db, func(ctx context.Context) error {
		_, err := w.accounts.BulkWrite(ctx, updates)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// samples is what a reader has seen of the model while it changed.
type samples struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	taken    int
	states   map[int64]bool // the sequence numbers of the commits seen
	broken   []string
	firstErr error // why it has stopped reading
}

// watch reads the model as fast as it can, each time in one statement, and so in one
// snapshot.
func watch(t *testing.T, p *pgxpool.Pool) *samples {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &samples{cancel: cancel, states: map[int64]bool{}}
	s.wg.Go(func() {
		for ctx.Err() == nil {
			var sequence, accounts, sum, counted, total int64
			err := p.QueryRow(ctx, `select
	(select sequence from tidemark.checkpoints where projection = 'bank'),
	(select count(*) from bank.balances), (select coalesce(sum(balance), 0) from bank.balances),
	(select coalesce(sum(accounts), 0) from bank.branches), (select coalesce(sum(balance), 0) from bank.branches)`).
				Scan(&sequence, &accounts, &sum, &counted, &total)
			s.mu.Lock()
			switch {
			case ctx.Err() != nil:
			case err != nil:
				s.firstErr = err
				cancel()
			default:
				s.taken++
				s.states[sequence] = true
				if accounts%blockSize != 0 || counted != accounts || sum != 0 || total != 0 {
					s.broken = append(s.broken, fmt.Sprintf("at sequence %d: %d accounts with a sum of %d, %d counted with %d", sequence, accounts, sum, counted, total))
				}
			}
			s.mu.Unlock()
		}
	})
	t.Cleanup(s.stop)
	return s
}

func (s *samples) stop() {
	s.cancel()
	s.wg.Wait()
}

func (s *samples) seen() (taken, states int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken, len(s.states)
}

func (s *samples) sawBroken() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.broken) > 0
}

// banking is a bank and its model.
type banking struct {
	*transfers
	pool *pgxpool.Pool
	run  *running
}

func newBanking(t *testing.T, o projector.Options) *banking {
	t.Helper()
	db, pool := source(t), pool(t)
	withImages(t, db, "accounts")
	o.Start, o.BatchChanges = projector.FromNow(), 100
	if o.Logger == nil {
		o.Logger = quiet()
	}
	r, err := projector.New(db, postgres.New(pool), bank, o)
	if err != nil {
		t.Fatal(err)
	}
	b := &banking{transfers: &transfers{t: t, db: db, accounts: db.Collection("accounts"), rng: seeded(t)}, pool: pool, run: run(t, r)}
	until(t, 30*time.Second, "the runner follows the source", func() bool { return r.Status().State == projector.Running })
	b.newBlock()
	return b
}

// exact compares balances and branches with the documents.
func (b *banking) exact() {
	b.t.Helper()
	b.run.level(b.db)
	cur, err := b.accounts.Find(b.t.Context(), bson.D{})
	if err != nil {
		b.t.Fatal(err)
	}
	var docs []account
	if err := cur.All(b.t.Context(), &docs); err != nil {
		b.t.Fatal(err)
	}
	type rows struct {
		Balances map[int64]balance
		Branches map[string]branch
	}
	want, got := rows{map[int64]balance{}, map[string]branch{}}, rows{map[int64]balance{}, map[string]branch{}}
	for _, a := range docs {
		want.Balances[a.ID] = balance{a.ID, a.Balance}
		sum := want.Branches[a.Branch]
		want.Branches[a.Branch] = branch{a.Branch, sum.Accounts + 1, sum.Balance + a.Balance}
	}
	for _, r := range selectAll[balance](b.t, b.pool, "select id, balance from bank.balances") {
		got.Balances[r.ID] = r
	}
	for _, r := range selectAll[branch](b.t, b.pool, "select name, accounts, balance from bank.branches") {
		got.Branches[r.Name] = r
	}
	if diff := cmp.Diff(want, got); diff != "" {
		b.t.Errorf("the model differs from the source (-source +model):\n%s", diff)
	}
}

// Source transactions of a thousand documents, each larger than the batch limit and
// than a reply of the stream, keep a sum constant; whoever reads the model in the
// meantime sees that sum in every sample. PeerDB-io/peerdb#3090: a transaction arrives
// as single events, and readers may see half of it.
func TestSourceTransaction(t *testing.T) {
	b := newBanking(t, projector.Options{})
	s := watch(t, b.pool)
	until(t, time.Minute, "the model is read", func() bool { taken, _ := s.seen(); return taken > 0 })
	n := effort.Rounds(40)
	for round := range n {
		if b.transfer(); round%8 == 3 {
			b.newBlock()
		}
	}
	b.exact()
	until(t, time.Minute, "the samples are enough to prove something", func() bool {
		taken, states := s.seen()
		return taken >= n && states > 1
	})
	s.stop()
	if s.firstErr != nil {
		t.Fatal(s.firstErr)
	}
	status := b.run.Status()
	t.Logf("%d transactions of %d documents in %d commits; %d samples, of %d different states, %d broken",
		n+int(b.blocks), blockSize, status.Commits, s.taken, len(s.states), len(s.broken))
	if len(s.broken) > 0 {
		t.Errorf("a reader saw a part of a transaction: %s", s.broken[0])
	}
	if status.CutTransactions != 0 {
		t.Errorf("%d transactions were cut", status.CutTransactions)
	}
}

// A runner that cuts batches where it likes shows a reader half a transaction.
func TestSourceTransactionControl(t *testing.T) {
	defer fault.Global.Disable(fault.WholeGroups, fault.HoldGroup)()
	b := newBanking(t, projector.Options{})
	b.run.level(b.db)
	until(t, 30*time.Second, "all accounts are there", func() bool {
		return selectOne[int64](t, b.pool, "select count(*) from bank.balances") == blockSize
	})
	s := watch(t, b.pool)
	for n := 0; !s.sawBroken(); n++ {
		if n == 50 {
			t.Fatalf("no sample of %d was broken with the guards off: the samples prove nothing", s.taken)
		}
		b.transfer()
	}
	s.stop()
	t.Logf("with the guards off: %s", s.broken[0])
}

// A transaction over the byte limit is committed in parts, which is logged and counted,
// and the model is exact in the end.
func TestSourceTransactionOverTheLimit(t *testing.T) {
	var logged bytes.Buffer
	b := newBanking(t, projector.Options{TransactionBytes: 1 << 20, Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	for range 5 {
		b.transfer()
	}
	b.exact()
	b.run.stop()
	status := b.run.Status()
	lines := strings.Count(logged.String(), "a source transaction exceeds Options.TransactionBytes")
	t.Logf("6 transactions of %d documents: %d parts, %d logged", blockSize, status.CutTransactions, lines)
	if status.CutTransactions < 6 || lines != int(status.CutTransactions) {
		t.Errorf("%d parts, %d logged", status.CutTransactions, lines)
	}
}
