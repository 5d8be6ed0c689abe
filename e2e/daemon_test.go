package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A daemon is a running pg-status.
type daemon struct {
	t      *testing.T
	cmd    *exec.Cmd
	pid    int
	addr   string // host:port of its HTTP server
	client *http.Client
	stderr *logReader
	env    []string
	exited chan struct{} // closed when it has ended
}

// startDaemon starts pg-status and returns when it serves HTTP, which is before
// it is ready. Its environment is env and PATH, nothing else; a later entry of a
// name wins. It takes a free port unless env has one. It is stopped with the
// test: see stop.
func startDaemon(t *testing.T, env ...string) *daemon {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Env = daemonEnv(env)
	return startCommand(t, cmd)
}

// daemonEnv completes the environment of a pg-status.
func daemonEnv(env []string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH"), "pg_status__http_port=0"}, env...)
}

// startCommand is startDaemon for a command that the caller has prepared, all
// but its standard error.
func startCommand(t *testing.T, cmd *exec.Cmd) *daemon {
	t.Helper()
	d := launchCommand(t, cmd)
	until(t, func() error {
		m := started.FindStringSubmatch(d.logs())
		if m != nil {
			d.addr = reachable(m[1], m[2])
			return nil
		}
		if !d.running() {
			t.Fatalf("pg-status ended with status %d at its start", d.exitCode())
		}
		return errors.New("pg-status did not start its server")
	})
	return d
}

// launchCommand is startCommand without waiting for the record that names the
// port: the caller sets addr.
func launchCommand(t *testing.T, cmd *exec.Cmd) *daemon {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = w
	cmd.Dir = "/"
	dieWithUs(cmd, syscall.SIGKILL)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	d := &daemon{
		t: t, cmd: cmd, pid: cmd.Process.Pid, env: cmd.Env,
		stderr: newLogReader(r),
		exited: make(chan struct{}),
		client: &http.Client{
			Transport:     &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Timeout:       patience,
		},
	}
	go func() {
		cmd.Wait()
		close(d.exited)
	}()
	t.Cleanup(d.cleanUp)
	return d
}

// started matches the record of an HTTP server's start, in either format.
var started = regexp.MustCompile(`server started address=(\S+) port=(\d+)`)

// reachable returns where to connect to a server that listens at address, which
// may be a wildcard.
func reachable(address, port string) string {
	if ip := net.ParseIP(address); ip == nil || ip.Equal(net.IPv4zero) {
		address = "127.0.0.1"
	} else if ip.IsUnspecified() {
		address = "::1"
	}
	return net.JoinHostPort(address, port)
}

