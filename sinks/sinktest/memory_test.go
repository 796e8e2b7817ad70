package sinktest_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// memory is the reference: a store in memory that keeps every rule, but for the one
// that broken names. Its server is the part under mu; on the way to it and back, in
// hop, contexts end and answers get lost.
type memory struct {
	broken    string
	versioned bool
	blind     bool          // a trial tells nothing of what the server refuses
	grace     time.Duration // that a lock's holder is left when somebody else wants the lock

	mu          sync.Mutex
	created     bool
	projections map[string]*known
	places      map[string]tables
	closed      chan struct{}
	late        sync.WaitGroup // commits that go on without their client
}

// known is a projection: its generations, where readers look, and the lock that keeps
// the list of generations as it is.
type known struct {
	lock
	generations map[int64]*stored
	live        string // a place
}

// stored is a generation's checkpoint, and its lock.
type stored struct {
	lock
	generation     int64
	term, sequence int64
	owner          string
	body           []byte
}

type lock struct {
	holder   *memoryTx
	released chan struct{}
}

// tables are the rows of a place by table and key.
type tables map[string]map[string]memoryRow

type memoryRow struct {
	row           any
	owner         string
	contributions int64
	version       int64
	mark          int64
	gone          bool // a versioned store remembers what was removed
}

func (t tables) clone() tables {
	c := tables{}
	for name, rows := range t {
		c[name] = maps.Clone(rows)
	}
	return c
}

func newMemory(broken string, f sinktest.Features) *memory {
	return &memory{
		broken: broken, versioned: !f.Transactions, blind: !f.Transactions && !f.Trials, grace: 20 * time.Millisecond,
		projections: map[string]*known{}, places: map[string]tables{}, closed: make(chan struct{}),
	}
}

func (m *memory) close() {
	m.mu.Lock()
	close(m.closed)
	m.mu.Unlock()
	m.late.Wait()
}

// carryOut has the server do something that goes on without its client, unless it is closed.
func (m *memory) carryOut(f func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.closed: // under a call that did not come back
		return errTransient
	default:
		m.late.Go(f)
		return nil
	}
}

var (
	errTransient = errors.New("the server ended the transaction")
	errFatal     = errors.New("the store is not as it should be")
)

// memorySink is one instance, with a few connections of its own.
type memorySink struct {
	*memory
	pool  chan struct{}
	place *atomic.Value // of the last Acquire, for an instance that is broken
}

func (m *memory) open() memorySink {
	return memorySink{m, make(chan struct{}, 3), new(atomic.Value)}
}

// connect takes a connection out of the pool, and gives the way back.
func (s memorySink) connect(ctx context.Context) (release func(), err error) {
	select {
	case s.pool <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.closed:
		return nil, errTransient
	}
	return func() {
		if ctx.Err() == nil || s.broken != "cancelled call loses its connection" {
			<-s.pool
		}
	}, s.hop(ctx)
}

// memoryTx is a transaction: a copy of the place, or a list of writes.
type memoryTx struct {
	*memory
	tables  tables
	mark    int64 // of the rows that are put
	pending []func(tables) error
	failed  error // the server has refused a write
	last    error // the server will refuse the commit
	ended   bool  // another owner has ended it
}

// hop is a message on its way.
func (m *memory) hop(ctx context.Context) error {
	select {
	case <-time.After(time.Duration(rand.IntN(100)) * time.Microsecond):
	case <-ctx.Done():
	}
	return ctx.Err()
}

// take takes a lock; whoever holds it for longer than the grace is ended
// where that is asked for.
func (m *memory) take(ctx context.Context, p *lock, tx *memoryTx, end bool) error {
	grace := time.NewTimer(m.grace)
	defer grace.Stop()
	if m.broken == "context ignored" {
		ctx = context.WithoutCancel(ctx)
	}
	for {
		m.mu.Lock()
		if p.holder == nil {
			p.holder, p.released = tx, make(chan struct{})
			m.mu.Unlock()
			return nil
		}
		released := p.released
		m.mu.Unlock()
		select {
		case <-released:
		case <-grace.C:
			if end {
				m.end(p)
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-m.closed:
			return errTransient
		}
	}
}

func (m *memory) end(p *lock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.holder != nil {
		p.holder.ended = true
		m.unlocked(p)
	}
}

func (m *memory) unlock(p *lock, tx *memoryTx) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.holder == tx {
		m.unlocked(p)
	}
}

