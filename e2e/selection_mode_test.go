package e2e

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// permutations returns every order of 0 to n-1.
func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var all [][]int
	for _, p := range permutations(n - 1) {
		for at := range n {
			order := append(append(append([]int(nil), p[:at]...), n-1), p[at:]...)
			all = append(all, order)
		}
	}
	return all
}

// envInOrder is env with the nodes listed in another order.
func (c *cluster) envInOrder(order []int, extra ...string) []string {
	var addrs []string
	for _, i := range order {
		addrs = append(addrs, c.addr(i))
	}
	return append(envFor(addrs...), extra...)
}

// forbid asks for /master all the time until the returned function is called,
// and fails the test when it names host.
func (d *daemon) forbid(host string) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			_, body, _, err := d.try("GET", "/master", "")
			if err != nil || body == host {
				d.t.Errorf("/master = %q, %v; want it never again", body, err)
				return
			}
			time.Sleep(2 * time.Millisecond)
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// TestDeposedMaster has a primary come back while its successor lives, and stay
// when that has died. Each mode and each order of the list is a pg-status.
func TestDeposedMaster(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (i int)")
	type watcher struct {
		*daemon
		order      []int
		byTimeline bool
	}
	// masterOf is what the mode makes of live masters, the newest last: the
	// README's rule is the first one in the list.
	masterOf := func(d watcher, live ...int) string {
		if d.byTimeline {
			return c.name(live[len(live)-1])
		}
		for _, i := range d.order {
			if slices.Contains(live, i) {
				return c.name(i)
			}
		}
		return ""
	}
	var all []watcher
	for _, order := range permutations(3) {
		for _, mode := range []string{"timeline", "order"} {
			d := startDaemon(t, c.envInOrder(order, "pg_status__sleep_ms=250", "pg_status__master_selection="+mode)...)
			all = append(all, watcher{d, order, mode == "timeline"})
		}
	}
	for _, d := range all {
		d.waitReady()
		d.eventually("/master", c.name(0))
	}

	c.stop(0, immediate)
	for _, d := range all {
		d.eventually("/master", "")
	}
	c.promote(1)
	c.repoint(2, 1)
	for _, d := range all {
		d.eventually("/master", c.name(1))
		if d.byTimeline {
			defer d.forbid(c.name(0))() // from now on, whatever happens
		}
	}

	// Both live. The old one takes writes, too.
	c.start(0)
	c.exec(0, "INSERT INTO t VALUES (1)")
	for _, d := range all {
		d.eventuallyHost(slices.Index(d.order, 0), "a live master on timeline 1", func(h hostStatus) bool {
			return h.fine() && h.Master && h.Timeline != nil && *h.Timeline == 1
		})
		d.eventually("/master", masterOf(d, 0, 1))
		names := c.name(0) + "," + c.name(1) // in the order of the list
		if slices.Index(d.order, 1) < slices.Index(d.order, 0) {
			names = c.name(1) + "," + c.name(0)
		}
		d.waitLogged("ERROR monitor: several hosts are live masters", "hosts="+names)
	}

	// Several checks later, nothing has changed.
	time.Sleep(time.Second)
	for _, d := range all {
		if _, body, _ := d.get("/master"); body != masterOf(d, 0, 1) {
			t.Errorf("order %v, by timeline %t: with two live masters, /master = %q; want %s", d.order, d.byTimeline, body, masterOf(d, 0, 1))
		}
		if n := strings.Count(d.logs(), "several hosts are live masters"); n != 1 {
			t.Errorf("order %v: two live masters are logged %d times; want once", d.order, n)
		}
		if _, ended := d.logged("no longer several live masters"); ended {
			t.Errorf("order %v: the log has two live masters end before they do", d.order)
		}
	}

	c.waitReplayed(2)

	// The successor dies: better none than the deposed one.
	c.stop(1, immediate)
	for _, d := range all {
		want := ""
		if !d.byTimeline {
			want = c.name(0)
		}
		d.eventually("/master", want)
		d.waitLogged("no longer several live masters")
		h := d.hosts()[slices.Index(d.order, 0)]
		if !h.fine() || !h.Master {
			t.Errorf("order %v: the deposed master is %v; want it alive and shown as a master", d.order, h)
		}
	}
	time.Sleep(time.Second)
	for _, d := range all {
		if _, body, _ := d.get("/master"); d.byTimeline != (body == "") {
			t.Errorf("order %v, by timeline %t: with the successor dead, /master = %q", d.order, d.byTimeline, body)
		}
		if n := strings.Count(d.logs(), "no longer several live masters"); n != 1 {
			t.Errorf("order %v: the end of two live masters is logged %d times; want once", d.order, n)
		}
	}

	// And the successor's successor is one.
	c.promote(2)
	for _, d := range all {
		d.eventually("/master", masterOf(d, 0, 2))
	}
}

