package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// The model of the fault tests: orders, and four projections of them, one in each
// form. Their rows are compared with what plain code computes from the documents.

// order is a document of the source. Handle is unique at every moment, but wanders from
// document to document; Group comes and goes.
type order struct {
	ID     int64  `bson:"_id"`
	Group  string `bson:"group,omitempty"`
	State  string `bson:"state"`
	Amount int64  `bson:"amount"`
	Handle string `bson:"handle,omitempty"`
}

type total struct {
	Group  string `row:"grp,key"`
	Orders int64  `row:"orders,sum"`
	Amount int64  `row:"amount,sum"`
}

type mirrored struct {
	ID     int64  `row:"id"`
	Group  string `row:"grp"`
	State  string `row:"state"`
	Amount int64  `row:"amount"`
	Handle string `row:"handle"`
}

type holder struct {
	Handle string `row:"handle,key"`
	ID     int64  `row:"id"`
	Amount int64  `row:"amount"`
}

func (o order) totals() []total {
	if o.Group == "" {
		return nil
	}
	return []total{{o.Group, 1, o.Amount}}
}

func (o order) mirrored() (mirrored, bool) {
	return mirrored(o), o.State != "hidden"
}

func (o order) holders() []holder {
	if o.Handle == "" {
		return nil
	}
	return []holder{{o.Handle, o.ID, o.Amount}}
}

var (
	orderTotals = postgres.Projection{Name: "order_totals", Version: 1, Bindings: postgres.Bindings{
		projector.Rollup("orders", order.totals, postgres.Table[total]{Name: "totals"}),
	}}
	orderMirror = postgres.Projection{Name: "order_mirror", Version: 1, Bindings: postgres.Bindings{
		projector.Mirror("orders", order.mirrored, postgres.Table[mirrored]{Name: "orders"}),
	}}
	orderHandles = postgres.Projection{Name: "order_handles", Version: 1, Bindings: postgres.Bindings{
		projector.Upsert("orders", order.holders, postgres.Table[holder]{Name: "handles"}),
	}}
	orderModels = []string{orderTotals.Name, orderMirror.Name, orderHandles.Name, "order_ledger"}
)

// posted is what changes add to each line of the balance, orders and amount, and their ids.
func posted(changes []projector.Change[order]) (sums map[string][2]int64, ids []string) {
	sums = map[string][2]int64{}
	post := func(o *order, sign int64) {
		if o == nil {
			return
		}
		for _, kind := range o.kinds() {
			sum := sums[kind]
			sums[kind] = [2]int64{sum[0] + sign, sum[1] + sign*o.Amount}
		}
	}
	for _, c := range changes {
		post(c.Before, -1)
		post(c.After, 1)
		ids = append(ids, c.ID())
	}
	return sums, ids
}

// kinds are the lines of the balance that an order is in.
func (o order) kinds() []string {
	if o.Group == "" {
		return []string{"state " + o.State}
	}
	return []string{"state " + o.State, "group " + o.Group}
}

// orderLedger adds and subtracts by plain SQL, so that it shows everything that is
// applied twice or not at all; its journal has one row for each change ever applied.
// Increment writes one increment; nil: through the transaction, as it must.
func orderLedger(increment func(ctx context.Context, tx *postgres.Tx, sql string, args ...any) error) postgres.Projection {
	if increment == nil {
		increment = func(_ context.Context, tx *postgres.Tx, sql string, args ...any) error {
			tx.Queue(sql, args...)
			return nil
		}
	}
	const balance = `insert into balances as b select * from unnest($1::text[], $2::bigint[], $3::bigint[])
on conflict (kind) do update set orders = b.orders + excluded.orders, amount = b.amount + excluded.amount`
	const journal = `insert into journal as j select id, count(*) from unnest($1::text[]) id group by id
on conflict (id) do update set times = j.times + excluded.times`
	return postgres.Projection{
		Name: "order_ledger", Version: 1,
		Setup: func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.Exec(ctx, `create table balances (kind text primary key, orders bigint not null, amount bigint not null)`)
			if err == nil {
				_, err = tx.Exec(ctx, `create table journal (id text primary key, times int not null)`)
			}
			return err
		},
		Bindings: postgres.Bindings{projector.On("orders", func(ctx context.Context, tx *postgres.Tx, changes []projector.Change[order]) error {
			sums, ids := posted(changes)
			var kinds []string
			var orders, amounts []int64
			for kind, sum := range sums {
				kinds, orders, amounts = append(kinds, kind), append(orders, sum[0]), append(amounts, sum[1])
			}
			if err := increment(ctx, tx, balance, kinds, orders, amounts); err != nil {
				return err
			}
			tx.Queue(journal, ids)
			return nil
		})},
	}
}

