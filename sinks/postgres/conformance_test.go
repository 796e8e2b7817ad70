package postgres_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/internal/fault"
	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/postgres"
	"github.com/tidemark-go/tidemark/sinks/sinktest"
)

// TestConformance runs the checks beside each other: they wait more than they compute.
func TestConformance(t *testing.T) {
	for _, c := range sinktest.Checks(conformance(t)) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			c.Run(t)
		})
	}
}

// TestConformanceNotices: the suite finds the sink without its guards.
func TestConformanceNotices(t *testing.T) {
	for guard, name := range map[fault.Guard]string{
		fault.FenceTerm:     "fence/term",
		fault.FenceSequence: "fence/sequence",
		fault.FenceRaises:   "fence/term",
		fault.EndBlockers:   "frozen/process",
	} {
		t.Run(string(guard), func(t *testing.T) {
			disable(t, guard)
			s := conformance(t)
			s.Patience = 3 * time.Second // with the guard it is 2 s
			for _, c := range sinktest.Checks(s) {
				if c.Name == name && len(c.Faults(t.Context())) == 0 {
					t.Errorf("without %s, %s finds nothing", guard, name)
				}
			}
		})
	}
}

// conformance is the sink for the suite. Its databases live as long as t, or as the
// check where that is a test of its own.
func conformance(t *testing.T) sinktest.Subject[*postgres.Tx] {
	return sinktest.Subject[*postgres.Tx]{
		Rounds: max(8, effort.Values(40)),
		Features: sinktest.Features{
			Transactions: true, LoadWaits: true, Adds: true, DecimalSums: true, Keys: true, Owners: true, Values: true,
		},
		Open: func(c sinktest.T) sinktest.Store[*postgres.Tx] {
			tb := testing.TB(t)
			if own, ok := c.(testing.TB); ok {
				tb = own
			}
			return conformanceStore(newDatabase(tb))
		},
	}
}

func conformanceStore(d *database) sinktest.Store[*postgres.Tx] {
	documents := postgres.Table[sinktest.Document]{Name: "documents"}
	return sinktest.Store[*postgres.Tx]{
		Sink: func(t sinktest.T) projector.Sink[*postgres.Tx] {
			config := d.Config()
			config.MaxConns = 4
			pool, err := pgxpool.NewWithConfig(context.WithoutCancel(t.Context()), config)
			if err != nil {
				t.Fatalf("%v", err)
			}
			t.Cleanup(pool.Close)
			return postgres.New(pool)
		},
		Documents: putting(d, documents),
		Counts:    adding(d, postgres.Table[sinktest.Count]{Name: "counts"}),
		Amounts:   adding(d, postgres.Table[sinktest.Amount]{Name: "amounts"}),
		Entries:   putting(d, postgres.Table[sinktest.Entry]{Name: "entries"}),
		Keys:      putting(d, postgres.Table[sinktest.Keys]{Name: "keys"}),
		Values:    putting(d, postgres.Table[sinktest.Values]{Name: "values"}),
		// A switch renames schemas: readers use one name always.
		Live: func(_ context.Context, projection string) (string, error) { return projection, nil },
		Checkpoint: func(ctx context.Context, projection string, generation int64) (body []byte, err error) {
			err = d.QueryRow(ctx, `select body from tidemark.checkpoints where projection = $1 and generation = $2`, projection, generation).Scan(&body)
			if errors.Is(err, pgx.ErrNoRows) {
				return nil, nil
			}
			return body, err
		},
		SetCheckpoint: func(ctx context.Context, projection string, generation int64, body []byte) error {
			_, err := d.Exec(ctx, `update tidemark.checkpoints set body = $3 where projection = $1 and generation = $2`, projection, generation, string(body))
			return err
		},
		Refused: []sinktest.Refusal[*postgres.Tx]{
			{Name: "of a NUL, by the sink", Write: func(ctx context.Context, tx *postgres.Tx) error {
				return documents.Put(ctx, tx, nil, []projector.Row[sinktest.Document]{owned("nul", sinktest.Document{Name: "a\x00b"})})
			}},
			{Name: "of a queued statement, by the server", Write: queue(`select 1 / 0`)},
			{Name: "of a statement, by the server", Write: func(ctx context.Context, tx *postgres.Tx) error {
				_, err := tx.Exec(ctx, `select 'x'::text::bigint where $1`, true)
				return err
			}},
			{Name: "of a deferred constraint, at the commit", Write: func(ctx context.Context, tx *postgres.Tx) error {
				_, err := tx.Exec(ctx, `create table strict (n int unique deferrable initially deferred); insert into strict values (1), (1)`)
				return err
			}},
		},
		Send: func(ctx context.Context, tx *postgres.Tx) error {
			_, err := tx.Exec(ctx, `select $1::int`, 1)
			return err
		},
		Freeze: d.freeze,
	}
}

