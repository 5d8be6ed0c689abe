package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// replicaPaths are the endpoints that choose a replica.
var replicaPaths = []string{
	"/replica", "/sync_by_time", "/sync_by_bytes", "/sync_by_time_or_bytes", "/sync_by_time_and_bytes", "/most_sync_by_bytes",
}

// selection is the JSON answer that names node i.
func (c *cluster) selection(i int) string {
	return fmt.Sprintf(`{"host":"%s","dc":null,"geo":null,"port":%d}`, c.name(i), c.port(i))
}

// noSelection is the JSON answer when no host matches.
const noSelection = `{"host":null,"dc":null,"geo":null,"port":null}`

// lagMS matches the one value of a healthy cluster that no test can foretell.
var lagMS = regexp.MustCompile(`"lag_ms":[0-9]+,`)

func TestEndpoints(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (i int)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.waitReady()

	// fields is what /hosts and /status say of node i, the names apart.
	fields := func(i int, lsn string) string {
		return fmt.Sprintf(`"dc":null,"geo":null,"master":%t,"alive":true,"possible_dead":false,"lag_ms":N,`+
			`"sync_by_time":true,"lag_bytes":0,"sync_by_bytes":true,"lsn":"%s","port":%d,"timeline":1}`,
			i == 0, lsn, c.port(i))
	}
	until(t, func() error {
		lsn := c.lsn(0)
		var elements []string
		for i := range c.nodes {
			elements = append(elements, fmt.Sprintf(`{"host":"%s",`, c.name(i))+fields(i, lsn))
		}
		want := "[" + strings.Join(elements, ",") + "]"
		status, body, header := d.get("/hosts")
		got := lagMS.ReplaceAllString(body, `"lag_ms":N,`)
		if got != want || status != 200 || header.Get("Content-Type") != "application/json" {
			return fmt.Errorf("/hosts = %d %s %v\nwant %s", status, got, header, want)
		}
		return nil
	})
	until(t, func() error {
		_, body, header := d.get("/status?host=" + c.name(2))
		got, want := lagMS.ReplaceAllString(body, `"lag_ms":N,`), "{"+fields(2, c.lsn(0))
		if got != want || header.Get("Content-Type") != "application/json" {
			return fmt.Errorf("/status = %s %v\nwant %s", got, header, want)
		}
		return nil
	})
	if h := d.hosts(); *h[0].LagMS != 0 || *h[1].LagMS > 1000 || *h[2].LagMS > 1000 {
		t.Errorf("lag_ms of master and caught-up replicas: %v; want 0 and less than 1000", h)
	}

	// In this order: the turn starts behind the first entry, and each answer
	// that is a replica moves it.
	const plain, json = "text/plain; charset=utf-8", "application/json"
	for _, tt := range []struct {
		path, accept string
		want         string
		wantType     string
	}{
		{"/live", "", "OK", plain},
		{"/ready", "", "OK", plain},
		{"/version", "", d.version(), plain},
		{"/version", json, d.version(), plain},
		{"/master", "", c.name(0), plain},
		{"/master", "*/*", c.name(0), plain},
		{"/master", json, c.selection(0), json},
		{"/replica", "", c.name(1), plain},
		{"/replica", json, c.selection(2), json},
		{"/sync_by_time", "", c.name(1), plain},
		{"/sync_by_time", json, c.selection(2), json},
		{"/sync_by_bytes", "", c.name(1), plain},
		{"/sync_by_bytes", json, c.selection(2), json},
		{"/sync_by_time_or_bytes", "", c.name(1), plain},
		{"/sync_by_time_or_bytes", json, c.selection(2), json},
		{"/sync_by_time_and_bytes", "", c.name(1), plain},
		{"/sync_by_time_and_bytes", json, c.selection(2), json},
		{"/replica?lag_ms=60000&lag_bytes=0", "", c.name(1), plain},
		{"/replica?min_lsn=" + c.lsn(0) + "&timeline=1", "", c.name(2), plain},
		{"/replica?min_lsn=FFFFFFFF/0", json, c.selection(0), json},
		{"/replica?timeline=2", "", c.name(0), plain},
		{"/%72eplica", "", c.name(1), plain},
		{"/most_sync_by_bytes", "", c.name(1), plain},
		{"/most_sync_by_bytes", json, c.selection(1), json},
	} {
		var headers []string
		if tt.accept != "" {
			headers = []string{"Accept: " + tt.accept}
		}
		status, body, header := d.get(tt.path, headers...)
		if status != 200 || body != tt.want || header.Get("Content-Type") != tt.wantType {
			t.Errorf("GET %s, Accept %q = %d %q, %q; want 200 %q, %q", tt.path, tt.accept, status, body, header.Get("Content-Type"), tt.want, tt.wantType)
		}
	}

	// HEAD is GET without the body.
	for _, path := range []string{"/master", "/hosts", "/live", "/nowhere", "/status"} {
		getStatus, body, getHeader := d.get(path)
		status, none, header := d.do("HEAD", path, "")
		if status != getStatus || none != "" || header.Get("Content-Type") != getHeader.Get("Content-Type") {
			t.Errorf("HEAD %s = %d %q %v; want as GET: %d %v", path, status, none, header, getStatus, getHeader)
		}
		if n := header.Get("Content-Length"); path != "/hosts" && n != strconv.Itoa(len(body)) {
			t.Errorf("HEAD %s has Content-Length %s; want %d", path, n, len(body))
		}
	}
}

