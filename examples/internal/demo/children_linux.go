package demo

import (
	"os/exec"
	"runtime"
	"syscall"
)

// The kernel sends the signal below when the thread ends that started the child, so
// main keeps to one thread, which lives as long as the process.
func init() { runtime.LockOSThread() }

// dieWithUs has the kernel kill a child when this process dies, however it dies. The
// child is in a process group of its own: Ctrl-C is for us to handle.
func dieWithUs(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
