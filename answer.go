package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
)

// answer is a body with its headers, made once and written many times.
type answer struct {
	body        []byte
	contentType []string // nil for an empty body
	length      []string
	head        []byte // both as lines of a header
}

var (
	typeText = []string{"text/plain; charset=utf-8"}
	typeJSON = []string{"application/json"}
)

func newAnswer(contentType []string, body []byte) *answer {
	a := &answer{body: body, contentType: contentType, length: []string{strconv.Itoa(len(body))}}
	if contentType != nil {
		a.head = append(a.head, "Content-Type: "+contentType[0]+"\r\n"...)
	}
	a.head = append(a.head, "Content-Length: "+a.length[0]+"\r\n"...)
	return a
}

func textAnswer(body string) *answer { return newAnswer(typeText, []byte(body)) }

// errorAnswer is the body of a 4xx or 5xx. The space is part of the contract.
func errorAnswer(text string) *answer {
	return newAnswer(typeJSON, []byte(`{"error_text": `+string(jsonString(text))+`}`))
}

var (
	answerEmpty    = newAnswer(nil, nil)
	answerOK       = textAnswer("OK")
	answerNotReady = errorAnswer("pg_monitor is not ready")
	answerNoHost   = errorAnswer("Get parameter 'host' wasn't passed")
	answerBadQuery = errorAnswer("Invalid query")
	answerNobody   = newAnswer(typeJSON, []byte(`{"host":null,"dc":null,"geo":null,"port":null}`))
	answersInvalid = make(map[string]*answer)
)

func init() {
	for _, name := range []string{"lag_ms", "lag_bytes", "min_lsn", "timeline", "wait_ms", "fallback", "port", "role"} {
		answersInvalid[name] = errorAnswer("Invalid " + name)
	}
}

// write sends a as the whole response. The header's slices are shared between
// responses; net/http only reads them.
func (a *answer) write(w http.ResponseWriter, status int) {
	h := w.Header()
	if a.contentType != nil {
		h["Content-Type"] = a.contentType
	}
	h["Content-Length"] = a.length
	w.WriteHeader(status)
	w.Write(a.body)
}

// hostAnswers are the answers that name one host, which never change.
type hostAnswers struct {
	text, json *answer
	name       []byte // `"host":"…",` as in /hosts
	locality   []byte // `"dc":…,"geo":…,`
	port       []byte
}

func newHostAnswers(h hostConfig) hostAnswers {
	a := hostAnswers{text: textAnswer(h.name), port: strconv.AppendUint(nil, uint64(h.port), 10)}
	a.name = append(append([]byte(`"host":`), jsonString(h.name)...), ',')
	a.locality = append(append([]byte(`"dc":`), jsonOrNull(h.dc)...), `,"geo":`...)
	a.locality = append(append(a.locality, jsonOrNull(h.geo)...), ',')
	a.json = newAnswer(typeJSON, bytes.Join([][]byte{{'{'}, a.name, a.locality, []byte(`"port":`), a.port, {'}'}}, nil))
	return a
}

// jsonString returns s as JSON, without escapes for HTML.
func jsonString(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		panic(err) // a string can always be encoded
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

func jsonOrNull(s string) []byte {
	if s == "" {
		return []byte("null")
	}
	return jsonString(s)
}

// rendered holds the answers about a view, made when they are first asked for.
type rendered struct {
	once   sync.Once
	hosts  *answer
	status []*answer
}

// render makes the answers of /hosts and /status once.
func (v *view) render(of []hostAnswers) *rendered {
	v.once.Do(func() {
		all := make([]byte, 0, 256*len(v.hosts))
		all = append(all, '[')
		for i := range v.hosts {
			if i > 0 {
				all = append(all, ',')
			}
			rest := v.appendState(append([]byte(nil), of[i].locality...), i, &of[i])
			all = append(all, '{')
			all = append(all, of[i].name...)
			all = append(all, rest...)
			all = append(all, '}')
			v.status = append(v.status, newAnswer(typeJSON, bytes.Join([][]byte{{'{'}, rest, {'}'}}, nil)))
		}
		v.rendered.hosts = newAnswer(typeJSON, append(all, ']'))
	})
	return &v.rendered
}

// appendState appends the fields of host i that change, and its port.
func (v *view) appendState(b []byte, i int, of *hostAnswers) []byte {
	s := v.hosts[i] // a copy
	lagMS, lagBytes := v.timeLag(&s), v.byteLag(&s)
	if !s.alive {
		lagMS, lagBytes, s.observation = lag{}, lag{}, observation{}
	}
	b = strconv.AppendBool(append(b, `"master":`...), s.liveMaster())
	b = strconv.AppendBool(append(b, `,"alive":`...), s.alive)
	b = strconv.AppendBool(append(b, `,"possible_dead":`...), s.possiblyDead())
	b = lagMS.append(append(b, `,"lag_ms":`...))
	b = strconv.AppendBool(append(b, `,"sync_by_time":`...), v.syncByTime(&s))
	b = lagBytes.append(append(b, `,"lag_bytes":`...))
	b = strconv.AppendBool(append(b, `,"sync_by_bytes":`...), v.syncByBytes(&s))
	b = append(b, `,"lsn":`...)
	if p := s.position(); p != 0 {
		b = append(p.append(append(b, '"')), '"')
	} else {
		b = append(b, "null"...)
	}
	b = append(append(b, `,"port":`...), of.port...)
	b = append(b, `,"timeline":`...)
	if s.timeline != 0 {
		return strconv.AppendUint(b, uint64(s.timeline), 10)
	}
	return append(b, "null"...)
}