// runDaemon runs a pg-status that ends by itself, and returns its exit status
// and what it wrote. It has nothing to serve, so it must end within patience.
func runDaemon(t *testing.T, env []string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Env = daemonEnv(env)
	cmd.Dir = "/"
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	dieWithUs(cmd, syscall.SIGKILL)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	cmd.Wait()
	if !late.Stop() {
		t.Fatalf("pg-status is still running after %v; its log:\n%s", patience, &errs)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// startDaemonExpectingFailure runs a pg-status that must refuse to start, with
// exit status 1 and nothing on its standard output, and returns its log.
func startDaemonExpectingFailure(t *testing.T, env ...string) (logs string) {
	t.Helper()
	status, stdout, stderr := runDaemon(t, env)
	if status != 1 || stdout != "" {
		t.Errorf("pg-status with %q: exit status %d, output %q; want 1 and none; its log:\n%s", env, status, stdout, stderr)
	}
	return stderr
}

// running reports whether the process is.
func (d *daemon) running() bool {
	select {
	case <-d.exited:
		return false
	default:
		return true
	}
}

// exitCode returns the exit status, -1 for a death by signal, once the process
// has ended. It waits for that for no longer than patience.
func (d *daemon) exitCode() int {
	d.t.Helper()
	select {
	case <-d.exited:
	case <-time.After(patience):
		d.t.Fatalf("pg-status is still running after %v", patience)
	}
	return d.cmd.ProcessState.ExitCode()
}

// signal sends sig to the process.
func (d *daemon) signal(sig syscall.Signal) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(sig); err != nil {
		d.t.Fatal(err)
	}
}

// stop ends the process by SIGTERM, unless it has ended, and checks that it
// exits with 0. Every daemon is stopped at the end of its test; call it to have
// that earlier.
func (d *daemon) stop() {
	d.t.Helper()
	if d.running() {
		d.cmd.Process.Signal(syscall.SIGTERM)
	}
	if code := d.exitCode(); code != 0 {
		d.t.Errorf("pg-status ended with status %d; want 0", code)
	}
}

// kill ends the process by SIGKILL. The checks of stop are then not made.
func (d *daemon) kill() {
	d.cmd.Process.Kill()
	<-d.exited
}

func (d *daemon) cleanUp() {
	d.client.CloseIdleConnections()
	killed := !d.running() && d.cmd.ProcessState.ExitCode() == -1
	if !killed {
		d.stop()
	}
	if d.running() { // stop has complained
		d.kill()
	}
	logs := d.stderr.finish()
	for _, kv := range d.env {
		if secret, ok := strings.CutPrefix(kv, "pg_status__pg_password="); ok && len(secret) > 8 && strings.Contains(logs, secret) {
			d.t.Errorf("the log holds the password %s", secret)
		}
	}
	if d.t.Failed() {
		d.t.Logf("log of pg-status, process %d, its end:\n%s", d.pid, tail(logs, 200))
	}
}

// logs returns what the process has logged so far.
func (d *daemon) logs() string { return d.stderr.String() }

// logged reports whether a record so far holds all parts, and returns the first
// one that does.
func (d *daemon) logged(parts ...string) (record string, ok bool) {
	for line := range strings.Lines(d.logs()) {
		ok := true
		for _, part := range parts {
			ok = ok && strings.Contains(line, part)
		}
		if ok {
			return strings.TrimSuffix(line, "\n"), true
		}
	}
	return "", false
}

// waitLogged waits for a record that holds all parts, and returns it.
func (d *daemon) waitLogged(parts ...string) string {
	d.t.Helper()
	var record string
	until(d.t, func() error {
		var ok bool
		if record, ok = d.logged(parts...); !ok {
			return fmt.Errorf("no log record has %q", parts)
		}
		return nil
	})
	return record
}

// A logReader collects what is written to a pipe. It can be told to stop
// reading, so that the pipe fills.
type logReader struct {
	pipe *os.File
	done chan struct{} // closed when there is no more to read

	mu      sync.Mutex // guards the following
	buf     bytes.Buffer
	stalled chan struct{} // nil, or closed when reading may go on
}

func newLogReader(pipe *os.File) *logReader {
	r := &logReader{pipe: pipe, done: make(chan struct{})}
	go r.run()
	return r
}

func (r *logReader) run() {
	defer close(r.done)
	chunk := make([]byte, 4096)
	for {
		n, err := r.pipe.Read(chunk)
		r.mu.Lock()
		r.buf.Write(chunk[:n])
		stalled := r.stalled
		r.mu.Unlock()
		if err != nil {
			return
		}
		if stalled != nil {
			<-stalled
		}
	}
}

func (r *logReader) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.buf.String()
}

func (r *logReader) stall() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stalled == nil {
		r.stalled = make(chan struct{})
	}
}

func (r *logReader) resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stalled != nil {
		close(r.stalled)
		r.stalled = nil
	}
}

// finish returns everything, once the writer has ended.
func (r *logReader) finish() string {
	r.resume()
	select {
	case <-r.done:
	case <-time.After(time.Second): // a child of the process may hold the pipe
	}
	r.pipe.Close()
	return r.String()
}

// stallLogs stops reading the process's standard error, a pipe, which then
// fills, but for one more read. resumeLogs reads on.
func (d *daemon) stallLogs()  { d.stderr.stall() }
func (d *daemon) resumeLogs() { d.stderr.resume() }

// closeLogs closes the reading end of the process's standard error, so that
// writing to it raises SIGPIPE.
func (d *daemon) closeLogs() { d.stderr.pipe.Close() }

// get requests path, which is sent as it is written here, bad escapes included,
// over a kept connection. Headers are as "Name: value". A path that begins with
// two slashes takes raw.
func (d *daemon) get(path string, headers ...string) (status int, body string, header http.Header) {
	d.t.Helper()
	return d.do("GET", path, "", headers...)
}

// do is get for another method, and with a body unless that is empty.
func (d *daemon) do(method, path, body string, headers ...string) (status int, answer string, header http.Header) {
	d.t.Helper()
	status, answer, header, err := d.try(method, path, body, headers...)
	if err != nil {
		d.t.Fatal(err)
	}
	return status, answer, header
}

// try is do for other goroutines than the test's.
func (d *daemon) try(method, path, body string, headers ...string) (status int, answer string, header http.Header, err error) {
	req := &http.Request{
		Method: method,
		URL:    &url.URL{Scheme: "http", Host: d.addr, Opaque: path},
		Header: http.Header{},
		Host:   d.addr,
	}
	if body != "" {
		req.Body = io.NopCloser(strings.NewReader(body))
		req.ContentLength = int64(len(body))
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), resp.Header, err
}

// acceptJSON is the header by which get asks for JSON.
const acceptJSON = "Accept: application/json"

