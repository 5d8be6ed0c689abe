package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestGoRecipe and TestPythonRecipe run the examples that the README refers to.
func TestGoRecipe(t *testing.T) {
	program := filepath.Join(t.TempDir(), "readyourwrites")
	build := exec.Command("go", "build", "-o", program, "./packaging/examples/readyourwrites")
	build.Dir = ".."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the example: %v\n%s", err, out)
	}
	testGuestbook(t, exec.Command(program))
}

func TestPythonRecipe(t *testing.T) {
	python := "/usr/bin/python3" // Debian's, which has Debian's psycopg2
	if _, err := os.Stat(python); err != nil {
		if python, err = exec.LookPath("python3"); err != nil {
			t.Fatal("no python3; install it with: apt-get install python3 python3-psycopg2")
		}
	}
	source, err := filepath.Abs("../packaging/examples/read_your_writes.py")
	if err != nil {
		t.Fatal(err)
	}
	compile := exec.Command(python, "-m", "py_compile", source)
	compile.Env = append(os.Environ(), "PYTHONPYCACHEPREFIX="+t.TempDir())
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("compiling the example: %v\n%s", err, out)
	}
	if out, err := exec.Command(python, "-c", "import psycopg2").CombinedOutput(); err != nil {
		t.Logf("not run, only compiled; install psycopg2 with: apt-get install python3-psycopg2\n%s", out)
		return
	}
	testGuestbook(t, exec.Command(python, "-B", source))
}

// testGuestbook has a client of the example write and read, before and after a
// failover.
func testGuestbook(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE guestbook (id bigserial PRIMARY KEY, entry text NOT NULL)")
	c.waitReplayed(1)
	d := startDaemon(t, c.env()...)
	d.settled(c, 0)
	addr := fmt.Sprintf("127.0.0.1:%d", freePort(t, "127.0.0.1"))
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"),
		"PG_STATUS=http://" + d.addr,
		fmt.Sprintf("DSN=user=%s password=%s dbname=postgres sslmode=disable", superuser, password),
		"SECRET=xyzzy",
		"LISTEN=" + addr,
	}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	dieWithUs(cmd, syscall.SIGKILL)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("log of the example:\n%s", &log)
		}
	})
	client := &http.Client{Timeout: patience}
	defer client.CloseIdleConnections()
	request := func(method, body, cookie string) (resp *http.Response, page string, err error) {
		req, err := http.NewRequest(method, "http://"+addr+"/", strings.NewReader(body))
		if err != nil {
			return nil, "", err
		}
		if cookie != "" {
			req.Header.Set("Cookie", cookie)
		}
		resp, err = client.Do(req)
		if err != nil {
			return nil, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp, string(b), err
	}
	// write returns the cookie of a new entry.
	write := func(entry string) string {
		t.Helper()
		resp, page, err := request("POST", entry, "")
		if err != nil || resp.StatusCode != 204 || len(resp.Cookies()) != 1 {
			t.Fatalf("writing %q: %v %v %s; want 204 and a cookie", entry, err, resp, page)
		}
		return "position=" + resp.Cookies()[0].Value
	}
	read := func(cookie string) (host, page string) {
		t.Helper()
		resp, page, err := request("GET", "", cookie)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("reading with %q: %v %v %s", cookie, err, resp, page)
		}
		return resp.Header.Get("X-Host"), page
	}
	until(t, func() error {
		_, _, err := request("GET", "", "")
		return err
	})

	const writes = 20
	replicas := 0
	var cookie string
	for n := range writes {
		entry := fmt.Sprintf("entry %d", n)
		cookie = write(entry)
		host, page := read(cookie)
		if host == c.addr(1) {
			replicas++
		}
		if !strings.HasPrefix(page, fmt.Sprintf("%d %s\n", n+1, entry)) {
			t.Errorf("after writing %q, %s shows %q first; want it", entry, host, page)
		}
	}
	t.Logf("%d of %d reads came from the replica", replicas, writes)
	if replicas < writes/2 {
		t.Errorf("%d of %d reads came from the replica; want more", replicas, writes)
	}

	// With replay stopped, the master has it; and who has not written anything, or
	// nothing with our signature, may see the past.
	c.pauseReplay(1)
	forged := write("fresh")
	signature := forged[strings.Index(forged, "."):]
	for _, tt := range []struct{ cookie, host string }{
		{forged, c.addr(0)},
		{"", c.addr(1)},
		{"position=FFFFFFFF-0-1" + signature, c.addr(1)},
		{"position=0-1-1." + strings.Repeat("0", 64), c.addr(1)},
		{"position=nonsense", c.addr(1)},
		{cookie, c.addr(1)},
	} {
		if host, page := read(tt.cookie); host != tt.host || strings.Contains(page, "fresh") != (host == c.addr(0)) {
			t.Errorf("with the cookie %q, %s answers %q; want %s", tt.cookie, host, page, tt.host)
		}
	}
	c.resumeReplay(1)
	c.waitReplayed(1)

	c.stop(0, immediate)
	c.promote(1)
	start := time.Now()
	after := write("after the failover") // the connections to the old master are broken
	for _, cookie := range []string{forged, after} {
		if host, page := read(cookie); host != c.addr(1) || !strings.Contains(page, "fresh") || !strings.Contains(page, "after the failover") {
			t.Errorf("after a failover, %s answers %q; want all of it from %s", host, page, c.addr(1))
		}
	}
	t.Logf("the first write after the failover, and two reads, took %v", time.Since(start))
}
