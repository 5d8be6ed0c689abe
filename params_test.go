package main

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

// paramNames are the names that routes know.
var paramNames = []string{"lag_ms", "lag_bytes", "min_lsn", "timeline", "wait_ms", "fallback", "host", "port", "role"}

// text returns the parameters that are set as name=value, in the order of
// paramNames.
func (p params) text() string {
	var b strings.Builder
	for _, name := range paramNames {
		if at := p.named(name); at.set {
			fmt.Fprintf(&b, "%s=%q ", name, at.value)
		}
	}
	return strings.TrimSpace(b.String())
}

func TestParseParams(t *testing.T) {
	for _, tt := range []struct{ raw, want string }{
		{"", ``},
		{"lag_ms=1&lag_bytes=2&min_lsn=3&timeline=4&wait_ms=5&fallback=6&host=7&port=8&role=9",
			`lag_ms="1" lag_bytes="2" min_lsn="3" timeline="4" wait_ms="5" fallback="6" host="7" port="8" role="9"`},
		{"role=9&host=7", `host="7" role="9"`},
		{"host=a&host=b", `host="a"`},
		{"host=&host=b", `host=""`},
		{"host&host=b", `host=""`},
		{"host=a=b", `host="a=b"`},
		{"host==", `host="="`},
		{"host=a;port=1", `host="a;port=1"`},
		{"host=a;&port=1", `host="a;" port="1"`},
		{";host=a", ``},
		{"host=a+b", `host="a b"`},
		{"host=a%2Bb", `host="a+b"`},
		{"host=%61%2f%2F", `host="a//"`},
		{"h%6fst=a", `host="a"`},
		{"host=a%26port=1", `host="a&port=1"`},
		{"host%3Da", ``},
		{"host=%2561", `host="%61"`},
		{"host=%00%ff", `host="\x00\xff"`},
		{"host=é", `host="é"`},
		{"host=[::1]", `host="[::1]"`},
		{"Host=a&HOST=a&hos=a&hosts=a& host=a", ``},
		{"+host=a", ``},
		{"&&&", ``},
		{"=&=a", ``},
		{"&host=a&", `host="a"`},
		{"?host=a", ``},
		{"host=a#b", `host="a#b"`},
	} {
		p, ok := parseParams(tt.raw)
		if got := p.text(); !ok || got != tt.want {
			t.Errorf("parseParams(%q) = %s, %v; want %s", tt.raw, got, ok, tt.want)
		}
	}
	for _, raw := range []string{"%", "%%", "%4", "%zz", "%4g", "%g4", "a=%", "a=%4", "a=1%", "a=%zz", "%zz=a", "=%",
		"host=a&b=%", "%&host=a", "host=a&host=%", "a=1;%", "%+1", "%-1", "%u0041"} {
		if p, ok := parseParams(raw); ok {
			t.Errorf("parseParams(%q) = %s; want an error", raw, p.text())
		}
	}
}