func (m *memory) unlocked(p *lock) {
	p.holder = nil
	close(p.released)
}

func (m *memory) find(projection string) *known {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.projections[projection]
}

// generation finds a checkpoint, nil where there is none.
// liveGeneration is the number of the live generation, 1 where there is none.
func (m *memory) liveGeneration(projection string) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.projections[projection]; k != nil {
		for n, p := range k.generations {
			if c, err := projector.DecodeCheckpoint(projection, p.body); err == nil && c.Phase == projector.Live {
				return n
			}
		}
	}
	return 1
}

func (m *memory) generation(projection string, generation int64) *stored {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.projections[projection]; k != nil {
		return k.generations[generation]
	}
	return nil
}

// all are a projection's generations by number.
func (m *memory) all(k *known) []*stored {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.SortedFunc(maps.Values(k.generations), func(a, b *stored) int { return cmp.Compare(a.generation, b.generation) })
}

// placeOf names the place of a generation. A transactional store has the live one under
// the projection's name and renames at a switch; a versioned one points to it.
func (m *memory) placeOf(projection string, generation int64, live bool) string {
	switch {
	case m.broken == "one place for all":
		return "place"
	case live && !m.versioned:
		return projection
	}
	return fmt.Sprintf("%s generation %d", projection, generation)
}

func (m *memory) fresh(projection string) projector.Checkpoint {
	return projector.Checkpoint{Format: 1, Projection: projection, Generation: 1, Place: m.placeOf(projection, 1, true), Phase: projector.Live}
}

// introduce finds a projection, or stores its first checkpoint.
func (m *memory) introduce(projection string) (*known, error) {
	if m.broken == "projection introduced twice" && m.find(projection) == nil {
		time.Sleep(5 * time.Millisecond)
		m.mu.Lock()
		delete(m.projections, projection)
		m.mu.Unlock()
	}
	if m.broken == "store created twice" && !m.isCreated() {
		time.Sleep(5 * time.Millisecond)
		if m.isCreated() {
			return nil, errors.New("the store exists already")
		}
	}
	cp := m.fresh(projection)
	body, err := cp.Encode()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.created = true
	k := m.projections[projection]
	if k == nil {
		k = &known{generations: map[int64]*stored{1: {generation: 1, body: body}}, live: cp.Place}
		m.projections[projection] = k
	}
	if m.broken == "generation 1 comes back" && k.generations[1] == nil {
		k.generations[1] = &stored{generation: 1, body: body}
	}
	return k, nil
}

func (m *memory) isCreated() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.created
}

func (s memorySink) decode(projection string, p *stored) (projector.Checkpoint, error) {
	cp, err := projector.DecodeCheckpoint(projection, p.body)
	var format *projector.FormatError
	if s.broken == "format not looked at" && errors.As(err, &format) {
		err = &projector.CheckpointError{Projection: projection, Err: errors.New("it is strange")}
	}
	cp.Term, cp.Sequence, cp.Owner = p.term, p.sequence, p.owner
	return cp, err
}

