package main

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
)

// The keys of the answers, in the order of the README, with ours at the end.
var (
	keysOfSelection = []string{"host", "dc", "geo", "port"}
	keysOfStatus    = []string{"dc", "geo", "master", "alive", "possible_dead", "lag_ms", "sync_by_time",
		"lag_bytes", "sync_by_bytes", "lsn", "port", "timeline"}
	keysOfHosts = append([]string{"host"}, keysOfStatus...)
	keysOfError = []string{"error_text"}
)

// httpCheckJSON checks that body is JSON without space, but for the one that
// errors have, and of objects with one of the lists of keys above.
func httpCheckJSON(t *testing.T, body string) {
	t.Helper()
	var compact strings.Builder
	d := json.NewDecoder(strings.NewReader(body))
	d.UseNumber()
	var keys []string
	isKey := false
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Errorf("%s is not JSON: %v", body, err)
			return
		}
		switch {
		case token == json.Delim('{'):
			keys, isKey = nil, true
		case token == json.Delim('}'):
			if !slices.ContainsFunc([][]string{keysOfSelection, keysOfStatus, keysOfHosts, keysOfError}, func(k []string) bool { return slices.Equal(k, keys) }) {
				t.Errorf("%s has keys %v", body, keys)
			}
			isKey = false
		case isKey:
			keys, isKey = append(keys, token.(string)), false
		default:
			isKey = keys != nil
		}
	}
	var value any
	if err := json.Unmarshal([]byte(body), &value); err != nil {
		t.Errorf("%s is not JSON: %v", body, err)
	}
	e := json.NewEncoder(&compact)
	e.SetEscapeHTML(false)
	e.Encode(json.RawMessage(strings.Replace(body, `{"error_text": `, `{"error_text":`, 1)))
	if got, want := strings.Replace(body, `{"error_text": `, `{"error_text":`, 1)+"\n", compact.String(); got != want {
		t.Errorf("%s is not compact; want %s", body, want)
	}
}

func TestJSONString(t *testing.T) {
	for _, tt := range []struct{ s, want string }{
		{"", `""`},
		{"db-1.example.org", `"db-1.example.org"`},
		{"[::1]", `"[::1]"`},
		{`a"b\c/d`, `"a\"b\\c/d"`},
		{"<a href='x'>&amp;</a>", `"<a href='x'>&amp;</a>"`},
		{"bücher.例え 𝄞", `"bücher.例え 𝄞"`},
		{"a\nb\tc\x00\x7f", `"a\nb\tc\u0000` + "\x7f" + `"`},
		{"\u2028", `"\u2028"`}, // ends a line in JavaScript
		{"a\xffb", `"a\ufffdb"`},
		{"null", `"null"`},
	} {
		if got := string(jsonString(tt.s)); got != tt.want {
			t.Errorf("jsonString(%q) = %s; want %s", tt.s, got, tt.want)
		}
	}
	if got := string(jsonOrNull("")); got != "null" {
		t.Errorf(`jsonOrNull("") = %s; want null`, got)
	}
	if got := string(jsonOrNull("null")); got != `"null"` {
		t.Errorf(`jsonOrNull("null") = %s; want "null"`, got)
	}
}

func TestErrorAnswer(t *testing.T) {
	for _, tt := range []struct {
		a    *answer
		want string
	}{
		{answerNotReady, `{"error_text": "pg_monitor is not ready"}`},
		{answerNoHost, `{"error_text": "Get parameter 'host' wasn't passed"}`},
		{answerBadQuery, `{"error_text": "Invalid query"}`},
		{answersInvalid["lag_ms"], `{"error_text": "Invalid lag_ms"}`},
		{answersInvalid["lag_bytes"], `{"error_text": "Invalid lag_bytes"}`},
		{answersInvalid["min_lsn"], `{"error_text": "Invalid min_lsn"}`},
		{answersInvalid["timeline"], `{"error_text": "Invalid timeline"}`},
		{answersInvalid["wait_ms"], `{"error_text": "Invalid wait_ms"}`},
		{answersInvalid["fallback"], `{"error_text": "Invalid fallback"}`},
		{answersInvalid["port"], `{"error_text": "Invalid port"}`},
		{answersInvalid["role"], `{"error_text": "Invalid role"}`},
	} {
		if tt.a == nil {
			t.Errorf("there is no answer %s", tt.want)
		} else if got := string(tt.a.body); got != tt.want {
			t.Errorf("error answer = %s; want %s", got, tt.want)
		}
	}
}

