package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// maxNumber is the largest limit that a request can name.
const maxNumber = "18446744073709551615"

// roles are users for pg-status, by the privileges they have. See createRoles.
var roles = []string{"monitor", "bare", "blind"}

// createRoles makes, on node 0 and so everywhere, a role with pg_monitor, one
// with what PostgreSQL gives everyone, and one without even the functions that
// read the control file. Password as for all.
func (c *cluster) createRoles() {
	c.t.Helper()
	const functions = "pg_control_checkpoint(), pg_control_recovery(), pg_control_system()"
	c.exec(0, fmt.Sprintf(`
		CREATE ROLE monitor LOGIN PASSWORD '%[1]s' IN ROLE pg_monitor;
		CREATE ROLE bare LOGIN PASSWORD '%[1]s';
		CREATE ROLE blind LOGIN PASSWORD '%[1]s';
		REVOKE EXECUTE ON FUNCTION %[2]s FROM PUBLIC;
		GRANT EXECUTE ON FUNCTION %[2]s TO monitor, bare`, password, functions))
}

// withoutReceiver waits until the standby i has no WAL receiver.
func (c *cluster) withoutReceiver(i int) {
	c.t.Helper()
	until(c.t, func() error {
		if got := c.query(i, "SELECT count(*) FROM pg_stat_wal_receiver"); got != "0" {
			return fmt.Errorf("node %d has %s WAL receivers", i, got)
		}
		return nil
	})
}

