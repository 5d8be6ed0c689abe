package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

// monServer is a fake PostgreSQL server on loopback, which speaks as much of the
// protocol as the test makes it.
type monServer struct {
	port    uint16
	tls     *tls.Config  // nil: it does not speak TLS
	accepts atomic.Int32 // connections so far
	events  chan string  // what happened on them, as "1 startup": connection and event
}

// newMonServer starts a server that hands each connection to serve, and closes it
// when that returns.
func newMonServer(t *testing.T, serve func(*monConn)) *monServer {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &monServer{port: portOf(l), events: make(chan string, 1<<16)}
	var accepting, serving sync.WaitGroup
	var conns []net.Conn // of accepting, until that is over
	accepting.Go(func() {
		for {
			tcp, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, tcp)
			c := &monConn{Conn: tcp, s: s, n: int(s.accepts.Add(1)), r: bufio.NewReader(tcp)}
			serving.Go(func() {
				defer func() { c.Conn.Close() }()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		accepting.Wait()
		for _, c := range conns {
			c.SetDeadline(time.Unix(1, 0)) // a client that is still there has leaked
		}
		serving.Wait()
	})
	return s
}

// expect waits for as many events as it wants, and compares them. Those of
// several connections come in the order of the connections.
func (s *monServer) expect(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	timeout := time.After(5 * time.Second)
	for len(got) < len(want) {
		select {
		case e := <-s.events:
			got = append(got, e)
		case <-timeout:
			t.Fatalf("the server saw %q; want %q", got, want)
		}
	}
	slices.SortStableFunc(got, func(a, b string) int {
		i, _, _ := strings.Cut(a, " ")
		j, _, _ := strings.Cut(b, " ")
		return strings.Compare(i, j)
	})
	if !slices.Equal(got, want) {
		t.Errorf("the server saw %q; want %q", got, want)
	}
}

// wantAccepts checks how many connections were made, of which none may be a
// request to cancel a query.
func (s *monServer) wantAccepts(t *testing.T, what string, want int32) {
	t.Helper()
	monEventually(t, func() bool { return s.accepts.Load() >= want },
		func() string { return fmt.Sprintf("%s makes %d connections; want %d", what, s.accepts.Load(), want) })
	if got := s.accepts.Load(); got != want {
		t.Errorf("%s makes %d connections; want %d", what, got, want)
	}
}

// monConn is one connection of a monServer.
type monConn struct {
	net.Conn
	s      *monServer
	n      int
	r      *bufio.Reader
	secure bool
	params map[string]string // of the start-up packet
}

func (c *monConn) note(event string) { c.s.events <- fmt.Sprint(c.n, " ", event) }

// Codes in place of a protocol version (PostgreSQL's libpq/pqcomm.h).
const (
	monProtocol3     = 3 << 16
	monSSLRequest    = 1234<<16 | 5679
	monCancelRequest = 1234<<16 | 5678
)

// packet reads a message without a type, as the first ones of a client are.
func (c *monConn) packet() (code uint32, body []byte, ok bool) {
	var head [8]byte
	if _, err := io.ReadFull(c.r, head[:]); err != nil {
		return 0, nil, false
	}
	body = make([]byte, binary.BigEndian.Uint32(head[:])-8)
	_, err := io.ReadFull(c.r, body)
	return binary.BigEndian.Uint32(head[4:]), body, err == nil
}

// message reads a message, and notes the end of the session.
func (c *monConn) message() (kind byte, body []byte, ok bool) {
	var head [5]byte
	if _, err := io.ReadFull(c.r, head[:]); err != nil {
		c.note("eof")
		return 0, nil, false
	}
	body = make([]byte, binary.BigEndian.Uint32(head[1:])-4)
	if _, err := io.ReadFull(c.r, body); err != nil {
		c.note("eof")
		return 0, nil, false
	}
	if head[0] == 'X' {
		c.note("terminate")
		return 0, nil, false
	}
	return head[0], body, true
}

// send sends messages and reports whether they went out.
func (c *monConn) send(messages ...[]byte) bool {
	_, err := c.Write(bytes.Join(messages, nil))
	return err == nil
}

// freeze reads on, and answers nothing, until the client has gone.
func (c *monConn) freeze() { io.Copy(io.Discard, c.r) }

// reset ends the connection with a TCP reset.
func (c *monConn) reset() {
	c.Conn.(*net.TCPConn).SetLinger(0)
	c.Conn.Close()
}

// negotiate reads what the client says first, and agrees to TLS if the server
// speaks it. It returns false for a client that has gone.
func (c *monConn) negotiate() (code uint32, body []byte, ok bool) {
	code, body, ok = c.packet()
	if !ok || code != monSSLRequest {
		return code, body, ok
	}
	c.note("ssl")
	if c.s.tls == nil {
		c.send([]byte("N"))
		return c.packet()
	}
	c.send([]byte("S"))
	s := tls.Server(c.Conn, c.s.tls)
	if s.Handshake() != nil {
		return 0, nil, false
	}
	c.Conn, c.r, c.secure = s, bufio.NewReader(s), true
	return c.packet()
}

// startup reads the packet that starts a session.
func (c *monConn) startup() bool {
	code, body, ok := c.negotiate()
	switch {
	case !ok:
		return false
	case code != monProtocol3:
		c.note(fmt.Sprintf("code %d", code)) // a cancel request, say
		return false
	}
	c.note("startup")
	c.params = map[string]string{}
	for fields := strings.Split(string(body), "\x00"); len(fields) > 1 && fields[0] != ""; fields = fields[2:] {
		c.params[fields[0]] = fields[1]
	}
	return true
}

// password asks for the password and returns it.
func (c *monConn) password() (string, bool) {
	c.send(monAuth(3))
	_, body, ok := c.message()
	return strings.TrimSuffix(string(body), "\x00"), ok
}

// accept lets the client in.
func (c *monConn) accept() bool {
	return c.send(monAuth(0), monMessage('S', "server_version\x0015.4\x00"), monMessage('K', "\x00\x00\x00\x01\x00\x00\x00\x02"), monReady)
}

// queries answers each query with what answer returns for it, until that is nil.
func (c *monConn) queries(answer func(sql string) []byte) {
	for {
		kind, body, ok := c.message()
		if !ok {
			return
		}
		if kind != 'Q' {
			c.note(fmt.Sprintf("message %q", kind))
			return
		}
		c.note("query")
		a := answer(strings.TrimSuffix(string(body), "\x00"))
		if a == nil || !c.send(a) {
			return
		}
	}
}

// monMessage is a message of a server.
func monMessage(kind byte, body string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(4+len(body))), body...)
}

