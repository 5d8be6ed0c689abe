package e2e

import (
	"database/sql"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

// findProgram returns the path of a program of the Debian package pkg, which may
// be where only root's PATH leads.
func findProgram(t *testing.T, pkg string) string {
	t.Helper()
	for _, name := range []string{pkg, "/usr/sbin/" + pkg} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Fatalf("no %s; install it with: apt-get install %[1]s", pkg)
	return ""
}

// A middleman is a program between pg-status and a server. It has an address,
// and so a name, of its own.
type middleman struct {
	t       *testing.T
	name    string
	port    int
	dir     string
	command func() *exec.Cmd
	cmd     *exec.Cmd
	exited  chan struct{}
}

// addr is host:port, for envFor.
func (m *middleman) addr() string { return net.JoinHostPort(m.name, strconv.Itoa(m.port)) }

// newMiddleman makes a directory that the user of PostgreSQL owns.
func newMiddleman(t *testing.T) *middleman {
	t.Helper()
	b := newBadHost(t)
	m := &middleman{t: t, name: b.name, port: b.port}
	var err error
	if m.dir, err = os.MkdirTemp(postgres.dir, "middleman-"); err == nil {
		err = postgres.mkdir(m.dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if m.cmd != nil {
			m.stop()
		}
		if t.Failed() {
			t.Logf("log of %s, its end:\n%s", m.addr(), tail(m.log(), 60))
		}
		os.RemoveAll(m.dir)
	})
	return m
}

func (m *middleman) log() string {
	log, _ := os.ReadFile(filepath.Join(m.dir, "log"))
	return string(log)
}

// write writes a file that only the user of PostgreSQL can read, and returns its
// path.
func (m *middleman) write(name, content string) string {
	m.t.Helper()
	path := filepath.Join(m.dir, name)
	if err := postgres.write(path, content); err != nil {
		m.t.Fatal(err)
	}
	return path
}

// start returns when the program takes connections.
func (m *middleman) start() {
	m.t.Helper()
	log, err := os.OpenFile(filepath.Join(m.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		m.t.Fatal(err)
	}
	defer log.Close()
	m.cmd = m.command()
	m.cmd.Stdout, m.cmd.Stderr = log, log
	m.cmd.Dir = "/"
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: postgres.user}
	dieWithUs(m.cmd, syscall.SIGKILL)
	if err := m.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan<- struct{}) {
		cmd.Wait()
		close(exited)
	}(m.cmd, m.exited)
	until(m.t, func() error {
		conn, err := net.Dial("tcp", m.addr())
		if err == nil {
			conn.Close()
		}
		return err
	})
}

// stop ends the program at once.
func (m *middleman) stop() {
	m.t.Helper()
	m.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-m.exited:
	case <-time.After(patience):
		m.t.Errorf("%s did not stop", m.addr())
		m.cmd.Process.Kill()
	}
	m.cmd = nil
}

// startPgBouncer starts a PgBouncer in transaction mode in front of the server
// at target, with settings as "name = value" beyond the usual. A later one of a
// name wins.
func startPgBouncer(t *testing.T, target string, settings ...string) *middleman {
	t.Helper()
	m := newMiddleman(t)
	host, port, _ := net.SplitHostPort(target)
	users := m.write("users", fmt.Sprintf("%q %q\n", superuser, password))
	config := m.write("pgbouncer.ini", fmt.Sprintf(`[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = %s
listen_port = %d
unix_socket_dir =
auth_type = scram-sha-256
auth_file = %s
pool_mode = transaction
server_login_retry = 0.1
server_tls_sslmode = disable
%s
`, host, port, m.name, m.port, users, strings.Join(settings, "\n")))
	program := findProgram(t, "pgbouncer")
	m.command = func() *exec.Cmd { return exec.Command(program, config) }
	m.start()
	return m
}