// version is what /version must say.
func (d *daemon) version() string {
	d.t.Helper()
	if built != "" {
		return testVersion
	}
	_, version, _ := d.get("/version")
	if !regexp.MustCompile(`^\d+\.\d+\.\d+`).MatchString(version) {
		d.t.Errorf("/version = %q; want a semantic version", version)
	}
	return version
}

func TestRequestErrors(t *testing.T) {
	c := newCluster(t, 0)
	d := startDaemon(t, c.env()...)
	d.waitReady()

	errorText := func(text string) string { return `{"error_text": "` + text + `"}` }
	type request struct {
		method, path string
		wantStatus   int
		want         string
	}
	requests := []request{
		{"GET", "/status", 400, errorText("Get parameter 'host' wasn't passed")},
		{"GET", "/status?%zz", 400, errorText("Invalid query")},
		{"GET", "/status?host=nobody", 404, ""},
		{"GET", "/", 404, ""},
		{"GET", "/nowhere", 404, ""},
		{"GET", "/master/", 404, ""},
		{"GET", "/Master", 404, ""},
		{"GET", "/./master", 404, ""},
		{"GET", "/live/../master", 404, ""},
		{"POST", "/master", 405, ""},
		{"POST", "/nowhere", 405, ""},
		{"PUT", "/live", 405, ""},
		{"DELETE", "/hosts", 405, ""},
		{"OPTIONS", "/version", 405, ""},
	}
	for _, path := range replicaPaths {
		for _, tt := range []struct{ query, name string }{
			{"lag_ms=", "lag_ms"},
			{"lag_ms=-1", "lag_ms"},
			{"lag_ms=1.5", "lag_ms"},
			{"lag_ms=18446744073709551616", "lag_ms"},
			{"lag_bytes=1e3", "lag_bytes"},
			{"lag_bytes=+1", "lag_bytes"},
			{"min_lsn=3000060", "min_lsn"},
			{"min_lsn=0/123456789", "min_lsn"},
			{"min_lsn=0/3000060;x", "min_lsn"},
			{"timeline=0", "timeline"},
			{"timeline=4294967296", "timeline"},
			{"timeline=x&lag_ms=x", "lag_ms"},
			{"timeline=x&min_lsn=x&lag_bytes=x", "lag_bytes"},
			{"timeline=x&min_lsn=x", "min_lsn"},
			{"lag_ms=x&lag_ms=1", "lag_ms"},
		} {
			requests = append(requests, request{"GET", path + "?" + tt.query, 400, errorText("Invalid " + tt.name)})
		}
		requests = append(requests, request{"GET", path + "?lag_ms=1%", 400, errorText("Invalid query")})
	}
	for _, tt := range requests {
		status, body, header := d.do(tt.method, tt.path, "", acceptJSON)
		if status != tt.wantStatus || body != tt.want {
			t.Errorf("%s %s = %d %q; want %d %q", tt.method, tt.path, status, body, tt.wantStatus, tt.want)
		}
		wantType, wantAllow := "", ""
		if tt.want != "" {
			wantType = "application/json"
		}
		if status == 405 {
			wantAllow = "GET, HEAD"
		}
		if header.Get("Content-Type") != wantType || header.Get("Allow") != wantAllow {
			t.Errorf("%s %s has %v; want Content-Type %q, Allow %q", tt.method, tt.path, header, wantType, wantAllow)
		}
	}
	// These ignore what they are not about.
	for _, path := range []string{"/master?lag_ms=x", "/hosts?lag_ms=x", "/version?timeline=x", "/live?x", "/replica?lag_ms=1&lag_ms=x", "/replica?unknown=x"} {
		if status, body, _ := d.get(path); status != 200 {
			t.Errorf("GET %s = %d %q; want 200", path, status, body)
		}
	}

	for request, want := range map[string]string{
		// A body is refused, and ends the connection, which raw waits for.
		"GET /master HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi":                            "HTTP/1.1 413 ",
		"GET /master HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n": "HTTP/1.1 413 ",
		// No redirect to the clean path.
		"GET //version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n": "HTTP/1.1 404 ",
		"nonsense\r\n\r\n": "HTTP/1.1 400 ",
		"GET /live HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n": "HTTP/1.1 431 ",
	} {
		if got := d.raw(request); !strings.HasPrefix(got, want) {
			t.Errorf("the answer to %.80q is %.200q; want %s", request, got, want)
		}
	}

	// The connections of refused requests are of use for the next, bodies apart.
	conn := d.dial()
	defer conn.Close()
	r := bufio.NewReader(conn)
	for _, path := range []string{"/nowhere", "/replica?lag_ms=x", "/master"} {
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatalf("GET %s: %v", path, err)
		}
		io.Copy(io.Discard, resp.Body)
	}
}

