package serve

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/effort"
)

// MongodOptions says how StartMongod starts a replica set. The zero value is one member, version 6.0.27.
type MongodOptions struct {
	// Version is "6.0.27" or "6.0.5". Empty means 6.0.27, or 6.0.5 where OpenSSL 1.1 can't be had.
	Version string
	// Members is the number of data-bearing members, each with a vote. 0 means 1.
	Members int
	// OplogMB is the oplog's greatest size in megabytes. 0 means 1024; the server's least is 1, sensible is 8.
	OplogMB int
	// SyncDelay is the time between checkpoints in seconds. 0 means the server's 60. With 1 and a small OplogMB the
	// oplog is truncated soon, which loses history.
	SyncDelay int
	// CacheGB is each member's WiredTiger cache in gigabytes. 0 means 0.5; the server's least is 0.25.
	CacheGB float64
	// Auth demands that clients log in. See Mongod.AdminURI and Mongod.CreateUser.
	Auth bool
	// Params are setParameter values. {"enableTestCommands": "1"} allows the configureFailPoint command, and so
	// failCommand.
	Params map[string]string
	// Args are further flags of mongod.
	Args []string
	// Env is added to the servers' environment, each "NAME=value".
	Env []string

	home string // see Process.home
}

// Mongod is a replica set named rs0 of native servers. Its methods act on all members; Members has each.
type Mongod struct {
	// Members are the servers, in the order of the replica set's configuration.
	Members []*Process

	version string
	admin   *url.Userinfo // nil without Auth
}

// StartMongod starts a throwaway replica set and returns when it has a primary and the others are secondaries. ctx
// bounds the start only. End it by Mongod.Close, or Close.
func StartMongod(ctx context.Context, o MongodOptions) (*Mongod, error) {
	files, err := fetchMongod(ctx, o.Version)
	if err != nil {
		return nil, fmt.Errorf("start MongoDB: %w", err)
	}
	m := &Mongod{version: files.version}
	starting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := m.start(starting, files, o); err != nil {
		return nil, errors.Join(fmt.Errorf("start MongoDB: %w", err), m.Close())
	}
	return m, nil
}

func (m *Mongod) start(ctx context.Context, files mongodFiles, o MongodOptions) error {
	key := rand.Text()
	for range max(1, o.Members) {
		p, err := newMember(files, o, key)
		if err != nil {
			return err
		}
		m.Members = append(m.Members, p)
	}
	if err := m.each(func(p *Process) error { return p.launch(ctx) }); err != nil {
		return err
	}
	if err := m.initiate(ctx); err != nil {
		return err
	}
	if o.Auth {
		return m.createAdmin(ctx)
	}
	return nil
}

func newMember(files mongodFiles, o MongodOptions, key string) (*Process, error) {
	p, err := newProcess("mongod", o.home)
	if err != nil {
		return nil, err
	}
	keyFile := filepath.Join(p.dir, "key")
	err = errors.Join(os.Mkdir(p.dataPath(), 0o700), os.WriteFile(keyFile, []byte(key), 0o600))
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	flags := []string{
		"--replSet", "rs0", "--bind_ip", "127.0.0.1", "--nounixsocket", "--dbpath", p.dataPath(),
		"--wiredTigerCacheSizeGB", strconv.FormatFloat(orDefault(o.CacheGB, 0.5), 'g', -1, 64),
		"--oplogSize", strconv.Itoa(orDefault(o.OplogMB, 1024)),
		"--setParameter", "diagnosticDataCollectionEnabled=false",
		// A member told to end otherwise waits 15 s for clients to leave.
		"--setParameter", "shutdownTimeoutMillisForSignaledShutdown=100",
	}
	if o.SyncDelay > 0 {
		flags = append(flags, "--syncdelay", strconv.Itoa(o.SyncDelay))
	}
	if o.Auth {
		flags = append(flags, "--keyFile", keyFile)
	}
	if _, set := o.Params["periodicNoopIntervalSecs"]; !set && effort.Rounds(2) < 2 {
		// The position of a change stream where nothing happens moves by an entry that the server writes: after 10 s.
		flags = append(flags, "--setParameter", "periodicNoopIntervalSecs=1")
	}
	for name, value := range o.Params {
		flags = append(flags, "--setParameter", name+"="+value)
	}
	flags = append(flags, o.Args...)
	p.env = slices.Concat(files.env, o.Env)
	p.args = func(port int) []string {
		return append([]string{files.program, "--port", strconv.Itoa(port)}, flags...)
	}
	p.ready = func(ctx context.Context) error { return dial(ctx, p.Addr()) }
	return p, nil
}

func orDefault[T comparable](value, otherwise T) T {
	var zero T
	if value == zero {
		return otherwise
	}
	return value
}

// URI is the connection string of the whole set, without a user.
func (m *Mongod) URI() string { return m.uri(nil) }

// AdminURI is the connection string with a user that has the role root. Without Auth it is URI.
func (m *Mongod) AdminURI() string { return m.uri(m.admin) }

func (m *Mongod) uri(user *url.Userinfo) string {
	var hosts []string
	for _, p := range m.Members {
		hosts = append(hosts, p.Addr())
	}
	u := url.URL{Scheme: "mongodb", User: user, Host: strings.Join(hosts, ","), Path: "/", RawQuery: "replicaSet=rs0"}
	return u.String()
}

// Version is the server's version, "6.0.27" or "6.0.5".
func (m *Mongod) Version() string { return m.version }

// Stop ends all members in their orderly way.
func (m *Mongod) Stop() error { return m.each((*Process).Stop) }

// Kill ends all members by SIGKILL.
func (m *Mongod) Kill() error { return m.each((*Process).Kill) }

