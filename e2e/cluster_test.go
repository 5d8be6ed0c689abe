package e2e

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
	"golang.org/x/sys/unix"
)

// The superuser of every cluster. The password is one that no log can hold by
// chance: see daemon.stop.
const (
	superuser = "postgres"
	password  = "Xyzzy-e2e-password"
)

// baseConf is the configuration of every server. Nothing survives a crash of the
// machine, nothing works in the background of its own accord, and WAL is kept
// for any standby that may be pointed here later. Passwords are as is the default
// from PostgreSQL 14 on.
const baseConf = `
unix_socket_directories = ''
fsync = off
wal_init_zero = off
wal_level = replica
hot_standby = on
max_wal_senders = 10
wal_keep_size = 512MB
max_wal_size = 2GB
checkpoint_timeout = 1h
autovacuum = off
shared_buffers = 16MB
password_encryption = scram-sha-256
wal_retrieve_retry_interval = 100ms
log_line_prefix = '%m [%p] %q%a '
log_timezone = 'UTC'
`

// baseHBA lets every role in, with its password.
const baseHBA = `
host all         all 127.0.0.0/8 scram-sha-256
host replication all 127.0.0.0/8 scram-sha-256
`

// A cluster is a set of servers with one history. Node 0 begins as the primary,
// the others as its streaming replicas; later any of them may be anything.
//
// Its methods are verbs that return when the thing is done, and fail the test
// when it cannot be. They are thus for the test's own goroutine; others have db.
type cluster struct {
	t     *testing.T
	dir   string // holds node<i>/{data,postgresql.conf,pg_hba.conf,log}
	slot  int    // third byte of the addresses
	nodes []*node

	// What the options ask for.
	settings   string
	hba        string
	environ    map[int][]string
	oneport    bool
	ownHistory bool
}

// An option of newCluster.
type option func(*cluster)

// withConf sets configuration parameters, as "name = value", of every server
// from the start.
func withConf(settings ...string) option {
	return func(c *cluster) { c.settings += strings.Join(settings, "\n") + "\n" }
}

// withRewind makes rewind possible. It costs WAL when hint bits are set, also by
// reading, and is thus not on by itself.
func withRewind() option { return withConf("wal_log_hints = on") }

// withHBA puts lines before those of pg_hba.conf that let everyone in by
// password.
func withHBA(lines ...string) option {
	return func(c *cluster) { c.hba += strings.Join(lines, "\n") + "\n" }
}

// withEnviron adds NAME=value pairs to the environment of node i's server.
func withEnviron(i int, pairs ...string) option {
	return func(c *cluster) { c.environ[i] = append(c.environ[i], pairs...) }
}

// withClock has the wall clock of node i's server off by d, by libfaketime.
func withClock(i int, d time.Duration) option {
	return func(c *cluster) {
		libs, _ := filepath.Glob(postgres.root + "/usr/lib/*/faketime/libfaketime.so.1")
		if len(libs) == 0 {
			c.t.Fatal("no libfaketime; install it with: apt-get install faketime")
		}
		withEnviron(i, "LD_PRELOAD="+postgres.inside(libs[0]), "DONT_FAKE_MONOTONIC=1",
			fmt.Sprintf("FAKETIME=%+f", d.Seconds()))(c)
	}
}

// withOnePort has all nodes listen on the same port, each on its own address.
func withOnePort() option { return func(c *cluster) { c.oneport = true } }

// withOwnHistory makes the cluster by initdb, so that it has a system identifier
// of its own. Other clusters are copies of one template and share theirs. This
// takes about 2 s.
func withOwnHistory() option { return func(c *cluster) { c.ownHistory = true } }

// A node is one server.
type node struct {
	dir    string // holds data, the configuration, and the log
	ip     string
	port   int
	env    []string // added to the server's environment
	cmd    *exec.Cmd
	exited chan struct{} // closed when the postmaster has ended
	source int           // the node it was last pointed to, or -1

	mu sync.Mutex // guards the following
	db *sql.DB    // nil until used
}

func (n *node) data() string { return filepath.Join(n.dir, "data") }

// slots are the numbers that clusters of this process have for now. The only
// cluster of its time thus always has the addresses 127.0.0.1, 127.0.0.2, ….
var slots = struct {
	mu    sync.Mutex // guards the following
	taken map[int]bool
	ports map[int]bool // ever given out by freePort
}{taken: map[int]bool{}, ports: map[int]bool{}}

