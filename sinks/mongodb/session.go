package mongodb

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
)

// session is what a generation's transactions run in, one after the other, for as
// long as its owner's term lasts. The server knows a session's transactions by number, and
// with a higher number it ends the one before and refuses whatever of it comes late.
// So an owner never waits for a lock that its own lost attempts have left behind.
//
// Sessions are dropped, not ended: EndSession would give the server's session back to
// the client's pool, where other work would get it, and a new owner that still reads
// its id in the checkpoint would kill that. The server forgets it after 30 minutes.
type session struct {
	*mongo.Session
	term      int64
	busy      chan struct{} // holds a token while a transaction is under way
	uncertain atomic.Bool   // a transaction may still be open on the server

	// For who has the session's use.
	recorded map[string]bool  // the collections that the checkpoint is known to name
	swept    map[string]swept // by the collection's name, without the place
	buf      []byte           // what commands are built in
}

// newSession makes a session whose transactions are committed by a majority. Their read
// concern is local: a transaction on a replica set reads from one snapshot all the
// same, and with snapshot it could not create collections.
func (s *Sink) newSession() (*session, error) {
	sess, err := s.db.Client().StartSession(options.Session().SetDefaultTransactionOptions(options.Transaction().
		SetReadConcern(readconcern.Local()).SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary())))
	if err != nil {
		return nil, err
	}
	return &session{Session: sess, busy: make(chan struct{}, 1), recorded: map[string]bool{}, swept: map[string]swept{}}, nil
}

// session is the one of a generation, nil if there is none.
func (s *Sink) session(projection string, generation int64) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[placeOf(projection, generation)]
}

// keep makes sess the generation's, unless that has one of a later term.
func (s *Sink) keep(cp projector.Checkpoint, sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.sessions[placeOf(cp.Projection, cp.Generation)]; now == nil || now.term <= sess.term {
		s.sessions[placeOf(cp.Projection, cp.Generation)] = sess
	}
}

// forget lets go of a generation's session, whose document is gone.
func (s *Sink) forget(cp projector.Checkpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.sessions[placeOf(cp.Projection, cp.Generation)]; now != nil && now.term <= cp.Term {
		delete(s.sessions, placeOf(cp.Projection, cp.Generation))
	}
}

// sessionOf gives the session for the commit that follows prev, and its use to the
// caller alone, until release.
func (s *Sink) sessionOf(ctx context.Context, prev projector.Checkpoint) (*session, error) {
	sess := s.session(prev.Projection, prev.Generation)
	if sess == nil || sess.term != prev.Term {
		var err error
		if sess, err = s.register(ctx, prev); err != nil {
			return nil, err
		}
	}
	select {
	case sess.busy <- struct{}{}:
		return sess, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("tidemark/mongodb: another commit of projection %q, generation %d, is under way: %w", prev.Projection, prev.Generation, ctx.Err())
	}
}

// register makes a session for a term that another Sink has acquired. Its id is stored
// before the first transaction, so that whoever is blocked by one can end it.
func (s *Sink) register(ctx context.Context, prev projector.Checkpoint) (*session, error) {
	sess, err := s.newSession()
	if err != nil {
		return nil, failed("start a session", err)
	}
	sess.term = prev.Term
	var matched int64
	err = s.underLock(ctx, prev.Projection, func(ctx context.Context) error {
		r, err := s.checkpoints.UpdateOne(ctx, fenceTerm(prev), set("lsid", sess.ID()))
		if err == nil {
			matched = r.MatchedCount
		}
		return err
	})
	switch {
	case err != nil:
		return nil, failed(fmt.Sprintf("store the session of projection %q", prev.Projection), err)
	case matched == 0:
		return nil, s.fenced(ctx, prev)
	}
	// One of a later term, from before the sink was set back, is of no use any more: the
	// server has just said which term is stored.
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[placeOf(prev.Projection, prev.Generation)] = sess
	return sess, nil
}

// release ends the use of the session, after a transaction that ended with err. It
// leaves nothing of the transaction on the server, which would hold its locks until
// the next one, but where the server does not answer.
func (s *Sink) release(ctx context.Context, sess *session, err error) {
	if err != nil && (ctx.Err() != nil || timeout(err) || unreachable(err)) {
		sess.uncertain.Store(true)
	}
	// Outside of ctx, which may be what ended the transaction.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if sess.uncertain.Load() {
		s.settle(ctx, sess)
	} else if sess.TransactionRunning() {
		_ = sess.AbortTransaction(ctx)
	}
	<-sess.busy
}

