package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// laneStack is a server behind lanes and net/http, as in main, for clients in a
// synctest bubble.
type laneStack struct {
	*lanes
	server *server
	web    *http.Server
	pipes  *pipeListener
	places chan struct{}
	output *monOutput
	once   sync.Once // for end
}

const laneLimit = 10

// newLaneStack serves s until the test ends. Then nothing may be left of it.
func newLaneStack(t *testing.T, s *server) *laneStack {
	t.Helper()
	k := &laneStack{server: s, pipes: newPipeListener(), places: make(chan struct{}, laneLimit), output: new(monOutput)}
	log := component(newLogger(k.output, slog.LevelInfo, false), "http")
	k.lanes, k.web = newLanes(s, log), newHTTPServer(s, log)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := k.serve(&limitListener{k.pipes, k.places}); err != nil {
			t.Errorf("serve = %v; want nil after stop", err)
		}
	})
	wg.Go(func() { k.web.Serve(oddListener{k.lanes, k.pipes.Addr()}) })
	t.Cleanup(func() {
		k.end(time.Second)
		k.web.Close()
		wg.Wait()
		if n := k.taken(); n != 0 {
			t.Errorf("%d places are taken at the end; want none", n)
		}
	})
	return k
}

// end is stop, for once.
func (k *laneStack) end(timeout time.Duration) {
	k.once.Do(func() { k.stop(timeout) })
}

// taken returns how many places are taken, once all is quiet: one by each
// connection, and one by the listener until the end.
func (k *laneStack) taken() int {
	synctest.Wait()
	return len(k.places)
}

// laneClient is a client that reads whatever comes.
type laneClient struct {
	net.Conn
	done   chan struct{} // closed when the server has closed the connection
	start  time.Time
	raw    []byte
	before time.Duration // when the last bytes but one came, since the start
	latest time.Duration // when the last ones did
	closed time.Duration
}

func (k *laneStack) dial(t *testing.T) *laneClient {
	t.Helper()
	c := &laneClient{Conn: k.pipes.dial(), done: make(chan struct{}), start: time.Now()}
	t.Cleanup(func() { c.Close() })
	return c
}

// listen makes c read. It returns c.
func (c *laneClient) listen() *laneClient {
	go func() {
		defer close(c.done)
		b := make([]byte, 4<<10)
		for {
			n, err := c.Read(b)
			if n > 0 {
				c.raw = append(c.raw, b[:n]...)
				c.before, c.latest = c.latest, time.Since(c.start)
			}
			if err != nil {
				c.closed = time.Since(c.start)
				return
			}
		}
	}()
	return c
}

// laneAnswers returns what matters of each of the responses in raw: all but the
// date, and how the header is written.
func laneAnswers(t *testing.T, raw []byte) []string {
	t.Helper()
	var answers []string
	for r := bufio.NewReader(bytes.NewReader(raw)); ; {
		if _, err := r.Peek(1); err != nil {
			return answers
		}
		// It may be that of a HEAD; the body is read by us.
		resp, err := http.ReadResponse(r, &http.Request{Method: "HEAD"})
		if err != nil {
			t.Fatalf("%d good responses, then %v: %q", len(answers), err, raw)
		}
		if date := resp.Header.Get("Date"); date != "" {
			if _, err := http.ParseTime(date); err != nil || !strings.HasSuffix(date, " GMT") {
				t.Errorf("Date: %s", date)
			}
			resp.Header.Set("Date", "D")
		}
		var body []byte
		if next, _ := r.Peek(7); resp.ContentLength < 0 {
			body, _ = io.ReadAll(r)
		} else if len(next) > 0 && string(next) != "HTTP/1." {
			body = make([]byte, resp.ContentLength)
			if _, err := io.ReadFull(r, body); err != nil {
				t.Fatalf("a body ends early: %v: %q", err, raw)
			}
		}
		if resp.Close {
			resp.Header.Set("Connection", "close") // as it was sent
		}
		answers = append(answers, fmt.Sprintf("%s %s %v %q", resp.Proto, resp.Status, resp.Header, body))
	}
}

// laneTalk returns the answers to a client that sends the given bytes in pieces,
// each as long as the next of cuts says, and whether the connection was kept open
// after the last one.
func laneTalk(t *testing.T, s *server, sent string, cuts []byte, withLanes bool) (answers []string, kept bool) {
	t.Helper()
	var c *laneClient
	if withLanes {
		c = newLaneStack(t, s).dial(t)
	} else {
		pipes, web := newPipeListener(), newHTTPServer(s, slog.New(slog.DiscardHandler))
		go web.Serve(pipes)
		t.Cleanup(func() { web.Close() })
		c = (&laneStack{pipes: pipes}).dial(t)
	}
	c.SetReadDeadline(c.start.Add(24 * time.Hour)) // should it never be closed
	c.listen()
	go func() {
		for i := 0; sent != ""; i++ {
			piece := sent
			if len(cuts) > 0 {
				piece = sent[:min(len(sent), 1+int(cuts[i%len(cuts)]))]
			}
			if _, err := io.WriteString(c, piece); err != nil {
				return
			}
			sent = sent[len(piece):]
		}
	}()
	<-c.done
	answers = laneAnswers(t, c.raw)
	if n := len(answers) - 1; n >= 0 {
		// When the time for a request is over, net/http may or may not complain; and
		// where exactly one is too large depends on how it read what came before.
		late := c.latest-c.before >= headerTimeout
		if late && laneComplains(answers[n:], "400 Bad Request") || laneComplains(answers[n:], "431 Request Header Fields Too Large") {
			return answers[:n], true
		}
	}
	return answers, c.closed-c.latest >= headerTimeout
}

// laneComplains reports whether answers are one that net/http makes by itself.
func laneComplains(answers []string, what string) bool {
	return len(answers) == 1 && strings.HasSuffix(answers[0], strconv.Quote(what))
}