func (s memorySink) Acquire(ctx context.Context, projection, owner string) ([]projector.Checkpoint, error) {
	release, err := s.connect(ctx)
	if release != nil {
		defer release()
	}
	if err != nil {
		return nil, err
	}
	k, err := s.introduce(projection)
	if err != nil {
		return nil, err
	}
	tx := &memoryTx{}
	defer s.unlock(&k.lock, tx)
	if err := s.take(ctx, &k.lock, tx, true); err != nil {
		return nil, err
	}
	all := s.all(k)
	if s.broken == "generations not locked together" {
		s.unlock(&k.lock, tx)
		time.Sleep(500 * time.Microsecond)
	}
	for _, p := range all {
		if s.broken == "other generations not waited for" && p.generation > 1 {
			continue
		}
		defer s.unlock(&p.lock, tx)
		if err := s.take(ctx, &p.lock, tx, s.broken != "acquire waits for ever"); err != nil {
			return nil, err
		}
	}
	cps, err := s.raise(projection, owner, all)
	if err != nil {
		return nil, err
	}
	s.place.Store(cps[0].Place)
	if s.broken == "generations unsorted" {
		slices.Reverse(cps)
	}
	return cps, s.hop(ctx)
}

// raise takes the term of all generations.
func (s memorySink) raise(projection, owner string, all []*stored) (cps []projector.Checkpoint, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range all {
		cp, err := s.decode(projection, p)
		switch {
		case err == nil:
		case s.broken == "term raised before decoding":
			p.term++
		case s.broken == "malformed checkpoint overwritten":
			p.body, _ = s.fresh(projection).Encode()
		case s.broken == "other generations not decoded" && p.generation > 1:
			err = nil
		}
		if err != nil {
			return nil, err
		}
		if s.broken != "first term is 0" || cp.Term > 0 || cp.Sequence > 0 {
			cp.Term++
		}
		if s.broken == "acquire loses the position" {
			cp.Position = projector.Position{}
			p.body, _ = cp.Encode()
		}
		cp.Owner = owner
		cps = append(cps, cp)
	}
	for i, p := range all {
		if s.broken != "only the live term raised" || cps[i].Phase == projector.Live {
			p.term, p.owner = cps[i].Term, owner
		}
	}
	return cps, nil
}

func (s memorySink) Load(ctx context.Context, projection string, generation int64) (projector.Checkpoint, error) {
	release, err := s.connect(ctx)
	if release != nil {
		defer release()
	}
	if err != nil {
		return projector.Checkpoint{}, err
	}
	if generation == 0 {
		generation = s.liveGeneration(projection)
	}
	p := s.generation(projection, generation)
	if p == nil {
		return projector.Checkpoint{Projection: projection, Generation: generation}, nil
	}
	tx := &memoryTx{}
	if s.broken != "load without lock" {
		if err := s.take(ctx, &p.lock, tx, s.broken != "load waits for ever"); err != nil {
			return projector.Checkpoint{}, err
		}
		defer s.unlock(&p.lock, tx)
	}
	s.mu.Lock()
	if s.broken == "load raises the term" {
		p.term++
	}
	cp, err := s.decode(projection, p)
	s.mu.Unlock()
	return cp, errors.Join(err, s.hop(ctx))
}

func (s memorySink) Commit(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *memoryTx) error) error {
	return s.transact(ctx, prev, next, apply, true)
}

func (s memorySink) Try(ctx context.Context, prev projector.Checkpoint, apply func(context.Context, *memoryTx) error) error {
	next := prev
	next.Sequence++
	return s.transact(ctx, prev, next, apply, s.broken == "trial commits")
}

func (s memorySink) transact(ctx context.Context, prev, next projector.Checkpoint, apply func(context.Context, *memoryTx) error, commit bool) error {
	release, err := s.connect(ctx)
	if release != nil {
		defer release()
	}
	if err != nil {
		return err
	}
	p := s.generation(prev.Projection, prev.Generation)
	if p == nil {
		return projector.ErrFenced
	}
	if s.broken == "instance knows one place" {
		next.Place = s.place.Load().(string)
	}
	tx := &memoryTx{memory: s.memory}
	if next.Rebuild != nil {
		tx.mark = next.Rebuild.Mark
	}
	if !s.versioned && s.broken != "fence without lock" {
		if err := s.take(ctx, &p.lock, tx, false); err != nil {
			return err
		}
	}
	keep := false
	defer func() {
		if !keep {
			s.unlock(&p.lock, tx)
		}
	}()
	if s.broken == "one lock for all generations" {
		k := s.find(prev.Projection)
		defer s.unlock(&k.lock, tx)
		if err := s.take(ctx, &k.lock, tx, false); err != nil {
			return err
		}
	}
	if err := s.fence(p, prev, !commit); err != nil {
		return err
	}
	tx.tables = s.memory.tables(next.Place)
	if err := s.run(ctx, tx, apply, commit || !s.blind); err != nil {
		keep = tx.failed != nil && s.broken == "refusal keeps the lock"
		return s.failed(p, next, tx, err, commit)
	}
	if !commit {
		if s.broken == "trial leaves its tables" {
			s.leave(next.Place, tx)
		}
		return nil
	}
	keep = true
	return s.send(ctx, p, prev, next, tx)
}

