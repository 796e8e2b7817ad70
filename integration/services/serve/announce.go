package serve

import (
	"fmt"
	"os"
)

// announce says on standard error, in one line, what a user should know of a service's start.
func announce(line string) { fmt.Fprintln(os.Stderr, "services: "+line) }
