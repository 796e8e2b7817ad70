package serve

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

func TestPreparedOnce(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	var builds atomic.Int32
	build := func(_ context.Context, dir string) error {
		builds.Add(1)
		return os.WriteFile(filepath.Join(dir, "file"), nil, 0o644)
	}
	failed := errors.New("failed")
	if _, err := prepared(t.Context(), "thing", func(context.Context, string) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("a failed build gives %v", err)
	}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			dir, err := prepared(t.Context(), "thing", build)
			if err != nil || !exists(filepath.Join(dir, "file")) {
				t.Errorf("%s, %v", dir, err)
			}
		})
	}
	group.Wait()
	if n := builds.Load(); n != 1 {
		t.Errorf("built %d times", n)
	}
}

func TestWrongSumIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("other"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := checkSum(file, libsslSum); err == nil {
		t.Error("a file that isn't what was pinned was accepted")
	}
}
