package demo

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

// servers are those that the demo uses, with a database of its own on each.
type servers struct {
	name              string        // of the databases
	mongodb, postgres string        // connection strings
	elasticsearch     string        // URL
	own               *serve.Mongod // MongoDB, where the demo has started it: its history can be lost
	admin             string        // PostgreSQL's, of the database that was there
	containers        []string
}

// start starts MongoDB, and what the sink needs besides.
func (s *servers) start(ctx context.Context, sink string) (err error) {
	s.containers = containers(ctx)
	var b [4]byte
	_, _ = rand.Read(b[:])
	s.name = "demo_" + hex.EncodeToString(b[:])
	if err := s.startMongoDB(ctx); err != nil {
		return err
	}
	switch sink {
	case "elasticsearch":
		s.elasticsearch, err = serve.Elasticsearch(ctx)
	case "postgres":
		if s.admin, err = serve.Postgres(ctx); err != nil {
			return err
		}
		if err := s.administer(ctx, "create database "+s.name); err != nil {
			return err
		}
		s.postgres = withDatabase(s.admin, s.name)
	}
	return err
}

// prefix begins what the demo has in Elasticsearch, which has no databases.
func (s *servers) prefix() string { return s.name + "-" }

// startMongoDB starts one whose oplog is so small that it can be made to roll over in
// seconds, unless the user has named one. Where none can be started so, Docker's serves.
func (s *servers) startMongoDB(ctx context.Context) (err error) {
	if os.Getenv("MONGODB_URI") == "" {
		s.own, err = serve.StartMongod(ctx, serve.MongodOptions{OplogMB: 8, SyncDelay: 1})
		if err == nil {
			fmt.Fprintln(os.Stderr, "services: mongodb: native MongoDB", s.own.Version()+", with an oplog of 8 MB")
			s.mongodb = s.own.URI()
			return nil
		}
		s.own = nil
		if ctx.Err() != nil {
			return err
		}
	}
	shared, sharedErr := serve.MongoDB(ctx)
	if sharedErr != nil {
		return errors.Join(err, sharedErr)
	}
	s.mongodb = shared
	return nil
}

// close removes the databases and stops what start has started.
func (s *servers) close(ctx context.Context) (err error) {
	if s.postgres != "" {
		err = s.administer(ctx, "drop database "+s.name+" with (force)")
	}
	err = errors.Join(err, serve.Close())
	if started := slices.DeleteFunc(containers(ctx), func(c string) bool { return slices.Contains(s.containers, c) }); len(started) > 0 {
		_, stopErr := compose(ctx, append([]string{"rm", "--stop", "--force", "--volumes"}, started...)...)
		err = errors.Join(err, stopErr)
	}
	return err
}

func (s *servers) administer(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, s.admin)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statement)
	return errors.Join(err, conn.Close(ctx))
}

// withDatabase is a connection string for another database of the same server.
func withDatabase(dsn, name string) string {
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " dbname=" + name // the form with keywords, in which the last one counts
	}
	u.Path = "/" + name
	return u.String()
}

// containers are the servers that Docker has running for this module. Those that serve
// starts there it leaves running, for the next test; the demo does not.
func containers(ctx context.Context) []string {
	running, err := compose(ctx, "ps", "--services", "--status", "running")
	if err != nil {
		return nil // no Docker
	}
	return strings.Fields(running)
}

func compose(ctx context.Context, args ...string) (string, error) {
	dir, err := command(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "integration", "compose.yaml")
	return command(ctx, "docker", append([]string{"compose", "-f", file}, args...)...)
}