func monAuth(kind byte) []byte { return monMessage('R', "\x00\x00\x00"+string(kind)) }

var monReady = monMessage('Z', "I")

func monError(severity, sqlstate, text string) []byte {
	return monMessage('E', "S"+severity+"\x00V"+severity+"\x00C"+sqlstate+"\x00M"+text+"\x00\x00")
}

// monNull is a value that is NULL.
const monNull = "\x00"

// monRow is the answer to the query of a check.
func monRow(values ...string) []byte {
	oids := []uint32{16, 23, 3220, 23, 23, 23, 20, 3220, 3220, 25, 25, 25, 25} // of the columns of queries
	desc, row := binary.BigEndian.AppendUint16(nil, uint16(len(values))), binary.BigEndian.AppendUint16(nil, uint16(len(values)))
	for i, v := range values {
		desc = append(desc, "c\x00\x00\x00\x00\x00\x00\x00"...)
		desc = binary.BigEndian.AppendUint32(desc, oids[i])
		desc = append(desc, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0)
		if v == monNull {
			row = append(row, 0xff, 0xff, 0xff, 0xff)
		} else {
			row = append(binary.BigEndian.AppendUint32(row, uint32(len(v))), v...)
		}
	}
	return slices.Concat(monMessage('T', string(desc)), monMessage('D', string(row)), monMessage('C', "SELECT 1\x00"), monReady)
}

var monMasterRow = monRow("f", monNull, monNull, monNull, "1", "0", "7", "0/3000060", "0/3000060", "000000010000000000000003",
	monNull, "2026-08-21 12:00:00.000001", "2026-08-21 12:34:56.123456")

// monHeaderLen is the length of the first message in monMasterRow, which names the
// columns.
const monHeaderLen = 7 + queryColumns*20

// monHealthy is a server that lets everyone in and is a master.
func monHealthy(c *monConn) {
	if c.startup() && c.accept() {
		c.queries(func(string) []byte { return monMasterRow })
	}
}

// monLink returns a link to s and what it logs.
func monLink(t *testing.T, s *monServer, edits ...func(*config)) (*link, *monLog) {
	t.Helper()
	c := monConfig(1, append([]func(*config){func(c *config) { c.sleep = time.Millisecond }}, edits...)...)
	c.hosts[0] = hostConfig{name: "pg-1", addr: "127.0.0.1", port: s.port}
	log := new(monLog)
	l := newLink(c.hosts[0], logNames(c.hosts)[0], c, newTurns(c.sleep, 1), log.logger(slog.LevelDebug))
	t.Cleanup(l.close)
	return l, log
}

// monCheck makes a check that must succeed.
func monCheck(t *testing.T, l *link) observation {
	t.Helper()
	o, err := l.check(t.Context(), 10*time.Second)
	if err != nil {
		t.Fatalf("check = %v; want an answer", err)
	}
	return o
}

// monCheckFails makes a check that must fail.
func monCheckFails(t *testing.T, l *link, timeout time.Duration) *checkError {
	t.Helper()
	o, err := l.check(t.Context(), timeout)
	e, ok := err.(*checkError)
	if !ok {
		t.Fatalf("check = %+v, %v; want a checkError", o, err)
	}
	return e
}

// monEventually waits for something that happens soon, and fails with what
// happened instead.
func monEventually(t *testing.T, ok func() bool, failure func() string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(failure())
		}
	}
}

func monTLSConfig(t *testing.T) *tls.Config {
	t.Helper()
	return &tls.Config{Certificates: []tls.Certificate{issue(t, nil, "pg-1", nil).tls()}}
}

// monTLS is PGSSLMODE=mode.
func monTLS(t *testing.T, mode sslMode) func(*config) {
	t.Helper()
	s := mustLoadTLS(t, "PGSSLMODE="+string(mode))
	return func(c *config) { c.tls = s }
}