// Pause freezes all members.
func (m *Mongod) Pause() error { return m.each((*Process).Pause) }

// Resume ends Pause.
func (m *Mongod) Resume() error { return m.each((*Process).Resume) }

// Restart stops the members that run and starts all on the same ports and data. It returns when there is a primary.
func (m *Mongod) Restart(ctx context.Context) error {
	if err := m.each(func(p *Process) error { return p.Restart(ctx) }); err != nil {
		return err
	}
	_, err := m.Primary(ctx)
	return err
}

// Close kills all members and removes their data. Calls after the first do nothing.
func (m *Mongod) Close() error { return m.each((*Process).Close) }

// each does f for all members at once.
func (m *Mongod) each(f func(*Process) error) error {
	results := make(chan error)
	for _, p := range m.Members {
		go func() { results <- f(p) }()
	}
	var errs []error
	for range m.Members {
		errs = append(errs, <-results)
	}
	return errors.Join(errs...)
}

// Primary waits until a member is the primary and returns it. A member that doesn't run, or is paused, is passed over.
func (m *Mongod) Primary(ctx context.Context) (*Process, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		for _, p := range m.Members {
			if state, err := memberState(ctx, p); err == nil && state.Primary {
				return p, nil
			}
		}
		if err := pauseOf(ctx, 50*time.Millisecond); err != nil {
			return nil, m.withLogs(fmt.Errorf("MongoDB has no primary: %w", err))
		}
	}
}

// pauseOf waits for d, or returns the error of ctx.
func pauseOf(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func (m *Mongod) withLogs(err error) error {
	errs := []error{err}
	for _, p := range m.Members {
		errs = append(errs, fmt.Errorf("log of %s ends:\n%s", p.Addr(), p.LogTail()))
	}
	return errors.Join(errs...)
}

// hello is what a member says of itself; the command needs no login.
type hello struct {
	Primary   bool `bson:"isWritablePrimary"`
	Secondary bool `bson:"secondary"`
}

func memberState(ctx context.Context, p *Process) (hello, error) {
	var state hello
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	err := onMember(ctx, p, nil, func(c *mongo.Client) error {
		return c.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&state)
	})
	return state, err
}

// onMember gives f a client of that member alone.
func onMember(ctx context.Context, p *Process, user *url.Userinfo, f func(*mongo.Client) error) error {
	if err := dial(ctx, p.Addr()); err != nil {
		return err
	}
	u := url.URL{Scheme: "mongodb", User: user, Host: p.Addr(), Path: "/", RawQuery: "directConnection=true"}
	client, err := mongo.Connect(options.Client().ApplyURI(u.String()))
	if err != nil {
		return err
	}
	// Not ended by ctx, so that no goroutine of the client stays.
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return errors.Join(f(client), client.Disconnect(closing))
}

// initiate makes a replica set of the members and waits until each is primary or secondary.
func (m *Mongod) initiate(ctx context.Context) error {
	var members bson.A
	for i, p := range m.Members {
		members = append(members, bson.D{{Key: "_id", Value: i}, {Key: "host", Value: p.Addr()}})
	}
	config := bson.D{
		{Key: "_id", Value: "rs0"},
		{Key: "members", Value: members},
		// Tests kill primaries: the next is elected after 2 s instead of 10.
		{Key: "settings", Value: bson.D{
			{Key: "electionTimeoutMillis", Value: 2000},
			{Key: "heartbeatIntervalMillis", Value: 500},
		}},
	}
	err := onMember(ctx, m.Members[0], nil, func(c *mongo.Client) error {
		return c.Database("admin").RunCommand(ctx, bson.D{{Key: "replSetInitiate", Value: config}}).Err()
	})
	if err != nil {
		return m.withLogs(fmt.Errorf("initiate the replica set: %w", err))
	}
	if _, err := m.Primary(ctx); err != nil {
		return err
	}
	for _, p := range m.Members {
		for {
			state, err := memberState(ctx, p)
			if err == nil && (state.Primary || state.Secondary) {
				break
			}
			if err := pauseOf(ctx, 50*time.Millisecond); err != nil {
				return m.withLogs(fmt.Errorf("%s did not become a secondary: %w", p.Addr(), err))
			}
		}
	}
	return nil
}

// createAdmin uses the exception by which a client on the same machine may create the first user.
func (m *Mongod) createAdmin(ctx context.Context) error {
	password := rand.Text()
	if _, err := m.createUser(ctx, "admin", password, "root"); err != nil {
		return err
	}
	m.admin = url.UserPassword("admin", password)
	return nil
}

// CreateUser creates a user, with SCRAM login through the database admin, and returns the connection string of the
// set with that user. A role is a string for one of the built-in roles on admin, or a document
// bson.D{{"role", "readWrite"}, {"db", "shop"}}. The set must have Auth.
func (m *Mongod) CreateUser(ctx context.Context, name, password string, roles ...any) (uri string, err error) {
	if m.admin == nil {
		return "", errors.New("create a MongoDB user: the set was started without MongodOptions.Auth")
	}
	return m.createUser(ctx, name, password, roles...)
}

func (m *Mongod) createUser(ctx context.Context, name, password string, roles ...any) (string, error) {
	primary, err := m.Primary(ctx)
	if err != nil {
		return "", err
	}
	command := bson.D{
		{Key: "createUser", Value: name},
		{Key: "pwd", Value: password},
		{Key: "roles", Value: slices.Concat(bson.A{}, bson.A(roles))},
	}
	err = onMember(ctx, primary, m.admin, func(c *mongo.Client) error {
		return c.Database("admin").RunCommand(ctx, command).Err()
	})
	if err != nil {
		return "", fmt.Errorf("create MongoDB user %s: %w", name, err)
	}
	return m.uri(url.UserPassword(name, password)), nil
}