func TestBeforeReady(t *testing.T) {
	d := startDaemon(t, append(envFor(blackHole(t).addr()), "pg_status__query_timeout_ms=1500")...)
	const notReady = `{"error_text": "pg_monitor is not ready"}`
	for _, path := range append([]string{"/ready", "/master", "/hosts", "/status", "/status?host=x", "/replica?lag_ms=x", "/replica?%zz"}, replicaPaths...) {
		status, body, header := d.get(path)
		if status != 503 || body != notReady || header.Get("Content-Type") != "application/json" {
			t.Errorf("before ready, GET %s = %d %q %v; want 503 %s", path, status, body, header, notReady)
		}
	}
	for _, tt := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/live", 200, "OK"},
		{"GET", "/version", 200, d.version()},
		{"GET", "/nowhere", 404, ""},
		{"POST", "/master", 405, ""},
		{"HEAD", "/ready", 503, ""},
	} {
		if status, body, _ := d.do(tt.method, tt.path, ""); status != tt.status || body != tt.body {
			t.Errorf("before ready, %s %s = %d %q; want %d %q", tt.method, tt.path, status, body, tt.status, tt.body)
		}
	}
	d.waitReady()
	if status, body, _ := d.get("/master"); status != 404 || body != "" {
		t.Errorf("GET /master = %d %q; want 404", status, body)
	}
}

func TestListenAddress(t *testing.T) {
	host := refusingHost(t)
	type row struct {
		address string
		v4, v6  bool // reachable by
	}
	rows := []row{{"", true, false}, {"0.0.0.0", true, false}, {"127.0.0.1", true, false}}
	l, err := net.Listen("tcp6", "[::1]:0")
	hasV6 := err == nil // not in every container
	if hasV6 {
		l.Close()
		rows = append(rows, row{"::1", false, true}, row{"::", false, true})
	}
	for _, tt := range append(rows, row{"*", true, hasV6}) {
		d := startDaemon(t, append(envFor(host.addr()), "pg_status__http_listen_address="+tt.address)...)
		_, port, _ := net.SplitHostPort(d.addr)
		for _, try := range []struct {
			ip   string
			want bool
		}{{"127.0.0.1", tt.v4}, {"::1", tt.v6}} {
			conn, err := net.DialTimeout("tcp", net.JoinHostPort(try.ip, port), time.Second)
			if err == nil {
				conn.Close()
			}
			if (err == nil) != try.want {
				t.Errorf("listening on %q, connecting to %s: %v; want success %v", tt.address, try.ip, err, try.want)
			}
		}
		if _, body, _ := d.get("/live"); body != "OK" {
			t.Errorf("listening on %q, /live = %q", tt.address, body)
		}
		if record, warned := d.logged("WARNING http"); warned != (tt.address == "*" && !hasV6) {
			t.Errorf("listening on %q, the log has the warning %q; the machine has IPv6: %v", tt.address, record, hasV6)
		}
		d.stop()
	}
}
