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

// route is an endpoint: a function, with what it needs to know.
type route struct {
	serve func(*server, http.ResponseWriter, *http.Request, *route)
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

// ServeHTTP matches paths exactly, without the cleaning and redirects of
// http.ServeMux.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header()["Allow"] = allowed
		answerEmpty.write(w, http.StatusMethodNotAllowed)
		return
	}
	if r.ContentLength != 0 {
		w.Header()["Connection"] = closing
		answerEmpty.write(w, http.StatusRequestEntityTooLarge)
		return
	}
	rt := routes[r.URL.Path]
	if rt == nil {
		answerEmpty.write(w, http.StatusNotFound)
		return
	}
	rt.serve(s, w, r, rt)
}

var (
	allowed = []string{"GET, HEAD"}
	closing = []string{"close"}
)

func (s *server) serveLive(w http.ResponseWriter, r *http.Request, _ *route) {
	answerOK.write(w, http.StatusOK)
}

func (s *server) serveVersion(w http.ResponseWriter, r *http.Request, _ *route) {
	s.version.write(w, http.StatusOK)
}

func (s *server) serveReady(w http.ResponseWriter, r *http.Request, _ *route) {
	if !s.monitor.table.view().ready {
		answerNotReady.write(w, http.StatusServiceUnavailable)
		return
	}
	answerOK.write(w, http.StatusOK)
}

func (s *server) serveHosts(w http.ResponseWriter, r *http.Request, _ *route) {
	v := s.monitor.table.view()
	if !v.ready {
		answerNotReady.write(w, http.StatusServiceUnavailable)
		return
	}
	v.render(s.hosts).hosts.write(w, http.StatusOK)
}

