package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// server answers over HTTP which host to use, from the monitor's latest view.
type server struct {
	monitor  *monitor
	log      *slog.Logger // of component selection
	hosts    []hostAnswers
	version  *answer
	stopping chan struct{} // closed when requests that wait must be answered

	// cursor is the index of the replica that was returned last; the next one is
	// looked for behind it. It starts at the first entry of the list.
	cursor atomic.Int64
}

func newServer(m *monitor, log *slog.Logger, version string) *server {
	s := &server{monitor: m, log: log, version: textAnswer(version), stopping: make(chan struct{})}
	for _, h := range m.cfg.hosts {
		s.hosts = append(s.hosts, newHostAnswers(h))
	}
	return s
}

// selection is what a route makes of the parameters for a replica.
type selection struct {
	ms, bytes bool // the route looks at that lag
	threshold bool // and an omitted one means the global threshold
	either    bool // one of both lags is enough
	mostSync  bool // the least lagged replica, not the next one
}

// request is all of a request that its answer depends on.
type request struct {
	query string
	json  bool // the client accepts application/json by name

	// Who sees it when the client goes away.
	lane *lane
	http *http.Request
}

// gone returns a channel that is closed when the client goes away, until stop is
// called.
func (q *request) gone() (gone <-chan struct{}, stop func()) {
	if q.lane != nil {
		return q.lane.watch()
	}
	return q.http.Context().Done(), func() {}
}

// mayWait reports whether the request may have to wait for its answer.
func (q *request) mayWait() bool {
	return strings.Contains(q.query, "wait") || strings.Contains(q.query, "%")
}

// route is an endpoint: a function, with what it needs to know. It returns the
// status and the answer.
type route struct {
	serve func(*server, *route, request) (int, *answer)
	path  string
	selection
}

// routes is the whole HTTP API.
var routes = func() map[string]*route {
	m := make(map[string]*route)
	for _, r := range []*route{
		{path: "/master", serve: (*server).serveMaster},
		{path: "/replica", serve: (*server).serveReplica, selection: selection{ms: true, bytes: true}},
		{path: "/sync_by_time", serve: (*server).serveReplica, selection: selection{ms: true, threshold: true}},
		{path: "/sync_by_bytes", serve: (*server).serveReplica, selection: selection{bytes: true, threshold: true}},
		{path: "/sync_by_time_or_bytes", serve: (*server).serveReplica,
			selection: selection{ms: true, bytes: true, threshold: true, either: true}},
		{path: "/sync_by_time_and_bytes", serve: (*server).serveReplica,
			selection: selection{ms: true, bytes: true, threshold: true}},
		{path: "/most_sync_by_bytes", serve: (*server).serveReplica,
			selection: selection{bytes: true, threshold: true, mostSync: true}},
		{path: "/hosts", serve: (*server).serveHosts},
		{path: "/status", serve: (*server).serveStatus},
		{path: "/check", serve: (*server).serveCheck},
		{path: "/version", serve: (*server).serveVersion},
		{path: "/live", serve: (*server).serveLive},
		{path: "/ready", serve: (*server).serveReady},
	} {
		m[r.path] = r
	}
	return m
}()

// ServeHTTP answers what lanes do not. It matches paths exactly, without the
// cleaning and redirects of http.ServeMux.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		// net/http would read the body of a request that it has answered.
		w.Header()["Connection"] = closing
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header()["Allow"] = allowed
		answerEmpty.write(w, http.StatusMethodNotAllowed)
		return
	}
	if r.ContentLength != 0 {
		answerEmpty.write(w, http.StatusRequestEntityTooLarge)
		return
	}
	rt := routes[r.URL.Path]
	if rt == nil {
		answerEmpty.write(w, http.StatusNotFound)
		return
	}
	status, a := rt.serve(s, rt, request{query: r.URL.RawQuery, json: wantsJSON(r.Header), http: r})
	a.write(w, status)
}

var (
	allowed = []string{"GET, HEAD"}
	closing = []string{"close"}
)

func (s *server) serveLive(*route, request) (int, *answer) { return http.StatusOK, answerOK }

func (s *server) serveVersion(*route, request) (int, *answer) { return http.StatusOK, s.version }

func (s *server) serveReady(*route, request) (int, *answer) {
	if !s.monitor.table.view().ready {
		return http.StatusServiceUnavailable, answerNotReady
	}
	return http.StatusOK, answerOK
}

func (s *server) serveHosts(*route, request) (int, *answer) {
	v := s.monitor.table.view()
	if !v.ready {
		return http.StatusServiceUnavailable, answerNotReady
	}
	return http.StatusOK, v.render(s.hosts).hosts
}

func (s *server) serveStatus(_ *route, q request) (int, *answer) {
	v := s.monitor.table.view()
	if !v.ready {
		return http.StatusServiceUnavailable, answerNotReady
	}
	p, ok := parseParams(q.query)
	if !ok {
		return http.StatusBadRequest, answerBadQuery
	}
	switch i, bad := s.find(&p); {
	case bad != nil:
		return http.StatusBadRequest, bad
	case i < 0:
		return http.StatusNotFound, answerEmpty
	default:
		return http.StatusOK, v.render(s.hosts).status[i]
	}
}

