package projector

import (
	"os/exec"
	"strings"
	"testing"
)

// The core is light: whoever imports it gets the source's driver, and no sink's client.
func TestProjectorReachesNoSink(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	if len(packages) < 50 {
		t.Fatalf("go list names only %d packages", len(packages))
	}
	for _, p := range packages {
		for _, not := range []string{"pgx", "elastic", "redis", "cobra", "prometheus", "opentelemetry", "tidemark/sinks", "tidemark/reconcile", "tidemark/integration", "database/sql"} {
			if strings.Contains(p, not) {
				t.Errorf("projector reaches %s", p)
			}
		}
	}
}
