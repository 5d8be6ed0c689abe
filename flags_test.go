package main

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// flags runs runFlags and returns what it returned and wrote.
func flags(environ []string, args ...string) (code int, done bool, stdout, stderr string) {
	var out, errs bytes.Buffer
	code, done = runFlags(args, environ, &out, &errs)
	return code, done, out.String(), errs.String()
}

func TestFlags(t *testing.T) {
	valid := []string{"pg_status__hosts=a,b", "pg_status__pg_password=hunter2"}
	for _, tt := range []struct {
		args           []string
		environ        []string
		code           int
		done           bool
		stdout, stderr string // a part of it; "" for nothing at all
	}{
		{nil, nil, 0, false, "", ""},
		{[]string{"--version"}, nil, 0, true, "pg-status " + version + "\n", ""},
		{[]string{"--help"}, nil, 0, true, "--check-config", ""},
		{[]string{"--check-config"}, valid, 0, true, "pg_status__hosts", ""},
		{[]string{"--check-config"}, nil, 1, true, "", "pg-status: error: "},
		{[]string{"--check-config"}, append(valid, "pg_status__slep_ms=5"), 0, true, "pg_status__sleep_ms", "pg-status: warning: "},
		{[]string{"--check-config"}, append(valid, "pg_status__sleep_ms=soon"), 1, true, "", "pg_status__sleep_ms"},
		{[]string{"--check-config", "x"}, valid, 2, true, "", `pg-status: unexpected argument "x" after --check-config; see pg-status --help` + "\n"},
		{[]string{"--hosts=a"}, nil, 2, true, "", `pg-status: unknown option "--hosts=a"; see pg-status --help` + "\n"},
		{[]string{"-version"}, nil, 2, true, "", "unknown option"},
		{[]string{"run"}, nil, 2, true, "", "unknown option"},
		{[]string{""}, nil, 2, true, "", "unknown option"},
	} {
		code, done, stdout, stderr := flags(tt.environ, tt.args...)
		if code != tt.code || done != tt.done {
			t.Errorf("pg-status %q = %d, %v; want %d, %v", tt.args, code, done, tt.code, tt.done)
		}
		if !strings.Contains(stdout, tt.stdout) || tt.stdout == "" && stdout != "" {
			t.Errorf("pg-status %q wrote %q; want %q", tt.args, stdout, tt.stdout)
		}
		if !strings.Contains(stderr, tt.stderr) || tt.stderr == "" && stderr != "" {
			t.Errorf("pg-status %q wrote %q to stderr; want %q", tt.args, stderr, tt.stderr)
		}
		if strings.Contains(stdout+stderr, "hunter2") {
			t.Errorf("pg-status %q shows the password:\n%s%s", tt.args, stdout, stderr)
		}
	}
}

// The help fits a terminal, names every parameter and shows its default.
func TestHelp(t *testing.T) {
	_, _, help, _ := flags(nil, "--help")
	for _, s := range settings {
		if !strings.Contains(help, "\n  "+s.name+"\n") {
			t.Errorf("the help does not name %s", s.name)
		}
	}
	if want := "Default: 8000."; !strings.Contains(help, want) {
		t.Errorf("the help lacks %q", want)
	}
	for line := range strings.Lines(help) {
		if len(line) > 81 {
			t.Errorf("a line of %d bytes in the help: %q", len(line)-1, line)
		}
	}
}

func TestPrintWrapped(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"", ""},
		{"one", "  one\n"},
		{"one  two\nsix", "  one two\n  six\n"}, // 9 bytes fit, 13 do not
		{"one twos", "  one twos\n"},            // just 10
		{"one three", "  one\n  three\n"},       // 11
		{"a much-too-long word", "  a\n  much-too-long\n  word\n"}, // nothing is cut
	} {
		var b strings.Builder
		printWrapped(&b, tt.text, "  ", 10)
		if got := b.String(); got != tt.want {
			t.Errorf("printWrapped(%q) = %q; want %q", tt.text, got, tt.want)
		}
	}
}

