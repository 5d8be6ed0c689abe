package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestCheckEndpoint asks about hosts in every state, as load balancers do.
func TestCheckEndpoint(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (b text)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.waitReady()
	c.pauseReplay(1)
	c.exec(0, "INSERT INTO t VALUES (repeat('x', 1000))")
	c.waitReplayed(2)
	lsn := c.lsn(0)
	d.eventuallyHost(0, "at "+lsn, func(h hostStatus) bool { return h.LSN != nil && *h.LSN == lsn })
	d.eventuallyHost(1, "behind", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes > 1000 })
	d.eventuallyHost(2, "at "+lsn, func(h hostStatus) bool { return h.LSN != nil && *h.LSN == lsn })

	check := func(host, conditions string, wantStatus int, want string) {
		t.Helper()
		path := "/check?host=" + host + conditions
		until(t, func() error { // of hosts that change, the next check tells
			status, body, _ := d.get(path)
			if status != wantStatus || body != want {
				return fmt.Errorf("%s = %d %q; want %d %q", path, status, body, wantStatus, want)
			}
			return nil
		})
		status, body, header := d.do("HEAD", path, "")
		if status != wantStatus || body != "" || header.Get("Content-Length") != strconv.Itoa(len(want)) {
			t.Errorf("HEAD %s = %d %q, Content-Length %s; want %d, nothing, and %d", path, status, body, header.Get("Content-Length"), wantStatus, len(want))
		}
	}
	for _, tt := range []struct {
		node       int
		conditions string
		status     int
		body       string
	}{
		{0, "&role=master", 200, "OK"},
		{0, "&role=replica", 503, "role"},
		{1, "&role=master", 503, "role"},
		{1, "&role=replica", 200, "OK"},
		{1, "&role=replica&lag_bytes=1000", 503, "lag_bytes"},
		{1, "&role=replica&lag_bytes=1000&min_lsn=" + lsn, 503, "lag_bytes min_lsn"},
		{1, "&role=replica&lag_bytes=1000000", 200, "OK"},
		{1, "&role=replica&min_lsn=" + lsn + "&timeline=2", 503, "min_lsn timeline"},
		{1, "&role=replica&min_lsn=0/1&timeline=1", 200, "OK"},
		{2, "&role=replica&lag_bytes=0&min_lsn=" + lsn + "&timeline=1&lag_ms=60000", 200, "OK"},
		{2, "&role=replica&timeline=2", 503, "timeline"},
	} {
		check(c.name(tt.node), tt.conditions, tt.status, tt.body)
	}
	check(fmt.Sprintf("%s&port=%d", c.name(2), c.port(2)), "&role=replica", 200, "OK")
	check(c.name(2)+"&port=1", "&role=replica", 404, "")
	check("db-9", "&role=replica", 404, "")
	check(c.name(2), "", 400, `{"error_text": "Invalid role"}`)
	check(c.name(2), "&role=primary", 400, `{"error_text": "Invalid role"}`)
	check(c.name(2), "&role=replica&lag_ms=x", 400, `{"error_text": "Invalid lag_ms"}`)

	// The time lag of one that does not replay grows.
	check(c.name(1), "&role=replica&lag_ms=500", 503, "lag_ms")
	c.stop(2, immediate)
	check(c.name(2), "&role=replica&lag_bytes=0", 503, "dead")
	check(c.name(2), "&role=master", 503, "dead")
	c.stop(0, immediate)
	check(c.name(0), "&role=master", 503, "dead")
	c.resumeReplay(1)
	c.promote(1)
	check(c.name(1), "&role=master", 200, "OK")
	check(c.name(1), "&role=replica", 503, "role")
}

// haproxyExample is the configuration that the README refers to.
const haproxyExample = "../packaging/examples/haproxy.cfg"

// TestHAProxyInREADME compares the configuration that the README shows, if it
// does, with the one that is tested: all of it from "defaults" on.
func TestHAProxyInREADME(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "listen read-write") {
		return
	}
	example, err := os.ReadFile(haproxyExample)
	if err != nil {
		t.Fatal(err)
	}
	_, shown, _ := strings.Cut(string(example), "\ndefaults\n")
	var want strings.Builder
	for line := range strings.Lines("defaults\n" + shown) {
		if line != "\n" {
			want.WriteString("    ")
		}
		want.WriteString(line)
	}
	if !strings.Contains(string(readme), want.String()) {
		t.Errorf("README.md shows another configuration than %s; want in it\n%s", haproxyExample, want.String())
	}
}

