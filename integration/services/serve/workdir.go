package serve

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

const (
	runPrefix = "tidemark-run-" // data of a living process: its file "owner" is locked
	newPrefix = "tidemark-new-" // being set up
	upPrefix  = "tidemark-up-"  // data of the servers that Up left running
)

var errLocked = errors.New("locked by another process")

// workdir is this process's folder for data, with one folder per server. It exists while there is a server.
var workdir struct {
	sync.Mutex
	root  string
	owner *os.File // holds the lock that says we live
	used  int
}

// newDir makes a server's folder: below home, or when that is empty below the process's own.
func newDir(name, home string) (string, error) {
	if home != "" {
		return makeDir(home, name)
	}
	workdir.Lock()
	defer workdir.Unlock()
	if workdir.used == 0 {
		parent := dataRoot()
		cleanStale(parent)
		root, owner, err := newRoot(parent)
		if err != nil {
			return "", fmt.Errorf("make a folder for servers' data: %w", err)
		}
		workdir.root, workdir.owner = root, owner
	}
	dir, err := makeDir(workdir.root, name)
	if err != nil {
		return "", errors.Join(err, releaseRootIfUnused())
	}
	workdir.used++
	return dir, nil
}

// dataRoot is where the process's folder is made. A folder in memory spares tests the waiting for the disk.
func dataRoot() string {
	if dir := os.Getenv("TIDEMARK_DATA"); dir != "" {
		return dir
	}
	return os.TempDir()
}

// makeDir makes a folder with a name of its own. Other users may pass through, not list: PostgreSQL runs as a user of
// its own when we are root.
func makeDir(parent, name string) (string, error) {
	dir, err := os.MkdirTemp(parent, name+"-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// removeDir removes a folder that newDir made.
func removeDir(dir, home string) error {
	err := os.RemoveAll(dir)
	if home != "" {
		return err
	}
	workdir.Lock()
	defer workdir.Unlock()
	workdir.used--
	return errors.Join(err, releaseRootIfUnused())
}

func releaseRootIfUnused() error {
	if workdir.used > 0 {
		return nil
	}
	err := os.RemoveAll(workdir.root)
	workdir.owner.Close()
	workdir.root, workdir.owner = "", nil
	return err
}

// newRoot makes the process's folder under another name and renames it once its lock is held, so that cleanStale of
// another process never sees it unlocked.
func newRoot(tmp string) (string, *os.File, error) {
	draft, err := os.MkdirTemp(tmp, newPrefix)
	if err != nil {
		return "", nil, err
	}
	root := filepath.Join(tmp, runPrefix+strings.TrimPrefix(filepath.Base(draft), newPrefix))
	owner, err := lockFile(filepath.Join(draft, "owner"))
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(draft))
	}
	err = errors.Join(os.Chmod(draft, 0o711), os.Rename(draft, root))
	if err != nil {
		owner.Close()
		return "", nil, errors.Join(err, os.RemoveAll(draft))
	}
	return root, owner, nil
}

// cleanStale removes the folders of processes that were killed before they could, and any server left in them. What
// can't be removed, such as another user's, stays.
func cleanStale(tmp string) {
	roots, _ := filepath.Glob(filepath.Join(tmp, runPrefix+"*"))
	for _, root := range roots {
		owner, err := lockFile(filepath.Join(root, "owner"))
		if err != nil {
			continue
		}
		killInside(root)
		_ = os.RemoveAll(root)
		owner.Close()
	}
	drafts, _ := filepath.Glob(filepath.Join(tmp, newPrefix+"*"))
	for _, draft := range drafts {
		if info, err := os.Stat(draft); err == nil && time.Since(info.ModTime()) > time.Hour {
			_ = os.RemoveAll(draft)
		}
	}
}