// TestConditions: what each parameter may be, and what it means.
func TestConditions(t *testing.T) {
	for _, tt := range []struct {
		raw  string
		want conditions
	}{
		{"", conditions{}},
		{"lag_ms=0", conditions{filter: filter{lagMS: limit{true, 0}}}},
		{"lag_ms=5", conditions{filter: filter{lagMS: limit{true, 5}}}},
		{"lag_ms=007", conditions{filter: filter{lagMS: limit{true, 7}}}},
		{"lag_ms=18446744073709551615", conditions{filter: filter{lagMS: limit{true, 1<<64 - 1}}}},
		{"lag_bytes=0", conditions{filter: filter{lagBytes: limit{true, 0}}}},
		{"lag_bytes=18446744073709551615", conditions{filter: filter{lagBytes: limit{true, 1<<64 - 1}}}},
		{"min_lsn=0/0", conditions{filter: filter{hasMinLSN: true}}},
		{"min_lsn=0/3000060", conditions{filter: filter{hasMinLSN: true, minLSN: 0x3000060}}},
		{"min_lsn=16/b374d848", conditions{filter: filter{hasMinLSN: true, minLSN: 0x16B374D848}}},
		{"min_lsn=16/B374D848", conditions{filter: filter{hasMinLSN: true, minLSN: 0x16B374D848}}},
		{"min_lsn=00000016/0000000a", conditions{filter: filter{hasMinLSN: true, minLSN: 0x160000000A}}},
		{"min_lsn=FFFFFFFF/FFFFFFFF", conditions{filter: filter{hasMinLSN: true, minLSN: 1<<64 - 1}}},
		{"timeline=1", conditions{filter: filter{timeline: 1}}},
		{"timeline=4294967295", conditions{filter: filter{timeline: 1<<32 - 1}}},
		{"wait_ms=0", conditions{}},
		{"wait_ms=1", conditions{wait: time.Millisecond}},
		{"wait_ms=60000", conditions{wait: time.Minute}},
		{"fallback=master", conditions{fallback: fallbackMaster}},
		{"fallback=none", conditions{fallback: fallbackNone}},
		{"fallback=any", conditions{fallback: fallbackAny}},
		{"lag_ms=1&lag_bytes=2&min_lsn=0/3&timeline=4&wait_ms=5&fallback=any", conditions{
			filter: filter{lagMS: limit{true, 1}, lagBytes: limit{true, 2}, minLSN: 3, hasMinLSN: true, timeline: 4},
			wait:   5 * time.Millisecond, fallback: fallbackAny}},
		// Of other routes.
		{"host=&port=x&role=x", conditions{}},
	} {
		p, _ := parseParams(tt.raw)
		if got, bad := p.conditions(); got != tt.want || bad != "" {
			t.Errorf("conditions(%q) = %+v, %q; want %+v", tt.raw, got, bad, tt.want)
		}
	}
	notNumbers := []string{"", "x", "-1", "-0", "+1", " 1", "1 ", "1.5", "1e3", "0x10", "0b1", "1_000", "1,000", "1;", "\x00", "١", "１",
		"18446744073709551616", "99999999999999999999999999"}
	for name, values := range map[string][]string{
		"lag_ms":    notNumbers,
		"lag_bytes": notNumbers,
		"wait_ms":   append([]string{"60001", "4294967296", "18446744073709551615"}, notNumbers...),
		"timeline":  append([]string{"0", "00", "4294967296", "18446744073709551615"}, notNumbers...),
		"min_lsn": {"", "0", "/", "0/", "/0", "3000060", "0/3000060/", "0/0/0", "0//0", "0/123456789", "123456789/0", "000000000/0", "0/000000000",
			"0/G", "G/0", "-1/0", "0/-1", "+1/0", "0/+1", " 0/0", "0/0 ", "0/ 0", "0x1/0", "0/0x1", "1_0/0", "0\\0", "0/3000060;x", "0/0\x00"},
		"fallback": {"", "Master", "ANY", "None", "replica", "master ", "1", "master,any"},
	} {
		for _, value := range values {
			raw := name + "=" + url.QueryEscape(value)
			p, _ := parseParams(raw)
			if c, bad := p.conditions(); bad != name {
				t.Errorf("conditions(%q) = %+v, %q; want a complaint about %s", raw, c, bad, name)
			}
		}
	}
}

func TestOrderOfComplaints(t *testing.T) {
	order := []string{"lag_ms", "lag_bytes", "min_lsn", "timeline", "wait_ms", "fallback"}
	for i, want := range order {
		wrong := slices.Clone(order[i:])
		slices.Reverse(wrong) // their order in the query does not matter
		raw := strings.Join(wrong, "&")
		p, _ := parseParams(raw)
		if _, bad := p.conditions(); bad != want {
			t.Errorf("conditions(%q) complains about %q; want %q", raw, bad, want)
		}
	}
}