// laneSeeds are things that clients send.
func laneSeeds() []string {
	const end = " HTTP/1.1\r\nHost: x\r\n\r\n"
	var seeds []string
	for _, target := range append(httpRoutes, "/", "/nowhere", "/%6daster", "/master/", "//version", "/live#x", "*", "http://y/live", "http://y",
		"/status?host=host-2", "/check?host=host-2&role=replica", "/master?wait_ms=50", "/replica?min_lsn=0/3000060&wait_ms=70",
		"/replica?min_lsn=0%2F3000060&w%61it_ms=20000", "/replica?wait%5Fms=x", "/replica?lag_ms=1;lag_ms=2", "/replica?lag_ms=+1", "/replica?%zz",
		"/replica?", "/replica??lag_ms=1", "/replica?a#b", "/replica?a=%00", "/replica?\"<>^`{|}", "/live?\x01", "/live?\x7f", "/live?\x80\xff") {
		for _, method := range []string{"GET ", "HEAD ", "get ", "POST ", "OPTIONS ", "GET  "} {
			seeds = append(seeds, method+target+end)
		}
	}
	for _, line := range []string{"GET /live HTTP/1.0", "GET /live HTTP/1.2", "GET /live HTTP/2.0", "GET /live http/1.1", "GET /live", "GET /live  HTTP/1.1",
		"GET /live HTTP/1.1 ", "PRI * HTTP/2.0", "", " GET /live HTTP/1.1", "GET\t/live HTTP/1.1", "GET /live\r HTTP/1.1", "CONNECT x:1 HTTP/1.1"} {
		seeds = append(seeds, line+"\r\nHost: x\r\n\r\n")
	}
	for _, fields := range []string{"", "Host:", "Host:x", "host:\tx\t", "HOST: x:80", "Host: [::1]:80", "Host: a b", "Host: x\r\nHost: x", "Host: x\r\nhost: y", "Host: x/y",
		"Host: x,y", "Host: \xe9", "Host: x%20", "Host: a_b", "Host: x\r\nAccept: application/json", "Host: x\r\nACCEPT: text/html\r\naccept: Application/JSON;v=1",
		"Host: x\r\nAccept: application/json;q=0", "Host: x\r\nAccept: application/json;q=0.0\r\nAccept: application/json", "Host: x\r\nAccept: application/json\r\nAccept: */*", "Host: x\r\nAccept:", "Host: x\r\nAccept: ,;,",
		"Host: x\r\nConnection: close", "Host: x\r\nConnection: Close\r\nConnection: x", "Host: x\r\nConnection: Keep-Alive", "Host: x\r\nConnection: close\r\nConnection: keep-alive", "Host: x\r\nConnection: keep-alive\r\nConnection: close",
		"Host: x\r\nConnection: close, TE", "Host: x\r\nConnection: TE, close", "Host: x\r\nConnection: upgrade\r\nUpgrade: h2c", "Host: x\r\nConnection:", "Host: x\r\nUpgrade: websocket",
		"Host: x\r\nContent-Length: 0", "Host: x\r\nContent-Length: 00", "Host: x\r\nContent-Length: 5", "Host: x\r\nContent-Length: -1", "Host: x\r\nContent-Length: 0\r\nContent-Length: 0",
		"Host: x\r\nTransfer-Encoding: chunked", "Host: x\r\nTransfer-Encoding: gzip", "Host: x\r\nTransfer-Encoding: identity", "Host: x\r\nExpect: 100-continue",
		"Host: x\r\nExpect: x", "Host: x\r\nTrailer: x", "Host: x\r\nTE: trailers", "Host: x\r\n folded: x", "Host: x\r\nA: b\r\n\tc", "Host: x\r\nA : b", "Host: x\r\n: b", "Host: x\r\nA",
		"Host: x\r\nA b: c", "Host: x\r\nA\x00: c", "Host: x\r\nA: \x00", "Host: x\r\nA: \x7f", "Host: x\r\nA: \x80\xff", "Host: x\r\nA: \t \t", "Host: x\r\n\xc3\xa9: c", "Host: x\r\nA: b\rc",
		"Host: x\r\nCo\u212aie: x", "Host: x\r\nPragma: no-cache", "Host: x\nA: b", "Host: x\r\nProxy-Connection: close",
		"Host: x\r\nA: " + strings.Repeat("a", 5000), "Host: x\r\nA: " + strings.Repeat("a", 9000), "Host: x\r\nA: " + strings.Repeat("a", 13000), "Host: x" + strings.Repeat("\r\na: b", 1500)} {
		seeds = append(seeds, "GET /master HTTP/1.1\r\n"+fields+"\r\n\r\n", "HEAD /nowhere HTTP/1.1\r\n"+fields+"\r\n\r\n")
	}
	for _, body := range []string{"Content-Length: 2\r\n\r\nhi", "Content-Length: 100000\r\n\r\nhi", "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "Content-Length: 2\r\nExpect: x\r\n\r\nh",
		"Transfer-Encoding: chunked\r\n\r\nx", "Content-Length: 2\r\nExpect: 100-continue\r\n\r\nhi"} {
		seeds = append(seeds, "GET /live HTTP/1.1\r\nHost: x\r\n"+body, "POST /live HTTP/1.1\r\nHost: x\r\n"+body)
	}
	// Several at once: plain ones, odd ones, and plain ones again.
	const plain, odd = "GET /replica" + end, "GET /%72eplica" + end
	for _, between := range []string{"", odd, "POST /live" + end, "HEAD /replica" + end, "GET /nowhere" + end, "\r\n", "\n", "\x00", "GET /replica?lag_ms=x" + end,
		"GET /replica?wait_ms=100&min_lsn=F/0" + end, "GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "GET /live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"} {
		seeds = append(seeds, plain+between+plain, between+plain, plain+plain+between+plain+odd+plain, strings.Repeat(plain, 60)+between+strings.Repeat(plain, 60))
	}
	// Not all of it comes, or the lines end otherwise.
	for _, part := range []string{"GET x HTTP/1.1\r\n", "GET /%zz HTTP/1.1\r\n", "G", "GET", "GET /", "GET /live HTTP/1.1", "GET /live HTTP/1.1\r", "GET /live HTTP/1.1\r\n", "GET /live HTTP/1.1\r\nHost: x\r\n", "GET /live HTTP/1.1\r\nHost: x\r\n\r",
		"POST /live HTTP/1.1\r\nHost", "GET /live HTTP/1.1\r\nA : b\r\n", "nonsense\n", "nonsense\r\n", "GET /live HTTP/9.9\n", "GET /live HTTP/1.1\nHost: x\n\n", "GET /live HTTP/1.1\r\nHost: x\n\n",
		"GET /live HTTP/1.1\nHost: x\r\n\r\n", "GET /live HTTP/1.1\r\nHost: x\r\n\n", "GET /live HTTP/1.1\nHost: x\n", "\n", "\r\n", "\r\n\r\n", strings.Repeat("a", 9000), strings.Repeat("a", 20000)} {
		seeds = append(seeds, part, plain+part, plain+odd+part)
	}
	return seeds
}

