package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
)

// deaf is a way to the server that loses its answers while it is switched on.
type deaf struct{ on atomic.Bool }

func (d *deaf) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	return &deafConn{conn, d}, err
}

type deafConn struct {
	net.Conn
	deaf *deaf
}

func (c *deafConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && c.deaf.on.Load() {
		_ = c.Close()
		return 0, io.EOF
	}
	return n, err
}

// deafSink is another sink on the database, by way of d.
func (d *database) deafSink(t *testing.T, way *deaf, opts ...mongodb.Option) *mongodb.Sink {
	t.Helper()
	client, err := mongo.Connect(options.Client().ApplyURI(d.uri).SetDialer(way))
	must(t, err)
	t.Cleanup(func() { must(t, client.Disconnect(context.Background())) })
	return mongodb.New(client.Database(d.Name()), opts...)
}

func TestLostAnswerToCommit(t *testing.T) {
	for _, retry := range []bool{true, false} {
		d := newDatabase(t)
		var way deaf
		sink := d.deafSink(t, &way, mongodb.TimeLimit(3*time.Second))
		cp, err := acquire(t.Context(), sink, "test")
		must(t, err)
		cp, err = commit(t, sink, cp)
		must(t, err)
		fault.Global.OnReach(func(p fault.Point) {
			if p == fault.CommitSend {
				way.on.Store(true)
				if retry {
					time.AfterFunc(500*time.Millisecond, func() { way.on.Store(false) })
				}
			}
		})
		next, err := commit(t, sink, cp, inc("a"))
		fault.Global.OnReach(nil)
		way.on.Store(false)
		if retry { // the commit alone is sent again, and the server says that it is done
			must(t, err)
		} else { // it stays unknown: Load tells
			wantError(t, err)
			wantClass(t, sink, err, projector.Transient)
		}
		stored, err := sink.Load(t.Context(), model, 1)
		must(t, err)
		equal(t, "sequence", stored.Sequence, next.Sequence)
		_, err = commit(t, sink, cp, inc("a"))
		wantFenced(t, err)
		equal(t, "rows", d.rows(t, "numbers"), `{"_id":"a","n":1}`)
	}
}

func TestCommitThatDidNotArriveIsSentAgain(t *testing.T) {
	for _, data := range []bson.D{
		{{Key: "closeConnection", Value: true}},
		{{Key: "errorCode", Value: 11602}},
		{{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "x"}}}},
	} {
		d := newDatabase(t)
		cp := d.acquired(t)
		d.fail(t, 4, data, "commitTransaction")
		_, err := commit(t, d.sink, cp, inc("a"))
		must(t, err)
		equal(t, "rows", d.rows(t, "numbers"), `{"_id":"a","n":1}`)
	}
}

func TestWriteConflictIsTransient(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	conflict := bson.D{{Key: "errorCode", Value: 112}, {Key: "namespace", Value: d.Name() + ".model.counts"}}
	for name, f := range map[string]func(error) error{
		"as it is":             func(err error) error { return err },
		"wrapped":              func(err error) error { return fmt.Errorf("count: %w", err) },
		"hidden":               func(err error) error { return errors.New("count failed") },
		"swallowed":            func(error) error { return nil },
		"joined with its own":  func(err error) error { return errors.Join(errors.New("x"), err) },
		"hidden by a new text": func(err error) error { return fmt.Errorf("count: %v", err) }, //nolint:errorlint // that is the point
	} {
		d.fail(t, 1, conflict, "update")
		runs := 0
		f := func(ctx context.Context, tx *mongodb.Tx) error {
			runs++
			if err := counts.Add(ctx, tx, nil, []count{{name, 1}}); err != nil {
				return f(err)
			}
			return nil
		}
		next, err := commit(t, d.sink, cp, f)
		wantError(t, err)
		wantClass(t, d.sink, err, projector.Transient)
		equal(t, "runs", runs, 1) // the body is the caller's to run again
		stored, err := d.sink.Load(t.Context(), model, 1)
		must(t, err)
		equal(t, "sequence", stored.Sequence, cp.Sequence)
		cp, err = commit(t, d.sink, cp, f)
		must(t, err)
		equal(t, "sequence", cp.Sequence, next.Sequence)
	}
	// And in the fence, and in the commit.
	for _, command := range []string{"update", "commitTransaction"} {
		d.fail(t, 1, bson.D{{Key: "errorCode", Value: 112}}, command)
		_, err := commit(t, d.sink, cp, add(counts, nil, []count{{"x", 1}}))
		wantClass(t, d.sink, err, projector.Transient)
		_, err = d.sink.Load(t.Context(), model, 1)
		must(t, err)
		cp, err = commit(t, d.sink, cp, add(counts, nil, []count{{"x", 1}}))
		must(t, err)
	}
	if rows := d.rows(t, "counts"); strings.Count(rows, `"n":1}`) != 6 || !strings.Contains(rows, `{"_id":{"status":"x"},"contributions":2,"n":2}`) {
		t.Errorf("rows:\n%s", rows)
	}
}

