package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"
)

// passwords are such as shells, connection strings and files with columns trip
// over.
var passwords = []string{
	`it's "quoted" and ''doubled''`,
	`  spaces around  `,
	`back\slash\\ \' \n`,
	`host=x:5432 %s $PATH #; --`,
	`pässwörd Пароль 密码 🔑`,
}

// setPassword gives role of node 0 a password, stored for method.
func (c *cluster) setPassword(role, method, password string) {
	c.t.Helper()
	stored := "scram-sha-256"
	if method == "md5" {
		stored = "md5"
	}
	c.exec(0, fmt.Sprintf("SET LOCAL password_encryption = '%s'; ALTER ROLE %s PASSWORD %s", stored, role, pq.QuoteLiteral(password)))
}

// passLine returns a line of a PGPASSFILE (passwordFromFile in fe-connect.c).
func passLine(host string, port int, role, password string) string {
	return fmt.Sprintf("%s:%d:postgres:%s:%s\n", host, port, role, strings.NewReplacer(`\`, `\\`, `:`, `\:`).Replace(password))
}

// TestPasswords connects by every method, with passwords from every source.
func TestPasswords(t *testing.T) {
	methods := []string{"trust", "password", "md5", "scram-sha-256"}
	var hba []string
	for i, method := range methods {
		hba = append(hba, fmt.Sprintf("host all role%d 127.0.0.0/8 %s", i, method))
	}
	c := newCluster(t, 0, withHBA(hba...))
	for i := range methods {
		c.addRoles(fmt.Sprintf("role%d", i))
	}
	for _, password := range passwords {
		for i, method := range methods {
			role := fmt.Sprintf("role%d", i)
			c.setPassword(role, method, password)
			sources := []string{"pg_status__pg_password=" + password}
			if method == "scram-sha-256" {
				sources = append(sources,
					"pg_status__pg_password_file="+keep(t, password+"\n"),
					"PGPASSFILE="+keep(t, passLine("127.0.0.9", c.port(0), role, "wrong")+
						passLine(c.name(0), c.port(0), role, password)+"*:*:*:*:wrong\n"))
			}
			if method == "trust" {
				sources[0] = "pg_status__pg_password=wrong"
			}
			for _, source := range sources {
				env := []string{"pg_status__hosts=" + c.name(0), fmt.Sprintf("pg_status__pg_port=%d", c.port(0)), "pg_status__pg_user=" + role, source}
				d := startDaemon(t, env...)
				until(t, func() error {
					if record, ok := d.logged(" ERROR "); ok {
						t.Fatalf("by %s with %s: %s", method, source, record)
					}
					if _, body, _ := d.get("/master"); body != c.name(0) {
						return fmt.Errorf("by %s with %s: not connected", method, source)
					}
					return nil
				})
				d.stop()
			}
		}
	}
}

// disconnectMonitors ends the sessions of pg-status on node i, and waits for one
// to be there that is new, if it is to come back.
func (c *cluster) disconnectMonitors(i int, comesBack bool) {
	c.t.Helper()
	const pids = "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity WHERE application_name = 'pg-status'"
	before := c.query(i, pids)
	if before == "" {
		c.t.Fatalf("node %d has no session of pg-status", i)
	}
	c.query(i, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pg-status'")
	until(c.t, func() error {
		if now := c.query(i, pids); now == before || (now != "") != comesBack {
			return fmt.Errorf("the sessions of pg-status on node %d are %q; before, they were %q", i, now, before)
		}
		return nil
	})
}

// TestPasswordRotation changes the password while pg-status runs, which has it
// from a file of either kind.
func TestPasswordRotation(t *testing.T) {
	c := newCluster(t, 0)
	c.addRoles("monitor")
	dir := t.TempDir()
	// As in a volume of Kubernetes: a link to the file, replaced as a whole.
	file, n := filepath.Join(dir, "password"), 0
	write := func(content string) {
		t.Helper()
		n++
		path := filepath.Join(dir, fmt.Sprint(n))
		if err := errors.Join(os.WriteFile(path, []byte(content), 0o600), os.Symlink(path, path+".link"), os.Rename(path+".link", file)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		variable string
		content  func(password string) string
	}{
		{"pg_status__pg_password_file", func(password string) string { return password + "\n" }},
		{"PGPASSFILE", func(password string) string { return passLine(c.name(0), c.port(0), "monitor", password) }},
	} {
		set := func(password string) { c.setPassword("monitor", "scram-sha-256", password) }
		set("first password")
		write(tt.content("first password"))
		d := startDaemon(t, "pg_status__hosts="+c.name(0), fmt.Sprintf("pg_status__pg_port=%d", c.port(0)), "pg_status__pg_user=monitor",
			tt.variable+"="+file, "pg_status__sleep_ms=50", "pg_status__poll_error_log_interval_ms=0")

		// A session outlives the change, and so does its successor if the file
		// has changed too.
		stop := d.watchFine()
		write(tt.content("second password"))
		set("second password")
		c.disconnectMonitors(0, true)
		stop()

		// The file comes late.
		set("third password")
		c.disconnectMonitors(0, false)
		d.waitLogged("ERROR monitor", "password authentication failed for user \"monitor\"")
		d.eventuallyHost(0, "dead", hostStatus.dead)
		write(tt.content("third password"))
		d.eventuallyHost(0, "fine", hostStatus.fine)

		// The file goes away, and comes back.
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		c.disconnectMonitors(0, false)
		if tt.variable == "PGPASSFILE" { // libpq does without, too
			d.waitLogged("ERROR monitor", "password")
		} else {
			d.waitLogged("ERROR monitor", "pg_status__pg_password_file", "no such file or directory")
		}
		write(tt.content("third password"))
		d.eventuallyHost(0, "fine", hostStatus.fine)
		d.stop()
	}
}

// trySession opens a session of role on node i. It lasts until it is closed.
func (c *cluster) trySession(i int, role string) (io.Closer, error) {
	n := c.nodes[i]
	connector, err := pq.NewConnector(fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=postgres sslmode=disable connect_timeout=5",
		n.ip, n.port, role, password))
	if err != nil {
		return nil, err
	}
	conn, err := connector.Connect(context.Background())
	if err == nil {
		c.t.Cleanup(func() { conn.Close() })
	}
	return conn, err
}

// fill opens n sessions of role on node i, where pg-status may take a slot for a
// moment too, and returns what closes them.
func (c *cluster) fill(i, n int, role string) (release func()) {
	c.t.Helper()
	var sessions []io.Closer
	until(c.t, func() error {
		s, err := c.trySession(i, role)
		if err == nil {
			sessions = append(sessions, s)
		}
		if len(sessions) < n {
			return fmt.Errorf("%d sessions of %s: %v", len(sessions), role, err)
		}
		return nil
	})
	return func() {
		for _, s := range sessions {
			s.Close()
		}
	}
}

// TestReasons has a server turn pg-status away, for each reason there is. The log
// must say which, each check must try once, and pg-status must come back by
// itself when the reason is gone.
func TestReasons(t *testing.T) {
	const slots, reserved = 8, 2
	c := newCluster(t, 1)
	c.conf(0, fmt.Sprintf("max_connections = %d", slots), fmt.Sprintf("superuser_reserved_connections = %d", reserved))
	c.addRoles("monitor")
	c.exec(0, "CREATE DATABASE limited CONNECTION LIMIT 0")
	c.exec(0, "CREATE DATABASE closed ALLOW_CONNECTIONS false")
	c.waitReplayed(1)
	alter := func(clause string) func() { return func() { c.exec(0, "ALTER ROLE monitor "+clause) } }
	hba := filepath.Join(c.nodes[0].dir, "pg_hba.conf")
	var release func()
	gate := filepath.Join(c.nodes[1].dir, "gate")
	for _, tt := range []struct {
		name    string
		node    int
		arrange func()
		env     string // what is wrong with ours; such a host does not come back
		want    string
		undo    func()
	}{
		{name: "wrong password", env: "pg_status__pg_password=not the password", want: `password authentication failed for user "monitor"`},
		{name: "unknown role", env: "pg_status__pg_user=stranger", want: `password authentication failed for user "stranger"`},
		{name: "unknown database", env: "pg_status__pg_database=nowhere", want: `database "nowhere" does not exist`},
		{name: "database limit", env: "pg_status__pg_database=limited", want: `too many connections for database "limited"`},
		{name: "closed database", env: "pg_status__pg_database=closed", want: `database "closed" is not currently accepting connections`},
		{name: "pg_hba.conf without an entry", want: `no pg_hba.conf entry for host "127.0.0.1", user "monitor", database "postgres"`,
			arrange: func() {
				if err := postgres.write(hba, "host all "+superuser+" 127.0.0.0/8 scram-sha-256\n"); err != nil {
					t.Fatal(err)
				}
				c.reload(0)
			},
			undo: func() { c.setHBA(0) }},
		{name: "pg_hba.conf that rejects", want: `pg_hba.conf rejects connection for host "127.0.0.1", user "monitor", database "postgres"`,
			arrange: func() { c.setHBA(0, "host all monitor 127.0.0.0/8 reject") }, undo: func() { c.setHBA(0) }},
		{name: "role that may not log in", arrange: alter("NOLOGIN"), want: `role "monitor" is not permitted to log in`, undo: alter("LOGIN")},
		{name: "connection limit of a role", arrange: alter("CONNECTION LIMIT 0"), want: `too many connections for role "monitor"`, undo: alter("CONNECTION LIMIT -1")},
		{name: "slots for superusers only", want: "remaining connection slots are reserved for",
			arrange: func() {
				c.nodes[0].disconnect()
				release = c.fill(0, slots-reserved, "monitor")
			},
			undo: func() { release() }},
		{name: "no slots", want: "sorry, too many clients already",
			arrange: func() {
				c.nodes[0].disconnect()
				release = c.fill(0, slots, superuser)
			},
			undo: func() { release() }},
		// Recovery is held up before it begins, by its looking for a history file.
		{name: "starting up", node: 1, want: "the database system is starting up",
			arrange: func() {
				c.stop(1, fast)
				c.conf(1, fmt.Sprintf("restore_command = 'while ! test -e %s; do sleep 0.05; done; false'", postgres.inside(gate)))
				if err := c.nodes[1].launch(); err != nil {
					t.Fatal(err)
				}
				until(t, func() error {
					conn, err := net.Dial("tcp", c.addr(1))
					if err == nil {
						conn.Close()
					}
					return err
				})
			},
			undo: func() {
				c.file(1, "gate", "")
				c.awaitReady(1)
			}},
		// A smart stop waits for the sessions there are.
		{name: "shutting down", node: 1, want: "the database system is shutting down",
			arrange: func() {
				c.nodes[1].disconnect()
				release = c.fill(1, 1, superuser)
				c.nodes[1].cmd.Process.Signal(smart)
				until(t, func() error {
					lock, _ := os.ReadFile(filepath.Join(c.nodes[1].data(), "postmaster.pid"))
					if !strings.Contains(string(lock), "stopping") {
						return errors.New("the server is not stopping")
					}
					return nil
				})
			},
			undo: func() {
				release()
				<-c.nodes[1].exited
				c.start(1)
			}},
	} {
		if tt.arrange != nil {
			tt.arrange()
		}
		p := tapTo(t, c.addr(tt.node))
		env := append(envFor(p.addr()), "pg_status__pg_user=monitor", "pg_status__sleep_ms=50", "pg_status__poll_error_log_interval_ms=0")
		d := startDaemon(t, append(env, tt.env)...)
		d.eventuallyHost(0, "dead", hostStatus.dead)
		until(t, func() error {
			if n := d.failures(); n < 4 {
				return fmt.Errorf("%s: %d failed checks", tt.name, n)
			}
			return nil
		})
		// A check may be under way.
		connections, failures := p.connections(), d.failures()
		if connections > failures+1 {
			t.Errorf("%s: %d connections in %d checks; want one each", tt.name, connections, failures)
		}
		for line := range strings.Lines(d.logs()) {
			if strings.Contains(line, " ERROR ") && !strings.Contains(line, tt.want) {
				t.Errorf("%s: the log has %s; want it say %q", tt.name, line, tt.want)
			}
		}
		if _, ok := d.logged("ERROR monitor: PostgreSQL operation failed operation=authenticate host="+p.name, tt.want); !ok {
			t.Errorf("%s: no such record says %q", tt.name, tt.want)
		}
		if tt.undo != nil {
			tt.undo()
			d.eventuallyHost(0, "fine", hostStatus.fine)
		}
		d.stop()
	}
}

// TestFullMaster has a master without slots for anyone else, for longer than the
// connection that pg-status keeps is to last.
func TestFullMaster(t *testing.T) {
	const slots, reserved = 8, 2
	c := newCluster(t, 1)
	c.conf(0, fmt.Sprintf("max_connections = %d", slots), fmt.Sprintf("superuser_reserved_connections = %d", reserved))
	c.addRoles("monitor", "other")
	for _, tt := range []struct {
		name, want string
		arrange    func() (undo func())
	}{
		{"a connection limit of 1", `too many connections for role "monitor"`, func() func() {
			c.exec(0, "ALTER ROLE monitor CONNECTION LIMIT 1")
			return func() { c.exec(0, "ALTER ROLE monitor CONNECTION LIMIT -1") }
		}},
		{"all slots but ours taken", "sorry, too many clients already", func() func() {
			return c.fill(0, slots-2, superuser) // one is ours, one the fixture's
		}},
		{"all slots for others than superusers taken", "remaining connection slots are reserved for", func() func() {
			return c.fill(0, slots-reserved-2, "other")
		}},
	} {
		d := startDaemon(t, c.env("pg_status__pg_user=monitor", "pg_status__sleep_ms=50", "pg_status__conn_max_age_ms=200", "pg_status__log_level=debug")...)
		stop := d.watchFine()
		undo := tt.arrange()
		refused := func() int {
			n := 0
			for line := range strings.Lines(d.logs()) {
				if strings.Contains(line, "aged connection not replaced host="+c.name(0)) && strings.Contains(line, tt.want) {
					n++
				}
			}
			return n
		}
		until(t, func() error {
			if n := refused(); n < 2 {
				return fmt.Errorf("with %s, %d new connections were refused", tt.name, n)
			}
			return nil
		})
		const session = "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity WHERE usename = 'monitor'"
		kept := c.query(0, session)
		until(t, func() error {
			if n := refused(); n < 8 {
				return fmt.Errorf("with %s, %d new connections were refused", tt.name, n)
			}
			return nil
		})
		if now := c.query(0, session); now != kept || strings.Contains(kept, " ") {
			t.Errorf("with %s, the session was %s and is %s; want the one that was kept", tt.name, kept, now)
		}
		undo()
		until(t, func() error {
			if now := c.query(0, session); now == "" || strings.Contains(now, kept) {
				return fmt.Errorf("after %s, the session %s is not replaced", tt.name, kept)
			}
			return nil
		})
		stop()
		if failures, gap := d.failures(), d.longestGap(c.name(0)); failures > 0 || gap > 500*time.Millisecond {
			t.Errorf("with %s, %d checks failed, and none was made for %v", tt.name, failures, gap)
		}
		d.stop()
	}
}
