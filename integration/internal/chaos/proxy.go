// Package chaos has the faults that several tests share.
package chaos

import (
	"bytes"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Proxy is a TCP proxy in front of one server, which loses, keeps back and delays
// what passes through it, on demand and to the byte.
type Proxy struct {
	// ToServer and ToClient are its two directions, each for all connections.
	ToServer, ToClient *Lane

	target   string
	listener net.Listener
	stages   sync.WaitGroup

	mute   atomic.Pointer[mute] // nil: no connection is to be muted
	mu     sync.Mutex
	closed bool
	links  map[*link]struct{}
}

// NewProxy starts a proxy in front of the server at target.
func NewProxy(target string) (*Proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{ToServer: newLane(), ToClient: newLane(), target: target, listener: listener, links: map[*link]struct{}{}}
	p.stages.Go(p.accept)
	return p, nil
}

// Addr is where clients connect, "127.0.0.1:port".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Cut breaks every connection on both sides. What was kept back is lost.
func (p *Proxy) Cut() { p.each((*link).cut) }

// Strand breaks the clients' side of every connection, while what ToServer keeps back
// stays on its way; other connections pass. Deliver lets it arrive and returns when the
// server has worked it off and closed the connections.
func (p *Proxy) Strand() (deliver func()) {
	arrive := make(chan struct{})
	var stranded []*link
	p.each(func(l *link) {
		l.stranded.Store(&arrive)
		l.client.Close()
		stranded = append(stranded, l)
	})
	p.ToServer.Pass()
	return func() {
		close(arrive)
		for _, l := range stranded {
			<-l.ended
		}
	}
}

// Mute makes the next connection that carries text to the server fall silent, both ways:
// nothing passes any more, and neither side is told. Muted is closed when that has happened.
func (p *Proxy) Mute(text string) (muted <-chan struct{}) {
	m := &mute{text: []byte(text), muted: make(chan struct{})}
	p.mute.Store(m)
	return m.muted
}

type mute struct {
	text  []byte
	muted chan struct{}
}

func (p *Proxy) each(f func(*link)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		f(l)
	}
}

// Reset breaks every connection like Cut, but by a reset instead of an orderly end.
func (p *Proxy) Reset() {
	p.each(func(l *link) {
		if c, ok := l.client.(*net.TCPConn); ok {
			_ = c.SetLinger(0)
		}
		_ = l.server.SetLinger(0)
		l.cut()
	})
}

// HideEnds keeps it from the server, until the next Cut, that a client has ended or
// ends: as where a machine goes down, or a network, without a word.
func (p *Proxy) HideEnds() { p.each(func(l *link) { l.hidden.Store(true) }) }

// Close ends the proxy and all connections.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	err := p.listener.Close()
	p.Cut()
	p.stages.Wait()
	return err
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		l := &link{client: client, server: server.(*net.TCPConn), gone: make(chan struct{}), ended: make(chan struct{})}
		p.mu.Lock()
		p.links[l] = struct{}{}
		if p.closed {
			l.cut()
		}
		p.mu.Unlock()
		p.stages.Go(func() {
			var both sync.WaitGroup
			both.Go(func() {
				l.forward(p.ToServer, &listening{Conn: client, p: p, l: l}, server)
				if l.hidden.Load() {
					<-l.gone
				}
				_ = l.server.CloseWrite() // it may still work off what it has got
			})
			both.Go(func() {
				l.forward(p.ToClient, server, client)
				client.Close()
			})
			both.Wait()
			l.cut()
			close(l.ended)
			p.mu.Lock()
			delete(p.links, l)
			p.mu.Unlock()
		})
	}
}

// link is one connection.
type link struct {
	client   net.Conn
	server   *net.TCPConn
	once     sync.Once
	gone     chan struct{} // closed when the link is cut
	ended    chan struct{} // closed when nothing is forwarded any more
	stranded atomic.Pointer[chan struct{}]
	hidden   atomic.Bool
	muted    atomic.Bool
}

