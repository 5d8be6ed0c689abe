package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// httpServer returns a server of version 1.2.3 over a table that nobody fills but
// the test. Limits are the defaults. Demand for checks stays in the wake channels
// of the watchers.
func httpServer(hosts ...hostConfig) *server {
	c := &config{hosts: hosts, maxFails: 3, syncMaxLagMS: 1000, syncMaxLagBytes: 1_000_000}
	quiet := slog.New(slog.DiscardHandler)
	return newServer(newMonitor(c, quiet, make([]prober, len(hosts))), quiet, "1.2.3")
}

// httpHosts returns hosts of the given names, all at port 5432.
func httpHosts(names ...string) []hostConfig {
	var hosts []hostConfig
	for _, n := range names {
		hosts = append(hosts, hostConfig{name: n, addr: n, port: 5432})
	}
	return hosts
}

// httpTime is the moment of every check, by all clocks.
var httpTime = time.Date(2026, 8, 21, 12, 34, 56, 0, time.UTC)

// httpMaster is what a check sees of a master whose WAL ends at the given position
// of timeline 1.
func httpMaster(at lsn) observation {
	return observation{start: httpTime, end: httpTime, clock: httpTime, postmasterStart: 1, timeline: 1, write: at, insert: at}
}

// httpReplica is what a check sees of a replica on timeline 1 that has replayed up
// to the given position, with the last transaction ageMS old, or none if that is
// httpUnknown.
func httpReplica(at lsn, ageMS int) observation {
	o := observation{start: httpTime, end: httpTime, clock: httpTime, standby: true, timeline: 1, replay: at, receive: at, receiving: true}
	if ageMS != httpUnknown {
		o.lastReplay = httpTime.Add(-time.Duration(ageMS) * time.Millisecond)
	}
	return o
}

const httpUnknown = -1

// httpReadme is the cluster of the README's examples. 0/3000060 - 0/2FFFE98 is
// 0x1C8, 456 bytes.
func httpReadme() *server {
	s := httpServer(
		hostConfig{name: "host-1", addr: "host-1", port: 5432, dc: "frankfurt", geo: "europe"},
		hostConfig{name: "host-2", addr: "host-2", port: 5433, dc: "amsterdam", geo: "europe"},
		hostConfig{name: "host-3", addr: "host-3", port: 5434})
	s.monitor.table.observe(0, httpMaster(0x3000060))
	s.monitor.table.observe(1, httpReplica(0x2FFFE98, 6193))
	s.monitor.table.fail(2)
	return s
}

// httpPair is a master m at 0/10000000 and a replica r with the given lags. One
// in bytes is unknown to a replica of another timeline.
func httpPair(ms, lagBytes int) *server {
	const end = 0x10000000
	s := httpServer(httpHosts("m", "r")...)
	s.monitor.table.observe(0, httpMaster(end))
	o := httpReplica(end-lsn(max(0, lagBytes)), ms)
	if lagBytes == httpUnknown {
		o = httpReplica(end-8, ms)
		o.timeline = 2
	}
	s.monitor.table.observe(1, o)
	return s
}

// httpAsk returns the answer to a GET as its status and, behind a space, its body
// if it has one. It checks what belongs to every answer: see httpServe.
func httpAsk(t *testing.T, s *server, target string, accept ...string) string {
	t.Helper()
	r := httptest.NewRequest("GET", target, nil)
	r.Header["Accept"] = accept
	return httpServe(t, s, r)
}

// httpServe has s answer r and returns the answer as httpAsk does, after a look at
// the headers: there are those which the request, the status and the body call
// for, and no others.
func httpServe(t *testing.T, s *server, r *http.Request) string {
	t.Helper()
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	body := w.Body.String()
	want := http.Header{"Content-Length": {strconv.Itoa(len(body))}}
	switch {
	case body == "":
	case body[0] == '{' || body[0] == '[':
		want["Content-Type"] = []string{"application/json"}
		httpCheckJSON(t, body)
	default:
		want["Content-Type"] = []string{"text/plain; charset=utf-8"}
	}
	if w.Code == 405 {
		want["Allow"] = []string{"GET, HEAD"}
	}
	if r.ContentLength != 0 {
		want["Connection"] = []string{"close"}
	}
	if got := w.Header(); !maps.EqualFunc(got, want, slices.Equal[[]string]) {
		t.Errorf("%s %s = %d %q with headers %v; want %v", r.Method, r.URL, w.Code, body, got, want)
	}
	return strings.TrimSuffix(fmt.Sprintf("%d %s", w.Code, body), " ")
}

// httpInvalid is the answer to a value that is none.
func httpInvalid(name string) string { return `400 {"error_text": "Invalid ` + name + `"}` }

const (
	httpNotReady = `503 {"error_text": "pg_monitor is not ready"}`
	httpNobody   = `404 {"host":null,"dc":null,"geo":null,"port":null}`
)

// The routes that return a replica, and all of them.
var (
	httpReplicaRoutes = []string{"/replica", "/sync_by_time", "/sync_by_bytes",
		"/sync_by_time_or_bytes", "/sync_by_time_and_bytes", "/most_sync_by_bytes"}
	httpRoutes = append([]string{"/master", "/hosts", "/status", "/check", "/version", "/live", "/ready"}, httpReplicaRoutes...)
)

func TestEndpoints(t *testing.T) {
	const (
		host1 = `200 {"host":"host-1","dc":"frankfurt","geo":"europe","port":5432}`
		host2 = `200 {"host":"host-2","dc":"amsterdam","geo":"europe","port":5433}`

		state1 = `"dc":"frankfurt","geo":"europe","master":true,"alive":true,"possible_dead":false,"lag_ms":0,"sync_by_time":true,` +
			`"lag_bytes":0,"sync_by_bytes":true,"lsn":"0/3000060","port":5432,"timeline":1}`
		state2 = `"dc":"amsterdam","geo":"europe","master":false,"alive":true,"possible_dead":false,"lag_ms":6193,"sync_by_time":false,` +
			`"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5433,"timeline":1}`
		state3 = `"dc":null,"geo":null,"master":false,"alive":false,"possible_dead":true,"lag_ms":null,"sync_by_time":false,` +
			`"lag_bytes":null,"sync_by_bytes":false,"lsn":null,"port":5434,"timeline":null}`
		hosts = `200 [{"host":"host-1",` + state1 + `,{"host":"host-2",` + state2 + `,{"host":"host-3",` + state3 + `]`
	)
	s := httpReadme()
	for _, tt := range []struct{ target, text, json string }{
		{"/master", "200 host-1", host1},
		{"/replica", "200 host-2", host2},
		{"/sync_by_time", "200 host-1", host1}, // 6193 ms are too many: the master
		{"/sync_by_bytes", "200 host-2", host2},
		{"/sync_by_time_or_bytes", "200 host-2", host2},
		{"/sync_by_time_and_bytes", "200 host-1", host1},
		{"/most_sync_by_bytes", "200 host-2", host2},
		// Always JSON.
		{"/hosts", hosts, hosts},
		{"/status?host=host-1", "200 {" + state1, "200 {" + state1},
		{"/status?host=host-2", "200 {" + state2, "200 {" + state2},
		{"/status?host=host-3", "200 {" + state3, "200 {" + state3},
		{"/status", `400 {"error_text": "Get parameter 'host' wasn't passed"}`, `400 {"error_text": "Get parameter 'host' wasn't passed"}`},
		{"/replica?lag_ms=x", httpInvalid("lag_ms"), httpInvalid("lag_ms")},
		// Always text, or nothing.
		{"/version", "200 1.2.3", "200 1.2.3"},
		{"/live", "200 OK", "200 OK"},
		{"/ready", "200 OK", "200 OK"},
		{"/check?host=host-2&role=replica", "200 OK", "200 OK"},
		{"/check?host=host-2&role=master", "503 role", "503 role"},
		{"/status?host=host-4", "404", "404"},
		{"/nowhere", "404", "404"},
	} {
		if got := httpAsk(t, s, tt.target); got != tt.text {
			t.Errorf("%s =\n%s; want\n%s", tt.target, got, tt.text)
		}
		if got := httpAsk(t, s, tt.target, "application/json"); got != tt.json {
			t.Errorf("%s as JSON =\n%s; want\n%s", tt.target, got, tt.json)
		}
	}
}

func TestNoHostMatches(t *testing.T) {
	s := httpServer(httpHosts("a", "b")...)
	s.monitor.table.fail(0)
	s.monitor.table.fail(1)
	for _, path := range append([]string{"/master"}, httpReplicaRoutes...) {
		if got := httpAsk(t, s, path); got != "404" {
			t.Errorf("%s of dead hosts = %s; want 404", path, got)
		}
		if got := httpAsk(t, s, path, "application/json"); got != httpNobody {
			t.Errorf("%s of dead hosts as JSON = %s; want %s", path, got, httpNobody)
		}
	}
	// Outages do not make us unready.
	if got := httpAsk(t, s, "/ready"); got != "200 OK" {
		t.Errorf("/ready of dead hosts = %s; want 200 OK", got)
	}
}

func TestBeforeReady(t *testing.T) {
	ends := map[string]func(*server){ // of the first check of the last host
		"successfully": func(s *server) { s.monitor.table.observe(1, httpReplica(0x2FFFE98, 0)) },
		"with failure": func(s *server) { s.monitor.table.fail(1) },
	}
	for name, end := range ends {
		s := httpServer(httpHosts("m", "r")...)
		s.monitor.table.observe(0, httpMaster(0x3000060))
		for _, path := range httpRoutes {
			want := httpNotReady
			switch path {
			case "/live":
				want = "200 OK"
			case "/version":
				want = "200 1.2.3"
			}
			// Nothing is validated, and JSON is not asked for.
			for _, query := range []string{"", "?host=m", "?host=x&port=x", "?role=x", "?lag_ms=x", "?wait_ms=x", "?fallback=x", "?%zz", "?wait_ms=0"} {
				for _, accept := range []string{"application/json", "text/html"} {
					if got := httpAsk(t, s, path+query, accept); got != want {
						t.Errorf("before ready %s for %s = %s; want %s", path+query, accept, got, want)
					}
				}
			}
		}
		for path, want := range map[string]string{"/": "404", "/nowhere": "404", "/master/": "404"} {
			if got := httpAsk(t, s, path); got != want {
				t.Errorf("before ready %s = %s; want %s", path, got, want)
			}
		}
		end(s)
		for path, want := range map[string]string{"/ready": "200 OK", "/master": "200 m", "/replica?lag_ms=x": httpInvalid("lag_ms")} {
			if got := httpAsk(t, s, path); got != want {
				t.Errorf("after the first checks, ended %s, %s = %s; want %s", name, path, got, want)
			}
		}
	}
}

