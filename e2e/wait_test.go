package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// fromEnv returns the number in an environment variable, which makes a test
// longer than it is by default.
func fromEnv(t *testing.T, name string, otherwise int) int {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		return otherwise
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q; want a number from 1 up", name, value)
	}
	return n
}

// percent returns part of whole in percent.
func percent[N int | int64](part, whole N) float64 {
	return 100 * float64(part) / float64(max(whole, 1))
}

// quantile returns the value below which a share q of ds, sorted, lies.
func quantile(ds []time.Duration, q float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	return ds[min(len(ds)-1, int(q*float64(len(ds))))]
}

// TestFreshReads commits 100 times a second, and asks at once, by wait_ms, for a
// host that has the write. The settings are the defaults: a check a second. A
// second pg-status, at which nobody waits, is asked the same without wait_ms.
// FRESH_READS makes them more.
func TestFreshReads(t *testing.T) {
	reads := fromEnv(t, "FRESH_READS", 2000)
	const (
		rate    = 100 // commits per second
		clients = 8
	)
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (id int PRIMARY KEY)")
	c.waitReplayed(1)
	c.waitReplayed(2)
	d, impatient := startDaemon(t, c.env()...), startDaemon(t, c.env()...)
	d.eventually("/replica?min_lsn="+c.lsn(0), c.name(1))
	impatient.eventually("/replica?min_lsn="+c.lsn(0), c.name(1))

	var stale, replicas, replicasAtOnce atomic.Int64
	var mu sync.Mutex
	var waits []time.Duration // guarded by mu
	node := map[string]int{c.name(0): 0, c.name(1): 1, c.name(2): 2}
	read := func(ctx context.Context, id int) error {
		conn, err := c.db(0).Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.ExecContext(ctx, "INSERT INTO t VALUES ($1)", id); err != nil {
			return err
		}
		var lsn, timeline string
		if err := conn.QueryRowContext(ctx, writePosition).Scan(&lsn, &timeline); err != nil {
			return err
		}
		path := "/replica?min_lsn=" + lsn + "&timeline=" + timeline
		_, atOnce, _, err := impatient.try("GET", path, "")
		if err != nil {
			return err
		}
		if atOnce != c.name(0) {
			replicasAtOnce.Add(1)
		}
		start := time.Now()
		status, host, _, err := d.try("GET", path+"&wait_ms=100", "")
		wait := time.Since(start)
		if err != nil {
			return err
		}
		i, ok := node[host]
		if status != 200 || !ok {
			return fmt.Errorf("%s = %d %q; want a host", path, status, host)
		}
		if i > 0 {
			replicas.Add(1)
		}
		mu.Lock()
		waits = append(waits, wait)
		mu.Unlock()
		var found bool
		if err := c.db(i).QueryRowContext(ctx, "SELECT count(*) > 0 FROM t WHERE id = $1", id).Scan(&found); err != nil {
			return err
		}
		if !found {
			stale.Add(1)
			t.Errorf("%s = %s, which has no row %d", path, host, id)
		}
		return nil
	}

	ids := make(chan int, rate)
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			for id := range ids {
				if err := read(t.Context(), id); err != nil {
					t.Errorf("read %d: %v", id, err)
				}
			}
		})
	}
	start := time.Now()
	ticker := time.NewTicker(time.Second / rate)
	defer ticker.Stop()
	for id := range reads {
		<-ticker.C
		ids <- id
	}
	close(ids)
	group.Wait()
	took := time.Since(start)

	slices.Sort(waits)
	t.Logf("%d reads of fresh writes, %.0f commits/s: %.2f%% from a replica with wait_ms=100 (median wait %v, p99 %v), %.2f%% without; %d stale",
		len(waits), float64(len(waits))/took.Seconds(), percent(replicas.Load(), int64(reads)),
		quantile(waits, 0.5), quantile(waits, 0.99), percent(replicasAtOnce.Load(), int64(reads)), stale.Load())
	if len(waits) != reads {
		t.Errorf("%d reads were answered; want %d", len(waits), reads)
	}
	if replicas.Load()*100 < int64(reads)*99 {
		t.Errorf("%d of %d reads came from a replica; want 99%%", replicas.Load(), reads)
	}
}

// withStatementLog has the servers log every query, so that checks can be
// counted.
func withStatementLog() option { return withConf("log_statement = all") }

// checks returns how many checks of pg-status node i has begun.
func (c *cluster) checks(i int) int {
	c.t.Helper()
	return strings.Count(c.log(i), "] pg-status LOG:  statement: SELECT")
}