// Whatever else is in the start-up packet, some pooler refuses.
func TestStartupPacket(t *testing.T) {
	t.Setenv("PGOPTIONS", "-c geqo=off")
	t.Setenv("PGAPPNAME", "other")
	t.Setenv("PGTZ", "UTC")
	t.Setenv("PGCLIENTENCODING", "LATIN1")
	got := make(chan map[string]string, 1)
	s := newMonServer(t, func(c *monConn) {
		if c.startup() && c.accept() {
			got <- c.params
			c.queries(func(string) []byte { return monMasterRow })
		}
	})
	l, _ := monLink(t, s)
	monCheck(t, l)
	want := map[string]string{"user": "user", "database": "base", "application_name": "pg-status"}
	if got := <-got; !maps.Equal(got, want) {
		t.Errorf("start-up packet holds %q; want %q", got, want)
	}
}

// A server that says no to TLS is used on the same connection, and the next time
// is not asked.
func TestPreferOnOneSocket(t *testing.T) {
	s := newMonServer(t, monHealthy)
	l, _ := monLink(t, s, monTLS(t, sslPrefer))
	monCheck(t, l)
	s.expect(t, "1 ssl", "1 startup", "1 query")
	l.drop()
	monCheck(t, l)
	s.expect(t, "1 terminate", "2 startup", "2 query")
	s.wantAccepts(t, "two connects with PGSSLMODE=prefer", 2)
}

func TestEncryptionFallback(t *testing.T) {
	deny := func(c *monConn, secure bool) bool {
		if c.secure == secure {
			c.send(monError("FATAL", "28000", "no pg_hba.conf entry"))
			return true
		}
		return false
	}
	// Servers, by what they do to a client.
	healthy := func(c *monConn) {
		if c.accept() {
			c.queries(func(string) []byte { return monMasterRow })
		}
	}
	tlsOnly := func(c *monConn) {
		if c.startup() && !deny(c, false) {
			healthy(c)
		}
	}
	plainOnly := func(c *monConn) {
		if c.startup() && !deny(c, true) {
			healthy(c)
		}
	}
	brokenTLS := func(c *monConn) {
		code, _, ok := c.packet()
		if !ok {
			return
		}
		if code == monSSLRequest {
			c.note("ssl")
			c.send([]byte("S"))
			return // and not a word of TLS
		}
		c.note("startup")
		healthy(c)
	}
	afterPassword := func(sqlstate string) func(*monConn) {
		return func(c *monConn) {
			if c.startup() {
				if _, ok := c.password(); ok {
					c.send(monError("FATAL", sqlstate, "go away"))
				}
			}
		}
	}
	full := func(c *monConn) {
		if c.startup() {
			c.send(monError("FATAL", "53300", "sorry, too many clients already"))
		}
	}
	for _, tt := range []struct {
		name    string
		mode    sslMode
		tls     bool // the server speaks it
		serve   func(*monConn)
		accepts int32 // of one check
		op      string
		again   int32 // accepts of a second connect
	}{
		{"prefer, TLS", sslPrefer, true, monHealthy, 1, "", 1},
		{"prefer, plain by pg_hba.conf", sslPrefer, true, plainOnly, 2, "", 1},
		{"prefer, TLS by pg_hba.conf", sslPrefer, true, tlsOnly, 1, "", 1},
		{"prefer, broken TLS", sslPrefer, false, brokenTLS, 2, "", 1},
		{"prefer, no TLS and refused", sslPrefer, false, tlsOnly, 1, "authenticate", 0},
		{"prefer, refused after the password", sslPrefer, true, afterPassword("28000"), 1, "authenticate", 0},
		{"prefer, wrong password", sslPrefer, true, afterPassword("28P01"), 1, "authenticate", 0},
		{"prefer, full", sslPrefer, true, full, 1, "authenticate", 0},
		{"allow, plain", sslAllow, true, monHealthy, 1, "", 1},
		{"allow, TLS by pg_hba.conf", sslAllow, true, tlsOnly, 2, "", 1},
		{"allow, refused after the password", sslAllow, true, afterPassword("28000"), 1, "authenticate", 0},
		{"allow, TLS by pg_hba.conf, but none", sslAllow, false, tlsOnly, 2, "tls", 0},
		{"require, TLS", sslRequire, true, monHealthy, 1, "", 1},
		{"require, no TLS", sslRequire, false, monHealthy, 1, "tls", 0},
		{"require, plain by pg_hba.conf", sslRequire, true, plainOnly, 1, "authenticate", 0},
		{"require, broken TLS", sslRequire, false, brokenTLS, 1, "tls", 0},
		{"disable, TLS by pg_hba.conf", sslDisable, true, tlsOnly, 1, "authenticate", 0},
	} {
		s := newMonServer(t, tt.serve)
		if tt.tls {
			s.tls = monTLSConfig(t)
		}
		l, _ := monLink(t, s, monTLS(t, tt.mode))
		_, err := l.check(t.Context(), 10*time.Second)
		op := ""
		if e := new(checkError); errors.As(err, &e) {
			op = e.op
		}
		if op != tt.op {
			t.Errorf("%s: check = %v; want failure of %q", tt.name, err, tt.op)
		}
		s.wantAccepts(t, tt.name+": a check", tt.accepts)
		if tt.again > 0 {
			l.drop()
			monCheck(t, l)
			s.wantAccepts(t, tt.name+": a second one", tt.accepts+tt.again)
		}
	}
}