func TestMethods(t *testing.T) {
	unready := httpServer(httpHosts("m")...)
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "FOO"} {
		for _, target := range append([]string{"/nowhere", "/replica?lag_ms=x", "/replica?%zz"}, httpRoutes...) {
			for _, s := range []*server{httpReadme(), unready} {
				r := httptest.NewRequest("GET", target, nil)
				r.Method = method
				if got := httpServe(t, s, r); got != "405" {
					t.Errorf("%s %s = %s; want 405", method, target, got)
				}
			}
		}
		// The method is complained about before the body.
		if got := httpServe(t, unready, httptest.NewRequest(method, "/live", strings.NewReader("x"))); got != "405" {
			t.Errorf("%s /live with a body = %s; want 405", method, got)
		}
	}
}

func TestBodies(t *testing.T) {
	for _, method := range []string{"GET", "HEAD"} {
		for _, path := range append([]string{"/nowhere", "/replica?lag_ms=x"}, httpRoutes...) {
			for _, s := range []*server{httpReadme(), httpServer(httpHosts("m")...)} {
				if got := httpServe(t, s, httptest.NewRequest(method, path, strings.NewReader("x"))); got != "413" {
					t.Errorf("%s %s with a body = %s; want 413", method, path, got)
				}
				r := httptest.NewRequest(method, path, io.NopCloser(strings.NewReader("x")))
				if r.ContentLength != -1 {
					t.Fatalf("a body of unknown length has ContentLength %d", r.ContentLength)
				}
				if got := httpServe(t, s, r); got != "413" {
					t.Errorf("%s %s with a chunked body = %s; want 413", method, path, got)
				}
			}
		}
	}
}

func TestPaths(t *testing.T) {
	s := httpReadme()
	for _, tt := range []struct{ target, want string }{
		{"/master", "200 host-1"},
		{"/master?", "200 host-1"},
		{"/%6daster", "200 host-1"},
		{"/%6Daster", "200 host-1"},
		{"/sync%5Fby%5Fbytes", "200 host-2"},
		{"http://example.org/master", "200 host-1"}, // as proxies are asked
		{"/", "404"},
		{"//", "404"},
		{"//version", "404"},
		{"//example.org/version", "404"},
		{"/version/", "404"},
		{"/master/", "404"},
		{"/master%2F", "404"},
		{"/./master", "404"},
		{"/live/../master", "404"},
		{"/%2e/master", "404"},
		{"/MASTER", "404"},
		{"/Master", "404"},
		{"/masters", "404"},
		{"/mast", "404"},
		{"/master%00", "404"},
		{"/master%20", "404"},
		{"/master;x", "404"},
		{"/master%3F", "404"},
		{"/%256daster", "404"}, // decoded once
		{"/hosts/host-1", "404"},
		{"/favicon.ico", "404"},
	} {
		if got := httpAsk(t, s, tt.target, "application/json; q=0"); got != tt.want {
			t.Errorf("GET %s = %s; want %s", tt.target, got, tt.want)
		}
	}
}

// TestQueries is about what a query means; the values of parameters are those of
// TestConditions.
func TestQueries(t *testing.T) {
	s := httpPair(400, 504)
	badQuery := httpInvalid("query")
	for _, tt := range []struct{ query, want string }{
		{"", "200 r"},
		{"lag_ms=400", "200 r"},
		{"lag_ms=399", "200 m"},
		// The first of a repeated name counts.
		{"lag_ms=400&lag_ms=0", "200 r"},
		{"lag_ms=399&lag_ms=400", "200 m"},
		{"lag_ms=400&lag_ms=x", "200 r"},
		{"lag_ms=x&lag_ms=400", httpInvalid("lag_ms")},
		{"lag_ms&lag_ms=400", httpInvalid("lag_ms")},
		// A semicolon is data.
		{"lag_ms=400;lag_bytes=504", httpInvalid("lag_ms")},
		{"x=1;lag_ms=0", "200 r"},
		{";lag_ms=0", "200 r"},
		// A plus is a space.
		{"lag_ms=+400", httpInvalid("lag_ms")},
		{"lag_ms=400+", httpInvalid("lag_ms")},
		{"lag+ms=0", "200 r"},
		// No "=" is the empty value.
		{"lag_ms", httpInvalid("lag_ms")},
		{"lag_ms=", httpInvalid("lag_ms")},
		{"lag_ms=400=", httpInvalid("lag_ms")},
		// Names and values are decoded, once.
		{"lag_ms=%34%30%30", "200 r"},
		{"lag_ms=%33%39%39", "200 m"},
		{"l%61g_ms=399", "200 m"},
		{"lag_ms%3D399", "200 r"},
		{"lag_ms=%2534", httpInvalid("lag_ms")},
		{"min_lsn=0%2F1000", "200 r"},
		{"min_lsn=0%2f1000", "200 r"},
		{"x=1%26lag_ms=399", "200 r"},
		// Bad escapes, wherever they are.
		{"%zz", badQuery},
		{"%", badQuery},
		{"%4", badQuery},
		{"x=%", badQuery},
		{"x=100%", badQuery},
		{"lag_ms=%G0", badQuery},
		{"%zz=1&lag_ms=400", badQuery},
		{"lag_ms=400&x=%zz", badQuery},
		{"lag_ms=x&%zz", badQuery},
		// Nothing to see.
		{"&", "200 r"},
		{"&&lag_ms=399&&", "200 m"},
		{"=", "200 r"},
		{"=399", "200 r"},
		{"unknown=1", "200 r"},
		{"unknown", "200 r"},
		{"LAG_MS=x", "200 r"}, // names are exact
		{"lag_ms%00=x", "200 r"},
		{"host=x&port=x&role=x", "200 r"}, // of other routes
	} {
		if got := httpAsk(t, s, "/replica?"+tt.query); got != tt.want {
			t.Errorf("/replica?%s = %s; want %s", tt.query, got, tt.want)
		}
	}
}

// TestInvalidParameters: every route that returns a replica complains of every
// parameter, also of those which it ignores, and in one order.
func TestInvalidParameters(t *testing.T) {
	s := httpPair(400, 504)
	invalid := []string{"lag_ms=-1", "lag_bytes=1.5", "min_lsn=x", "timeline=0", "wait_ms=60001", "fallback=no"}
	for _, path := range httpReplicaRoutes {
		for i := range invalid {
			name, _, _ := strings.Cut(invalid[i], "=")
			// As the only one, and before all that are complained about later.
			later := slices.Clone(invalid[i:])
			slices.Reverse(later)
			for _, query := range []string{invalid[i], strings.Join(later, "&")} {
				if got, want := httpAsk(t, s, path+"?"+query), httpInvalid(name); got != want {
					t.Errorf("%s?%s = %s; want %s", path, query, got, want)
				}
			}
		}
	}
	// And others of none.
	for _, path := range []string{"/hosts", "/version", "/live", "/ready"} {
		for _, query := range append([]string{"host", "port=x"}, invalid...) {
			if got, want := httpAsk(t, s, path+"?"+query), httpAsk(t, s, path); got != want {
				t.Errorf("%s?%s = %s; want %s", path, query, got, want)
			}
		}
	}
	for _, query := range invalid {
		want := "200 m"
		if strings.HasPrefix(query, "wait_ms") {
			want = httpInvalid("wait_ms")
		}
		if got := httpAsk(t, s, "/master?"+query); got != want {
			t.Errorf("/master?%s = %s; want %s", query, got, want)
		}
	}
}

func TestAccept(t *testing.T) {
	s := httpPair(400, 504)
	const text, json = "200 m", `200 {"host":"m","dc":null,"geo":null,"port":5432}`
	for _, tt := range []struct {
		accept []string
		want   string
	}{
		{nil, text},
		{[]string{"*/*"}, text},
		{[]string{"text/plain"}, text},
		{[]string{"application/json"}, json},
		{[]string{"application/json;q=0"}, text},
		{[]string{"text/html", "application/json"}, json}, // two headers
	} {
		if got := httpAsk(t, s, "/master", tt.accept...); got != tt.want {
			t.Errorf("/master with Accept %q = %s; want %s", tt.accept, got, tt.want)
		}
	}
}

