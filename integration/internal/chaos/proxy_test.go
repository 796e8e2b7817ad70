package chaos_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tidemark-go/tidemark/integration/internal/chaos"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server takes one connection and gives what it reads from it, until it ends.
func server(t *testing.T) (addr string, accepted <-chan net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	conns := make(chan net.Conn, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		if c, err := l.Accept(); err == nil {
			conns <- c
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String(), conns
}

func connect(t *testing.T) (p *chaos.Proxy, client, behind net.Conn) {
	t.Helper()
	addr, accepted := server(t)
	p, err := chaos.NewProxy(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	client, err = net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	behind = <-accepted
	t.Cleanup(func() { client.Close(); behind.Close() })
	return p, client, behind
}

func read(t *testing.T, c net.Conn, n int) string {
	t.Helper()
	buf := make([]byte, n)
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, buf); err != nil {
		t.Fatal(err)
	}
	return string(buf)
}

// nothing shows that no byte arrives for a moment.
func nothing(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read %d bytes, %v", n, err)
	}
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := c.Write([]byte(s)); err != nil {
		t.Fatal(err)
	}
}

func TestProxyHoldsToTheByte(t *testing.T) {
	p, client, behind := connect(t)
	write(t, client, "one")
	if got := read(t, behind, 3); got != "one" {
		t.Fatal(got)
	}
	p.ToServer.HoldAfter(2)
	write(t, client, "abcd")
	if got := read(t, behind, 2); got != "ab" {
		t.Fatal(got)
	}
	<-p.ToServer.Reached()
	nothing(t, behind)
	write(t, behind, "back") // the other direction is not concerned
	if got := read(t, client, 4); got != "back" {
		t.Fatal(got)
	}
	p.ToServer.Pass()
	if got := read(t, behind, 2); got != "cd" {
		t.Fatal(got)
	}
	if n := p.ToServer.Passed(); n != 7 {
		t.Fatal(n)
	}
}

func TestProxyCutsToTheByte(t *testing.T) {
	p, client, behind := connect(t)
	p.ToServer.CutAfter(2)
	write(t, client, "abcd")
	_ = behind.SetReadDeadline(time.Now().Add(5 * time.Second))
	got, _ := io.ReadAll(behind)
	if !bytes.Equal(got, []byte("ab")) {
		t.Fatalf("%q", got)
	}
	_ = client.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := client.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the client's connection is not cut: %d bytes, %v", n, err)
	}
}

// What a client sent before it lost its connection reaches the server later.
func TestProxyDeliversLate(t *testing.T) {
	p, client, behind := connect(t)
	p.ToServer.HoldAfter(0)
	write(t, client, "late")
	<-p.ToServer.Reached()
	deliver := p.Strand()
	_ = client.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := client.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the client's connection is not cut: %v", err)
	}
	nothing(t, behind)
	var wg sync.WaitGroup
	wg.Go(deliver)
	_ = behind.SetReadDeadline(time.Now().Add(5 * time.Second))
	if got, err := io.ReadAll(behind); err != nil || string(got) != "late" {
		t.Fatalf("%q, %v", got, err)
	}
	behind.Close()
	wg.Wait()
}

func TestProxyDelays(t *testing.T) {
	p, client, behind := connect(t)
	p.ToServer.Delay(30 * time.Millisecond)
	begin := time.Now()
	write(t, client, "x")
	if read(t, behind, 1); time.Since(begin) < 30*time.Millisecond {
		t.Fatal(time.Since(begin))
	}
}

func TestProxyTrickles(t *testing.T) {
	p, client, behind := connect(t)
	p.ToServer.Trickle(1, 20*time.Millisecond)
	began := time.Now()
	if _, err := client.Write([]byte("slow")); err != nil {
		t.Fatal(err)
	}
	if got := read(t, behind, 4); got != "slow" || time.Since(began) < 80*time.Millisecond {
		t.Errorf("%q after %s", got, time.Since(began))
	}
	p.ToServer.Delay(0)
	if _, err := client.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	read(t, behind, 1000)
}

func TestProxyHidesEnds(t *testing.T) {
	p, client, behind := connect(t)
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	read(t, behind, 1) // the connection is there
	p.HideEnds()
	client.Close()
	nothing(t, behind)
	p.Reset()
	_ = behind.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := behind.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after a reset a read gives %v", err)
	}
}