// When what worked first no longer does, the other is tried, and then is first.
func TestModeThatWorkedFirst(t *testing.T) {
	var plainDenied atomic.Bool
	s := newMonServer(t, func(c *monConn) {
		if !c.startup() {
			return
		}
		if c.secure != plainDenied.Load() {
			c.send(monError("FATAL", "28000", "no pg_hba.conf entry"))
			return
		}
		c.accept()
		c.queries(func(string) []byte { return monMasterRow })
	})
	s.tls = monTLSConfig(t)
	l, _ := monLink(t, s, monTLS(t, sslPrefer))
	for _, step := range []struct {
		denied bool
		want   []string
	}{
		{false, []string{"1 ssl", "1 startup", "2 startup", "2 query"}},
		{false, []string{"2 terminate", "3 startup", "3 query"}},
		{true, []string{"3 terminate", "4 startup", "5 ssl", "5 startup", "5 query"}},
		{true, []string{"5 terminate", "6 ssl", "6 startup", "6 query"}},
		{false, []string{"6 terminate", "7 ssl", "7 startup", "8 startup", "8 query"}},
	} {
		plainDenied.Store(step.denied)
		l.drop()
		monCheck(t, l)
		s.expect(t, step.want...)
	}
}

// What goes wrong before the server has agreed to TLS is no reason to try
// without it: a second connection would end the same way.
func TestOneConnectionToABrokenServer(t *testing.T) {
	for name, serve := range map[string]func(*monConn){
		"closing":   func(c *monConn) { c.packet() },
		"resetting": func(c *monConn) { c.packet(); c.reset() },
		"garbage":   func(c *monConn) { c.packet(); c.send([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) },
		"silent":    func(c *monConn) { c.freeze() },
	} {
		s := newMonServer(t, serve)
		l, _ := monLink(t, s, monTLS(t, sslPrefer))
		monCheckFails(t, l, 50*time.Millisecond)
		s.wantAccepts(t, "a check of a server that is "+name, 1)
	}
}

func TestCostOfFailures(t *testing.T) {
	closed, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	refuse := monError("FATAL", "57P03", "the database system is starting up")
	for _, tt := range []struct {
		name   string
		mode   sslMode
		serve  func(*monConn) // nil: nobody listens
		op     string
		costly bool
	}{
		{"refused", sslDisable, nil, "connect", false},
		{"closed at once", sslDisable, func(*monConn) {}, "authenticate", false},
		{"turned away before a password", sslDisable, func(c *monConn) { c.startup(); c.send(refuse) }, "authenticate", false},
		{"turned away after the password", sslDisable, func(c *monConn) { c.startup(); c.password(); c.send(refuse) }, "authenticate", true},
		{"turned away after TLS", sslRequire, func(c *monConn) { c.startup(); c.send(refuse) }, "authenticate", true},
		{"failed TLS", sslRequire, func(c *monConn) { c.packet(); c.send([]byte("S")) }, "tls", true},
		{"no TLS", sslRequire, func(c *monConn) { c.packet(); c.send([]byte("N")) }, "tls", false},
	} {
		s := &monServer{port: portOf(closed)}
		if tt.serve != nil {
			s = newMonServer(t, tt.serve)
			s.tls = monTLSConfig(t)
		}
		l, _ := monLink(t, s, monTLS(t, tt.mode))
		if e := monCheckFails(t, l, 10*time.Second); e.op != tt.op || e.costly != tt.costly {
			t.Errorf("%s: check fails with %q, costly=%v; want %q, %v (%v)", tt.name, e.op, e.costly, tt.op, tt.costly, e)
		}
	}
}

// monPasswordServer lets in who has the password that want returns.
func monPasswordServer(t *testing.T, want func() string) *monServer {
	return newMonServer(t, func(c *monConn) {
		if !c.startup() {
			return
		}
		p, ok := c.password()
		if !ok {
			return
		}
		c.note("password " + p)
		if p != want() {
			c.send(monError("FATAL", "28P01", "password authentication failed"))
			return
		}
		c.accept()
		c.queries(func(string) []byte { return monMasterRow })
	})
}

func monWrite(t *testing.T, file, content string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, mode); err != nil {
		t.Fatal(err)
	}
}

func TestPasswordFileIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	monWrite(t, file, "first\n", 0o600)
	s := monPasswordServer(t, func() string {
		b, _ := os.ReadFile(file)
		return strings.TrimSpace(string(b))
	})
	l, _ := monLink(t, s, func(c *config) { c.passwordFile, c.password = file, "" })
	monCheck(t, l)
	s.expect(t, "1 startup", "1 password first", "1 query")
	l.drop()
	monWrite(t, file, "second", 0o600)
	monCheck(t, l)
	s.expect(t, "1 terminate", "2 startup", "2 password second", "2 query")
	l.drop()
	os.Remove(file)
	if e := monCheckFails(t, l, time.Second); e.op != "authenticate" || !strings.Contains(e.Error(), "pg_status__pg_password_file: no such file") {
		t.Errorf("check without the file = %v; want the reason", e)
	}
	s.wantAccepts(t, "all of it", 2)
}