// clients returns how many sessions the PgBouncer has let in, or turned away, and
// servers how many connections it has made to its server.
func (m *middleman) clients() int { return strings.Count(m.log(), " login attempt: ") }
func (m *middleman) servers() int { return strings.Count(m.log(), " new connection to server ") }

// TestPgBouncerTimeouts has a PgBouncer close connections to either side that are
// idle for less than a period. The hosts are well.
func TestPgBouncerTimeouts(t *testing.T) {
	c := newCluster(t, 1)
	rows := []struct {
		setting          string
		clients, servers bool // connections that it closes
		bouncers         [2]*middleman
		d                *daemon
		stop             func()
	}{
		{setting: "client_idle_timeout = 0"}, // never
		{setting: "client_idle_timeout = 0.2", clients: true},
		{setting: "server_idle_timeout = 0.2", servers: true},
		{setting: "server_lifetime = 0.2", servers: true},
	}
	for i := range rows {
		row := &rows[i]
		for node := range row.bouncers {
			row.bouncers[node] = startPgBouncer(t, c.addr(node), row.setting)
		}
		row.d = startDaemon(t, append(envFor(row.bouncers[0].addr(), row.bouncers[1].addr()), "pg_status__sleep_ms=600")...)
	}
	for i := range rows {
		rows[i].stop = rows[i].d.watchFine()
	}
	for i := range rows {
		row := &rows[i]
		row.d.eventually("/master", row.bouncers[0].name)
		row.d.eventually("/replica", row.bouncers[1].name)
		checked := *row.d.hosts()[0].LSN
		c.exec(0, "SELECT pg_logical_emit_message(true, '', '')")
		row.d.eventuallyHost(0, "beyond "+checked, func(h hostStatus) bool { return *h.LSN != checked })
		for _, b := range row.bouncers {
			until(t, func() error {
				clients, servers := b.clients(), b.servers()
				if row.clients && clients < 4 || row.servers && servers < 4 {
					return fmt.Errorf("with %s, there were %d connections to PgBouncer and %d to its server; want 4", row.setting, clients, servers)
				}
				return nil
			})
		}
	}
	for i := range rows {
		row := &rows[i]
		row.stop()
		row.d.stop()
		for _, b := range row.bouncers {
			if n := b.clients(); !row.clients && n != 1 {
				t.Errorf("with %s, there were %d connections to PgBouncer; want one that is kept", row.setting, n)
			}
			b.stop()
		}
	}
}