// TestHTTPThresholds: the global ones are 1000 ms and 1000000 bytes.
func TestHTTPThresholds(t *testing.T) {
	const unknown = httpUnknown
	for _, tt := range []struct {
		target       string
		ms, lagBytes int // of the replica
		want         string
	}{
		// No constraint where nothing is given.
		{"/replica", 5_000_000, 100_000_000, "r"},
		{"/replica", unknown, unknown, "r"},
		{"/replica?lag_ms=500", 500, unknown, "m"},
		{"/replica?lag_ms=500", 501, 8, "m"},
		{"/replica?lag_ms=500", unknown, 8, "m"},
		{"/replica?lag_bytes=500", unknown, 500, "r"},
		{"/replica?lag_bytes=500", 1, 501, "m"},
		{"/replica?lag_bytes=500", 1, unknown, "m"},
		{"/replica?lag_ms=500&lag_bytes=500", 500, 500, "r"},
		{"/replica?lag_ms=500&lag_bytes=500", 501, 500, "m"},
		{"/replica?lag_ms=500&lag_bytes=500", 500, 501, "m"},
		{"/replica?lag_ms=0&lag_bytes=0", 0, 0, "r"},
		{"/replica?lag_ms=0", 1, 8, "m"},
		{"/replica?lag_ms=18446744073709551615", unknown, 8, "m"}, // meets no threshold
		{"/replica?lag_bytes=18446744073709551615", 1, unknown, "m"},

		{"/sync_by_time", 1000, 100_000_000, "r"},
		{"/sync_by_time", 1000, unknown, "m"},
		{"/sync_by_time", 1001, 8, "m"},
		{"/sync_by_time", unknown, 8, "m"},
		{"/sync_by_time?lag_ms=2000", 2000, 8, "r"},
		{"/sync_by_time?lag_ms=2000", 2001, 8, "m"},
		{"/sync_by_time?lag_ms=500", 501, 8, "m"},
		{"/sync_by_time?lag_bytes=0", 1000, 8, "r"}, // no effect
		{"/sync_by_time?lag_bytes=0", 1001, 0, "r"}, // which has no lag at all

		{"/sync_by_bytes", 5_000_000, 1_000_000, "r"},
		{"/sync_by_bytes", unknown, 1_000_000, "r"},
		{"/sync_by_bytes", 1, 1_000_001, "m"},
		{"/sync_by_bytes", 1, unknown, "m"},
		{"/sync_by_bytes?lag_bytes=2000000", 1, 2_000_000, "r"},
		{"/sync_by_bytes?lag_bytes=2000000", 1, 2_000_001, "m"},
		{"/sync_by_bytes?lag_bytes=500", 1, 501, "m"},
		{"/sync_by_bytes?lag_ms=0", 1, 1_000_000, "r"}, // no effect

		{"/sync_by_time_or_bytes", 1000, 1_000_001, "r"},
		{"/sync_by_time_or_bytes", 1001, 1_000_000, "r"},
		{"/sync_by_time_or_bytes", 1001, 1_000_001, "m"},
		{"/sync_by_time_or_bytes", unknown, 1_000_000, "r"},
		{"/sync_by_time_or_bytes", unknown, 1_000_001, "m"},
		{"/sync_by_time_or_bytes", 1000, unknown, "m"},
		{"/sync_by_time_or_bytes", 1001, unknown, "m"},
		{"/sync_by_time_or_bytes", unknown, unknown, "m"},
		{"/sync_by_time_or_bytes?lag_ms=10", 10, 1_000_001, "r"},
		{"/sync_by_time_or_bytes?lag_ms=10", 11, 1_000_000, "r"}, // by bytes
		{"/sync_by_time_or_bytes?lag_ms=10", 11, 1_000_001, "m"},
		{"/sync_by_time_or_bytes?lag_bytes=10", 1001, 10, "r"},
		{"/sync_by_time_or_bytes?lag_bytes=10", 1000, 11, "r"}, // by time
		{"/sync_by_time_or_bytes?lag_bytes=10", 1001, 11, "m"},
		{"/sync_by_time_or_bytes?lag_ms=10&lag_bytes=10", 11, 11, "m"},
		{"/sync_by_time_or_bytes?lag_ms=5000", 5000, unknown, "m"},

		{"/sync_by_time_and_bytes", 1000, 1_000_000, "r"},
		{"/sync_by_time_and_bytes", 1001, 1_000_000, "m"},
		{"/sync_by_time_and_bytes", 1000, 1_000_001, "m"},
		{"/sync_by_time_and_bytes", unknown, 8, "m"},
		{"/sync_by_time_and_bytes", 1, unknown, "m"},
		{"/sync_by_time_and_bytes", unknown, unknown, "m"},
		{"/sync_by_time_and_bytes?lag_ms=2000", 2000, 1_000_000, "r"},
		{"/sync_by_time_and_bytes?lag_ms=2000", 2000, 1_000_001, "m"},
		{"/sync_by_time_and_bytes?lag_bytes=2000000", 1000, 2_000_000, "r"},
		{"/sync_by_time_and_bytes?lag_bytes=2000000", 1001, 2_000_000, "m"},
		{"/sync_by_time_and_bytes?lag_ms=2000&lag_bytes=2000000", 2000, 2_000_000, "r"},

		{"/most_sync_by_bytes", unknown, 1_000_000, "r"},
		{"/most_sync_by_bytes", 1, 1_000_001, "m"},
		{"/most_sync_by_bytes", 1, unknown, "m"},
		{"/most_sync_by_bytes?lag_bytes=2000000", 1, 2_000_000, "r"},
		{"/most_sync_by_bytes?lag_bytes=500", 1, 501, "m"},
		{"/most_sync_by_bytes?lag_ms=0", 1, 1_000_000, "r"}, // no effect
	} {
		if got, want := httpAsk(t, httpPair(tt.ms, tt.lagBytes), tt.target), "200 "+tt.want; got != want {
			t.Errorf("%s of a replica with lags %d ms, %d bytes = %s; want %s", tt.target, tt.ms, tt.lagBytes, got, want)
		}
	}
}

// TestHTTPReadYourWrites: a replica r has replayed 0/2FFFE98, a master m has written
// 0/3000060 on timeline 1.
func TestHTTPReadYourWrites(t *testing.T) {
	pair := func(of timeline) *server {
		s := httpServer(httpHosts("m", "r")...)
		s.monitor.table.observe(0, httpMaster(0x3000060))
		o := httpReplica(0x2FFFE98, 10)
		o.timeline = of
		s.monitor.table.observe(1, o)
		return s
	}
	for _, tt := range []struct {
		query    string
		timeline timeline // of the replica
		want     string
	}{
		{"min_lsn=0/2FFFE98", 1, "r"},
		{"min_lsn=0/2fffe98", 1, "r"},
		{"min_lsn=00000000/02FFFE98", 1, "r"},
		{"min_lsn=0/2FFFE99", 1, "m"},
		{"min_lsn=0/3000060", 1, "m"},
		{"min_lsn=1/0", 1, "m"},
		{"min_lsn=FFFFFFFF/FFFFFFFF", 1, "m"},
		{"min_lsn=0/0", 1, "r"},
		{"min_lsn=0/2FFFE98", 0, "r"}, // unknown is not different
		{"min_lsn=0/2FFFE98", 2, "m"},
		{"min_lsn=0/0", 2, "m"},
		{"timeline=1", 1, "r"},
		{"timeline=2", 1, "m"},
		{"timeline=1", 0, "m"}, // not known to be on it
		{"timeline=2", 2, "r"}, // the write was made on the master to be
		{"timeline=4294967295", 1, "m"},
		{"min_lsn=0/2FFFE98&timeline=1", 1, "r"},
		{"min_lsn=0/2FFFE99&timeline=1", 1, "m"},
		{"min_lsn=0/2FFFE98&timeline=1", 0, "m"},
		{"min_lsn=0/2FFFE98&lag_bytes=456", 1, "r"},
		{"min_lsn=0/2FFFE98&lag_bytes=455", 1, "m"},
		{"min_lsn=0/2FFFE99&lag_bytes=456", 1, "m"},
		{"min_lsn=0/2FFFE98&lag_ms=10&lag_bytes=456&timeline=1", 1, "r"},
		{"min_lsn=0/2FFFE98&lag_ms=9&lag_bytes=456&timeline=1", 1, "m"},
	} {
		if got, want := httpAsk(t, pair(tt.timeline), "/replica?"+tt.query), "200 "+tt.want; got != want {
			t.Errorf("/replica?%s of a replica on timeline %d = %s; want %s", tt.query, tt.timeline, got, want)
		}
	}
	for _, path := range httpReplicaRoutes {
		for query, want := range map[string]string{
			"min_lsn=0/2FFFE98":            "200 r",
			"min_lsn=0/2FFFE99":            "200 m",
			"timeline=1":                   "200 r",
			"timeline=2":                   "200 m",
			"min_lsn=0/2FFFE98&timeline=1": "200 r",
			"min_lsn=0/2FFFE99&timeline=1": "200 m",
		} {
			if got := httpAsk(t, pair(1), path+"?"+query); got != want {
				t.Errorf("%s?%s = %s; want %s", path, query, got, want)
			}
		}
	}
}

func TestHTTPMostSyncByBytes(t *testing.T) {
	s := httpServer(httpHosts("m", "far", "near", "same", "ill")...)
	s.monitor.table.currentDC = "here"
	s.monitor.table.hosts[1].dc = "here" // locality is not used
	s.monitor.table.observe(0, httpMaster(0x3000060))
	for i, at := range map[int]lsn{1: 0x3000000, 2: 0x3000050, 3: 0x3000050, 4: 0x3000060} {
		s.monitor.table.observe(i, httpReplica(at, 10))
	}
	s.monitor.table.fail(4) // possibly dead: only when no other matches
	for _, tt := range []struct{ target, want string }{
		{"/most_sync_by_bytes", "near"},
		{"/most_sync_by_bytes", "near"}, // no turns, and ties by order
		{"/most_sync_by_bytes?lag_bytes=15", "ill"},
		{"/most_sync_by_bytes?min_lsn=0/3000051", "ill"},
		{"/most_sync_by_bytes?min_lsn=0/3000061", "m"},
		{"/replica", "far"}, // for comparison
	} {
		if got, want := httpAsk(t, s, tt.target), "200 "+tt.want; got != want {
			t.Errorf("%s = %s; want %s", tt.target, got, want)
		}
	}
}

func TestHTTPPossiblyDead(t *testing.T) {
	s := httpServer(httpHosts("m", "r1", "r2")...)
	s.monitor.table.observe(0, httpMaster(0x3000060))
	s.monitor.table.observe(1, httpReplica(0x3000060, 0))
	s.monitor.table.observe(2, httpReplica(0x2FFFE98, 10))
	for _, tt := range []struct {
		fails                  int // of m and r1; the third is the death
		master, replica, fresh string
	}{
		{0, "200 m", "200 r1", "200 r1"},
		{1, "200 m", "200 r2", "200 r1"},
		{2, "200 m", "200 r2", "200 r1"},
		{3, "404", "200 r2", "404"},
	} {
		for n := s.monitor.table.view().hosts[0].fails; n < tt.fails; n++ {
			s.monitor.table.fail(0)
			s.monitor.table.fail(1)
		}
		for path, want := range map[string]string{"/master": tt.master, "/replica": tt.replica, "/replica?min_lsn=0/3000060": tt.fresh} {
			s.cursor.Store(0)
			if got := httpAsk(t, s, path); got != want {
				t.Errorf("%s after %d failures of m and r1 = %s; want %s", path, tt.fails, got, want)
			}
		}
	}
}

func TestHTTPFallback(t *testing.T) {
	for _, tt := range []struct {
		master   bool
		replica  int // 2 matches, 1 is alive only, 0 is dead
		fallback string
		want     string
	}{
		{true, 2, "", "200 r"},
		{true, 2, "fallback=master", "200 r"},
		{true, 2, "fallback=none", "200 r"},
		{true, 2, "fallback=any", "200 r"},
		{true, 1, "", "200 m"},
		{true, 1, "fallback=master", "200 m"},
		{true, 1, "fallback=none", "404"},
		{true, 1, "fallback=any", "200 m"},
		{true, 0, "", "200 m"},
		{true, 0, "fallback=none", "404"},
		{true, 0, "fallback=any", "200 m"},
		{false, 2, "", "200 r"},
		{false, 2, "fallback=none", "200 r"},
		{false, 1, "", "404"},
		{false, 1, "fallback=master", "404"},
		{false, 1, "fallback=none", "404"},
		{false, 1, "fallback=any", "200 r"},
		{false, 0, "", "404"},
		{false, 0, "fallback=any", "404"},
	} {
		s := httpServer(httpHosts("m", "r")...)
		s.monitor.table.fail(0)
		if tt.master {
			s.monitor.table.observe(0, httpMaster(0x3000060))
		}
		s.monitor.table.fail(1)
		if tt.replica > 0 {
			s.monitor.table.observe(1, httpReplica(0x2FFFE98, 10))
		}
		query := "?" + tt.fallback
		if tt.replica == 1 {
			query += "&timeline=9"
		}
		for _, path := range httpReplicaRoutes {
			if got := httpAsk(t, s, path+query); got != tt.want {
				t.Errorf("%s%s with master %v, replica %d = %s; want %s", path, query, tt.master, tt.replica, got, tt.want)
			}
			if got := httpAsk(t, s, path+query, "application/json"); tt.want == "404" && got != httpNobody {
				t.Errorf("%s%s with master %v, replica %d as JSON = %s; want %s", path, query, tt.master, tt.replica, got, httpNobody)
			}
		}
	}
	// Any: the least lagged of the healthy ones, in no turns.
	s := httpServer(httpHosts("ill", "far", "near")...)
	for i, at := range []lsn{0x3000060, 0x2000000, 0x2FFFE98} {
		o := httpReplica(at, 5000)
		o.latestEnd = 0x3000060
		s.monitor.table.observe(i, o)
	}
	s.monitor.table.fail(0)
	for range 2 {
		if got := httpAsk(t, s, "/sync_by_time?lag_ms=10&fallback=any"); got != "200 near" {
			t.Errorf("/sync_by_time?lag_ms=10&fallback=any without master = %s; want 200 near", got)
		}
	}
}

