package serve

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
)

// service is one of the four kinds of server that a process shares.
type service struct {
	name   string // as the command and compose.yaml have it
	env    string // the environment variable that names a server to use instead
	docker string // where compose.yaml's server is reached
	native func(ctx context.Context, home string) (source, error)
}

// source is a server and how we came by it.
type source struct {
	uri    string
	way    string // for the user
	docker bool
	dirs   []string // the folders of native servers
}

var services = []*service{
	{
		name: "mongodb", env: "MONGODB_URI",
		docker: "mongodb://127.0.0.1:37017/?replicaSet=rs0",
		native: func(ctx context.Context, home string) (source, error) {
			m, err := StartMongod(ctx, MongodOptions{home: home})
			if err != nil {
				return source{}, err
			}
			return source{uri: m.URI(), way: "native MongoDB " + m.Version(), dirs: []string{m.Members[0].dir}}, nil
		},
	},
	{
		name: "postgres", env: "POSTGRES_DSN",
		docker: "postgres://postgres:tidemark@127.0.0.1:35432/postgres?sslmode=disable",
		native: func(ctx context.Context, home string) (source, error) {
			s, err := StartPostgres(ctx, PostgresOptions{home: home})
			if err != nil {
				return source{}, err
			}
			return source{uri: s.DSN(), way: "native PostgreSQL", dirs: []string{s.dir}}, nil
		},
	},
	{
		name: "redis", env: "REDIS_URL",
		docker: "redis://127.0.0.1:36379/0",
		native: func(ctx context.Context, home string) (source, error) {
			s, err := StartRedis(ctx, RedisOptions{home: home})
			if err != nil {
				return source{}, err
			}
			return source{uri: s.URL(), way: "native Redis", dirs: []string{s.dir}}, nil
		},
	},
	{
		name: "elasticsearch", env: "ELASTICSEARCH_URL",
		docker: "http://127.0.0.1:39200",
		native: func(ctx context.Context, home string) (source, error) {
			s, err := StartElasticsearch(ctx, ElasticsearchOptions{home: home})
			if err != nil {
				return source{}, err
			}
			return source{uri: s.URL(), way: "native Elasticsearch " + elasticsearchVersion, dirs: []string{s.dir}}, nil
		},
	},
}

// obtain finds or starts the service's server: the environment variable's, else Docker's, else a native one.
func (s *service) obtain(ctx context.Context, home string) (source, error) {
	if uri := os.Getenv(s.env); uri != "" {
		return source{uri: uri, way: s.env + " is set"}, nil
	}
	if dockerAnswers(ctx) {
		err := composeUp(ctx, s.name)
		if err == nil {
			return source{uri: s.docker, way: "Docker, left running until `services down`", docker: true}, nil
		}
		announce(fmt.Sprintf("%s: Docker answers but can't start it, so a native one is tried: %v", s.name, err))
	}
	src, err := s.native(ctx, home)
	if err != nil {
		return source{}, fmt.Errorf("%s: %s is not set, no Docker engine serves it, and a native one fails: %w", s.name, s.env, err)
	}
	return src, nil
}

func (s *service) announce(src source) { announce(s.name + ": " + src.way) }

// lookup gives the named services, all when no name is given.
func lookup(names []string) ([]*service, error) {
	if len(names) == 0 {
		return services, nil
	}
	var found []*service
	for _, name := range names {
		i := slices.IndexFunc(services, func(s *service) bool { return s.name == name })
		if i < 0 {
			var known []string
			for _, s := range services {
				known = append(known, s.name)
			}
			return nil, fmt.Errorf("no service %q: there are %s", name, strings.Join(known, ", "))
		}
		found = append(found, services[i])
	}
	return found, nil
}

// shared has the address of each service that this process uses, by name.
var shared struct {
	sync.Mutex
	uris map[string]string
}

// MongoDB is the connection string of the process's MongoDB, a replica set. The first call finds or starts it; ctx
// bounds that only. The database names should be the caller's own, since the server may be shared with others.
func MongoDB(ctx context.Context) (uri string, err error) { return use(ctx, "mongodb") }

// Postgres is the connection string of the process's PostgreSQL. The first call finds or starts it; ctx bounds that
// only.
func Postgres(ctx context.Context) (dsn string, err error) { return use(ctx, "postgres") }

// Redis is the URL of the process's Redis. The first call finds or starts it; ctx bounds that only.
func Redis(ctx context.Context) (url string, err error) { return use(ctx, "redis") }

// Elasticsearch is the URL of the process's Elasticsearch. The first call finds or starts it; ctx bounds that only.
func Elasticsearch(ctx context.Context) (url string, err error) { return use(ctx, "elasticsearch") }

func use(ctx context.Context, name string) (string, error) {
	found, err := lookup([]string{name})
	if err != nil {
		return "", err
	}
	shared.Lock()
	defer shared.Unlock()
	if uri, ok := shared.uris[name]; ok {
		return uri, nil
	}
	src, err := found[0].obtain(ctx, "")
	if err != nil {
		return "", err
	}
	found[0].announce(src)
	if shared.uris == nil {
		shared.uris = map[string]string{}
	}
	shared.uris[name] = src.uri
	return src.uri, nil
}

// Close stops every native server that this process started, throwaway ones too, and removes their data. Call it in
// TestMain after m.Run and at the end of a command. A later use of a shared server starts it anew.
func Close() error {
	shared.Lock()
	defer shared.Unlock()
	shared.uris = nil
	live.Lock()
	processes := slices.Collect(maps.Keys(live.set))
	live.Unlock()
	var errs []error
	for _, p := range processes {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
