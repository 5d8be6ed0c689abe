package e2e

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A tap is a path to a server that counts the connections made through it, like
// a badHost, and keeps the first packet of each. It can hold new ones up while
// the old ones go on.
type tap struct {
	*badHost

	mu      sync.Mutex // guards the following
	packets []string   // in the order in which they came, without their lengths
	gate    chan struct{}
}

// tapTo returns a path to the server at target.
func tapTo(t *testing.T, target string) *tap {
	t.Helper()
	p := &tap{badHost: newBadHost(t), gate: make(chan struct{})}
	close(p.gate)
	t.Cleanup(p.release) // lets the goroutines end
	p.serve(t, func(client net.Conn) {
		p.mu.Lock()
		gate := p.gate
		p.mu.Unlock()
		<-gate
		packet := make([]byte, 4)
		if _, err := io.ReadFull(client, packet); err != nil {
			return
		}
		packet = append(packet, make([]byte, packet[3]-4)...) // ours are short
		if _, err := io.ReadFull(client, packet[4:]); err != nil {
			return
		}
		p.mu.Lock()
		p.packets = append(p.packets, string(packet[4:]))
		p.mu.Unlock()

		server, err := net.DialTimeout("tcp", target, patience)
		if err != nil {
			return
		}
		defer server.Close()
		server.Write(packet)
		go func() {
			io.Copy(server, client)
			server.Close()
		}()
		io.Copy(client, server)
	})
	return p
}

// hold lets new connections wait from now on, release lets all of them pass.
func (p *tap) hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gate = make(chan struct{})
}

func (p *tap) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.gate:
	default:
		close(p.gate)
	}
}

// first returns the first packets of the connections so far.
func (p *tap) first() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.packets)
}

// startupPacket is what the first packet of a session begins with: protocol 3.0
// (libpq/pqcomm.h). A request to cancel or for TLS has another number.
const startupPacket = "\x00\x03\x00\x00"

// halfClosingHost accepts connections, says that it has nothing to say, and goes
// on reading.
func halfClosingHost(t *testing.T) *badHost {
	t.Helper()
	b := newBadHost(t)
	b.serve(t, func(conn net.Conn) {
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn)
	})
	return b
}

// failures returns how many failed checks the daemon has logged. All of them are
// only with pg_status__poll_error_log_interval_ms=0.
func (d *daemon) failures() int {
	return strings.Count(d.logs(), " ERROR monitor: PostgreSQL ")
}

// logins returns how many connections role has made to node i, whose server logs
// them, with the name that pg-status gives itself.
func (c *cluster) logins(i int, role string) int {
	return strings.Count(c.log(i), fmt.Sprintf("connection authorized: user=%s database=postgres application_name=pg-status", role))
}