func TestHTTPStatus(t *testing.T) {
	s := httpServer(
		hostConfig{name: "db", addr: "db", port: 5432},
		hostConfig{name: "db", addr: "db", port: 5433},
		hostConfig{name: "[::1]", addr: "::1", port: 5434},
		hostConfig{name: "fe80::2", addr: "fe80::2", port: 5435},
		hostConfig{name: "10.0.0.1", addr: "10.0.0.1", port: 5436})
	for i := range s.hosts {
		s.monitor.table.fail(i)
	}
	state := func(port int) string {
		return fmt.Sprintf(`200 {"dc":null,"geo":null,"master":false,"alive":false,"possible_dead":true,"lag_ms":null,"sync_by_time":false,`+
			`"lag_bytes":null,"sync_by_bytes":false,"lsn":null,"port":%d,"timeline":null}`, port)
	}
	const noHost = `400 {"error_text": "Get parameter 'host' wasn't passed"}`
	for _, tt := range []struct{ query, want string }{
		{"host=db", state(5432)}, // the first of them
		{"host=db&port=5432", state(5432)},
		{"host=db&port=5433", state(5433)},
		{"port=5433&host=db", state(5433)},
		{"host=db&port=05433", state(5433)},
		{"host=db&port=5434", "404"},
		{"host=[::1]", state(5434)},
		{"host=%5B%3A%3A1%5D", state(5434)},
		{"host=::1", state(5434)},
		{"host=[::1]&port=5434", state(5434)},
		{"host=[::1]&port=5435", "404"},
		{"host=fe80::2", state(5435)},
		{"host=10.0.0.1", state(5436)},
		{"host=10.0.0.1:5436", "404"},
		{"host=db&host=10.0.0.1", state(5432)},
		{"host=x", "404"},
		{"host=", "404"},
		{"host", "404"},
		{"host=db+", "404"},
		{"host=db;", "404"},
		{"", noHost},
		{"Host=db", noHost},
		{"port=5432", noHost},
		{"port=x", noHost},
		{"host=%zz", httpInvalid("query")},
		{"host=db&x=%", httpInvalid("query")},
		{"host=db&port=", httpInvalid("port")},
		{"host=db&port=0", httpInvalid("port")},
		{"host=db&port=65535", "404"},
		{"host=db&port=65536", httpInvalid("port")},
		{"host=db&port=18446744073709551616", httpInvalid("port")},
		{"host=db&port=-1", httpInvalid("port")},
		{"host=db&port=+5432", httpInvalid("port")},
		{"host=db&port=0x1538", httpInvalid("port")},
		{"host=db&port=postgresql", httpInvalid("port")},
		{"host=x&port=x", httpInvalid("port")},
	} {
		if got := httpAsk(t, s, "/status?"+tt.query); got != tt.want {
			t.Errorf("/status?%s = %s; want %s", tt.query, got, tt.want)
		}
	}
}

// TestCheck: a master m at 0/10000000, a replica r with lags of 400 ms and 504
// bytes, another live master m2, a dead host d, and a replica f of another cluster.
func TestCheck(t *testing.T) {
	s := httpServer(append(httpHosts("m", "r", "m2", "d", "f"), hostConfig{name: "[::1]", addr: "::1", port: 5433})...)
	for i, o := range []observation{httpMaster(0x10000000), httpReplica(0x10000000-504, 400), httpMaster(0x10000000), {}, httpReplica(0x10000000, 0), httpReplica(0x10000000, 0)} {
		o.systemID = 7
		if i == 4 {
			o.systemID = 8
		}
		if i != 3 {
			s.monitor.table.observe(i, o)
		}
	}
	s.monitor.table.fail(3)
	const noHost = `400 {"error_text": "Get parameter 'host' wasn't passed"}`
	for _, tt := range []struct{ query, want string }{
		{"host=m&role=master", "200 OK"},
		{"host=r&role=replica", "200 OK"},
		{"host=::1&role=replica", "200 OK"},
		{"host=[::1]&port=5433&role=replica", "200 OK"},
		{"host=r&role=replica&lag_ms=400&lag_bytes=504&min_lsn=0/FFFFE08&timeline=1", "200 OK"},
		{"host=m&role=master&lag_ms=0&min_lsn=F/0&timeline=9", "200 OK"}, // for replicas
		// Not that, and why not.
		{"host=m&role=replica", "503 role"},
		{"host=r&role=master", "503 role"},
		{"host=m2&role=master", "503 role"}, // not the one to write to
		{"host=m2&role=replica", "503 role"},
		{"host=d&role=master", "503 dead"},
		{"host=d&role=replica&lag_ms=0", "503 dead"},
		{"host=f&role=replica&lag_ms=0", "503 cluster"},
		{"host=f&role=master", "503 role"},
		{"host=r&role=replica&lag_ms=399", "503 lag_ms"},
		{"host=r&role=replica&lag_bytes=503", "503 lag_bytes"},
		{"host=r&role=replica&min_lsn=0/FFFFE09", "503 min_lsn"},
		{"host=r&role=replica&timeline=2", "503 timeline"},
		{"host=r&role=replica&timeline=2&min_lsn=F/0&lag_bytes=0&lag_ms=0", "503 lag_ms lag_bytes min_lsn timeline"},
		{"host=r&role=replica&lag_ms=400&lag_bytes=0", "503 lag_bytes"},
		// Nobody.
		{"host=x&role=master", "404"},
		{"host=&role=master", "404"},
		{"host=[::1]&port=5432&role=replica", "404"},
		// Complaints, in their order.
		{"", noHost},
		{"role=x&port=x&lag_ms=x", noHost},
		{"host=x&port=0&role=x&lag_ms=x", httpInvalid("port")},
		{"host=x&role=x&lag_ms=x", httpInvalid("role")},
		{"host=m", httpInvalid("role")},
		{"host=m&role", httpInvalid("role")},
		{"host=m&role=Master", httpInvalid("role")},
		{"host=m&role=primary", httpInvalid("role")},
		{"host=x&role=master&lag_ms=x&lag_bytes=x", httpInvalid("lag_ms")},
		{"host=x&role=master&lag_bytes=x&min_lsn=x", httpInvalid("lag_bytes")},
		{"host=x&role=master&min_lsn=x&timeline=x", httpInvalid("min_lsn")},
		{"host=x&role=master&timeline=x", httpInvalid("timeline")},
		{"host=m&role=master&%zz", httpInvalid("query")},
	} {
		if got := httpAsk(t, s, "/check?"+tt.query); got != tt.want {
			t.Errorf("/check?%s = %s; want %s", tt.query, got, tt.want)
		}
	}
	// A possibly dead host is still what it was, as for /master and /replica.
	s.monitor.table.fail(1)
	s.monitor.table.fail(1)
	if got := httpAsk(t, s, "/check?host=r&role=replica"); got != "200 OK" {
		t.Errorf("/check of a possibly dead replica = %s; want 200 OK", got)
	}
	s.monitor.table.fail(1)
	if got := httpAsk(t, s, "/check?host=r&role=replica"); got != "503 dead" {
		t.Errorf("/check of a dead replica = %s; want 503 dead", got)
	}
}

// httpTurns is a list of replicas with a master in between.
func httpTurns(t *testing.T) *server {
	t.Helper()
	s := httpServer(httpHosts("r0", "m", "r2", "r3")...)
	s.monitor.table.observe(1, httpMaster(0x3000060))
	for i, at := range map[int]lsn{0: 0x3000060, 2: 0x3000060, 3: 0x2FFFE98} {
		s.monitor.table.observe(i, httpReplica(at, 10))
	}
	return s
}

func TestHTTPRoundRobin(t *testing.T) {
	s := httpTurns(t)
	for i, tt := range []struct{ target, want string }{
		{"/replica", "200 r2"}, // behind the first entry
		{"/replica", "200 r3"},
		{"/replica", "200 r0"},
		{"/replica", "200 r2"},
		// One turn for all routes.
		{"/sync_by_bytes", "200 r3"},
		{"/sync_by_time", "200 r0"},
		{"/sync_by_time_or_bytes", "200 r2"},
		{"/sync_by_time_and_bytes", "200 r3"},
		// What returns no replica, or the most synchronous one, moves nothing.
		{"/master", "200 m"},
		{"/replica?timeline=9", "200 m"},
		{"/replica?timeline=9&fallback=none", "404"},
		{"/replica?lag_ms=x", httpInvalid("lag_ms")},
		{"/most_sync_by_bytes", "200 r0"},
		{"/most_sync_by_bytes", "200 r0"},
		{"/nowhere", "404"},
		{"/replica", "200 r0"},
		// Those that match take turns; then all go on behind the last of them.
		{"/replica?min_lsn=0/3000060", "200 r2"},
		{"/replica?min_lsn=0/3000060", "200 r0"},
		{"/replica?min_lsn=0/3000060", "200 r2"},
		{"/replica", "200 r3"},
	} {
		if got := httpAsk(t, s, tt.target); got != tt.want {
			t.Errorf("request %d, %s = %s; want %s", i, tt.target, got, tt.want)
		}
	}
	// HEAD is a request as GET is.
	r := httptest.NewRequest("HEAD", "/replica", nil)
	s.ServeHTTP(httptest.NewRecorder(), r)
	if got := httpAsk(t, s, "/replica"); got != "200 r2" {
		t.Errorf("/replica after a HEAD that took r0's turn = %s; want 200 r2", got)
	}
	// The first entry comes last if it is the only replica or not.
	s = httpServer(httpHosts("r0", "r1")...)
	s.monitor.table.observe(0, httpReplica(0x3000060, 0))
	s.monitor.table.observe(1, httpReplica(0x3000060, 0))
	for i, want := range []string{"200 r1", "200 r0", "200 r1"} {
		if got := httpAsk(t, s, "/replica"); got != want {
			t.Errorf("request %d of two replicas, /replica = %s; want %s", i, got, want)
		}
	}
}