// outside is the ledger's SQL for a connection whose search_path is not the model's.
func outside(sql string) string {
	return strings.Replace(sql, "into balances", "into order_ledger.balances", 1)
}

// orderRows is what the four projections hold, or should.
type orderRows struct {
	Totals   map[string]total
	Mirror   map[int64]mirrored
	Handles  map[string]holder
	Balances map[string][2]int64 // orders, amount
}

func newOrderRows() orderRows {
	return orderRows{map[string]total{}, map[int64]mirrored{}, map[string]holder{}, map[string][2]int64{}}
}

// computed is the rows as plain code has them from the documents.
func computed(t testing.TB, db *mongo.Database) orderRows {
	t.Helper()
	want := newOrderRows()
	cur, err := db.Collection("orders").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	var docs []order
	if err := cur.All(t.Context(), &docs); err != nil {
		t.Fatal(err)
	}
	add := func(kind string, amount int64) {
		b := want.Balances[kind]
		want.Balances[kind] = [2]int64{b[0] + 1, b[1] + amount}
	}
	for _, o := range docs {
		add("state "+o.State, o.Amount)
		if o.Group != "" {
			add("group "+o.Group, o.Amount)
			sum := want.Totals[o.Group]
			want.Totals[o.Group] = total{o.Group, sum.Orders + 1, sum.Amount + o.Amount}
		}
		if o.State != "hidden" {
			want.Mirror[o.ID] = mirrored(o)
		}
		if o.Handle != "" {
			want.Handles[o.Handle] = holder{o.Handle, o.ID, o.Amount}
		}
	}
	return want
}

// stored is the rows in PostgreSQL. Of the ledger, the lines that have come to nothing
// are left out; nothing else deletes them.
func stored(t testing.TB, p *pgxpool.Pool) orderRows {
	t.Helper()
	return storedIn(t, p, orderModels[0], orderModels[1], orderModels[2], orderModels[3])
}

// storedIn is the same where the tables are in the schemas named.
func storedIn(t testing.TB, p *pgxpool.Pool, totals, mirror, handles, ledger string) orderRows {
	t.Helper()
	got := newOrderRows()
	for _, r := range selectAll[total](t, p, "select grp, orders, amount from "+totals+".totals") {
		got.Totals[r.Group] = r
	}
	for _, r := range selectAll[mirrored](t, p, "select id, grp, state, amount, handle from "+mirror+".orders") {
		got.Mirror[r.ID] = r
	}
	for _, r := range selectAll[holder](t, p, "select handle, id, amount from "+handles+".handles") {
		got.Handles[r.Handle] = r
	}
	type line struct {
		Kind           string
		Orders, Amount int64
	}
	for _, r := range selectAll[line](t, p, "select kind, orders, amount from "+ledger+".balances where orders <> 0 or amount <> 0") {
		got.Balances[r.Kind] = [2]int64{r.Orders, r.Amount}
	}
	return got
}

// difference is empty where the model is what the documents say.
func difference(t testing.TB, db *mongo.Database, p *pgxpool.Pool) string {
	t.Helper()
	return cmp.Diff(computed(t, db), stored(t, p))
}

// selectAll reads rows by the position of their columns.
func selectAll[R any](t testing.TB, p *pgxpool.Pool, sql string, args ...any) []R {
	t.Helper()
	rows, err := p.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[R])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// selectOne reads one value.