// raw sends bytes over a connection of their own, and returns everything that
// comes back until the server closes it.
func (d *daemon) raw(request string) string {
	d.t.Helper()
	conn := d.dial()
	defer conn.Close()
	if _, err := io.WriteString(conn, request); err != nil {
		d.t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	// A reset may follow an answer when the server has not read all we sent.
	if err != nil && (len(answer) == 0 || errors.Is(err, os.ErrDeadlineExceeded)) {
		d.t.Fatalf("after %.200q: %v", answer, err)
	}
	return string(answer)
}

// dial connects to the HTTP server. Reads and writes that take longer than
// patience fail.
func (d *daemon) dial() net.Conn {
	d.t.Helper()
	conn, err := net.Dial("tcp", d.addr)
	if err != nil {
		d.t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// eventually waits for the text answer of path to be want: a host's name, or
// nothing, as with 404.
func (d *daemon) eventually(path, want string) {
	d.t.Helper()
	d.eventuallyFunc(path, want, func(_ int, body string) bool { return body == want })
}

// eventuallyFunc waits for an answer of path that ok accepts. want says in words
// what that is.
func (d *daemon) eventuallyFunc(path, want string, ok func(status int, body string) bool) {
	d.t.Helper()
	until(d.t, func() error {
		status, body, _ := d.get(path)
		if !ok(status, body) {
			return fmt.Errorf("%s = %d %q; want %q", path, status, body, want)
		}
		return nil
	})
}

// waitReady waits for /ready to say so.
func (d *daemon) waitReady() {
	d.t.Helper()
	d.eventually("/ready", "OK")
}

// hostStatus is an element of /hosts.
type hostStatus struct {
	Host         string  `json:"host"`
	DC           *string `json:"dc"`
	Geo          *string `json:"geo"`
	Master       bool    `json:"master"`
	Alive        bool    `json:"alive"`
	PossibleDead bool    `json:"possible_dead"`
	LagMS        *int64  `json:"lag_ms"`
	SyncByTime   bool    `json:"sync_by_time"`
	LagBytes     *int64  `json:"lag_bytes"`
	SyncByBytes  bool    `json:"sync_by_bytes"`
	LSN          *string `json:"lsn"`
	Port         int     `json:"port"`
	Timeline     *int64  `json:"timeline"`
}

// String shows h as JSON, for messages of tests.
func (h hostStatus) String() string {
	b, _ := json.Marshal(h)
	return string(b)
}

// dead and possiblyDead tell the states of a host apart; it is fine in neither.
func (h hostStatus) dead() bool         { return !h.Alive }
func (h hostStatus) possiblyDead() bool { return h.Alive && h.PossibleDead }
func (h hostStatus) fine() bool         { return h.Alive && !h.PossibleDead }

// hosts returns what /hosts says, in the order of the configuration. A field
// that we do not know fails the test.
func (d *daemon) hosts() []hostStatus {
	d.t.Helper()
	status, body, _ := d.get("/hosts")
	if status != 200 {
		d.t.Fatalf("/hosts = %d %q", status, body)
	}
	var hosts []hostStatus
	dec := json.NewDecoder(strings.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&hosts); err != nil {
		d.t.Fatalf("/hosts = %q: %v", body, err)
	}
	return hosts
}

// eventuallyHost waits for host i of /hosts to be as ok wants it, which want
// says in words, and returns it. A dead host has nil for its values.
func (d *daemon) eventuallyHost(i int, want string, ok func(hostStatus) bool) hostStatus {
	d.t.Helper()
	d.waitReady()
	var h hostStatus
	until(d.t, func() error {
		if h = d.hosts()[i]; !ok(h) {
			return fmt.Errorf("host %d is %v; want it %s", i, h, want)
		}
		return nil
	})
	return h
}

// kB returns a value of /proc/<pid>/status in kB, such as VmRSS.
func (d *daemon) kB(name string) int {
	d.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.pid))
	if err != nil {
		d.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			if err != nil {
				d.t.Fatal(err)
			}
			return n
		}
	}
	d.t.Fatalf("/proc/%d/status has no %s", d.pid, name)
	return 0
}

// fds returns how many file descriptors the process has open, and threads how
// many threads it has.
func (d *daemon) fds() int     { return d.entries("fd") }
func (d *daemon) threads() int { return d.entries("task") }

func (d *daemon) entries(dir string) int {
	d.t.Helper()
	names, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(d.pid), dir))
	if err != nil {
		d.t.Fatal(err)
	}
	return len(names)
}

// recordTime returns the timestamp of a record in text format.
func recordTime(t *testing.T, record string) time.Time {
	t.Helper()
	stamp, _, _ := strings.Cut(record, " ")
	at, err := time.Parse("2006-01-02T15:04:05.000Z", stamp)
	if err != nil {
		t.Fatal(err)
	}
	return at
}