// newCluster starts a primary and its streaming replicas, and returns when all
// of them stream and have replayed everything. It takes about a second.
func newCluster(t *testing.T, replicas int, options ...option) *cluster {
	t.Helper()
	c := &cluster{t: t, environ: map[int][]string{}}
	for _, o := range options {
		o(c)
	}
	slots.mu.Lock()
	for slots.taken[c.slot] {
		c.slot++
	}
	slots.taken[c.slot] = true
	slots.mu.Unlock()

	var err error
	if c.dir, err = os.MkdirTemp(postgres.dir, "cluster-"); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(c.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.cleanUp)

	from, err := template()
	if c.ownHistory {
		from = filepath.Join(c.dir, "template")
		err = makeTemplate(from)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := range replicas + 1 {
		n := &node{
			dir:    filepath.Join(c.dir, fmt.Sprintf("node%d", i)),
			ip:     fmt.Sprintf("127.0.%d.%d", c.slot, i+1),
			env:    c.environ[i],
			source: -1,
		}
		if c.oneport && i > 0 {
			n.port = c.nodes[0].port
		} else {
			n.port = freePort(t, n.ip)
		}
		c.nodes = append(c.nodes, n)
		image := "primary"
		if i > 0 {
			image = "replica"
		}
		if err := errors.Join(
			postgres.mkdir(n.dir),
			copyDir(n.data(), filepath.Join(from, image)),
			n.configure(c.settings, c.hba),
		); err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			c.follow(i, 0)
		}
		if err := n.launch(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range c.nodes {
		c.awaitReady(i)
	}
	for i := 1; i < len(c.nodes); i++ {
		c.waitReplayed(i)
	}
	return c
}

// cleanUp stops every server, in whatever state it is, and checks that no
// process of it is left.
func (c *cluster) cleanUp() {
	for i, n := range c.nodes {
		n.disconnect()
		for _, pid := range n.processes() {
			// A stopped process does not act on SIGQUIT.
			syscall.Kill(pid, syscall.SIGCONT)
		}
		if n.running() {
			n.cmd.Process.Signal(syscall.SIGQUIT)
			select {
			case <-n.exited:
			case <-time.After(10 * time.Second):
				c.t.Errorf("node %d did not stop", i)
			}
		}
		if left := n.kill(); left > 0 {
			c.t.Errorf("node %d left %d processes behind", i, left)
		}
		if c.t.Failed() {
			c.t.Logf("server log of node %d, %s, its end:\n%s", i, c.addr(i), tail(c.log(i), 60))
		}
	}
	os.RemoveAll(c.dir)
	slots.mu.Lock()
	defer slots.mu.Unlock()
	delete(slots.taken, c.slot)
}

// template makes, once for all tests, the data directories that clusters are
// copied from.
var template = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(postgres.dir, "template")
	return dir, makeTemplate(dir)
})

// makeTemplate makes dir, with the data directories "primary", by initdb, and
// "replica", by pg_basebackup from it.
func makeTemplate(dir string) error {
	pwfile := filepath.Join(dir, "password")
	if err := errors.Join(postgres.mkdir(dir), postgres.write(pwfile, password+"\n")); err != nil {
		return err
	}
	port, err := tryFreePort("127.0.0.1")
	if err != nil {
		return err
	}
	n := &node{dir: dir, ip: "127.0.0.1", port: port}
	if _, err := postgres.run("initdb", "--pgdata="+postgres.inside(n.data()), "--username="+superuser,
		"--pwfile="+postgres.inside(pwfile), "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync"); err != nil {
		return err
	}
	if err := errors.Join(n.configure("", ""), n.launch()); err != nil {
		return err
	}
	defer n.kill()
	for start := time.Now(); !n.ready(); time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > patience || !n.running() {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			return fmt.Errorf("the template server did not start:\n%s", log)
		}
	}
	if _, err := postgres.run("pg_basebackup", "--pgdata="+postgres.inside(filepath.Join(dir, "replica")),
		"--dbname="+n.conninfo("template"), "--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream", "--no-sync"); err != nil {
		return err
	}
	n.cmd.Process.Signal(syscall.SIGINT)
	select {
	case <-n.exited:
	case <-time.After(patience):
		return errors.New("the template server did not stop")
	}
	return os.Rename(n.data(), filepath.Join(dir, "primary"))
}

