package elasticsearch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/tidemark-go/tidemark/projector"
)

// Types of the server's errors that are looked at one by one.
const (
	alreadyExists = "resource_already_exists_exception"
	noIndex       = "index_not_found_exception"
	noAlias       = "aliases_not_found_exception"
	conflict      = "version_conflict_engine_exception"
)

// responseError is a request that the server has refused.
type responseError struct {
	status int
	typ    string
	reason string
}

func (e *responseError) Error() string {
	if e.typ == "" && e.reason == "" {
		return fmt.Sprintf("the server answers %d %s", e.status, http.StatusText(e.status))
	}
	return fmt.Sprintf("the server answers %d %s: %s: %s", e.status, http.StatusText(e.status), e.typ, e.reason)
}

// unreachableError is a request without an answer: whether it was carried out is not known.
type unreachableError struct{ err error }

func (e *unreachableError) Error() string { return e.err.Error() }
func (e *unreachableError) Unwrap() error { return e.err }

func statusOf(err error) int {
	if e, ok := errors.AsType[*responseError](err); ok {
		return e.status
	}
	return 0
}

func typeOf(err error) string {
	if e, ok := errors.AsType[*responseError](err); ok {
		return e.typ
	}
	return ""
}

// call sends a request and decodes its answer into out, unless that is nil.
func (s *Sink) call(ctx context.Context, method, path string, body []byte, out any) error {
	b, err := s.send(ctx, method, path, body)
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(b, out); err != nil {
		return &unreachableError{fmt.Errorf("the answer to %s %s is no JSON of the expected form: %w", method, path, err)}
	}
	return nil
}

// send sends a request and reads the answer to its end, so that the connection can be
// used again.
func (s *Sink) send(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, &unreachableError{err}
	}
	req, err := http.NewRequestWithContext(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		return nil, &setupError{err}
	}
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	} else {
		req.Body, req.GetBody = nil, nil
	}
	resp, err := s.client.Perform(req)
	if err != nil {
		return nil, unanswered(ctx, err)
	}
	answer, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		return nil, unanswered(ctx, err)
	}
	if resp.StatusCode >= http.StatusMultipleChoices {
		return nil, refusal(resp.StatusCode, answer)
	}
	return answer, nil
}

// unanswered is the error of a request without an answer. Clients don't always wrap the
// context's error.
func unanswered(ctx context.Context, err error) error {
	if cause := ctx.Err(); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return &unreachableError{err}
}

// refusal decodes the answer of a request that has failed. What is no Elasticsearch's,
// such as a proxy's page, tells by its status alone.
func refusal(status int, answer []byte) error {
	e := &responseError{status: status}
	var body struct {
		Error json.RawMessage `json:"error"`
	}
	var cause itemError
	if json.Unmarshal(answer, &body) != nil {
		return e
	}
	if json.Unmarshal(body.Error, &cause) == nil {
		e.typ, e.reason = cause.Type, cause.text()
	} else {
		_ = json.Unmarshal(body.Error, &e.reason)
	}
	return e
}

// itemError is an error as the server writes it.
type itemError struct {
	Type     string     `json:"type"`
	Reason   string     `json:"reason"`
	CausedBy *itemError `json:"caused_by"`
}

func (e *itemError) text() string {
	if e.CausedBy == nil || e.CausedBy.Reason == "" {
		return e.Reason
	}
	return e.Reason + ": " + e.CausedBy.text()
}

// busy reports a status that passes: too many requests, or a part of the cluster that is
// not there at the moment.
func busy(status int) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// urlBytes is how long a list of names in a request's path may be. The server takes 4,096
// bytes in the first line of a request (http.max_initial_line_length).
const urlBytes = 2000

// inParts calls f with names joined by commas, as many as one request takes.
func inParts(names []string, f func(joined string) error) error {
	for len(names) > 0 {
		n, size := 1, len(names[0])
		for n < len(names) && size+1+len(names[n]) <= urlBytes {
			size += 1 + len(names[n])
			n++
		}
		if err := f(strings.Join(names[:n], ",")); err != nil {
			return err
		}
		names = names[n:]
	}
	return nil
}

// backoff waits longer each time: from 10 ms up to 5 s, and by chance.
type backoff struct{ last time.Duration }

// wait gives cause back where the context ends meanwhile.
func (b *backoff) wait(ctx context.Context, cause error) error {
	projector.Delayed(ctx, cause)
	b.last = min(max(2*b.last, 10*time.Millisecond), 5*time.Second)
	t := time.NewTimer(b.last/2 + rand.N(b.last/2))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return &unreachableError{fmt.Errorf("%w: %w", ctx.Err(), cause)}
	}
}
