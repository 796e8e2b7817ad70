package serve

import (
	"archive/zip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// copyTree copies the folder src to dst, which must not exist, with permissions, and gives the copy to as unless nil.
func copyTree(src, dst string, as *account) error {
	if _, err := os.Lstat(dst); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("copy %s: %s exists already", src, dst)
	}
	return filepath.WalkDir(src, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		to := filepath.Join(dst, strings.TrimPrefix(path, src))
		switch {
		case entry.IsDir():
			err = os.Mkdir(to, 0o700)
		case info.Mode().IsRegular():
			err = copyFile(path, to)
		default: // a socket: of no use in a copy
			return nil
		}
		if err == nil {
			err = os.Chmod(to, info.Mode().Perm())
		}
		if err == nil && as != nil {
			err = os.Chown(to, int(as.uid), int(as.gid))
		}
		return err
	})
}

func copyFile(src, dst string) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	return writeFile(dst, in, 0o600)
}

func writeFile(path string, from io.Reader, perm fs.FileMode) error {
	out, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, from)
	return errors.Join(err, out.Close())
}

// unzip writes the one file of the archive whose name ends in suffix.
func unzip(archive, suffix, to string) error {
	r, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer r.Close()
	for _, f := range r.File {
		if !strings.HasSuffix(f.Name, suffix) {
			continue
		}
		in, err := f.Open()
		if err != nil {
			return err
		}
		return errors.Join(writeFile(to, in, 0o755), in.Close())
	}
	return fmt.Errorf("%s holds no file named …%s", archive, suffix)
}

// checkSum compares a file's SHA-256 with the expected one, in hex.
func checkSum(path, want string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return fmt.Errorf("%s has SHA-256 %s, expected %s: it is not what was pinned, so it is not used",
			filepath.Base(path), got, want)
	}
	return nil
}
