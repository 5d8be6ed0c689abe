package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// monOutput is what run writes to standard error. A test waits for what it wants.
type monOutput struct {
	mu      sync.Mutex // guards the following
	text    string
	changed chan struct{} // closed when there is more
}

func (o *monOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text += string(p)
	if o.changed != nil {
		close(o.changed)
		o.changed = nil
	}
	return len(p), nil
}

func (o *monOutput) get() (string, <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.changed == nil {
		o.changed = make(chan struct{})
	}
	return o.text, o.changed
}

// await waits until the output matches pattern, and returns the matches.
func (o *monOutput) await(t *testing.T, pattern string) []string {
	t.Helper()
	re, timeout := regexp.MustCompile(pattern), time.After(10*time.Second)
	for {
		text, changed := o.get()
		if m := re.FindStringSubmatch(text); m != nil {
			return m
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("no %q in the log:\n%s", pattern, text)
		}
	}
}

// records returns the records so far, without their times.
func (o *monOutput) records() []string {
	text, _ := o.get()
	var records []string
	for line := range strings.Lines(text) {
		_, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		records = append(records, rest)
	}
	return records
}

// monDaemon is a run under way.
type monDaemon struct {
	*monOutput
	signals chan os.Signal
	code    chan int
}

// monStart runs with hosts on loopback at ports, on a free HTTP port.
func monStart(t *testing.T, ports []uint16, environ ...string) *monDaemon {
	t.Helper()
	var hosts, list []string
	for i, p := range ports {
		hosts = append(hosts, fmt.Sprintf("127.0.0.%d", i+1))
		list = append(list, fmt.Sprint(p))
	}
	environ = append(environ, "pg_status__hosts="+strings.Join(hosts, ","), "pg_status__pg_port="+strings.Join(list, ","),
		"pg_status__http_listen_address=127.0.0.1", "pg_status__http_port=0", "HOME="+t.TempDir())
	d := &monDaemon{new(monOutput), make(chan os.Signal, 1), make(chan int, 1)}
	go func() { d.code <- run(d.signals, environ, d) }()
	t.Cleanup(func() {
		select {
		case d.signals <- syscall.SIGTERM:
		default:
		}
	})
	return d
}

// stop sends a signal and returns the exit status.
func (d *monDaemon) stop(t *testing.T, sig os.Signal) int {
	t.Helper()
	d.signals <- sig
	select {
	case code := <-d.code:
		return code
	case <-time.After(10 * time.Second):
		text, _ := d.get()
		t.Fatalf("run goes on for 10s after %v:\n%s", sig, text)
		return 0
	}
}

// url returns the address of a path.
func (d *monDaemon) url(t *testing.T, path string) string {
	t.Helper()
	return "http://127.0.0.1:" + d.await(t, `server started address=127\.0\.0\.1 port=(\d+)`)[1] + path
}

func monGet(t *testing.T, url string) (status int, body string) {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func TestRun(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	s := newMonServer(t, monHealthy)
	d := monStart(t, []uint16{s.port})
	url := d.url(t, "/master")
	d.await(t, "state=alive")
	if status, body := monGet(t, url); status != 200 || body != "127.0.0.1" {
		t.Errorf("GET /master = %d %q; want 200 127.0.0.1", status, body)
	}
	if got := d.stop(t, syscall.SIGTERM); got != 0 {
		t.Errorf("run = %d after SIGTERM; want 0", got)
	}
	got := d.records()
	for i, r := range got {
		got[i] = regexp.MustCompile(`port=\d+`).ReplaceAllString(r, "port=N")
	}
	// What happens at the same time is logged in any order.
	slices.Sort(got[1:3])
	slices.Sort(got[len(got)-2:])
	monWantLog(t, "run", got,
		"INFO http: server started address=127.0.0.1 port=N",
		"INFO monitor: host state changed host=127.0.0.1 state=alive role=master",
		"INFO monitor: started hosts=1",
		"INFO main: received signal=SIGTERM",
		"INFO http: server stopped",
		"INFO monitor: stopped")
	// The session is ended as the protocol wants, and nothing goes on.
	for e := range s.events {
		if e == "1 terminate" {
			break
		}
		if e == "1 eof" {
			t.Fatalf("the connection to PostgreSQL ends with %q; want a Terminate message", e)
		}
	}
	s.wantAccepts(t, "run", 1)
	if _, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/master")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("connecting after the end = %v; want connection refused", err)
	}
	monEventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+1 }, // the server's
		func() string {
			return fmt.Sprintf("%d goroutines after run; %d before", runtime.NumGoroutine(), goroutines)
		})
}

