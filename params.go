package main

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// param is a query parameter as given, or not given at all.
type param struct {
	value string
	set   bool
}

// params are the query parameters that some route knows. The first one of a
// repeated name counts.
type params struct {
	lagMS, lagBytes, minLSN, timeline, waitMS, fallback param
	host, port, role                                    param
}

// named returns where the parameter of that name belongs, nil for others.
func (p *params) named(name string) *param {
	switch name {
	case "lag_ms":
		return &p.lagMS
	case "lag_bytes":
		return &p.lagBytes
	case "min_lsn":
		return &p.minLSN
	case "timeline":
		return &p.timeline
	case "wait_ms":
		return &p.waitMS
	case "fallback":
		return &p.fallback
	case "host":
		return &p.host
	case "port":
		return &p.port
	case "role":
		return &p.role
	}
	return nil
}

// parseParams reads a raw query. It differs from url.ParseQuery in that ';' is
// data, and that it allocates only for what is escaped. It returns false for a
// percent sign without two hexadecimal digits.
func parseParams(raw string) (p params, ok bool) {
	for raw != "" {
		var pair string
		pair, raw, _ = strings.Cut(raw, "&")
		name, value, _ := strings.Cut(pair, "=")
		name, err := url.QueryUnescape(name)
		if err != nil {
			return p, false
		}
		value, err = url.QueryUnescape(value)
		if err != nil {
			return p, false
		}
		if at := p.named(name); at != nil && !at.set {
			*at = param{value, true}
		}
	}
	return p, true
}

// fallback is what answers a request when no replica matches it.
type fallback uint8

const (
	fallbackMaster fallback = iota
	fallbackNone
	fallbackAny // the master, or else the least lagged live replica
)

// maxWait is the largest wait_ms, in milliseconds.
const maxWait = 60_000

// conditions are what the parameters of a request say.
type conditions struct {
	filter
	wait     time.Duration
	fallback fallback
}

// conditions reads the parameters that select a host, all of them, in the order
// in which they are complained about. bad names the first one that is invalid.
func (p *params) conditions() (c conditions, bad string) {
	var ok bool
	if c.lagMS, ok = p.lagMS.limit(); !ok {
		return c, "lag_ms"
	}
	if c.lagBytes, ok = p.lagBytes.limit(); !ok {
		return c, "lag_bytes"
	}
	if p.minLSN.set {
		l, err := parseLSN(p.minLSN.value)
		if err != nil {
			return c, "min_lsn"
		}
		c.minLSN, c.hasMinLSN = l, true
	}
	if p.timeline.set {
		t, err := parseTimeline(p.timeline.value)
		if err != nil {
			return c, "timeline"
		}
		c.timeline = t
	}
	if c.wait, ok = p.waitMS.wait(); !ok {
		return c, "wait_ms"
	}
	if p.fallback.set {
		switch p.fallback.value {
		case "master":
			c.fallback = fallbackMaster
		case "none":
			c.fallback = fallbackNone
		case "any":
			c.fallback = fallbackAny
		default:
			return c, "fallback"
		}
	}
	return c, ""
}

// limit reads a threshold.
func (p param) limit() (l limit, ok bool) {
	if !p.set {
		return limit{}, true
	}
	n, err := strconv.ParseUint(p.value, 10, 64)
	return limit{true, n}, err == nil
}

// wait reads wait_ms.
func (p param) wait() (d time.Duration, ok bool) {
	if !p.set {
		return 0, true
	}
	n, err := strconv.ParseUint(p.value, 10, 64)
	return time.Duration(n) * time.Millisecond, err == nil && n <= maxWait
}

// wantsJSON reports whether a request accepts application/json by name. Ranges
// such as */* get the plain text that most clients want.
func wantsJSON(h http.Header) bool { return slices.ContainsFunc(h["Accept"], acceptsJSON) }

// acceptsJSON reports the same of one value of Accept.
func acceptsJSON(accept string) bool {
	for accept != "" {
		var item string
		item, accept, _ = strings.Cut(accept, ",")
		media, rest, _ := strings.Cut(item, ";")
		if strings.EqualFold(strings.TrimSpace(media), "application/json") && !zeroQuality(rest) {
			return true
		}
	}
	return false
}

// zeroQuality reports whether the parameters of a media range hold q=0, which
// refuses it.
func zeroQuality(parameters string) bool {
	for parameters != "" {
		var item string
		item, parameters, _ = strings.Cut(parameters, ";")
		name, value, _ := strings.Cut(item, "=")
		if strings.EqualFold(strings.TrimSpace(name), "q") {
			q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return err == nil && q == 0
		}
	}
	return false
}
