package main

import (
	"context"
	"fmt"
	"net/url"

	"github.com/jackc/pgx/v5"
	goredis "github.com/redis/go-redis/v9"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/sinks/mongodb"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// The sinks that are measured.
const (
	sinkPostgres = "postgres"
	sinkMongoDB  = "mongodb"
	sinkRedis    = "redis"
	sinkElastic  = "elasticsearch"
)

// sinkDatabase is the database that a drain writes to, in either sink.
const sinkDatabase = "bench_model"

// target is the empty database that one drain writes to.
type target struct {
	uri     string          // its address, for a child
	conn    *pgx.Conn       // of PostgreSQL
	mongo   *mongo.Database // of MongoDB
	redis   *goredis.Client
	elastic bool // uri is Elasticsearch's
}

// withTarget gives f an empty database of the sink, and drops it; of no sink, nothing. What earlier ones left to be
// written to disk is written before, so that no row pays for another.
func (b *bench) withTarget(ctx context.Context, sink string, f func(target) error) error {
	switch sink {
	case sinkPostgres:
		return b.withPostgres(ctx, f)
	case sinkMongoDB:
		return b.withMongoDB(ctx, f)
	case sinkRedis:
		return b.withRedis(ctx, f)
	case sinkElastic:
		return b.withElastic(ctx, f)
	}
	return f(target{})
}

func (b *bench) withPostgres(ctx context.Context, f func(target) error) error {
	if err := b.statements(ctx, "CREATE DATABASE "+sinkDatabase, "CHECKPOINT"); err != nil {
		return err
	}
	u, err := url.Parse(b.postgres.DSN())
	if err != nil {
		return err
	}
	u.Path = "/" + sinkDatabase
	conn, err := pgx.Connect(ctx, u.String())
	if err != nil {
		return err
	}
	err = f(target{uri: u.String(), conn: conn})
	_ = conn.Close(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	return b.statements(ctx, "DROP DATABASE "+sinkDatabase+" WITH (FORCE)")
}

func (b *bench) statements(ctx context.Context, statements ...string) error {
	for _, s := range statements {
		if _, err := b.admin.Exec(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// withMongoDB starts the server, another one than the source's, for the first drain that needs it.
func (b *bench) withMongoDB(ctx context.Context, f func(target) error) error {
	if b.mongodb == nil {
		server, err := serve.StartMongod(ctx, serve.MongodOptions{CacheGB: 1})
		if err != nil {
			return err
		}
		client, err := mongo.Connect(options.Client().ApplyURI(server.URI()))
		if err != nil {
			return err
		}
		b.mongodb, b.models = server, client.Database(sinkDatabase)
	}
	fsync := bson.D{{Key: "fsync", Value: 1}}
	if err := b.models.Client().Database("admin").RunCommand(ctx, fsync).Err(); err != nil {
		return err
	}
	if err := f(target{uri: b.mongodb.URI(), mongo: b.models}); err != nil {
		return err
	}
	return b.models.Drop(ctx)
}

// sums are the rows of a rollup, in the table or collection counts.
func (t target) sums(ctx context.Context, model, key string) (sums, error) {
	if t.conn != nil {
		return readSums(ctx, t.conn, fmt.Sprintf("SELECT %s::text, n, amount FROM %s.counts", key, model))
	}
	if t.redis != nil {
		return redisSums(ctx, t.redis, model)
	}
	live, err := mongodb.Live(ctx, t.mongo, model, "counts")
	if err != nil {
		return nil, err
	}
	cur, err := live.Aggregate(ctx, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "_id", Value: bson.D{{Key: "$toString", Value: "$_id." + key}}},
	}}}})
	if err != nil {
		return nil, err
	}
	return allSums(ctx, cur)
}

func readSums(ctx context.Context, conn *pgx.Conn, query string) (sums, error) {
	got := sums{}
	rows, err := conn.Query(ctx, query)
	if err != nil {
		return nil, err
	}
	var key string
	var n, amount int64
	_, err = pgx.ForEachRow(rows, []any{&key, &n, &amount}, func() error {
		got[key] = [2]int64{n, amount}
		return nil
	})
	return got, err
}

// orders are the rows of the mirror.
func (t target) orders(ctx context.Context) (map[orderRow]bool, error) {
	if t.conn != nil {
		rows, err := t.conn.Query(ctx, "SELECT number, customer, status, amount FROM orders.orders")
		if err != nil {
			return nil, err
		}
		got := map[orderRow]bool{}
		var o orderRow
		_, err = pgx.ForEachRow(rows, []any{&o.Number, &o.Customer, &o.Status, &o.Amount}, func() error {
			got[o] = true
			return nil
		})
		return got, err
	}
	switch {
	case t.redis != nil:
		got := map[orderRow]bool{}
		err := redis.Hash[orderRow]{Name: "orders"}.All(ctx, t.redis, "orders", func(_ string, o orderRow) error { got[o] = true; return nil })
		return got, err
	case t.elastic:
		return elasticOrders(ctx, t.uri)
	}
	live, err := mongodb.Live(ctx, t.mongo, "orders", "orders")
	if err != nil {
		return nil, err
	}
	return ordersIn(ctx, live)
}

func ordersIn(ctx context.Context, coll *mongo.Collection) (map[orderRow]bool, error) {
	cur, err := coll.Find(ctx, bson.D{})
	if err != nil {
		return nil, err
	}
	got := map[orderRow]bool{}
	for cur.Next(ctx) {
		var v orderView
		if err := cur.Decode(&v); err != nil {
			return nil, err
		}
		got[orderRow(v)] = true
	}
	return got, cur.Err()
}
