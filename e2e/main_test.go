// Package e2e tests pg-status, as built, against real PostgreSQL servers. It
// needs Linux, where every address of 127.0.0.0/8 is the machine's own, so that
// each server has an address, and thus a host name, to itself.
//
// The fixture, by file: cluster_test.go has primaries and replicas,
// daemon_test.go the process under test, net_test.go hosts and paths that fail.
// A test reads so:
//
//	c := newCluster(t, 2)                // c.name(0) is the primary
//	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
//	d.eventually("/master", c.name(0))
//	c.stop(0, fast)
//	c.promote(1)
//	d.eventually("/master", c.name(1))   // fails with the last answer seen
//
// Everything that a test starts ends with it, failed or not. Every daemon must
// exit with 0 on SIGTERM and must not have logged its password, which the
// fixture checks, so that each test tests these too. Logs are shown only when
// the test has failed.
//
// PG_BIN names the directory of the PostgreSQL programs to use; the default is
// the highest version under /usr/lib/postgresql. PG_ROOT names a tree, such as
// debootstrap makes, in which to look for them and to run them, by chroot: this
// is how other PostgreSQL versions are tested. It takes root. PG_STATUS names a
// pg-status to test instead of the one that these sources make.
package e2e

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// binary is the path of the pg-status under test, and built the directory it was
// built in, or "" when it was given.
var binary, built string

// postgres is the PostgreSQL that the tests run.
var postgres installation

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

// testMain is TestMain in a form that can defer.
func testMain(m *testing.M) int {
	flag.Parse()
	if testing.Short() {
		fmt.Println("e2e tests are left out by -short")
		return 0
	}
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		cleanUp()
		return 1
	}
	defer cleanUp()
	return m.Run()
}

// prepare finds PostgreSQL and builds pg-status.
func prepare() error {
	if runtime.GOOS != "linux" {
		return errors.New("the end-to-end tests need Linux")
	}
	binary = os.Getenv("PG_STATUS")
	var err error
	if postgres, err = findPostgres(os.Getenv("PG_ROOT"), os.Getenv("PG_BIN")); err != nil {
		return err
	}
	// lib/pq reads these, and the tests connect to their own servers only.
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "PG") {
			os.Unsetenv(name)
		}
	}

	if binary != "" {
		return nil
	}
	if built, err = os.MkdirTemp("", "pg-status-e2e-"); err != nil {
		return err
	}
	// The go command does not see that the tests depend on these, and would
	// show cached results when they change, but for what the tests look at.
	sources, _ := filepath.Glob("../*")
	for _, name := range sources {
		os.Stat(name)
	}
	binary = filepath.Join(built, "pg-status")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-X main.version="+testVersion, "-o", binary, ".")
	build.Dir = ".."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("building pg-status: %w\n%s", err, out)
	}
	return nil
}

// testVersion is what the binary says on /version that prepare builds.
const testVersion = "1.2.3-e2e"

// cleanUp removes what prepare and the clusters have written.
func cleanUp() {
	if built != "" {
		os.RemoveAll(built)
	}
	if postgres.dir != "" {
		os.RemoveAll(postgres.dir)
	}
}

// An installation is a PostgreSQL and the user that runs it.
type installation struct {
	root    string              // the tree its programs run in, or ""
	bin     string              // the directory of its programs, inside root
	version int                 // the major version, such as 15
	user    *syscall.Credential // nil for ourselves
	dir     string              // for the data of clusters, outside root; owned by user
}