// A password that changes while we connect with the old one costs one more
// connection, and no more than one.
func TestPasswordChangesWhileConnecting(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	for _, tt := range []struct {
		name    string
		changes int // of the file, one for each connect
		want    []string
		ok      bool
	}{
		{"unchanged", 0, []string{"1 startup", "1 password 0"}, false},
		{"changed once", 1, []string{"1 startup", "1 password 0", "2 startup", "2 password 1", "2 query"}, true},
		{"changed each time", 20, []string{"1 startup", "1 password 0", "2 startup", "2 password 1"}, false},
	} {
		n := 0 // of the server's one connection at a time
		monWrite(t, file, "0", 0o600)
		s := monPasswordServer(t, func() string {
			if n == tt.changes {
				if tt.changes == 0 {
					return "another"
				}
				return fmt.Sprint(n)
			}
			n++
			monWrite(t, file, fmt.Sprint(n), 0o600)
			return "another"
		})
		l, _ := monLink(t, s, func(c *config) { c.passwordFile, c.password = file, "" })
		_, err := l.check(t.Context(), time.Second)
		if (err == nil) != tt.ok {
			t.Errorf("%s: check = %v; want success=%v", tt.name, err, tt.ok)
		}
		s.expect(t, tt.want...)
		if e := new(checkError); !tt.ok && (!errors.As(err, &e) || e.sqlstate != "28P01") {
			t.Errorf("%s: check = %v; want 28P01", tt.name, err)
		}
		s.wantAccepts(t, tt.name+": a check", int32(strings.Count(strings.Join(tt.want, " "), "startup")))
	}
}

func TestPassFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pgpass")
	s := monPasswordServer(t, func() string { return "from pgpass" })
	l, _ := monLink(t, s, func(c *config) { c.passFile, c.password = file, "" })
	line := fmt.Sprintf("127.0.0.1:%d:base:user:from pgpass\n", s.port)
	monWrite(t, file, "other:*:*:*:x\n"+line, 0o600)
	monCheck(t, l)
	l.drop()
	for _, mode := range []os.FileMode{0o640, 0o604, 0o666} {
		monWrite(t, file, line, mode)
		e := monCheckFails(t, l, time.Second)
		if want := "authenticate: PGPASSFILE: permissions of " + file + " should be u=rw (0600) or less"; e.Error() != want {
			t.Errorf("check with a file of mode %o = %q; want %q", mode, e, want)
		}
	}
	monWrite(t, file, line, 0o400)
	monCheck(t, l)
	s.wantAccepts(t, "all of it", 2)
}

// monBlackHole returns a port that drops what comes: the kernel does so when a
// queue of connections that nobody accepts is full.
func monBlackHole(t *testing.T) uint16 {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(sa.(*syscall.SockaddrInet4).Port)
	for range 10 {
		c, err := net.DialTimeout("tcp4", fmt.Sprintf("127.0.0.1:%d", port), 50*time.Millisecond)
		if err != nil {
			return port
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue of connections does not fill")
	return 0
}

// monAddrs makes a link resolve its host's name to addrs.
func monAddrs(l *link, addrs ...string) {
	l.host.addr = "db.example"
	l.lookup = func(_ context.Context, network, host string) (ips []netip.Addr, err error) {
		if network != "ip" || host != "db.example" {
			return nil, errors.New("unexpected question")
		}
		for _, a := range addrs {
			ips = append(ips, netip.MustParseAddr(a))
		}
		return ips, nil
	}
}

func TestSeveralAddresses(t *testing.T) {
	s := newMonServer(t, monHealthy)
	l, _ := monLink(t, s)
	// All of 127/8 is loopback, but the server listens on 127.0.0.1 alone.
	monAddrs(l, "127.0.0.2", "127.0.0.3", "127.0.0.1")
	monCheck(t, l)
	l.drop()
	monAddrs(l, "127.0.0.2", "127.0.0.3")
	e := monCheckFails(t, l, time.Second)
	for _, want := range []string{"127.0.0.2", "127.0.0.3", "connection refused"} {
		if e.op != "connect" || !strings.Contains(e.Error(), want) {
			t.Errorf("check of two refused addresses = %v; want %q in it", e, want)
		}
	}
	s.wantAccepts(t, "all of it", 1)
}

// An address that does not answer leaves time for those behind it.
func TestSilentAddresses(t *testing.T) {
	hole := monBlackHole(t)
	l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.4:%d", hole))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	addrs := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.4")}
	start := time.Now()
	c, err := dialAny(t.Context(), addrs, hole, start.Add(1200*time.Millisecond))
	if err != nil {
		t.Fatalf("dialAny = %v; want the third address", err)
	}
	c.Close()
	if got := time.Since(start); got < 800*time.Millisecond {
		t.Errorf("dialAny reached the third address after %v; want two thirds of 1.2s", got)
	}
	start = time.Now()
	c, err = dialAny(t.Context(), addrs[:2], hole, start.Add(100*time.Millisecond))
	if err == nil {
		c.Close()
		t.Fatal("dialAny to a black hole succeeds")
	}
	if e := asCheckError("connect", err); !e.timeout() {
		t.Errorf("dialAny = %v; want a time-out", err)
	}
	if got := time.Since(start); got > 2*time.Second {
		t.Errorf("dialAny of 100ms took %v", got)
	}
}