// FuzzLane: however a client sends whatever it sends, it gets the same answers as
// from net/http alone, and keeps or loses the connection as there.
func FuzzLane(f *testing.F) {
	pieces := [][]byte{nil, {0}, {6, 0, 40}, {255}}
	for i, sent := range laneSeeds() {
		f.Add(sent, pieces[0])
		f.Add(sent, pieces[1+i%3])
	}
	f.Fuzz(func(t *testing.T, sent string, cuts []byte) {
		synctest.Test(t, func(t *testing.T) {
			got, keeps := laneTalk(t, httpReadme(), sent, cuts, true)
			want, wantKeeps := laneTalk(t, httpReadme(), sent, cuts, false)
			if n := len(want); n > 0 && wantKeeps && len(got) > n && laneComplains(got[n:], "400 Bad Request") {
				// Behind a request net/http does not look at less than four bytes.
				for stray := 1; stray < min(4, len(sent)); stray++ {
					if without, _ := laneTalk(t, httpReadme(), sent[:len(sent)-stray], cuts, false); slices.Equal(without, want) {
						return
					}
				}
			}
			if !slices.Equal(got, want) || keeps != wantKeeps {
				t.Errorf("to %q in pieces of %d lanes answer\n\t%s\nand keep the connection: %v; net/http\n\t%s\nand %v",
					sent, cuts, strings.Join(got, "\n\t"), keeps, strings.Join(want, "\n\t"), wantKeeps)
			}
		})
	})
}

// TestParsePlain: what clients send is in plain form.
func TestParsePlain(t *testing.T) {
	const start = "GET /master HTTP/1.1\r\n"
	for _, tt := range []struct {
		name, fields      string
		head, json, close bool
		query             string
	}{
		{"shortest", "Host:x\r\n", false, false, false, ""},
		{"curl", "Host: localhost:8000\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n", false, false, false, ""},
		{"Go", "Host: localhost:8000\r\nUser-Agent: Go-http-client/1.1\r\nAccept: application/json\r\nAccept-Encoding: gzip\r\n", false, true, false, ""},
		{"requests", "Host: [::1]:8000\r\nUser-Agent: python-requests/2.32.3\r\nAccept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n", false, false, false, ""},
		{"undici", "host: pg_status:8000\r\nconnection: keep-alive\r\naccept: application/json\r\naccept-language: *\r\nsec-fetch-mode: cors\r\nuser-agent: node\r\n", false, true, false, ""},
		{"Net::HTTP", "Accept-Encoding: gzip;q=1.0,deflate;q=0.6,identity;q=0.3\r\nAccept: */*\r\nUser-Agent: Ruby\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\n", false, false, true, ""},
		{"HttpClient", "Host: x\r\nConnection: Keep-Alive\r\nUser-Agent: Apache-HttpClient/5.3 (Java/21)\r\n", false, false, false, ""},
		{"query", "Host: x\r\n", false, false, false, "min_lsn=0/3000060&timeline=2&a=%zz;+?"},
		{"HAProxy", "host: x\r\nconnection: close\r\n", true, false, true, "role=replica"},
		{"refuses JSON", "Host: x\r\nAccept: application/json;q=0\r\nAccept: text/plain\r\n", false, false, false, ""},
	} {
		raw := start + tt.fields + "\r\n"
		if tt.query != "" {
			raw = strings.Replace(raw, "/master", "/master?"+tt.query, 1)
		}
		if tt.head {
			raw = strings.Replace(raw, "GET", "HEAD", 1)
		}
		q, size, plain := parsePlain(raw + "GET")
		want := plainRequest{request{query: tt.query, json: tt.json}, routes["/master"], tt.head, tt.close}
		if q != want || size != len(raw) || !plain {
			t.Errorf("%s: parsePlain(%q) = %+v, %d, %v; want %+v, %d, true", tt.name, raw, q, size, plain, want, len(raw))
		}
		// As long as the last byte is missing it may become that.
		for n := range len(raw) {
			if _, size, plain := parsePlain(raw[:n]); size != 0 || !plain {
				t.Errorf("%s: parsePlain(%q) = %d, %v; want 0, true", tt.name, raw[:n], size, plain)
			}
		}
	}
}

// laneStep is what a client sends at some time after the start.
type laneStep struct {
	at   time.Duration
	send string
}

// laneWait is a request that nobody can satisfy for 20 s.
const (
	laneLive = "GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
	laneWait = "GET /replica?min_lsn=F/0&wait_ms=20000 HTTP/1.1\r\nHost: x\r\n\r\n"
	laneOff  = "GET /%6cive HTTP/1.1\r\nHost: x\r\n\r\n" // for net/http
	lanePart = "GET /live HTTP/1.1\r\nHo"
	laneRest = "st: x\r\n\r\n"
)