func selectOne[V any](t testing.TB, p *pgxpool.Pool, sql string, args ...any) (v V) {
	t.Helper()
	if err := p.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// createOrders makes the empty source.
func createOrders(t testing.TB, db *mongo.Database) {
	t.Helper()
	withImages(t, db, "orders")
	_, err := db.Collection("orders").Indexes().CreateOne(t.Context(), mongo.IndexModel{
		Keys: bson.D{{Key: "handle", Value: 1}}, Options: options.Index().SetUnique(true).SetSparse(true),
	})
	if err != nil {
		t.Fatal(err)
	}
}

// orderWriter changes orders at random. Its steps leave about 400 of them.
type orderWriter struct {
	keep   int64 // about how many there are
	db     *mongo.Database
	orders *mongo.Collection
	rng    *rand.Rand
	next   int64
	done   map[string]int // how often each kind of step was taken
}

func newOrderWriter(db *mongo.Database, rng *rand.Rand) *orderWriter {
	return &orderWriter{keep: 400, db: db, orders: db.Collection("orders"), rng: rng, next: 1, done: map[string]int{}}
}

func (w *orderWriter) fresh() order {
	o := order{ID: w.next, Group: w.group(), State: w.state(), Amount: w.rng.Int64N(1000)}
	w.next++
	if w.rng.IntN(3) > 0 {
		o.Handle = fmt.Sprintf("handle-%d", o.ID)
	}
	return o
}

func (w *orderWriter) group() string { return fmt.Sprintf("g%d", w.rng.IntN(8)) }
func (w *orderWriter) state() string {
	return []string{"new", "paid", "shipped", "hidden"}[w.rng.IntN(4)]
}

// some is a filter for one order, most often one that is there.
func (w *orderWriter) some() bson.D {
	return bson.D{{Key: "_id", Value: w.next - 1 - w.rng.Int64N(min(w.next, w.keep))}}
}

func (w *orderWriter) many(n int) []any {
	docs := make([]any, n)
	for i := range docs {
		docs[i] = w.fresh()
	}
	return docs
}

func set(field string, value any) bson.D {
	return bson.D{{Key: "$set", Value: bson.D{{Key: field, Value: value}}}}
}

func unset(field string) bson.D {
	return bson.D{{Key: "$unset", Value: bson.D{{Key: field, Value: ""}}}}
}

func add(field string, n int64) bson.D {
	return bson.D{{Key: "$inc", Value: bson.D{{Key: field, Value: n}}}}
}

// step makes one random change.
func (w *orderWriter) step(ctx context.Context) (err error) {
	steps := []struct {
		weight int
		name   string
		run    func() error
	}{
		{12, "insert", func() error { _, err := w.orders.InsertOne(ctx, w.fresh()); return err }},
		{3, "insertMany", func() error { _, err := w.orders.InsertMany(ctx, w.many(10)); return err }},
		{3, "insert in a transaction", func() error {
			return w.transaction(ctx, func(ctx context.Context) error { _, err := w.orders.InsertMany(ctx, w.many(20)); return err })
		}},
		{12, "update", func() error { return w.update(ctx, w.some(), add("amount", w.rng.Int64N(100)-50)) }},
		{8, "move to another group", func() error { return w.update(ctx, w.some(), set("group", w.group())) }},
		{5, "unset the group", func() error { return w.update(ctx, w.some(), unset("group")) }},
		{6, "change the state", func() error { return w.update(ctx, w.some(), set("state", w.state())) }},
		{5, "replace", func() error {
			o := w.fresh() // its own handle, which nobody has
			_, err := w.orders.ReplaceOne(ctx, w.some(), bson.D{
				{Key: "group", Value: o.Group}, {Key: "state", Value: o.State}, {Key: "amount", Value: o.Amount}, {Key: "handle", Value: fmt.Sprintf("handle-%d", o.ID)},
			})
			return err
		}},
		{6, "delete", func() error { _, err := w.orders.DeleteOne(ctx, w.some()); return err }},
		{2, "updateMany", func() error {
			_, err := w.orders.UpdateMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: w.next - w.rng.Int64N(400)}}}, {Key: "group", Value: w.group()}, {Key: "amount", Value: bson.D{{Key: "$lt", Value: w.rng.Int64N(600)}}}},
				bson.D{{Key: "$inc", Value: bson.D{{Key: "amount", Value: 7}}}, {Key: "$set", Value: bson.D{{Key: "group", Value: w.group()}}}})
			return err
		}},
		{2, "deleteMany", func() error {
			_, err := w.orders.DeleteMany(ctx, bson.D{{Key: "$or", Value: bson.A{
				bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: w.next - w.keep - 50}}}},
				bson.D{{Key: "amount", Value: bson.D{{Key: "$mod", Value: bson.A{23 * w.keep / 400, w.rng.Int64N(23 * w.keep / 400)}}}}},
			}}})
			return err
		}},
		{5, "hand a handle on", func() error { return w.handOn(ctx) }},
		{5, "swap two handles", func() error { return w.swap(ctx) }},
		{4, "move an amount", func() error {
			from, to, n := w.some(), w.some(), w.rng.Int64N(100)
			return w.transaction(ctx, func(ctx context.Context) error {
				return errors.Join(w.update(ctx, from, add("amount", -n)), w.update(ctx, to, add("amount", n)))
			})
		}},
	}
	sum := 0
	for _, s := range steps {
		sum += s.weight
	}
	n := w.rng.IntN(sum)
	for _, s := range steps {
		if n -= s.weight; n < 0 {
			w.done[s.name]++
			if err = s.run(); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			return nil
		}
	}
	return nil
}

