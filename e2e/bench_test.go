//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The benchmarks print the tables of README.md, to standard output. They run only
// when asked for:
//
//	make bench                all of them, about 10 minutes
//	make bench BENCH=short    the same with one short round each, to try it
//	make bench RUN=Quota      TestBenchQuota only
//
// The server under test has one CPU to itself. All else, the client, PostgreSQL
// and this process, shares another. Each run of pg-status follows one of nginx,
// which does as little as an HTTP server can, on the same CPU; what counts is the
// ratio. It is taken of requests per second, and of CPU time per request. Only
// the latter tells two servers apart that are both faster than wrk, and it holds
// also when the machine does other things meanwhile.

// benchMode is "" where no benchmark is to run.
var benchMode = os.Getenv("BENCH")

// benchFor returns full, or short for a trial run.
func benchFor(full, short time.Duration) time.Duration {
	if benchMode == "short" {
		return short
	}
	return full
}

// benchConns is how many connections the client keeps.
const benchConns = 128

// A bench is a cluster that is written to, and nginx.
type bench struct {
	*cluster
	dir                  string
	serverCPU, clientCPU int
	rounds               int
	took                 time.Duration // by each run
	nginx                *benchServer
	replayed             string // a position that every replica has passed
}

// newBench starts a primary that gets 100 commits a second, two replicas, and
// nginx.
func newBench(t *testing.T, options ...option) *bench {
	t.Helper()
	for program, pkg := range map[string]string{"wrk": "wrk", "nginx": "nginx-light", "taskset": "util-linux"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("%v; install it with: apt-get install %s", err, pkg)
		}
	}
	b := &bench{dir: t.TempDir(), rounds: 3, took: benchFor(4*time.Second, 2*time.Second)}
	if benchMode == "short" {
		b.rounds = 1
	}
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		t.Fatal(err)
	}
	if mine.Count() < 2 {
		t.Fatal("a server and its client need a CPU each; there is one")
	}
	for !mine.IsSet(b.serverCPU) {
		b.serverCPU++
	}
	for b.clientCPU = b.serverCPU + 1; !mine.IsSet(b.clientCPU); {
		b.clientCPU++
	}

	b.cluster = newCluster(t, 2, options...)
	b.exec(0, "CREATE TABLE t (i bigint)")
	b.waitReplayed(1)
	b.waitReplayed(2)
	b.replayed = b.lsn(0)
	pids := []int{os.Getpid()}
	for _, n := range b.nodes {
		pids = append(pids, n.processes()...)
	}
	for _, pid := range pids {
		pin(t, pid, b.clientCPU)
	}
	t.Cleanup(func() {
		for _, tid := range tasks(os.Getpid()) {
			unix.SchedSetaffinity(tid, &mine)
		}
	})
	b.commits()
	b.startNginx()
	load, _ := os.ReadFile("/proc/loadavg")
	t.Logf("load average before we begin: %s", load)
	return b
}

// tasks returns the ids of the threads of a process.
func tasks(pid int) []int {
	var tids []int
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, name := range names {
		tid, _ := strconv.Atoi(filepath.Base(name))
		tids = append(tids, tid)
	}
	return tids
}

// pin keeps a process, and what it starts from now on, on one CPU.
func pin(t *testing.T, pid, cpu int) {
	t.Helper()
	var set unix.CPUSet
	set.Set(cpu)
	for _, tid := range tasks(pid) {
		if err := unix.SchedSetaffinity(tid, &set); err != nil && err != unix.ESRCH {
			t.Fatal(err)
		}
	}
}

// commits has 100 transactions committed each second until the test ends, at
// times that do not depend on how long they take.
func (b *bench) commits() {
	stop := make(chan struct{})
	var writer sync.WaitGroup
	db, t := b.db(0), b.t
	writer.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if _, err := db.Exec("INSERT INTO t VALUES (1)"); err != nil {
					t.Errorf("writing to node 0: %v", err)
					return
				}
			}
		}
	})
	t.Cleanup(func() {
		close(stop)
		writer.Wait()
	})
}

// A benchServer is an HTTP server to measure.
type benchServer struct {
	pid  int
	addr string
}

const nginxConf = `
daemon off;
master_process off;
pid %[1]s/nginx.pid;
error_log stderr crit;
events { worker_connections 20000; }
http {
	access_log off;
	client_body_temp_path %[1]s;
	keepalive_requests 1000000000;
	server {
		listen 127.0.0.1:%[2]d backlog=4096;
		location / { return 200; }
	}
}
`