// A majority that was not reached must not pass for an answer.
func TestLoadWithoutMajority(t *testing.T) {
	d := newDatabase(t)
	d.acquired(t)
	d.fail(t, 1, bson.D{{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "waiting for replication timed out"}}}}, "findAndModify")
	_, err := d.sink.Load(t.Context(), model, 1)
	wantError(t, err, "waiting for replication")
	wantClass(t, d.sink, err, projector.Transient)
}

func TestPoisonRollsBackEverything(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create, inc("a"))
	duplicate := func(ctx context.Context, tx *mongodb.Tx) error {
		_, err := tx.Collection("numbers").InsertOne(ctx, bson.D{{Key: "_id", Value: "a"}})
		return err
	}
	boom := errors.New("boom")
	for name, f := range map[string]func(context.Context, *mongodb.Tx) error{
		"duplicate": duplicate,
		"swallowed": func(ctx context.Context, tx *mongodb.Tx) error { _ = duplicate(ctx, tx); return nil },
		"queued": func(_ context.Context, tx *mongodb.Tx) error {
			tx.Collection("numbers").Queue(mongo.NewInsertOneModel().SetDocument(bson.D{{Key: "_id", Value: "a"}}))
			return nil
		},
		"own error": func(context.Context, *mongodb.Tx) error { return boom },
	} {
		for _, try := range []bool{true, false} {
			f := all(inc("b"), add(counts, nil, []count{{"x", 1}}), f)
			var err error
			if try {
				err = d.sink.Try(t.Context(), cp, f)
			} else {
				_, err = commit(t, d.sink, cp, f)
			}
			wantError(t, err)
			wantClass(t, d.sink, err, projector.Poison)
			equal(t, name, errors.Is(err, boom), name == "own error")
			equal(t, name, mongo.IsDuplicateKeyError(err), name != "own error")
		}
	}
	// Accepted, and still nothing is left.
	must(t, d.sink.Try(t.Context(), cp, all(inc("b"), add(counts, nil, []count{{"x", 1}}))))
	equal(t, "rows", d.rows(t, "numbers")+d.rows(t, "counts"), `{"_id":"a","n":1}`)
	_, err := commit(t, d.sink, cp, inc("a"))
	must(t, err)
}

func TestCancelInMidCommit(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t)
	d.fail(t, 1, bson.D{{Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 4000}}, "commitTransaction")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	fault.Global.OnReach(func(p fault.Point) {
		if p == fault.CommitSend {
			time.AfterFunc(100*time.Millisecond, cancel)
		}
	})
	began := time.Now()
	next := following(cp)
	err := d.sink.Commit(ctx, cp, next, inc("a"))
	fault.Global.OnReach(nil)
	took := time.Since(began)
	wantError(t, err)
	wantClass(t, d.sink, err, projector.Transient)
	if took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
	stored, err := d.sink.Load(t.Context(), model, 1)
	must(t, err)
	if stored.Sequence == cp.Sequence {
		_, err = commit(t, d.sink, cp, inc("a"))
		must(t, err)
	}
	t.Parallel()                                                // what is left is to wait
	time.Sleep(max(0, 4500*time.Millisecond-time.Since(began))) // the blocked commit is carried out now, if ever
	equal(t, "rows", d.rows(t, "numbers"), `{"_id":"a","n":1}`)
}