func TestLaneTimes(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		name    string
		steps   []laneStep
		answers int
		closed  time.Duration
	}{
		{"nothing", nil, 0, 10 * s},
		{"in bits", []laneStep{{3 * s, "GET"}, {6 * s, " /li"}, {9 * s, "ve HTTP/1.1\r\nHost: x"}}, 0, 10 * s},
		{"just in time", []laneStep{{9 * s, lanePart}, {9999 * time.Millisecond, laneRest}}, 1, 9999*time.Millisecond + 600*s},
		{"a request", []laneStep{{9 * s, laneLive}}, 1, 609 * s},
		{"two, the second late", []laneStep{{1 * s, laneLive}, {600 * s, laneLive}}, 2, 1200 * s},
		{"too late", []laneStep{{1 * s, laneLive}, {602 * s, laneLive}}, 1, 601 * s},
		{"begun late", []laneStep{{1 * s, laneLive}, {600 * s, lanePart}}, 1, 610 * s},
		{"begun soon", []laneStep{{1 * s, laneLive}, {1100 * time.Millisecond, "G"}, {5 * s, "ET"}}, 1, 11100 * time.Millisecond},
		{"begun and there soon", []laneStep{{1 * s, laneLive}, {1100 * time.Millisecond, lanePart}, {1200 * time.Millisecond, laneRest}}, 2, 601200 * time.Millisecond},
		{"begun twice", []laneStep{{1 * s, laneLive}, {2 * s, lanePart}, {5 * s, laneRest}, {600 * s, lanePart}}, 2, 610 * s},
		{"with the start of the next", []laneStep{{4 * s, laneLive + lanePart}}, 1, 14 * s},
		// Requests take their time one by one, however they come.
		{"always one begun", []laneStep{{8 * s, laneLive + lanePart}, {16 * s, laneRest + lanePart}, {24 * s, laneRest + lanePart}, {32 * s, laneRest}}, 4, 632 * s},
		// None of it is spent on waiting.
		{"waits", []laneStep{{1 * s, laneWait}}, 1, 621 * s},
		{"waits at the end", []laneStep{{1 * s, laneLive}, {600 * s, laneWait}}, 2, 1220 * s},
		{"waits twice", []laneStep{{1 * s, laneWait + laneWait}}, 2, 641 * s},
		{"waits with the start of the next", []laneStep{{1 * s, laneWait + lanePart}}, 1, 31 * s},
		{"waits with the start of the next, which comes", []laneStep{{1 * s, laneWait + lanePart}, {30 * s, laneRest}}, 2, 630 * s},
		// net/http has its own time.
		{"handed over", []laneStep{{9 * s, laneOff}}, 1, 609 * s},
		{"handed over late", []laneStep{{1 * s, laneLive}, {600 * s, laneOff}}, 2, 1200 * s},
		{"handed over in part", []laneStep{{9 * s, "POST /live HTTP/1.1\r\nHo"}}, 1, 19 * s}, // a complaint
	} {
		httpBubble(t, tt.name, func(t *testing.T) {
			c := newLaneStack(t, httpReadme()).dial(t).listen()
			for _, step := range tt.steps {
				time.Sleep(step.at - time.Since(c.start))
				io.WriteString(c, step.send)
			}
			<-c.done
			if got := len(laneAnswers(t, c.raw)); got != tt.answers || c.closed != tt.closed {
				t.Errorf("%s: %d answers, and closed after %v; want %d, %v", tt.name, got, c.closed, tt.answers, tt.closed)
			}
		})
	}
}

// What comes before a request that waits is answered at once.
func TestLaneAnswersBeforeWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newLaneStack(t, httpReadme()).dial(t)
		io.WriteString(c, laneLive+laneLive+laneWait+laneLive)
		r := bufio.NewReader(c)
		for i, want := range []time.Duration{0, 0, 20 * time.Second, 20 * time.Second} {
			laneBody(t, r)
			if got := time.Since(c.start); got != want {
				t.Errorf("answer %d comes after %v; want %v", i, got, want)
			}
		}
	})
}

// Deadlines are not moved for each request, but at least once a second.
func TestLaneStaysWhileUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newLaneStack(t, httpReadme()).dial(t).listen()
		const requests, every = 5000, 300 * time.Millisecond // for 25 minutes
		for range requests {
			time.Sleep(every)
			io.WriteString(c, laneLive)
		}
		<-c.done
		if got := len(laneAnswers(t, c.raw)); got != requests {
			t.Errorf("%d answers; want %d", got, requests)
		}
		if got := c.closed - requests*every; got > idleTimeout || got < idleTimeout-renewEvery {
			t.Errorf("closed %v after the last request; want %v, or %v less", got, idleTimeout, renewEvery)
		}
	})
}

// TestLaneStops: what becomes of a connection when the server stops 5 s after the
// client has sent something.
func TestLaneStops(t *testing.T) {
	for _, tt := range []struct {
		name, sent string
		want       []string
	}{
		{"nothing", "", nil},
		{"part of a request", lanePart, nil},
		{"idle", laneLive, []string{"200"}},
		{"a part after a request", laneLive + lanePart, []string{"200"}},
		// Whoever waits is told that there will be no more, even if it has asked.
		{"waits", laneWait, []string{"200 close"}},
		{"waits, and has asked for more", laneLive + laneWait + laneLive + laneOff, []string{"200", "200 close"}},
		{"idle at net/http", laneOff, []string{"200"}},
		{"waits at net/http", "GET /%72eplica?min_lsn=F/0&wait_ms=20000 HTTP/1.1\r\nHost: x\r\n\r\n", []string{"200"}},
	} {
		httpBubble(t, tt.name, func(t *testing.T) {
			k := newLaneStack(t, httpReadme())
			c := k.dial(t).listen()
			io.WriteString(c, tt.sent)
			time.Sleep(5 * time.Second)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				k.end(time.Minute)
			}()
			synctest.Wait()
			close(k.server.stopping)
			synctest.Wait()
			<-ended
			if err := k.web.Shutdown(context.Background()); err != nil {
				t.Fatal(err)
			}
			<-c.done
			if c.closed > 6*time.Second { // net/http looks again after some milliseconds
				t.Errorf("closed after %v; want 5s", c.closed)
			}
			if got := laneStatuses(t, c.raw); !slices.Equal(got, tt.want) {
				t.Errorf("answers %q; want %q", got, tt.want)
			}
			if n := k.taken(); n != 0 {
				t.Errorf("%d places are taken; want none", n)
			}
		})
	}
}