// startNginx starts an nginx, a single process, that has the same empty answer
// for everything.
func (b *bench) startNginx() {
	b.t.Helper()
	port := freePort(b.t, "127.0.0.1")
	conf := filepath.Join(b.dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, nginxConf, b.dir, port), 0o600); err != nil {
		b.t.Fatal(err)
	}
	cmd := b.onServerCPU("nginx", "-c", conf, "-e", "stderr")
	cmd.Stderr = os.Stderr
	dieWithUs(cmd, syscall.SIGKILL)
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	b.nginx = &benchServer{cmd.Process.Pid, fmt.Sprintf("127.0.0.1:%d", port)}
	until(b.t, func() error {
		conn, err := net.Dial("tcp", b.nginx.addr)
		if err == nil {
			conn.Close()
		}
		return err
	})
}

// onServerCPU is a program that has that CPU to itself.
func (b *bench) onServerCPU(program string, args ...string) *exec.Cmd {
	return exec.Command("taskset", append([]string{"-c", strconv.Itoa(b.serverCPU), program}, args...)...)
}

// start starts a pg-status that watches the cluster, and returns when it has seen
// all of it.
func (b *bench) start(t *testing.T, env ...string) *daemon {
	t.Helper()
	return b.startAs(t, b.onServerCPU(binary), b.env(env...))
}

func (b *bench) startAs(t *testing.T, cmd *exec.Cmd, env []string) *daemon {
	t.Helper()
	cmd.Env = daemonEnv(append([]string{"pg_status__http_listen_address=127.0.0.1"}, env...))
	d := startCommand(t, cmd)
	d.waitReady()
	d.eventually("/master", b.name(0))
	for i := 1; i < len(b.nodes); i++ {
		d.eventuallyHost(i, "beyond "+b.replayed, func(h hostStatus) bool {
			return h.fine() && position(t, *h.LSN) >= position(t, b.replayed)
		})
	}
	d.client.CloseIdleConnections()
	return d
}

func (d *daemon) server() *benchServer { return &benchServer{d.pid, d.addr} }

// A question is a request and the answers to it that are right.
type question struct {
	path  string
	json  bool
	close bool // in a connection of its own
	right func(body string) bool
}

// wire is the request as it is sent.
func (q question) wire() string {
	w := "GET " + q.path + " HTTP/1.1\r\nHost: 127.0.0.1\r\n"
	if q.json {
		w += acceptJSON + "\r\n"
	}
	if q.close {
		w += "Connection: close\r\n"
	}
	return w + "\r\n"
}

// verify returns what is wrong with the answer.
func (q question) verify(resp *http.Response, body string) error {
	contentType := "text/plain; charset=utf-8"
	if q.json || q.path == "/hosts" {
		contentType = "application/json"
	}
	if got := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || got != contentType || !q.right(body) {
		return fmt.Errorf("%s = %d, %s: %.300q", q.path, resp.StatusCode, got, body)
	}
	return nil
}

// A workload is questions that clients ask in turn.
type workload struct {
	name      string
	questions []question
}

// toMaster and toReplica are answered with the one master, or a replica.
func (b *bench) toMaster(path string) question  { return question{path: path, right: b.names(0)} }
func (b *bench) toReplica(path string) question { return question{path: path, right: b.names(1, 2)} }

// names accepts the names of some nodes, as text and as JSON.
func (b *bench) names(nodes ...int) func(string) bool {
	var right []string
	for _, i := range nodes {
		right = append(right, b.name(i),
			fmt.Sprintf(`{"host":"%s","dc":null,"geo":null,"port":%d}`, b.name(i), b.port(i)))
	}
	return func(body string) bool { return slices.Contains(right, body) }
}

// toHosts is answered with the state of hosts, of which the first one is the
// master, and all are well.
func toHosts(hosts int) question {
	return question{path: "/hosts", right: func(body string) bool {
		var got []hostStatus
		if json.Unmarshal([]byte(body), &got) != nil || len(got) != hosts || !got[0].Master {
			return false
		}
		return !slices.ContainsFunc(got, func(h hostStatus) bool { return !h.fine() || h.LSN == nil || h.LagMS == nil })
	}}
}

// fresh is the path of a read of one's own writes, which every replica can serve.
func (b *bench) fresh() string {
	return "/replica?min_lsn=" + b.replayed + "&lag_ms=60000&lag_bytes=100000000"
}