// TestStrandedReplica promotes a standby that lacks what another one has. That
// one is left on the history that is no more, beyond the new master's position:
// it must meet no min_lsn and no limit on a lag, until it has been rewound. What
// pg-status can know of it depends on its role.
func TestStrandedReplica(t *testing.T) {
	const stranded, follower = 2, 3
	c := newCluster(t, 3, withRewind())
	c.exec(0, "CREATE TABLE t (b text)")
	c.createRoles()
	for i := 1; i <= 3; i++ {
		c.waitReplayed(i)
	}
	daemons := map[string]*daemon{}
	for _, role := range roles {
		d := startDaemon(t, c.env("pg_status__pg_user="+role, "pg_status__sleep_ms=100")...)
		d.eventually("/master", c.name(0))
		daemons[role] = d
	}

	for _, i := range []int{1, follower} {
		c.repointNowhere(i)
		c.withoutReceiver(i)
	}
	c.exec(0, "INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 200)")
	c.exec(0, "INSERT INTO t VALUES ('lost')")
	c.waitReplayed(stranded)
	lost := c.lsn(stranded)
	// to adds the timeline to path, for a role that sees timelines.
	to := func(role, path, timeline string) string {
		if role == "blind" {
			return path
		}
		return path + "&timeline=" + timeline
	}
	for role, d := range daemons {
		d.eventually(to(role, "/replica?fallback=none&min_lsn="+lost, "1"), c.name(stranded))
	}
	c.kill9(0)
	for role, d := range daemons {
		// Nobody knows better yet.
		d.eventually("/master", "")
		d.eventually(to(role, "/replica?min_lsn="+lost, "1"), c.name(stranded))
	}

	c.promote(1)
	if got := c.query(stranded, fmt.Sprintf("SELECT pg_last_wal_replay_lsn() - '%s' > 100000", c.lsn(1))); got != "true" {
		t.Fatalf("the stranded replica is far ahead of the new master: %s; want true", got)
	}
	// never checks that the stranded replica is not returned, but the new master.
	// A follower may be, to a role that sees no timelines.
	never := func(role string) {
		t.Helper()
		d := daemons[role]
		for _, path := range []string{
			"/replica?min_lsn=0/1", "/replica?min_lsn=" + lost, "/replica?min_lsn=" + c.lsn(1), "/replica?timeline=1", "/replica?timeline=2",
			"/replica?min_lsn=" + lost + "&timeline=1", "/replica?min_lsn=" + lost + "&timeline=2",
			"/replica?lag_bytes=" + maxNumber, "/sync_by_bytes?lag_bytes=" + maxNumber, "/most_sync_by_bytes?lag_bytes=" + maxNumber,
			"/sync_by_time_and_bytes?lag_ms=" + maxNumber + "&lag_bytes=" + maxNumber, "/sync_by_time?min_lsn=" + lost + "&lag_ms=" + maxNumber,
			"/sync_by_time_or_bytes?lag_ms=" + maxNumber + "&lag_bytes=" + maxNumber,
			"/replica?lag_ms=" + maxNumber, "/sync_by_time?lag_ms=" + maxNumber,
		} {
			for range 2 {
				_, body, _ := d.get(path)
				if body != c.name(1) && (role != "blind" || body != c.name(follower)) {
					t.Errorf("to %s, %s = %q; want the new master, %s", role, path, body, c.name(1))
				}
			}
		}
	}
	for _, role := range []string{"monitor", "bare"} {
		d := daemons[role]
		d.eventually("/master", c.name(1))
		never(role)
		h := d.eventuallyHost(stranded, "on timeline 1", func(h hostStatus) bool { return *h.Timeline == 1 })
		if h.LagBytes != nil || h.SyncByBytes || h.LagMS != nil || h.SyncByTime || !h.fine() || *h.LSN != lost {
			t.Errorf("to %s, the stranded replica is %v; want it fine, at %s, with unknown lags", role, h, lost)
		}
	}
	// Without timelines, the position tells, once both have been seen.
	blind := daemons["blind"]
	blind.eventually("/master", c.name(1))
	blind.eventuallyHost(stranded, "without known lags and timeline", func(h hostStatus) bool {
		return h.fine() && h.LagBytes == nil && h.LagMS == nil && h.Timeline == nil && *h.LSN == lost
	})
	for range 3 {
		for _, role := range roles {
			never(role)
		}
		time.Sleep(100 * time.Millisecond)
	}
	// It stays so when the new master is beyond the stranded replica's position.
	c.exec(1, "INSERT INTO t SELECT repeat('y', 1000) FROM generate_series(1, 400)")
	if got := c.query(1, fmt.Sprintf("SELECT pg_current_wal_lsn() > '%s'", lost)); got != "true" {
		t.Fatalf("the new master is beyond the stranded replica: %s; want true", got)
	}
	for _, role := range roles {
		d := daemons[role]
		d.eventuallyHost(1, "at "+c.lsn(1), func(h hostStatus) bool { return *h.LSN == c.lsn(1) })
		never(role)
		// Without such limits it is a live replica like others.
		d.eventually("/replica", c.name(stranded))
	}

	// A replica that follows the new master meets them again: at once when the
	// timeline that it receives is seen, else when its control file tells, or by
	// position alone.
	c.repoint(follower, 1)
	c.waitReplayed(follower)
	written := c.lsn(1)
	daemons["monitor"].eventually("/replica?fallback=none&timeline=2&lag_bytes=0&min_lsn="+written, c.name(follower))
	blind.eventually("/replica?fallback=none&lag_bytes=0&min_lsn="+written, c.name(follower))
	if _, body, _ := blind.get("/replica?timeline=2"); body != c.name(1) {
		t.Errorf("to blind, /replica?timeline=2 = %q; want the master, as no timeline is known", body)
	}
	c.exec(1, "CHECKPOINT")
	c.waitReplayed(follower)
	c.exec(follower, "CHECKPOINT") // a restartpoint
	daemons["bare"].eventually("/replica?fallback=none&timeline=2&lag_bytes=0&min_lsn="+written, c.name(follower))
	for _, role := range roles {
		if h := daemons[role].hosts()[stranded]; h.LagBytes != nil || h.LagMS != nil {
			t.Errorf("to %s, the stranded replica is %v; want unknown lags", role, h)
		}
	}

	// So does the stranded one after a rewind, by which it has lost its write.
	c.stop(stranded, fast)
	for _, d := range daemons {
		d.eventuallyHost(stranded, "dead", hostStatus.dead)
	}
	c.rewind(stranded, 1)
	c.exec(1, "INSERT INTO t VALUES ('kept')")
	c.waitReplayed(stranded)
	c.waitReplayed(follower)
	if got := c.query(stranded, "SELECT b FROM t WHERE length(b) = 4"); got != "kept" {
		t.Errorf("after the rewind, the replica has %q; want kept, and not lost", got)
	}
	written = c.lsn(1)
	for _, role := range roles {
		d := daemons[role]
		d.eventuallyHost(stranded, "at "+written+" without lag", func(h hostStatus) bool {
			return h.fine() && *h.LSN == written && h.LagBytes != nil && *h.LagBytes == 0
		})
		path := to(role, "/replica?fallback=none&lag_bytes=0&lag_ms=1000&min_lsn="+written, "2")
		d.eventually(path, c.name(stranded))
		d.eventually(path, c.name(follower))
	}
}

