package projector

import (
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Status is what a Runner knows of itself at one moment.
type Status struct {
	Projection string
	State      RunState
	Doing      string // what is being retried; empty unless State is Retrying
	Err        error  // why it is retried, or why the runner has ended; nil: nothing wrong

	Rebuild    *Progress      // the rebuild under way, of which State tells whether the old model is kept up to date meanwhile; nil: none
	Checkpoint Checkpoint     // the last one committed or found
	Source     bson.Timestamp // the source's time when it was last heard of
	Lag        time.Duration  // how far the model is behind what was read of the source, in whole seconds; 0: level

	Changes         int64 // changes applied since the start
	PassedOver      int64 // events of types that change no document
	Commits         int64 // commits that took effect
	Retries         int64 // attempts that failed for a passing reason, at the source or the sink
	StreamsOpened   int64 // change streams opened
	CutTransactions int64 // parts of source transactions committed apart, being over the byte limit
}

// RunState says what a Runner is doing.
type RunState string

// The states of a Runner.
const (
	Idle       RunState = "idle"     // Run has not been called
	Starting   RunState = "starting" // connecting, checking, taking the term
	Running    RunState = "running"
	Rebuilding RunState = "rebuilding" // a rebuild is under way, and the old model stands still
	Retrying   RunState = "retrying"   // a passing failure; Status.Doing and Status.Err tell
	Ended      RunState = "ended"
)

// status is the Status under its lock, and what Status is made of.
type status struct {
	mu     sync.Mutex
	s      Status
	source error     // why the source is being retried, nil: it isn't
	sink   error     // why the sink is
	doing  string    // connecting to one of them
	behind time.Time // since when changes wait for a commit; zero: level
}

const (
	followingSource  = "follow the source"
	committingToSink = "commit to the sink"
	connecting       = "connect to the "
)

func (st *status) change(f func(*Status)) {
	st.mu.Lock()
	defer st.mu.Unlock()
	f(&st.s)
}

func (st *status) get() Status {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.s
	if s.State == Running {
		switch {
		case st.sink != nil:
			s.State, s.Doing, s.Err = Retrying, committingToSink, st.sink
		case st.source != nil:
			s.State, s.Doing, s.Err = Retrying, followingSource, st.source
		}
	} else if s.State == Starting && st.source != nil {
		s.State, s.Doing, s.Err = Retrying, st.doing, st.source
	}
	if !st.behind.IsZero() {
		s.Lag = time.Since(st.behind).Truncate(time.Second)
		if at := s.Checkpoint.Position.Time.T; s.Source.T > at {
			s.Lag = max(s.Lag, time.Duration(s.Source.T-at)*time.Second)
		}
	}
	return s
}

func (st *status) begin() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.State, st.s.Err = Starting, nil
	st.source, st.sink, st.behind = nil, nil, time.Time{}
}

func (st *status) running(c Checkpoint) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.State, st.s.Checkpoint = Running, c
	st.source, st.sink = nil, nil
}

func (st *status) end(err error) {
	st.change(func(s *Status) { s.State, s.Err = Ended, err })
}

func (st *status) opened() {
	st.change(func(s *Status) { s.StreamsOpened++ })
}

// heard is the source's time when it was last heard of.
func (st *status) heard() bson.Timestamp {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.s.Source
}

// read notes the source's time, and that the source answers.
func (st *status) read(t bson.Timestamp) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.Source, st.source = t, nil
}

// retrying notes a passing failure of the sink or, for anything else, of the source.
func (st *status) retrying(doing string, err error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.Retries++
	if doing == committingToSink {
		st.sink = err
	} else {
		st.doing, st.source = doing, err
	}
}

// waiting notes that changes have arrived.
func (st *status) waiting() {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.behind.IsZero() {
		st.behind = time.Now()
	}
}

// committed notes a commit; level says that nothing more was there to be read.
func (st *status) committed(c Checkpoint, batch []*change, level bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.Checkpoint, st.sink = c, nil
	st.s.Commits++
	for _, ch := range batch {
		if ch.collection < 0 {
			st.s.PassedOver++
		} else {
			st.s.Changes++
		}
	}
	if st.behind = time.Now(); level {
		st.behind = time.Time{}
	}
}