// TestPgBouncerQueue has all connections of a PgBouncer to its server in use, so
// that queries wait, for less than our time-out, until it turns them away.
func TestPgBouncerQueue(t *testing.T) {
	c := newCluster(t, 1)
	b := startPgBouncer(t, c.addr(1), "default_pool_size = 1", "query_wait_timeout = 0.3")
	d := startDaemon(t, append(envFor(c.addr(0), b.addr()), "pg_status__sleep_ms=500", "pg_status__query_timeout_ms=2000",
		"pg_status__poll_error_log_interval_ms=0")...)
	d.eventuallyHost(1, "fine", hostStatus.fine)
	connector, err := pq.NewConnector(fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=postgres sslmode=disable", b.name, b.port, superuser, password))
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	db.SetMaxOpenConns(1)
	if _, err := db.Exec("BEGIN"); err != nil {
		t.Fatal(err)
	}
	clients, failures := b.clients(), d.failures()
	d.eventuallyHost(1, "possibly dead", hostStatus.possiblyDead)
	d.eventuallyHost(1, "dead", hostStatus.dead)
	d.waitLogged("ERROR monitor: PostgreSQL operation failed operation=query host="+b.name, "query_wait_timeout")
	if h := d.hosts()[0]; !h.fine() {
		t.Errorf("the other host is %v", h)
	}
	// One replacement of the connection that was kept, and one attempt each for the
	// checks that follow.
	clients, failures = b.clients()-clients, d.failures()-failures
	if clients > failures+1 {
		t.Errorf("%d connections to PgBouncer in %d failed checks; want one each", clients, failures)
	}
	if _, err := db.Exec("ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	d.eventuallyHost(1, "fine", hostStatus.fine)
}

// TestPgBouncerRestart restarts a PgBouncer, which closes our connection.
func TestPgBouncerRestart(t *testing.T) {
	c := newCluster(t, 1)
	b := startPgBouncer(t, c.addr(1))
	d := startDaemon(t, append(envFor(c.addr(0), b.addr()), "pg_status__sleep_ms=100", "pg_status__max_fails=1000000")...)
	d.eventuallyHost(1, "fine", hostStatus.fine)
	b.stop()
	d.waitLogged("ERROR monitor: PostgreSQL operation failed operation=connect host="+b.name, "connection refused")
	d.eventuallyHost(1, "possibly dead", hostStatus.possiblyDead)
	b.start()
	d.eventuallyHost(1, "fine", hostStatus.fine)
	if record, ok := d.logged("state=dead"); ok {
		t.Errorf("the log has %s", record)
	}
}

// TestPgBouncerDatabaseDown stops the server behind a PgBouncer, which then still
// lets us log in. That costs as much as a connection that works, so a host which
// is dead of it is asked less and less often while there is a master.
func TestPgBouncerDatabaseDown(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1)
	p := c.proxy(0) // to the master
	b := startPgBouncer(t, c.addr(1), "query_wait_timeout = 0.5")
	d := startDaemon(t, append(envFor(p.addr(), b.addr()), "pg_status__poll_error_log_interval_ms=0")...)
	d.eventuallyHost(1, "fine", hostStatus.fine)
	c.stop(1, fast)
	d.eventuallyHost(1, "possibly dead", hostStatus.possiblyDead)
	d.eventuallyHost(1, "dead", hostStatus.dead)
	d.eventually("/replica", c.name(0))
	for line := range strings.Lines(d.logs()) {
		if strings.Contains(line, " ERROR ") && !strings.Contains(line, "query_wait_timeout") && !strings.Contains(line, "server login has been failing") {
			t.Errorf("the log has %s; want the reason that PgBouncer gives", line)
		}
	}

	attempts := func() (times []time.Time) {
		for line := range strings.Lines(d.logs()) {
			if strings.Contains(line, " ERROR monitor: PostgreSQL operation failed operation=") && strings.Contains(line, "host="+b.name+" ") {
				times = append(times, recordTime(t, line))
			}
		}
		return times
	}
	// The third failure is its death. All failures take the same time, so their
	// distances are those of the checks.
	died := recordTime(t, d.waitLogged("WARNING monitor: host state changed host="+b.name+" state=dead"))
	untilIn(t, time.Minute, func() error {
		times := attempts()
		for len(times) > 0 && times[0].Before(died.Add(-100*time.Millisecond)) {
			times = times[1:]
		}
		if len(times) < 5 {
			return fmt.Errorf("%d failed checks since its death", len(times)-1)
		}
		for i, want := range []time.Duration{2 * time.Second, 4 * time.Second, 8 * time.Second, 8 * time.Second} {
			if got := times[i+1].Sub(times[i]); got < want-500*time.Millisecond || got > want+time.Second {
				t.Errorf("the check number %d of the dead host comes %v after the one before; want %v", i+1, got, want)
			}
		}
		return nil
	})

	// Without a master, any host may bring it back.
	p.cut()
	d.eventually("/master", "")
	n := len(attempts())
	untilIn(t, 5*time.Second, func() error {
		if now := len(attempts()); now < n+3 {
			return fmt.Errorf("%d checks of the dead host since there is no master", now-n)
		}
		return nil
	})
	c.start(1)
	d.eventuallyHost(1, "fine", hostStatus.fine)
}

// startHAProxyTo starts an HAProxy that passes TCP on to the server at target,
// with more lines for its defaults section.
func startHAProxyTo(t *testing.T, target string, defaults ...string) *middleman {
	t.Helper()
	m := newMiddleman(t)
	config := m.write("haproxy.cfg", fmt.Sprintf(`global
	stats socket %s level admin
defaults
	mode tcp
	timeout connect 1s
	timeout client 1h
	timeout server 1h
	retries 0
	%s
listen postgresql
	bind %s
	server db %s
`, filepath.Join(m.dir, "admin"), strings.Join(defaults, "\n\t"), m.addr(), target))
	program := findProgram(t, "haproxy")
	m.command = func() *exec.Cmd { return exec.Command(program, "-db", "-f", config) }
	m.start()
	return m
}

// redirect has an HAProxy pass new sessions on to node i, and leave the others.
func (m *middleman) redirect(c *cluster, i int) {
	m.t.Helper()
	conn, err := net.Dial("unix", filepath.Join(m.dir, "admin"))
	if err != nil {
		m.t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(conn, "set server postgresql/db addr %s port %d\n", c.name(i), c.port(i))
	if answer, err := io.ReadAll(conn); err != nil || !strings.Contains(string(answer), " changed from ") {
		m.t.Fatalf("HAProxy answers %q, %v", answer, err)
	}
}

// TestHAProxyFollowed changes the server behind an HAProxy, which leaves the
// sessions to the old one open. Only who opens another follows.
func TestHAProxyFollowed(t *testing.T) {
	c := newCluster(t, 1)
	proxy := startHAProxyTo(t, c.addr(0))
	env := append(envFor(proxy.addr()), "pg_status__sleep_ms=100")
	stays := startDaemon(t, env...)
	follows := startDaemon(t, append(env, "pg_status__conn_max_age_ms=500")...)
	stays.eventually("/master", proxy.name)
	follows.eventually("/master", proxy.name)
	stop := []func(){stays.watchFine(), follows.watchFine()}

	proxy.redirect(c, 1)
	begin := time.Now()
	follows.eventuallyHost(0, "a replica", func(h hostStatus) bool { return !h.Master })
	// Its age, a check that starts the new connection, and one that uses it.
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("the change is followed after %v; want about 700 ms", took)
	}
	follows.waitLogged("INFO monitor: host role changed host=" + proxy.name + " role=replica")
	if h := stays.hosts()[0]; !h.Master {
		t.Errorf("with its old session, the host is %v; want it a master", h)
	}
	proxy.redirect(c, 0)
	follows.eventually("/master", proxy.name)
	for _, stop := range stop {
		stop()
	}
}

// TestHAProxyTimeout has an HAProxy close sessions that are idle for less than a
// period, and its server be down.
func TestHAProxyTimeout(t *testing.T) {
	c := newCluster(t, 1, withConf("log_connections = on"))
	proxy := startHAProxyTo(t, c.addr(1), "timeout client 200ms")
	d := startDaemon(t, append(envFor(c.addr(0), proxy.addr()), "pg_status__sleep_ms=500", "pg_status__poll_error_log_interval_ms=0")...)
	stop := d.watchFine()
	until(t, func() error {
		if n := c.logins(1, superuser); n < 5 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	stop()

	c.stop(1, fast)
	d.eventuallyHost(1, "dead", hostStatus.dead)
	d.waitLogged("ERROR monitor: PostgreSQL operation failed", "host="+proxy.name, "the server closed the connection unexpectedly")
	// This costs no password, so it is asked as often as ever.
	n := d.failures()
	begin := time.Now()
	until(t, func() error {
		if now := d.failures(); now < n+6 {
			return fmt.Errorf("%d failed checks", now-n)
		}
		return nil
	})
	if took := time.Since(begin); took > 4500*time.Millisecond {
		t.Errorf("6 checks took %v; want about 3 s", took)
	}
	c.start(1)
	d.eventuallyHost(1, "fine", hostStatus.fine)
}