// mix is what an application asks: of 20 questions 8 for the master, 6 for a
// replica that has its writes, 2 for one that is fresh, 2 for the freshest.
func (b *bench) mix(hosts int) []question {
	master, replica := b.toMaster("/master"), b.toReplica(b.fresh())
	byTime, most, both := b.toReplica("/sync_by_time"), b.toReplica("/most_sync_by_bytes"), b.toReplica("/sync_by_time_and_bytes")
	return []question{
		master, replica, master, byTime, replica, master, most, master, replica, master,
		both, replica, master, byTime, master, replica, most, master, replica, toHosts(hosts),
	}
}

// with returns the questions after f has changed each.
func with(f func(*question), questions ...question) []question {
	questions = slices.Clone(questions)
	for i := range questions {
		f(&questions[i])
	}
	return questions
}

// check asks every question of w twice, over one connection where it may be kept,
// and returns the mean size of the answers in bytes.
func (w workload) check(addr string) (size float64, err error) {
	var conn net.Conn
	defer func() {
		if conn != nil {
			conn.Close()
		}
	}()
	var raw bytes.Buffer // all that was read
	var answers *bufio.Reader
	questions := slices.Concat(w.questions, w.questions)
	for _, q := range questions {
		if conn == nil {
			if conn, err = net.Dial("tcp", addr); err != nil {
				return 0, err
			}
			conn.SetDeadline(time.Now().Add(patience))
			answers = bufio.NewReader(io.TeeReader(conn, &raw))
		}
		if _, err := io.WriteString(conn, q.wire()); err != nil {
			return 0, err
		}
		resp, err := http.ReadResponse(answers, nil)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", q.path, err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", q.path, err)
		}
		if err := q.verify(resp, string(body)); err != nil {
			return 0, err
		}
		if resp.Close != q.close {
			return 0, fmt.Errorf("%s: the server closes: %t; want %t", q.path, resp.Close, q.close)
		}
		if q.close {
			conn.Close()
			conn = nil
		}
	}
	return float64(raw.Len()) / float64(len(questions)), nil
}

// script is w for wrk. The client's CPU is scarce: a single request is built once
// by wrk, several are strings that Lua only hands out.
func (w workload) script() string {
	var s strings.Builder
	if len(w.questions) == 1 {
		fmt.Fprintf(&s, "wrk.format = function() return %q end\n", w.questions[0].wire())
	} else {
		fmt.Fprintf(&s, "local requests, i = {}, 0\ninit = function()\n")
		for i, q := range w.questions {
			fmt.Fprintf(&s, "requests[%d] = %q\n", i, q.wire())
		}
		fmt.Fprintf(&s, "end\nrequest = function() i = (i + 1) %% %d return requests[i] end\n", len(w.questions))
	}
	s.WriteString(`done = function(s, latency)
	local e = s.errors
	print(string.format("done %d %d %d %d %d", s.requests, s.duration, s.bytes, e.status, e.connect + e.read + e.write + e.timeout))
	print(string.format("latency %d %d", latency:percentile(50), latency:percentile(99)))
end
`)
	return s.String()
}

// A run is what one run of wrk has shown.
type run struct {
	rate     float64       // requests a second
	p50, p99 time.Duration // of the answers
	cpu      time.Duration // of the server, for each request
	busy     float64       // the share of its CPU that the server had
	rss      int           // most VmRSS of the server, kB
}