func TestRunStopsOnInterrupt(t *testing.T) {
	s := newMonServer(t, monHealthy)
	d := monStart(t, []uint16{s.port})
	d.await(t, "state=alive")
	if got := d.stop(t, os.Interrupt); got != 0 {
		t.Errorf("run = %d after SIGINT; want 0", got)
	}
	d.await(t, "INFO main: received signal=SIGINT\n")
}

// A signal that comes while everything starts ends it as well.
func TestRunStopsAtOnce(t *testing.T) {
	s := newMonServer(t, monHealthy)
	for i := range 50 {
		d := monStart(t, []uint16{s.port})
		if i%2 == 0 {
			d.await(t, "server started")
		}
		if got := d.stop(t, syscall.SIGTERM); got != 0 {
			t.Errorf("run = %d; want 0", got)
		}
	}
}

// Hosts that hang do not hold up the end, whatever they are asked.
func TestRunStopsBesideBadHosts(t *testing.T) {
	frozen := newMonServer(t, func(c *monConn) { c.note("here"); c.freeze() })
	slow := newMonServer(t, func(c *monConn) {
		c.startup()
		c.accept()
		c.message()
		c.note("here")
		c.freeze()
	})
	for name, s := range map[string]*monServer{"frozen": frozen, "in a query": slow, "black hole": {port: monBlackHole(t)}} {
		d := monStart(t, []uint16{s.port}, "pg_status__query_timeout_ms=60000")
		if s.events != nil {
			for !strings.HasSuffix(<-s.events, " here") {
			}
		}
		url := d.url(t, "/ready")
		if status, body := monGet(t, url); status != 503 || body != `{"error_text": "pg_monitor is not ready"}` {
			t.Errorf("%s: GET /ready = %d %q; want 503", name, status, body)
		}
		start := time.Now()
		if got := d.stop(t, syscall.SIGTERM); got != 0 {
			t.Errorf("%s: run = %d; want 0", name, got)
		}
		if got := time.Since(start); got > grace+2*time.Second {
			t.Errorf("%s: run goes on for %v after the signal", name, got)
		}
		for _, r := range d.records() {
			if strings.Contains(r, "ERROR") || strings.Contains(r, "WARNING") {
				t.Errorf("%s: log holds %q: a check that we end is not the host's failure", name, r)
			}
		}
	}
}

// A configuration that is wrong ends it before anything listens or connects, with
// all that is wrong.
func TestRunRefusesConfiguration(t *testing.T) {
	s := newMonServer(t, monHealthy)
	port := fmt.Sprintf("pg_status__pg_port=%d", s.port)
	for _, tt := range []struct {
		name    string
		environ []string
		want    []string
	}{
		{"nothing set", nil, []string{
			"FATAL config: pg_status__hosts is not set: must be one or more host names or IP addresses, separated by commas"}},
		{"three problems and a warning, at the highest level",
			[]string{"pg_status__hosts=127.0.0.1", port, "pg_status__sleep_ms=0", "PGREQUIREAUTH=scram-sha-256", "pg_status__max_fails=x",
				"pg_status__log_level=fatal", "pg_status__slep_ms=5"},
			[]string{
				`FATAL config: pg_status__max_fails="x": must be a whole number from 0 to 1000000`,
				`FATAL config: pg_status__sleep_ms="0": must be a whole number of milliseconds from 1 to 86400000`,
				"FATAL config: PGREQUIREAUTH is set: not supported, must be unset"}},
		{"TLS", []string{"pg_status__hosts=127.0.0.1", port, "PGSSLMODE=sometimes"}, []string{
			`FATAL config: PGSSLMODE="sometimes": must be one of disable, allow, prefer, require, verify-ca, verify-full`}},
	} {
		out := new(monOutput)
		if got := run(nil, append(tt.environ, "HOME="+t.TempDir()), out); got != 1 {
			t.Errorf("%s: run = %d; want 1", tt.name, got)
		}
		monWantLog(t, tt.name, out.records(), tt.want...)
	}
	s.wantAccepts(t, "a wrong configuration", 0)
	// As JSON, where there is no FATAL.
	out := new(monOutput)
	run(nil, []string{"pg_status__log_format=json", "HOME=" + t.TempDir()}, out)
	if text, _ := out.get(); !strings.Contains(text, `"levelStr":"ERROR","component":"config","message":"pg_status__hosts is not set`) || strings.Count(text, "\n") != 1 {
		t.Errorf("log as JSON = %s; want one ERROR of config", text)
	}
}