// TestStoppedMasterIsNoRival has a failover in which the old primary is down,
// and known to be, before the new one is promoted. Nobody has to be called for
// two live masters then.
func TestStoppedMasterIsNoRival(t *testing.T) {
	c := newCluster(t, 1)
	d := startDaemon(t, c.env()...)
	d.settled(c, 0)
	c.stop(0, fast)
	d.waitLogged("WARNING monitor: host state changed", "host="+c.name(0), "state=possible_dead")
	c.promote(1)
	d.eventually("/master", c.name(1))
	d.eventuallyHost(0, "dead", hostStatus.dead)
	for _, words := range []string{"several hosts are live masters", "no longer several live masters"} {
		if record, ok := d.logged(words); ok {
			t.Errorf("with the old primary stopped, the log has %q", record)
		}
	}
}

// proxyTo returns a path to node i under the name of node as.
func (c *cluster) proxyTo(i, as int) *proxy {
	c.t.Helper()
	p := c.proxy(i)
	p.cut()
	p.listen = net.JoinHostPort(c.name(as), strconv.Itoa(freePort(c.t, c.name(as))))
	p.resume()
	return p
}

// TestOneNameTwoPorts has two hosts that only their ports tell apart.
func TestOneNameTwoPorts(t *testing.T) {
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (i int)")
	c.waitReplayed(1)
	p := c.proxyTo(1, 0)
	name := c.name(0)
	_, port, _ := net.SplitHostPort(p.addr())
	d := startDaemon(t, append(envFor(c.addr(0), p.addr()), "pg_status__sleep_ms=100")...)
	d.waitReady()
	d.eventuallyHost(0, "fine", hostStatus.fine)
	d.eventuallyHost(1, "fine on timeline 1, without lag", func(h hostStatus) bool {
		return h.fine() && h.LagBytes != nil && *h.LagBytes == 0 && h.Timeline != nil && *h.Timeline == 1
	})

	selection := func(port string) string {
		return fmt.Sprintf(`{"host":"%s","dc":null,"geo":null,"port":%s}`, name, port)
	}
	master, lsn := strconv.Itoa(c.port(0)), c.lsn(0)
	state := func(isMaster bool, port string) string {
		return fmt.Sprintf(`{"dc":null,"geo":null,"master":%t,"alive":true,"possible_dead":false,"lag_ms":N,"sync_by_time":true,`+
			`"lag_bytes":0,"sync_by_bytes":true,"lsn":"%s","port":%s,"timeline":1}`, isMaster, lsn, port)
	}
	for _, tt := range []struct {
		path   string
		json   bool
		status int
		want   string
	}{
		{"/master", false, 200, name},
		{"/replica", false, 200, name},
		{"/master", true, 200, selection(master)},
		{"/replica", true, 200, selection(port)},
		{"/most_sync_by_bytes", true, 200, selection(port)},
		{"/replica?min_lsn=FFFFFFFF/0", true, 200, selection(master)},
		{"/status?host=" + name, false, 200, state(true, master)},
		{"/status?host=" + name + "&port=" + master, false, 200, state(true, master)},
		{"/status?host=" + name + "&port=" + port, false, 200, state(false, port)},
		{"/status?host=" + name + "&port=1", false, 404, ""},
		{"/status?host=" + name + "&port=", false, 400, `{"error_text": "Invalid port"}`},
		{"/status?host=" + name + "&port=65536", false, 400, `{"error_text": "Invalid port"}`},
		{"/status?host=" + c.name(1) + "&port=" + port, false, 404, ""},
		{"/check?role=master&host=" + name, false, 200, "OK"},
		{"/check?role=replica&host=" + name, false, 503, "role"},
		{"/check?role=replica&host=" + name + "&port=" + port, false, 200, "OK"},
		{"/check?role=master&host=" + name + "&port=" + port, false, 503, "role"},
	} {
		var headers []string
		if tt.json {
			headers = []string{acceptJSON}
		}
		status, body, _ := d.get(tt.path, headers...)
		if got := lagMS.ReplaceAllString(body, `"lag_ms":N,`); status != tt.status || got != tt.want {
			t.Errorf("%s = %d %s; want %d %s", tt.path, status, got, tt.status, tt.want)
		}
	}
	// The log tells them apart, too.
	p.cut()
	d.waitLogged("host state changed", "host="+p.addr(), "state=dead")
	if h := d.hosts()[0]; !h.fine() {
		t.Errorf("with the other one dead, the first host of the name is %v", h)
	}
	d.eventually("/replica", name)
	if _, body, _ := d.get("/replica", acceptJSON); body != selection(master) {
		t.Errorf("with the replica dead, /replica = %s; want %s", body, selection(master))
	}
	for path, want := range map[string]string{
		"/check?role=replica&host=" + name + "&port=" + port: "dead",
		"/check?role=master&host=" + name + "&port=" + port:  "dead",
	} {
		if status, body, _ := d.get(path); status != 503 || body != want {
			t.Errorf("%s = %d %q; want 503 %q", path, status, body, want)
		}
	}
}

