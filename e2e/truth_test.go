package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// insertPosition is a primary's WAL insert position.
const insertPosition = "SELECT pg_current_wal_insert_lsn()"

// checkTime is what a check takes at most, on a busy machine, to be due and made.
const checkTime = 150 * time.Millisecond

// caughtUp waits for the replica 1 to be known to have everything that node 0
// has inserted: to meet that position, no lag in bytes, and a lag in time of the
// period and a check.
func (d *daemon) caughtUp(c *cluster, period time.Duration) {
	d.t.Helper()
	path := fmt.Sprintf("/replica?fallback=none&lag_bytes=0&lag_ms=%d&min_lsn=%s",
		(period + checkTime).Milliseconds(), c.query(0, insertPosition))
	d.eventually(path, c.name(1))
	d.eventuallyHost(1, "at "+c.lsn(1), func(h hostStatus) bool { return *h.LSN == c.lsn(1) && *h.LagBytes == 0 })
	d.eventuallyHost(0, "at "+c.lsn(0), func(h hostStatus) bool { return *h.LSN == c.lsn(0) })
}

// TestIdlePrimary has a primary on which nothing is committed for a while, so
// that the last commit that the replica has replayed is ever older, but the
// replica is not: not when WAL moves without commits, nor at the first write.
// The poll period is long enough to see either in between.
func TestIdlePrimary(t *testing.T) {
	const idle = 20 * time.Second
	c := newCluster(t, 1, withConf("wal_writer_delay = 10ms"))
	c.exec(0, "CREATE TABLE t (b text)")
	c.waitReplayed(1)
	periods := []time.Duration{time.Second, 100 * time.Millisecond}
	var daemons []*daemon
	var recorders []*recorder
	for _, period := range periods {
		d := startDaemon(t, c.env(fmt.Sprintf("pg_status__sleep_ms=%d", period.Milliseconds()), "pg_status__log_level=debug")...)
		daemons = append(daemons, d)
		recorders = append(recorders, d.record(c))
	}
	var commits []commit
	caughtUp := func() {
		t.Helper()
		for i, d := range daemons {
			d.caughtUp(c, periods[i])
		}
	}
	// become waits for all daemons to answer path with node i.
	become := func(path string, i int) {
		t.Helper()
		for _, d := range daemons {
			d.eventually(path, c.name(i))
		}
	}
	// notReplayed checks that the replica is not returned for position lsn.
	notReplayed := func(lsn string) {
		t.Helper()
		for i, d := range daemons {
			if _, body, _ := d.get("/replica?min_lsn=" + lsn); body != c.name(0) {
				t.Errorf("with a period of %v, for WAL that is not written, /replica = %q; want the master, %s", periods[i], body, c.name(0))
			}
		}
	}

	time.Sleep(idle)
	caughtUp()

	// At various moments of the period. A replica may be seen to be ahead.
	for range 6 {
		c.exec(0, "CHECKPOINT")
		time.Sleep(270 * time.Millisecond)
	}
	caughtUp()

	// On a segment's first page, 40 bytes in, and on another page, 24 bytes in, the
	// primary has inserted nothing yet, and a replica stays at the page's start.
	for _, tt := range []struct {
		fill         func()
		size, header uint64
	}{
		{func() { c.exec(0, "SELECT pg_switch_wal()") }, 16 << 20, 40},
		{c.fillPage, 8192, 24},
	} {
		until(t, func() error {
			tt.fill()
			primary := c.query(0, insertPosition)
			if got := position(t, primary) % tt.size; got != tt.header {
				return fmt.Errorf("the insert position is %s; want it %d bytes behind a multiple of %d", primary, tt.header, tt.size)
			}
			caughtUp()
			replica := c.lsn(1)
			if now := c.query(0, insertPosition); now != primary {
				return fmt.Errorf("something has been inserted between %s and %s; again", primary, now)
			}
			if position(t, replica) != position(t, primary)-tt.header {
				t.Errorf("with the primary at %s, the replica is at %s; want it %d bytes before that", primary, replica, tt.header)
			}
			return nil
		})
	}
	if got := c.query(1, fmt.Sprintf("SELECT clock_timestamp() - pg_last_xact_replay_timestamp() > '%v'", idle)); got != "true" {
		t.Errorf("the last commit that the replica has replayed is more than %v old: %s; want true", idle, got)
	}

	// A transaction writes much, so that the replica is ever behind, but never by
	// more than that takes.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tx, err := c.db(0).BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := tx.Exec("INSERT INTO t SELECT 'x' FROM generate_series(1, 100)"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}

	// It has inserted WAL that nobody writes. What it has done is not committed, so
	// the replica is no older, but that cannot be proved: its age counts from then,
	// not from the last commit.
	walWriter, err := strconv.Atoi(c.query(0, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"))
	if err != nil {
		t.Fatal(err)
	}
	// unwritten checks that what is inserted stays so.
	unwritten := func() {
		t.Helper()
		if got := c.query(0, "SELECT pg_current_wal_insert_lsn() > pg_current_wal_lsn()"); got != "true" {
			t.Errorf("WAL is inserted and not written: %s; want true", got)
		}
	}
	c.exec(0, "CHECKPOINT") // writes all WAL
	syscall.Kill(walWriter, syscall.SIGSTOP)
	if _, err := tx.Exec("INSERT INTO t VALUES ('first')"); err != nil {
		t.Fatal(err)
	}
	inserted := c.query(0, insertPosition)
	time.Sleep(1500 * time.Millisecond)
	unwritten()
	notReplayed(inserted)
	c.exec(0, "CHECKPOINT")
	syscall.Kill(walWriter, syscall.SIGCONT)
	caughtUp()
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	commits = append(commits, commit{time.Now(), position(t, c.query(0, insertPosition))})

	// An asynchronous commit is done, and the replica shows it only when it is
	// written. Until then the bytes of written WAL do not tell that it lags.
	syscall.Kill(walWriter, syscall.SIGSTOP)
	commits = append(commits, c.commit("BEGIN; SET LOCAL synchronous_commit = off; INSERT INTO t VALUES ('second'); COMMIT"))
	inserted = c.query(0, insertPosition)
	time.Sleep(1500 * time.Millisecond)
	unwritten()
	notReplayed(inserted)
	become("/sync_by_time?lag_ms=400", 0)
	become("/sync_by_bytes?lag_bytes=0", 1)
	if got := c.query(1, "SELECT string_agg(b, ',') FROM t WHERE b <> 'x'"); got != "first" {
		t.Errorf("while an asynchronous commit is not written, the replica has %q; want first", got)
	}
	syscall.Kill(walWriter, syscall.SIGCONT)
	caughtUp()

	// A write that the replica has not replayed yet: its age counts from then.
	c.pauseReplay(1)
	commits = append(commits, c.commit("INSERT INTO t VALUES ('third')"))
	time.Sleep(1500 * time.Millisecond)
	become("/sync_by_time?lag_ms=400", 0)
	c.resumeReplay(1)
	caughtUp()

	for i, period := range periods {
		checks, ms, _ := daemons[i].provable(fmt.Sprintf("with a period of %v", period), recorders[i].stop(t), 1, commits)
		// Checks of which /hosts shows the same values do not count.
		if least := int(idle/period) / 5; checks < least || ms < 400 {
			t.Errorf("with a period of %v: %d checks, at most %d ms of lag; want at least %d, and 400 ms", period, checks, ms, least)
		}
		// Else the ages that follow from the checks would prove little.
		begun, _ := checksOf(t, daemons[i].logs(), c.name(0))
		var gaps []time.Duration
		for k := 1; k < len(begun); k++ {
			gaps = append(gaps, begun[k].Sub(begun[k-1]))
		}
		slices.Sort(gaps)
		if median := gaps[len(gaps)/2]; median > period*5/4 {
			t.Errorf("with a period of %v, half of the time between checks of the master was more than %v", period, median)
		}
	}
}

// fillPage has node 0, on which nothing else happens, insert records that end
// where a page does.
func (c *cluster) fillPage() {
	c.t.Helper()
	const pageSize = 8192
	insert := func(bytes uint64) uint64 {
		c.exec(0, fmt.Sprintf("SELECT pg_logical_emit_message(false, '', repeat('x', %d))", bytes))
		return position(c.t, c.query(0, insertPosition))
	}
	const bytes = 1000 // a multiple of 8, to which records are aligned
	before := insert(bytes)
	after := insert(bytes)
	record, left := after-before, pageSize-after%pageSize
	if after/pageSize == before/pageSize && left >= record {
		insert(bytes + left - record)
	}
}

// TestClocks has replicas whose clocks are behind and ahead of the primary's.
// Their ages are true nonetheless.
func TestClocks(t *testing.T) {
	c := newCluster(t, 3, withClock(1, -30*time.Second), withClock(2, 30*time.Second), withClock(3, -time.Second))
	c.exec(0, "CREATE TABLE t (b text)")
	for i, want := range []string{"0", "-30", "30", "-1"} {
		got := c.query(i, fmt.Sprintf("SELECT round(extract(epoch FROM clock_timestamp() - '%s'))", time.Now().Format(time.RFC3339Nano)))
		if got != want {
			t.Errorf("the clock of node %d is off by %s s; want %s", i, got, want)
		}
	}
	d := startDaemon(t, c.env("pg_status__sleep_ms=100", "pg_status__log_level=debug")...)
	r := d.record(c)
	stop := c.write()
	for i := 1; i <= 3; i++ {
		d.eventuallyHost(i, "hardly behind", func(h hostStatus) bool { return h.LagMS != nil && *h.LagMS < 200 })
	}
	time.Sleep(time.Second)
	for i := 1; i <= 3; i++ {
		c.pauseReplay(i)
	}
	time.Sleep(1500 * time.Millisecond)
	for i := 1; i <= 3; i++ {
		c.resumeReplay(i)
	}
	for i := 1; i <= 3; i++ {
		d.eventuallyHost(i, "hardly behind", func(h hostStatus) bool { return *h.LagMS < 200 })
	}
	commits := stop()
	time.Sleep(500 * time.Millisecond)
	samples := r.stop(t)
	for i := 1; i <= 3; i++ {
		checks, ms, _ := d.provable(fmt.Sprintf("node %d", i), samples, i, commits)
		if checks < 15 || ms < 1000 {
			t.Errorf("%d checks of node %d, at most %d ms of lag; want at least 15, and 1000 ms", checks, i, ms)
		}
	}

	// A lag of 0 meets a limit of 0: checked at once, a replica may be that fresh.
	for _, path := range []string{"/replica", "/sync_by_time", "/sync_by_bytes", "/sync_by_time_and_bytes", "/sync_by_time_or_bytes", "/most_sync_by_bytes"} {
		path += "?lag_ms=0&lag_bytes=0&fallback=none&wait_ms=20000"
		if _, body, _ := d.get(path); body != c.name(1) && body != c.name(2) && body != c.name(3) {
			t.Errorf("%s = %q; want a replica", path, body)
		}
	}

	// Where no primary was ever seen, nothing tells that a clock is wrong, but for a
	// commit of the future. Its age is not known, and not 0.
	alone := startDaemon(t, envFor(c.addr(1), c.addr(2))...)
	h := alone.eventuallyHost(0, "fine", hostStatus.fine)
	if h.LagMS != nil || h.SyncByTime || h.LagBytes == nil || *h.LagBytes != 0 || !h.SyncByBytes {
		t.Errorf("by a clock that is behind, host 0 is %v; want lag_ms unknown and lag_bytes 0", h)
	}
	h = alone.eventuallyHost(1, "fine", hostStatus.fine)
	if h.LagMS == nil || *h.LagMS < 30000 || h.SyncByTime || h.LagBytes == nil || *h.LagBytes != 0 || !h.SyncByBytes {
		t.Errorf("by a clock that is ahead, host 1 is %v; want lag_ms of at least 30000 and lag_bytes 0", h)
	}
	for _, query := range []string{"", "lag_ms=29999", "lag_ms=0"} {
		if status, body, _ := alone.get("/sync_by_time?" + query); status != 404 {
			t.Errorf("/sync_by_time?%s = %d %q; want 404", query, status, body)
		}
	}
}

// TestApplyDelay has a replica that shows everything later, by its settings.
func TestApplyDelay(t *testing.T) {
	const period, delay = 100 * time.Millisecond, 1500 * time.Millisecond
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (b text)")
	c.waitReplayed(1)
	c.conf(1, fmt.Sprintf("recovery_min_apply_delay = %d", delay.Milliseconds()))
	d := startDaemon(t, c.env("pg_status__sleep_ms=100", "pg_status__log_level=debug")...)
	d.waitReady()
	r := d.record(c)
	stop := c.write()
	d.eventuallyHost(1, "as late as it is told to be", func(h hostStatus) bool { return *h.LagMS >= delay.Milliseconds()-50 })
	for range 50 {
		if _, body, _ := d.get("/sync_by_time?lag_ms=1300"); body != c.name(0) {
			t.Errorf("/sync_by_time?lag_ms=1300 = %q; want the master, %s", body, c.name(0))
		}
		if _, body, _ := d.get("/sync_by_time?lag_ms=3000"); body != c.name(1) {
			t.Errorf("/sync_by_time?lag_ms=3000 = %q; want %s", body, c.name(1))
		}
		time.Sleep(20 * time.Millisecond)
	}
	commits := stop()
	var want int64
	until(t, func() error {
		replica := c.lsn(1)
		want = c.bytesBetween(0, c.lsn(0), replica)
		if h := d.hosts()[1]; *h.LSN != replica || *h.LagBytes != want {
			return fmt.Errorf("host 1 is %v; want it at %s, %d bytes behind", h, replica, want)
		}
		return nil
	})
	if want == 0 {
		t.Error("the delay is over too soon")
	}
	d.caughtUp(c, period)
	d.provable("delayed replica", r.stop(t), 1, commits)
}

// TestCascade has a replica that is ahead of its upstream, whose replay is
// paused: what that has received is passed on all the same.
func TestCascade(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (b text)")
	c.repoint(2, 1)
	c.waitReplayed(2)
	d := startDaemon(t, c.env("pg_status__sleep_ms=100", "pg_status__log_level=debug")...)
	r := d.record(c)
	c.pauseReplay(1)
	var commits []commit
	for range 5 {
		commits = append(commits, c.commit("INSERT INTO t VALUES (repeat('x', 1000))"))
		time.Sleep(250 * time.Millisecond)
	}
	c.waitReplayed(2)
	var lag int64
	until(t, func() error {
		lag = c.bytesBetween(0, c.lsn(0), c.lsn(1))
		h := d.hosts()
		if *h[1].LSN != c.lsn(1) || *h[1].LagBytes != lag || *h[2].LSN != c.lsn(0) || *h[2].LagBytes != 0 {
			return fmt.Errorf("/hosts is %v; want node 1 %d bytes behind, at %s, and node 2 at %s", h, lag, c.lsn(1), c.lsn(0))
		}
		return nil
	})
	// Where no primary was ever seen, what has been received is what to compare with.
	alone := startDaemon(t, append(envFor(c.addr(1)), "pg_status__sleep_ms=100")...)
	if h := alone.eventuallyHost(0, "fine", hostStatus.fine); *h.LagBytes != lag || *h.LSN != c.lsn(1) {
		t.Errorf("alone, host 0 is %v; want it %d bytes behind, at %s", h, lag, c.lsn(1))
	}
	if lag < 5000 {
		t.Errorf("the paused upstream is %d bytes behind; want at least the 5000 that were written", lag)
	}
	for _, path := range []string{
		"/replica?min_lsn=" + c.lsn(0), "/replica?lag_bytes=0", "/most_sync_by_bytes",
		"/sync_by_time?lag_ms=400", "/sync_by_time_and_bytes?lag_ms=400&lag_bytes=4999", "/replica?min_lsn=" + c.lsn(0) + "&timeline=1",
	} {
		for range 3 {
			if _, body, _ := d.get(path); body != c.name(2) {
				t.Errorf("%s = %q; want the downstream, %s", path, body, c.name(2))
			}
		}
	}
	samples := r.stop(t)
	for i := 1; i <= 2; i++ {
		d.provable(fmt.Sprintf("node %d", i), samples, i, commits)
	}
}

// TestFewerConnections raises max_connections on the primary beyond that of a
// replica, which cannot replay that: from PostgreSQL 14 on, its replay pauses;
// before, it stops.
func TestFewerConnections(t *testing.T) {
	const period = 100 * time.Millisecond
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (b text)")
	c.waitReplayed(1)
	d := startDaemon(t, c.env("pg_status__sleep_ms=100", "pg_status__log_level=debug")...)
	d.waitReady()
	c.exec(0, "INSERT INTO t VALUES ('x')")
	d.caughtUp(c, period)
	c.conf(0, "max_connections = 120")
	d.eventually("/master", c.name(0))

	var commits []commit
	if postgres.version < 14 {
		d.eventuallyHost(1, "dead", hostStatus.dead)
		if log := c.log(1); !strings.Contains(log, "max_connections") {
			t.Errorf("node 1 stopped for another reason:\n%s", tail(log, 10))
		}
		c.commit("INSERT INTO t VALUES ('x')")
		for _, path := range append([]string{"/replica?fallback=any"}, replicaPaths...) {
			if _, body, _ := d.get(path); body != c.name(0) {
				t.Errorf("%s = %q; want the master, %s", path, body, c.name(0))
			}
		}
		until(t, func() error {
			if c.nodes[1].running() {
				return fmt.Errorf("node 1 is still running")
			}
			return nil
		})
		c.conf(1, "max_connections = 120")
		c.start(1)
		d.caughtUp(c, period)
		return
	}

	until(t, func() error {
		if got := c.query(1, "SELECT pg_get_wal_replay_pause_state()"); got != "paused" {
			return fmt.Errorf("the replay of node 1 is %s", got)
		}
		return nil
	})
	d.eventuallyHost(0, "fine", hostStatus.fine)
	d.eventuallyHost(1, "fine, with known lags", func(h hostStatus) bool { return h.fine() && h.LagMS != nil && h.LagBytes != nil })
	r := d.record(c)
	for range 3 {
		commits = append(commits, c.commit("INSERT INTO t VALUES (repeat('x', 1000))"))
		until(t, func() error {
			replica := c.lsn(1)
			want := c.bytesBetween(0, c.lsn(0), replica)
			if h := d.hosts()[1]; *h.LSN != replica || *h.LagBytes != want || want == 0 {
				return fmt.Errorf("host 1 is %v; want it at %s, %d bytes behind", h, replica, want)
			}
			return nil
		})
	}
	time.Sleep(500 * time.Millisecond)
	for _, path := range []string{"/replica?min_lsn=" + c.lsn(0), "/replica?lag_bytes=3000", "/sync_by_time?lag_ms=300", "/most_sync_by_bytes?lag_bytes=3000"} {
		if _, body, _ := d.get(path); body != c.name(0) {
			t.Errorf("%s = %q; want the master, %s", path, body, c.name(0))
		}
	}
	d.provable("stuck replica", r.stop(t), 1, commits)

	c.conf(1, "max_connections = 120")
	d.caughtUp(c, period)
}

// TestWithoutReceiver has replicas without a WAL receiver while the primary
// writes: node 1 cannot reach its upstream, node 2 gets WAL from an archive only
// and has never received any.
func TestWithoutReceiver(t *testing.T) {
	const period = 100 * time.Millisecond
	c := newCluster(t, 2, withConf("archive_mode = on"))
	archive := filepath.Join(c.dir, "archive")
	if err := postgres.mkdir(archive); err != nil {
		t.Fatal(err)
	}
	archive = postgres.inside(archive)
	c.conf(0, fmt.Sprintf("archive_command = 'cp %%p %[1]s/%%f.new && mv %[1]s/%%f.new %[1]s/%%f'", archive))
	c.exec(0, "CREATE TABLE t (b text)")
	c.waitReplayed(1)
	c.waitReplayed(2)
	c.stop(2, fast)
	c.conf(2, fmt.Sprintf("restore_command = 'cp %s/%%f %%p'", archive))
	c.append(filepath.Join(c.nodes[2].data(), "postgresql.auto.conf"), "primary_conninfo = ''")
	c.nodes[2].source = -1
	c.start(2)
	if got := c.query(2, "SELECT pg_last_wal_receive_lsn() IS NULL"); got != "true" {
		t.Errorf("node 2 has received no WAL: %s; want true", got)
	}

	d := startDaemon(t, c.env("pg_status__sleep_ms=100", "pg_status__log_level=debug")...)
	d.waitReady()
	for i := 1; i <= 2; i++ {
		d.eventuallyHost(i, "without lag", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes == 0 && h.LagMS != nil })
	}
	r := d.record(c)
	c.repointNowhere(1)
	// behind waits until the lags of both nodes are what the servers say.
	var lags [3]int64
	behind := func() {
		t.Helper()
		until(t, func() error {
			h := d.hosts()
			for i := 1; i <= 2; i++ {
				replica := c.lsn(i)
				lags[i] = c.bytesBetween(0, c.lsn(0), replica)
				if *h[i].LSN != replica || *h[i].LagBytes != lags[i] {
					return fmt.Errorf("host %d is %v; want it at %s, %d bytes behind", i, h[i], replica, lags[i])
				}
			}
			return nil
		})
	}
	stop := c.write()
	time.Sleep(700 * time.Millisecond)
	c.exec(0, "SELECT pg_switch_wal()") // so that it is archived
	switched := c.query(0, "SELECT pg_current_wal_lsn()")
	until(t, func() error {
		if got := c.lsn(2); position(t, got)>>24 < position(t, switched)>>24 {
			return fmt.Errorf("node 2 is at %s; want it beyond the segment that ends at %s", got, switched)
		}
		return nil
	})
	time.Sleep(700 * time.Millisecond)
	commits := append(stop(), c.commit("INSERT INTO t VALUES (repeat('x', 1000))"))
	behind()
	if lags[2] < 1000 || lags[1] < 16<<20/2 {
		t.Errorf("the replicas are %d bytes behind; want the first by most of a segment, the second by what is not archived", lags[1:])
	}
	for _, tt := range []struct {
		path string
		want int
	}{
		{fmt.Sprintf("/sync_by_bytes?lag_bytes=%d", lags[2]), 2},
		{fmt.Sprintf("/sync_by_bytes?lag_bytes=%d", lags[2]-1), 0},
		{"/most_sync_by_bytes?lag_bytes=100000000", 2},
		{"/replica?lag_ms=400", 0},
		{"/replica?min_lsn=" + c.lsn(2), 2},
		{"/replica?min_lsn=" + c.lsn(0), 0},
		{"/sync_by_time_or_bytes?lag_ms=400&lag_bytes=10", 0},
	} {
		if _, body, _ := d.get(tt.path); body != c.name(tt.want) {
			t.Errorf("%s = %q; want %s", tt.path, body, c.name(tt.want))
		}
	}

	// All that there is has been archived: then the archive is as good as a stream.
	c.exec(0, "SELECT pg_switch_wal()")
	d.eventually("/replica?fallback=none&lag_bytes=0&lag_ms=250&min_lsn="+c.query(0, insertPosition), c.name(2))
	behind()
	if lags[2] != 0 || lags[1] < 16<<20 {
		t.Errorf("the replicas are %d bytes behind; want the first by more than a segment, the second by nothing", lags[1:])
	}
	samples := r.stop(t)
	for i := 1; i <= 2; i++ {
		checks, ms, _ := d.provable(fmt.Sprintf("node %d", i), samples, i, commits)
		if checks < 15 || ms < 500 {
			t.Errorf("%d checks of node %d, at most %d ms of lag; want at least 15, and 500 ms", checks, i, ms)
		}
	}

	// The position of a primary that is gone is still what to compare with.
	c.stop(0, immediate)
	d.eventually("/master", "")
	time.Sleep(3 * period)
	for i := 1; i <= 2; i++ {
		if h := d.hosts()[i]; *h.LagBytes != lags[i] {
			t.Errorf("without a primary, host %d is %v; want it %d bytes behind as before", i, h, lags[i])
		}
	}
}

// TestUnknownLag has a replica that has replayed no transaction since it started
// and has no WAL receiver, where no primary was ever seen: nothing tells how far
// behind it is. No limit is met then, however large.
func TestUnknownLag(t *testing.T) {
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (b text)")
	c.exec(0, "CHECKPOINT")
	c.waitReplayed(1)
	c.exec(1, "CHECKPOINT") // replay begins here
	c.repointNowhere(1)
	c.restart(1)
	if got := c.query(1, "SELECT pg_last_xact_replay_timestamp() IS NULL, (SELECT count(*) FROM pg_stat_wal_receiver)"); got != "true|0" {
		t.Fatalf("the replica has replayed no transaction, and its receivers: %s; want true|0", got)
	}
	d := startDaemon(t, append(envFor(c.addr(1)), "pg_status__sleep_ms=100")...)
	if h := d.eventuallyHost(0, "fine", hostStatus.fine); h.Master || h.LagMS != nil || h.LagBytes != nil || h.SyncByTime || h.SyncByBytes || *h.LSN != c.lsn(1) {
		t.Errorf("host 0 is %v; want it fine, at %s, with unknown lags", h, c.lsn(1))
	}
	if _, body, _ := d.get("/hosts"); !strings.Contains(body, `"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false`) {
		t.Errorf("/hosts = %s; want null lags", body)
	}

	const most = "18446744073709551615"
	type row struct {
		path string
		ok   bool
	}
	// answers checks which requests find the replica; the others find nothing.
	answers := func(rows []row) {
		t.Helper()
		for _, tt := range rows {
			status, body, _ := d.get(tt.path)
			wantStatus, want := 404, ""
			if tt.ok {
				wantStatus, want = 200, c.name(1)
			}
			if status != wantStatus || body != want {
				t.Errorf("%s = %d %q; want %d %q", tt.path, status, body, wantStatus, want)
			}
		}
	}
	rows := []row{{"/replica", true}, {"/replica?min_lsn=" + c.lsn(1), true}, {"/replica?timeline=1", true}}
	for _, path := range replicaPaths {
		for _, query := range []string{"", "lag_ms=" + most, "lag_bytes=" + most, "lag_ms=" + most + "&lag_bytes=" + most} {
			if path != "/replica" || query != "" {
				rows = append(rows, row{path + "?fallback=none&" + query, false}, row{path + "?" + query, false})
			}
		}
		rows = append(rows, row{path + "?fallback=any&lag_ms=0&lag_bytes=0", true})
	}
	answers(rows)
	for _, tt := range []struct {
		query      string
		wantStatus int
		want       string
	}{
		{"", 200, "OK"},
		{"&lag_ms=" + most, 503, "lag_ms"},
		{"&lag_bytes=" + most, 503, "lag_bytes"},
		{"&lag_ms=" + most + "&lag_bytes=" + most, 503, "lag_ms lag_bytes"},
	} {
		if status, body, _ := d.get("/check?role=replica&host=" + c.name(1) + tt.query); status != tt.wantStatus || body != tt.want {
			t.Errorf("/check with %q = %d %q; want %d %q", tt.query, status, body, tt.wantStatus, tt.want)
		}
	}

	// With a receiver it is known to have all, but not since when.
	c.repoint(1, 0)
	h := d.eventuallyHost(0, "without lag in bytes", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes == 0 })
	if h.LagMS != nil || h.SyncByTime || !h.SyncByBytes {
		t.Errorf("host 0 is %v; want lag_ms unknown", h)
	}
	answers([]row{
		{"/replica?lag_bytes=0", true},
		{"/replica?lag_ms=" + most, false},
		{"/replica?lag_bytes=0&lag_ms=" + most, false},
		{"/sync_by_time?lag_ms=" + most, false},
		{"/sync_by_bytes?lag_bytes=0", true},
		{"/sync_by_time_or_bytes?lag_bytes=0&lag_ms=" + most, true},
		{"/sync_by_time_and_bytes?lag_bytes=0&lag_ms=" + most, false},
		{"/most_sync_by_bytes?lag_bytes=0", true},
	})
	c.exec(0, "INSERT INTO t VALUES ('x')")
	d.eventually("/sync_by_time_and_bytes?lag_bytes=0&lag_ms=60000", c.name(1))
}