func TestAnswerWrite(t *testing.T) {
	for _, tt := range []struct {
		a      *answer
		status int
		body   string
		want   http.Header
	}{
		{textAnswer("é"), 200, "é", http.Header{"Content-Type": {"text/plain; charset=utf-8"}, "Content-Length": {"2"}}},
		{errorAnswer("x"), 400, `{"error_text": "x"}`, http.Header{"Content-Type": {"application/json"}, "Content-Length": {"19"}}},
		{answerEmpty, 404, "", http.Header{"Content-Length": {"0"}}},
	} {
		for range 2 { // an answer is written many times
			w := httptest.NewRecorder()
			tt.a.write(w, tt.status)
			if got := w.Header(); w.Code != tt.status || w.Body.String() != tt.body || !maps.EqualFunc(got, tt.want, slices.Equal[[]string]) {
				t.Errorf("write of %q = %d %q %v; want %d %q %v", tt.a.body, w.Code, w.Body, got, tt.status, tt.body, tt.want)
			}
		}
	}
}

// TestOddNames: names and localities stand in text as they are, in JSON escaped.
func TestOddNames(t *testing.T) {
	for _, tt := range []struct{ name, json string }{
		{`a"b\c`, `"a\"b\\c"`},
		{"<a>&", `"<a>&"`},
		{"bücher", `"bücher"`},
		{"[::1]", `"[::1]"`},
		{"a b", `"a b"`},
		{"{}", `"{}"`},
	} {
		s := httpServer(
			hostConfig{name: tt.name, addr: "x", port: 1, dc: tt.name, geo: tt.name},
			hostConfig{name: "only dc", addr: "x", port: 65535, dc: tt.name},
			hostConfig{name: "only geo", addr: "x", port: 5432, geo: tt.name})
		s.monitor.table.observe(0, httpMaster(0x3000060))
		s.monitor.table.fail(1)
		s.monitor.table.fail(2)
		// Not through httpAsk, which takes a text in braces for JSON.
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest("GET", "/master", nil))
		if got := w.Body.String(); got != tt.name {
			t.Errorf("/master = %s; want %s", got, tt.name)
		}
		want := `200 {"host":` + tt.json + `,"dc":` + tt.json + `,"geo":` + tt.json + `,"port":1}`
		if got := httpAsk(t, s, "/master", "application/json"); got != want {
			t.Errorf("/master as JSON = %s; want %s", got, want)
		}
		const dead = `,"master":false,"alive":false,"possible_dead":true,"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false,"lsn":null`
		want = `200 [{"host":` + tt.json + `,"dc":` + tt.json + `,"geo":` + tt.json +
			`,"master":true,"alive":true,"possible_dead":false,"lag_ms":0,"sync_by_time":true,"lag_bytes":0,"sync_by_bytes":true,"lsn":"0/3000060","port":1,"timeline":1},` +
			`{"host":"only dc","dc":` + tt.json + `,"geo":null` + dead + `,"port":65535,"timeline":null},` +
			`{"host":"only geo","dc":null,"geo":` + tt.json + dead + `,"port":5432,"timeline":null}]`
		if got := httpAsk(t, s, "/hosts"); got != want {
			t.Errorf("/hosts =\n%s; want\n%s", got, want)
		}
	}
}

