package row

import (
	"errors"
	"fmt"

	"github.com/tidemark-go/tidemark/projector"
)

// CheckForm reports everything that keeps rows of the schema from being written by a
// form. What is to hold them is called kind, such as "table", and has a name.
func CheckForm(s *Schema, form projector.Form, kind, name string) error {
	var faults []error
	fault := func(text string) {
		faults = append(faults, fmt.Errorf("row type %s of %s %q: %s", s.Type, kind, name, text))
	}
	switch form {
	case projector.FormRollup:
		if len(s.Keys) == 0 {
			fault("a Rollup needs a key: tag what the sums are counted by with `key`")
		}
		if len(s.Sums) == 0 {
			fault("a Rollup needs a sum: tag it with `sum`; to count documents, contribute 1")
		}
		if len(s.Plain) > 0 {
			fault("a Rollup has keys and sums only; tag field " + s.Plain[0].GoName + " as one of them")
		}
	case projector.FormUpsert:
		if len(s.Keys) == 0 {
			fault("an Upsert needs a key: tag what identifies a row with `key`, or use a Mirror, whose rows are keyed by the document's _id")
		}
	case projector.FormMirror:
		if len(s.Keys) > 0 {
			fault("rows of a Mirror are keyed by the document's _id; drop `key`, or use an Upsert")
		}
	default:
		fault(fmt.Sprintf("form %q can't write to a %s", form, kind))
	}
	if len(s.Sums) > 0 && form != projector.FormRollup {
		fault("only a Rollup adds up; drop `sum`")
	}
	return errors.Join(faults...)
}
