package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// childSetup is what a child process is told, as JSON in childVariable.
type childSetup struct {
	MongoDB, Database string
	Postgres          string
	Page              string        // the file of the page of points, for kill
	Outside           bool          // write the ledger's increments outside of the transaction, for kill
	Style             style         // of the projection, for stopped
	Place             place         // of the model, for orders
	Sink, Model       string        // connection string and, in MongoDB, database, in Elasticsearch, prefix
	Freeze            string        // the file that makes it stop in its next commit of changes, for orders and ledger
	Point             fault.Point   // where to wait to be killed, for rebuild, or to stop itself, for ledger
	Passes            int           // the how manyth time there, for rebuild
	Without           []fault.Guard // that are off, for ledger
}

const childVariable = "TIDEMARK_TEST_CHILD"

// inChild is what a role begins with. The child ends when its parent does, whose end
// closes standard input.
func inChild(f func(childSetup, *mongo.Database, *pgxpool.Pool) error) error {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	var s childSetup
	if err := json.Unmarshal([]byte(os.Getenv(childVariable)), &s); err != nil {
		return err
	}
	client, err := mongo.Connect(options.Client().ApplyURI(s.MongoDB))
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(s.Postgres)
	if err != nil {
		return err
	}
	config.MaxConns = 8
	if s.Outside {
		config.ConnConfig.RuntimeParams["synchronous_commit"] = "off" // each increment is a transaction
	}
	p, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		return err
	}
	return f(s, client.Database(s.Database), p)
}

// model is the model that the process keeps.
func (s childSetup) model(pool *pgxpool.Pool) (orderModel, error) {
	switch s.Place {
	case inPostgres:
		return &postgresModel{way: pool}, nil
	case inRedis:
		c, err := redisAt(s.Sink)
		return &redisModel{way: c}, err
	case inElasticsearch:
		c, err := elasticAt(s.Sink, &http.Transport{})
		return &elasticModel{prefix: s.Model, way: c}, err
	}
	c, err := mongo.Connect(options.Client().ApplyURI(s.Sink))
	if err != nil {
		return nil, err
	}
	return &mongoModel{way: c.Database(s.Model)}, nil
}

// keeps says which model that is: one in a place, of the sink at uri.
func (s *childSetup) keeps(p place, m orderModel, uri string) {
	s.Place, s.Sink = p, uri
	switch m := m.(type) {
	case *postgresModel:
		s.Postgres = uri
	case *mongoModel:
		s.Model = m.db.Name()
	case *elasticModel:
		s.Model = m.prefix
	}
}

// child is a process of this test binary in some role.
type child struct {
	*exec.Cmd
	stdin io.Closer
	ended chan struct{}
	out   bytes.Buffer // to be read once it has ended
}

func startChild(t testing.TB, role string, s childSetup) *child {
	t.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{Cmd: exec.Command(os.Args[0]), ended: make(chan struct{})}
	c.Env = append(os.Environ(), roleVariable+"="+role, childVariable+"="+string(text))
	c.Stdout, c.Stderr = &c.out, &c.out
	if c.stdin, err = c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = c.Wait() // how it ended is in ProcessState
		close(c.ended)
	}()
	t.Cleanup(func() {
		c.kill()
		if out := c.out.String(); t.Failed() && strings.Contains(out, "level=ERROR") {
			t.Logf("a child's output:\n%s", out)
		}
	})
	return c
}

// kill ends the child by SIGKILL and returns when it is gone.
func (c *child) kill() {
	_ = c.Process.Kill()
	<-c.ended
}

// alive fails the test where the child has ended by itself.
func (c *child) alive(t testing.TB) {
	t.Helper()
	select {
	case <-c.ended:
		t.Fatalf("the child has ended by itself, %s:\n%s", c.ProcessState, c.out.String())
	default:
	}
}

// counts is where a page has the counts of points, behind the slots.
const counts = 32