// What has been read is answered though the client takes its time to read, also
// by net/http.
func TestLaneFinishesWhileStopping(t *testing.T) {
	for _, tt := range []struct {
		name, sent string
		want       []string
	}{
		{"one", laneLive, []string{"200"}},
		{"one and a part", laneLive + lanePart, []string{"200"}},
		{"one for net/http", laneLive + "POST /live HTTP/1.1\r\nHost: x\r\n\r\n", []string{"200", "405"}},
	} {
		httpBubble(t, tt.name, func(t *testing.T) {
			k := newLaneStack(t, httpReadme())
			c := k.dial(t)
			io.WriteString(c, tt.sent)
			synctest.Wait() // until the first answer is being sent
			stopped := make(chan time.Duration, 1)
			go func() {
				k.end(5 * time.Second)
				stopped <- time.Since(c.start)
			}()
			time.Sleep(3 * time.Second)
			c.listen()
			if got := <-stopped; got != 3*time.Second {
				t.Errorf("stop took %v; want 3s, until the client reads", got)
			}
			synctest.Wait()
			k.web.Shutdown(context.Background())
			<-c.done
			if got := laneStatuses(t, c.raw); !slices.Equal(got, tt.want) {
				t.Errorf("answers %q; want %q", got, tt.want)
			}
		})
	}
}

// laneStatuses returns the status of each response, with "close" behind that of
// one which says that it is the last.
func laneStatuses(t *testing.T, raw []byte) []string {
	t.Helper()
	var statuses []string
	for _, a := range laneAnswers(t, raw) {
		status := strings.Fields(a)[1]
		if strings.Contains(a, "Connection:[close]") {
			status += " close"
		}
		statuses = append(statuses, status)
	}
	return statuses
}

func TestLaneStopsBesideStuckClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newLaneStack(t, httpReadme())
		for range 3 {
			c := k.dial(t)
			io.WriteString(c, laneLive) // and never reads
		}
		start := time.Now()
		k.end(5 * time.Second)
		if got := time.Since(start); got != 5*time.Second {
			t.Errorf("stop took %v; want its timeout of 5s", got)
		}
		if n := k.taken(); n != 0 {
			t.Errorf("%d places are taken after stop; want none", n)
		}
	})
}

func TestLaneLateListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newLanes(httpReadme(), slog.New(slog.DiscardHandler))
		a.stop(time.Second)
		l := newPipeListener()
		if err := a.serve(l); err != nil {
			t.Errorf("serve after stop = %v; want nil", err)
		}
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the listener of serve after stop is open: Accept = %v", err)
		}
	})
}

// laneListener fails until it gets a connection.
type laneListener struct {
	*pipeListener
	err error
}

func (l *laneListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	default:
		return nil, l.err
	}
}

// TestAcceptFails: we try again, and say so from time to time.
func TestAcceptFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := new(monOutput)
		a := newLanes(httpReadme(), component(newLogger(out, slog.LevelInfo, false), "http"))
		l := &laneListener{newPipeListener(), &net.OpError{Op: "accept", Net: "tcp4", Err: syscall.EMFILE}}
		ended := make(chan error, 1)
		go func() { ended <- a.serve(l) }()
		time.Sleep(150 * time.Second)
		c := &laneClient{Conn: l.dial(), done: make(chan struct{}), start: time.Now()}
		c.listen()
		io.WriteString(c, "GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		<-c.done
		if got := laneAnswers(t, c.raw); len(got) != 1 {
			t.Errorf("after all, answers %q; want one", got)
		}
		a.stop(time.Second)
		if err := <-ended; err != nil {
			t.Errorf("serve = %v; want nil after stop", err)
		}
		want := fmt.Sprintf("WARNING http: accepting connections failed error=accept tcp4: too many open files (errno=%d)", syscall.EMFILE)
		monWantLog(t, "a listener that fails for 150 s", out.records(), want, want, want)
		// One that somebody else closes is of no use.
		l = &laneListener{newPipeListener(), nil}
		l.Close()
		if err := newLanes(httpReadme(), slog.New(slog.DiscardHandler)).serve(l); !errors.Is(err, net.ErrClosed) {
			t.Errorf("serve of a closed listener = %v; want %v", err, net.ErrClosed)
		}
	})
}

// TestLanePanics: a bug costs the connection that hits it, and is told.
func TestLanePanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := httpReadme()
		s.hosts = nil // so that nobody can be named
		k := newLaneStack(t, s)
		other, c := k.dial(t).listen(), k.dial(t).listen()
		io.WriteString(other, laneLive)
		io.WriteString(c, "GET /master HTTP/1.1\r\nHost: x\r\n\r\n")
		<-c.done
		if c.closed != 0 || len(c.raw) != 0 {
			t.Errorf("%q came, and the end after %v; want the end only, at once", c.raw, c.closed)
		}
		io.WriteString(other, laneLive)
		if n := k.taken(); n != 2 {
			t.Errorf("%d places are taken; want 2, one by the other client", n)
		}
		other.Close()
		<-other.done
		if got := laneAnswers(t, other.raw); len(got) != 2 {
			t.Errorf("the other connection has %d answers; want 2", len(got))
		}
		records := k.output.records()
		if len(records) != 1 || !strings.HasPrefix(records[0], "ERROR http: answering a request failed: runtime error: index out of range") ||
			!strings.Contains(records[0], "answerHost") {
			t.Errorf("log %q; want one error that says what and where", records)
		}
	})
}