// freeze stops in the middle of a pipeline: the row is locked, and the server waits
// for the rest of a round trip.
func (d *database) freeze(ctx context.Context, cp projector.Checkpoint) (func(), error) {
	config := d.Config().ConnConfig.Config
	conn, err := pgconn.ConnectConfig(ctx, &config)
	if err != nil {
		return nil, err
	}
	p := conn.StartPipeline(context.WithoutCancel(ctx))
	p.SendQueryParams(`begin`, nil, nil, nil, nil)
	p.SendQueryParams(`update tidemark.checkpoints set sequence = sequence where projection = $1 and generation = $2`,
		[][]byte{[]byte(cp.Projection), strconv.AppendInt(nil, cp.Generation, 10)}, nil, nil, nil)
	p.SendFlushRequest()
	if err = p.Flush(); err == nil {
		for range 2 {
			var r any
			if r, err = p.GetResults(); err != nil {
				break
			}
			if rr, ok := r.(*pgconn.ResultReader); ok {
				_, err = rr.Close()
			}
		}
	}
	thaw := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = p.Close()
		_ = conn.Close(ctx)
	}
	if err != nil {
		thaw()
	}
	return thaw, err
}

func adding[R any](d *database, table postgres.Table[R]) sinktest.Adding[*postgres.Tx, R] {
	return sinktest.Adding[*postgres.Tx, R]{Target: table, Rows: func(ctx context.Context, place string) ([]sinktest.Sum[R], error) {
		return stored(ctx, d, place, table.Name, "contributions", func(r R, n string) (sinktest.Sum[R], error) {
			contributions, err := strconv.ParseInt(n, 10, 64)
			return sinktest.Sum[R]{Row: r, Contributions: contributions}, err
		})
	}}
}

func putting[R any](d *database, table postgres.Table[R]) sinktest.Putting[*postgres.Tx, R] {
	return sinktest.Putting[*postgres.Tx, R]{Target: table, Rows: func(ctx context.Context, place string) ([]sinktest.Kept[R], error) {
		return stored(ctx, d, place, table.Name, "_id", func(r R, owner string) (sinktest.Kept[R], error) {
			return sinktest.Kept[R]{Row: r, Owner: owner}, nil
		})
	}}
}

// stored reads a table's rows, and a column beside them, all as text.
func stored[R, S any](ctx context.Context, d *database, place, table, beside string, with func(R, string) (S, error)) ([]S, error) {
	var none R
	columns := []string{pgx.Identifier{beside}.Sanitize() + "::text"}
	typ := reflect.TypeOf(none)
	for i := range typ.NumField() {
		columns = append(columns, textOf(typ.Field(i)))
	}
	// CollectRows returns the error of Query as well.
	rows, _ := d.Query(ctx, "select "+strings.Join(columns, ", ")+" from "+pgx.Identifier{place, table}.Sanitize())
	all, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (s S, err error) {
		texts := make([]*string, len(columns))
		to := make([]any, len(columns))
		for i := range texts {
			to[i] = &texts[i]
		}
		if err := r.Scan(to...); err != nil {
			return s, err
		}
		var row R
		for i, text := range texts[1:] {
			if err := parse(reflect.ValueOf(&row).Elem().Field(i), text); err != nil {
				return s, fmt.Errorf("column %s: %w", columns[i+1], err)
			}
		}
		return with(row, *texts[0])
	})
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && (e.Code == "3F000" || e.Code == "42P01") {
		return nil, nil // no place yet
	}
	return all, err
}

func textOf(f reflect.StructField) string {
	column := pgx.Identifier{strings.ToLower(f.Name)}.Sanitize()
	switch f.Type {
	case reflect.TypeFor[time.Time](), reflect.TypeFor[*time.Time]():
		return "(extract(epoch from " + column + ") * 1000)::bigint::text"
	case reflect.TypeFor[[]byte](), reflect.TypeFor[*[]byte]():
		return "encode(" + column + ", 'hex')"
	}
	return column + "::text"
}

// parse sets a field to what text says, nil for null.
func parse(to reflect.Value, text *string) (err error) {
	if text == nil {
		return nil
	}
	if to.Kind() == reflect.Pointer {
		to.Set(reflect.New(to.Type().Elem()))
		to = to.Elem()
	}
	switch p := to.Addr().Interface().(type) {
	case *time.Time:
		var ms int64
		ms, err = strconv.ParseInt(*text, 10, 64)
		*p = time.UnixMilli(ms)
	case *[]byte:
		*p, err = hex.DecodeString(*text)
	case *bson.ObjectID:
		*p, err = bson.ObjectIDFromHex(*text)
	case *bson.Decimal128:
		*p, err = bson.ParseDecimal128(*text)
	case *map[string]any:
		err = json.Unmarshal([]byte(*text), p)
	case *string:
		*p = *text
	case *sinktest.Word:
		*p = sinktest.Word(*text)
	case *bool:
		*p, err = strconv.ParseBool(*text)
	default:
		err = parseNumber(to, *text)
	}
	return err
}

func parseNumber(to reflect.Value, text string) error {
	switch {
	case to.CanInt():
		n, err := strconv.ParseInt(text, 10, to.Type().Bits())
		to.SetInt(n)
		return err
	case to.CanUint():
		n, err := strconv.ParseUint(text, 10, to.Type().Bits())
		to.SetUint(n)
		return err
	case to.CanFloat():
		f, err := strconv.ParseFloat(text, to.Type().Bits())
		to.SetFloat(f)
		return err
	}
	return fmt.Errorf("no way to read a %s", to.Type())
}