func TestHTTPRoundRobinInLocality(t *testing.T) {
	s := httpServer(httpHosts("m", "here1", "near", "here2", "away")...)
	tab := s.monitor.table
	tab.currentDC, tab.currentGeo = "dc", "geo"
	for i, h := range []hostConfig{{}, {dc: "dc", geo: "geo"}, {dc: "x", geo: "geo"}, {dc: "dc", geo: "geo"}, {dc: "x", geo: "x"}} {
		tab.hosts[i].dc, tab.hosts[i].geo = h.dc, h.geo
	}
	tab.observe(0, httpMaster(0x3000060))
	for i, at := range map[int]lsn{1: 0x3000000, 2: 0x3000040, 3: 0x3000000, 4: 0x3000060} {
		tab.observe(i, httpReplica(at, 10))
	}
	for i, tt := range []struct{ target, want string }{
		{"/replica", "200 here1"},
		{"/replica", "200 here2"},
		{"/replica", "200 here1"},
		{"/sync_by_time_and_bytes", "200 here2"},
		{"/replica?min_lsn=0/3000040", "200 near"},
		{"/replica?min_lsn=0/3000060", "200 away"},
		{"/replica?min_lsn=0/3000061", "200 m"},
		{"/most_sync_by_bytes", "200 away"},
	} {
		if got := httpAsk(t, s, tt.target); got != tt.want {
			t.Errorf("request %d, %s = %s; want %s", i, tt.target, got, tt.want)
		}
	}
}

func TestRoundRobinIsExact(t *testing.T) {
	const clients, each = 64, 150 // 9600 answers, 3200 of each replica
	s := httpTurns(t)
	paths := []string{"/replica", "/sync_by_time", "/sync_by_bytes", "/replica?lag_ms=10"}
	var mu sync.Mutex
	counts := make(map[string]int)
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			mine := make(map[string]int)
			for n := range each {
				w := httptest.NewRecorder()
				s.ServeHTTP(w, httptest.NewRequest("GET", paths[(c+n)%len(paths)], nil))
				mine[w.Body.String()]++
				s.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/replica?timeline=9", nil))
			}
			mu.Lock()
			defer mu.Unlock()
			for name, n := range mine {
				counts[name] += n
			}
		})
	}
	wg.Wait()
	if want := map[string]int{"r0": 3200, "r2": 3200, "r3": 3200}; !maps.Equal(counts, want) {
		t.Errorf("%d concurrent requests were answered %v; want %v", clients*each, counts, want)
	}
}

func TestFallbackRecord(t *testing.T) {
	s := httpPair(400, 504)
	for _, tt := range []struct{ target, want string }{
		{"/replica", ""},
		{"/replica?timeline=9&fallback=none", ""},
		{"/replica?lag_ms=x", ""},
		{"/master", ""},
		{"/hosts", ""},
		{"/replica?timeline=9", "DEBUG selection: master returned instead of replica context=/replica\n"},
		{"/replica?timeline=9&fallback=any", "DEBUG selection: master returned instead of replica context=/replica\n"},
		{"/sync_by_time?timeline=9", "DEBUG selection: master returned instead of replica context=/sync_by_time\n"},
		{"/sync_by_bytes?timeline=9", "DEBUG selection: master returned instead of replica context=/sync_by_bytes\n"},
		{"/sync_by_time_or_bytes?timeline=9", "DEBUG selection: master returned instead of replica context=/sync_by_time_or_bytes\n"},
		{"/sync_by_time_and_bytes?timeline=9", "DEBUG selection: master returned instead of replica context=/sync_by_time_and_bytes\n"},
		{"/most_sync_by_bytes?timeline=9", "DEBUG selection: master returned instead of replica context=/most_sync_by_bytes\n"},
	} {
		for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo} {
			var buf bytes.Buffer
			s.log = component(newLogger(&buf, level, false), "selection")
			httpAsk(t, s, tt.target)
			_, got, _ := strings.Cut(buf.String(), " ") // behind the time
			want := tt.want
			if level == slog.LevelInfo {
				want = ""
			}
			if got != want {
				t.Errorf("%s logged %q at level %v; want %q", tt.target, got, level, want)
			}
		}
	}
	// Without a master there is none to return.
	var buf bytes.Buffer
	s = httpServer(httpHosts("r")...)
	s.monitor.table.observe(0, httpReplica(0x3000060, 0))
	s.log = newLogger(&buf, slog.LevelDebug, false)
	httpAsk(t, s, "/replica?timeline=9")
	httpAsk(t, s, "/replica?timeline=9&fallback=any")
	if got := buf.String(); got != "" {
		t.Errorf("without a master, /replica?timeline=9 logged %q; want nothing", got)
	}
}

// httpBubble runs f as a subtest in a synctest bubble.
func httpBubble(t *testing.T, name string, f func(*testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// heldRequest is a request under way in a synctest bubble.
type heldRequest struct {
	answer string
	took   time.Duration
	done   chan struct{}
}

// httpHold starts a request. It is answered, or held, when httpHold returns.
func httpHold(ctx context.Context, t *testing.T, s *server, target string) *heldRequest {
	t.Helper()
	h := &heldRequest{done: make(chan struct{})}
	go func() {
		defer close(h.done)
		start := time.Now()
		h.answer = httpServe(t, s, httptest.NewRequest("GET", target, nil).WithContext(ctx))
		h.took = time.Since(start)
	}()
	synctest.Wait()
	return h
}

// httpDemand returns how many requests wait for a replica and for a master.
func httpDemand(s *server) [2]int32 {
	return [2]int32{s.monitor.wantReplica.Load(), s.monitor.wantMaster.Load()}
}

// TestWait: a request is made, and 40 ms later something happens. The hosts are
// a master m at 0/3000060 and a replica r at 0/2FFFE98, before ready without r.
func TestWait(t *testing.T) {
	const (
		ms   = time.Millisecond
		then = 40 * ms
	)
	type event = func(*server)
	var (
		ready    = func(s *server) { s.monitor.table.observe(1, httpReplica(0x2FFFE98, 2000)) }
		noMaster = func(s *server) {
			ready(s)
			for range 3 {
				s.monitor.table.fail(0)
			}
		}
		bothDead = func(s *server) {
			noMaster(s)
			for range 3 {
				s.monitor.table.fail(1)
			}
		}
		notReady = func(*server) {}
		nothing  = func(*server) {}
		replayed = func(s *server) { s.monitor.table.observe(1, httpReplica(0x3000060, 0)) }
		bit      = func(s *server) { s.monitor.table.observe(1, httpReplica(0x2FFFF00, 2000)) }
		promoted = func(s *server) { s.monitor.table.observe(1, httpMaster(0x3000060)) }
		failed   = func(s *server) { s.monitor.table.fail(1) }
		stop     = func(s *server) { close(s.stopping) }
		suspect  = func(s *server) { s.monitor.table.suspectHost(1) }
	)
	var none, replica, both = [2]int32{}, [2]int32{1, 0}, [2]int32{1, 1}
	for _, tt := range []struct {
		start  event
		target string
		event  event
		want   string
		took   time.Duration
		demand [2]int32 // while it is held
	}{
		// Nothing to wait for.
		{ready, "/replica?wait_ms=100", nothing, "200 r", 0, none},
		{ready, "/replica?min_lsn=0/2FFFE98&wait_ms=100", nothing, "200 r", 0, none},
		{ready, "/master?wait_ms=100", nothing, "200 m", 0, none},
		{ready, "/sync_by_bytes?wait_ms=100", nothing, "200 r", 0, none},
		{ready, "/replica?min_lsn=0/3000060", replayed, "200 m", 0, none},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=0", replayed, "200 m", 0, none},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=0&wait_ms=100", replayed, "200 m", 0, none},
		{noMaster, "/master?wait_ms=0", promoted, "404", 0, none},
		{noMaster, "/master?x=1", promoted, "404", 0, none},

		// Until a replica matches, on every route. With a limit on lag_ms, its own or
		// the global one, the master is wanted too.
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100", replayed, "200 r", then, replica},
		{ready, "/replica?lag_bytes=0&wait_ms=100", replayed, "200 r", then, replica},
		{ready, "/replica?lag_ms=10&wait_ms=100", replayed, "200 r", then, both},
		{ready, "/replica?lag_ms=10&min_lsn=0/3000060&wait_ms=100", replayed, "200 r", then, both},
		{ready, "/sync_by_time?wait_ms=100", replayed, "200 r", then, both},
		{ready, "/sync_by_time?min_lsn=0/3000060&wait_ms=100", replayed, "200 r", then, both},
		{ready, "/sync_by_bytes?lag_bytes=0&wait_ms=100", replayed, "200 r", then, replica},
		{ready, "/sync_by_bytes?min_lsn=0/3000060&lag_ms=10&wait_ms=100", replayed, "200 r", then, replica},
		{ready, "/sync_by_time_or_bytes?lag_bytes=0&wait_ms=100", replayed, "200 r", then, both},
		{ready, "/sync_by_time_and_bytes?wait_ms=100", replayed, "200 r", then, both},
		{ready, "/most_sync_by_bytes?lag_bytes=0&wait_ms=100", replayed, "200 r", then, replica},
		{ready, "/most_sync_by_bytes?min_lsn=0/3000060&wait_ms=60000", replayed, "200 r", then, replica},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100&fallback=none", replayed, "200 r", then, replica},
		{bothDead, "/replica?wait_ms=100", replayed, "200 r", then, replica},
		{noMaster, "/replica?min_lsn=0/3000060&wait_ms=100", replayed, "200 r", then, replica},

		// Not later than the deadline, and then as without it.
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100", bit, "200 m", 100 * ms, replica},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100", nothing, "200 m", 100 * ms, replica},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=60000", nothing, "200 m", time.Minute, replica},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100&fallback=none", bit, "404", 100 * ms, replica},
		{noMaster, "/replica?min_lsn=0/3000060&wait_ms=100&fallback=any", bit, "200 r", 100 * ms, replica},
		{noMaster, "/replica?min_lsn=0/3000060&wait_ms=100", bit, "404", 100 * ms, replica},
		{noMaster, "/replica?min_lsn=0/3000061&wait_ms=100", promoted, "200 r", 100 * ms, replica}, // the new master
		{bothDead, "/replica?wait_ms=100", nothing, "404", 100 * ms, replica},
		{ready, "/sync_by_time?wait_ms=100", bit, "200 m", 100 * ms, both},

		// A master.
		{noMaster, "/master?wait_ms=100", promoted, "200 r", then, replica},
		{bothDead, "/master?wait_ms=100", promoted, "200 r", then, replica},
		{noMaster, "/master?lag_ms=x&wait_ms=100", promoted, "200 r", then, replica},
		{noMaster, "/master?wait_ms=100", bit, "404", 100 * ms, replica},

		// Readiness, which needs no demand.
		{notReady, "/replica?wait_ms=100", ready, "200 r", then, none},
		{notReady, "/master?wait_ms=100", ready, "200 m", then, none},
		{notReady, "/master?wait_ms=100", failed, "200 m", then, none},
		{notReady, "/replica?wait_ms=100&fallback=none", ready, "200 r", then, none},
		{notReady, "/replica?wait_ms=30", ready, httpNotReady, 30 * ms, none},
		{notReady, "/master?wait_ms=30", ready, httpNotReady, 30 * ms, none},
		{notReady, "/replica?wait_ms=100", suspect, httpNotReady, 100 * ms, none},
		{notReady, "/replica?wait_ms=100&lag_ms=x", ready, httpInvalid("lag_ms"), then, none},
		{notReady, "/replica?wait_ms=100&lag_ms=x", nothing, httpNotReady, 100 * ms, none},
		{notReady, "/replica?min_lsn=0/3000060&wait_ms=100", ready, "200 m", 100 * ms, none},

		// Only these routes wait.
		{notReady, "/ready?wait_ms=100", ready, httpNotReady, 0, none},
		{notReady, "/hosts?wait_ms=100", ready, httpNotReady, 0, none},
		{notReady, "/status?host=r&wait_ms=100", ready, httpNotReady, 0, none},
		{notReady, "/check?host=r&role=replica&wait_ms=100", ready, httpNotReady, 0, none},
		{ready, "/check?host=r&role=replica&min_lsn=0/3000060&wait_ms=100", replayed, "503 min_lsn", 0, none},
		{notReady, "/live?wait_ms=100", ready, "200 OK", 0, none},

		// Nobody waits for a complaint.
		{ready, "/replica?min_lsn=0/3000060&wait_ms=60001", replayed, httpInvalid("wait_ms"), 0, none},
		{ready, "/replica?min_lsn=x&wait_ms=100", replayed, httpInvalid("min_lsn"), 0, none},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100&fallback=x", replayed, httpInvalid("fallback"), 0, none},
		{ready, "/replica?min_lsn=0/3000060&wait_ms=100&%zz", replayed, httpInvalid("query"), 0, none},
		{noMaster, "/master?wait_ms=x", promoted, httpInvalid("wait_ms"), 0, none},
		{noMaster, "/master?wait_ms=60001", promoted, httpInvalid("wait_ms"), 0, none},
		{noMaster, "/master?wait_ms=100&%zz", promoted, httpInvalid("query"), 0, none},
		{notReady, "/replica?wait_ms=x", ready, httpNotReady, 0, none},
		{notReady, "/master?wait_ms=x", ready, httpNotReady, 0, none},

		// Not longer than we run.
		{ready, "/replica?min_lsn=0/3000060&wait_ms=60000", stop, "200 m", then, replica},
		{noMaster, "/master?wait_ms=60000", stop, "404", then, replica},
		{notReady, "/replica?wait_ms=60000", stop, httpNotReady, then, none},
	} {
		httpBubble(t, tt.target, func(t *testing.T) {
			s := httpServer(httpHosts("m", "r")...)
			s.monitor.table.observe(0, httpMaster(0x3000060))
			tt.start(s)
			h := httpHold(t.Context(), t, s, tt.target)
			if got := httpDemand(s); got != tt.demand {
				t.Errorf("%s, held, wants replica and master for %v requests; want %v", tt.target, got, tt.demand)
			}
			time.Sleep(then)
			tt.event(s)
			<-h.done
			if h.answer != tt.want || h.took != tt.took {
				t.Errorf("%s = %s after %v; want %s after %v", tt.target, h.answer, h.took, tt.want, tt.took)
			}
			if got := httpDemand(s); got != none {
				t.Errorf("%s, answered, wants replica and master for %v requests; want none", tt.target, got)
			}
		})
	}
}