// TestLanePlaces: every way out gives the connection's place back once.
func TestLanePlaces(t *testing.T) {
	const closing = "GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	for _, tt := range []struct {
		name, sent string
		leave      bool          // the client does
		after      time.Duration // when the server has closed it
	}{
		{"client leaves", laneLive, true, 0},
		{"client leaves early", "", true, 0},
		{"client leaves in between", lanePart, true, 0},
		{"client leaves while it waits", laneWait, true, 20 * time.Second}, // a pipe does not tell
		{"closed", closing, false, 0},
		{"too slow", lanePart, false, headerTimeout},
		{"idle", laneLive, false, idleTimeout},
		{"client leaves net/http", laneOff, true, 0},
		{"closed by net/http", laneOff + closing, false, 0},
		{"refused by net/http", "nonsense\r\n\r\n", false, time.Second},
		{"idle at net/http", laneOff, false, idleTimeout},
		{"too large", strings.Repeat("x", maxHeader), false, headerTimeout},
	} {
		httpBubble(t, tt.name, func(t *testing.T) {
			k := newLaneStack(t, httpReadme())
			c := k.dial(t).listen()
			io.WriteString(c, tt.sent)
			if tt.leave {
				c.Close()
			}
			time.Sleep(tt.after)
			if n := k.taken(); n != 1 {
				t.Errorf("%d places are taken; want 1, by the listener", n)
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			if n := len(k.conns); n != 0 {
				t.Errorf("%d connections are known still", n)
			}
		})
	}
	httpBubble(t, "accepted at the end", func(t *testing.T) {
		k := newLaneStack(t, httpReadme())
		k.end(time.Second)
		client, conn := net.Pipe()
		k.places <- struct{}{}
		k.open(&limitedConn{Conn: conn, free: k.places})
		if _, err := client.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("reading = %v; want the end", err)
		}
		if n := k.taken(); n != 0 {
			t.Errorf("%d places are taken; want none", n)
		}
	})
}

func TestLaneDate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newLaneStack(t, httpReadme()).dial(t)
		r := bufio.NewReader(c)
		time.Sleep(time.Until(time.Date(2000, 2, 29, 23, 59, 58, 500_000_000, time.UTC)))
		c.Close()
		c = newLaneStack(t, httpReadme()).dial(t)
		r.Reset(c)
		for _, want := range []string{"Tue, 29 Feb 2000 23:59:58 GMT", "Tue, 29 Feb 2000 23:59:59 GMT", "Wed, 01 Mar 2000 00:00:00 GMT"} {
			io.WriteString(c, laneLive)
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			if got := resp.Header.Get("Date"); got != want {
				t.Errorf("Date: %s; want %s", got, want)
			}
			time.Sleep(time.Second)
		}
	})
}

// laneSink is a connection that takes everything.
type laneSink struct {
	net.Conn
	writes, largest int
	latest          []byte // what came in the last write
}

func (c *laneSink) Write(b []byte) (int, error) {
	c.writes++
	c.largest = max(c.largest, len(b))
	c.latest = append(c.latest[:0], b...)
	return len(b), nil
}

func (c *laneSink) SetDeadline(time.Time) error { return nil }

// laneOf returns a lane to a sink.
func laneOf(s *server) (*lane, *laneSink) {
	sink := new(laneSink)
	return &lane{lanes: newLanes(s, slog.New(slog.DiscardHandler)), conn: sink, read: make([]byte, 0, maxLaneBuffer)}, sink
}

// laneRepeat returns a function that has one request answered over and over.
func laneRepeat(tb testing.TB, target, accept string) func() {
	tb.Helper()
	n, sink := laneOf(httpReadme())
	request := "GET " + target + " HTTP/1.1\r\nHost: localhost:8000\r\nUser-Agent: x\r\nAccept: " + accept + "\r\nConnection: keep-alive\r\n\r\n"
	return func() {
		n.read = append(n.read[:0], request...)
		if state := n.answer(); state != laneRead || len(n.read) > 0 || !bytes.HasPrefix(sink.latest, []byte("HTTP/1.1 200 OK\r\n")) {
			tb.Fatalf("%s = %q, state %d; want 200 and the lane to go on", target, sink.latest, state)
		}
	}
}

func TestLaneAllocations(t *testing.T) {
	for _, target := range []string{
		"/master",
		"/replica",
		"/replica?min_lsn=0/2FFFE98&lag_ms=7000&lag_bytes=500",
		"/replica?min_lsn=0/2FFFE98&timeline=1&wait_ms=100&fallback=none",
		"/replica?min_lsn=0/3000060",
		"/sync_by_time_and_bytes",
		"/most_sync_by_bytes",
		"/hosts",
		"/status?host=host-2",
		"/check?host=host-2&role=replica&lag_ms=7000",
		"/live",
	} {
		for _, accept := range []string{"*/*", "application/json", "text/html, application/json; q=0.9"} {
			if got := testing.AllocsPerRun(100, laneRepeat(t, target, accept)); got != 0 {
				t.Errorf("%s for %s makes %v allocations; want 0", target, accept, got)
			}
		}
	}
}

