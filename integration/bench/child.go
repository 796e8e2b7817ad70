package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// childVariable makes this program a child: it does one job and ends.
const childVariable = "TIDEMARK_BENCH_CHILD"

// job is what a child is to do. It arrives as JSON on the child's standard input.
type job struct {
	Role       string // of roles
	Mongo      string
	Sink       string // one of the sinks, "" for none
	Target     string // its address
	Database   string
	Collection string
	Start      bson.Timestamp // where its stream begins
	Events     int            // after which it has ended
	PreImages  bool           // a raw drain asks for them, beside post-images
	BatchSize  int32          // of a raw drain, and of what it writes
	Decode     bool           // a raw find decodes
	Model      string         // of models
	Profile    string         // where to write profiles, without extension; "" for none
}

// result is what a child has found, as JSON on its standard output.
type result struct {
	Seconds float64
	CPU     float64 // seconds of a processor, of the child alone
	RSS     float64 // peak, in MB
	At      []int64 // of latencies: when each write was seen, in ns since 1970
}

// roles are the jobs there are.
var roles = map[string]func(context.Context, job, *parent) (result, error){
	"raw":         rawDrain,
	"raw bulk":    rawBulkWrite,
	"raw elastic": rawElasticBulk,
	"raw latency": rawLatency,
	"loop":        handWritten,
	"drain":       modelDrain,
	"latency":     modelLatency,
	"stall":       modelStall,
	"raw find":    rawFind,
	"raw copy":    rawCopy,
	"rebuild":     modelRebuild,
}

// parent is the child's side of the conversation.
type parent struct {
	out  *json.Encoder
	told chan bson.Timestamp
}

// ready tells the parent that what it does from now on is seen.
func (p *parent) ready() error { return p.out.Encode(result{}) }

func childMain() error {
	in := json.NewDecoder(os.Stdin)
	p := &parent{out: json.NewEncoder(os.Stdout), told: make(chan bson.Timestamp, 1)}
	var j job
	if err := in.Decode(&j); err != nil {
		return fmt.Errorf("a child gets its job from its parent: %w", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() {
		for {
			var t bson.Timestamp
			if err := in.Decode(&t); err != nil {
				cancel(errors.New("the parent is gone")) // however it ended, we don't outlive it
				return
			}
			p.told <- t
		}
	}()
	role, ok := roles[j.Role]
	if !ok {
		return fmt.Errorf("no role %q", j.Role)
	}
	r, err := role(ctx, j, p)
	if err != nil {
		return err
	}
	return p.out.Encode(r)
}

// peakRSS is this process's peak of resident memory, in MB. Not getrusage's, which begins with the parent's peak.
func peakRSS() (float64, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")))
			return float64(kb) / 1024, err
		}
	}
	return 0, errors.New("/proc/self/status has no VmHWM")
}

// child is the parent's side.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	in     *json.Encoder
	out    *json.Decoder
	stderr bytes.Buffer
}

// spawn starts a child with its job. It ends when ctx does.
func (b *bench) spawn(ctx context.Context, j job) (*child, error) {
	j.Mongo, j.Database = b.mongod.URI(), b.db.Name()
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{cmd: exec.CommandContext(ctx, program)}
	c.cmd.Env = append(os.Environ(), childVariable+"=1")
	c.cmd.Stderr = &c.stderr
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.stdin, c.in, c.out = stdin, json.NewEncoder(stdin), json.NewDecoder(stdout)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if err := c.in.Encode(j); err != nil {
		return nil, c.end(err)
	}
	return c, nil
}

// ready waits until the child says so.
func (c *child) ready() error {
	if err := c.out.Decode(new(result)); err != nil {
		return c.end(err)
	}
	return nil
}

// result waits for what the child has found, and for its end.
func (c *child) result() (result, error) {
	var r result
	err := c.out.Decode(&r)
	return r, c.end(err)
}

// end lets the child go. An error makes it end at once; what it said itself is the better reason.
func (c *child) end(err error) error {
	_ = c.stdin.Close()
	if werr := c.cmd.Wait(); err != nil || werr != nil {
		return errors.Join(fmt.Errorf("a measuring process failed: %s", strings.TrimSpace(c.stderr.String())), err, werr)
	}
	return nil
}

// do runs a child whose job needs no conversation.
func (b *bench) do(ctx context.Context, j job) (result, error) {
	c, err := b.spawn(ctx, j)
	if err != nil {
		return result{}, err
	}
	return c.result()
}