// startHAProxy runs the example, with addresses of c and d in place of its own,
// and returns where its two listeners are.
func startHAProxy(t *testing.T, c *cluster, d *daemon) (readWrite, readOnly string) {
	t.Helper()
	program, err := exec.LookPath("haproxy")
	if err != nil {
		if program, err = exec.LookPath("/usr/sbin/haproxy"); err != nil {
			t.Fatal("no haproxy; install it with: apt-get install haproxy")
		}
	}
	example, err := os.ReadFile(haproxyExample)
	if err != nil {
		t.Fatal(err)
	}
	config := string(example)
	replace := func(from, to string) {
		t.Helper()
		if !strings.Contains(config, from) {
			t.Fatalf("%s has no %q", haproxyExample, from)
		}
		config = strings.ReplaceAll(config, from, to)
	}
	readWrite = fmt.Sprintf("127.0.0.1:%d", freePort(t, "127.0.0.1"))
	readOnly = fmt.Sprintf("127.0.0.1:%d", freePort(t, "127.0.0.1"))
	replace("127.0.0.1:5000", readWrite)
	replace("127.0.0.1:5001", readOnly)
	_, port, _ := net.SplitHostPort(d.addr)
	replace("addr 127.0.0.1 port 8000", "addr 127.0.0.1 port "+port)
	for i := range c.nodes {
		replace(fmt.Sprintf("server db-%d db-%d:5432", i+1, i+1), "server "+c.name(i)+" "+c.addr(i))
	}
	path := filepath.Join(t.TempDir(), "haproxy.cfg")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}

	cmd := exec.Command(program, "-db", "-f", path)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	dieWithUs(cmd, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		if t.Failed() {
			t.Logf("log of HAProxy:\n%s", log.String())
		}
	})
	for _, addr := range []string{readWrite, readOnly} {
		until(t, func() error {
			conn, err := net.Dial("tcp", addr)
			if err == nil {
				conn.Close()
			}
			return err
		})
	}
	return readWrite, readOnly
}

// psql runs a session of psql at addr, and returns the node that it came to, and
// whether that is in recovery.
func (c *cluster) psql(addr string) (at int, standby bool, err error) {
	host, port, _ := net.SplitHostPort(addr)
	n := &node{ip: host}
	n.port, _ = strconv.Atoi(port)
	out, err := postgres.run("psql", "-XAt", "-d", n.conninfo("psql")+" connect_timeout=5",
		"-c", "SELECT host(inet_server_addr()), pg_is_in_recovery()")
	if err != nil {
		return -1, false, err
	}
	ip, recovery, _ := strings.Cut(strings.TrimSpace(out), "|")
	for i := range c.nodes {
		if c.name(i) == ip {
			return i, recovery == "t", nil
		}
	}
	return -1, false, fmt.Errorf("psql at %s says %q", addr, out)
}

// TestHAProxy has one HAProxy, driven by one pg-status, in front of a cluster
// that fails over.
func TestHAProxy(t *testing.T) {
	c := newCluster(t, 2, withRewind())
	d := startDaemon(t, c.env()...)
	d.settled(c, 0)
	readWrite, readOnly := startHAProxy(t, c, d)

	// lands checks that sessions come to those nodes, after a while if they have
	// just changed, and then nowhere else: each of several to one in turn.
	lands := func(addr string, standby bool, want ...int) {
		t.Helper()
		wanted := func() (int, error) {
			i, inRecovery, err := c.psql(addr)
			if err != nil {
				return i, err
			}
			for _, w := range want {
				if i == w && inRecovery == standby {
					return i, nil
				}
			}
			return i, fmt.Errorf("a session came to node %d, in recovery: %t; want one of %v, in recovery: %t", i, inRecovery, want, standby)
		}
		seen := map[int]int{}
		until(t, func() error { // every one of them is up, as far as HAProxy knows
			i, err := wanted()
			if err == nil {
				seen[i]++
			}
			if err == nil && len(seen) < len(want) {
				err = fmt.Errorf("sessions came to nodes %v; want each of %v", seen, want)
			}
			return err
		})
		clear(seen)
		for range 6 {
			i, err := wanted()
			if err != nil {
				t.Error(err)
			}
			seen[i]++
		}
		for _, w := range want {
			if seen[w] != 6/len(want) {
				t.Errorf("of 6 sessions, node %d got %d; want %d", w, seen[w], 6/len(want))
			}
		}
	}
	lands(readWrite, false, 0)
	lands(readOnly, true, 1, 2)

	// A session at the primary, which hangs, is ended once that is no longer the
	// master.
	open, err := net.Dial("tcp", readWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		open.Read(make([]byte, 1)) // PostgreSQL waits for us to begin
	}()
	writes, stopWrites := context.WithCancel(t.Context())
	defer stopWrites()
	elsewhere := make(chan struct{})
	go func() {
		defer close(elsewhere)
		for writes.Err() == nil {
			// While there is no master, there is no session either.
			if i, standby, err := c.psql(readWrite); err == nil && standby {
				t.Errorf("a session for writing came to node %d, which is a replica", i)
			}
		}
	}()
	c.freeze(0)
	c.promote(1)
	d.eventually("/master", c.name(1))
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("a session at the old master goes on")
	}
	stopWrites()
	<-elsewhere

	lands(readWrite, false, 1)
	lands(readOnly, false, 1) // the other replica does not follow yet, so the master reads
	c.repoint(2, 1)
	lands(readOnly, true, 2)
	c.kill9(0)
	c.rejoin(0, 1)
	lands(readWrite, false, 1)
	lands(readOnly, true, 0, 2)
}