// page is a page of memory that child and parent share through a file. For each
// projection it has the point in the code that its commit stage passed last, which the
// parent can still read when the child is dead.
type page struct{ words *[64]atomic.Uint64 }

// pagePoints are the points that are noted: those of the commit stage.
var pagePoints = []fault.Point{
	"", fault.CommitBegin, fault.HandlerBegin, fault.HandlerEnd, fault.CommitSend, fault.CommitAnswer, fault.CommitDone, fault.CommitRetry,
	fault.ChunkRead, fault.SwitchBegin, fault.SwitchDone,
}

// newPage makes the file of a page.
func newPage(t testing.TB) (page, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "points")
	if err := os.WriteFile(path, make([]byte, 512), 0o600); err != nil {
		t.Fatal(err)
	}
	p, unmap, err := openPage(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unmap)
	return p, path
}

func openPage(path string) (p page, unmap func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return p, nil, err
	}
	defer f.Close()
	mem, err := syscall.Mmap(int(f.Fd()), 0, 512, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return p, nil, err
	}
	return page{(*[64]atomic.Uint64)(unsafe.Pointer(&mem[0]))}, func() { _ = syscall.Munmap(mem) }, nil
}

// note says that slot has come to a point.
func (p page) note(slot int, at fault.Point) {
	n := slices.Index(pagePoints, at)
	p.words[slot].Store((p.words[slot].Load()>>8+1)<<8 | uint64(n))
}

// count counts a point, whoever passes it.
func (p page) count(at fault.Point) { p.words[counts+slices.Index(pagePoints, at)].Add(1) }

// passed is how often a point was passed that is counted.
func (p page) passed(at fault.Point) uint64 {
	return p.words[counts+slices.Index(pagePoints, at)].Load()
}

// last is the point that slot passed last, and how many points it has passed.
func (p page) last(slot int) (fault.Point, uint64) {
	w := p.words[slot].Load()
	return pagePoints[w&0xff], w >> 8
}

// reset is for a new child.
func (p page) reset() {
	for i := range p.words {
		p.words[i].Store(0)
	}
}

// committing says whether a point lies between the entry of the handler and the
// answer to COMMIT: where a kill finds the effects begun and the outcome open.
func committing(at fault.Point) bool {
	return slices.Contains([]fault.Point{fault.HandlerBegin, fault.HandlerEnd, fault.CommitSend}, at)
}

// slots knows which goroutine is the commit stage of which projection: its Runner logs
// from there before the first batch.
type slots struct{ goroutines sync.Map }

// logger is the logger of the projection in a slot.
func (s *slots) logger(slot int) *slog.Logger {
	return slog.New(&slotHandler{slog.NewTextHandler(os.Stderr, nil), s, slot})
}

type slotHandler struct {
	slog.Handler
	slots *slots
	slot  int
}

func (h *slotHandler) Handle(ctx context.Context, r slog.Record) error {
	h.slots.goroutines.Store(goroutine(), h.slot)
	return h.Handler.Handle(ctx, r)
}

// current is the slot of the calling goroutine.
func (s *slots) current() (slot int, ok bool) {
	v, ok := s.goroutines.Load(goroutine())
	if ok {
		slot = v.(int)
	}
	return slot, ok
}

// goroutine is the number of the calling goroutine.
func goroutine() (n uint64) {
	var buf [64]byte
	_, _ = fmt.Sscanf(string(buf[:runtime.Stack(buf[:], false)]), "goroutine %d ", &n)
	return n
}

// stopped reports whether a child is stopped by a signal.
func (c *child) stopped() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
	if err != nil {
		return false
	}
	// "pid (name) state …"
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return len(rest) > 0 && rest[0] == 'T'
}

// end waits for the child to end by itself and gives what it printed.
func (c *child) end(t testing.TB, limit time.Duration) string {
	t.Helper()
	select {
	case <-c.ended:
		return c.out.String()
	case <-time.After(limit):
		t.Fatalf("the child has not ended within %s", limit)
		return ""
	}
}