func TestSlowDNS(t *testing.T) {
	s := newMonServer(t, monHealthy)
	l, _ := monLink(t, s)
	monAddrs(l, "127.0.0.1")
	fast := l.lookup
	const timeout = 400 * time.Millisecond
	l.lookup = func(ctx context.Context, network, host string) ([]netip.Addr, error) {
		<-time.After(timeout + 50*time.Millisecond)
		return fast(ctx, network, host)
	}
	if _, err := l.check(t.Context(), timeout); err != nil {
		t.Errorf("check after a slow DNS answer = %v; want success", err)
	}
	l.drop()
	l.lookup = func(context.Context, string, string) ([]netip.Addr, error) {
		return nil, &net.DNSError{Err: "i/o timeout", Name: "db.example", IsTimeout: true}
	}
	e := monCheckFails(t, l, timeout)
	if e.op != "resolve" || e.timeout() {
		t.Errorf("check without DNS = %v, timeout=%v; want the failure of DNS", e, e.timeout())
	}
}

// The turn is taken only after TCP connects, and time spent waiting for it does
// not count.
func TestTurnsOfLinks(t *testing.T) {
	hole := monBlackHole(t)
	l, _ := monLink(t, &monServer{port: hole})
	done := make(chan error)
	go func() {
		_, err := l.check(context.Background(), 300*time.Millisecond)
		done <- err
	}()
	select {
	case <-l.turns.turn: // it is free: as if another host took it
		l.turns.turn <- struct{}{}
	case <-done:
		t.Error("no turn while a host does not accept")
	}
	<-done

	s := newMonServer(t, monHealthy)
	l, _ = monLink(t, s)
	release, err := l.turns.acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const timeout = 300 * time.Millisecond
	time.AfterFunc(2*timeout, func() { release(false) })
	start := time.Now()
	if _, err := l.check(t.Context(), timeout); err != nil {
		t.Errorf("check that waited for its turn = %v; want success", err)
	}
	if got := time.Since(start); got < 2*timeout {
		t.Errorf("check took %v; want it to wait for its turn until %v", got, 2*timeout)
	}
}

