package elasticsearch

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/elastic/elastic-transport-go/v8/elastictransport"

	"github.com/tidemark-go/tidemark/projector"
)

// Classify implements projector.Sink:
//
//	Transient  no connection, no answer, an answer that is cut off; 429, 5xx
//	Fatal      401 and 403, credentials and rights; an index that is gone; a mapping that
//	           contradicts the one that is there; another product; a closed client
//	Poison     a [DocumentError]; every error that is not this package's
//
// Of several errors Fatal counts first, then Transient: poison comes again.
func (s *Sink) Classify(err error) projector.Class {
	class := projector.Poison
	walk(err, func(e error) {
		switch e := e.(type) {
		case *setupError, *goneError, *projector.CheckpointError, *projector.FormatError:
			class = projector.Fatal
		case *unreachableError:
			class = worse(class, unreachableClass(e))
		case *responseError:
			class = worse(class, responseClass(e))
		}
	})
	return class
}

func worse(a, b projector.Class) projector.Class { return max(a, b) } // Poison, Transient, Fatal: in this order

// unreachableClass tells two errors of go-elasticsearch by their text (8.19): importing
// that package would make every user of this one compile its whole typed API, for minutes.
func unreachableClass(e *unreachableError) projector.Class {
	text := e.Error()
	if errors.Is(e, elastictransport.ErrClosed) || strings.Contains(text, "client is closed") || strings.Contains(text, "the server is not Elasticsearch") {
		return projector.Fatal
	}
	return projector.Transient
}

func responseClass(e *responseError) projector.Class {
	switch {
	case busy(e.status), e.status >= http.StatusInternalServerError, e.status == http.StatusConflict, e.status == http.StatusRequestTimeout:
		return projector.Transient
	}
	return projector.Fatal // documents that are refused have a DocumentError
}

// walk calls f with every error that err wraps, all branches of it.
func walk(err error, f func(error)) {
	if err == nil {
		return
	}
	f(err)
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		walk(e.Unwrap(), f)
	case interface{ Unwrap() []error }:
		for _, e := range e.Unwrap() {
			walk(e, f)
		}
	}
}

// DocumentError is a document that the sink or the server refuses for its content: a
// value that the mapping does not take, say. The other documents of its batch are not
// to blame.
type DocumentError struct {
	Index  string // the target, with its route: "orders", "orders-eu"
	ID     string // of the document in Elasticsearch
	Type   string // the server's, such as document_parsing_exception; "" where the sink has refused it
	Reason string
}

func (e *DocumentError) Error() string {
	by := ""
	if e.Type != "" {
		by = e.Type + ": "
	}
	return fmt.Sprintf("tidemark/elasticsearch: document %q of index %q is refused: %s%s", e.ID, e.Index, by, e.Reason)
}

// setupError is something to be put right in the cluster or the projection.
type setupError struct{ err error }

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

// failed says what the sink was doing, where this package has not said it already.
func failed(doing string, err error) error {
	if strings.HasPrefix(err.Error(), "tidemark") {
		return err
	}
	return fmt.Errorf("tidemark/elasticsearch: %s: %w", doing, err)
}