// TestSplitBrain promotes two standbys of one primary, both to timeline 2. Whose
// WAL a replica follows cannot be told by the number.
func TestSplitBrain(t *testing.T) {
	const follower = 3
	c := newCluster(t, 3)
	c.exec(0, "CREATE TABLE t (b text)")
	c.repoint(follower, 2)
	for i := 1; i <= 3; i++ {
		c.waitReplayed(i)
	}
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.eventually("/replica?min_lsn="+c.lsn(0), c.name(follower))
	c.stop(0, immediate)
	c.promote(1)
	d.eventually("/master", c.name(1))
	d.eventuallyHost(0, "dead", hostStatus.dead)
	if record, ok := d.logged("split brain"); ok {
		t.Errorf("with one live master, the log says %q", record)
	}
	c.promote(2)
	for i := 1; i <= 2; i++ {
		if got := c.query(i, "SELECT pg_walfile_name(pg_current_wal_lsn())"); !strings.HasPrefix(got, "00000002") {
			t.Fatalf("node %d writes to %s; want it on timeline 2", i, got)
		}
	}
	const began, ended = "ERROR monitor: split brain: several live masters on one timeline; no replica meets min_lsn or timeline", "ERROR monitor: split brain has ended"
	d.waitLogged(began, "hosts="+c.name(1)+","+c.name(2), "timeline=2")
	// The follower has WAL of node 2, at a position that node 1 has passed, too.
	c.exec(2, "INSERT INTO t VALUES ('of node 2')")
	c.exec(1, "INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 10)")
	c.waitReplayed(follower)
	written := c.lsn(follower)
	d.eventuallyHost(follower, "on timeline 2, at "+written, func(h hostStatus) bool { return *h.Timeline == 2 && *h.LSN == written })

	conditions := []string{"min_lsn=0/1", "timeline=2", "min_lsn=" + written, "min_lsn=" + written + "&timeline=2", "timeline=1"}
	for range 3 {
		for _, path := range replicaPaths {
			for _, condition := range conditions {
				query := "?lag_ms=" + maxNumber + "&lag_bytes=" + maxNumber + "&" + condition
				if _, body, _ := d.get(path + query); body != c.name(1) {
					t.Errorf("%s = %q; want the master, %s", path+query, body, c.name(1))
				}
				if status, body, _ := d.get(path + query + "&fallback=none"); status != 404 {
					t.Errorf("%s, no fallback = %d %q; want 404", path+query, status, body)
				}
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	check := "/check?role=replica&host=" + c.name(follower) + "&timeline=2&min_lsn=" + written
	if status, body, _ := d.get(check); status != 503 || body != "min_lsn timeline" {
		t.Errorf("%s = %d %q; want 503 min_lsn timeline", check, status, body)
	}
	if _, body, _ := d.get("/replica"); body != c.name(follower) {
		t.Errorf("/replica = %q; want %s, as nothing is asked of it", body, c.name(follower))
	}

	// The selected one goes, and its rival is the only master.
	c.stop(1, fast)
	d.waitLogged(ended)
	d.eventually("/master", c.name(2))
	d.eventually("/replica?fallback=none&timeline=2&lag_bytes=0&min_lsn="+written, c.name(follower))
	for _, record := range []string{began, ended} {
		if n := strings.Count(d.logs(), record); n != 1 {
			t.Errorf("the log has %d times %q; want it once", n, record)
		}
	}

	// Two names of one server are no split.
	alias := c.proxy(2)
	twice := startDaemon(t, append(envFor(c.addr(2), alias.addr(), c.addr(follower)), "pg_status__sleep_ms=100")...)
	twice.eventually("/replica?fallback=none&timeline=2&min_lsn="+written, c.name(follower))
	for i := range 2 {
		twice.eventuallyHost(i, "a master", func(h hostStatus) bool { return h.fine() && h.Master })
	}
	twice.eventually("/replica?fallback=none&timeline=2&min_lsn="+written, c.name(follower))
	for _, what := range []string{"split brain", "several live masters"} {
		if record, ok := twice.logged(what); ok {
			t.Errorf("with two names of one server, the log says %q", record)
		}
	}
}

// TestForeignReplica has a replica of another cluster in the list, and no other.
// No question brings it up, whatever is left.
func TestForeignReplica(t *testing.T) {
	c, other := newCluster(t, 0), newCluster(t, 1, withOwnHistory())
	c.exec(0, "CREATE TABLE t (b text)")
	d := startDaemon(t, append(envFor(other.addr(1), c.addr(0)), "pg_status__sleep_ms=100")...)
	d.waitReady()
	d.eventuallyHost(0, "fine", hostStatus.fine)
	d.eventually("/master", c.name(0))
	const identifier = "SELECT system_identifier FROM pg_control_system()"
	ours, theirs := c.query(0, identifier), other.query(0, identifier)
	if ours == theirs {
		t.Fatalf("both clusters have the system identifier %s", ours)
	}
	const record = "ERROR monitor: host belongs to another cluster than the master and is not used as a replica"
	d.waitLogged(record, "host="+other.name(1), "system_identifier="+theirs, "master_system_identifier="+ours)

	// nothing checks that want is all that is ever returned.
	nothing := func(want string) {
		t.Helper()
		for _, path := range replicaPaths {
			for _, query := range []string{
				"", "lag_ms=" + maxNumber, "lag_bytes=" + maxNumber, "lag_ms=" + maxNumber + "&lag_bytes=" + maxNumber,
				"min_lsn=0/1", "timeline=1", "min_lsn=0/1&timeline=1",
			} {
				for _, fallback := range []string{"", "master", "any", "none"} {
					want := want
					if fallback == "none" {
						want = ""
					}
					path := path + "?" + query + "&"
					if fallback != "" {
						path += "fallback=" + fallback
					}
					if _, body, _ := d.get(path); body != want {
						t.Errorf("%s = %q; want %q", path, body, want)
					}
				}
			}
		}
		if status, body, _ := d.get("/check?role=replica&host=" + other.name(1)); status != 503 || body != "cluster" {
			t.Errorf("/check of a replica of another cluster = %d %q; want 503 cluster", status, body)
		}
	}
	nothing(c.name(0))
	if _, body, _ := d.get("/replica?wait_ms=300&fallback=none"); body != "" {
		t.Errorf("/replica?wait_ms=300 = %q; want nothing", body)
	}
	// It is shown as it is.
	if h := d.hosts()[0]; !h.fine() || h.Master || *h.LSN != other.lsn(1) {
		t.Errorf("host 0 is %v; want it fine, at %s", h, other.lsn(1))
	}

	// Our master is gone: better nothing than someone else's data.
	c.stop(0, fast)
	d.eventually("/master", "")
	nothing("")
	c.start(0)
	d.eventually("/master", c.name(0))
	nothing(c.name(0))
	if n := strings.Count(d.logs(), record); n != 1 {
		t.Errorf("the other cluster is logged %d times; want once", n)
	}
}
