package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// net/http spends most of a request on what questions to us do not have: bodies,
// upgrades, a goroutine that watches the client. A lane reads what comes on one
// connection and answers the requests that are in the plain form which clients
// send. At the first one that is in any other form it gives the connection to
// net/http, with all that it has read and not answered. So net/http decides on
// every oddity, and both have the routes answer.

// lanes serve the connections of the listeners.
type lanes struct {
	server *server
	log    *slog.Logger
	odd    chan net.Conn // connections for net/http
	end    chan struct{} // closed when no more of them come

	running sync.WaitGroup
	ending  atomic.Bool // stop has been called

	mu        sync.Mutex // guards the following
	conns     map[net.Conn]struct{}
	listeners []net.Listener
}

func newLanes(s *server, log *slog.Logger) *lanes {
	return &lanes{server: s, log: log, odd: make(chan net.Conn), end: make(chan struct{}), conns: make(map[net.Conn]struct{})}
}

// When no connection can be accepted, for lack of file descriptors, say, we try
// again soon, and tell about it now and then.
const (
	acceptRest      = 10 * time.Millisecond
	acceptWarnEvery = time.Minute
)

// serve accepts connections on l until stop is called, which closes l.
func (a *lanes) serve(l net.Listener) error {
	a.mu.Lock()
	a.listeners = append(a.listeners, l)
	if a.ending.Load() {
		l.Close() // stop may have looked for listeners before
	}
	a.mu.Unlock()
	var warned time.Time
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			a.open(c)
		case a.ending.Load():
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		default:
			if now := time.Now(); now.Sub(warned) >= acceptWarnEvery {
				a.log.Warn("accepting connections failed", errAttr(err))
				warned = now
			}
			time.Sleep(acceptRest)
		}
	}
}

func (a *lanes) open(c net.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ending.Load() {
		c.Close()
		return
	}
	a.conns[c] = struct{}{}
	a.running.Go(func() {
		n := &lane{lanes: a, conn: c}
		kept := n.run()
		a.mu.Lock()
		delete(a.conns, c)
		a.mu.Unlock()
		if !kept {
			c.Close()
		}
	})
}

// stop takes no more connections and ends all lanes once they have answered what
// they have read. It waits for that until timeout has passed. net/http gets what
// is odd until then.
func (a *lanes) stop(timeout time.Duration) {
	defer close(a.end)
	a.ending.Store(true)
	a.mu.Lock()
	for _, l := range a.listeners {
		l.Close()
	}
	for c := range a.conns {
		c.SetReadDeadline(past)
	}
	a.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		a.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(timeout):
		a.mu.Lock()
		for c := range a.conns {
			c.Close() // its client does not read
		}
		a.mu.Unlock()
	}
}

// past is a deadline that ends reads at once.
var past = time.Unix(1, 0)

// lane serves one connection. Its buffer begins with what has not been answered.
type lane struct {
	*lanes
	conn    net.Conn
	read    []byte
	begun   bool      // a request; the first one when the client connects
	renewed time.Time // when the time to begin one was given last
	direct  bool      // fd, the connection's descriptor, may be used
	fd      uintptr
}

const (
	minLaneBuffer = 1 << 10
	maxLaneBuffer = maxHeader
	sendAt        = 4 << 10     // so many bytes of answers are not kept back
	renewEvery    = time.Second // deadlines cost, and need not be exact
	maxReadsNow   = 16          // in a row
)

// replies holds buffers for answers.
var replies = sync.Pool{New: func() any { b := make([]byte, 0, sendAt); return &b }}

// run answers requests until the connection is to be closed, or belongs to
// net/http: then kept is true.
func (n *lane) run() (kept bool) {
	defer func() {
		if r := recover(); r != nil {
			n.log.Error(fmt.Sprintf("answering a request failed: %v", r), "stack", string(debug.Stack()))
		}
	}()
	n.read = make([]byte, 0, minLaneBuffer)
	n.begun = true
	n.conn.SetDeadline(time.Now().Add(headerTimeout))
	n.heedEnd()
	for {
		state := n.serve()
		if state == laneSlow {
			state = n.take(0)
		}
		switch state {
		case laneOdd:
			return n.handOver()
		case laneClose:
			return false
		}
	}
}

// serve reads and answers, and returns what is to be done then.
//
// It uses the descriptor of a TCP connection itself: see readNow. It reads on until
// there is nothing, as the end may come together with a request, and is not
// announced again then.
func (n *lane) serve() (state laneState) {
	tcp := tcpConn(n.conn)
	if tcp == nil {
		room := n.room()
		if room == nil {
			return laneOdd
		}
		got, err := n.conn.Read(room)
		if got == 0 && err != nil {
			return laneClose
		}
		return n.take(got)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return laneClose
	}
	err = raw.Read(func(fd uintptr) (done bool) {
		n.direct, n.fd = true, fd
		defer func() { n.direct = false }()
		for reads := 0; ; reads++ {
			room := n.room()
			if room == nil {
				state = laneOdd
				return true
			}
			read := readNow
			if reads >= maxReadsNow {
				read = readTold
			}
			got, err := read(fd, room)
			switch {
			case err == unix.EAGAIN:
				return false
			case err != nil || got == 0:
				state = laneClose
				return true
			}
			if state = n.take(got); state != laneRead {
				return true
			}
		}
	})
	if err != nil {
		return laneClose
	}
	return state
}

