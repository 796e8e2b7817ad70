package mongodb

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

// The driver has errors that can't be compared, of a cleared connection pool for one, and
// errors.Is panics with such a target.
func TestHandlerReturnsAnErrorThatCantBeCompared(t *testing.T) {
	odd := uncomparable{list{"the pool was cleared"}}
	tx := &Tx{err: odd}
	for _, returned := range []error{odd, fmt.Errorf("the handler's words: %w", odd), errors.New("another")} {
		err := tx.run(t.Context(), func(context.Context, *Tx) error { return returned })
		var found uncomparable
		if err == nil || err.Error() != returned.Error() || !errors.As(err, &found) {
			t.Errorf("%v became %v", returned, err)
		}
	}
}

type uncomparable struct{ inner error }

func (uncomparable) Error() string { return "cleared" }

type list []string

func (list) Error() string { return "list" }