// find returns the index of the first host that the host and port parameters
// name, -1 if there is none, or what to answer when they are invalid.
func (s *server) find(p *params) (i int, bad *answer) {
	if !p.host.set {
		return -1, answerNoHost
	}
	var port uint64
	if p.port.set {
		var err error
		if port, err = strconv.ParseUint(p.port.value, 10, 16); err != nil || port == 0 {
			return -1, answersInvalid["port"]
		}
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(p.host.value, "["), "]")
	for i, h := range s.monitor.cfg.hosts {
		if (h.name == p.host.value || h.addr == bare) && (port == 0 || uint64(h.port) == port) {
			return i, nil
		}
	}
	return -1, nil
}

// serveCheck tells a load balancer whether one host is what it wants now.
func (s *server) serveCheck(_ *route, q request) (int, *answer) {
	v := s.monitor.table.view()
	if !v.ready {
		return http.StatusServiceUnavailable, answerNotReady
	}
	p, ok := parseParams(q.query)
	if !ok {
		return http.StatusBadRequest, answerBadQuery
	}
	i, bad := s.find(&p)
	c, invalid := p.conditions()
	role := p.role.value
	switch {
	case bad != nil:
		return http.StatusBadRequest, bad
	case role != "master" && role != "replica":
		return http.StatusBadRequest, answersInvalid["role"]
	case invalid != "":
		return http.StatusBadRequest, answersInvalid[invalid]
	case i < 0:
		return http.StatusNotFound, answerEmpty
	}
	m := v.masterMismatch(i)
	if role == "replica" {
		m = v.mismatch(&v.hosts[i], &c.filter)
	}
	if m != 0 {
		return http.StatusServiceUnavailable, textAnswer(m.words())
	}
	return http.StatusOK, answerOK
}

// serveMaster ignores all parameters but wait_ms.
func (s *server) serveMaster(_ *route, q request) (int, *answer) {
	v := s.monitor.table.view()
	if q.query != "" {
		p, ok := parseParams(q.query)
		wait, valid := p.waitMS.wait()
		until := time.Now().Add(wait)
		if valid && wait > 0 {
			v = s.awaitReady(q, until)
		}
		switch {
		case !v.ready: // before all validation
		case !ok:
			return http.StatusBadRequest, answerBadQuery
		case !valid:
			return http.StatusBadRequest, answersInvalid["wait_ms"]
		case v.master < 0 && wait > 0:
			v = s.awaitMaster(q, until)
		}
	}
	return s.answerHost(q, v, v.master)
}

// answerHost names host i of v, or says that there is none if i is negative.
func (s *server) answerHost(q request, v *view, i int) (int, *answer) {
	switch {
	case !v.ready:
		return http.StatusServiceUnavailable, answerNotReady
	case i < 0 && q.json:
		return http.StatusNotFound, answerNobody
	case i < 0:
		return http.StatusNotFound, answerEmpty
	case q.json:
		return http.StatusOK, s.hosts[i].json
	}
	return http.StatusOK, s.hosts[i].text
}

// serveReplica answers all routes that want a replica.
func (s *server) serveReplica(rt *route, q request) (int, *answer) {
	p, ok := parseParams(q.query)
	v := s.monitor.table.view()
	var until time.Time
	if wait, valid := p.waitMS.wait(); valid && wait > 0 {
		until = time.Now().Add(wait)
		v = s.awaitReady(q, until)
	}
	if !v.ready {
		return http.StatusServiceUnavailable, answerNotReady
	}
	if !ok {
		return http.StatusBadRequest, answerBadQuery
	}
	c, bad := p.conditions()
	if bad != "" {
		return http.StatusBadRequest, answersInvalid[bad]
	}
	rt.apply(&c.filter, v)
	i := s.pick(v, rt, &c.filter)
	if i < 0 && !until.IsZero() {
		v, i = s.awaitReplica(q, until, rt, c.filter)
	}
	if i < 0 {
		i = s.fallBack(v, rt, c.fallback)
	}
	return s.answerHost(q, v, i)
}

// apply makes f what the route wants: without the lags that it does not look at,
// and with the global thresholds where they are meant by an omitted one.
func (rt *route) apply(f *filter, v *view) {
	if !rt.ms {
		f.lagMS = limit{}
	} else if rt.threshold && !f.lagMS.set {
		f.lagMS = limit{true, v.syncMS}
	}
	if !rt.bytes {
		f.lagBytes = limit{}
	} else if rt.threshold && !f.lagBytes.set {
		f.lagBytes = limit{true, v.syncBytes}
	}
	f.either = rt.either
}

// pick returns the index of the replica that the route and f choose, or -1.
func (s *server) pick(v *view, rt *route, f *filter) int {
	if rt.mostSync {
		return v.pickMostSync(f)
	}
	for {
		last := s.cursor.Load()
		i := v.pickReplica(f, int(last))
		if i < 0 || s.cursor.CompareAndSwap(last, int64(i)) {
			return i
		}
	}
}

