package serve

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// dockerAnswers tells whether a Docker engine with compose answers within 3 seconds.
func dockerAnswers(ctx context.Context) bool {
	docker, err := exec.LookPath("docker")
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if _, err := run(ctx, "/", nil, docker, "info"); err != nil {
		return false
	}
	_, err = run(ctx, "/", nil, docker, "compose", "version")
	return err == nil
}

// composeUp starts a service of compose.yaml, or finds it running, and returns when it is healthy.
func composeUp(ctx context.Context, name string) error {
	file, err := composeFile()
	if err != nil {
		return err
	}
	_, err = run(ctx, "", nil, "docker", "compose", "-f", file, "up", "--wait", name)
	return err
}

// composeDown removes a service's container and data.
func composeDown(ctx context.Context, name string) error {
	file, err := composeFile()
	if err != nil {
		return err
	}
	_, err = run(ctx, "", nil, "docker", "compose", "-f", file, "rm", "--stop", "--force", "--volumes", name)
	return err
}

// composeFile is integration/compose.yaml of the module that the working folder lies in.
func composeFile() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		file := filepath.Join(dir, "integration", "compose.yaml")
		if exists(file) {
			return file, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no integration/compose.yaml here or in a folder above: run inside tidemark's checkout")
		}
		dir = parent
	}
}
