package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/tidemark-go/tidemark/projector"
)

// buildColumn holds the mark of the rebuild in place that wrote a row last. A table gets
// it with its first such rebuild.
const buildColumn = "tidemark_build"

// Prepare implements projector.Sweeper. It adds the column for marks, which takes a lock
// that no reader can share, for an instant.
func (t Table[R]) Prepare(ctx context.Context, tx *Tx) error {
	if _, err := t.planFor(keyed, mirrored); err != nil {
		return err
	}
	var (
		there   bool
		timeout string
	)
	err := tx.QueryRow(ctx, `select exists (select from pg_attribute a join pg_class c on c.oid = attrelid
	where relname = $1 and relnamespace = (select oid from pg_namespace where nspname = $2) and attname = $3 and not attisdropped),
	current_setting('lock_timeout')`, t.Name, tx.place, buildColumn).Scan(&there, &timeout)
	if err != nil || there {
		return err
	}
	alter := fmt.Sprintf("alter table %s add column if not exists %s bigint", quoted(tx.place, t.Name), buildColumn)
	_, err = tx.Exec(ctx, fmt.Sprintf("%s; %s; select set_config('lock_timeout', '%s', true)", ddlPatience, alter, timeout))
	if code(err) == insufficientPrivilege {
		return &setupError{fmt.Errorf("tidemark/postgres: to mark rows, table %q needs one more column, and this role may not add it; as its owner run\n%s;\n%w", t.Name, alter, err)}
	}
	return err
}

// Sweep implements projector.Sweeper.
func (t Table[R]) Sweep(ctx context.Context, tx *Tx, limit int) (int, error) {
	p, err := t.planFor(keyed, mirrored)
	if err != nil {
		return 0, err
	}
	if tx.build == 0 {
		return 0, &setupError{errors.New("tidemark/postgres: Sweep works in a rebuild in place only: this commit's checkpoint has no mark")}
	}
	tag, err := tx.Exec(ctx, p.sweep, tx.build, limit)
	return int(tag.RowsAffected()), err
}

// Count implements projector.Sweeper.
func (t Table[R]) Count(ctx context.Context, tx *Tx) (n int64, err error) {
	if _, err := t.planFor(keyed, mirrored); err != nil {
		return 0, err
	}
	err = tx.QueryRow(ctx, `select count(*) from "`+t.Name+`"`).Scan(&n)
	return n, err
}

var (
	_ projector.Loader[*Tx, struct{}] = Table[struct{}]{}
	_ projector.Sweeper[*Tx]          = Table[struct{}]{}
)
