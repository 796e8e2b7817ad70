package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// cacheDir is where prepared servers are kept: the folder tidemark in the user's cache folder.
func cacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder (%w): set HOME or XDG_CACHE_HOME", err)
	}
	dir := filepath.Join(base, "tidemark")
	return dir, os.MkdirAll(dir, 0o755)
}

// prepared is the cache's folder of that name. When it isn't there, build fills an empty folder, which is then
// renamed: it is there whole or not at all. Of several processes one builds and the others wait.
func prepared(ctx context.Context, name string, build func(ctx context.Context, dir string) error) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	final := filepath.Join(cache, name)
	if exists(final) {
		return final, nil
	}
	unlock, err := waitLock(ctx, final+".lock")
	if err != nil {
		return "", fmt.Errorf("prepare %s: %w", name, err)
	}
	defer unlock()
	if exists(final) {
		return final, nil
	}
	draft := final + ".draft" // ours alone while we hold the lock; a killed process may have left one
	if err := errors.Join(os.RemoveAll(draft), os.Mkdir(draft, 0o755)); err != nil {
		return "", err
	}
	err = build(ctx, draft)
	if err == nil {
		err = os.Rename(draft, final)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("prepare %s: %w", name, err), os.RemoveAll(draft))
	}
	return final, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// waitLock takes the lock, waiting for another process's end. The function returned releases it.
func waitLock(ctx context.Context, path string) (func(), error) {
	for {
		f, err := lockFile(path)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, errLocked) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for another process that holds %s: %w", path, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// run executes a command to its end. The error carries the end of what it printed.
func run(ctx context.Context, dir string, env []string, argv ...string) (string, error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &errs
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(out.String() + errs.String())
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, text[max(0, len(text)-2000):])
	}
	return out.String(), nil
}