// freePort returns a port on which nothing listens at ip. It is below the range
// from which the kernel takes the ports of outgoing connections, so that it is
// still free a moment later.
func freePort(t *testing.T, ip string) int {
	t.Helper()
	port, err := tryFreePort(ip)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func tryFreePort(ip string) (int, error) {
	slots.mu.Lock()
	defer slots.mu.Unlock()
	// Test processes that run at once begin in different places.
	first := os.Getpid() * 37
	for i := range 10000 {
		port := 20000 + (first+i)%10000
		if slots.ports[port] {
			continue
		}
		// On all addresses: servers of another process may have one each.
		l, err := net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		slots.ports[port] = true
		return port, nil
	}
	return 0, fmt.Errorf("no free port on %s", ip)
}

// configure writes the server's configuration. It is outside the data directory
// because pg_rewind copies the other server's over what is inside.
func (n *node) configure(settings, hba string) error {
	conf := fmt.Sprintf("listen_addresses = '%s'\nport = %d\nhba_file = '%s'\n",
		n.ip, n.port, postgres.inside(filepath.Join(n.dir, "pg_hba.conf")))
	return errors.Join(
		postgres.write(filepath.Join(n.dir, "postgresql.conf"), conf+baseConf+settings),
		postgres.write(filepath.Join(n.dir, "pg_hba.conf"), hba+baseHBA))
}

// conninfo is how programs of PostgreSQL connect to n as superuser.
func (n *node) conninfo(application string) string {
	return fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=postgres application_name=%s",
		n.ip, n.port, superuser, password, application)
}

// launch starts the postmaster.
func (n *node) launch() error {
	log, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := postgres.command("postgres", "-D", postgres.inside(n.data()),
		"-c", "config_file="+postgres.inside(filepath.Join(n.dir, "postgresql.conf")))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(cmd.Env, n.env...)
	dieWithUs(cmd, syscall.SIGQUIT)
	if err := cmd.Start(); err != nil {
		return err
	}
	n.cmd, n.exited = cmd, make(chan struct{})
	go func(exited chan<- struct{}) {
		cmd.Wait()
		close(exited)
	}(n.exited)
	return nil
}

// running reports whether the postmaster is.
func (n *node) running() bool {
	if n.cmd == nil {
		return false
	}
	select {
	case <-n.exited:
		return false
	default:
		return true
	}
}

// ready reports whether the server takes connections, from the postmaster's
// lock file (LOCK_FILE_LINE_PM_STATUS in utils/pidfile.h).
func (n *node) ready() bool {
	lock, _ := os.ReadFile(filepath.Join(n.data(), "postmaster.pid"))
	lines := strings.Split(string(lock), "\n")
	return len(lines) >= 8 && lines[0] == strconv.Itoa(n.cmd.Process.Pid) && strings.TrimSpace(lines[7]) == "ready"
}