// TestWaitTwice: one deadline for readiness and for what comes after it.
func TestWaitTwice(t *testing.T) {
	for _, tt := range []struct {
		target, want string
		took         time.Duration
	}{
		{"/master?wait_ms=100", "200 r", 70 * time.Millisecond},
		{"/master?wait_ms=60", "404", 60 * time.Millisecond},
		{"/replica?min_lsn=0/3000060&wait_ms=60&fallback=any", "200 r", 60 * time.Millisecond},
		{"/replica?min_lsn=0/3000060&wait_ms=100", "200 r", 100 * time.Millisecond}, // a master is no replica
	} {
		httpBubble(t, tt.target, func(t *testing.T) {
			s := httpServer(httpHosts("m", "r")...)
			s.monitor.table.fail(0)
			h := httpHold(t.Context(), t, s, tt.target)
			time.Sleep(30 * time.Millisecond)
			s.monitor.table.observe(1, httpReplica(0x2FFFE98, 10))
			synctest.Wait()
			if got, want := httpDemand(s), [2]int32{1, 0}; got != want {
				t.Errorf("%s, held since ready, wants replica and master for %v requests; want %v", tt.target, got, want)
			}
			time.Sleep(40 * time.Millisecond)
			s.monitor.table.observe(1, httpMaster(0x3000060))
			<-h.done
			if h.answer != tt.want || h.took != tt.took {
				t.Errorf("%s = %s after %v; want %s after %v", tt.target, h.answer, h.took, tt.want, tt.took)
			}
		})
	}
}

// TestWaitersShare: one new view answers all, each in its turn.
func TestWaitersShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := httpServer(httpHosts("m", "r1", "r2")...)
		s.monitor.table.observe(0, httpMaster(0x3000060))
		s.monitor.table.observe(1, httpReplica(0x2FFFE98, 10))
		s.monitor.table.observe(2, httpReplica(0x2FFFE98, 10))
		var held []*heldRequest
		for range 10 {
			held = append(held, httpHold(t.Context(), t, s, "/replica?min_lsn=0/3000060&lag_ms=10&wait_ms=100"))
		}
		if got, want := httpDemand(s), [2]int32{10, 10}; got != want {
			t.Errorf("10 requests want replica and master for %v; want %v", got, want)
		}
		s.monitor.table.observe(1, httpReplica(0x3000060, 0))
		synctest.Wait()
		for i, h := range held {
			select {
			case <-h.done:
			default:
				t.Fatalf("request %d is still held", i)
			}
			if h.answer != "200 r1" {
				t.Errorf("request %d = %s; want 200 r1", i, h.answer)
			}
		}
		if got := httpDemand(s); got != [2]int32{} {
			t.Errorf("10 requests, answered, want replica and master for %v; want none", got)
		}
	})
}

// TestWaitWakes: the first to wait has the hosts checked at once; who does not
// wait has not.
func TestWaitWakes(t *testing.T) {
	for _, tt := range []struct {
		target string
		want   int // hosts
	}{
		{"/replica?min_lsn=0/3000060&wait_ms=1", 2},
		{"/replica?min_lsn=0/3000060", 0},
		{"/replica?min_lsn=0/3000060&wait_ms=0", 0},
		{"/replica?wait_ms=1", 0},
		{"/master?wait_ms=1", 2},
		{"/master", 0},
		{"/master?x=1", 0},
		{"/master?wait_ms=0", 0},
		{"/hosts?wait_ms=1", 0},
	} {
		httpBubble(t, tt.target, func(t *testing.T) {
			s := httpServer(httpHosts("m", "r")...)
			s.monitor.table.fail(0)
			s.monitor.table.observe(1, httpReplica(0x2FFFE98, 10))
			httpAsk(t, s, tt.target)
			woken := 0
			for _, w := range s.monitor.watchers {
				woken += len(w.wake)
			}
			if woken != tt.want {
				t.Errorf("%s woke %d hosts; want %d", tt.target, woken, tt.want)
			}
		})
	}
}

func TestWaitEndsWithClient(t *testing.T) {
	const replica, master = "/replica?min_lsn=0/3000060&lag_ms=0&wait_ms=20000", "/master?wait_ms=20000"
	none := [2]int32{}
	start := func() *server {
		s := httpServer(httpHosts("r")...)
		s.monitor.table.observe(0, httpReplica(0x2FFFE98, 10))
		return s
	}
	for _, target := range []string{replica, master} {
		httpBubble(t, "context "+target, func(t *testing.T) {
			s := start()
			ctx, cancel := context.WithCancel(t.Context())
			h := httpHold(ctx, t, s, target)
			time.Sleep(40 * time.Millisecond)
			cancel()
			<-h.done
			if want := 40 * time.Millisecond; h.took != want {
				t.Errorf("%s was held for %v; want %v", target, h.took, want)
			}
			if got := httpDemand(s); got != none {
				t.Errorf("%s, left, wants replica and master for %v requests; want none", target, got)
			}
		})
		// The escape in the path is for net/http to decode.
		odd := "/%" + strconv.FormatInt(int64(target[1]), 16) + target[2:]
		httpBubble(t, "net/http "+odd, func(t *testing.T) {
			s := start()
			conn := httpPipe(t, s)
			fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", odd)
			synctest.Wait()
			if got := httpDemand(s); got[0] != 1 {
				t.Fatalf("%s wants replica and master for %v requests", odd, got)
			}
			conn.Close()
			synctest.Wait()
			if got := httpDemand(s); got != none {
				t.Errorf("%s, left, wants replica and master for %v requests; want none", odd, got)
			}
		})
		t.Run("lane "+target, func(t *testing.T) {
			s := start()
			ls, _, err := listen("127.0.0.1", 0)
			if err != nil {
				t.Fatal(err)
			}
			fast := httpStack(t, s, &limitListener{ls[0], make(chan struct{}, 10)})
			conn := httpDial(t, ls[0].Addr().String())
			began := time.Now()
			fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", target)
			<-s.monitor.watchers[0].wake
			conn.Close()
			fast.running.Wait()
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("%s, left, was held for %v", target, took)
			}
			if got := httpDemand(s); got != none {
				t.Errorf("%s, left, wants replica and master for %v requests; want none", target, got)
			}
		})
	}
}

// TestWaitOfPipelining: a client that sends another request has not gone away.
func TestWaitOfPipelining(t *testing.T) {
	s := httpServer(httpHosts("r")...)
	s.monitor.table.observe(0, httpReplica(0x2FFFE98, 10))
	conn := httpDial(t, httpLoopback(t, s))
	began := time.Now()
	io.WriteString(conn, "GET /replica?min_lsn=0/3000060&wait_ms=200 HTTP/1.1\r\nHost: x\r\n\r\n")
	<-s.monitor.watchers[0].wake
	io.WriteString(conn, "GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	raw, err := io.ReadAll(conn)
	want := "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" +
		"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n1.2.3"
	if got := httpSorted(string(raw)); got != want || err != nil {
		t.Errorf("a request that waits and one behind it are answered\n%q, %v; want\n%q", got, err, want)
	}
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("a request that waits, with one behind it, was held for %v; want 200ms", took)
	}
}

// pipeListener gives out what is put into it, in place of a socket that a
// synctest bubble could not wait for.
type pipeListener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

func (l *pipeListener) dial() net.Conn {
	client, server := net.Pipe()
	l.conns <- server
	return client
}

// httpStack serves s on l, as main does, until the test ends.
func httpStack(t *testing.T, s *server, l net.Listener) *lanes {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	fast, web := newLanes(s, quiet), newHTTPServer(s, quiet)
	var wg sync.WaitGroup
	wg.Go(func() { fast.serve(l) })
	wg.Go(func() { web.Serve(oddListener{fast, l.Addr()}) })
	t.Cleanup(func() {
		fast.stop(time.Second)
		web.Close()
		wg.Wait()
	})
	return fast
}

