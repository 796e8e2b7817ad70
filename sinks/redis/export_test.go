package redis

import (
	"time"

	"github.com/tidemark-go/tidemark/internal/row"
)

// SetDamageLimit changes how long the noting of a damage may take.
func SetDamageLimit(d time.Duration) (restore func()) {
	before := damageLimit
	damageLimit = d
	return func() { damageLimit = before }
}

// Decode makes a row of a stored hash.
func Decode[R any](stored map[string]string) (R, error) {
	s, err := row.Of[R]()
	if err != nil {
		panic(err)
	}
	r, err := decodeAs[R](s, stored)
	return *r, err
}