func TestHealthAddresses(t *testing.T) {
	for _, tt := range []struct {
		listen string
		want   []string
	}{
		{"0.0.0.0", []string{"127.0.0.1:8000"}},
		{"::", []string{"[::1]:8000"}},
		{"::ffff:0.0.0.0", []string{"127.0.0.1:8000"}},
		{"*", []string{"127.0.0.1:8000", "[::1]:8000"}},
		{"127.0.0.1", []string{"127.0.0.1:8000"}},
		{"10.1.2.3", []string{"10.1.2.3:8000"}},
		{"::1", []string{"[::1]:8000"}},
		{"fe80::1%eth0", []string{"[fe80::1%eth0]:8000"}},
	} {
		if got := healthAddresses(tt.listen, 8000); !slices.Equal(got, tt.want) {
			t.Errorf("healthAddresses(%q, 8000) = %q; want %q", tt.listen, got, tt.want)
		}
	}
}

func TestHealthcheck(t *testing.T) {
	ready := true
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "GET" || r.URL.Path != "/ready" || !ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	_, port, _ := net.SplitHostPort(srv.Listener.Addr().String())

	check := func(wantCode int, wantErr string, environ ...string) {
		t.Helper()
		code, _, stdout, stderr := flags(environ, "--healthcheck")
		if code != wantCode || stdout != "" || !strings.Contains(stderr, wantErr) || wantErr == "" && stderr != "" {
			t.Errorf("--healthcheck with %q = %d, %q, %q; want %d, %q on stderr", environ, code, stdout, stderr, wantCode, wantErr)
		}
	}
	check(0, "", "pg_status__http_port="+port) // 0.0.0.0 by default
	check(0, "", "pg_status__http_port="+port, "pg_status__http_listen_address=127.0.0.1")
	check(0, "", "pg_status__http_port="+port, "pg_status__http_listen_address=*")
	check(0, "", "pg_status__http_port="+port, "pg_status__sleep_ms=wrong") // none of its business
	check(1, "pg_status__http_port", "pg_status__http_port=none")
	check(1, "pg_status__http_listen_address", "pg_status__http_port="+port, "pg_status__http_listen_address=localhost")
	check(1, "pg_status__http_port is 0", "pg_status__http_port=0")

	ready = false // the handler runs only while check waits for it
	check(1, "503 Service Unavailable", "pg_status__http_port="+port)

	srv.Close()
	check(1, "connection refused", "pg_status__http_port="+port)
}

func TestAskReadySilentServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // connects, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	start := time.Now()
	err = askReady(l.Addr().String(), start.Add(20*time.Millisecond))
	if err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("askReady of a silent server = %v; want a timeout", err)
	}
	if d := time.Since(start); d > healthTimeout {
		t.Errorf("askReady took %v after a deadline of 20ms", d)
	}
}

// The example environment and the man page name every parameter once with its
// default, and no other.
func TestPackagedSettings(t *testing.T) {
	for _, tt := range []struct{ file, pattern string }{
		{"packaging/pg-status.default", `(?m)^#?(pg_status__\w+)=(.*)$`},
		{"packaging/deb/pg-status.8", `(?m)^\.It Ev (pg_status__\w+)(?: No = (.*))?$`},
	} {
		b, err := os.ReadFile(tt.file)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string][]string{}
		for _, m := range regexp.MustCompile(tt.pattern).FindAllStringSubmatch(string(b), -1) {
			got[m[1]] = append(got[m[1]], m[2])
		}
		for _, s := range settings {
			def := s.def
			if s.name == "pg_status__http_listen_address" && strings.HasSuffix(tt.file, ".default") {
				def = "127.0.0.1" // a package does not open a port to the world
			}
			if want := []string{def}; !slices.Equal(got[s.name], want) {
				t.Errorf("%s: values of %s: %q; want %q", tt.file, s.name, got[s.name], want)
			}
			delete(got, s.name)
		}
		for name := range got {
			t.Errorf("%s: %s is unknown", tt.file, name)
		}
	}
}
