// The command bench measures what tidemark can do against what its servers can give: the drain of a backlog, the memory
// that it takes, and how soon a write is visible. All of it takes 10 to 15 minutes on 2 cores.
//
//	go run ./integration/bench
//	go run ./integration/bench -rounds 1 -events 20000 -documents 500 -writes 500 -stall 3s
//	go run ./integration/bench -rebuild
//	go run ./integration/bench -only 'into mongodb' -rounds 1 -cpuprofile /tmp/profiles
//
// It starts servers of its own, with their default settings but for the size of MongoDB's oplog and cache, and ends
// them. What is measured runs in a process of its own, so that a peak of memory is its own. Models in MongoDB are in
// another server than the source. Rates are medians over the rounds; a ratio is that of a row to a raw one in the same
// round, and then the median. The raw row is the drain of the same images; for the mirror into MongoDB it is a bulkWrite
// of the same documents with the stream being read beside it, and no transaction. Every model is compared with what an aggregation of the source, or the source itself, says: a wrong one ends the command
// with an error. A goal that is missed does not.
//
// Figures compare within one run on a quiet machine, and no further.
//
// With BENCH_JSON set to a file's name, the rows go there too, as a JSON list of the type row.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/integration/services/serve"
)

// config is what the flags say.
type config struct {
	rounds    int
	events    int           // of the backlog, half inserts, half updates
	documents int           // of 50 KB
	writes    int           // whose latency is taken
	stall     time.Duration // that the sink is stopped for
	only      *regexp.Regexp
	profiles  string // folder, "" for none
	rebuild   bool   // measure rebuilds, and nothing else
	copied    int    // documents that a rebuild copies
}

func flags() (config, error) {
	var c config
	flag.IntVar(&c.rounds, "rounds", 5, "`rounds` of the drains")
	flag.IntVar(&c.events, "events", 200_000, "`events` in the backlog that is drained")
	flag.IntVar(&c.documents, "documents", 20_000, "`documents` of 50 KB, each inserted and updated")
	flag.IntVar(&c.writes, "writes", 5_000, "`writes` whose latency is taken")
	flag.DurationVar(&c.stall, "stall", time.Minute, "how long the sink is stopped under load")
	only := flag.String("only", "", "run only the rows whose name matches this `regexp`, and the raw drains that they are compared with")
	flag.StringVar(&c.profiles, "cpuprofile", "", "write a CPU and an allocation profile of each model's last drain into this `folder`")
	flag.BoolVar(&c.rebuild, "rebuild", false, "measure rebuilds instead")
	flag.IntVar(&c.copied, "copied", 1_000_000, "`documents` that a rebuild copies")
	flag.Parse()
	if flag.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	if c.rounds < 1 || c.events < 1000 || c.documents < 100 || c.copied < 100 || c.writes < 10 || c.stall < time.Second {
		return c, errors.New("at least 1 round, 1000 events, 100 documents, 10 writes and a stall of 1s are needed")
	}
	var err error
	c.only, err = regexp.Compile(*only)
	return c, err
}

// wants reports whether the row is to be run.
func (c config) wants(name string) bool { return c.only.MatchString(name) }

// bench is one run.
type bench struct {
	config
	mongod   *serve.Mongod
	db       *mongo.Database // the source
	postgres *serve.PostgresServer
	admin    *pgx.Conn       // creates and drops its databases
	mongodb  *serve.Mongod   // the sink, nil until it is needed
	models   *mongo.Database // what drains write to, there
	redis    *serve.RedisServer
	elastic  *serve.ElasticsearchServer
	report   report
}

func main() {
	if os.Getenv(childVariable) != "" {
		exit(childMain())
	}
	c, err := flags()
	if err != nil {
		exit(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, c)
	stop()
	exit(errors.Join(err, serve.Close()))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(ctx context.Context, c config) error {
	b := &bench{config: c}
	if c.profiles != "" {
		if err := os.MkdirAll(c.profiles, 0o755); err != nil {
			return err
		}
	}
	if err := b.start(ctx); err != nil {
		return err
	}
	defer b.stop()
	if c.rebuild {
		return b.rebuilds(ctx)
	}
	for _, part := range []func(context.Context) error{b.drains, b.latencies, b.stalled, b.large} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return b.report.finish()
}

// start starts the servers. The oplog holds every backlog at once, and the cache what the drains read.
func (b *bench) start(ctx context.Context) (err error) {
	if b.mongod, err = serve.StartMongod(ctx, serve.MongodOptions{OplogMB: 8192, CacheGB: 2}); err != nil {
		return err
	}
	if b.postgres, err = serve.StartPostgres(ctx, serve.PostgresOptions{}); err != nil {
		return err
	}
	client, err := mongo.Connect(options.Client().ApplyURI(b.mongod.URI()))
	if err != nil {
		return err
	}
	b.db = client.Database("bench")
	if b.admin, err = pgx.Connect(ctx, b.postgres.DSN()); err != nil {
		return err
	}
	var version string
	if err := b.admin.QueryRow(ctx, "SHOW server_version").Scan(&version); err != nil {
		return err
	}
	b.report.machine = fmt.Sprintf("%s/%s, %d cores, %s; MongoDB %s, PostgreSQL %s, all on this machine",
		runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), runtime.Version(), b.mongod.Version(), version)
	fmt.Println(b.report.machine)
	return nil
}

// stop closes the connections; the servers end with serve.Close.
func (b *bench) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = b.db.Client().Disconnect(ctx)
	_ = b.admin.Close(ctx)
	if b.models != nil {
		_ = b.models.Client().Disconnect(ctx)
	}
}
