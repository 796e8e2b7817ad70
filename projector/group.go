package projector

import (
	"context"
	"errors"
	"sync"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// Group is several projections in one process, whatever their sinks. Each has its own
// stream, position and fate.
type Group []*Runner

// Run runs them all until ctx is cancelled or every one has ended by itself. One that
// fails leaves the others running; its error is in Status at once, and in Run's result
// at the end, joined with the others'. Nil: every one was stopped by ctx.
func (g Group) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, len(g))
	var wg sync.WaitGroup
	for i, r := range g {
		wg.Go(func() {
			if errs[i] = r.Run(ctx); errs[i] != nil {
				r.options.Logger.Error("a projection has ended", "projection", r.Name(), "error", errs[i])
				if fault.Global.Off(fault.IsolateRunner) {
					cancel()
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