// monHostile are servers that speak something else, or PostgreSQL's protocol with
// a message that does not hold what it should. The key is what they are.
func monHostile() map[string]func(*monConn) {
	in := func(messages ...[]byte) func(*monConn) {
		return func(c *monConn) {
			if c.startup() && c.accept() {
				c.queries(func(string) []byte { return slices.Concat(messages...) })
			}
		}
	}
	start := func(messages ...[]byte) func(*monConn) {
		return func(c *monConn) {
			if c.startup() && c.send(messages...) {
				c.message() // its end
			}
		}
	}
	huge := func(kind byte, n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{kind}, n) }
	random := make([]byte, 100_000)
	rand.New(rand.NewSource(1)).Read(random)
	full := strings.Repeat("x", 29_988) // 30,002 with what is around it
	return map[string]func(*monConn){
		"HTTP":                         start([]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")),
		"SSH":                          start([]byte("SSH-2.0-OpenSSH_9.2\r\n")),
		"random":                       start(random),
		"zeros":                        start(make([]byte, 100_000)),
		"negative length":              start(huge('R', 1<<32-1)),
		"length below its own":         start(huge('S', 3)),
		"length of 1 GiB":              start(huge('S', 1<<30)),
		"authentication without kind":  start(huge('R', 4)),
		"short md5 salt":               start(monAuth(5)),
		"short key":                    start(monAuth(0), monMessage('K', "")),
		"parameter without end":        start(monAuth(0), monMessage('S', "TimeZone")),
		"short ready":                  start(monAuth(0), monMessage('Z', "")),
		"error without end":            start(monMessage('E', "SFATAL")),
		"SCRAM that is none":           start(monMessage('R', "\x00\x00\x00\x0aSCRAM-SHA-256\x00\x00"), monMessage('R', "\x00\x00\x00\x0bxyz")),
		"error as plain text":          start([]byte("Ecould not fork new process for connection: Cannot allocate memory\n\x00")),
		"query: HTTP":                  in([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")),
		"query: row of 1 GiB":          in(monMasterRow[:monHeaderLen], huge('D', 1<<30)),
		"query: short description":     in(monMessage('T', "\xff\xff"), monReady),
		"query: short row":             in(monMasterRow[:monHeaderLen], monMessage('D', "")),
		"query: row with bad length":   in(slices.Concat(monMessage('T', "\x00\x01c\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\xff\xff\xff\xff\x00\x00"), monMessage('D', "\x00\x01\xff\xff\xff\xf0"), monReady)),
		"query: empty bool":            in(slices.Concat(monMessage('T', "\x00\x01c\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\xff\xff\xff\xff\x00\x00"), monMessage('D', "\x00\x01\x00\x00\x00\x00"), monReady)),
		"query: other columns":         in(monRow("f", monNull)),
		"query: no row":                in(monMessage('C', "SELECT 0\x00"), monReady),
		"query: short ready":           in(monMessage('C', "SELECT 0\x00"), monMessage('Z', "")),
		"query: tag without end":       in(monMessage('C', "SELECT 1")),
		"query: row before any header": in(monMessage('D', "\x00\x00")),
		"query: copy":                  in(monMessage('G', "\x00\x00\x00")),
		// An error of the largest length that lib/pq takes, and then what it would
		// believe.
		"query: 1 GiB after a long error": in(monMessage('E', "SERROR\x00M"+full+"\x00\x00"), huge('D', 1<<30)),
	}
}

// Garbage fails a check: it neither ends the process nor takes memory, and leaves
// nothing open behind it.
func TestGarbage(t *testing.T) {
	for name, serve := range monHostile() {
		s := newMonServer(t, func(c *monConn) {
			serve(c)
			c.freeze()
			c.note("closed")
		})
		l, _ := monLink(t, s)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := time.Now()
		e := monCheckFails(t, l, 500*time.Millisecond)
		runtime.ReadMemStats(&after)
		// Fields of a row that has 65535 of them take 3 MiB.
		if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
			t.Errorf("%s: check allocates %d MiB", name, n>>20)
		}
		if got := time.Since(start); got > 5*time.Second {
			t.Errorf("%s: check of 500ms takes %v", name, got)
		}
		s.wantAccepts(t, name+": a check", 1)
		if l.kept != nil {
			t.Errorf("%s: connection kept after %v", name, e)
		}
		if n := l.turns.opening.Load(); n != 0 {
			t.Errorf("%s: %d connections count as being opened after %v", name, n, e)
		}
		monWantClosed(t, name, s, 1)
		monEventually(t, func() bool { return len(l.turns.turn) == 1 },
			func() string { return name + ": the turn is not passed on" })
	}
}

// monWantClosed waits until the client has closed n connections.
func monWantClosed(t *testing.T, name string, s *monServer, n int) {
	t.Helper()
	timeout := time.After(3 * time.Second)
	for n > 0 {
		select {
		case e := <-s.events:
			if strings.HasSuffix(e, " closed") {
				n--
			}
		case <-timeout:
			t.Errorf("%s: the client leaves the connection open", name)
			return
		}
	}
}

// An error that is plain text has no length in front of it, so its own is
// bounded.
func TestEndlessError(t *testing.T) {
	text := bytes.Repeat([]byte("could not fork "), 4096)
	for name, login := range map[string]func(*monConn) bool{
		"start-up": (*monConn).startup,
		"query": func(c *monConn) bool {
			if !c.startup() || !c.accept() {
				return false
			}
			_, _, ok := c.message()
			return ok
		},
	} {
		s := newMonServer(t, func(c *monConn) {
			for ok := login(c) && c.send([]byte("E")); ok; ok = c.send(text) {
			}
		})
		l, _ := monLink(t, s)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		monCheckFails(t, l, 200*time.Millisecond)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
			t.Errorf("%s: an error without end allocates %d MiB", name, n>>20)
		}
	}
}

// Opening the successor of an aged connection is contained as well. The test runs
// in a process of its own, as there is no other way to see it end.
func TestGarbageForAgedConnection(t *testing.T) {
	const inside = "MON_AGED_GARBAGE"
	if os.Getenv(inside) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("the process ends: %v\n%.2000s", err, out)
		}
		return
	}
	s := newMonServer(t, func(c *monConn) {
		if c.n == 1 {
			monHealthy(c)
			return
		}
		c.startup()
		c.send(monAuth(0), monMessage('Z', ""))
		c.message()
	})
	l, _ := monLink(t, s, func(c *config) { c.connMaxAge = 1 })
	monCheck(t, l)
	monCheck(t, l)
	monAwaitReplacement(t, l)
	monCheck(t, l)
}

func TestWireInspect(t *testing.T) {
	long := monMessage('E', strings.Repeat("x", 29_996)) // its length is 30,000
	for _, tt := range []struct {
		name     string
		stream   []byte
		bad      bool
		password bool
	}{
		{"nothing", nil, false, false},
		{"session", slices.Concat(monAuth(0), monMessage('S', "a\x00b\x00"), monMessage('K', "12345678"), monReady), false, false},
		{"cleartext password", monAuth(3), false, true},
		{"md5", monMessage('R', "\x00\x00\x00\x05salt"), false, true},
		{"SCRAM and then OK", slices.Concat(monMessage('R', "\x00\x00\x00\x0aSCRAM-SHA-256\x00\x00"), monAuth(0)), false, true},
		{"answer", monMasterRow, false, false},
		{"longest error", slices.Concat(long, monReady), false, false},
		{"plain text", []byte("Ecould not fork"), false, false},
		{"plain text at once", []byte("E\x00\x00\x00\x07x"), false, false},
		{"body of a password request is no header", slices.Concat(monMessage('S', "R\x00\x00\x00\x08\x00\x00\x00\x03"), monReady), false, false},
		{"unknown type", monMessage('q', ""), true, false},
		{"type beyond ASCII", monMessage(0xff, ""), true, false},
		{"length 3", []byte("Z\x00\x00\x00\x03"), true, false},
		{"length 0", []byte("Z\x00\x00\x00\x00"), true, false},
		{"negative length", []byte("Z\xff\xff\xff\xff"), true, false},
		{"64 KiB", []byte("D\x00\x01\x00\x00"), false, false},
		{"more than 64 KiB", []byte("D\x00\x01\x00\x01"), true, false},
		{"authentication of 7 bytes", []byte("R\x00\x00\x00\x07\x00\x00\x00\x03"), true, false},
		{"HTTP", []byte("HTTP/1.1 400 Bad Request\r\n"), true, false},
		{"bad after good", slices.Concat(monAuth(0), monReady, []byte("x....")), true, false},
	} {
		w := new(wire)
		err := w.inspect(tt.stream)
		if (err != nil) != tt.bad || w.passwordWanted != tt.password {
			t.Errorf("%s: inspect = %v, passwordWanted=%v; want an error=%v, %v", tt.name, err, w.passwordWanted, tt.bad, tt.password)
		}
	}
}