// addRoles makes roles on the primary that have the superuser's password and
// no privileges, and waits for the replicas to know them.
func (c *cluster) addRoles(roles ...string) {
	c.t.Helper()
	for _, role := range roles {
		c.exec(0, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s'", role, password))
	}
	for i := 1; i < len(c.nodes); i++ {
		c.waitReplayed(i)
	}
}

// watchFine looks at every host many times a second until stop is called. The
// test fails if one of them was not fine, or there was a warning or an error in
// the log.
func (d *daemon) watchFine() (stop func()) {
	d.t.Helper()
	d.waitReady()
	for i := range d.hosts() {
		d.eventuallyHost(i, "fine", hostStatus.fine)
	}
	before := len(d.logs())
	stopped, done := make(chan struct{}), make(chan struct{})
	samples, worst := 0, ""
	go func() {
		defer close(done)
		for ; worst == ""; samples++ {
			select {
			case <-stopped:
				return
			case <-time.After(5 * time.Millisecond):
			}
			_, body, _, err := d.try("GET", "/hosts", "")
			if err != nil || strings.Contains(body, `"alive":false`) || strings.Contains(body, `"possible_dead":true`) {
				worst = fmt.Sprint(body, err)
			}
		}
	}()
	return func() {
		d.t.Helper()
		close(stopped)
		<-done
		if worst != "" {
			d.t.Errorf("after %d samples, /hosts = %s; want all of them fine", samples, worst)
		}
		for line := range strings.Lines(d.logs()[before:]) {
			if strings.Contains(line, " WARNING ") || strings.Contains(line, " ERROR ") {
				d.t.Errorf("of hosts that are well, the log says %s", line)
			}
		}
	}
}

// checks returns when the checks of host that succeeded were logged. They are at
// debug.
func (d *daemon) checks(host string) []time.Time {
	d.t.Helper()
	var times []time.Time
	for line := range strings.Lines(d.logs()) {
		if strings.Contains(line, " DEBUG monitor: checked host="+host+" ") {
			times = append(times, recordTime(d.t, line))
		}
	}
	return times
}

// longestGap returns the longest time between two successive checks of host that
// succeeded.
func (d *daemon) longestGap(host string) time.Duration {
	d.t.Helper()
	var gap time.Duration
	times := d.checks(host)
	for i := 1; i < len(times); i++ {
		gap = max(gap, times[i].Sub(times[i-1]))
	}
	return gap
}

// idleFDs returns how many descriptors the process has open between two checks:
// the least that are seen in a while.
func (d *daemon) idleFDs() int {
	d.t.Helper()
	least := d.fds()
	for range 50 {
		time.Sleep(time.Millisecond)
		least = min(least, d.fds())
	}
	return least
}

// TestFailingHostsLeakNothing makes a thousand checks of each kind of host that
// fails. Every host has a pg-status to itself, so that none waits for the turn of
// another.
func TestFailingHostsLeakNothing(t *testing.T) {
	t.Parallel()
	// The numbers of checks between which to compare; after some, the heap has its size.
	const some, many = 200, 1200
	c := newCluster(t, 1, withHBA("host all trusted 127.0.0.0/8 trust")) // fast enough for the time-out
	c.addRoles("trusted")
	frozen, halfOpen := tapTo(t, c.addr(1)), c.proxy(0)
	silent, babbling := silentHost(t), babblingHost(t)
	resetting, halfClosing := resettingHost(t), halfClosingHost(t)
	resettingTLS, halfClosingTLS := resettingHost(t), halfClosingHost(t)
	const plain, prefer = "disable", "prefer"
	const timedOut, closed = "PostgreSQL poll timed out", "the server closed the connection unexpectedly"
	rows := []struct {
		name, addr, mode, want string
		seen                   func() int // the connections; nil where none comes about
		fault                  func()     // nil: the host never was well

		d                 *daemon
		fds, threads, rss int
	}{
		{name: "frozen", addr: frozen.addr(), mode: plain, want: timedOut, seen: frozen.connections, fault: func() { c.freeze(1) }},
		{name: "half-open", addr: halfOpen.addr(), mode: plain, want: timedOut, seen: halfOpen.connections, fault: halfOpen.stall},
		{name: "refusing", addr: refusingHost(t).addr(), mode: prefer, want: "connection refused"},
		{name: "black hole", addr: blackHole(t).addr(), mode: prefer, want: timedOut},
		{name: "silent", addr: silent.addr(), mode: prefer, want: timedOut, seen: silent.connections},
		{name: "babbling", addr: babbling.addr(), mode: plain, want: "not PostgreSQL's protocol", seen: babbling.connections},
		{name: "resetting", addr: resetting.addr(), mode: plain, want: "connection reset by peer", seen: resetting.connections},
		{name: "half-closing", addr: halfClosing.addr(), mode: plain, want: closed, seen: halfClosing.connections},
		// As with libpq, TLS that fails is a reason to go on without only once the
		// server has agreed to it.
		{name: "resetting when asked for TLS", addr: resettingTLS.addr(), mode: prefer, want: "connection reset by peer", seen: resettingTLS.connections},
		{name: "half-closing when asked for TLS", addr: halfClosingTLS.addr(), mode: prefer, want: closed, seen: halfClosingTLS.connections},
	}
	for i := range rows {
		row := &rows[i]
		row.d = startDaemon(t, append(envFor(row.addr), "pg_status__pg_user=trusted", "PGSSLMODE="+row.mode,
			"pg_status__sleep_ms=10", "pg_status__query_timeout_ms=25", "pg_status__poll_error_log_interval_ms=0",
			"GOGC=10")...) // little garbage, so that VmRSS shows what is in use
		if row.fault != nil {
			row.d.eventuallyHost(0, "fine", hostStatus.fine)
			row.d.client.CloseIdleConnections()
			row.fault()
		}
	}
	await := func(d *daemon, name string, failures int) {
		t.Helper()
		untilIn(t, 2*time.Minute, func() error {
			time.Sleep(200 * time.Millisecond) // to count is work
			if n := d.failures(); n < failures {
				return fmt.Errorf("the %s host has failed %d checks; want %d", name, n, failures)
			}
			return nil
		})
	}
	for i := range rows {
		row := &rows[i]
		await(row.d, row.name, some)
		row.fds, row.threads, row.rss = row.d.idleFDs(), row.d.threads(), row.d.kB("VmRSS")
	}
	for i := range rows {
		row := &rows[i]
		await(row.d, row.name, many)
		fds, threads, rss := row.d.idleFDs(), row.d.threads(), row.d.kB("VmRSS")
		row.d.stop()
		failures := row.d.failures()
		t.Logf("%s: %d checks; descriptors %d, %d; threads %d, %d; VmRSS %d, %d kB", row.name, failures, row.fds, fds, row.threads, threads, row.rss, rss)
		if fds > row.fds+1 { // a check may be under way whenever one looks
			t.Errorf("%s: %d descriptors are open after many checks; want %d as after some", row.name, fds, row.fds)
		}
		// A goroutine takes 2 kB or more for its stack alone.
		if rss > row.rss+1200 || threads > row.threads+4 {
			t.Errorf("%s: from %d kB and %d threads to %d kB and %d threads in %d checks", row.name, row.rss, row.threads, rss, threads, failures)
		}
		if _, ok := row.d.logged(" ERROR monitor: PostgreSQL ", row.want); !ok {
			record, _ := row.d.logged(" ERROR monitor: PostgreSQL ")
			t.Errorf("%s: no failure says %q, but one is %s", row.name, row.want, record)
		}
		// The last check is ended by the stop, and fails without a record. One whose
		// time ran out before it could connect has made none.
		if row.seen != nil {
			if n := row.seen(); n > failures+1 || n < failures*3/4 {
				t.Errorf("%s: %d connections in %d checks; want one a check", row.name, n, failures)
			}
		}
	}
	for _, packet := range frozen.first() {
		if !strings.HasPrefix(packet, startupPacket) {
			t.Errorf("a connection to the frozen host began with %q; want a start of a session", packet)
		}
	}
	c.thaw(1)
}

// TestEnvironment sets every variable of libpq that would lead us elsewhere, or
// change the session, or that lib/pq refuses.
func TestEnvironment(t *testing.T) {
	c := newCluster(t, 0)
	trap, p := silentHost(t), tapTo(t, c.addr(0))
	service := keep(t, fmt.Sprintf("[elsewhere]\nhost=%s\nport=%d\n", trap.name, trap.port))
	d := startDaemon(t, append(envFor(p.addr()), "pg_status__sleep_ms=50",
		"PGHOST="+trap.name, "PGHOSTADDR="+trap.name, fmt.Sprintf("PGPORT=%d", trap.port),
		"PGSERVICE=elsewhere", "PGSERVICEFILE="+service, "PGSYSCONFDIR="+filepath.Dir(service),
		"PGUSER=nobody", "PGPASSWORD=wrong", "PGDATABASE=nowhere", "PGAPPNAME=other",
		"PGTARGETSESSIONATTRS=standby", "PGLOADBALANCEHOSTS=random", "PGCONNECT_TIMEOUT=1",
		"PGOPTIONS=-c statement_timeout=1", "PGCLIENTENCODING=LATIN1", "PGDATESTYLE=German", "PGTZ=Asia/Tokyo", "PGGEQO=off",
		// lib/pq takes none of these.
		"PGREQUIRESSL=0", "PGSSLCOMPRESSION=1", "PGREALM=x", "PGKRBSRVNAME=x", "PGGSSLIB=gssapi", "PGGSSDELEGATION=0",
		"PGREQUIREPEER=nobody", "PGGSSENCMODE=prefer", "PGCHANNELBINDING=prefer", "PGSSLCERTMODE=allow",
		"PGSSLMODE=disable", "PGSSLCRL=/nonexistent", "PGSSLCRLDIR=/nonexistent")...)
	if h := d.eventuallyHost(0, "fine", hostStatus.fine); !h.Master {
		t.Errorf("the host is %v; want it a master", h)
	}
	want := map[string]string{"user": superuser, "database": "postgres", "application_name": "pg-status"}
	for _, packet := range p.first() {
		params, ok := strings.CutPrefix(packet, startupPacket)
		got := map[string]string{}
		fields := strings.Split(strings.TrimSuffix(params, "\x00\x00"), "\x00")
		for i := 0; i+1 < len(fields); i += 2 {
			got[fields[i]] = fields[i+1]
		}
		if !ok || !maps.Equal(got, want) {
			t.Errorf("the session is started by %q; want protocol 3.0 and %q", packet, want)
		}
	}
	if n := trap.connections(); n != 0 {
		t.Errorf("the host of the environment has seen %d connections; want none", n)
	}
	for _, name := range []string{"PGSERVICE", "PGHOSTADDR", "PGTARGETSESSIONATTRS", "PGLOADBALANCEHOSTS", "PGOPTIONS"} {
		d.waitLogged("WARNING config: "+name+" ", "ignored")
	}
}

// TestEnvironmentRefused has pg-status not start rather than be less safe than
// the environment asks for.
func TestEnvironmentRefused(t *testing.T) {
	host := silentHost(t)
	for _, tt := range []struct{ env, name string }{
		{"PGREQUIREAUTH=scram-sha-256", "PGREQUIREAUTH"},
		{"PGREQUIREAUTH=!password", "PGREQUIREAUTH"},
		{"PGCHANNELBINDING=require", "PGCHANNELBINDING"},
		{"PGGSSENCMODE=require", "PGGSSENCMODE"},
	} {
		logs := startDaemonExpectingFailure(t, append(envFor(host.addr()), tt.env)...)
		if strings.Count(logs, "\n") != 1 || !strings.Contains(logs, " FATAL config: "+tt.name) {
			t.Errorf("with %s, the log is not one FATAL record about %s:\n%s", tt.env, tt.name, logs)
		}
	}
	if n := host.connections(); n != 0 {
		t.Errorf("%d connections were made; want none", n)
	}
}

// TestRequireSSL sets what PGSSLMODE=require was before PostgreSQL 8.0, and still
// is to libpq where PGSSLMODE is not set (conninfo_add_defaults in fe-connect.c).
func TestRequireSSL(t *testing.T) {
	c := newTLSCluster(t)
	checkTLS(t, c, anyRole, "the server does not support TLS", "PGREQUIRESSL=1")
	checkTLS(t, c, anyRole, withoutTLS, "PGREQUIRESSL=1", "PGSSLMODE=prefer")
	checkTLS(t, c, anyRole, withoutTLS, "PGREQUIRESSL=0")
}

// TestFourSilentServers has four servers that accept connections and say nothing
// from some moment on. Their first checks time out together, over the kept
// connections. Then each attempt to connect to one of them keeps the turn for its
// second, and every host needs two of those.
func TestFourSilentServers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	addrs := []string{c.addr(0), c.addr(1)}
	var silent []*proxy
	for range 4 {
		p := c.proxy(2)
		silent = append(silent, p)
		addrs = append(addrs, p.addr())
	}
	d := startDaemon(t, append(envFor(addrs...), "pg_status__log_level=debug", "pg_status__poll_error_log_interval_ms=0")...)
	for i := range addrs {
		d.eventuallyHost(i, "fine", hostStatus.fine)
	}
	var begin time.Time
	until(t, func() error { // right after their checks, so that the next are a period away
		begin = time.Now()
		for _, p := range silent {
			// After the first ones, a replica's schedule has been moved to the master's.
			if checks := d.checks(p.addr()); len(checks) < 4 || begin.Sub(checks[len(checks)-1]) > 250*time.Millisecond {
				return fmt.Errorf("no check of %s has just been", p.addr())
			}
		}
		return nil
	})
	for _, p := range silent {
		p.stall()
	}

	var died []time.Duration
	dead := make([]bool, len(addrs))
	for len(died) < len(silent) {
		hosts := d.hosts()
		took := time.Since(begin)
		for i, h := range hosts {
			if i < 2 && !h.fine() {
				t.Fatalf("after %v, host %d is %v, and nothing has happened to it", took, i, h)
			}
			if h.dead() && !dead[i] {
				dead[i] = true
				died = append(died, took)
			}
		}
		if took > 15*time.Second {
			t.Fatalf("after %v, %d of the 4 silent hosts are dead", took, len(died))
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("dead after %v", died)
	// The period, the first time-out, and an attempt of a second for each host come
	// before the attempts that are their last.
	for i, took := range died {
		want := time.Duration(7+i) * time.Second
		if took < want-500*time.Millisecond || took > want+time.Second {
			t.Errorf("silent host number %d is dead after %v; want about %v", i, took, want)
		}
	}
	for i := range 2 {
		if gap := d.longestGap(c.name(i)); gap > 1500*time.Millisecond {
			t.Errorf("host %d was not checked for %v meanwhile; want every second", i, gap)
		}
	}
	for _, p := range silent {
		// The kept one, one for each failed check but the first, and one under way.
		n := p.connections()
		failures := strings.Count(d.logs(), " ERROR monitor: PostgreSQL poll timed out host="+p.addr()+" ")
		if n < 3 || n > failures+1 {
			t.Errorf("%s has seen %d connections with %d failed checks; want one a check", p.addr(), n, failures)
		}
	}
}

// TestKeptConnections has servers close the connection of a host that is well,
// in every way, again and again. Each role's pg-status suffers from one of them.
func TestKeptConnections(t *testing.T) {
	c := newCluster(t, 1, withConf("log_connections = on"))
	c.addRoles("idle", "slowly", "quickly")
	if postgres.version >= 14 {
		c.exec(0, "ALTER ROLE idle SET idle_session_timeout = '300ms'")
		c.waitReplayed(1)
	}
	var stops []func()
	daemons := map[string]*daemon{}
	for role, period := range map[string]int{"idle": 700, "slowly": 100, "quickly": 50} {
		d := startDaemon(t, c.env("pg_status__pg_user="+role, fmt.Sprintf("pg_status__sleep_ms=%d", period))...)
		stops = append(stops, d.watchFine())
		daemons[role] = d
	}
	// A session that has answered is a kept one, also while it is answering again.
	// One that is killed before its first answer is a check that fails.
	const kill = `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'pg-status' AND
		(usename = 'slowly' AND %t OR usename = 'quickly' AND query <> '' AND
		(state = 'idle' OR backend_start < clock_timestamp() - interval '500 ms'))`
	for tick := range 50 {
		for i := range c.nodes {
			c.query(i, fmt.Sprintf(kill, tick%10 == 0))
		}
		time.Sleep(100 * time.Millisecond) // the period of the killings
	}
	for _, stop := range stops {
		stop()
	}
	for role, least := range map[string]int{"idle": 6, "slowly": 5, "quickly": 20} {
		if role == "idle" && postgres.version < 14 {
			continue
		}
		for i := range c.nodes {
			n := c.logins(i, role)
			t.Logf("%s: %d connections to node %d", role, n, i)
			if n < least {
				t.Errorf("%s has made %d connections to node %d, so they were hardly closed; want %d or more", role, n, i, least)
			}
		}
		if failures := daemons[role].failures(); failures > 0 {
			t.Errorf("%s: %d failed checks", role, failures)
		}
	}
}

// TestOneConnection has normal running open one connection a host, for a minute or
// for as long as SOAK says:
//
//	SOAK=10m go test ./e2e -run TestOneConnection -timeout 20m
func TestOneConnection(t *testing.T) {
	t.Parallel()
	long := time.Minute
	if s := os.Getenv("SOAK"); s != "" {
		var err error
		if long, err = time.ParseDuration(s); err != nil {
			t.Fatalf("SOAK is to be a duration, such as 10m: %v", err)
		}
	}
	c := newCluster(t, 2, withConf("log_connections = on", "log_disconnections = on", "log_statement = all"))
	c.addRoles("monitor")
	d := startDaemon(t, c.env("pg_status__pg_user=monitor", "pg_status__sleep_ms=100")...)
	stop := d.watchFine()
	fds, rss := d.fds(), d.kB("VmRSS")
	statements := func(i int) int { return strings.Count(c.log(i), "] pg-status LOG:  statement: SELECT") }
	var before [3]int
	for i := range c.nodes {
		before[i] = statements(i)
	}
	begin := time.Now()
	time.Sleep(long)
	for i := range c.nodes {
		made := float64(statements(i) - before[i])
		due := float64(time.Since(begin) / (100 * time.Millisecond))
		// Periods that a busy machine misses are not made up for.
		if made < 0.5*due || made > 1.01*due+2 {
			t.Errorf("node %d was asked %v times in %v; want %v", i, made, time.Since(begin), due)
		}
	}
	stop()
	t.Logf("after %v: VmRSS %d, %d kB; descriptors %d, %d", long, rss, d.kB("VmRSS"), fds, d.fds())
	for i := range c.nodes {
		if n := c.logins(i, "monitor"); n != 1 {
			t.Errorf("%d connections were opened to node %d in %v; want 1", n, i, long)
		}
		if n := strings.Count(c.log(i), "] pg-status LOG:  disconnection:"); n != 0 {
			t.Errorf("%d connections to node %d were closed in %v; want none", n, i, long)
		}
	}
}

// TestAgedConnections has connections replaced the new one first: the server
// sees one session of ours at least and two at most, and no check waits.
func TestAgedConnections(t *testing.T) {
	c := newCluster(t, 1, withConf("log_connections = on", "log_disconnections = on"))
	c.addRoles("monitor")
	p := tapTo(t, c.addr(1))
	d := startDaemon(t, append(envFor(c.addr(0), p.addr()), "pg_status__pg_user=monitor", "pg_status__log_level=debug",
		"pg_status__sleep_ms=20", "pg_status__conn_max_age_ms=200")...)
	stop := d.watchFine()
	for i := range c.nodes {
		until(t, func() error {
			if n := c.logins(i, "monitor"); n < 10 {
				return fmt.Errorf("%d connections to node %d", n, i)
			}
			return nil
		})
	}
	stop()

	// While no new connection comes about, the old one serves, for as long as it
	// takes.
	p.hold()
	stop = d.watchFine()
	held := p.connections()
	seen := len(d.checks(p.name))
	until(t, func() error {
		if n, checks := p.connections()-held, len(d.checks(p.name))-seen; n < 2 || checks < 100 {
			return fmt.Errorf("%d new connections were tried, and %d checks made", n, checks)
		}
		return nil
	})
	stop()
	p.release()
	n := c.logins(1, "monitor")
	until(t, func() error {
		if c.logins(1, "monitor") < n+3 {
			return errors.New("the connection that was held up is not replaced")
		}
		return nil
	})
	for i, host := range []string{c.name(0), p.name} {
		gap := d.longestGap(host)
		t.Logf("host %d: %d checks, the longest time between two %v", i, len(d.checks(host)), gap)
		if gap > 500*time.Millisecond {
			t.Errorf("between two checks of host %d, %v have passed; want about 20 ms", i, gap)
		}
	}
	if failures := d.failures(); failures > 0 {
		t.Errorf("%d checks failed", failures)
	}
	for i := range c.nodes {
		open, least, most := 0, 9, 0
		for line := range strings.Lines(c.log(i)) {
			switch {
			case strings.Contains(line, "connection authorized: user=monitor"):
				open++
			case strings.Contains(line, "disconnection:") && strings.Contains(line, "user=monitor"):
				open--
				least = min(least, open)
			}
			most = max(most, open)
		}
		if least != 1 || most != 2 {
			t.Errorf("node %d has had %d to %d sessions of ours at once; want 1 or 2", i, least, most)
		}
	}
}