// fallBack returns the index of the host to use when no replica matches, or -1.
func (s *server) fallBack(v *view, rt *route, to fallback) int {
	switch {
	case to == fallbackNone:
		return -1
	case v.master < 0 && to == fallbackAny:
		return v.pickMostSync(&filter{})
	case v.master >= 0 && s.log.Enabled(context.Background(), slog.LevelDebug):
		s.log.Debug("master returned instead of replica", "context", rt.path)
	}
	return v.master
}

// await returns the first view that likes accepts, or the latest one when the time
// is over, the client has gone or we are stopping.
func (s *server) await(q request, until time.Time, likes func(*view) bool) *view {
	waiters := &s.monitor.table.waiters
	w := waiters.add(likes)
	defer waiters.remove(w)
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	gone, stop := q.gone()
	defer stop()
	for over := false; ; {
		v := s.monitor.table.view()
		if over || likes(v) {
			return v
		}
		select {
		case <-w.now:
		case <-timer.C:
			over = true
		case <-gone:
			over = true
		case <-s.stopping:
			over = true
		}
	}
}

// awaitReady waits for every host's first check.
func (s *server) awaitReady(q request, until time.Time) *view {
	if v := s.monitor.table.view(); v.ready {
		return v
	}
	return s.await(q, until, func(v *view) bool { return v.ready })
}

// awaitMaster waits for a master. Any replica may become it.
func (s *server) awaitMaster(q request, until time.Time) *view {
	defer s.monitor.demand(true, false)()
	return s.await(q, until, func(v *view) bool { return v.master >= 0 })
}

// awaitReplica waits for a replica that f accepts, and has the replicas checked
// for it, and where f limits lag_ms the master too, as that lag depends on both.
func (s *server) awaitReplica(q request, until time.Time, rt *route, f filter) (v *view, i int) {
	defer s.monitor.demand(true, f.lagMS.set)()
	v = s.await(q, until, func(v *view) bool { return v.pickReplica(&f, 0) >= 0 })
	return v, s.pick(v, rt, &f)
}

// Limits of the HTTP server. Clients pool connections for minutes; an idle one
// costs its buffers.
const (
	maxConnections = 10_000
	headerTimeout  = 10 * time.Second
	idleTimeout    = 10 * time.Minute
	maxHeader      = 8 << 10
	bodyTimeout    = time.Second // to get rid of a body that nobody wants
)

// newHTTPServer returns the server that serves s.
func newHTTPServer(s *server, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		// Longer than any wait, which it would end: it is for bodies that do not come.
		ReadTimeout:                  maxWait*time.Millisecond + 2*headerTimeout,
		IdleTimeout:                  idleTimeout,
		WriteTimeout:                 maxWait*time.Millisecond + headerTimeout,
		MaxHeaderBytes:               maxHeader,
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(log.Handler(), slog.LevelError),
	}
}

// listen opens the listeners for address, an IP address or "*" for all of both
// families, of which one may be missing: that is a warning. Port 0 takes a free
// one.
func listen(address string, port uint16) (ls []net.Listener, warning string, err error) {
	if address != "*" {
		network := "tcp4"
		if a, err := netip.ParseAddr(address); err == nil && a.Is6() {
			network = "tcp6" // which does not take IPv4 connections at ::
		}
		l, err := net.Listen(network, net.JoinHostPort(address, strconv.Itoa(int(port))))
		if err != nil {
			return nil, "", err
		}
		return []net.Listener{l}, "", nil
	}
	var errs []error
	for _, family := range []struct{ network, wildcard string }{{"tcp4", "0.0.0.0"}, {"tcp6", "::"}} {
		l, err := net.Listen(family.network, net.JoinHostPort(family.wildcard, strconv.Itoa(int(port))))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		port = portOf(l) // the same for both families
		ls = append(ls, l)
	}
	switch {
	case len(ls) == 0:
		return nil, "", errors.Join(errs...)
	case len(errs) > 0 && errors.Is(errs[0], syscall.EADDRINUSE):
		for _, l := range ls {
			l.Close()
		}
		return nil, "", errs[0]
	case len(errs) > 0:
		return ls, fmt.Sprintf("listening on one address family only: %v", errs[0]), nil
	}
	return ls, "", nil
}

func portOf(l net.Listener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }

// limitListener bounds the number of open connections. At the bound, further
// ones wait in the kernel's queue.
type limitListener struct {
	net.Listener
	free chan struct{} // a place for each open connection
}

func (l *limitListener) Accept() (net.Conn, error) {
	l.free <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.free
		return nil, err
	}
	return &limitedConn{Conn: c, free: l.free}, nil
}

// limitedConn gives its place back when it is closed.
type limitedConn struct {
	net.Conn
	once sync.Once
	free chan struct{}
}

func (c *limitedConn) Close() error {
	defer c.once.Do(func() { <-c.free })
	return c.Conn.Close()
}
