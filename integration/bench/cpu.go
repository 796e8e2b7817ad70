package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpu is how many seconds of a processor a drain takes: of what is measured, of the source and of the sink.
type cpu struct {
	Own    float64 `json:"own"`
	Mongod float64 `json:"mongod"`
	Sink   float64 `json:"sink"`
}

func (c cpu) String() string { return fmt.Sprintf("%.1f / %.1f / %.1f", c.Own, c.Mongod, c.Sink) }

// ownCPU is what this process has used.
func ownCPU() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// serverCPU is what the source and a sink have used so far.
func (b *bench) serverCPU(sink string) cpu {
	used := cpu{Mongod: familyCPU(b.mongod.Members[0].PID())}
	switch sink {
	case sinkPostgres:
		used.Sink = familyCPU(b.postgres.PID())
	case sinkMongoDB:
		used.Sink = familyCPU(b.mongodb.Members[0].PID())
	case sinkRedis:
		used.Sink = familyCPU(b.redis.PID())
	case sinkElastic:
		used.Sink = familyCPU(b.elastic.PID())
	}
	return used
}

// familyCPU is what a process and its children have used, those that have ended included.
func familyCPU(pid int) float64 {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	ticks := 0
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended meanwhile
		}
		// The name, in brackets, may hold spaces. After it, from proc(5): 3 state, 4 ppid, 14 to 17 utime, stime and
		// those of its dead children.
		f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if path != fmt.Sprintf("/proc/%d/stat", pid) && f[1] != strconv.Itoa(pid) {
			continue
		}
		for _, v := range f[11:15] {
			n, _ := strconv.Atoi(v)
			ticks += n
		}
	}
	const perSecond = 100 // USER_HZ, on every Linux that Go runs on
	return float64(ticks) / perSecond
}
