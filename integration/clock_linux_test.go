package integration_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/tidemark-go/tidemark/integration/services/serve"
	"github.com/tidemark-go/tidemark/internal/effort"
	"github.com/tidemark-go/tidemark/projector"
)

// The clock of the runner's process decides nothing: waits, limits and rates are by Go's
// monotonic clock (projector's backoff, storeIdle, settleEvery and commitContext, the
// sinks' grace), and Checkpoint.CommittedAt is for people to read, and one of the fields
// by which a commit knows itself again. Whoever changes that should look for time.Now()
// in those. It can't be tested from here: Go reads the clock without libc, so that
// libfaketime does not reach it.
//
// The servers' clocks can be. PostgreSQL's jumps by an hour, forth and back, while the
// projection commits. The sink uses it for idle_in_transaction_session_timeout, which the
// server counts by timers of its own, and for updated_at, which is for people to read.
func TestClockOfPostgresJumps(t *testing.T) {
	clock := newClock(t)
	s, err := serve.StartPostgres(t.Context(), serve.PostgresOptions{Env: clock.env()})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })

	c := keep(t, inPostgres, keeping{})
	m := &postgresModel{t: t, pool: poolOn(t, s.DSN()), way: poolOn(t, s.DSN())}
	c.model = m
	clock.jumps(c, func() time.Time { return selectOne[time.Time](t, m.pool, "select clock_timestamp()") }, nil)
}

// The same of MongoDB, source and sink alike: cluster times go on from the latest one when
// the clock goes back. The sink uses the clock for nothing, the runner the source's cluster
// times alone. The clock goes back while the server is down, since a running one does not
// bear it: MongoDB 6.0.27 aborts at times, or its WiredTiger waits for the old time with
// both processors busy.
func TestClockOfMongoDBJumps(t *testing.T) {
	t.Parallel()
	clock := newClock(t)
	set := throwaway(t, serve.MongodOptions{Env: clock.env()})
	c := keepOf(t, newOrdering(t, set.URI()), inSource, keeping{})
	clock.jumps(c, func() time.Time {
		var hello struct {
			LocalTime time.Time `bson:"localTime"`
		}
		must(t, c.db.RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&hello))
		return hello.LocalTime
	}, set)
}

// fakeClock is the clock of a server.
type fakeClock struct{ library, file string }

func newClock(t *testing.T) *fakeClock {
	libs, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if len(libs) == 0 {
		t.Skip("libfaketime is not installed (Debian: apt-get install faketime)")
	}
	c := &fakeClock{libs[0], filepath.Join(os.TempDir(), unique("tidemark-clock-"))}
	must(t, c.jump("+0"))
	t.Cleanup(func() {
		_ = os.Remove(c.file)
		// What libfaketime leaves of a server that was killed, named by its process.
		left, _ := filepath.Glob("/dev/shm/*faketime_s*_*")
		for _, f := range left {
			if _, err := os.Stat("/proc/" + f[strings.LastIndexByte(f, '_')+1:]); os.IsNotExist(err) {
				_ = os.Remove(f)
			}
		}
	})
	return c
}

func (c *fakeClock) env() []string {
	return []string{
		"LD_PRELOAD=" + c.library, "FAKETIME_TIMESTAMP_FILE=" + c.file, "FAKETIME_CACHE_DURATION=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1",
	}
}

func (c *fakeClock) jump(offset string) error {
	if err := os.WriteFile(c.file+" new", []byte(offset+"\n"), 0o644); err != nil {
		return err
	}
	return os.Rename(c.file+" new", c.file)
}

// jumps lets the clock jump while the model is kept, which stays exact. If set is not nil,
// it is down while its clock goes back.
func (c *fakeClock) jumps(k *kept, now func() time.Time, set *serve.Mongod) {
	k.t.Helper()
	g := k.start(projector.Options{BatchChanges: 100})
	k.write()
	for n, offset := range []string{"+3600", "-3600", "+0", "-3600", "+3600"}[:max(2, effort.Rounds(5))] {
		down := set != nil && n%2 == 1
		if down {
			must(k.t, set.Stop())
		}
		must(k.t, c.jump(offset))
		if down {
			must(k.t, set.Restart(k.t.Context()))
		}
		var off time.Duration
		until(k.t, 30*time.Second, "the server's clock jumps", func() bool {
			off = -time.Since(now())
			return fmt.Sprintf("%+d", int(off.Round(time.Minute).Seconds())) == offset
		})
		k.commits(g, 10)
		k.exact(g)
		k.t.Logf("the server's clock is off by %s: exact after %d commits and %d retries", off.Round(time.Second), g.Status().Commits, g.Status().Retries)
	}
	g.stop()
}