// readTold is readNow, but the scheduler is told. That wakes the thread of the
// runtime that preempts goroutines: it may sleep since all was idle, and then only a
// timer would wake it, while a client that always has more to ask keeps a processor.
func readTold(fd uintptr, b []byte) (int, error) { return unix.Read(int(fd), b) }

// room returns where to read more, nil if there is too much already, which
// net/http is to say.
func (n *lane) room() []byte {
	if len(n.read) == cap(n.read) {
		if len(n.read) >= maxLaneBuffer {
			return nil
		}
		n.read = append(make([]byte, 0, 2*cap(n.read)), n.read...)
	}
	return n.read[len(n.read):cap(n.read)]
}

// take answers what has been read, of which got bytes are new.
func (n *lane) take(got int) laneState {
	n.read = n.read[:len(n.read)+got]
	state := n.answer()
	if state == laneRead {
		n.renew()
	}
	return state
}

// tcpConn returns the TCP connection that c is, nil if it is something else.
func tcpConn(c net.Conn) *net.TCPConn {
	if l, ok := c.(*limitedConn); ok {
		c = l.Conn
	}
	tcp, _ := c.(*net.TCPConn)
	return tcp
}

// renew gives the client time for its next request: plenty while it has sent
// nothing of it, headerTimeout for all of it once it has begun.
func (n *lane) renew() {
	switch now := time.Now(); {
	case n.begun: // and not yet all there
	case len(n.read) > 0:
		n.conn.SetDeadline(now.Add(headerTimeout))
		n.begun, n.renewed = true, time.Time{}
	case now.Sub(n.renewed) >= renewEvery:
		n.conn.SetDeadline(now.Add(idleTimeout))
		n.renewed = now
	}
	n.heedEnd()
}

// heedEnd has reads end at once when we are stopping: stop may have said so before
// the deadline was set that holds now.
func (n *lane) heedEnd() {
	if n.ending.Load() {
		n.conn.SetReadDeadline(past)
	}
}

// handOver gives the connection to net/http.
func (n *lane) handOver() (kept bool) {
	n.conn.SetDeadline(time.Time{})
	select {
	case n.odd <- &resumedConn{Conn: n.conn, read: n.read}:
		return true
	case <-n.end:
		return false
	}
}

// laneState is what is to be done with a connection next.
type laneState uint8

const (
	laneRead  laneState = iota // read more
	laneOdd                    // let net/http go on
	laneClose                  // close it
	laneSlow                   // answer what may have to wait
)

// answer answers all requests that have been read.
func (n *lane) answer() laneState {
	buffer := replies.Get().(*[]byte)
	defer replies.Put(buffer)
	out, rest, state := (*buffer)[:0], n.read, laneRead
	for state == laneRead && len(rest) > 0 {
		q, size, plain := parsePlain(text(rest))
		if !plain {
			state = laneOdd
			break
		}
		if size == 0 {
			break // not all of it is there yet
		}
		slow := q.mayWait()
		if slow && n.direct {
			state = laneSlow // the descriptor is not to be held meanwhile
			break
		}
		if slow || len(out) >= sendAt {
			if n.write(&out) != nil {
				return laneClose
			}
		}
		q.lane = n
		status, a := q.route.serve(n.server, q.route, q.request)
		if n.ending.Load() || q.close {
			state = laneClose
		}
		out = a.appendResponse(out, status, q.head, state == laneClose)
		rest = rest[size:]
		n.begun = false
	}
	if n.write(&out) != nil {
		return laneClose
	}
	*buffer = out
	n.read = n.read[:copy(n.read, rest)]
	return state
}

// write sends and empties out.
func (n *lane) write(out *[]byte) error {
	if len(*out) == 0 {
		return nil
	}
	rest := *out
	if n.direct {
		if sent, err := writeNow(n.fd, rest); err == nil {
			rest = rest[sent:]
		}
	}
	var err error
	if len(rest) > 0 { // the client is slow, or gone
		_, err = n.conn.Write(rest)
	}
	*out = (*out)[:0]
	return err
}

// watch returns a channel that is closed when the client hangs up, until stop is
// called.
func (n *lane) watch() (gone <-chan struct{}, stop func()) {
	stopWatch := func() {}
	if tcp := tcpConn(n.conn); tcp != nil {
		gone, stopWatch = watchPeer(tcp, hungUp)
	}
	return gone, func() {
		stopWatch()
		// The time to send a request does not run while one is waiting.
		n.conn.SetDeadline(time.Now().Add(idleTimeout))
	}
}

// plainRequest is a request in the form that lanes answer.
type plainRequest struct {
	request
	route *route
	head  bool // HEAD, not GET
	close bool // the client wants the connection closed
}