// processes returns the ids of the server's processes, postmaster and others:
// all of them work in the data directory.
func (n *node) processes() []int {
	var pids []int
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		if cwd, err := os.Readlink(link); err == nil && cwd == n.data() {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(link)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// kill ends every process of the server with SIGKILL, removes the shared memory
// that they then leave, and returns how many they were.
func (n *node) kill() int {
	pids := n.processes()
	if n.running() {
		// First of all, or it would react to the deaths of its children.
		n.cmd.Process.Kill()
	}
	for left := pids; len(left) > 0; left = n.processes() {
		for _, pid := range left {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(time.Millisecond)
	}
	if n.cmd != nil {
		<-n.exited
	}
	// The 7th line holds the key and the id of a System V segment.
	lock, _ := os.ReadFile(filepath.Join(n.data(), "postmaster.pid"))
	if lines := strings.Split(string(lock), "\n"); len(lines) >= 7 {
		if f := strings.Fields(lines[6]); len(f) == 2 {
			id, _ := strconv.Atoi(f[1])
			unix.SysvShmCtl(id, unix.IPC_RMID, nil)
		}
	}
	return len(pids)
}

// disconnect closes the connections of the fixture itself.
func (n *node) disconnect() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.db != nil {
		n.db.Close()
		n.db = nil
	}
}

// name is the host name of node i, an address that no other node has.
func (c *cluster) name(i int) string { return c.nodes[i].ip }

// port is the port of node i.
func (c *cluster) port(i int) int { return c.nodes[i].port }

// addr is host:port of node i.
func (c *cluster) addr(i int) string {
	return net.JoinHostPort(c.nodes[i].ip, strconv.Itoa(c.nodes[i].port))
}

// env returns the environment of a pg-status that watches all nodes, in order,
// and extra, whose later entries win.
func (c *cluster) env(extra ...string) []string {
	var addrs []string
	for i := range c.nodes {
		addrs = append(addrs, c.addr(i))
	}
	return append(envFor(addrs...), extra...)
}

// envFor returns the environment of a pg-status that watches the hosts at addrs,
// each host:port, as superuser: nodes, proxies, and hosts that fail, in any
// order. Append to it what else is to be set.
func envFor(addrs ...string) []string {
	var hosts, ports []string
	for _, addr := range addrs {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			panic(err)
		}
		hosts, ports = append(hosts, host), append(ports, port)
	}
	return []string{
		"pg_status__hosts=" + strings.Join(hosts, ","),
		"pg_status__pg_port=" + strings.Join(ports, ","),
		"pg_status__pg_user=" + superuser,
		"pg_status__pg_password=" + password,
	}
}

// start starts node i and returns when it takes connections.
func (c *cluster) start(i int) {
	c.t.Helper()
	if c.nodes[i].running() {
		c.t.Fatalf("node %d is running already", i)
	}
	if err := c.nodes[i].launch(); err != nil {
		c.t.Fatal(err)
	}
	c.awaitReady(i)
}

func (c *cluster) awaitReady(i int) {
	c.t.Helper()
	n := c.nodes[i]
	until(c.t, func() error {
		if !n.running() {
			c.t.Fatalf("node %d did not start; see its log", i)
		}
		if !n.ready() {
			return fmt.Errorf("node %d takes no connections", i)
		}
		return nil
	})
}

// The ways to stop a server, by the signal that asks the postmaster for it.
const (
	smart     = syscall.SIGTERM // waits for clients to leave
	fast      = syscall.SIGINT  // ends sessions; waits for replicas to have all WAL
	immediate = syscall.SIGQUIT // as if it crashed
)

// stop stops node i and returns when its processes are gone. A fast stop of a
// primary waits for its replicas, so it hangs on a frozen one; a smart stop
// waits for pg-status, for ever.
func (c *cluster) stop(i int, mode syscall.Signal) {
	c.t.Helper()
	n := c.nodes[i]
	n.disconnect()
	if !n.running() {
		c.t.Fatalf("node %d is not running", i)
	}
	n.cmd.Process.Signal(mode)
	select {
	case <-n.exited:
	case <-time.After(patience):
		c.t.Fatalf("node %d did not stop", i)
	}
}

// restart stops node i, fast, and starts it.
func (c *cluster) restart(i int) {
	c.t.Helper()
	c.stop(i, fast)
	c.start(i)
}

// kill9 ends every process of node i at once.
func (c *cluster) kill9(i int) {
	c.t.Helper()
	c.nodes[i].disconnect()
	if c.nodes[i].kill() == 0 {
		c.t.Fatalf("node %d is not running", i)
	}
}

// freeze stops every process of node i, as on a machine that hangs: the kernel
// still accepts connections, and nothing answers on them. Do not query it.
func (c *cluster) freeze(i int) {
	c.t.Helper()
	n := c.nodes[i]
	if !n.running() {
		c.t.Fatalf("node %d is not running", i)
	}
	// The postmaster first, so that it starts no more of them meanwhile.
	n.cmd.Process.Signal(syscall.SIGSTOP)
	for _, pid := range n.processes() {
		syscall.Kill(pid, syscall.SIGSTOP)
	}
}

// thaw lets a frozen node i go on.
func (c *cluster) thaw(i int) {
	c.t.Helper()
	for _, pid := range c.nodes[i].processes() {
		syscall.Kill(pid, syscall.SIGCONT)
	}
}

// promote makes a primary of the standby i, and returns when it takes writes.
func (c *cluster) promote(i int) {
	c.t.Helper()
	if got := c.query(i, "SELECT pg_promote(true, 20)"); got != "true" {
		c.t.Fatalf("promoting node %d: %s", i, got)
	}
	c.nodes[i].source = -1
}

// follow writes into the configuration of node i that it streams from node to.
func (c *cluster) follow(i, to int) {
	c.t.Helper()
	c.nodes[i].source = to
	c.append(filepath.Join(c.nodes[i].data(), "postgresql.auto.conf"),
		fmt.Sprintf("primary_conninfo = '%s'", c.nodes[to].conninfo(fmt.Sprintf("node%d", i))))
}

func (c *cluster) append(path, line string) {
	c.t.Helper()
	old, err := os.ReadFile(path)
	if err == nil {
		err = postgres.write(path, string(old)+line+"\n")
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// repoint has the standby i stream from node to, which may itself be a standby.
// It does not wait for i to do so: see waitReplayed. Node i may be down.
func (c *cluster) repoint(i, to int) {
	c.t.Helper()
	c.follow(i, to)
	if c.nodes[i].running() {
		c.reload(i)
	}
}

// repointNowhere has the standby i stream from a port that refuses, so that it
// has no WAL receiver.
func (c *cluster) repointNowhere(i int) {
	c.t.Helper()
	c.append(filepath.Join(c.nodes[i].data(), "postgresql.auto.conf"), "primary_conninfo = 'host=127.0.0.1 port=1'")
	c.nodes[i].source = -1
	c.reload(i)
}

// rewind makes a standby of node to out of node i, which is stopped and may have
// had a history of its own, and starts it. The cluster must be made withRewind.
func (c *cluster) rewind(i, to int) {
	c.t.Helper()
	n := c.nodes[i]
	if n.running() {
		c.t.Fatalf("node %d is running", i)
	}
	// It copies only what the source has on disk, and takes the timeline from
	// the source's last checkpoint.
	c.exec(to, "CHECKPOINT")
	if _, err := postgres.run("pg_rewind", "--target-pgdata="+postgres.inside(n.data()),
		"--source-server="+c.nodes[to].conninfo("rewind"), "--no-sync"); err != nil {
		c.t.Fatal(err)
	}
	if err := postgres.write(filepath.Join(n.data(), "standby.signal"), ""); err != nil {
		c.t.Fatal(err)
	}
	c.follow(i, to)
	c.start(i)
}

// conf sets configuration parameters of node i, as "name = value". A running
// server is told, and restarted if one of them takes that.
func (c *cluster) conf(i int, settings ...string) {
	c.t.Helper()
	c.append(filepath.Join(c.nodes[i].dir, "postgresql.conf"), strings.Join(settings, "\n"))
	if !c.nodes[i].running() {
		return
	}
	c.reload(i)
	if c.query(i, "SELECT count(*) FROM pg_settings WHERE pending_restart") != "0" {
		c.restart(i)
	}
}

// setHBA puts lines before those of node i's pg_hba.conf that let everyone in by
// password, in place of earlier ones, and has a running server read them.
// Sessions go on.
func (c *cluster) setHBA(i int, lines ...string) {
	c.t.Helper()
	if err := postgres.write(filepath.Join(c.nodes[i].dir, "pg_hba.conf"), strings.Join(lines, "\n")+baseHBA); err != nil {
		c.t.Fatal(err)
	}
	if c.nodes[i].running() {
		c.reload(i)
	}
}

// file writes a file for node i, such as a TLS key, that only its server can
// read, and returns the path by which the configuration may name it.
func (c *cluster) file(i int, name, content string) string {
	c.t.Helper()
	path := filepath.Join(c.nodes[i].dir, name)
	if err := postgres.write(path, content); err != nil {
		c.t.Fatal(err)
	}
	return postgres.inside(path)
}

// reload has node i read its configuration, and waits until it has.
func (c *cluster) reload(i int) {
	c.t.Helper()
	const loaded = "SELECT extract(epoch FROM pg_conf_load_time())"
	before := c.query(i, loaded)
	c.nodes[i].cmd.Process.Signal(syscall.SIGHUP)
	until(c.t, func() error {
		if c.query(i, loaded) == before {
			return fmt.Errorf("node %d did not reload", i)
		}
		return nil
	})
}

// db returns a pool of connections to node i, as superuser, in the database
// postgres. It is closed when the node is stopped through the fixture.
func (c *cluster) db(i int) *sql.DB {
	n := c.nodes[i]
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.db == nil {
		connector, err := pq.NewConnector(n.conninfo("e2e") + " sslmode=disable connect_timeout=5")
		if err != nil {
			panic(err)
		}
		n.db = sql.OpenDB(connector)
		n.db.SetMaxIdleConns(8)
	}
	return n.db
}

// exec runs statements on node i, as one transaction unless they say otherwise.
func (c *cluster) exec(i int, statements string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	if _, err := c.db(i).ExecContext(ctx, statements); err != nil {
		c.t.Fatalf("node %d: %s: %v", i, statements, err)
	}
}

// query runs a query on node i and returns its result in the manner of psql -At:
// a row per line, columns separated by |, null as nothing. Booleans are true and
// false, times RFC 3339.
func (c *cluster) query(i int, statement string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	text, err := queryText(ctx, c.db(i), statement)
	if err != nil {
		c.t.Fatalf("node %d: %s: %v", i, statement, err)
	}
	return text
}

func queryText(ctx context.Context, db *sql.DB, statement string) (string, error) {
	rows, err := db.QueryContext(ctx, statement)
	if err != nil {
		return "", err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return "", err
	}
	var lines []string
	for rows.Next() {
		values := make([]sql.NullString, len(columns))
		pointers := make([]any, len(columns))
		for i := range values {
			pointers[i] = &values[i]
		}
		if err := rows.Scan(pointers...); err != nil {
			return "", err
		}
		fields := make([]string, len(columns))
		for i, v := range values {
			fields[i] = v.String
		}
		lines = append(lines, strings.Join(fields, "|"))
	}
	return strings.Join(lines, "\n"), rows.Err()
}

// The positions that servers tell of themselves.
const (
	// currentLSN is what /hosts shows as lsn.
	currentLSN = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
	// writePosition is what a client passes with its next read: see the README
	// on read-your-writes. For a primary.
	writePosition = `SELECT pg_current_wal_insert_lsn(),
		('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint`
)

// lsn returns the position that node i is at, as in /hosts.
func (c *cluster) lsn(i int) string {
	c.t.Helper()
	return c.query(i, currentLSN)
}

// bytesBetween returns how many bytes of WAL position a is ahead of b, by node
// i's arithmetic.
func (c *cluster) bytesBetween(i int, a, b string) int64 {
	c.t.Helper()
	n, err := strconv.ParseInt(c.query(i, fmt.Sprintf("SELECT pg_wal_lsn_diff('%s', '%s')::bigint", a, b)), 10, 64)
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

// primaryOf returns the node at the head of the chain that i streams by.
func (c *cluster) primaryOf(i int) int {
	for c.nodes[i].source >= 0 {
		i = c.nodes[i].source
	}
	return i
}

// waitReplayed returns when the standby i has replayed everything that its
// primary has written by now. WAL that is inserted and not written, as after an
// asynchronous commit, does not count.
func (c *cluster) waitReplayed(i int) {
	c.t.Helper()
	primary := c.primaryOf(i)
	if primary == i {
		c.t.Fatalf("node %d follows nobody", i)
	}
	want := c.query(primary, "SELECT pg_current_wal_lsn()")
	until(c.t, func() error {
		got := c.query(i, fmt.Sprintf("SELECT pg_last_wal_replay_lsn() >= '%s', pg_last_wal_replay_lsn(), (SELECT count(*) FROM pg_stat_wal_receiver)", want))
		if !strings.HasPrefix(got, "true|") || !strings.HasSuffix(got, "|1") {
			return fmt.Errorf("node %d has replayed (position, receivers) %s; want %s of node %d", i, got, want, primary)
		}
		return nil
	})
}

// pauseReplay stops the replay of the standby i, and returns when it stands.
func (c *cluster) pauseReplay(i int) {
	c.t.Helper()
	c.exec(i, "SELECT pg_wal_replay_pause()")
	if postgres.version < 14 {
		return // where the server cannot tell
	}
	until(c.t, func() error {
		if got := c.query(i, "SELECT pg_get_wal_replay_pause_state()"); got != "paused" {
			return fmt.Errorf("the replay of node %d is %s", i, got)
		}
		return nil
	})
}

// resumeReplay undoes pauseReplay.
func (c *cluster) resumeReplay(i int) {
	c.t.Helper()
	c.exec(i, "SELECT pg_wal_replay_resume()")
}

// log returns everything that node i's server has logged.
func (c *cluster) log(i int) string {
	c.t.Helper()
	log, err := os.ReadFile(filepath.Join(c.nodes[i].dir, "log"))
	if err != nil {
		c.t.Error(err)
	}
	return string(log)
}

// tail returns the last n lines of text.
func tail(text string, n int) string {
	lines := strings.SplitAfter(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n-1):], "")
}