// httpPipe serves s until the test ends and returns a connection to it. It is for
// synctest bubbles.
func httpPipe(t *testing.T, s *server) net.Conn {
	t.Helper()
	l := newPipeListener()
	httpStack(t, s, l)
	conn := l.dial()
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestConnectionTimes: how long a client may take to send a header, and stay.
func TestConnectionTimes(t *testing.T) {
	for _, tt := range []struct {
		name, request string
		want          time.Duration
	}{
		{"nothing", "", 10 * time.Second},
		{"half a header", "GET /live HTTP/1.1\r\nHost:", 10 * time.Second},
		{"a request", "GET /live HTTP/1.1\r\nHost: x\r\n\r\n", 10 * time.Minute},
		{"a request and a half", "GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /live", 10 * time.Second},
		// These go to net/http.
		{"an odd request", "GET /%6cive HTTP/1.1\r\nHost: x\r\n\r\n", 10 * time.Minute},
		{"an odd request and a half", "GET /%6cive HTTP/1.1\r\nHost: x\r\n\r\nGET /live", 10 * time.Second},
	} {
		httpBubble(t, tt.name, func(t *testing.T) {
			conn := httpPipe(t, httpServer(httpHosts("m")...))
			start := time.Now()
			if tt.request != "" {
				go io.WriteString(conn, tt.request)
			}
			if _, err := io.Copy(io.Discard, conn); err != nil {
				t.Errorf("reading from a connection that sent %s: %v", tt.name, err)
			}
			if got := time.Since(start); got != tt.want {
				t.Errorf("a connection that sent %s was closed after %v; want %v", tt.name, got, tt.want)
			}
		})
	}
}

// TestWithheldBody: a body that does not come is not waited for.
func TestWithheldBody(t *testing.T) {
	for _, tt := range []struct{ request, want string }{
		{"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 413 "},
		{"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n", "HTTP/1.1 413 "},
		{"GET /master HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 413 "},
		{"POST /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 405 "},
		{"POST /master HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 405 "},
	} {
		httpBubble(t, tt.request, func(t *testing.T) {
			conn := httpPipe(t, httpReadme())
			start := time.Now()
			conn.SetDeadline(start.Add(10 * time.Minute))
			io.WriteString(conn, tt.request)
			got, err := io.ReadAll(conn)
			if !strings.HasPrefix(string(got), tt.want) || err != nil {
				t.Errorf("the answer to %q = %q, %v; want %s", tt.request, got, err, tt.want)
			}
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("the connection of %q was closed after %v; want 10s at most", tt.request, took)
			}
		})
	}
}

// httpLoopback serves s over TCP until the test ends and returns its address.
func httpLoopback(t *testing.T, s *server) string {
	t.Helper()
	ls, _, err := listen("127.0.0.1", 0)
	if err != nil {
		t.Fatal(err)
	}
	httpStack(t, s, &limitListener{ls[0], make(chan struct{}, 10)})
	return ls[0].Addr().String()
}

// httpDial connects to addr, for no longer than a test should take.
func httpDial(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

// httpExchange is what a client sends on a connection, and what it gets.
type httpExchange struct {
	request string // up to the blank line, with what follows it
	want    string // but for the date
	closed  bool   // the connection, instead of waiting for another request
}

// httpWire is for a server of httpReadme.
var httpWire = func() []httpExchange {
	const (
		ok     = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
		master = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
		none   = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
		method = "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\nContent-Length: 0\r\n\r\n"
		body   = "HTTP/1.1 413 Request Entity Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
		lag    = "HTTP/1.1 400 Bad Request\r\nContent-Length: 32\r\nContent-Type: application/json\r\n\r\n"
	)
	return []httpExchange{
		{"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", ok + "OK", false},
		{"HEAD /live HTTP/1.1\r\nHost: x\r\n\r\n", ok, false},
		{"GET /master HTTP/1.1\r\nHost: x\r\n\r\n", master + "host-1", false},
		{"HEAD /master HTTP/1.1\r\nHost: x\r\n\r\n", master, false},
		{"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", master + "host-1", false},
		{"GET http://x/master HTTP/1.1\r\nHost: x\r\n\r\n", master + "host-1", false},
		{"GET /master HTTP/1.1\r\nHost: x\r\nAccept: text/html\r\naccept: application/json;v=1\r\n\r\n",
			"HTTP/1.1 200 OK\r\nContent-Length: 61\r\nContent-Type: application/json\r\n\r\n" +
				`{"host":"host-1","dc":"frankfurt","geo":"europe","port":5432}`, false},
		{"GET /master HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\nAccept: text/html\r\n\r\n",
			"HTTP/1.1 200 OK\r\nContent-Length: 61\r\nContent-Type: application/json\r\n\r\n" +
				`{"host":"host-1","dc":"frankfurt","geo":"europe","port":5432}`, false},
		{"HEAD /master HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\n\r\n",
			"HTTP/1.1 200 OK\r\nContent-Length: 61\r\nContent-Type: application/json\r\n\r\n", false},
		{"GET /replica?lag_ms=x HTTP/1.1\r\nHost: x\r\n\r\n", lag + `{"error_text": "Invalid lag_ms"}`, false},
		{"HEAD /replica?lag_ms=x HTTP/1.1\r\nHost: x\r\n\r\n", lag, false},

		// An empty body has no type.
		{"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", none, false},
		{"HEAD /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", none, false},
		{"GET //version HTTP/1.1\r\nHost: x\r\n\r\n", none, false},
		{"GET /master/ HTTP/1.1\r\nHost: x\r\n\r\n", none, false},
		{"GET /replica?timeline=9&fallback=none HTTP/1.1\r\nHost: x\r\n\r\n", none, false},
		{"POST /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", method, false},
		{"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", method, false},
		{"OPTIONS /master HTTP/1.1\r\nHost: x\r\n\r\n", method, false},
		{"get /master HTTP/1.1\r\nHost: x\r\n\r\n", method, false},

		// A body ends the connection, whatever comes behind it.
		{"POST /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi",
			"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", true},
		{"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", body, true},
		{"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhiGET /live HTTP/1.1\r\nHost: x\r\n\r\n", body, true},
		{"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n", body, true},
		{"GET /master HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", body, true},
		{"GET /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", body, true},
		{"HEAD /live HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", body, true},

		// Who asks for it gets the end.
		{"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
			"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\nContent-Type: text/plain; charset=utf-8\r\n\r\nOK", true},
	}
}()

// TestWire: over TCP, each exchange is byte for byte what it should be.
func TestWire(t *testing.T) {
	addr := httpLoopback(t, httpReadme())
	for _, tt := range httpWire {
		conn := httpDial(t, addr)
		io.WriteString(conn, tt.request)
		// What answers this can only come after the answer to the first.
		const next = "GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
		if !tt.closed {
			io.WriteString(conn, next)
		}
		raw, err := io.ReadAll(conn)
		if err != nil {
			t.Errorf("the answer to %q ends with %v after %q", tt.request, err, raw)
		}
		got := httpSorted(string(raw))
		if !tt.closed {
			var found bool
			got, found = strings.CutSuffix(got, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n1.2.3")
			if !found {
				t.Errorf("%q: the connection cannot be used again", tt.request)
			}
		}
		if got != tt.want {
			t.Errorf("the answer to %q =\n%q; want\n%q", tt.request, got, tt.want)
		}
	}
}

// httpSorted returns responses with the fields of their headers sorted, and
// without the date.
func httpSorted(responses string) string {
	var b strings.Builder
	for rest := responses; rest != ""; {
		var head string
		head, rest, _ = strings.Cut(rest, "\r\n\r\n")
		lines := strings.Split(head, "\r\n")
		lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "Date: ") })
		slices.Sort(lines[1:])
		b.WriteString(strings.Join(lines, "\r\n") + "\r\n\r\n")
		// The next one starts behind the body.
		body := rest
		if i := strings.Index(rest, "HTTP/1.1 "); i >= 0 {
			body = rest[:i]
		}
		b.WriteString(body)
		rest = rest[len(body):]
	}
	return b.String()
}

// TestRefusedByNetHTTP: what does not reach our handler is refused all the same.
func TestRefusedByNetHTTP(t *testing.T) {
	addr := httpLoopback(t, httpReadme())
	for _, tt := range []struct{ request, want string }{
		{"nonsense\r\n\r\n", "HTTP/1.1 400 "},
		{"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400 "},
		{"GET /live HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "}, // no Host
		{"GET /live HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 16<<10) + "\r\n\r\n", "HTTP/1.1 431 "},
		{"GET /live?" + strings.Repeat("x", 16<<10) + " HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 431 "},
		// Half of that is well within the bound.
		{"GET /live HTTP/1.1\r\nConnection: close\r\nHost: x\r\nX: " + strings.Repeat("x", 7<<10) + "\r\n\r\n", "HTTP/1.1 200 "},
	} {
		conn := httpDial(t, addr)
		io.WriteString(conn, tt.request)
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, tt.want) {
			t.Errorf("the answer to %.60q = %q, %v; want %s", tt.request, line, err, tt.want)
		}
	}
}

// TestHead: the headers of GET, and no body, on every route.
func TestHead(t *testing.T) {
	addr := httpLoopback(t, httpReadme())
	for _, target := range append([]string{"/nowhere", "/status?host=host-2", "/replica?%zz"}, httpRoutes...) {
		conn := httpDial(t, addr)
		r := bufio.NewReader(conn)
		var headers [2]http.Header
		for i, method := range []string{"GET", "HEAD"} {
			fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: x\r\n\r\n", method, target)
			resp, err := http.ReadResponse(r, &http.Request{Method: method})
			if err != nil {
				t.Fatalf("%s %s: %v", method, target, err)
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil || method == "HEAD" && len(body) > 0 {
				t.Errorf("%s %s has body %q, %v", method, target, body, err)
			}
			headers[i] = resp.Header
			headers[i].Del("Date")
			headers[i].Set("status", resp.Status)
		}
		if r.Buffered() > 0 {
			t.Errorf("HEAD %s has a body", target)
		}
		conn.Close()
		if !maps.EqualFunc(headers[0], headers[1], slices.Equal[[]string]) {
			t.Errorf("HEAD %s has %v; want those of GET: %v", target, headers[1], headers[0])
		}
	}
}

func TestListen(t *testing.T) {
	for _, tt := range []struct {
		address string
		want    []string // addresses that are served
	}{
		{"127.0.0.1", []string{"127.0.0.1"}},
		{"0.0.0.0", []string{"0.0.0.0"}},
		{"::1", []string{"::1"}},
		{"::", []string{"::"}},
		{"*", []string{"0.0.0.0", "::"}},
	} {
		ls, warning, err := listen(tt.address, 0)
		if err != nil || warning != "" {
			t.Errorf("listen(%q, 0) = %q, %v; want no complaint", tt.address, warning, err)
			continue
		}
		var got []string
		for _, l := range ls {
			defer l.Close()
			host, port, _ := net.SplitHostPort(l.Addr().String())
			got = append(got, host)
			if port == "0" || port != strconv.Itoa(int(portOf(ls[0]))) {
				t.Errorf("listen(%q, 0) listens on port %s; want %d", tt.address, port, portOf(ls[0]))
			}
			httpReach(t, l, map[string]string{"0.0.0.0": "127.0.0.1", "::": "::1"}[host])
			if strings.Contains(host, ":") && !httpV6Only(t, l) {
				t.Errorf("listen(%q, 0) takes IPv4 at %s", tt.address, host)
			}
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("listen(%q, 0) = %v; want %v", tt.address, got, tt.want)
		}
	}
}

// httpReach connects to l, which may be a wildcard that is reached at host.
func httpReach(t *testing.T, l net.Listener, host string) {
	t.Helper()
	addr := l.Addr().String()
	if host != "" {
		addr = net.JoinHostPort(host, strconv.Itoa(int(portOf(l))))
	}
	conn, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		t.Errorf("connecting to %v: %v", l.Addr(), err)
		return
	}
	conn.Close()
}