// TestTimelineField follows the timeline of every host through a failover.
func TestTimelineField(t *testing.T) {
	c := newCluster(t, 2)
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.waitReady()
	timelines := func(want ...string) {
		t.Helper()
		until(t, func() error {
			var got []string
			for _, h := range d.hosts() {
				if h.Timeline == nil {
					got = append(got, "null")
				} else {
					got = append(got, fmt.Sprint(*h.Timeline))
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				return fmt.Errorf("the timelines are %v; want %v", got, want)
			}
			return nil
		})
	}
	timelines("1", "1", "1")
	c.stop(0, fast)
	timelines("null", "1", "1")
	c.promote(1)
	timelines("null", "2", "1") // 2 has not been told whom to follow
	c.repoint(2, 1)
	timelines("null", "2", "2")
}

// TestFallback has requests that no replica matches.
func TestFallback(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (b text)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.waitReady()
	for i := range c.nodes {
		d.eventuallyHost(i, "fine", hostStatus.fine)
	}
	// fallbacks checks the answers of a path that nobody matches, by fallback, ""
	// being 404.
	fallbacks := func(when string, want map[string]string) {
		t.Helper()
		for _, path := range replicaPaths {
			for _, conditions := range []string{"min_lsn=FFFFFFFF/0", "timeline=7"} {
				for fallback, host := range want {
					full := path + "?" + conditions
					if fallback != "" {
						full += "&fallback=" + fallback
					}
					wantStatus, wantJSON := 404, noSelection
					for i := range c.nodes {
						if host == c.name(i) {
							wantStatus, wantJSON = 200, c.selection(i)
						}
					}
					if status, body, _ := d.get(full); status != wantStatus || body != host {
						t.Errorf("%s, %s = %d %q; want %d %q", when, full, status, body, wantStatus, host)
					}
					if status, body, _ := d.get(full, acceptJSON); status != wantStatus || body != wantJSON {
						t.Errorf("%s, %s = %d %s; want %d %s", when, full, status, body, wantStatus, wantJSON)
					}
				}
			}
		}
	}
	fallbacks("with a master", map[string]string{"": c.name(0), "master": c.name(0), "none": "", "any": c.name(0)})
	for _, fallback := range []string{"none", "any"} {
		// What matches is what it was without it.
		if _, body, _ := d.get("/most_sync_by_bytes?fallback=" + fallback); body != c.name(1) && body != c.name(2) {
			t.Errorf("with fallback=%s, /most_sync_by_bytes = %q; want a replica", fallback, body)
		}
	}

	// Replica 1 comes to lag, then there is no master: the other one is preferred.
	c.pauseReplay(1)
	c.exec(0, "INSERT INTO t VALUES (repeat('x', 1000))")
	c.waitReplayed(2)
	d.eventuallyHost(1, "behind", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes > 1000 })
	d.eventuallyHost(2, "without lag", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes == 0 })
	c.stop(0, immediate)
	d.eventually("/master", "")
	fallbacks("with no master", map[string]string{"": "", "master": "", "none": "", "any": c.name(2)})
	c.stop(2, immediate)
	d.eventuallyHost(2, "dead", hostStatus.dead)
	fallbacks("with one replica", map[string]string{"": "", "master": "", "none": "", "any": c.name(1)})
	c.stop(1, immediate)
	d.eventuallyHost(1, "dead", hostStatus.dead)
	fallbacks("with nobody", map[string]string{"": "", "master": "", "none": "", "any": ""})
}