// FuzzInspect has inspect see a stream as a whole and in pieces: what it finds must
// be the same, and it must not panic.
func FuzzInspect(f *testing.F) {
	f.Add(monMasterRow, uint64(1))
	f.Add(slices.Concat(monAuth(3), monAuth(0), monReady), uint64(2))
	f.Add([]byte("Ecould not fork new process"), uint64(3))
	f.Add([]byte("R\x00\x00\x00\x07"), uint64(4))
	f.Add([]byte("HTTP/1.1 400 Bad Request"), uint64(5))
	f.Add(slices.Concat(monError("FATAL", "28000", "no entry"), []byte{0xff, 0xff}), uint64(6))
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		whole := new(wire)
		want := whole.inspect(stream)
		pieces, random := new(wire), rand.New(rand.NewSource(int64(seed)))
		var got error
		for rest := stream; len(rest) > 0 && got == nil; {
			n := 1 + random.Intn(len(rest))
			if seed%2 == 0 {
				n = min(n, 1+random.Intn(9)) // about a header
			}
			got = pieces.inspect(rest[:n])
			rest = rest[n:]
		}
		if got != want || pieces.passwordWanted != whole.passwordWanted || pieces.free != whole.free {
			t.Errorf("inspect(%q) = %v, password %v, free %v in pieces; %v, %v, %v as a whole", stream,
				got, pieces.passwordWanted, pieces.free, want, whole.passwordWanted, whole.free)
		}
		if want == nil && (pieces.left != whole.left || !bytes.Equal(pieces.head, whole.head)) {
			t.Errorf("inspect(%q) expects %d bytes after %q in pieces; %d after %q as a whole", stream,
				pieces.left, pieces.head, whole.left, whole.head)
		}
		if whole.left < 0 || whole.left > maxMessage || len(whole.head) > 9 {
			t.Errorf("inspect(%q) leaves left=%d, head=%q", stream, whole.left, whole.head)
		}
	})
}

// TestIterations: a server cannot make us compute for long. No deadline would end
// that, as it is no reading or writing.
func TestIterations(t *testing.T) {
	const saslContinue = "\x0b"
	for _, tt := range []struct{ said, want string }{
		{"r=abc,s=QSXCR+Q6sek8bf92,i=4096", ""},
		{"r=abc,s=QSXCR+Q6sek8bf92,i=1000000", ""},
		{"r=abc,s=QSXCR+Q6sek8bf92,i=1000001", `the server asks for "1000001" iterations of SCRAM; at most 1000000 are made`},
		{"r=abc,s=QSXCR+Q6sek8bf92,i=2000000000", `the server asks for "2000000000" iterations of SCRAM; at most 1000000 are made`},
		{"i=99999999999999999999999999", `the server asks for "99999999999999999999" iterations of SCRAM; at most 1000000 are made`},
		{"r=i=2000000000", ""}, // a nonce
	} {
		stream := monMessage('R', "\x00\x00\x00"+saslContinue+tt.said)
		for chunk := 1; chunk <= len(stream); chunk++ {
			w, got := new(wire), ""
			for part := range slices.Chunk(stream, chunk) {
				if err := w.inspect(part); err != nil {
					got = err.Error()
					break
				}
			}
			if got != tt.want {
				t.Fatalf("inspect(%q) in chunks of %d = %q; want %q", stream, chunk, got, tt.want)
			}
		}
	}
}

func TestRedact(t *testing.T) {
	for _, tt := range []struct {
		err            error
		password, want string
	}{
		{&pq.Error{Message: "you said hunter2", Code: "28P01"}, "hunter2", "pq: you said *** (28P01)"},
		{&pq.Error{Message: "no (28P01)", Code: "28P01"}, "", "pq: no (28P01) (28P01)"},
		{errors.New("pq: server error: Ehunter2 hunter2"), "hunter2", "pq: server error: E*** ***"},
		{io.EOF, "hunter2", "EOF"},
	} {
		if got := redact(tt.err, tt.password).Error(); got != tt.want {
			t.Errorf("redact(%q, %q) = %q; want %q", tt.err, tt.password, got, tt.want)
		}
	}
	if redact(io.EOF, "hunter2") != io.EOF {
		t.Error("an error without the password is not left as it is")
	}
}
