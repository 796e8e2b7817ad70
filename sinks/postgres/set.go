package postgres

import (
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/tidemark-go/tidemark/internal/row"
)

// set is the rows of one statement, as a column of values each.
type set struct {
	columns []column
	arrays  []*array
	rows    int
}

func newSet(columns []column) *set {
	s := &set{columns: columns, arrays: make([]*array, len(columns))}
	for i := range columns {
		s.arrays[i] = newArray(columns[i].typ)
	}
	return s
}

// addKey adds the values of a rollup row's keys, which come first.
func (s *set) addKey(p *plan, r reflect.Value) error {
	s.rows++
	for i := range p.schema.Keys {
		if err := s.columns[i].add(s.arrays[i], r); err != nil {
			return err
		}
	}
	return nil
}

func (s *set) addSums(p *plan, d *row.Deltas, i int) {
	at := len(p.schema.Keys)
	for n := range p.schema.Sums {
		if p.schema.Sums[n].Kind == row.Int {
			s.arrays[at+n].addInt(d.Int(i, n))
		} else {
			s.arrays[at+n].addDecimal(d.Decimal(i, n))
		}
	}
	s.arrays[len(s.arrays)-1].addInt(d.Count(i))
}

// addRow adds a row and its owner, which is the last column.
func (s *set) addRow(r reflect.Value, owner string) error {
	s.rows++
	for i := range len(s.columns) - 1 {
		if err := s.columns[i].add(s.arrays[i], r); err != nil {
			return fmt.Errorf("%w (document %s)", err, owner)
		}
	}
	return s.arrays[len(s.arrays)-1].addText(owner)
}

// addOwner adds an _id; KeyText has neither NUL nor invalid UTF-8.
func (s *set) addOwner(owner string) {
	s.rows++
	_ = s.arrays[0].addText(owner)
}

// item is the statement with the set as its parameters.
func (s *set) item(sql string) *item {
	n := len(s.arrays)
	i := &item{sql: sql, oids: make([]uint32, n), values: make([][]byte, n), formats: make([]int16, n), buffers: s.arrays}
	for n, a := range s.arrays {
		i.oids[n] = s.columns[n].typ.array
		i.values[n], i.formats[n] = a.bytes()
	}
	return i
}

// add adds one more parameter, in binary format.
func (i *item) add(oid uint32, value []byte) {
	i.oids, i.values, i.formats = append(i.oids, oid), append(i.values, value), append(i.formats, pgtype.BinaryFormatCode)
}

func (s *set) discard() {
	for _, a := range s.arrays {
		arrays.Put(a)
	}
	s.arrays = nil
}
