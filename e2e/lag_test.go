package e2e

import (
	"fmt"
	"testing"
)

// TestReplayPaused has one replica stand still and compares what pg-status says
// of it with what the servers say.
func TestReplayPaused(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (b text)")
	c.waitReplayed(1)
	d := startDaemon(t, c.env("pg_status__sleep_ms=50", "pg_status__sync_max_lag_ms=500", "pg_status__sync_max_lag_bytes=100000")...)
	d.waitReady()
	d.eventuallyHost(1, "in sync", func(h hostStatus) bool { return h.SyncByTime && h.SyncByBytes })

	c.pauseReplay(1)
	var last int64
	for _, size := range []int{1000, 30000, 100000} {
		c.exec(0, fmt.Sprintf("INSERT INTO t SELECT string_agg(md5(i::text), '') FROM generate_series(1, %d) i", size/32))
		c.waitReplayed(2)
		var lag int64
		until(t, func() error {
			master, replica := c.lsn(0), c.lsn(1)
			lag = c.bytesBetween(0, master, replica)
			h := d.hosts()
			if *h[0].LSN != master || *h[1].LSN != replica || *h[1].LagBytes != lag || *h[2].LSN != master || *h[2].LagBytes != 0 {
				return fmt.Errorf("/hosts is %v; want node 1 at %s, %d bytes behind the others at %s", h, replica, lag, master)
			}
			return nil
		})
		if lag < last+int64(size)/10 {
			t.Errorf("after %d bytes more, lag_bytes = %d; it was %d", size, lag, last)
		}
		last = lag

		// The limit is inclusive.
		for _, tt := range []struct {
			path string
			both bool // else node 2 alone
		}{
			{fmt.Sprintf("/replica?lag_bytes=%d", lag), true},
			{fmt.Sprintf("/replica?lag_bytes=%d", lag-1), false},
			{fmt.Sprintf("/sync_by_bytes?lag_bytes=%d", lag), true},
			{fmt.Sprintf("/sync_by_bytes?lag_bytes=%d", lag-1), false},
			{fmt.Sprintf("/replica?min_lsn=%s", c.lsn(1)), true},
			{fmt.Sprintf("/replica?min_lsn=%s&timeline=1", c.lsn(0)), false},
			{"/most_sync_by_bytes?lag_bytes=10000000", false},
		} {
			got := map[string]int{}
			for range 4 {
				_, body, _ := d.get(tt.path)
				got[body]++
			}
			want := map[string]int{c.name(2): 4}
			if tt.both {
				want = map[string]int{c.name(1): 2, c.name(2): 2}
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("4 x %s = %v; want %v", tt.path, got, want)
			}
		}
	}

	// Beyond the global thresholds, in bytes at once and in time soon.
	h := d.eventuallyHost(1, "out of sync", func(h hostStatus) bool { return !h.SyncByTime && !h.SyncByBytes })
	if *h.LagBytes <= 100000 || *h.LagMS <= 500 {
		t.Errorf("host 1 is %v; want lags beyond the thresholds", h)
	}
	host := "host=" + c.name(1)
	d.waitLogged("INFO monitor: replica synchronization changed", host, "dimension=bytes", "synchronous=false", "threshold_bytes=100000")
	d.waitLogged("INFO monitor: replica synchronization changed", host, "dimension=time", "synchronous=false", "threshold_ms=500")

	c.pauseReplay(2)
	c.exec(0, "INSERT INTO t VALUES ('x')")
	beyond := "/replica?min_lsn=" + c.lsn(0)
	d.eventually(beyond, c.name(0))
	c.resumeReplay(2)
	d.eventually(beyond, c.name(2))

	c.resumeReplay(1)
	d.eventuallyHost(1, "in sync", func(h hostStatus) bool { return h.SyncByTime && h.SyncByBytes && *h.LagBytes == 0 })
	d.waitLogged("INFO monitor: replica synchronization changed", host, "dimension=bytes", "synchronous=true")
	d.waitLogged("INFO monitor: replica synchronization changed", host, "dimension=time", "synchronous=true")
	if h := d.hosts(); *h[1].LSN != c.lsn(0) {
		t.Errorf("host 1 is %v; want it at %s", h[1], c.lsn(0))
	}
}