func (w *orderWriter) update(ctx context.Context, filter, update bson.D) error {
	_, err := w.orders.UpdateOne(ctx, filter, update)
	return err
}

func (w *orderWriter) transaction(ctx context.Context, f func(context.Context) error) error {
	return inTransaction(ctx, w.db, f)
}

func inTransaction(ctx context.Context, db *mongo.Database, f func(context.Context) error) error {
	sess, err := db.Client().StartSession()
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	_, err = sess.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, f(ctx) })
	return err
}

// holders are up to n different orders with a handle.
func (w *orderWriter) holders(ctx context.Context, n int64) (found []order, err error) {
	cur, err := w.orders.Find(ctx, bson.D{{Key: "handle", Value: bson.D{{Key: "$exists", Value: true}}}, {Key: "_id", Value: bson.D{{Key: "$gte", Value: w.some()[0].Value}}}},
		options.Find().SetLimit(n).SetSort(bson.D{{Key: "_id", Value: 1}}))
	if err == nil {
		err = cur.All(ctx, &found)
	}
	return found, err
}

// handOn gives an order's handle to another one, or to a new one in place of the old.
func (w *orderWriter) handOn(ctx context.Context) error {
	from, err := w.holders(ctx, 1)
	if err != nil || len(from) == 0 {
		return err
	}
	old := bson.D{{Key: "_id", Value: from[0].ID}}
	to, fresh := w.some(), w.fresh()
	fresh.Handle = from[0].Handle
	replaces := w.rng.IntN(2) == 0
	return w.transaction(ctx, func(ctx context.Context) error {
		if replaces {
			if _, err := w.orders.DeleteOne(ctx, old); err != nil {
				return err
			}
			_, err := w.orders.InsertOne(ctx, fresh)
			return err
		}
		if err := w.update(ctx, old, unset("handle")); err != nil {
			return err
		}
		return w.update(ctx, to, set("handle", fresh.Handle))
	})
}

func (w *orderWriter) swap(ctx context.Context) error {
	two, err := w.holders(ctx, 2)
	if err != nil || len(two) < 2 {
		return err
	}
	one, other := bson.D{{Key: "_id", Value: two[0].ID}}, bson.D{{Key: "_id", Value: two[1].ID}}
	return w.transaction(ctx, func(ctx context.Context) error {
		for _, u := range []struct{ filter, update bson.D }{
			{one, unset("handle")}, {other, set("handle", two[0].Handle)}, {one, set("handle", two[1].Handle)},
		} {
			if err := w.update(ctx, u.filter, u.update); err != nil {
				return err
			}
		}
		return nil
	})
}

// mark makes one more change and gives its time, which every projection comes to.
func (w *orderWriter) mark(ctx context.Context) (bson.Timestamp, error) {
	return projector.Written(ctx, w.db, func(ctx context.Context) error {
		_, err := w.orders.InsertOne(ctx, w.fresh())
		return err
	})
}

// checkpoints reads all stored checkpoints.
func checkpoints(ctx context.Context, p *pgxpool.Pool) (map[string]projector.Checkpoint, error) {
	rows, err := p.Query(ctx, "select projection, term, sequence, body from tidemark.checkpoints where phase = 'live'")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	all := map[string]projector.Checkpoint{}
	for rows.Next() {
		var name, body string
		var term, sequence int64
		if err := rows.Scan(&name, &term, &sequence, &body); err != nil {
			return nil, err
		}
		c, err := projector.DecodeCheckpoint(name, []byte(body))
		if err != nil {
			return nil, err
		}
		c.Term, c.Sequence = term, sequence
		all[name] = c
	}
	return all, rows.Err()
}

// until polls a condition of another process or a server, which gives no sign.
func until(t testing.TB, limit time.Duration, what string, reached func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !reached() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, limit)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// seeded is a source of randomness whose seed is printed, and taken from TIDEMARK_SEED
// where that is set.
func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	seed, err := strconv.ParseUint(os.Getenv("TIDEMARK_SEED"), 10, 64)
	if err != nil {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, seed))
}