func TestRunWarns(t *testing.T) {
	s := newMonServer(t, monHealthy)
	d := monStart(t, []uint16{s.port}, "pg_status__hosts_dc=x", "pg_status__slep_ms=5")
	d.await(t, "WARNING config: pg_status__slep_ms is unknown and ignored; did you mean pg_status__sleep_ms")
	d.await(t, "WARNING config: DC preference disabled: incomplete locality configuration; pg_status__current_dc is not set")
	if got := d.stop(t, syscall.SIGTERM); got != 0 {
		t.Errorf("run = %d; want 0: warnings do not prevent a start", got)
	}
}

func TestRunTakenPort(t *testing.T) {
	s := newMonServer(t, monHealthy)
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	out := new(monOutput)
	code := run(nil, []string{"pg_status__hosts=127.0.0.1", fmt.Sprintf("pg_status__pg_port=%d", s.port),
		"pg_status__http_listen_address=127.0.0.1", fmt.Sprintf("pg_status__http_port=%d", portOf(taken)), "HOME=" + t.TempDir()}, out)
	if code != 1 {
		t.Errorf("run = %d; want 1", code)
	}
	a := taken.Addr()
	monWantLog(t, "a taken port", out.records(),
		fmt.Sprintf("FATAL http: HTTP server failed error=listening on %s: listen tcp4 %s: bind: address already in use (errno=%d)", a, a, syscall.EADDRINUSE))
	s.wantAccepts(t, "a taken port", 0)
}

// Whatever a server does with it, no password reaches the log.
func TestPasswordIsNeverLogged(t *testing.T) {
	const password = "hunter2 'quoted\\ pässword"
	servers := []*monServer{
		newMonServer(t, func(c *monConn) {
			c.startup()
			c.password()
			c.send(monError("FATAL", "28P01", "password authentication failed for user \"postgres\""))
		}),
		newMonServer(t, func(c *monConn) { c.startup(); c.password(); c.send([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) }),
		newMonServer(t, func(c *monConn) {
			c.startup()
			c.send(monMessage('R', "\x00\x00\x00\x0aSCRAM-SHA-256\x00\x00"))
			c.message()
		}),
		newMonServer(t, func(c *monConn) { c.startup(); c.password(); c.reset() }),
		newMonServer(t, func(c *monConn) {
			c.startup()
			c.password()
			c.accept()
			c.queries(func(string) []byte { return monMasterRow })
		}),
	}
	for _, format := range []string{"text", "json"} {
		var daemons []*monDaemon
		for _, s := range servers {
			daemons = append(daemons, monStart(t, []uint16{s.port}, "pg_status__pg_password="+password,
				"pg_status__log_level=debug", "pg_status__log_format="+format, "pg_status__sleep_ms=50"))
		}
		for i, d := range daemons {
			if i == len(daemons)-1 {
				d.await(t, "checked host=")
			} else {
				d.await(t, "operation failed operation=authenticate")
			}
			d.stop(t, syscall.SIGTERM)
			text, _ := d.get()
			for _, secret := range []string{"hunter2", "quoted", "ssword"} {
				if strings.Contains(strings.ReplaceAll(text, "password authentication", ""), secret) {
					t.Errorf("the log holds the password:\n%s", text)
				}
			}
		}
	}
}

// Each dependency is one more thing to trust and to update.
func TestDependencies(t *testing.T) {
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range bytes.Lines(mod) {
		if m := regexp.MustCompile(`^(?:require)?\s+([a-z.]+/\S+) v`).FindSubmatch(line); m != nil {
			got = append(got, string(m[1]))
		}
	}
	if want := []string{"github.com/lib/pq", "golang.org/x/sys"}; !slices.Equal(got, want) {
		t.Errorf("go.mod requires %q; want %q", got, want)
	}
	if bytes.Contains(mod, []byte("replace")) || bytes.Contains(mod, []byte("tool ")) {
		t.Error("go.mod has more than its requirements")
	}
}
