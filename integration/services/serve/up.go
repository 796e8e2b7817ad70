package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// upState is what Up left running, kept as JSON in the cache folder.
type upState struct {
	Home     string      `json:"home"` // the folder that has every native server's folder
	Services []upService `json:"services"`

	path string
}

type upService struct {
	Name   string   `json:"name"`
	Env    string   `json:"env"`
	URI    string   `json:"uri"`
	Docker bool     `json:"docker,omitempty"`
	Dirs   []string `json:"dirs,omitempty"`
}

// Up starts the named services (mongodb, postgres, redis, elasticsearch; all when none is named) and leaves them
// running, also when this process ends, until Down. What runs already stays as it is; what an environment variable
// names is used and not recorded.
func Up(ctx context.Context, names ...string) error {
	wanted, err := lookup(names)
	if err != nil {
		return err
	}
	state, unlock, err := openState(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if state.Home == "" || !exists(state.Home) {
		// Recorded before anything starts in it, so that Down finds what a killed Up left.
		if state.Home, err = makeDir(os.TempDir(), strings.TrimSuffix(upPrefix, "-")); err != nil {
			return err
		}
		if err := state.save(); err != nil {
			return errors.Join(err, os.RemoveAll(state.Home))
		}
	}
	for _, s := range wanted {
		if err := state.up(ctx, s); err != nil {
			return errors.Join(err, state.tidy())
		}
	}
	return state.tidy()
}

func (st *upState) up(ctx context.Context, s *service) error {
	switch i := st.index(s.name); {
	case i < 0:
	case st.Services[i].Docker: // asked again: it finds its container or starts it
		st.Services = slices.Delete(st.Services, i, i+1)
	case st.Services[i].runs():
		announce(s.name + ": up already")
		return nil
	default: // it died
		if err := st.down(ctx, i); err != nil {
			return err
		}
	}
	src, err := s.obtain(ctx, st.Home)
	if err != nil {
		return err
	}
	s.announce(src)
	if !src.docker && src.dirs == nil {
		return nil
	}
	st.Services = append(st.Services, upService{Name: s.name, Env: s.env, URI: src.uri, Docker: src.docker, Dirs: src.dirs})
	return st.save()
}

// Down stops the named services that Up started, all when none is named, and removes their data. So it does for
// containers that a test started through Docker and left running.
func Down(ctx context.Context, names ...string) error {
	wanted, err := lookup(names)
	if err != nil {
		return err
	}
	state, unlock, err := openState(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	docker := dockerAnswers(ctx)
	for _, s := range wanted {
		switch i := state.index(s.name); {
		case i >= 0:
			err = state.down(ctx, i)
		case docker:
			err = composeDown(ctx, s.name)
		default:
			continue
		}
		if err != nil {
			return err
		}
		announce(s.name + ": down")
	}
	return state.tidy()
}

// Env is one line of shell for each service that Up left running and that is named (all when none is):
// export MONGODB_URI='…'.
func Env(ctx context.Context, names ...string) ([]string, error) {
	wanted, err := lookup(names)
	if err != nil {
		return nil, err
	}
	state, unlock, err := openState(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	var lines []string
	for _, s := range wanted {
		if i := state.index(s.name); i >= 0 {
			lines = append(lines, fmt.Sprintf("export %s='%s'", s.env, state.Services[i].URI))
		}
	}
	return lines, nil
}

// openState reads the state and locks it against other commands.
func openState(ctx context.Context) (*upState, func(), error) {
	cache, err := cacheDir()
	if err != nil {
		return nil, nil, err
	}
	unlock, err := waitLock(ctx, filepath.Join(cache, "up.lock"))
	if err != nil {
		return nil, nil, err
	}
	state := &upState{path: filepath.Join(cache, "up.json")}
	text, err := os.ReadFile(state.path)
	if err == nil {
		if err = json.Unmarshal(text, state); err != nil {
			err = fmt.Errorf("%s is damaged (%w): stop the servers whose folders are %s* in %s, then delete it",
				state.path, err, upPrefix, os.TempDir())
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		unlock()
		return nil, nil, err
	}
	return state, unlock, nil
}

func (st *upState) save() error {
	text, err := json.MarshalIndent(st, "", "  ")
	if err != nil {
		return err
	}
	draft := st.path + ".draft"
	return errors.Join(os.WriteFile(draft, append(text, '\n'), 0o600), os.Rename(draft, st.path))
}

// tidy removes what isn't needed when nothing is up.
func (st *upState) tidy() error {
	if len(st.Services) > 0 || st.Home == "" {
		return nil
	}
	killInside(st.Home)
	return errors.Join(os.RemoveAll(st.Home), os.Remove(st.path))
}

func (st *upState) index(name string) int {
	return slices.IndexFunc(st.Services, func(s upService) bool { return s.Name == name })
}

func (st *upState) down(ctx context.Context, i int) error {
	s := st.Services[i]
	if s.Docker {
		if err := composeDown(ctx, s.Name); err != nil {
			return err
		}
	}
	for _, dir := range s.Dirs {
		killInside(dir)
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	st.Services = slices.Delete(st.Services, i, i+1)
	return st.save()
}

// runs tells whether each native server has a process.
func (s upService) runs() bool {
	return !slices.ContainsFunc(s.Dirs, func(dir string) bool { return len(inside(dir)) == 0 })
}
