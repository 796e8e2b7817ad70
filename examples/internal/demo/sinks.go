package demo

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/tidemark-go/tidemark/projector"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/postgres"
)

// sink is where the projection keeps its model, seen from outside of it.
type sink interface {
	// Load reads the checkpoint under the lock of commits: one that is under way has
	// happened by its return, or never will.
	Load(ctx context.Context, projection string, generation int64) (projector.Checkpoint, error)
	// glance reads the live one without a lock: the projection does not wait for us.
	// There may be none.
	glance(ctx context.Context) (projector.Checkpoint, error)
	// column reads a column of a target's rows by their key, "_id" or a column.
	column(ctx context.Context, target, key, column string) (map[string]int64, error)
	close(ctx context.Context) error
}

var sinks = map[string]struct {
	servers string
	open    func(context.Context, *World) (sink, error)
}{
	"postgres":      {"MongoDB and PostgreSQL", openPostgres},
	"mongodb":       {"MongoDB", openMongoDB},
	"elasticsearch": {"MongoDB and Elasticsearch", openElasticsearch},
}

// Column reads a column of the model's target, by the rows' key: a column with the
// option key, or "_id" for rows that have none.
func (w *World) Column(ctx context.Context, target, key, column string) (map[string]int64, error) {
	return w.sink.column(ctx, target, key, column)
}

type inPostgres struct {
	*postgres.Sink
	pool       *pgxpool.Pool
	projection string
}

func openPostgres(ctx context.Context, w *World) (sink, error) {
	pool, err := pgxpool.New(ctx, w.servers.postgres)
	if err != nil {
		return nil, err
	}
	return inPostgres{postgres.New(pool), pool, w.demo.Projection}, nil
}

func (s inPostgres) glance(ctx context.Context) (projector.Checkpoint, error) {
	var term, sequence int64
	var body []byte
	err := s.pool.QueryRow(ctx, "select term, sequence, body from tidemark.checkpoints where projection = $1 and phase = 'live'", s.projection).Scan(&term, &sequence, &body)
	var refused *pgconn.PgError
	if errors.Is(err, pgx.ErrNoRows) || errors.As(err, &refused) && refused.Code == "42P01" { // no such table
		return projector.Checkpoint{}, nil
	}
	return stored(s.projection, term, sequence, body, err)
}

func (s inPostgres) column(ctx context.Context, target, key, column string) (map[string]int64, error) {
	name := func(s ...string) string { return pgx.Identifier(s).Sanitize() }
	rows, err := s.pool.Query(ctx, fmt.Sprintf("select %s, %s from %s", name(key), name(column), name(s.projection, target)))
	if err != nil {
		return nil, err
	}
	values := map[string]int64{}
	var k string
	var v int64
	_, err = pgx.ForEachRow(rows, []any{&k, &v}, func() error { values[k] = v; return nil })
	return values, err
}

func (s inPostgres) close(context.Context) error {
	s.pool.Close()
	return nil
}

// inMongoDB is in the database that is followed.
type inMongoDB struct {
	*mongodb.Sink
	db         *mongo.Database
	projection string
}

func openMongoDB(_ context.Context, w *World) (sink, error) {
	return inMongoDB{mongodb.New(w.Source), w.Source, w.demo.Projection}, nil
}

func (s inMongoDB) glance(ctx context.Context) (projector.Checkpoint, error) {
	var found struct {
		Term     int64  `bson:"term"`
		Sequence int64  `bson:"sequence"`
		Body     string `bson:"body"`
	}
	live := bson.D{{Key: "projection", Value: s.projection}, {Key: "phase", Value: "live"}}
	err := s.db.Collection("tidemark.checkpoints").FindOne(ctx, live).Decode(&found)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return projector.Checkpoint{}, nil
	}
	return stored(s.projection, found.Term, found.Sequence, []byte(found.Body), err)
}

func (s inMongoDB) column(ctx context.Context, target, key, column string) (map[string]int64, error) {
	live, err := mongodb.Live(ctx, s.db, s.projection, target)
	if err != nil {
		return nil, err
	}
	cur, err := live.Find(ctx, bson.D{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	path := []string{"_id"}
	if key != "_id" {
		path = append(path, key)
	}
	values := map[string]int64{}
	for cur.Next(ctx) {
		k, isText := cur.Current.Lookup(path...).StringValueOK()
		v, isNumber := cur.Current.Lookup(column).AsInt64OK()
		if !isText || !isNumber {
			return nil, fmt.Errorf("%s: unexpected row %s", live.Name(), cur.Current)
		}
		values[k] = v
	}
	return values, cur.Err()
}

func (s inMongoDB) close(context.Context) error { return nil }

// stored is the checkpoint that was read, with the columns that its body leaves out.
func stored(projection string, term, sequence int64, body []byte, err error) (projector.Checkpoint, error) {
	if err != nil {
		return projector.Checkpoint{}, fmt.Errorf("read the checkpoint: %w", err)
	}
	c, err := projector.DecodeCheckpoint(projection, body)
	c.Term, c.Sequence = term, sequence
	return c, err
}
