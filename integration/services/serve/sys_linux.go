package serve

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// forker starts every attached server from one goroutine locked to one thread. Linux sends the parent-death signal
// when the thread that forked ends, not the process, and a Go thread may end at any time unless a goroutine is
// locked to it. The goroutine lives as long as there is a server, so a process that closed its servers has none.
var forker struct {
	sync.Mutex
	children int
	jobs     chan func()
}

// spawn starts cmd. An attached server gets SIGKILL when this process dies, however it dies; a detached one is in a
// session of its own and stays. The user, if any, is changed before the parent-death signal is set, because a change
// of credentials clears it. The caller calls spawned after cmd.Wait returned for an attached command.
func spawn(cmd *exec.Cmd, as *account, detached bool) error {
	attr := &syscall.SysProcAttr{}
	if as != nil {
		attr.Credential = &syscall.Credential{Uid: as.uid, Gid: as.gid}
	}
	cmd.SysProcAttr = attr
	if detached {
		attr.Setsid = true
		return cmd.Start()
	}
	attr.Setpgid = true // Ctrl-C at the terminal is for us to handle, not for the servers.
	attr.Pdeathsig = syscall.SIGKILL

	forker.Lock()
	if forker.children == 0 {
		forker.jobs = make(chan func())
		go forkLoop(forker.jobs)
	}
	forker.children++
	jobs := forker.jobs
	forker.Unlock()

	result := make(chan error, 1)
	jobs <- func() { result <- cmd.Start() }
	err := <-result
	if err != nil {
		spawned()
	}
	return err
}

// spawned tells that one attached command has ended.
func spawned() {
	forker.Lock()
	defer forker.Unlock()
	forker.children--
	if forker.children == 0 {
		close(forker.jobs)
	}
}

func forkLoop(jobs <-chan func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for job := range jobs {
		job()
	}
}

// lockFile takes an exclusive lock on path, creating the file. It returns errLocked at once when another process has
// it. The kernel drops the lock when the holder dies. Closing the file releases it.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errLocked
		}
		return nil, err
	}
	return f, nil
}

const (
	sigStop = syscall.SIGSTOP
	sigCont = syscall.SIGCONT
)

// readStat gives a process's parent and its state, such as "S", or "Z" for a zombie.
func readStat(pid int) (parent int, state string, ok bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, "", false
	}
	// The command's name, in parentheses, may hold anything; the fields after its last parenthesis are plain.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 2 {
		return 0, "", false
	}
	parent, err = strconv.Atoi(fields[1])
	return parent, fields[0], err == nil
}

// alive tells whether the process runs; a zombie doesn't.
func alive(pid int) bool {
	_, state, ok := readStat(pid)
	return ok && state != "Z" && state != "X"
}

// processes lists the ids for which keep is true.
func processes(keep func(pid int) bool) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && keep(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// children lists the processes that pid forked. PostgreSQL's are each in a session of their own, so a signal to the
// process group doesn't reach them.
func children(pid int) []int {
	return processes(func(p int) bool {
		parent, _, ok := readStat(p)
		return ok && parent == pid
	})
}

// inside lists the processes whose working folder is dir or below it, as it is for every server that we start.
func inside(dir string) []int {
	return processes(func(pid int) bool {
		cwd, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "cwd"))
		return err == nil && pid != os.Getpid() && (cwd == dir || strings.HasPrefix(cwd, dir+"/"))
	})
}

// killInside kills those processes.
func killInside(dir string) { killAll(inside(dir)) }

// killAll kills the processes and waits until they are gone.
func killAll(pids []int) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	deadline := time.Now().Add(5 * time.Second)
	for _, pid := range pids {
		for alive(pid) && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// awaitStopped waits until every thread of a process that got SIGSTOP has stopped. A
// thread may still answer a client between the signal and its own turn.
func awaitStopped(pid int) {
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		stats, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
		running := false
		for _, path := range stats {
			text, err := os.ReadFile(path)
			_, state, ok := strings.Cut(string(text), ") ")
			running = running || err == nil && ok && !strings.HasPrefix(state, "T") && !strings.HasPrefix(state, "Z")
		}
		if !running {
			return
		}
	}
}

func signal(pid int, sig syscall.Signal) error { return syscall.Kill(pid, sig) }