// text returns b as a string without copying it: nothing may keep it, or a part
// of it, when the request is answered, because b is used again.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// oddFields are header fields that change what a request means, in a way that
// lanes do not know.
var oddFields = []string{"Content-Length", "Transfer-Encoding", "Expect", "Upgrade", "TE", "Trailer"}

// parsePlain reads the request at the beginning of s. It returns its size, 0 if
// not all of it is there, and false if it is not in plain form: a GET or HEAD of
// HTTP/1.1 for a path that we know and a query of printable ASCII, with one Host,
// fields of valid names and printable values, and no body.
func parsePlain(s string) (q plainRequest, size int, plain bool) {
	line, rest, found := strings.Cut(s, "\r\n")
	if !found {
		return q, 0, !strings.Contains(line, "\n") // which net/http takes too
	}
	method, line, _ := strings.Cut(line, " ")
	q.head = method == http.MethodHead
	target, found := strings.CutSuffix(line, " HTTP/1.1")
	if !found || !q.head && method != http.MethodGet || !all(target, isTarget) {
		return q, 0, false
	}
	path, query, _ := strings.Cut(target, "?")
	if q.route = routes[path]; q.route == nil {
		return q, 0, false
	}
	q.query = query

	for hosts := 0; ; {
		line, rest, found = strings.Cut(rest, "\r\n")
		switch {
		case !found:
			return q, 0, !strings.Contains(line, "\n")
		case line == "":
			return q, len(s) - len(rest), hosts == 1
		}
		name, value, found := strings.Cut(line, ":")
		if !found || name == "" || !all(name, isToken) || !all(value, isValue) {
			return q, 0, false
		}
		value = strings.Trim(value, " \t")
		switch {
		case same(name, "Host"):
			hosts++
			if value == "" || !all(value, isHost) {
				return q, 0, false
			}
		case same(name, "Accept"):
			q.json = q.json || acceptsJSON(value)
		case same(name, "Connection"):
			q.close = q.close || same(value, "close")
			if !q.close && !same(value, "keep-alive") {
				return q, 0, false
			}
		default:
			for _, odd := range oddFields {
				if same(name, odd) {
					return q, 0, false
				}
			}
		}
	}
}

// same reports whether s and t are the same in any case.
func same(s, t string) bool { return len(s) == len(t) && strings.EqualFold(s, t) }

// class is a set of bytes that may stand at some place of a request.
type class uint8

const (
	isTarget class = 1 << iota // of the path and query
	isToken                    // of the name of a field
	isValue                    // of its value
	isHost                     // of the value of Host
)

var classes = func() (t [256]class) {
	for c := 0x21; c < 0x7f; c++ {
		t[c] = isTarget | isValue
		letter := 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9'
		if letter || strings.IndexByte("!#$%&'*+-.^_`|~", byte(c)) >= 0 {
			t[c] |= isToken
		}
		if letter || strings.IndexByte("-._:[]", byte(c)) >= 0 {
			t[c] |= isHost
		}
	}
	t[' '], t['\t'] = isValue, isValue
	return t
}()

// all reports whether all bytes of s are of class c.
func all(s string, c class) bool {
	for i := range len(s) {
		if classes[s[i]]&c == 0 {
			return false
		}
	}
	return true
}

// appendResponse appends a as the whole response, without the body to a HEAD.
func (a *answer) appendResponse(b []byte, status int, head, last bool) []byte {
	b = append(b, statusLine(status)...)
	b = append(b, a.head...)
	if last {
		b = append(b, "Connection: close\r\n"...)
	}
	b = append(b, "Date: "...)
	b = append(b, httpDate()...)
	b = append(b, "\r\n\r\n"...)
	if !head {
		b = append(b, a.body...)
	}
	return b
}

// statusLine returns the first line of a response.
func statusLine(status int) string {
	switch status {
	case http.StatusOK:
		return "HTTP/1.1 200 OK\r\n"
	case http.StatusNotFound:
		return "HTTP/1.1 404 Not Found\r\n"
	}
	return "HTTP/1.1 " + strconv.Itoa(status) + " " + http.StatusText(status) + "\r\n"
}

// date is the value of a Date field, which changes every second.
type date struct {
	unix int64
	text string
}

var lastDate atomic.Pointer[date]

func httpDate() string {
	now := time.Now()
	if d := lastDate.Load(); d != nil && d.unix == now.Unix() {
		return d.text
	}
	d := &date{now.Unix(), now.UTC().Format(http.TimeFormat)}
	lastDate.Store(d)
	return d.text
}

// oddListener gives net/http the connections that lanes hand over.
type oddListener struct {
	*lanes
	addr net.Addr
}

func (l oddListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.odd:
		return c, nil
	case <-l.end:
		return nil, net.ErrClosed
	}
}

func (l oddListener) Close() error   { return nil }
func (l oddListener) Addr() net.Addr { return l.addr }

// resumedConn is a connection of which something has been read already.
type resumedConn struct {
	net.Conn
	read []byte
}

func (c *resumedConn) Read(p []byte) (int, error) {
	if len(c.read) == 0 {
		c.read = nil
		return c.Conn.Read(p)
	}
	n := copy(p, c.read)
	c.read = c.read[n:]
	return n, nil
}