func TestTimeLimit(t *testing.T) {
	d := newDatabase(t, mongodb.TimeLimit(300*time.Millisecond))
	cp := d.acquired(t)
	_, err := commit(t, d.sink, cp, inc("a"), func(ctx context.Context, _ *mongodb.Tx) error {
		<-ctx.Done()
		return ctx.Err()
	})
	wantClass(t, d.sink, err, projector.Transient)
	// Also where the handler has a context of its own.
	_, err = commit(t, d.sink, cp, inc("a"), func(_ context.Context, tx *mongodb.Tx) error {
		for {
			if _, err := tx.Collection("numbers").CountDocuments(context.Background(), bson.D{}); err != nil {
				return err
			}
		}
	})
	wantClass(t, d.sink, err, projector.Transient)
	_, err = commit(t, d.sink, cp, inc("a"))
	must(t, err)
}

// Random failures of every statement, and elections, by the loop that the runner has.
func TestExactlyOnceUnderFaults(t *testing.T) {
	d := newDatabase(t)
	cp := d.acquired(t, counts.Create)
	admin := d.Client().Database("admin")
	commands := bson.A{"update", "findAndModify", "commitTransaction", "abortTransaction", "find", "delete"}
	faults := []bson.D{
		{{Key: "closeConnection", Value: true}},
		{{Key: "errorCode", Value: 112}},
		{{Key: "errorCode", Value: 11602}},
		{{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "x"}}}},
		nil, // an election
	}
	off := func() {
		must(t, admin.RunCommand(context.Background(), bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}}).Err())
	}
	defer off()
	rounds := max(16, effort.Values(60)) // with 16 there is an election, and each fault comes three times
	runs, failures := 0, 0
	for i := range rounds {
		if f := faults[i%len(faults)]; f != nil {
			must(t, admin.RunCommand(t.Context(), bson.D{
				{Key: "configureFailPoint", Value: "failCommand"},
				{Key: "mode", Value: bson.D{{Key: "activationProbability", Value: 0.25}}},
				{Key: "data", Value: append(bson.D{{Key: "failCommands", Value: commands}}, f...)},
			}).Err())
		} else if i%15 == 4 {
			off()
			go func() {
				_ = admin.RunCommand(t.Context(), bson.D{{Key: "replSetStepDown", Value: 1}, {Key: "force", Value: true}}).Err()
			}()
		}
		next := following(cp)
		for {
			err := d.sink.Commit(t.Context(), cp, next, func(ctx context.Context, tx *mongodb.Tx) error {
				runs++
				if i%2 == 1 {
					if err := counts.Add(ctx, tx, []count{{"b", 1}}, nil); err != nil {
						return err
					}
					return inc("a")(ctx, tx)
				}
				if err := inc("a")(ctx, tx); err != nil {
					return err
				}
				return counts.Add(ctx, tx, nil, []count{{"a", 1}, {"b", 1}})
			})
			if err == nil {
				break
			}
			if !errors.Is(err, projector.ErrFenced) && d.sink.Classify(err) != projector.Transient {
				t.Fatalf("round %d: %v", i, err)
			}
			failures++
			var stored projector.Checkpoint
			for {
				if stored, err = d.sink.Load(t.Context(), model, 1); err == nil {
					break
				}
				if d.sink.Classify(err) != projector.Transient {
					t.Fatalf("round %d: %v", i, err)
				}
			}
			if stored.Sequence == next.Sequence {
				break
			}
			equal(t, "sequence", stored.Sequence, cp.Sequence)
		}
		cp = next
	}
	off()
	t.Logf("%d rounds, %d runs of the body, %d failures", rounds, runs, failures)
	equal(t, "rows", d.rows(t, "numbers"), fmt.Sprintf(`{"_id":"a","n":%d}`, rounds))
	equal(t, "rows", d.rows(t, "counts"), fmt.Sprintf(`{"_id":{"status":"a"},"contributions":%[1]d,"n":%[1]d}`, rounds/2))
}

