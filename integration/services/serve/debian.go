package serve

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// installDebian installs a Debian package, when we are root. The services that it brings are not started.
func installDebian(ctx context.Context, pkg string) error {
	if _, err := exec.LookPath("apt-get"); err != nil || os.Getuid() != 0 {
		return fmt.Errorf("%s is not installed and can't be installed from here (that needs root and apt-get): "+
			"install it, for example by: sudo apt-get install %s", pkg, pkg)
	}
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	unlock, err := waitLock(ctx, filepath.Join(cache, "apt.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	announce("installing Debian package " + pkg)
	allow, err := denyServiceStart("/usr/sbin/policy-rc.d")
	if err != nil {
		return err
	}
	defer allow()
	env := []string{"DEBIAN_FRONTEND=noninteractive", "LC_ALL=C"}
	if _, err := run(ctx, "/", env, "apt-get", "-q", "update"); err != nil {
		return err
	}
	// Not ended by ctx: an installation that breaks off leaves the system half installed.
	_, err = run(context.WithoutCancel(ctx), "/", env,
		"apt-get", "-q", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", "install", pkg)
	return err
}

// denyServiceStart writes the file by which Debian's packages ask whether they may start their service. A policy that
// is there already stays.
func denyServiceStart(policy string) (allow func(), err error) {
	f, err := os.OpenFile(policy, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString("#!/bin/sh\nexit 101\n")
	if err := errors.Join(err, f.Close(), os.Chmod(policy, 0o755)); err != nil {
		return nil, errors.Join(err, os.Remove(policy))
	}
	return func() { _ = os.Remove(policy) }, nil
}

const (
	libsslVersion = "1.1.1w-0+deb11u8"
	libsslSum     = "dcc68a543de6cb955a57077b66dcdb15f61d1e31e072f2c6cc4082c37da1b00d"
)

// unpackLibssl puts OpenSSL 1.1's libraries into dir/lib. They come from the security archive of Debian 11, found
// where this machine has its own Debian packages from, with lists and sources apart from the machine's, so that the
// system is left as it is. It needs no root.
func unpackLibssl(ctx context.Context, dir string) error {
	for _, tool := range []string{"apt-get", "dpkg"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("libssl1.1 comes from Debian's archive, and there is no %s here", tool)
		}
	}
	archive, err := debianSecurity(ctx)
	if err != nil {
		return err
	}
	work := filepath.Join(dir, "apt")
	for _, sub := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(work, sub), 0o755); err != nil {
			return err
		}
	}
	signed := ""
	if key := "/usr/share/keyrings/debian-archive-keyring.gpg"; exists(key) {
		signed = "[signed-by=" + key + "] "
	}
	list := filepath.Join(work, "sources.list")
	line := "deb " + signed + archive + " bullseye-security main\n"
	if err := os.WriteFile(list, []byte(line), 0o644); err != nil {
		return err
	}
	apt := []string{
		"apt-get", "-q", "-o", "Dir::Etc::sourcelist=" + list, "-o", "Dir::Etc::sourceparts=-",
		"-o", "Dir::State::lists=" + filepath.Join(work, "lists"), "-o", "Dir::Cache=" + filepath.Join(work, "cache"),
		"-o", "APT::Sandbox::User=root", "-o", "APT::Update::Error-Mode=any",
	}
	if _, err := run(ctx, work, nil, append(apt, "update")...); err != nil {
		return err
	}
	if _, err := run(ctx, work, nil, append(apt, "download", "libssl1.1="+libsslVersion)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(work, "libssl1.1_*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download left %d files for libssl1.1", len(debs))
	}
	if err := checkSum(debs[0], libsslSum); err != nil {
		return err
	}
	if _, err := run(ctx, work, nil, "dpkg", "-x", debs[0], "unpacked"); err != nil {
		return err
	}
	libs, err := filepath.Glob(filepath.Join(work, "unpacked", "usr", "lib", "*", "lib*.so.1.1"))
	if err != nil || len(libs) == 0 {
		return errors.New("libssl1.1 holds no library where Debian keeps them")
	}
	if err := os.Mkdir(filepath.Join(dir, "lib"), 0o755); err != nil {
		return err
	}
	for _, lib := range libs {
		if err := os.Rename(lib, filepath.Join(dir, "lib", filepath.Base(lib))); err != nil {
			return err
		}
	}
	return os.RemoveAll(work)
}

// debianSecurity is the address of Debian's security archive as this machine is configured.
func debianSecurity(ctx context.Context) (string, error) {
	out, err := run(ctx, "/", nil, "apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(out) {
		if uri, release, ok := strings.Cut(line, "|"); ok && strings.Contains(uri, "debian-security") &&
			strings.Contains(release, "-security") {
			return uri, nil
		}
	}
	return "", errors.New("libssl1.1 comes from Debian's security archive, and apt is not configured for it here")
}