// TestLaneKeepsBackLittle: a client that asks for much at once cannot make us
// hold all of it.
func TestLaneKeepsBackLittle(t *testing.T) {
	s := httpReadme()
	n, sink := laneOf(s)
	const request = "GET /hosts HTTP/1.1\r\nHost:x\r\n\r\n"
	n.read = append(n.read, strings.Repeat(request, maxLaneBuffer/len(request))...)
	n.answer()
	one := len(s.monitor.table.view().render(s.hosts).hosts.body) + 200
	if sink.largest > sendAt+one {
		t.Errorf("one write is of %d bytes; want %d at most", sink.largest, sendAt+one)
	}
	// But little ones go out together.
	n, sink = laneOf(s)
	n.read = append(n.read, strings.Repeat(laneLive, 10)...)
	if n.answer(); sink.writes != 1 {
		t.Errorf("10 short answers take %d writes; want 1", sink.writes)
	}
}

// laneRecords is a slog.Handler that keeps what it is given.
type laneRecords struct {
	slog.Handler
	kept []slog.Record
}

func (h *laneRecords) Enabled(context.Context, slog.Level) bool { return true }

func (h *laneRecords) Handle(_ context.Context, r slog.Record) error {
	h.kept = append(h.kept, r)
	return nil
}

func (h *laneRecords) text() string {
	var b strings.Builder
	for _, r := range h.kept {
		b.WriteString(r.Message)
		r.Attrs(func(a slog.Attr) bool { b.WriteString(" " + a.String()); return true })
	}
	return b.String()
}

// TestLaneKeepsNothing: strings that share the buffer's memory end with the
// answer.
func TestLaneKeepsNothing(t *testing.T) {
	s := httpReadme()
	records := new(laneRecords)
	s.log = slog.New(records)
	n, sink := laneOf(s)
	for _, path := range httpRoutes {
		for _, query := range []string{"", "?timeline=9", "?host=host-2&role=replica&port=5433", "?lag_ms=x", "?lag_ms=18446744073709551616", "?min_lsn=x", "?fallback=x", "?%zz",
			"?min_lsn=F%2F0&w%61it_ms=1"} {
			request := "GET " + path + query + " HTTP/1.1\r\nHost: x\r\nAccept: text/html\r\n\r\n"
			var answers [2]string
			for i := range answers {
				s.cursor.Store(0)
				n.read = append(n.read[:0], request...)
				n.answer()
				answers[i], _, _ = strings.Cut(string(sink.latest), "Date: ")
				before := records.text()
				buffer := n.read[:cap(n.read)]
				for j := range buffer {
					buffer[j] = '!'
				}
				if after := records.text(); after != before {
					t.Errorf("the records of %s were %q, and are %q with the next request", path+query, before, after)
				}
			}
			if answers[0] != answers[1] {
				t.Errorf("%s is first answered %q, then %q", path+query, answers[0], answers[1])
			}
		}
	}
	if len(records.kept) == 0 {
		t.Error("nothing was logged")
	}
}

// laneServer has a replica r and no master, and is reached at the returned
// address, without net/http.
func laneServer(t *testing.T) (*server, string) {
	t.Helper()
	s := httpServer(httpHosts("m", "r")...)
	s.monitor.table.fail(0)
	s.monitor.table.observe(1, httpReplica(0x2FFFE98, 10))
	return s, httpLoopback(t, s)
}

// laneAwaitDemand waits until n requests wait for a replica.
func laneAwaitDemand(t *testing.T, s *server, n int32) {
	t.Helper()
	monEventually(t, func() bool { return httpDemand(s)[0] == n },
		func() string {
			return fmt.Sprintf("%v requests wait for a replica and a master; want %d", httpDemand(s), n)
		})
}

// TestLaneClientGoes: nothing is checked for a client that has gone, over TCP.
func TestLaneClientGoes(t *testing.T) {
	for _, path := range []string{"/replica?min_lsn=F/0&lag_ms=0&wait_ms=60000", "/master?wait_ms=60000", "/master?w%61it_ms=60000"} {
		for how, leave := range map[string]func(*net.TCPConn){
			"closes": func(c *net.TCPConn) { c.Close() },
			"resets": func(c *net.TCPConn) {
				c.SetLinger(0)
				c.Close()
			},
			"sends no more": func(c *net.TCPConn) { c.CloseWrite() },
		} {
			s, addr := laneServer(t)
			c := httpDial(t, addr)
			fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
			laneAwaitDemand(t, s, 1)
			leave(c.(*net.TCPConn))
			laneAwaitDemand(t, s, 0)
			if how == "sends no more" {
				// It may still read.
				if raw, err := io.ReadAll(c); err != nil || len(laneAnswers(t, raw)) != 1 {
					t.Errorf("a client that %s gets %q, %v; want an answer", how, raw, err)
				}
			}
			// And that takes nothing from others.
			if got := laneAsk(t, httpDial(t, addr), "/live"); got != "OK" {
				t.Errorf("/live after a client %s = %q", how, got)
			}
		}
	}
}

// TestLaneSeesEnd: a client that sends no more after its last request gets the
// answer and the end of the connection at once, also when the end comes together
// with the request.
func TestLaneSeesEnd(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that they come together
	_, addr := laneServer(t)
	for _, sent := range []string{laneLive, laneLive + laneLive, laneLive + lanePart} {
		for range 100 {
			c := httpDial(t, addr)
			if got := laneAsk(t, c, "/live"); got != "OK" { // the lane waits for more
				t.Fatalf("/live = %q; want OK", got)
			}
			io.WriteString(c, sent)
			c.(*net.TCPConn).CloseWrite()
			c.SetReadDeadline(time.Now().Add(5 * time.Second))
			if raw, err := io.ReadAll(c); err != nil {
				t.Fatalf("a client that ends after %q gets %q, %v; want the end", sent, raw, err)
			}
			c.Close()
		}
	}
}

