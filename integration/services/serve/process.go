package serve

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	startTimeout = 90 * time.Second // until a server answers; far above what a loaded machine needs
	stopTimeout  = 20 * time.Second // until Stop kills
)

// account is the system user a server runs as.
type account struct{ uid, gid uint32 }

// Process is one native server process with its data folder. Its methods may be called from several goroutines.
type Process struct {
	name  string // for messages: "mongod"
	dir   string // holds log and data
	port  int
	hold  net.Listener            // says to other processes that the port is taken
	args  func(port int) []string // the command line, program first
	env   []string
	as    *account       // nil: as ourselves
	quit  syscall.Signal // asks it to end in its orderly way
	abort syscall.Signal // ends it fast, with what it forked
	ready func(context.Context) error
	home  string // the folder of a detached server's folder; empty for one that ends with this process

	mu     sync.Mutex
	cmd    *exec.Cmd
	done   chan struct{} // closed when cmd has ended
	paused bool
	closed bool
}

// live holds every attached Process that isn't closed, for Close.
var live struct {
	sync.Mutex
	set map[*Process]struct{}
}

// newProcess makes the folder and chooses a port; nothing runs yet.
func newProcess(name, home string) (*Process, error) {
	dir, err := newDir(name, home)
	if err != nil {
		return nil, err
	}
	p := &Process{name: name, dir: dir, quit: syscall.SIGTERM, abort: syscall.SIGKILL, home: home}
	if p.port, p.hold, err = freePort(); err != nil {
		return nil, errors.Join(err, removeDir(dir, home))
	}
	if home == "" {
		live.Lock()
		defer live.Unlock()
		if live.set == nil {
			live.set = map[*Process]struct{}{}
		}
		live.set[p] = struct{}{}
	}
	return p, nil
}

// Addr is the server's address, "127.0.0.1:port". It stays the same over a restart.
func (p *Process) Addr() string { return "127.0.0.1:" + strconv.Itoa(p.port) }

// PID is the id of the server's process, 0 when it doesn't run.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return 0
	}
	return p.cmd.Process.Pid
}

// LogTail is the end of the server's log, at most 4 KiB.
func (p *Process) LogTail() string { return tail(p.logPath(), 4096) }

func (p *Process) logPath() string  { return filepath.Join(p.dir, "log") }
func (p *Process) dataPath() string { return filepath.Join(p.dir, "data") }

// Stop ends the server in its orderly way, or kills it after 20 seconds. Nil when it doesn't run.
func (p *Process) Stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stop()
}

func (p *Process) stop() error {
	if !p.running() {
		return nil
	}
	return p.end(p.quit, stopTimeout)
}

// end sends the signal and kills when the server is still there after the timeout.
func (p *Process) end(sig syscall.Signal, timeout time.Duration) error {
	if err := p.resume(); err != nil {
		return err
	}
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(timeout):
		return errors.Join(
			fmt.Errorf("%s did not stop within %s and was killed; its log ends:\n%s", p.name, timeout, p.LogTail()),
			p.kill())
	}
}

// Kill ends the server and its child processes by SIGKILL, as a crash would, and returns when they are gone. The data
// stays, so Restart recovers it. Nil when it doesn't run.
func (p *Process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.kill()
}

func (p *Process) kill() error {
	if !p.running() {
		return nil
	}
	pid := p.cmd.Process.Pid
	// Stopped first, so that it forks no child after the list was taken.
	_ = signal(pid, sigStop)
	forked := children(pid)
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	killAll(forked)
	<-p.done
	p.paused = false
	return nil
}

// Pause freezes the server by SIGSTOP: its connections stay open and nothing answers, as in a network partition or a
// hanging disk. Stop, Restart and Close resume or kill it first.
func (p *Process) Pause() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return fmt.Errorf("pause %s: it is not running", p.name)
	}
	pid := p.cmd.Process.Pid
	if err := signal(pid, sigStop); err != nil {
		return fmt.Errorf("pause %s: %w", p.name, err)
	}
	p.paused = true
	awaitStopped(pid)
	for _, child := range children(pid) {
		_ = signal(child, sigStop) // one that has just ended needs no pause
		awaitStopped(child)
	}
	return nil
}