func (s memorySink) fence(p *stored, prev projector.Checkpoint, trial bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if trial && s.broken == "trial not fenced" {
		return nil
	}
	return s.compare(p, prev)
}

func (s memorySink) compare(p *stored, prev projector.Checkpoint) error {
	switch {
	case prev.Sequence == 0 && s.broken == "first commit not fenced":
	case p.term != prev.Term && s.broken != "term not compared":
		return &projector.FencedError{Projection: prev.Projection, Term: prev.Term, Theirs: p.term, Owner: p.owner}
	case p.owner != prev.Owner && s.broken != "owner not compared":
		return &projector.FencedError{Projection: prev.Projection, Term: prev.Term, Theirs: p.term, Owner: p.owner}
	case p.sequence != prev.Sequence && s.broken != "sequence not compared":
		return fmt.Errorf("another commit follows: %w", projector.ErrFenced)
	}
	return nil
}

func (m *memory) tables(place string) tables {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.places[place] == nil {
		return tables{}
	}
	if m.broken == "writes outside the transaction" {
		return m.places[place]
	}
	return m.places[place].clone()
}

func (s memorySink) run(ctx context.Context, tx *memoryTx, apply func(context.Context, *memoryTx) error, server bool) error {
	if s.broken == "writes outside the transaction" {
		s.mu.Lock()
		defer s.mu.Unlock()
	}
	if err := apply(ctx, tx); err != nil || !server {
		return err
	}
	if tx.failed != nil {
		return tx.failed
	}
	return tx.last
}

// failed is what becomes of a transaction whose apply has failed.
func (s memorySink) failed(p *stored, next projector.Checkpoint, tx *memoryTx, err error, commit bool) error {
	refused := tx.failed != nil || tx.last != nil
	switch {
	case !commit:
	case s.broken == "apply's error swallowed" && !refused:
		s.publish(p, next, tx)
		return nil
	case s.broken == "refused write leaves the rest" && refused:
		s.leave(next.Place, tx)
	case s.broken == "failed transaction stores the checkpoint" && refused:
		tx.tables = nil
		s.publish(p, next, tx)
		return nil
	case s.broken == "failed first commit leaves its tables" && next.Sequence == 1:
		s.leave(next.Place, tx)
	}
	return err
}

// leave makes a transaction's writes visible without its checkpoint.
func (m *memory) leave(place string, tx *memoryTx) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.places[place] = tx.tables
}

// send is the COMMIT. The server carries it out even where its client has gone.
func (s memorySink) send(ctx context.Context, p *stored, prev, next projector.Checkpoint, tx *memoryTx) error {
	if err := s.hop(ctx); err != nil {
		if s.broken == "cancelled commit leaves its rows" {
			s.leave(next.Place, tx)
		}
		s.writeLate(next.Place, tx)
		s.unlock(&p.lock, tx)
		return s.lost(err)
	}
	result := make(chan error, 1)
	err := s.carryOut(func() {
		_ = s.hop(context.Background())
		result <- s.settle(p, prev, next, tx)
		s.unlock(&p.lock, tx)
	})
	if err != nil {
		return err
	}
	select {
	case err := <-result:
		return errors.Join(err, s.lost(s.hop(ctx)))
	case <-ctx.Done():
		s.writeLate(next.Place, tx)
		return s.lost(ctx.Err())
	}
}

