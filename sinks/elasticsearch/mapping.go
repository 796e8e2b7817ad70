package elasticsearch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/tidemark-go/tidemark/internal/row"
)

// ownerField holds the text form of the _id of the document that a row comes from, where
// the row's own id does not tell.
const ownerField = "tm_owner"

// fieldTypes are the mappings of fields that Index.Mapping says nothing about. A keyword
// of more than 32,766 bytes would be refused by the server; ignore_above leaves long
// texts out of the search, at 8,191 characters of up to four bytes.
var fieldTypes = map[row.Kind]string{
	row.Text:     `{"type":"keyword","ignore_above":8191}`,
	row.Bool:     `{"type":"boolean"}`,
	row.Int:      `{"type":"long"}`,
	row.Float:    `{"type":"double"}`,
	row.Time:     `{"type":"date","format":"strict_date_optional_time"}`,
	row.Bytes:    `{"type":"binary"}`,
	row.ObjectID: `{"type":"keyword"}`,
	row.Decimal:  `{"type":"keyword"}`,
	row.JSON:     `{"type":"object","enabled":false}`,
}

const ownerType = `{"type":"keyword","index":false,"doc_values":false}`

// meta marks an index as this library's.
type meta struct {
	Tidemark struct {
		Projection string `json:"projection"`
		Place      string `json:"place"`
		Name       string `json:"name"`
	} `json:"tidemark"`
}

// object is a JSON object whose values are left as they are.
type object = map[string]json.RawMessage

// parseObject reads a JSON object from a user's text, "" as none.
func parseObject(text string) (object, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	var o object
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return nil, fmt.Errorf("it must be a JSON object: %w", err)
	}
	return o, nil
}

// properties are the mappings of all fields.
func (p *plan) properties() object {
	fields := object{ownerField: json.RawMessage(ownerType)}
	for _, f := range p.schema.Fields {
		fields[f.Name] = json.RawMessage(fieldTypes[f.Kind])
	}
	for name, mapping := range p.mapping {
		fields[name] = mapping
	}
	return fields
}

// fixedSettings are what the sink relies on, written in each index, since a template could
// set something else: a document that is acknowledged is on the disk, and is the one that was
// sent.
var fixedSettings = map[string]string{
	"index.translog.durability": "request",
	"index.default_pipeline":    "_none",
	"index.final_pipeline":      "_none",
}

// gcDeletes is how long deletions are remembered by their versions: 60 s by the server's
// default. With routes each document leaves a deletion in all but one of them, which is too
// much to remember for the time in which a rebuild writes all documents. Such indices begin
// with a minute, and get the hour before readers see them. The server gives the text back as
// it was given (8.19), so this minute is known from a user's.
const (
	gcDeletes    = "index.gc_deletes"
	keepDeletes  = "1h"
	buildDeletes = "60000ms"
)