// listening is a client's side, on which a Mute listens.
type listening struct {
	net.Conn
	p *Proxy
	l *link
}

func (c *listening) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if m := c.p.mute.Load(); m != nil && bytes.Contains(b[:n], m.text) && c.p.mute.CompareAndSwap(m, nil) {
		c.l.muted.Store(true)
		close(m.muted)
	}
	return n, err
}

func (l *link) cut() {
	l.once.Do(func() { close(l.gone) })
	l.client.Close()
	l.server.Close()
}

// forward copies one direction until its sender ends. A receiver that is gone ends
// nothing by itself: a server still works off what it got from a client that died.
func (l *link) forward(lane *Lane, from, to net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		for rest := buf[:n]; len(rest) > 0; {
			allowed, err := lane.admit(len(rest), l.gone)
			if err != nil {
				l.cut()
				return
			}
			if l.muted.Load() {
				break
			}
			if arrive := l.stranded.Load(); arrive != nil {
				select {
				case <-*arrive:
				case <-l.gone:
					return
				}
			}
			_, _ = to.Write(rest[:allowed])
			rest = rest[allowed:]
		}
		if err != nil {
			return
		}
	}
}

// Lane is one direction of a Proxy. Its limits count the bytes of all connections.
type Lane struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced when the rules change
	reached chan struct{} // closed when the limit has made itself felt
	passed  int64
	limit   int64 // the value of passed at which to hold or to cut; negative: none
	cut     bool
	delay   time.Duration
	piece   int // what passes at once at most; 0: no limit
}

func newLane() *Lane {
	return &Lane{changed: make(chan struct{}), reached: make(chan struct{}), limit: -1}
}

// Passed is how many bytes have been forwarded so far.
func (l *Lane) Passed() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.passed
}

// Pass forwards everything again, what was kept back first.
func (l *Lane) Pass() { l.set(-1, false) }

// HoldAfter forwards n more bytes and keeps back what follows, until Pass.
func (l *Lane) HoldAfter(n int64) { l.set(n, false) }

// CutAfter forwards n more bytes, then cuts the connection that brings another one,
// which is lost. It cuts once; other connections and later ones pass.
func (l *Lane) CutAfter(n int64) { l.set(n, true) }

// Reached is closed once the HoldAfter or CutAfter that was called last keeps bytes
// back or has cut.
func (l *Lane) Reached() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reached
}

// Delay makes every piece of data late by d.
func (l *Lane) Delay(d time.Duration) { l.Trickle(0, d) }

// Trickle forwards n bytes at a time, each piece late by d; 0: as many as there are.
func (l *Lane) Trickle(n int, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.piece, l.delay = n, d
}

func (l *Lane) set(limit int64, cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if limit >= 0 {
		limit += l.passed
	}
	l.limit, l.cut = limit, cut
	close(l.changed)
	l.changed, l.reached = make(chan struct{}), make(chan struct{})
}

var errCut = errors.New("the connection is to be cut")

// admit says how many of n bytes may go now, at least one: it waits while they are
// kept back.
func (l *Lane) admit(n int, gone <-chan struct{}) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.delay; d > 0 {
		l.mu.Unlock()
		select {
		case <-time.After(d):
		case <-gone:
		}
		l.mu.Lock()
	}
	for l.limit >= 0 && l.passed >= l.limit {
		select {
		case <-l.reached:
		default:
			close(l.reached)
		}
		if l.cut {
			l.limit = -1
			return 0, errCut
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-gone:
			l.mu.Lock()
			return 0, errCut
		}
		l.mu.Lock()
	}
	if l.limit >= 0 {
		n = int(min(int64(n), l.limit-l.passed))
	}
	if l.piece > 0 {
		n = min(n, l.piece)
	}
	l.passed += int64(n)
	return n, nil
}