// releaseTimeout is how long a server that does not answer delays the end of a commit.
const releaseTimeout = time.Second

// settle makes an end of a transaction of which nobody knows what became. Killing the
// session interrupts a statement that still runs. Its first statement may even be on
// its way, and would begin the transaction when it arrives; an empty transaction with
// the next number prevents that. The caller must have the session's use.
func (s *Sink) settle(ctx context.Context, sess *session) {
	if !fault.Global.Off(fault.EndBlockers) {
		_ = s.kill(ctx, sess.ID())
	}
	if sess.TransactionRunning() {
		_ = sess.AbortTransaction(ctx)
	}
	if sess.StartTransaction() != nil {
		return
	}
	err := s.checkpoints.FindOne(mongo.NewSessionContext(ctx, sess.Session), byID("", 1)).Err()
	_ = sess.AbortTransaction(ctx)
	if errors.Is(err, mongo.ErrNoDocuments) {
		sess.uncertain.Store(false)
	}
}

// settled does the same before a Load, where a commit has not managed it. A session
// that is in use is left alone; if it blocks Load it is killed like anyone's.
func (s *Sink) settled(ctx context.Context, projection string, generation int64) {
	sess := s.session(projection, generation)
	if sess == nil || !sess.uncertain.Load() {
		return
	}
	select {
	case sess.busy <- struct{}{}:
		s.settle(ctx, sess)
		<-sess.busy
	default:
	}
}

// kill ends what runs in a session: the server aborts its transaction, whichever
// client began it. Users may kill the sessions of their own name without further rights.
func (s *Sink) kill(ctx context.Context, lsids ...any) error {
	return s.db.Client().Database("admin").RunCommand(ctx, bson.D{{Key: "killSessions", Value: bson.A(lsids)}}).Err()
}

// underLock runs f, one write to a checkpoint's document, which waits while a
// transaction holds the document. If that takes longer than a grace, the owner of the
// transaction is dead or frozen, or might as well be: its sessions, whose ids are in the
// projection's documents, are killed, and f tried again.
func (s *Sink) underLock(ctx context.Context, projection string, f func(context.Context) error) error {
	var killing error
	for wait := s.grace; ; wait *= 2 {
		attempt, cancel := context.WithTimeout(ctx, wait)
		err := f(attempt)
		cancel()
		if err == nil || ctx.Err() != nil || !timeout(err) || noServer(err) {
			return err
		}
		if wait > 8*s.grace {
			return &blockedError{errors.Join(err, killing)}
		}
		killing = s.killOwner(ctx, projection)
	}
}

// killOwner kills the sessions that the projection's checkpoints name, of all
// generations: a switch runs in the session of one of them and holds two. The documents
// are read without a lock: every id in them is stored before the session's first
// transaction, and can't be replaced while one of its transactions holds the document.
func (s *Sink) killOwner(ctx context.Context, projection string) error {
	if fault.Global.Off(fault.EndBlockers) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*s.grace)
	defer cancel()
	cur, err := s.checkpoints.Find(ctx, ofProjection(projection), options.Find().SetProjection(bson.D{{Key: "lsid", Value: 1}}))
	if err != nil {
		return err
	}
	var found []struct {
		LSID bson.Raw `bson:"lsid"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return err
	}
	var ids bson.A
	for _, f := range found {
		if len(f.LSID) > 0 {
			ids = append(ids, f.LSID)
		}
	}
	if len(ids) == 0 {
		return errors.New("no checkpoint names its owner's session")
	}
	return s.kill(ctx, ids...)
}

// fenced tells who is in the way of what follows prev.
func (s *Sink) fenced(ctx context.Context, prev projector.Checkpoint) error {
	e := &projector.FencedError{Projection: prev.Projection, Term: prev.Term}
	found, err := s.checkpoints.FindOne(ctx, byID(prev.Projection, prev.Generation)).Raw()
	e.Theirs, _ = found.Lookup("term").AsInt64OK()
	e.Owner, _ = found.Lookup("owner").StringValueOK()
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return fmt.Errorf("tidemark/mongodb: the checkpoint of projection %q, generation %d, is gone: %w", prev.Projection, prev.Generation, projector.ErrFenced)
	case err != nil || e.Theirs == prev.Term:
		return fmt.Errorf("tidemark/mongodb: projection %q, generation %d: another commit follows term %d, sequence %d: %w",
			prev.Projection, prev.Generation, prev.Term, prev.Sequence, projector.ErrFenced)
	}
	return e
}