// findPostgres returns the installation in the directory bin, or else the
// highest version under /usr/lib/postgresql, inside the tree root.
func findPostgres(root, bin string) (p installation, err error) {
	p.root, p.bin = root, bin
	if bin == "" {
		dirs, _ := filepath.Glob(root + "/usr/lib/postgresql/*/bin")
		best := 0
		for _, dir := range dirs {
			v, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
			if _, err := os.Stat(dir + "/postgres"); err == nil && v > best {
				best, p.bin = v, strings.TrimPrefix(dir, root)
			}
		}
	}
	if p.bin == "" {
		return p, fmt.Errorf("no PostgreSQL server under %s/usr/lib/postgresql; install it with: apt-get install postgresql, or set PG_BIN", root)
	}

	if os.Geteuid() == 0 { // PostgreSQL refuses to run as root
		if p.user, err = findUser(root, "postgres"); err != nil {
			return p, err
		}
	} else if root != "" {
		return p, errors.New("PG_ROOT takes root")
	}
	parent := os.TempDir()
	if root != "" {
		parent = root + "/tmp"
	}
	if p.dir, err = os.MkdirTemp(parent, "pg-status-e2e-"); err != nil {
		return p, err
	}
	if p.user != nil {
		if err := os.Chown(p.dir, int(p.user.Uid), int(p.user.Gid)); err != nil {
			return p, err
		}
	}

	// postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
	out, err := p.run("postgres", "--version")
	if err != nil {
		return p, err
	}
	if _, err := fmt.Sscanf(out, "postgres (PostgreSQL) %d", &p.version); err != nil {
		return p, fmt.Errorf("reading %q: %w", out, err)
	}
	return p, nil
}

// findUser returns the credentials of a user of the machine, or of the tree root.
func findUser(root, name string) (*syscall.Credential, error) {
	var uid, gid string
	if root == "" {
		u, err := user.Lookup(name)
		if err != nil {
			return nil, fmt.Errorf("%w; install it with: apt-get install postgresql", err)
		}
		uid, gid = u.Uid, u.Gid
	} else {
		passwd, err := os.ReadFile(root + "/etc/passwd")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(passwd)) {
			if f := strings.Split(line, ":"); f[0] == name && len(f) > 3 {
				uid, gid = f[2], f[3]
			}
		}
	}
	u, err1 := strconv.ParseUint(uid, 10, 32)
	g, err2 := strconv.ParseUint(gid, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("finding the user %s: %w", name, err)
	}
	return &syscall.Credential{Uid: uint32(u), Gid: uint32(g)}, nil
}

// command prepares a program of PostgreSQL, to be run by its user and with a
// small, fixed environment. Paths in args are as inside returns them.
func (p *installation) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(p.bin, program), args...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C", "TZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.root, Credential: p.user}
	return cmd
}

// run runs a program of PostgreSQL that ends, and returns its output. It must
// not leave a process behind: that would hold the pipe open.
func (p *installation) run(program string, args ...string) (string, error) {
	out, err := p.command(program, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// inside returns path, a file of p.dir, as the programs see it.
func (p *installation) inside(path string) string { return strings.TrimPrefix(path, p.root) }

// write writes a file that the user of PostgreSQL owns.
func (p *installation) write(path, content string) error {
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil || p.user == nil {
		return err
	}
	return os.Chown(path, int(p.user.Uid), int(p.user.Gid))
}

// mkdir makes a directory that the user of PostgreSQL owns.
func (p *installation) mkdir(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil || p.user == nil {
		return err
	}
	return os.Chown(path, int(p.user.Uid), int(p.user.Gid))
}

// copyDir copies a directory, with owners and modes.
func copyDir(to, from string) error {
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copying %s: %w\n%s", from, err, out)
	}
	return nil
}

// patience bounds every wait for something that is sure to happen. It is only
// ever used up by a test that fails.
const patience = 20 * time.Second

// until calls f every 10 ms until it returns nil. The test ends with f's last
// error when that takes longer than patience.
func until(t *testing.T, f func() error) {
	t.Helper()
	untilIn(t, patience, f)
}

// untilIn is until with a patience of the caller's, for things that must happen
// within a time.
func untilIn(t *testing.T, limit time.Duration, f func() error) {
	t.Helper()
	start := time.Now()
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Since(start) > limit {
			t.Fatalf("after %v: %v", limit, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