// keepLonger ends the time in which indices forget deletions soon.
func (s *Sink) keepLonger(ctx context.Context, indices []string) error {
	body, err := json.Marshal(map[string]string{gcDeletes: keepDeletes})
	if err != nil {
		return err
	}
	var short []string
	err = inParts(indices, func(names string) error {
		var found map[string]struct {
			Settings map[string]string `json:"settings"`
		}
		err := s.call(ctx, http.MethodGet, "/"+names+"/_settings/"+gcDeletes+"?flat_settings=true", nil, &found)
		for index, f := range found {
			if f.Settings[gcDeletes] == buildDeletes {
				short = append(short, index)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	return inParts(short, func(names string) error {
		return s.call(ctx, http.MethodPut, "/"+names+"/_settings", body, nil)
	})
}

// definition is the body that creates an index. Keep is its gcDeletes, unless the user has
// set one.
func (p *plan) definition(index string, m meta, keep string, trial bool) ([]byte, error) {
	settings := object{}
	flatten(settings, "", p.settings)
	if _, set := settings[gcDeletes]; !set {
		settings[gcDeletes] = json.RawMessage(strconv.Quote(keep))
	}
	for name, value := range fixedSettings {
		settings[name] = json.RawMessage(strconv.Quote(value))
	}
	if trial {
		settings["index.number_of_replicas"] = json.RawMessage("0")
		settings["index.number_of_shards"] = json.RawMessage("1")
		delete(settings, "index.auto_expand_replicas")
	}
	var dynamic any = "strict"
	if p.lenient {
		dynamic = false
	}
	return json.Marshal(map[string]any{
		"settings": settings,
		"mappings": map[string]any{"dynamic": dynamic, "_meta": m, "properties": p.properties()},
		"aliases":  map[string]any{writeAlias(index): struct{}{}, newAlias(index): struct{}{}},
	})
}

// flatten writes settings by their full names: {"index": {"gc_deletes": …}} and
// {"gc_deletes": …} are both index.gc_deletes.
func flatten(into object, path string, settings object) {
	for name, value := range settings {
		full := strings.TrimPrefix(path+"."+name, ".")
		var nested object
		if b := bytes.TrimSpace(value); len(b) > 0 && b[0] == '{' && json.Unmarshal(b, &nested) == nil {
			flatten(into, full, nested)
			continue
		}
		if !strings.HasPrefix(full, "index.") {
			full = "index." + full
		}
		into[full] = value
	}
}

// createIndex makes an index. Its name is like no other's, so if it is there already, the
// client has sent the request twice.
func (s *Sink) createIndex(ctx context.Context, p *plan, index string, m meta, keep string, trial bool) error {
	body, err := p.definition(index, m, keep, trial)
	if err != nil {
		return &setupError{err}
	}
	err = s.call(ctx, http.MethodPut, "/"+index, body, nil)
	switch {
	case typeOf(err) == alreadyExists:
		return nil
	case statusOf(err) == http.StatusBadRequest:
		return &setupError{fmt.Errorf("tidemark/elasticsearch: the server does not take the mapping or the settings of index %q: %w", m.Tidemark.Name, err)}
	}
	return err
}

// mapped is what the server tells about the mapping of an index.
type mapped struct {
	Mappings struct {
		Dynamic string `json:"dynamic"`
		Meta    meta   `json:"_meta"`
	} `json:"mappings"`
}

// checkAliases sees that the names that readers use are free for aliases: neither an
// index nor an alias of somebody else's has one of them.
func (s *Sink) checkAliases(ctx context.Context, projection, name string) error {
	for _, alias := range s.readAliases(projection, name) {
		var found map[string]mapped
		err := s.call(ctx, http.MethodGet, "/"+alias+"/_mapping", nil, &found)
		if statusOf(err) == http.StatusNotFound {
			continue
		}
		if err != nil {
			return err
		}
		for index, m := range found {
			what := ""
			switch {
			case index == alias:
				what = "there is an index " + alias
			case m.Mappings.Meta.Tidemark.Projection != projection || !strings.HasPrefix(index, s.places(projection)):
				what = "the alias " + alias + " is there already, and leads to index " + index + ", which is none of this library's"
			default:
				continue
			}
			return &setupError{fmt.Errorf("tidemark/elasticsearch: %s, so the alias by which readers find the model can't be made; "+
				"give the projection another name, or the sink a Prefix, or remove it", what)}
		}
	}
	return nil
}

// checkDefinition finds what is wrong with a target's Mapping and Settings.
func (p *plan) checkDefinition(mapping, settings string) error {
	var err, faults error
	if p.mapping, err = parseObject(mapping); err != nil {
		faults = errors.Join(faults, fmt.Errorf("mapping: %w", err))
	}
	for name := range p.mapping {
		if !p.has(name) {
			faults = errors.Join(faults, fmt.Errorf("mapping names field %q, which row type %s does not have; name its columns", name, p.schema.Type))
		}
	}
	if p.settings, err = parseObject(settings); err != nil {
		faults = errors.Join(faults, fmt.Errorf("settings: %w", err))
	}
	flat := object{}
	flatten(flat, "", p.settings)
	for _, name := range slices.Sorted(maps.Keys(fixedSettings)) {
		var text string
		if value, set := flat[name]; set && (json.Unmarshal(value, &text) != nil || !strings.EqualFold(text, fixedSettings[name])) {
			faults = errors.Join(faults, fmt.Errorf("settings: %s must be %q, which the sink relies on; leave it out", name, fixedSettings[name]))
		}
	}
	return faults
}

func (p *plan) has(column string) bool {
	for _, f := range p.schema.Fields {
		if f.Name == column {
			return true
		}
	}
	return false
}