func TestWantsJSON(t *testing.T) {
	for _, tt := range []struct {
		accept []string
		want   bool
	}{
		{nil, false},
		{[]string{""}, false},
		{[]string{"application/json"}, true},
		{[]string{"Application/JSON"}, true},
		{[]string{" application/json "}, true},
		{[]string{"\tapplication/json\t"}, true},
		// Ranges get text.
		{[]string{"*/*"}, false},
		{[]string{"application/*"}, false},
		{[]string{"*/json"}, false},
		{[]string{"*"}, false},
		// Others that only look like it.
		{[]string{"text/plain"}, false},
		{[]string{"text/json"}, false},
		{[]string{"application/jsonp"}, false},
		{[]string{"application/json+x"}, false},
		{[]string{"application/ld+json"}, false},
		{[]string{"application/problem+json"}, false},
		{[]string{"xapplication/json"}, false},
		{[]string{"application/ json"}, false},
		{[]string{"application json"}, false},
		{[]string{"text/plain;x=application/json"}, false},
		{[]string{"text/plain;application/json"}, false},
		// Lists.
		{[]string{"application/json, text/plain, */*"}, true},
		{[]string{"text/html,application/json"}, true},
		{[]string{"text/html , application/json"}, true},
		{[]string{",,application/json,"}, true},
		{[]string{"text/html;q=1,application/json;q=0.1"}, true}, // a preference is not a choice
		{[]string{"text/html, */*;q=0.1"}, false},
		// Parameters.
		{[]string{"application/json;charset=utf-8"}, true},
		{[]string{"application/json ; charset=utf-8"}, true},
		{[]string{"application/json;"}, true},
		{[]string{"application/json;v=0"}, true},
		{[]string{"application/json;qq=0"}, true},
		{[]string{"application/json;x=q=0"}, true},
		// Qualities.
		{[]string{"application/json;q=1"}, true},
		{[]string{"application/json;q=0.001"}, true},
		{[]string{"application/json;q=1.000"}, true},
		{[]string{"application/json;q=0"}, false},
		{[]string{"application/json;q=0."}, false},
		{[]string{"application/json;q=0.0"}, false},
		{[]string{"application/json;q=0.000"}, false},
		{[]string{"application/json; q=0"}, false},
		{[]string{"application/json ;Q=0 "}, false},
		{[]string{"application/json;charset=utf-8;q=0"}, false},
		{[]string{"application/json;q=0;charset=utf-8"}, false},
		{[]string{"application/json;q=0, */*"}, false},
		{[]string{"application/json;q=0, application/json"}, true},
		{[]string{"application/json;v=1;q=0, application/json;v=2"}, true},
		{[]string{"text/html;q=0, application/json"}, true},
		{[]string{"application/json;q="}, true}, // not a quality, so not 0
		{[]string{"application/json;q=x"}, true},
		{[]string{"application/json;q"}, true},
		// Several headers are one list.
		{[]string{"text/html", "application/json"}, true},
		{[]string{"application/json", "text/html"}, true},
		{[]string{"text/html", "*/*"}, false},
		{[]string{"application/json;q=0", "text/html"}, false},
		{[]string{"", "application/json"}, true},
	} {
		if got := wantsJSON(http.Header{"Accept": tt.accept}); got != tt.want {
			t.Errorf("wantsJSON(%q) = %v; want %v", tt.accept, got, tt.want)
		}
	}
	if wantsJSON(http.Header{"Content-Type": {"application/json"}}) {
		t.Error("wantsJSON is true for a Content-Type")
	}
}

// FuzzParseParams compares parseParams with url.ParseQuery, which differs in that
// it takes a semicolon for an error.
func FuzzParseParams(f *testing.F) {
	for _, raw := range []string{"", "lag_ms=1&lag_ms=2", "min_lsn=0%2F1&&=", "host=a+b&h%6fst", "timeline=%zz", "a;b", "role=%", "host=%00é"} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		p, ok := parseParams(raw)
		p.conditions()
		if strings.Contains(raw, ";") || strings.Count(raw, "&") > 1000 { // it has a limit
			return
		}
		values, err := url.ParseQuery(raw)
		if ok != (err == nil) {
			t.Fatalf("parseParams(%q) = %v, but url.ParseQuery has error %v", raw, ok, err)
		}
		if !ok {
			return
		}
		for _, name := range paramNames {
			if got, want := *p.named(name), (param{values.Get(name), values.Has(name)}); got != want {
				t.Errorf("parseParams(%q) has %s %+v; want %+v", raw, name, got, want)
			}
		}
	})
}
