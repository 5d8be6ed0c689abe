package e2e

import (
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// answersPromptly makes n requests that are logged at debug, and checks that
// each is answered soon.
func (d *daemon) answersPromptly(n int, want string) {
	d.t.Helper()
	var slowest time.Duration
	for range n {
		start := time.Now()
		if _, body, _ := d.get("/replica?min_lsn=FFFFFFFF/0"); body != want {
			d.t.Fatalf("/replica = %q; want the master, %s", body, want)
		}
		slowest = max(slowest, time.Since(start))
	}
	if slowest > time.Second {
		d.t.Errorf("the slowest of %d answers took %v", n, slowest)
	}
}

// sees checks that the daemon still polls: the host at index 0 moves.
func (d *daemon) sees(c *cluster) {
	d.t.Helper()
	c.exec(0, "INSERT INTO t VALUES (1)")
	d.eventuallyHost(0, "at "+c.lsn(0), func(h hostStatus) bool { return h.LSN != nil && *h.LSN == c.lsn(0) })
}

// TestStalledLog has a reader of the log that stops reading.
func TestStalledLog(t *testing.T) {
	c := newCluster(t, 0)
	c.exec(0, "CREATE TABLE t (i int)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=50", "pg_status__log_level=debug")...)
	d.eventually("/master", c.name(0))
	d.answersPromptly(1, c.name(0))
	d.waitLogged("DEBUG selection: master returned instead of replica", "context=/replica")

	// More than the pipe and any sensible buffer hold.
	d.stallLogs()
	d.answersPromptly(6000, c.name(0))
	d.sees(c)
	d.resumeLogs()
	d.waitLogged("WARNING", "dropped")
	d.waitLogged("DEBUG selection: master returned instead of replica")

	d.stallLogs()
	d.answersPromptly(6000, c.name(0))
	d.stop() // exits with 0 all the same
}

// TestClosedLog has a reader of the log that goes away, and none at all.
func TestClosedLog(t *testing.T) {
	c := newCluster(t, 0)
	c.exec(0, "CREATE TABLE t (i int)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=50", "pg_status__log_level=debug")...)
	d.eventually("/master", c.name(0))
	d.closeLogs()
	d.answersPromptly(500, c.name(0))
	d.sees(c)
	d.stop()

	port := freePort(t, "127.0.0.1")
	cmd := exec.Command("/bin/sh", "-c", `exec "$0" 2>&-`, binary)
	cmd.Env = daemonEnv(c.env("pg_status__sleep_ms=50", "pg_status__log_level=debug", fmt.Sprintf("pg_status__http_port=%d", port)))
	d = launchCommand(t, cmd)
	d.addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	until(t, func() error {
		_, _, _, err := d.try("GET", "/live", "")
		return err
	})
	d.eventually("/master", c.name(0))
	d.answersPromptly(500, c.name(0))
	d.sees(c)
}

// TestPasswordIsNotLogged has the connection fail in ways that name the user.
// That the log has no password is checked of every daemon when it stops.
func TestPasswordIsNotLogged(t *testing.T) {
	c := newCluster(t, 0)
	for _, format := range []string{"text", "json"} {
		d := startDaemon(t, c.env("pg_status__sleep_ms=50", "pg_status__log_level=debug", "pg_status__log_format="+format,
			"pg_status__pg_password=Plugh-e2e-not-the-password")...)
		d.waitReady()
		d.waitLogged("PostgreSQL operation failed", "host="+c.name(0), "password authentication failed")
		d.stop()
		d = startDaemon(t, append(envFor(c.addr(0), silentHost(t).addr(), babblingHost(t).addr(), resettingHost(t).addr(), refusingHost(t).addr()),
			"pg_status__query_timeout_ms=200", "pg_status__log_level=debug", "pg_status__log_format="+format, "pg_status__pg_database=no_such_database")...)
		d.waitReady()
		d.waitLogged("PostgreSQL operation failed", "host="+c.name(0), "no_such_database")
		d.stop()
	}
}

// TestLogIsReadable runs a failure through both formats.
func TestLogIsReadable(t *testing.T) {
	host := refusingHost(t)
	for _, tt := range []struct{ format, want string }{
		{"text", fmt.Sprintf("Z ERROR monitor: PostgreSQL operation failed operation=connect host=%s", host.name)},
		{"json", fmt.Sprintf(`Z","levelStr":"ERROR","component":"monitor","message":"PostgreSQL operation failed operation=connect host=%s`, host.name)},
	} {
		d := startDaemon(t, append(envFor(host.addr()), "pg_status__log_format="+tt.format, "pg_status__sleep_ms=50")...)
		record := d.waitLogged(tt.want)
		if tt.format == "json" && !strings.HasSuffix(record, `,"errno":111}`) || tt.format == "text" && !strings.HasSuffix(record, " (errno=111)") {
			t.Errorf("the record is %s; want the errno at its end", record)
		}
		// Said once at error, then only for debugging, until the interval ends.
		d.waitLogged("state=dead")
		if n := strings.Count(d.logs(), "PostgreSQL operation failed"); n != 1 {
			t.Errorf("the failure is logged %d times; want once", n)
		}
	}
}
