package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// row is one line of the report. Zero: not taken.
type row struct {
	Name  string  `json:"name"`
	Rate  float64 `json:"events_per_s"`
	Ratio float64 `json:"ratio"`  // to the raw row that it is compared with
	RSS   float64 `json:"rss_mb"` // peak, the highest of all rounds
	CPU   *cpu    `json:"cpu_s,omitempty"`
	P50   float64 `json:"p50_ms,omitempty"`
	P99   float64 `json:"p99_ms,omitempty"`

	timed                        bool
	leastRatio, mostRSS, mostP50 float64 // goals; 0: none
}

// report collects the rows.
type report struct {
	machine string
	rows    []row
}

func (r *report) add(w row) {
	round := func(v *float64, digits int) {
		p := math.Pow10(digits)
		*v = math.Round(*v*p) / p
	}
	round(&w.Rate, 0)
	round(&w.Ratio, 3)
	round(&w.RSS, 1)
	round(&w.P50, 2)
	round(&w.P99, 2)
	if w.CPU != nil {
		round(&w.CPU.Own, 2)
		round(&w.CPU.Mongod, 2)
		round(&w.CPU.Sink, 2)
	}
	r.rows = append(r.rows, w)
}

// finish prints the table and writes the JSON file.
func (r *report) finish() error {
	fmt.Println()
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tevents/s\tratio\tgoal\tpeak RSS MB\tgoal\tCPU s own / mongod / sink\tp50 / p99 ms\tgoal p50")
	var missed []string
	for _, w := range r.rows {
		var cells [8]string
		goal := func(cell int, wanted, format string, limit float64, reached bool) {
			if limit == 0 {
				return
			}
			cells[cell] = fmt.Sprintf(format, limit)
			if !reached {
				cells[cell] += " missed"
				missed = append(missed, w.Name+" ("+wanted+")")
			}
		}
		if w.Rate > 0 {
			cells[0] = fmt.Sprintf("%.0f", w.Rate)
		}
		if w.Ratio > 0 {
			cells[1] = fmt.Sprintf("%.3f", w.Ratio)
		}
		cells[3] = fmt.Sprintf("%.0f", w.RSS)
		if w.CPU != nil {
			cells[5] = w.CPU.String()
		}
		if w.timed {
			cells[6] = fmt.Sprintf("%.2f / %.2f", w.P50, w.P99)
		}
		goal(2, "ratio", "≥ %.2f", w.leastRatio, w.Ratio >= w.leastRatio)
		goal(4, "memory", "< %.0f", w.mostRSS, w.RSS < w.mostRSS)
		goal(7, "latency", "≤ %.2f", w.mostP50, w.P50 <= w.mostP50)
		fmt.Fprintln(t, w.Name+"\t"+strings.Join(cells[:], "\t"))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Println(r.machine)
	if err := r.writeJSON(os.Getenv("BENCH_JSON")); err != nil {
		return err
	}
	if len(missed) > 0 {
		fmt.Println("bench: goals missed:", strings.Join(missed, "; "))
	} else {
		fmt.Println("bench: all goals reached")
	}
	return nil
}

func (r *report) writeJSON(path string) error {
	if path == "" {
		return nil
	}
	text, err := json.MarshalIndent(r.rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

func median(v []float64) float64 { return percentile(v, 50) }

// percentile interpolates between the two values that it falls between.
func percentile(v []float64, p float64) float64 {
	s := slices.Sorted(slices.Values(v))
	at := p / 100 * float64(len(s)-1)
	low := int(at)
	high := min(low+1, len(s)-1)
	return s[low] + (at-float64(low))*(s[high]-s[low])
}
