package main

import (
	"context"

	goredis "github.com/redis/go-redis/v9"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/sinks/redis"
)

// withRedis gives f an empty Redis, which is started for the first drain that needs it.
func (b *bench) withRedis(ctx context.Context, f func(target) error) (err error) {
	if b.redis == nil {
		if b.redis, err = serve.StartRedis(ctx, serve.RedisOptions{}); err != nil {
			return err
		}
	}
	o, err := goredis.ParseURL(b.redis.URL())
	if err != nil {
		return err
	}
	client := goredis.NewClient(o)
	defer func() { _ = client.Close() }()
	if err := client.FlushAll(ctx).Err(); err != nil {
		return err
	}
	return f(target{uri: b.redis.URL(), redis: client})
}

func redisSums(ctx context.Context, client *goredis.Client, model string) (sums, error) {
	got := sums{}
	if model == "by_product" {
		err := redis.Hash[productRow]{Name: "counts"}.All(ctx, client, model, func(key string, r productRow) error {
			got[key] = [2]int64{r.N, r.Amount}
			return nil
		})
		return got, err
	}
	err := redis.Hash[statusRow]{Name: "counts"}.All(ctx, client, model, func(_ string, r statusRow) error {
		got[r.Status] = [2]int64{r.N, r.Amount}
		return nil
	})
	return got, err
}
