package serve_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

// TestKilledParentLeavesNothing kills a process that started servers, by SIGKILL. The servers must be gone at once, and
// their data after the next server's start.
func TestKilledParentLeavesNothing(t *testing.T) {
	if err := serve.Close(); err != nil { // so that the next start is this process's first
		t.Fatal(err)
	}
	tmp := t.TempDir()
	// PostgreSQL's user must get in.
	for dir := tmp; strings.HasPrefix(dir, os.TempDir()) && dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("TMPDIR", tmp)
	t.Setenv("TIDEMARK_DATA", "")
	for _, as := range []string{"parent", "pauser"} {
		t.Run(as, func(t *testing.T) {
			parent := again(t, as)
			out, err := parent.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := parent.Start(); err != nil {
				t.Fatal(err)
			}
			var pids []int
			if err := json.NewDecoder(out).Decode(&pids); err != nil {
				t.Fatal(err)
			}
			if len(pids) != 3 || len(within(tmp)) < 8 { // PostgreSQL is six of them
				t.Errorf("only these servers run: %v, %v", pids, within(tmp))
			}
			if err := parent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = parent.Wait() // it was killed
			if as == "parent" {
				waitEmpty(t, func() []string { return within(tmp) })
			}

			s, err := serve.StartRedis(t.Context(), serve.RedisOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			waitEmpty(t, func() []string { return within(tmp) })
			left, err := filepath.Glob(filepath.Join(tmp, "*"))
			if err != nil || len(left) != 0 {
				t.Errorf("folders left: %v, %v", left, err)
			}
		})
	}
}

func waitEmpty(t *testing.T, list func() []string) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for len(list()) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("processes left: %v", list())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// within lists the processes whose working folder is below dir.
func within(dir string) []string {
	entries, _ := os.ReadDir("/proc")
	var found []string
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		if err == nil && strings.HasPrefix(cwd, dir+"/") {
			found = append(found, e.Name()+" "+cwd)
		}
	}
	return found
}
