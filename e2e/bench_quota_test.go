//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestBenchQuota measures how long the application mix takes at constant rates,
// with a tenth of a CPU, as a sidecar may get.
func TestBenchQuota(t *testing.T) {
	if benchMode == "" {
		return // see bench_test.go
	}
	b := newBench(t)
	const share = 0.1
	limited, how := limitCPU(t, share)
	if limited == nil {
		fmt.Printf("\nUnder a CPU quota: not measured, as %s.\n\n", how)
		return
	}
	t.Logf("limiting by %s", how)

	took := benchFor(10*time.Second, 2*time.Second)
	var out strings.Builder
	fmt.Fprintf(&out, "\n| quota | requests per second | p50 | p99 | p99.9 | largest | CPU used |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	measure := func(quota string, d *daemon, rate int) {
		t.Helper()
		w := workload{"application mix", b.mix(3)}
		if _, err := openLoop(d.addr, w.questions, rate, benchConns, time.Second); err != nil { // warms up
			t.Fatal(err)
		}
		begun, cpu := time.Now(), cpuTime(t, d.pid)
		l, err := openLoop(d.addr, w.questions, rate, benchConns, took)
		if err != nil {
			t.Fatal(err)
		}
		cpu, elapsed := cpuTime(t, d.pid)-cpu, time.Since(begun)
		row := fmt.Sprintf("| %s | %d | %s | %s | %s | %s | %.1f%% |", quota, rate,
			inMS(percentile(l, 50)), inMS(percentile(l, 99)), inMS(percentile(l, 99.9)), inMS(l[len(l)-1]),
			100*cpu.Seconds()/elapsed.Seconds())
		t.Log(row)
		fmt.Fprintln(&out, row)
	}
	free := b.startAs(t, exec.Command(binary), b.env())
	measure("none", free, 4000)
	free.stop()
	d := b.startAs(t, limited(binary), b.env())
	for rate := 1000; rate <= 6000; rate += 1000 {
		measure(fmt.Sprintf("%.1f CPU", share), d, rate)
	}
	fmt.Print(out.String() + "\n")
}

func inMS(d time.Duration) string { return fmt.Sprintf("%.2f ms", d.Seconds()*1e3) }

// limitCPU returns what makes a command that has a share of one CPU and no more,
// and by what means, or else nil and the reason.
func limitCPU(t *testing.T, share float64) (limited func(program string) *exec.Cmd, how string) {
	t.Helper()
	const period = 100_000 // microseconds, the default of the kernel and of Kubernetes
	quota := int(share * period)
	name := fmt.Sprintf("pg-status-bench-%d", os.Getpid())
	for _, c := range []struct{ how, dir, file, limit string }{
		{"cgroup v2", "/sys/fs/cgroup", "cpu.max", fmt.Sprintf("%d %d", quota, period)},
		{"cgroup v1", "/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", fmt.Sprint(quota)},
		{"cgroup v1", "/sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_quota_us", fmt.Sprint(quota)},
	} {
		if _, err := os.Stat(filepath.Join(c.dir, "cgroup.procs")); err != nil {
			continue // no cgroup
		}
		group := filepath.Join(c.dir, name)
		if os.Mkdir(group, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(group) }) // after the command has ended
		// Where the controller is not on for the groups of v2, the file is missing.
		if writeExisting(filepath.Join(group, c.file), c.limit) != nil {
			continue
		}
		return func(program string) *exec.Cmd {
			return exec.Command("sh", "-c", `echo $$ > "$1/cgroup.procs" && exec "$0"`, program, group)
		}, c.how
	}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		run := []string{"--scope", "--quiet", "-p", fmt.Sprintf("CPUQuota=%.0f%%", 100*share)}
		if exec.Command("systemd-run", append(run, "true")...).Run() == nil {
			return func(program string) *exec.Cmd { return exec.Command("systemd-run", append(run, program)...) }, "systemd-run"
		}
	}
	return nil, "this machine lets us make no cgroup with a CPU quota, and has no systemd that would"
}

func writeExisting(path, content string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Close())
}

// openLoop asks the questions at a constant rate, whether or not the answers
// come, over conns connections, and returns how long each answer took, sorted.
// The time of a request runs from when it was due, so that a server which stalls
// does not hide that by keeping the client from asking.
func openLoop(addr string, questions []question, rate, conns int, took time.Duration) (latencies []time.Duration, err error) {
	// The goroutine that sends sleeps in the kernel, which is more exact than
	// timers of Go, and keeps a processor of the scheduler meanwhile.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))

	total := int(float64(rate) * took.Seconds())
	latencies = make([]time.Duration, 0, total)
	free := make(chan *asker, conns)
	answered := make(chan *asker, conns)
	for range conns {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(took + patience))
		a := &asker{conn: conn, answers: bufio.NewReader(conn), asked: make(chan struct{}, 1)}
		defer close(a.asked)
		go a.run(answered)
		free <- a
	}
	collect := func(a *asker) error {
		if a.err == nil {
			latencies = append(latencies, a.latency)
			free <- a
		}
		return a.err
	}
	begin := time.Now()
	for n := range total {
		due := begin.Add(time.Duration(float64(n) / float64(rate) * 1e9))
		sleepUntil(due)
		for len(answered) > 0 {
			if err := collect(<-answered); err != nil {
				return nil, err
			}
		}
		if len(free) == 0 {
			if err := collect(<-answered); err != nil {
				return nil, err
			}
		}
		a := <-free
		a.due, a.question = due, questions[n%len(questions)]
		a.asked <- struct{}{}
		if _, err := io.WriteString(a.conn, a.question.wire()); err != nil {
			return nil, err
		}
	}
	for len(free) < conns {
		if err := collect(<-answered); err != nil {
			return nil, err
		}
	}
	slices.Sort(latencies)
	return latencies, nil
}

// sleepUntil is time.Sleep, but for its rounding up to milliseconds.
func sleepUntil(at time.Time) {
	for left := time.Until(at); left > 0; left = time.Until(at) {
		ts := syscall.NsecToTimespec(left.Nanoseconds())
		syscall.Nanosleep(&ts, nil)
	}
}

// An asker is a connection of openLoop.
type asker struct {
	conn    net.Conn
	answers *bufio.Reader
	asked   chan struct{} // holds a value when an answer is to come

	// Of one request: set by the sender before, by run after.
	due      time.Time
	question question
	latency  time.Duration
	err      error
}

// run reads and verifies an answer whenever one is to come.
func (a *asker) run(answered chan<- *asker) {
	var body bytes.Buffer
	for range a.asked {
		resp, err := http.ReadResponse(a.answers, nil)
		if err == nil {
			body.Reset()
			_, err = body.ReadFrom(resp.Body)
		}
		a.latency = time.Since(a.due)
		if err == nil {
			err = a.question.verify(resp, body.String())
		}
		if a.err = err; errors.Is(err, net.ErrClosed) {
			return // openLoop has failed, and nobody listens
		}
		answered <- a
	}
}

// percentile returns the smallest of sorted xs that p percent of them do not
// exceed.
func percentile(xs []time.Duration, p float64) time.Duration {
	n := int(float64(len(xs)) * p / 100)
	return xs[min(n, len(xs)-1)]
}