// TestStatusOfStates: the state of one host, r, beside a master m at 0/3000060, as /hosts
// and /status tell it.
func TestStatusOfStates(t *testing.T) {
	const max32 = 1<<32 - 1
	known := httpReplica(0x2FFFE98, 6193)
	for _, tt := range []struct {
		name string
		make func(*table)
		want string
	}{
		{"never answered", func(tab *table) { tab.fail(1) },
			`"master":false,"alive":false,"possible_dead":true,"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false,"lsn":null,"port":5432,"timeline":null`},
		{"replica", func(tab *table) { tab.observe(1, known) },
			`"master":false,"alive":true,"possible_dead":false,"lag_ms":6193,"sync_by_time":false,"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5432,"timeline":1`},
		{"replica without lag", func(tab *table) { tab.observe(1, httpReplica(0x3000060, 6193)) },
			`"master":false,"alive":true,"possible_dead":false,"lag_ms":0,"sync_by_time":true,"lag_bytes":0,"sync_by_bytes":true,"lsn":"0/3000060","port":5432,"timeline":1`},
		{"replica at the thresholds", func(tab *table) { tab.observe(1, httpReplica(0x3000060-1_000_000, 1000)) },
			// 0x3000060 - 1000000 is 0x2F0BE20
			`"master":false,"alive":true,"possible_dead":false,"lag_ms":1000,"sync_by_time":true,"lag_bytes":1000000,"sync_by_bytes":true,"lsn":"0/2F0BE20","port":5432,"timeline":1`},
		{"replica beyond the thresholds", func(tab *table) { tab.observe(1, httpReplica(0x3000060-1_000_001, 1001)) },
			`"master":false,"alive":true,"possible_dead":false,"lag_ms":1001,"sync_by_time":false,"lag_bytes":1000001,"sync_by_bytes":false,"lsn":"0/2F0BE1F","port":5432,"timeline":1`},
		{"replica with nothing replayed", func(tab *table) { tab.observe(1, httpReplica(0x2FFFE98, httpUnknown)) },
			`"master":false,"alive":true,"possible_dead":false,"lag_ms":null,"sync_by_time":false,"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5432,"timeline":1`},
		{"replica of unknown timeline", func(tab *table) {
			o := known
			o.timeline = 0
			tab.observe(1, o)
		}, `"master":false,"alive":true,"possible_dead":false,"lag_ms":6193,"sync_by_time":false,"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5432,"timeline":null`},
		{"replica of another timeline", func(tab *table) {
			o := known
			o.timeline = max32
			tab.observe(1, o)
		}, `"master":false,"alive":true,"possible_dead":false,"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false,"lsn":"0/2FFFE98","port":5432,"timeline":4294967295`},
		{"replica without a position", func(tab *table) { tab.observe(1, httpReplica(0, 6193)) },
			// 0x3000060 is 50331744
			`"master":false,"alive":true,"possible_dead":false,"lag_ms":6193,"sync_by_time":false,"lag_bytes":50331744,"sync_by_bytes":false,"lsn":null,"port":5432,"timeline":1`},
		{"possibly dead replica", func(tab *table) {
			tab.observe(1, known)
			tab.fail(1)
			tab.fail(1)
		}, `"master":false,"alive":true,"possible_dead":true,"lag_ms":6193,"sync_by_time":false,"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5432,"timeline":1`},
		{"replica that hung up", func(tab *table) {
			tab.observe(1, known)
			tab.suspectHost(1)
		}, `"master":false,"alive":true,"possible_dead":true,"lag_ms":6193,"sync_by_time":false,"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5432,"timeline":1`},
		{"dead replica", func(tab *table) {
			tab.observe(1, known)
			for range 3 {
				tab.fail(1)
			}
		}, `"master":false,"alive":false,"possible_dead":true,"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false,"lsn":null,"port":5432,"timeline":null`},
		{"other master", func(tab *table) { tab.observe(1, httpMaster(0x3000061)) },
			`"master":true,"alive":true,"possible_dead":false,"lag_ms":0,"sync_by_time":true,"lag_bytes":0,"sync_by_bytes":true,"lsn":"0/3000061","port":5432,"timeline":1`},
		{"possibly dead master", func(tab *table) {
			tab.observe(1, httpMaster(0x3000061))
			tab.fail(1)
		}, `"master":true,"alive":true,"possible_dead":true,"lag_ms":0,"sync_by_time":true,"lag_bytes":0,"sync_by_bytes":true,"lsn":"0/3000061","port":5432,"timeline":1`},
		{"dead master", func(tab *table) {
			tab.observe(1, httpMaster(0x3000061))
			for range 3 {
				tab.fail(1)
			}
		}, `"master":false,"alive":false,"possible_dead":true,"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false,"lsn":null,"port":5432,"timeline":null`},
		{"replica come back", func(tab *table) {
			for range 3 {
				tab.fail(1)
			}
			tab.observe(1, known)
		}, `"master":false,"alive":true,"possible_dead":false,"lag_ms":6193,"sync_by_time":false,"lag_bytes":456,"sync_by_bytes":true,"lsn":"0/2FFFE98","port":5432,"timeline":1`},
	} {
		s := httpServer(httpHosts("m", "r")...)
		s.monitor.table.observe(0, httpMaster(0x3000060))
		tt.make(s.monitor.table)
		want := `{"dc":null,"geo":null,` + tt.want + `}`
		if got := httpAsk(t, s, "/status?host=r"); got != "200 "+want {
			t.Errorf("/status of a %s =\n%s; want\n200 %s", tt.name, got, want)
		}
		const m = `{"host":"m","dc":null,"geo":null,"master":true,"alive":true,"possible_dead":false,"lag_ms":0,"sync_by_time":true,` +
			`"lag_bytes":0,"sync_by_bytes":true,"lsn":"0/3000060","port":5432,"timeline":1}`
		want = "200 [" + m + `,{"host":"r",` + want[1:] + "]"
		if got := httpAsk(t, s, "/hosts"); got != want {
			t.Errorf("/hosts of a %s =\n%s; want\n%s", tt.name, got, want)
		}
	}
}

// TestRenderOnce: a view is rendered once however many ask for it at the same
// time, and the next view anew.
func TestRenderOnce(t *testing.T) {
	s := httpReadme()
	v := s.monitor.table.view()
	var got [16]*rendered
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() { got[i] = v.render(s.hosts) })
	}
	wg.Wait()
	for i, r := range got {
		if r != got[0] || len(r.status) != 3 {
			t.Errorf("render %d = %p with %d hosts; want %p with 3", i, r, len(r.status), got[0])
		}
	}
	before := string(got[0].hosts.body)
	s.monitor.table.observe(1, httpReplica(0x3000060, 0))
	if after := string(s.monitor.table.view().render(s.hosts).hosts.body); after == before {
		t.Errorf("/hosts after a change = %s; want another one", after)
	}
	if again := string(v.render(s.hosts).hosts.body); again != before {
		t.Errorf("/hosts of the old view = %s; want %s", again, before)
	}
}