// writeLate is a commit that arrives late and is taken for a new one.
func (s memorySink) writeLate(place string, tx *memoryTx) {
	if s.broken != "late commit not fenced" {
		return
	}
	_ = s.carryOut(func() {
		time.Sleep(2 * time.Millisecond)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.writeLocked(place, tx.pending)
	})
}

func (s memorySink) lost(err error) error {
	if err != nil && s.broken == "lost answer is poison" {
		return errors.New("no answer")
	}
	return err
}

// settle is the end of a commit, on the server.
func (s memorySink) settle(p *stored, prev, next projector.Checkpoint, tx *memoryTx) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if tx.ended {
		return errTransient
	}
	if s.versioned { // rows first; then the checkpoint, if it is still the one that it was
		s.writeLocked(next.Place, tx.pending)
		if s.broken != "checkpoint not compared at the end" {
			if err := s.compare(p, prev); err != nil {
				return err
			}
		}
	}
	s.publishLocked(p, next, tx)
	return nil
}

func (m *memory) writeLocked(place string, writes []func(tables) error) {
	if m.places[place] == nil {
		m.places[place] = tables{}
	}
	for _, write := range writes {
		_ = write(m.places[place])
	}
}

func (s memorySink) publish(p *stored, next projector.Checkpoint, tx *memoryTx) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.publishLocked(p, next, tx)
}

func (s memorySink) publishLocked(p *stored, next projector.Checkpoint, tx *memoryTx) {
	body, err := next.Encode()
	if err != nil {
		panic(err)
	}
	if s.broken == "checkpoint encoded anew" {
		body = append([]byte(" "), body...)
	}
	p.sequence, p.body = next.Sequence, body
	if tx.tables != nil && !s.versioned && s.broken != "writes lost" {
		s.places[next.Place] = tx.tables
	}
}

func (s memorySink) Classify(err error) projector.Class {
	var refused *refusedError
	switch {
	case errors.Is(err, errTransient), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return projector.Transient
	case errors.Is(err, errFatal), errors.As(err, &refused) && s.broken == "refusal is fatal":
		return projector.Fatal
	}
	return projector.Poison
}

type refusedError struct{ how string }

func (e *refusedError) Error() string { return "refused " + e.how }

// refusals are writes that are refused by the sink, by the server, and at the commit.
func refusals() []sinktest.Refusal[*memoryTx] {
	return []sinktest.Refusal[*memoryTx]{
		{Name: "by the sink", Write: func(context.Context, *memoryTx) error { return &refusedError{"by the sink"} }},
		{Name: "by the server", Write: func(_ context.Context, tx *memoryTx) error {
			tx.failed = &refusedError{"by the server"}
			return tx.failed
		}},
		{Name: "at the commit", Write: func(_ context.Context, tx *memoryTx) error {
			tx.last = &refusedError{"at the commit"}
			return nil
		}},
	}
}

// freeze holds a checkpoint's lock for an owner that does nothing.
func (m *memory) freeze(ctx context.Context, cp projector.Checkpoint) (func(), error) {
	tx := &memoryTx{}
	p := m.generation(cp.Projection, cp.Generation)
	if err := m.take(ctx, &p.lock, tx, false); err != nil {
		return nil, err
	}
	return func() { m.unlock(&p.lock, tx) }, nil
}

func (m *memory) livePlace(_ context.Context, projection string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.projections[projection]
	if k == nil {
		return "", fmt.Errorf("there is no projection %q", projection)
	}
	return k.live, nil
}

func (m *memory) checkpoint(_ context.Context, projection string, generation int64) ([]byte, error) {
	if p := m.generation(projection, generation); p != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		return p.body, nil
	}
	return nil, nil
}

func (m *memory) setCheckpoint(_ context.Context, projection string, generation int64, body []byte) error {
	p := m.generation(projection, generation)
	m.mu.Lock()
	defer m.mu.Unlock()
	p.body = body
	return nil
}