func (s *server) serveStatus(w http.ResponseWriter, r *http.Request, _ *route) {
	v := s.monitor.table.view()
	if !v.ready {
		answerNotReady.write(w, http.StatusServiceUnavailable)
		return
	}
	p, ok := parseParams(r.URL.RawQuery)
	if !ok {
		answerBadQuery.write(w, http.StatusBadRequest)
		return
	}
	i, bad := s.find(&p)
	switch {
	case bad != nil:
		bad.write(w, http.StatusBadRequest)
	case i < 0:
		answerEmpty.write(w, http.StatusNotFound)
	default:
		v.render(s.hosts).status[i].write(w, http.StatusOK)
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
	for i, h := range s.monitor.cfg.hosts {
		if (h.name == p.host.value || h.addr == p.host.value) && (port == 0 || uint64(h.port) == port) {
			return i, nil
		}
	}
	return -1, nil
}

// serveCheck tells a load balancer whether one host is what it wants now.
func (s *server) serveCheck(w http.ResponseWriter, r *http.Request, _ *route) {
	v := s.monitor.table.view()
	if !v.ready {
		answerNotReady.write(w, http.StatusServiceUnavailable)
		return
	}
	p, ok := parseParams(r.URL.RawQuery)
	if !ok {
		answerBadQuery.write(w, http.StatusBadRequest)
		return
	}
	i, bad := s.find(&p)
	c, invalid := p.conditions()
	switch {
	case bad != nil:
		bad.write(w, http.StatusBadRequest)
		return
	case p.role.value != "master" && p.role.value != "replica":
		answersInvalid["role"].write(w, http.StatusBadRequest)
		return
	case invalid != "":
		answersInvalid[invalid].write(w, http.StatusBadRequest)
		return
	case i < 0:
		answerEmpty.write(w, http.StatusNotFound)
		return
	}
	var m mismatch
	if p.role.value == "master" {
		m = v.masterMismatch(i)
	} else {
		m = v.mismatch(&v.hosts[i], &c.filter)
	}
	if m != 0 {
		textAnswer(m.words()).write(w, http.StatusServiceUnavailable)
		return
	}
	answerOK.write(w, http.StatusOK)
}

// serveMaster ignores all parameters but wait_ms.
func (s *server) serveMaster(w http.ResponseWriter, r *http.Request, _ *route) {
	v := s.monitor.table.view()
	if r.URL.RawQuery != "" {
		p, ok := parseParams(r.URL.RawQuery)
		wait, valid := p.waitMS.wait()
		if until := time.Now().Add(wait); valid {
			v = s.awaitReady(r, until)
			v = s.awaitMaster(r, v, until)
		}
		if bad := answersInvalid["wait_ms"]; v.ready && (!ok || !valid) {
			if !ok {
				bad = answerBadQuery
			}
			bad.write(w, http.StatusBadRequest)
			return
		}
	}
	s.answerHost(w, r, v, v.master)
}

// answerHost names host i of v, or says that there is none if i is negative.
func (s *server) answerHost(w http.ResponseWriter, r *http.Request, v *view, i int) {
	json := wantsJSON(r.Header)
	switch {
	case !v.ready:
		answerNotReady.write(w, http.StatusServiceUnavailable)
	case i < 0 && json:
		answerNobody.write(w, http.StatusNotFound)
	case i < 0:
		answerEmpty.write(w, http.StatusNotFound)
	case json:
		s.hosts[i].json.write(w, http.StatusOK)
	default:
		s.hosts[i].text.write(w, http.StatusOK)
	}
}

// serveReplica answers all routes that want a replica.
func (s *server) serveReplica(w http.ResponseWriter, r *http.Request, rt *route) {
	p, ok := parseParams(r.URL.RawQuery)
	v := s.monitor.table.view()
	var until time.Time
	if wait, valid := p.waitMS.wait(); valid && wait > 0 {
		until = time.Now().Add(wait)
		v = s.awaitReady(r, until)
	}
	if !v.ready {
		answerNotReady.write(w, http.StatusServiceUnavailable)
		return
	}
	if !ok {
		answerBadQuery.write(w, http.StatusBadRequest)
		return
	}
	c, bad := p.conditions()
	if bad != "" {
		answersInvalid[bad].write(w, http.StatusBadRequest)
		return
	}
	rt.apply(&c.filter, v)
	i := s.pick(v, rt, &c.filter)
	if i < 0 && !until.IsZero() {
		v, i = s.awaitReplica(r, until, rt, c.filter)
	}
	if i < 0 {
		i = s.fallBack(v, rt, c.fallback)
	}
	s.answerHost(w, r, v, i)
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

// await returns the first view that ok accepts, or the latest one when the time
// is over, the client has gone or we are stopping.
func (s *server) await(r *http.Request, until time.Time, ok func(*view) bool) *view {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	for {
		v := s.monitor.table.view()
		if ok(v) {
			return v
		}
		select {
		case <-v.changed:
		case <-timer.C:
			return s.monitor.table.view()
		case <-r.Context().Done():
			return v
		case <-s.stopping:
			return v
		}
	}
}

// awaitReady waits for every host's first check.
func (s *server) awaitReady(r *http.Request, until time.Time) *view {
	if v := s.monitor.table.view(); v.ready {
		return v
	}
	return s.await(r, until, func(v *view) bool { return v.ready })
}

// awaitMaster waits for a master, if v has none. Any replica may become it.
func (s *server) awaitMaster(r *http.Request, v *view, until time.Time) *view {
	if !v.ready || v.master >= 0 {
		return v
	}
	defer s.monitor.demand(true, false)()
	return s.await(r, until, func(v *view) bool { return v.master >= 0 })
}

// awaitReplica waits for a replica that f accepts, and has the replicas checked
// for it, and where f limits lag_ms the master too, as that lag depends on both.
func (s *server) awaitReplica(r *http.Request, until time.Time, rt *route, f filter) (v *view, i int) {
	defer s.monitor.demand(true, f.lagMS.set)()
	v = s.await(r, until, func(v *view) bool {
		i = s.pick(v, rt, &f)
		return i >= 0
	})
	return v, i
}

// Limits of the HTTP server. Clients pool connections for minutes; an idle one
// costs its buffers.
const (
	maxConnections = 10_000
	headerTimeout  = 10 * time.Second
	idleTimeout    = 10 * time.Minute
	maxHeader      = 8 << 10
)

// newHTTPServer returns the server that serves s.
func newHTTPServer(s *server, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            headerTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader,
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(log.Handler(), slog.LevelDebug),
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
