//go:build linux

package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestBenchScale measures what connections, hosts and the poll period cost.
func TestBenchScale(t *testing.T) {
	if benchMode == "" {
		return // see bench_test.go
	}
	b := newBench(t)
	idleTime := benchFor(5*time.Second, 2*time.Second)
	var out strings.Builder

	fmt.Fprintf(&out, "\n| idle connections besides | application mix | VmRSS |\n| --- | --- | --- |\n")
	d := b.start(t)
	open := 0
	for _, conns := range []int{0, 1000, 5000} {
		for ; open < conns; open++ {
			b.keepIdle(d)
		}
		p := b.versus(d.server(), workload{"mix", b.mix(3)})
		fmt.Fprintf(&out, "| %d | %s | %s |\n", conns, p, inMiB(p.ours.rss))
		t.Logf("%d idle connections: %s; nginx %s", conns, p.ours, p.nginx)
	}
	d.stop()

	fmt.Fprintf(&out, "\n| hosts | application mix | `/hosts` | VmRSS idle | under load | CPU idle |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, hosts := range []int{3, 16, 64} {
		addrs := []string{b.addr(0)}
		for i := 1; i < hosts; i++ {
			addrs = append(addrs, b.addr(1+i%2)) // an entry may be there twice
		}
		d := b.startAs(t, b.onServerCPU(binary), envFor(addrs...))
		idle := b.idle(d, idleTime)
		mix := b.versus(d.server(), workload{"mix", b.mix(hosts)})
		all := b.versus(d.server(), workload{"hosts", []question{toHosts(hosts)}})
		fmt.Fprintf(&out, "| %d | %s | %s | %s | %s | %.2f%% |\n",
			hosts, mix, all, inMiB(idle.rss), inMiB(max(mix.ours.rss, all.ours.rss)), 100*idle.cpu)
		t.Logf("%d hosts: mix %s; nginx %s; hosts %s; nginx %s", hosts, mix.ours, mix.nginx, all.ours, all.nginx)
		d.stop()
	}

	fmt.Fprintf(&out, "\n| poll period | application mix | CPU idle |\n| --- | --- | --- |\n")
	for _, period := range []int{1000, 100, 10} {
		d := b.start(t, fmt.Sprintf("pg_status__sleep_ms=%d", period))
		idle := b.idle(d, idleTime)
		p := b.versus(d.server(), workload{"mix", b.mix(3)})
		fmt.Fprintf(&out, "| %d ms | %s | %.2f%% |\n", period, p, 100*idle.cpu)
		t.Logf("period %d ms: %s; nginx %s", period, p.ours, p.nginx)
		d.stop()
	}
	fmt.Print(out.String() + "\n")
}

// keepIdle opens a connection to d that asks once and stays.
func (b *bench) keepIdle(d *daemon) {
	b.t.Helper()
	conn, err := net.Dial("tcp", d.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	q := b.toMaster("/master")
	if _, err := io.WriteString(conn, q.wire()); err != nil {
		b.t.Fatal(err)
	}
	answer := make([]byte, 4096)
	n, err := conn.Read(answer)
	if err != nil || !strings.HasPrefix(string(answer[:n]), "HTTP/1.1 "+strconv.Itoa(http.StatusOK)) {
		b.t.Fatalf("connection %s: %q, %v", conn.LocalAddr(), answer[:n], err)
	}
}

// TestBenchChecks measures what a pg-status costs the servers that it watches,
// and thus how many a primary can bear.
func TestBenchChecks(t *testing.T) {
	if benchMode == "" {
		return // see bench_test.go
	}
	b := newBench(t)
	d := b.start(t) // checks every second
	took := benchFor(30*time.Second, 5*time.Second)
	var backends []int
	for i := range b.nodes {
		pid, err := strconv.Atoi(b.query(i, "SELECT pid FROM pg_stat_activity WHERE application_name = 'pg-status'"))
		if err != nil {
			t.Fatal(err)
		}
		backends = append(backends, pid)
	}
	before := make([]time.Duration, len(backends))
	for i, pid := range backends {
		before[i] = cpuTime(t, pid)
	}
	begun, own := time.Now(), cpuTime(t, d.pid)
	time.Sleep(took) // is the subject
	var out strings.Builder
	fmt.Fprintf(&out, "\n| server | CPU time of a check | pg-status that cost a core, 1 check a second each | memory of the connection |\n| --- | --- | --- | --- |\n")
	checks := time.Since(begun).Seconds() // each of the hosts, give or take one
	for i, pid := range backends {
		each := (cpuTime(t, pid) - before[i]).Seconds() / checks
		role := "replica"
		if i == 0 {
			role = "primary"
		}
		fmt.Fprintf(&out, "| %s | %.0f µs | %.0f | %.1f MiB |\n", role, each*1e6, 1/each, float64(privateKB(t, pid))/1024)
	}
	fmt.Fprintf(&out, "| pg-status itself | %.0f µs | | |\n", (cpuTime(t, d.pid)-own).Seconds()/checks/float64(len(backends))*1e6)
	fmt.Print(out.String() + "\n")
}

// privateKB returns how much memory would be free without the process.
func privateKB(t *testing.T, pid int) (sum int) {
	t.Helper()
	smaps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(smaps)) {
		var name string
		var kB int
		if n, _ := fmt.Sscanf(line, "%s %d kB", &name, &kB); n == 2 && strings.HasPrefix(name, "Private_") {
			sum += kB
		}
	}
	return sum
}