func TestRights(t *testing.T) {
	m, err := serve.StartMongod(t.Context(), serve.MongodOptions{Auth: true})
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) }) // after the clients
	name := "shop"
	open := func(uri string) *database {
		t.Helper()
		client, err := connect(uri)
		must(t, err)
		t.Cleanup(func() { must(t, client.Disconnect(context.Background())) })
		return &database{client.Database(name), mongodb.New(client.Database(name)), uri}
	}
	writer, err := m.CreateUser(t.Context(), "writer", "secret", bson.D{{Key: "role", Value: "readWrite"}, {Key: "db", Value: name}})
	must(t, err)
	reader, err := m.CreateUser(t.Context(), "reader", "secret", bson.D{{Key: "role", Value: "read"}, {Key: "db", Value: name}})
	must(t, err)

	// To end a dead owner's transaction the right to write suffices.
	d := open(writer)
	d.killed(t)
	began := time.Now()
	cp, err := acquire(t.Context(), d.sink, "next")
	must(t, err)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the takeover took %s", took)
	}
	_, err = commit(t, d.sink, cp, counts.Create, lines.Create)
	must(t, err)

	r := open(reader)
	_, err = acquire(t.Context(), r.sink, "reader")
	wantClass(t, r.sink, err, projector.Fatal)
	_, err = mongodb.Live(t.Context(), r.Database, model, "counts")
	must(t, err)

	wrong := open(strings.Replace(writer, "secret", "wrong", 1))
	_, err = acquire(t.Context(), wrong.sink, "wrong")
	wantClass(t, wrong.sink, err, projector.Fatal)
	if strings.Contains(fmt.Sprint(err), "secret") {
		t.Errorf("a password in %v", err)
	}
}

func TestUnreachableServerIsTransient(t *testing.T) {
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200"))
	must(t, err)
	s := mongodb.New(client.Database("x"))
	_, err = acquire(t.Context(), s, "test")
	wantClass(t, s, err, projector.Transient)
	must(t, client.Disconnect(t.Context()))
	_, err = acquire(t.Context(), s, "test")
	wantClass(t, s, err, projector.Fatal)
}

func TestClassify(t *testing.T) {
	s := newDatabase(t).sink
	for code, want := range map[int32]projector.Class{
		13: projector.Fatal, 18: projector.Fatal, 8000: projector.Fatal, 263: projector.Fatal, 20: projector.Fatal,
		112: projector.Transient, 24: projector.Transient, 50: projector.Transient, 262: projector.Transient, 251: projector.Transient,
		246: projector.Transient, 239: projector.Transient, 10107: projector.Transient, 189: projector.Transient, 91: projector.Transient,
		121: projector.Poison, 11000: projector.Poison, 2: projector.Poison, 10334: projector.Poison, 17280: projector.Poison, 379: projector.Poison,
	} {
		wantClass(t, s, mongo.CommandError{Code: code}, want)
		wantClass(t, s, fmt.Errorf("handler: %w", mongo.WriteException{WriteErrors: mongo.WriteErrors{{Code: int(code)}}}), want)
	}
	wantClass(t, s, mongo.CommandError{Code: 11000, Labels: []string{"TransientTransactionError"}}, projector.Transient)
	wantClass(t, s, mongo.CommandError{Labels: []string{"NetworkError"}}, projector.Transient)
	wantClass(t, s, fmt.Errorf("x: %w", context.DeadlineExceeded), projector.Transient)
	wantClass(t, s, errors.New("boom"), projector.Poison)
}