// checksIn returns how many checks each node begins while f runs, and how long
// that takes.
func (c *cluster) checksIn(f func()) (checks []int, took time.Duration) {
	c.t.Helper()
	start := time.Now()
	for i := range c.nodes {
		checks = append(checks, -c.checks(i))
	}
	f()
	for i := range c.nodes {
		checks[i] += c.checks(i)
	}
	return checks, time.Since(start)
}

// hold sends n requests for path, each on a connection of its own, and returns
// the connections when pg-status has read all of the requests.
func (d *daemon) hold(n int, path string, headers ...string) []net.Conn {
	d.t.Helper()
	request := "GET " + path + " HTTP/1.1\r\nHost: x\r\n"
	for _, h := range headers {
		request += h + "\r\n"
	}
	var conns []net.Conn
	for range n {
		conn := d.dial()
		d.t.Cleanup(func() { conn.Close() })
		if _, err := io.WriteString(conn, request+"\r\n"); err != nil {
			d.t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	awaitAllRead(d.t, conns)
	return conns
}

// awaitAllRead is awaitRead for many connections.
func awaitAllRead(t *testing.T, conns []net.Conn) {
	t.Helper()
	port := func(a net.Addr) string { return fmt.Sprintf("%04X", a.(*net.TCPAddr).Port) }
	until(t, func() error {
		unread := map[string]bool{}
		for _, conn := range conns {
			unread[port(conn.LocalAddr())+" "+port(conn.RemoteAddr())] = true
		}
		table, err := os.ReadFile("/proc/net/tcp")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(table)) {
			// sl local_address rem_address st tx_queue:rx_queue …
			f := strings.Fields(line)
			_, local, _ := strings.Cut(f[1], ":")
			_, remote, _ := strings.Cut(f[2], ":")
			if strings.HasSuffix(f[4], ":00000000") {
				delete(unread, remote+" "+local)
			}
		}
		if len(unread) > 0 {
			return fmt.Errorf("%d of %d requests have not been read", len(unread), len(conns))
		}
		return nil
	})
}

// answerOf reads the answer to a request that was held.
func answerOf(t *testing.T, conn net.Conn) (status int, body string) {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// odd is a header that has a request answered by net/http, not in a lane: see
// parsePlain.
const odd = "TE: trailers"

// behind has all replicas of c stop replaying and the primary write, and returns
// the request that wants this write, which nobody but the primary has until
// catchUp.
func (c *cluster) behind() (path string) {
	c.t.Helper()
	for i := 1; i < len(c.nodes); i++ {
		c.pauseReplay(i)
	}
	c.exec(0, "CREATE TABLE IF NOT EXISTS behind (); DROP TABLE behind")
	lsn, timeline, _ := strings.Cut(c.query(0, writePosition), "|")
	return "/replica?min_lsn=" + lsn + "&timeline=" + timeline
}

func (c *cluster) catchUp() {
	c.t.Helper()
	for i := 1; i < len(c.nodes); i++ {
		c.resumeReplay(i)
	}
}

// fewChecks waits until no more checks are made than on schedule, one a second.
func (c *cluster) fewChecks(after string) {
	c.t.Helper()
	until(c.t, func() error {
		checks, took := c.checksIn(func() { time.Sleep(300 * time.Millisecond) })
		for i, n := range checks {
			if n > 1+int(took/time.Second) {
				return fmt.Errorf("%s, node %d was checked %d times in %v; want the schedule alone", after, i, n, took)
			}
		}
		return nil
	})
}

// TestWaitersShareChecks counts the checks that the servers see while many
// requests wait, and when none does any more.
func TestWaitersShareChecks(t *testing.T) {
	const (
		waiters = 1000
		every   = 10 * time.Millisecond  // pg_status__wait_check_ms
		master  = 100 * time.Millisecond // waitMasterCheck in monitor.go
	)
	c := newCluster(t, 2, withStatementLog())
	d := startDaemon(t, c.env()...)
	d.waitReady()
	d.eventually("/replica?min_lsn="+c.lsn(0), c.name(1))
	c.fewChecks("with nobody waiting")

	path := c.behind() + "&wait_ms=60000"
	conns := d.hold(waiters, path)
	checks, took := c.checksIn(func() { time.Sleep(time.Second) })
	t.Logf("%d waiters, checks of each host in %v: %v", waiters, took, checks)
	scheduled := int(took/time.Second) + 2
	if most := int(took/master) + scheduled; checks[0] > most {
		t.Errorf("with %d waiters, the master was checked %d times in %v; want at most %d", waiters, checks[0], took, most)
	}
	for i := 1; i <= 2; i++ {
		// Few are a sign of a busy machine, many of one that is kept busy by us.
		if most := int(took/every) + scheduled; checks[i] > most || checks[i] < 20 {
			t.Errorf("with %d waiters, node %d was checked %d times in %v; want 20 to %d", waiters, i, checks[i], took, most)
		}
	}

	c.catchUp()
	for _, conn := range conns {
		if status, host := answerOf(t, conn); status != 200 || host != c.name(1) && host != c.name(2) {
			t.Errorf("%s = %d %q; want a replica", path, status, host)
		}
	}
	checks, took = c.checksIn(func() { time.Sleep(2 * time.Second) })
	for i, n := range checks {
		if most := int(took/time.Second) + 2; n > most {
			t.Errorf("with all satisfied, node %d was checked %d times in %v; want at most %d", i, n, took, most)
		}
	}

	// A client that goes away wants no more.
	for _, headers := range [][]string{nil, {odd}} {
		conns := d.hold(50, c.behind()+"&wait_ms=60000", headers...)
		checks, took := c.checksIn(func() { time.Sleep(500 * time.Millisecond) })
		if checks[1] < 10 || checks[2] < 10 {
			t.Errorf("with waiters, checks of each host in %v: %v; want more", took, checks)
		}
		for _, conn := range conns {
			conn.Close()
		}
		c.fewChecks(fmt.Sprintf("with all clients gone (%q)", headers))
		c.catchUp()
	}
}

// TestWaitEnds has requests wait for what does not come.
func TestWaitEnds(t *testing.T) {
	const slack = 2 * time.Second // for a busy machine
	c := newCluster(t, 1)
	d := startDaemon(t, c.env()...)
	d.eventually("/master", c.name(0))
	for _, tt := range []struct {
		path   string
		status int
		body   string
	}{
		{"/replica?min_lsn=FFFFFFFF/0", 200, c.name(0)},
		{"/replica?timeline=2", 200, c.name(0)},
		{"/replica?timeline=2&fallback=none", 404, ""},
		{"/replica?timeline=2&fallback=any", 200, c.name(0)},
		{"/sync_by_time?timeline=2", 200, c.name(0)},
		{"/most_sync_by_bytes?min_lsn=FFFFFFFF/0&fallback=none", 404, ""},
	} {
		path := tt.path + "&wait_ms=300"
		start := time.Now()
		status, body, _ := d.get(path)
		took := time.Since(start)
		if status != tt.status || body != tt.body || took < 300*time.Millisecond || took > 300*time.Millisecond+slack {
			t.Errorf("%s = %d %q after %v; want %d %q after 300 ms", path, status, body, took, tt.status, tt.body)
		}
	}
	// What is there already is not waited for.
	for _, path := range []string{"/master?wait_ms=60000", "/replica?wait_ms=60000", "/replica?wait_ms=0&timeline=2"} {
		start := time.Now()
		if status, _, _ := d.get(path); status != 200 || time.Since(start) > slack {
			t.Errorf("%s = %d after %v; want 200 at once", path, status, time.Since(start))
		}
	}

	conns := append(d.hold(100, "/replica?timeline=2&wait_ms=60000"), d.hold(100, "/replica?timeline=2&wait_ms=60000", odd)...)
	d.signal(syscall.SIGTERM)
	start := time.Now()
	for _, conn := range conns {
		if status, host := answerOf(t, conn); status != 200 || host != c.name(0) {
			t.Errorf("a request that waits at SIGTERM = %d %q; want 200 %s", status, host, c.name(0))
		}
	}
	if code := d.exitCode(); code != 0 || time.Since(start) > slack {
		t.Errorf("exit status %d, %v after SIGTERM; want 0 at once", code, time.Since(start))
	}
}

// TestWaitForReplica has requests wait for every endpoint until a replica
// catches up.
func TestWaitForReplica(t *testing.T) {
	c := newCluster(t, 1)
	d := startDaemon(t, c.env()...)
	d.waitReady()
	_, conditions, _ := strings.Cut(c.behind(), "?")
	held := map[string]net.Conn{}
	for _, path := range replicaPaths {
		path += "?" + conditions + "&lag_ms=1000&wait_ms=60000"
		held[path] = d.hold(1, path)[0]
	}
	// A limit on lag_ms alone, which takes checks of the master too.
	limit := "/sync_by_time?lag_ms=500&wait_ms=60000"
	d.eventuallyFunc("/sync_by_time?lag_ms=500", c.name(0), func(_ int, host string) bool { return host == c.name(0) })
	held[limit] = d.hold(1, limit)[0]
	c.catchUp()
	for path, conn := range held {
		if status, host := answerOf(t, conn); status != 200 || host != c.name(1) {
			t.Errorf("%s = %d %q; want the replica, %s", path, status, host, c.name(1))
		}
	}
}

// TestWaitForReadiness asks before every host's first check is over.
func TestWaitForReadiness(t *testing.T) {
	c := newCluster(t, 1)
	d := startDaemon(t, append(envFor(c.addr(0), c.addr(1), silentHost(t).addr()), "pg_status__query_timeout_ms=1500")...)
	if status, _, _ := d.get("/ready"); status != 503 {
		t.Errorf("/ready = %d; want 503 while a host is silent", status)
	}
	if status, body, _ := d.get("/master?wait_ms=100"); status != 503 {
		t.Errorf("/master?wait_ms=100 = %d %q; want 503", status, body)
	}
	for path, want := range map[string]string{"/master?wait_ms=60000": c.name(0), "/replica?wait_ms=60000": c.name(1)} {
		if status, host, _ := d.get(path); status != 200 || host != want {
			t.Errorf("%s = %d %q; want %s", path, status, host, want)
		}
	}
}

// TestWaitForMaster has requests wait for a master through a failover.
func TestWaitForMaster(t *testing.T) {
	const waiters = 50
	c := newCluster(t, 2)
	d := startDaemon(t, c.env("pg_status__sleep_ms=200")...)
	d.eventually("/master", c.name(0))
	c.stop(0, fast)
	d.eventually("/master", "")
	start := time.Now()
	if status, body, _ := d.get("/master?wait_ms=300", acceptJSON); status != 404 || body != noSelection || time.Since(start) < 300*time.Millisecond {
		t.Errorf("without a master, /master?wait_ms=300 = %d %q after %v; want 404 after 300 ms", status, body, time.Since(start))
	}

	conns := d.hold(waiters, "/master?wait_ms=60000")
	conns = append(conns, d.hold(waiters, "/master?wait_ms=60000", odd)...)
	answered := make(chan time.Time, len(conns))
	for _, conn := range conns {
		go func() {
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			at := time.Now()
			if err != nil {
				t.Errorf("waiting for a master: %v", err)
			} else if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || string(b) != c.name(1) {
				t.Errorf("a request that waits for a master = %d %q; want 200 %s", resp.StatusCode, b, c.name(1))
			}
			answered <- at
		}()
	}
	left := c.watchRecovery(1)
	c.promote(1)
	promoted := <-left
	var last time.Time
	for range conns {
		last = latest(last, <-answered)
	}
	known := recordTime(t, d.waitLogged("INFO monitor: host role changed", "host="+c.name(1), "role=master"))
	t.Logf("the last of %d requests was answered %v after the promotion, %v after it was logged",
		len(conns), last.Sub(promoted), last.Sub(known))
	if delay := last.Sub(promoted); delay > time.Second {
		t.Errorf("the new master was named %v after its promotion; want less than a second", delay)
	}
	if delay := last.Sub(known); delay > 500*time.Millisecond {
		t.Errorf("the new master was named %v after it was known; want that at once", delay)
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// TestCrashedReplicaForgets has a replica crash and come back, with less than it
// had replayed: what it had in memory is replayed again, later than it takes
// queries. Here that takes an hour instead of seconds. Until it has been checked
// again, what it had replayed once means nothing.
func TestCrashedReplicaForgets(t *testing.T) {
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (i int)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=10000")...)
	d.waitReady()
	c.exec(0, "INSERT INTO t VALUES (1)")
	lsn, timeline, _ := strings.Cut(c.query(0, writePosition), "|")
	conditions := "min_lsn=" + lsn + "&timeline=" + timeline
	if _, host, _ := d.get("/replica?wait_ms=10000&" + conditions); host != c.name(1) {
		t.Fatalf("/replica = %q; want %s", host, c.name(1))
	}
	c.conf(1, "recovery_min_apply_delay = 1h")
	if got := c.query(1, "SELECT count(*) FROM t"); got != "1" {
		t.Fatalf("the replica has %s rows; want 1", got)
	}
	c.kill9(1)
	d.waitLogged("WARNING monitor: host state changed", "host="+c.name(1), "state=possible_dead")
	c.start(1)
	for _, path := range []string{"/replica?", "/most_sync_by_bytes?"} {
		path += conditions
		_, host, _ := d.get(path)
		i := 0
		if host == c.name(1) {
			i = 1
		}
		if got := c.query(i, "SELECT count(*) FROM pg_class WHERE relname = 't'"); got != "1" {
			t.Errorf("%s = %s, a replica that has crashed and has %s tables t; want 1", path, host, got)
		} else if got := c.query(i, "SELECT count(*) FROM t"); got != "1" {
			t.Errorf("%s = %s, a replica that has crashed and has %s rows; want 1", path, host, got)
		}
	}
}
