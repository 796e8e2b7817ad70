//go:build !linux

package serve

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// Native servers are for Linux only; elsewhere the environment variables and Docker are the ways.
var errNotLinux = errors.New("native servers need Linux on amd64: start Docker or set the environment variable")

const (
	sigStop = syscall.Signal(0)
	sigCont = syscall.Signal(0)
)

func spawn(*exec.Cmd, *account, bool) error { return errNotLinux }
func spawned()                              {}
func inside(string) []int                   { return nil }
func children(int) []int                    { return nil }
func killInside(string)                     {}
func killAll([]int)                         {}
func awaitStopped(int)                      {}
func signal(int, syscall.Signal) error      { return errNotLinux }

// lockFile locks nothing here, where only Up and Down use it.
func lockFile(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
}
