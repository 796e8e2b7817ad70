package serve

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// PostgresOptions says how StartPostgres starts a server. The zero value is the server's defaults, fsync on, with at
// most 200 connections.
type PostgresOptions struct {
	// Params are configuration parameters, such as {"synchronous_commit": "off"}.
	Params map[string]string
	// Env is added to the server's environment, each "NAME=value".
	Env []string

	home string // see Process.home
}

// PostgresServer is one native PostgreSQL server.
type PostgresServer struct {
	*Process
}

// StartPostgres starts a throwaway PostgreSQL server and returns when it answers. ctx bounds the start only. End it by
// PostgresServer.Close, or Close. The database is postgres and so is the user, a superuser without a password.
func StartPostgres(ctx context.Context, o PostgresOptions) (*PostgresServer, error) {
	s, err := startPostgres(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	return s, nil
}

// DSN is the server's connection string.
func (s *PostgresServer) DSN() string {
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Host: s.Addr(), Path: "/postgres", RawQuery: "sslmode=disable"}
	return u.String()
}

func startPostgres(ctx context.Context, o PostgresOptions) (*PostgresServer, error) {
	files, err := fetchPostgres(ctx)
	if err != nil {
		return nil, err
	}
	p, err := newProcess("postgres", o.home)
	if err != nil {
		return nil, err
	}
	s := &PostgresServer{Process: p}
	p.as, p.env = files.as, o.Env
	p.quit = syscall.SIGINT   // "fast": connections are cut, nothing is waited for
	p.abort = syscall.SIGQUIT // "immediate": it ends its child processes itself
	p.args = func(port int) []string {
		args := []string{
			filepath.Join(files.bin, "postgres"), "-D", p.dataPath(),
			"-c", "port=" + strconv.Itoa(port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
			"-c", "max_connections=200", "-c", "logging_collector=off",
			"-c", "dynamic_shared_memory_type=mmap", // what is left of a killed server goes with its data
		}
		for name, value := range o.Params {
			args = append(args, "-c", name+"="+value)
		}
		return args
	}
	p.ready = s.ping
	err = copyTree(files.template, p.dataPath(), files.as)
	if err == nil {
		err = p.launch(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *PostgresServer) ping(ctx context.Context) error {
	if err := dial(ctx, s.Addr()); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, s.DSN())
	if err != nil {
		return err
	}
	return errors.Join(conn.Ping(ctx), conn.Close(ctx))
}

// postgresFiles is a prepared PostgreSQL.
type postgresFiles struct {
	bin      string   // folder of its programs
	template string   // an initialised data folder, to copy
	as       *account // user postgres when we are root, which the server refuses
}

func fetchPostgres(ctx context.Context) (postgresFiles, error) {
	if runtime.GOOS != "linux" {
		return postgresFiles{}, errors.New("a native PostgreSQL needs Linux: start Docker or set POSTGRES_DSN")
	}
	bin, err := findPostgres()
	if err != nil {
		if err := installDebian(ctx, "postgresql"); err != nil {
			return postgresFiles{}, err
		}
		if bin, err = findPostgres(); err != nil {
			return postgresFiles{}, err
		}
	}
	as, err := postgresUser()
	if err == nil && as != nil {
		err = othersMayEnter(dataRoot())
	}
	if err != nil {
		return postgresFiles{}, err
	}
	// "postgres (PostgreSQL) 15.18 (Debian …)"
	out, err := run(ctx, "/", nil, filepath.Join(bin, "postgres"), "--version")
	if err != nil {
		return postgresFiles{}, err
	}
	_, version, _ := strings.Cut(out, ") ")
	version, _, _ = strings.Cut(strings.TrimSpace(version), " ")
	template, err := prepared(ctx, "postgres-"+version, func(ctx context.Context, dir string) error {
		return initTemplate(ctx, bin, filepath.Join(dir, "data"), as)
	})
	return postgresFiles{bin: bin, template: filepath.Join(template, "data"), as: as}, err
}

// findPostgres is the folder of the newest PostgreSQL's programs. Debian keeps them out of the PATH.
func findPostgres() (string, error) {
	best, newest := "", 0
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	for _, path := range found {
		bin := filepath.Dir(path)
		if n, err := strconv.Atoi(filepath.Base(filepath.Dir(bin))); err == nil && n > newest {
			best, newest = bin, n
		}
	}
	if best != "" {
		return best, nil
	}
	path, err := exec.LookPath("initdb")
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return "", fmt.Errorf("no PostgreSQL server programs: %w", err)
	}
	return filepath.Dir(path), nil
}

func postgresUser() (*account, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root: %w", err)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	return &account{uid: uint32(uid), gid: uint32(gid)}, errors.Join(err1, err2)
}

// othersMayEnter demands that every user may pass through dir and the folders above it.
func othersMayEnter(dir string) error {
	for {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("PostgreSQL runs as the user postgres, who may not enter %s: "+
				"set TMPDIR, or TIDEMARK_DATA, to a folder that every user may enter", dir)
		}
		if filepath.Dir(dir) == dir {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}

// initTemplate makes an initialised data folder at to. initdb works in a temporary folder, since the user postgres
// can't reach root's cache.
func initTemplate(ctx context.Context, bin, to string, as *account) error {
	work, err := newDir("initdb", "")
	if err != nil {
		return err
	}
	defer removeDir(work, "")
	data := filepath.Join(work, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	if as != nil {
		if err := os.Chown(data, int(as.uid), int(as.gid)); err != nil {
			return err
		}
	}
	log, err := os.Create(filepath.Join(work, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "initdb"),
		"-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	cmd.Dir, cmd.Stdout, cmd.Stderr = work, log, log
	if err := spawn(cmd, as, false); err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	err = cmd.Wait()
	spawned()
	if err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, tail(log.Name(), 4096))
	}
	return copyTree(data, to, nil)
}