// Resume ends Pause. Nil when the server isn't paused.
func (p *Process) Resume() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.resume()
}

func (p *Process) resume() error {
	if !p.paused || !p.running() {
		return nil
	}
	pid := p.cmd.Process.Pid
	for _, child := range children(pid) {
		_ = signal(child, sigCont)
	}
	if err := signal(pid, sigCont); err != nil {
		return fmt.Errorf("resume %s: %w", p.name, err)
	}
	p.paused = false
	return nil
}

// Restart stops the server if it runs and starts it on the same port and data. It returns when the server answers.
func (p *Process) Restart(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.stop(); err != nil {
		return err
	}
	return p.start(ctx)
}

// CopyData copies the data folder to dst, which must not exist. The server must be stopped.
func (p *Process) CopyData(dst string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return fmt.Errorf("copy data of %s: it is running; call Stop first", p.name)
	}
	return copyTree(p.dataPath(), dst, nil)
}

// RestoreData replaces the data folder by a copy of src, which CopyData made. The server must be stopped.
func (p *Process) RestoreData(src string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return fmt.Errorf("restore data of %s: it is running; call Stop first", p.name)
	}
	if err := os.RemoveAll(p.dataPath()); err != nil {
		return err
	}
	return copyTree(src, p.dataPath(), p.as)
}

// Close ends the server at once and removes its data. Calls after the first do nothing.
func (p *Process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var err error
	if p.running() {
		err = p.end(p.abort, stopTimeout)
	}
	err = errors.Join(err, p.hold.Close(), removeDir(p.dir, p.home))
	live.Lock()
	delete(live.set, p)
	live.Unlock()
	return err
}

func (p *Process) running() bool {
	if p.done == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// launch starts the server for the first time. The port was free when it was chosen; should another program have
// taken it meanwhile, launch chooses another.
func (p *Process) launch(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for try := 1; ; try++ {
		err := p.start(ctx)
		if err == nil || try == 3 || !strings.Contains(strings.ToLower(p.LogTail()), "address already in use") {
			return err
		}
		port, hold, err := freePort()
		if err != nil {
			return err
		}
		p.hold.Close()
		p.port, p.hold = port, hold
	}
}

// start runs the server and waits until it answers.
func (p *Process) start(ctx context.Context) error {
	if p.closed {
		return fmt.Errorf("start %s: it was closed", p.name)
	}
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	args := p.args(p.port)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, log, log
	cmd.Env = append(os.Environ(), p.env...)
	if err := spawn(cmd, p.as, p.home != ""); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	done := make(chan struct{})
	p.cmd, p.done, p.paused = cmd, done, false
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		if p.home == "" {
			spawned()
		}
		close(done)
	}()

	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		if err = p.ready(ctx); err == nil {
			return nil
		}
		select {
		case <-done:
			return fmt.Errorf("%s ended while starting (%v); its log ends:\n%s", p.name, cmd.ProcessState, p.LogTail())
		case <-ctx.Done():
			return errors.Join(
				fmt.Errorf("%s does not answer (%w): %w; its log ends:\n%s", p.name, ctx.Err(), err, p.LogTail()),
				p.kill())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// dial tells whether something accepts connections at addr.
func dial(ctx context.Context, addr string) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return conn.Close()
}

// freePort chooses a port below the range from which the kernel takes ports for outgoing connections, so that none
// of those takes it while its server restarts. The listener, at a name that isn't a file, keeps other processes that
// use this package from choosing the same before our server has it, until it is closed or this process ends.
func freePort() (int, net.Listener, error) {
	var err error
	for range 100 {
		port := 15000 + rand.IntN(17000)
		var hold, probe net.Listener
		if hold, err = net.Listen("unix", fmt.Sprintf("@tidemark-port-%d", port)); err != nil {
			continue
		}
		if probe, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, hold, probe.Close()
		}
		hold.Close()
	}
	return 0, nil, fmt.Errorf("no free port between 15000 and 32000: %w", err)
}

// tail is the end of a file, at most n bytes; empty when it can't be read.
func tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	text := make([]byte, min(n, info.Size()))
	read, _ := f.ReadAt(text, info.Size()-int64(len(text)))
	return strings.TrimSpace(string(text[:read]))
}