func httpV6Only(t *testing.T, l net.Listener) bool {
	t.Helper()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var only int
	if e := raw.Control(func(fd uintptr) { only, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	return only == 1
}

func TestListenFails(t *testing.T) {
	for _, tt := range []struct{ network, taken, address string }{
		{"tcp4", "127.0.0.1:0", "127.0.0.1"},
		{"tcp6", "[::1]:0", "::1"},
		{"tcp4", "0.0.0.0:0", "*"},
		{"tcp6", "[::]:0", "*"},
	} {
		l, err := net.Listen(tt.network, tt.taken)
		if err != nil {
			t.Fatal(err)
		}
		port := portOf(l)
		ls, warning, err := listen(tt.address, port)
		if !errors.Is(err, syscall.EADDRINUSE) || ls != nil || warning != "" {
			t.Errorf("listen(%q, the port of %v) = %v, %q, %v; want %v", tt.address, l.Addr(), ls, warning, err, syscall.EADDRINUSE)
		}
		// And the other family was let go.
		l.Close()
		ls, _, err = listen(tt.address, port)
		if err != nil {
			t.Errorf("listen(%q, a port that is free again): %v", tt.address, err)
		}
		for _, l := range ls {
			l.Close()
		}
	}
	for _, address := range []string{"203.0.113.1", "2001:db8::1"} { // of nobody
		if ls, _, err := listen(address, 0); !errors.Is(err, syscall.EADDRNOTAVAIL) {
			t.Errorf("listen(%q, 0) = %v, %v; want %v", address, ls, err, syscall.EADDRNOTAVAIL)
		}
	}
}

func TestLimitListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pipes := newPipeListener()
		l := &limitListener{pipes, make(chan struct{}, 2)}
		accepted := make(chan net.Conn)
		go func() {
			defer close(accepted)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				accepted <- c
			}
		}()
		var open []net.Conn
		// letIn has one more client dial and checks whether any is let in.
		letIn := func(when string, want bool) {
			t.Helper()
			go pipes.dial()
			synctest.Wait()
			got := false
			select {
			case c := <-accepted:
				open, got = append(open, c), true
			default:
			}
			if got != want {
				t.Fatalf("with a limit of 2, %s, a client is let in: %v; want %v", when, got, want)
			}
		}
		letIn("first", true)
		letIn("second", true)
		letIn("third", false)
		open[0].Close()
		letIn("third or fourth, after one was closed", true)
		open[0].Close()
		letIn("after one was closed twice", false)
		open[1].Close()
		letIn("after another one was closed", true)

		for _, c := range open {
			c.Close()
		}
		for range 2 { // of six clients these are still in the queue
			c := <-accepted
			c.Close()
		}
		pipes.Close()
		<-accepted
		// An Accept that fails takes no place.
		for range 3 {
			if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("Accept on a closed listener: %v", err)
			}
		}
	})
}

// httpScript returns the answers to all that a client sends, by the lanes and
// net/http behind them, or by net/http alone. It is for synctest bubbles.
func httpScript(t *testing.T, sent string, withLanes bool) string {
	t.Helper()
	s := httpReadme()
	close(s.stopping) // so that nothing waits
	l := newPipeListener()
	if withLanes {
		httpStack(t, s, l)
	} else {
		web := newHTTPServer(s, slog.New(slog.DiscardHandler))
		go web.Serve(l)
		t.Cleanup(func() { web.Close() })
	}
	conn := l.dial()
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * idleTimeout))
	if sent != "" {
		go io.WriteString(conn, sent)
	}
	answers, _ := io.ReadAll(conn) // to its end, or to the deadline
	return string(answers)
}

// FuzzWire: a client cannot tell whether a lane or net/http answers. Half a
// request, of which no more comes, may be closed with or without a complaint.
func FuzzWire(f *testing.F) {
	for _, tt := range httpWire {
		f.Add(tt.request)
		f.Add(tt.request + "GET /replica HTTP/1.1\r\nHost: x\r\n\r\nHEAD /replica HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	}
	for _, fields := range []string{"", "Host: x", "Host: x\r\nHost: x", "Host:", "Host: a b", "Host: [::1]:80", "Host: x\r\nConnection: close, x",
		"Host: x\r\nConnection: Keep-Alive", "Host: x\r\nUpgrade: h2c\r\nConnection: upgrade", "Host: x\r\n folded: x", "Host: x\r\nA : b",
		"Host: x\r\n: b", "Host: x\r\nA", "Host: x\r\nA: \x00", "Host: x\nAccept: application/json", "Host: x\r\nAccept: application/json;q=0",
		"Host: x\r\nTE: trailers", "Host: x\r\nContent-Length: 1", "Host: x\r\nExpect: x"} {
		f.Add("GET /master?a=1 HTTP/1.1\r\n" + fields + "\r\n\r\n")
	}
	// Lines may end without a carriage return, as people type them.
	f.Add("GET /live HTTP/1.1\nHost: x\n\n")
	f.Add("GET /live HTTP/1.1\r\nHost: x\n\n")
	f.Add("GET /live HTTP/1.1\nHost: x\n\nGET /live HTTP/1.1\r\n")
	f.Fuzz(func(t *testing.T, sent string) {
		synctest.Test(t, func(t *testing.T) {
			const complaint = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n400 Bad Request"
			got := strings.TrimSuffix(httpSorted(httpScript(t, sent, true)), complaint)
			want := strings.TrimSuffix(httpSorted(httpScript(t, sent, false)), complaint)
			if got != want {
				t.Errorf("to %q lanes answer\n%q; net/http\n%q", sent, got, want)
			}
		})
	})
}

// FuzzRequest has any path, query and Accept header answered.
func FuzzRequest(f *testing.F) {
	for _, target := range []string{"/", "//version", "/%6daster", "/replica?lag_ms=1;&min_lsn=0/1&timeline=1&wait_ms=5&fallback=any",
		"/status?host=host-2&port=5433", "/check?host=host-2&role=master&lag_ms=1", "/hosts?%zz", "/master?wait_ms=60000", "*", "http://x/live", "/most_sync_by_bytes?min_lsn=0%2F3000060"} {
		f.Add(target, "application/json;q=0.5, */*")
	}
	ready, unready := httpReadme(), httpServer(httpHosts("m")...)
	for _, s := range []*server{ready, unready} {
		close(s.stopping) // so that nothing waits
	}
	f.Fuzz(func(t *testing.T, target, accept string) {
		raw := "GET " + target + " HTTP/1.1\r\nHost: x\r\n\r\n"
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw)))
		if err != nil || r.ContentLength != 0 {
			return // not for our handler
		}
		r.Header["Accept"] = []string{accept}
		for s, known := range map[*server][]string{
			ready:   {"200", "400", "404", "503"}, // the last of /check
			unready: {"200", "404", "503"},
		} {
			got, _, _ := strings.Cut(httpServe(t, s, r), " ")
			if !slices.Contains(known, got) {
				t.Errorf("GET %q has status %s; want one of %v", target, got, known)
			}
		}
	})
}

// httpSink is a ResponseWriter that keeps nothing.
type httpSink struct {
	header http.Header
	status int
}

func (w *httpSink) Header() http.Header         { return w.header }
func (w *httpSink) WriteHeader(status int)      { w.status = status }
func (w *httpSink) Write(b []byte) (int, error) { return len(b), nil }

// httpRepeat returns a function that makes one request of s over and over.
func httpRepeat(tb testing.TB, s *server, target, accept string) func() {
	tb.Helper()
	r := httptest.NewRequest("GET", target, nil)
	r.Header.Set("Accept", accept)
	w := &httpSink{header: make(http.Header)}
	return func() {
		clear(w.header)
		s.ServeHTTP(w, r)
		if w.status != 200 {
			tb.Fatalf("%s = %d; want 200", target, w.status)
		}
	}
}

// TestAllocations: an answer from memory leaves no garbage, so that nothing
// stops for it under load.
func TestAllocations(t *testing.T) {
	s := httpReadme()
	for _, target := range []string{
		"/master",
		"/replica",
		"/replica?min_lsn=0/2FFFE98&lag_ms=7000&lag_bytes=500",
		"/replica?min_lsn=0/2FFFE98&timeline=1&wait_ms=100&fallback=none",
		"/replica?min_lsn=0/3000060", // which the master answers
		"/sync_by_time",
		"/sync_by_time_and_bytes",
		"/most_sync_by_bytes",
		"/hosts",
		"/status?host=host-2&port=5433",
		"/check?host=host-2&role=replica&lag_ms=7000",
		"/version",
		"/live",
		"/ready",
	} {
		for _, accept := range []string{"*/*", "text/html, application/json; q=0.9"} {
			if got := testing.AllocsPerRun(100, httpRepeat(t, s, target, accept)); got != 0 {
				t.Errorf("%s for %s makes %v allocations; want 0", target, accept, got)
			}
		}
	}
}

func benchmarkHTTP(b *testing.B, target string) {
	ask := httpRepeat(b, httpReadme(), target, "*/*")
	b.ReportAllocs()
	for b.Loop() {
		ask()
	}
}

func BenchmarkMaster(b *testing.B) { benchmarkHTTP(b, "/master") }
func BenchmarkReplicaMinLSN(b *testing.B) {
	benchmarkHTTP(b, "/replica?min_lsn=0/2FFFE98&lag_ms=7000&lag_bytes=500")
}
func BenchmarkHosts(b *testing.B)  { benchmarkHTTP(b, "/hosts") }
func BenchmarkStatus(b *testing.B) { benchmarkHTTP(b, "/status?host=host-2") }