// TestLaneSharesThread: a client that always has more to ask does not keep others
// from being answered, though there is one processor only and all was idle before.
// The clients are a process of their own.
func TestLaneSharesThread(t *testing.T) {
	const to = "LANE_SHARES_THREAD"
	if addr := os.Getenv(to); addr != "" {
		hog, other := httpDial(t, addr), httpDial(t, addr)
		laneAsk(t, hog, "/live")
		laneAsk(t, other, "/live")
		time.Sleep(500 * time.Millisecond) // so that the server is idle
		go io.Copy(io.Discard, hog)
		over := time.AfterFunc(3*time.Second, func() { hog.Close() })
		defer over.Stop()
		go func() {
			// It takes longer to read than to send.
			for much := strings.Repeat(laneLive[:len(laneLive)-2]+strings.Repeat("a:\r\n", 1000)+"\r\n", 100); ; {
				if _, err := io.WriteString(hog, much); err != nil {
					return
				}
			}
		}()
		var slowest time.Duration
		for range 20 {
			time.Sleep(20 * time.Millisecond)
			start := time.Now()
			laneAsk(t, other, "/live")
			slowest = max(slowest, time.Since(start))
		}
		if slowest > time.Second {
			t.Errorf("another client waits %v", slowest)
		}
		return
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	_, addr := laneServer(t)
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), to+"="+addr)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestLaneSlowReader: what the socket does not take at once follows, in order.
func TestLaneSlowReader(t *testing.T) {
	_, addr := laneServer(t)
	c := httpDial(t, addr)
	c.(*net.TCPConn).SetReadBuffer(64 << 10)
	const n = 100_000
	go func() {
		for i := range n / 1000 {
			var b strings.Builder
			for j := range 1000 {
				fmt.Fprintf(&b, "GET /status?host=x%d HTTP/1.1\r\nHost: x\r\n\r\nGET /live HTTP/1.1\r\nHost: x\r\n\r\n", i*1000+j)
			}
			io.WriteString(c, b.String())
		}
		c.(*net.TCPConn).CloseWrite()
	}()
	time.Sleep(500 * time.Millisecond) // so that the socket is full
	raw, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	got := laneStatuses(t, raw)
	if len(got) != 2*n {
		t.Errorf("%d answers; want %d", len(got), 2*n)
	}
	for i, status := range got {
		if want := []string{"404", "200"}[i%2]; status != want {
			t.Fatalf("answer %d has status %s; want %s", i, status, want)
		}
	}
}

// laneAsk returns the body of an answer.
func laneAsk(t *testing.T, c net.Conn, target string) string {
	t.Helper()
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", target)
	return laneBody(t, bufio.NewReader(c))
}

func laneBody(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// TestLaneWaitsBesideData: a client that has sent more has not gone, whether the
// lane has read that or not.
func TestLaneWaitsBesideData(t *testing.T) {
	const wait = "GET /master?wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n"
	for _, tt := range []struct {
		name                string
		with, while, behind int // requests sent with the one that waits, and while it waits
	}{
		{name: "none"},
		{name: "read with it", with: 1},
		{name: "half unread", with: 100}, // the lane begins with a buffer of 1 KiB
		{name: "sent later", while: 1},
		{name: "much sent later", while: 100},
	} {
		s, addr := laneServer(t)
		c := httpDial(t, addr)
		io.WriteString(c, wait+strings.Repeat(laneLive, tt.with))
		laneAwaitDemand(t, s, 1)
		io.WriteString(c, strings.Repeat(laneLive, tt.while))
		s.monitor.table.observe(1, httpMaster(0x3000060))
		r := bufio.NewReader(c)
		if got := laneBody(t, r); got != "r" {
			t.Errorf("%s: /master, waited for = %q; want r", tt.name, got)
		}
		for i := range tt.with + tt.while {
			if got := laneBody(t, r); got != "OK" {
				t.Fatalf("%s: request %d behind it = %q; want OK", tt.name, i, got)
			}
		}
	}
}

// TestLaneGoesOn: a connection can be used again after a wait, and nothing is
// left of that.
func TestLaneGoesOn(t *testing.T) {
	s, addr := laneServer(t)
	goroutines := runtime.NumGoroutine()
	c := httpDial(t, addr)
	for range 20 {
		if got := laneAsk(t, c, "/replica?min_lsn=F/0&wait_ms=1&fallback=any"); got != "r" {
			t.Errorf("/replica, waited for in vain = %q; want r", got)
		}
		if got := laneAsk(t, c, "/live"); got != "OK" {
			t.Errorf("/live after that = %q; want OK", got)
		}
	}
	laneAwaitDemand(t, s, 0)
	for _, want := range []int{goroutines + 1, goroutines} { // the lane, as long as the client stays
		monEventually(t, func() bool { return runtime.NumGoroutine() <= want },
			func() string { return fmt.Sprintf("%d goroutines; want %d", runtime.NumGoroutine(), want) })
		c.Close()
	}
}

func benchmarkLane(b *testing.B, target, accept string) {
	ask := laneRepeat(b, target, accept)
	b.ReportAllocs()
	for b.Loop() {
		ask()
	}
}

func BenchmarkLaneMaster(b *testing.B)     { benchmarkLane(b, "/master", "*/*") }
func BenchmarkLaneMasterJSON(b *testing.B) { benchmarkLane(b, "/master", "application/json") }
func BenchmarkLaneReplica(b *testing.B) {
	benchmarkLane(b, "/replica?min_lsn=0/2FFFE98&lag_ms=7000&lag_bytes=500", "*/*")
}
func BenchmarkLaneHosts(b *testing.B)    { benchmarkLane(b, "/hosts", "*/*") }
func BenchmarkLaneMostSync(b *testing.B) { benchmarkLane(b, "/most_sync_by_bytes", "*/*") }

// BenchmarkLaneTrickle is a client that makes us parse as much as it can.
func BenchmarkLaneTrickle(b *testing.B) {
	request := laneLive[:len(laneLive)-2] + strings.Repeat("a:\r\n", (maxHeader-len(laneLive))/4)
	for b.Loop() {
		parsePlain(request)
	}
}