// run has wrk ask the questions of w for the given time. One answer that is not
// 200 fails the test, as do wrong answers before or after, and answers to wrk
// that are of another size than these.
func (b *bench) run(s *benchServer, w workload, took time.Duration) run {
	b.t.Helper()
	want := b.verified(s, w)
	script := filepath.Join(b.dir, "wrk.lua")
	if err := os.WriteFile(script, []byte(w.script()), 0o600); err != nil {
		b.t.Fatal(err)
	}
	cmd := exec.Command("taskset", "-c", strconv.Itoa(b.clientCPU), "wrk", "-t1", fmt.Sprintf("-c%d", benchConns),
		fmt.Sprintf("-d%ds", int(took.Seconds())), "--timeout", "5s", "-s", script, "http://"+s.addr)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	dieWithUs(cmd, syscall.SIGKILL)
	begun, cpu := time.Now(), cpuTime(b.t, s.pid)
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- cmd.Wait() }()
	var r run
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for running := true; running; {
		select {
		case err := <-ended:
			if err != nil {
				b.t.Fatalf("wrk: %v\n%s", err, &out)
			}
			running = false
		case <-tick.C:
			r.rss = max(r.rss, statusKB(b.t, s.pid, "VmRSS"))
		}
	}
	cpu, elapsed := cpuTime(b.t, s.pid)-cpu, time.Since(begun)

	var requests, micros, size, wrong, failed, p50, p99 int64
	_, report, _ := strings.Cut(out.String(), "\ndone ")
	if n, err := fmt.Sscanf(report, "%d %d %d %d %d\nlatency %d %d", &requests, &micros, &size, &wrong, &failed, &p50, &p99); n != 7 {
		b.t.Fatalf("wrk: %v\n%s", err, &out)
	}
	if requests == 0 || wrong > 0 || failed > 0 {
		b.t.Fatalf("%s: of %d answers %d are not 200, and %d sockets failed; want none\n%s", w.name, requests, wrong, failed, &out)
	}
	b.verified(s, w)
	if mean := float64(size) / float64(requests); s != b.nginx && math.Abs(mean/want-1) > 0.02 {
		b.t.Fatalf("%s: answers to wrk have %.1f bytes; those that were verified have %.1f", w.name, mean, want)
	}
	r.rate = float64(requests) / (float64(micros) / 1e6)
	r.p50, r.p99 = time.Duration(p50)*time.Microsecond, time.Duration(p99)*time.Microsecond
	r.cpu = cpu / time.Duration(requests)
	r.busy = cpu.Seconds() / elapsed.Seconds()
	return r
}

// verified returns the mean size of the answers, which it has seen to be right.
// Those of nginx are of no interest.
func (b *bench) verified(s *benchServer, w workload) float64 {
	b.t.Helper()
	if s == b.nginx {
		return 0
	}
	size, err := w.check(s.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	return size
}

// statusKB returns a value of /proc/<pid>/status in kB.
func statusKB(t *testing.T, pid int, name string) int {
	t.Helper()
	return (&daemon{t: t, pid: pid}).kB(name)
}

// cpuTime returns the CPU time that the threads of a process have had, from
// /proc/<pid>/task/<tid>/schedstat, which counts nanoseconds, while stat counts
// ticks of 10 ms.
func cpuTime(t *testing.T, pid int) (sum time.Duration) {
	t.Helper()
	for _, tid := range tasks(pid) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/schedstat", pid, tid))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // a thread that has ended
		}
		var ns int64
		if _, err := fmt.Sscan(string(stat), &ns); err != nil {
			t.Fatalf("reading the CPU time of process %d: %v", pid, err)
		}
		sum += time.Duration(ns)
	}
	if sum == 0 {
		t.Fatalf("process %d has had no CPU time", pid)
	}
	return sum
}

// median is the middle one of what f makes of xs, the lower one if there are two.
func median[T any](xs []T, f func(T) float64) float64 {
	var ys []float64
	for _, x := range xs {
		ys = append(ys, f(x))
	}
	slices.Sort(ys)
	return ys[(len(ys)-1)/2]
}

// A pair is a run of nginx and then one of pg-status.
type pair struct{ nginx, ours run }

func (p pair) ratio() float64 { return p.ours.rate / p.nginx.rate }

// cpuRatio is what the ratio would be if each server had all of its CPU.
func (p pair) cpuRatio() float64 { return float64(p.nginx.cpu) / float64(p.ours.cpu) }

// String is for tables.
func (p pair) String() string {
	return fmt.Sprintf("%.0f/s, %.1f µs each, %.2f of nginx", p.ours.rate, p.ours.cpu.Seconds()*1e6, p.cpuRatio())
}

// versus runs nginx, then w.
func (b *bench) versus(s *benchServer, w workload) pair {
	b.t.Helper()
	plain := workload{"nginx", []question{{path: "/", close: w.questions[0].close}}}
	return pair{b.run(b.nginx, plain, b.took), b.run(s, w, b.took)}
}

