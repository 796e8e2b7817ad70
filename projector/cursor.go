package projector

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// cursor is a change stream as the server gives it: one command, one reply. The
// driver's ChangeStream hides what the runner must know — which reply was an
// aggregate's and which a getMore's, and when the stream was opened again — and waits
// for as long as was said when it was opened, where the runner wants to wait briefly
// while a group is open and long while nothing happens.
type cursor struct {
	db      *mongo.Database
	sess    *mongo.Session
	ctx     context.Context // with the session, and without a client-wide timeout
	stop    context.CancelFunc
	id      int64
	first   bson.Raw      // the token of the place where it was opened
	silence time.Duration // that a reply may take before the server is asked whether it works on it
}

// reply is one reply of the server.
type reply struct {
	events []bson.Raw     // they share the reply's memory
	bytes  int            // of that memory
	token  bson.Raw       // postBatchResumeToken
	time   bson.Timestamp // the server's operation time
}

// openCursor opens the stream after pos. The first reply of an aggregate proves
// nothing about what follows, so none is asked for: with batch size 0 the server
// answers at once, however far behind pos is, and the work is done by the getMores.
func openCursor(ctx context.Context, s *source, pos Position) (*cursor, error) {
	fault.Global.Reach(fault.StreamOpen)
	stage := bson.D{}
	if s.plan.images().after {
		stage = append(stage, bson.E{Key: "fullDocument", Value: "whenAvailable"})
	}
	if s.plan.images().before {
		stage = append(stage, bson.E{Key: "fullDocumentBeforeChange", Value: "whenAvailable"})
	}
	if fault.Global.Off(fault.ExpandEvents) {
		stage = append(stage, bson.E{Key: "showExpandedEvents", Value: true})
	}
	if pos.Token != nil {
		// startAfter takes every token; resumeAfter refuses an invalidate's (260).
		stage = append(stage, bson.E{Key: "startAfter", Value: pos.Token})
	} else {
		stage = append(stage, bson.E{Key: "startAtOperationTime", Value: pos.Time})
	}
	pipeline := bson.A{bson.D{{Key: "$changeStream", Value: stage}}, s.plan.filter()}
	if s.split.Load() {
		pipeline = append(pipeline, bson.D{{Key: "$changeStreamSplitLargeEvent", Value: bson.D{}}})
	}
	sess, err := s.db.Client().StartSession(options.Session().SetCausalConsistency(false))
	if err != nil {
		return nil, err
	}
	// A deadline of its own keeps the client's Timeout and the caller's deadline away from
	// the stream, and one further off than an int32 of milliseconds keeps the driver from
	// adding its own maxTimeMS to ours. A server that hangs is noticed by the driver's
	// monitor, a single connection that does by watch.
	caller := ctx
	ctx, cancel := context.WithTimeout(context.WithoutCancel(caller), 100*24*time.Hour)
	stop := context.AfterFunc(caller, cancel)
	c := &cursor{db: s.db, silence: s.silence, sess: sess, ctx: mongo.NewSessionContext(ctx, sess), stop: func() { stop(); cancel() }}
	r, err := c.run(bson.D{
		{Key: "aggregate", Value: 1},
		{Key: "pipeline", Value: pipeline},
		{Key: "cursor", Value: bson.D{{Key: "batchSize", Value: 0}}},
	}, "firstBatch")
	if err != nil {
		c.close()
		return nil, err
	}
	c.first = r.token
	return c, nil
}

// errCursorClosed: the server has closed the cursor without a word, which it does
// after the database was dropped. It counts as an invalidate.
var errCursorClosed = errors.New("the server closed the change stream")