// TestBench measures throughput, memory and CPU time, and prints the tables of
// README.md.
func TestBench(t *testing.T) {
	if benchMode == "" {
		return // see above
	}
	b := newBench(t)
	fresh := b.start(t)
	idle := b.idle(fresh, benchFor(30*time.Second, 3*time.Second))
	later := fresh.mostRSS(benchFor(150*time.Second, time.Second))
	fresh.stop()

	d := b.start(t)
	workloads := []workload{
		{"`/master`", []question{b.toMaster("/master")}},
		{"`/replica` with `min_lsn` and both limits", []question{b.toReplica(b.fresh())}},
		{"the same, and no replica has replayed it", []question{b.toMaster("/replica?min_lsn=FFFFFF/0&lag_ms=60000&lag_bytes=100000000")}},
		{"application mix", b.mix(3)},
		{"application mix, JSON", with(func(q *question) { q.json = true }, b.mix(3)...)},
		{"`/hosts`", []question{toHosts(3)}},
		{"`/master`, a connection per request", with(func(q *question) { q.close = true }, b.toMaster("/master"))},
	}
	pairs := make([][]pair, len(workloads))
	rss := 0
	for round := range b.rounds {
		for i, w := range workloads {
			p := b.versus(d.server(), w)
			pairs[i] = append(pairs[i], p)
			rss = max(rss, p.ours.rss)
			t.Logf("round %d, %s: %s; nginx %s", round+1, w.name, p.ours, p.nginx)
		}
	}

	var out strings.Builder
	fmt.Fprintf(&out, "\n| requests | per second | of nginx | CPU time each | of nginx | p99 |\n| --- | --- | --- | --- | --- | --- |\n")
	row := func(name string, runs []run, ratio, cpuRatio float64) {
		fmt.Fprintf(&out, "| %s | %.0f | %.2f | %.1f µs | %.2f | %.1f ms |\n", name,
			median(runs, func(r run) float64 { return r.rate }), ratio,
			median(runs, func(r run) float64 { return r.cpu.Seconds() * 1e6 }), cpuRatio,
			median(runs, func(r run) float64 { return r.p99.Seconds() * 1e3 }))
	}
	var nginx []run
	for i, w := range workloads {
		var ours []run
		for _, p := range pairs[i] {
			ours = append(ours, p.ours)
			if !w.questions[0].close {
				nginx = append(nginx, p.nginx)
			}
		}
		row(w.name, ours, median(pairs[i], pair.ratio), median(pairs[i], pair.cpuRatio))
	}
	row("nginx, `return 200`", nginx, 1, 1)
	info, err := os.Stat(binary)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(&out, "\n| | |\n| --- | --- |\n")
	fmt.Fprintf(&out, "| memory (VmRSS), idle, 3 hosts, after half a minute | %s |\n", inMiB(idle.rss))
	fmt.Fprintf(&out, "| the most in the next minutes | %s |\n", inMiB(later))
	fmt.Fprintf(&out, "| with %d connections under load | %s |\n", benchConns, inMiB(rss))
	fmt.Fprintf(&out, "| CPU, idle, 3 hosts checked every second | %.3f%% of one core |\n", 100*idle.cpu)
	fmt.Fprintf(&out, "| the binary | %.2f MB |\n", float64(info.Size())/1e6)
	fmt.Print(out.String() + "\n")
}

func inMiB(kB int) string { return fmt.Sprintf("%.1f MiB", float64(kB)/1024) }

func (r run) String() string {
	return fmt.Sprintf("%.0f/s, %.2f µs of CPU each, busy %.0f%%, p50 %v, p99 %v, VmRSS %d kB", r.rate, float64(r.cpu)/1e3, 100*r.busy, r.p50, r.p99, r.rss)
}

// idling is what a process does when nobody asks.
type idling struct {
	cpu float64 // share of a CPU
	rss int     // VmRSS at the end, kB
}

// idle watches d for the given time, after it has settled.
func (b *bench) idle(d *daemon, took time.Duration) idling {
	b.t.Helper()
	// These waits are the subject.
	time.Sleep(took / 10)
	begun, cpu := time.Now(), cpuTime(b.t, d.pid)
	time.Sleep(took)
	cpu, elapsed := cpuTime(b.t, d.pid)-cpu, time.Since(begun)
	return idling{cpu.Seconds() / elapsed.Seconds(), d.kB("VmRSS")}
}

// mostRSS returns the most VmRSS that d has in the given time, in kB.
func (d *daemon) mostRSS(took time.Duration) (most int) {
	d.t.Helper()
	for begun := time.Now(); time.Since(begun) < took; time.Sleep(time.Second) {
		most = max(most, d.kB("VmRSS"))
	}
	return most
}