// next waits for events, at most for the time given; none within it is an empty
// reply. However long the server searches its oplog, it is not interrupted.
func (c *cursor) next(batchSize int, wait time.Duration) (reply, error) {
	if c.id == 0 {
		return reply{}, errCursorClosed
	}
	return c.run(bson.D{
		{Key: "getMore", Value: c.id},
		{Key: "collection", Value: "$cmd.aggregate"},
		{Key: "batchSize", Value: batchSize},
		{Key: "maxTimeMS", Value: wait.Milliseconds()},
	}, "nextBatch")
}

func (c *cursor) run(cmd bson.D, batch string) (r reply, err error) {
	ctx, stop := c.watch()
	raw, err := c.db.RunCommand(ctx, cmd).Raw()
	if stop(); err != nil {
		if silent := context.Cause(ctx); errors.Is(silent, errSilent) {
			err = fmt.Errorf("%w: %w", silent, err)
		}
		return r, err
	}
	r.bytes = len(raw)
	doc := bsoncore.Document(raw)
	r.time.T, r.time.I, _ = doc.Lookup("operationTime").TimestampOK()
	cur, ok := doc.Lookup("cursor").DocumentOK()
	if !ok {
		return r, fmt.Errorf("malformed reply: no cursor in it")
	}
	if c.id, ok = cur.Lookup("id").Int64OK(); !ok {
		return r, fmt.Errorf("malformed reply: no cursor id in it")
	}
	if token, ok := cur.Lookup("postBatchResumeToken").DocumentOK(); ok {
		r.token = bson.Raw(token)
	}
	list, ok := cur.Lookup(batch).ArrayOK()
	if !ok {
		return r, fmt.Errorf("malformed reply: no %s in it", batch)
	}
	_, rem, _ := bsoncore.ReadLength(list)
	for len(rem) > 1 {
		var el bsoncore.Element
		if el, rem, ok = bsoncore.ReadElement(rem); !ok {
			return r, fmt.Errorf("malformed reply: broken event")
		}
		event, ok := el.Value().DocumentOK()
		if !ok {
			return r, fmt.Errorf("malformed reply: an event that is no document")
		}
		r.events = append(r.events, bson.Raw(event))
	}
	return r, nil
}

var errSilent = errors.New("the connection has fallen silent: the server does not work on what was asked")

// watch gives a context for one command, which ends when no reply comes and the server,
// asked by another connection, has no operation of this session under way. It may search
// its oplog for as long as it takes; but a connection that a firewall has forgotten, say,
// would be waited for without end. Whoever may not ask waits on.
func (c *cursor) watch() (context.Context, func()) {
	if fault.Global.Off(fault.StreamWatch) {
		return c.ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(c.ctx)
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		t := time.NewTimer(c.silence)
		defer t.Stop()
		for missed := 0; ; {
			select {
			case <-done:
				return
			case <-t.C:
			}
			// Twice, for the command or its reply may have been on its way.
			if missed++; c.working(ctx) {
				missed = 0
			}
			if missed == 2 {
				cancel(errSilent)
				return
			}
			t.Reset(c.silence / 4)
		}
	})
	return ctx, func() { close(done); watching.Wait(); cancel(nil) }
}

// working reports whether the server has an operation of this session under way, or can't
// be asked.
func (c *cursor) working(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, nil), c.silence/4)
	defer cancel()
	cur, err := c.db.Client().Database("admin").Aggregate(ctx, mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{}}},
		{{Key: "$match", Value: bson.D{{Key: "lsid.id", Value: c.sess.ID().Lookup("id")}, {Key: "active", Value: true}}}},
	})
	if err != nil {
		return true
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	return cur.Next(ctx) || cur.Err() != nil
}

// close frees the cursor on the server, in vain where the server is gone.
func (c *cursor) close() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), time.Second)
	defer cancel()
	if c.id != 0 {
		_ = c.db.RunCommand(ctx, bson.D{{Key: "killCursors", Value: "$cmd.aggregate"}, {Key: "cursors", Value: bson.A{c.id}}}).Err()
		c.id = 0
	}
	c.sess.EndSession(ctx)
	c.stop()
}
