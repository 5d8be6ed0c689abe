package main

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"
)

// The columns of the row, in their order.
const (
	colStandby = iota
	colPid
	colLatestEnd
	colReceivedTLI
	colCheckpointTLI
	colMinRecoveryTLI
	colSystemID
	colPosition // write or replay
	colSecond   // insert or receive
	colWALFile
	colLastReplay
	colPostmaster
	colClock
)

// masterRow and replicaRow are what PostgreSQL answers to the full query, as
// lib/pq hands it over.
func masterRow() []driver.Value {
	return []driver.Value{
		false, nil, nil, nil, int64(1), int64(0), int64(7412345678901234567),
		[]byte("0/3000060"), []byte("0/3000100"), "000000020000000000000003", nil,
		"2026-08-21 09:00:00.000001", "2026-08-21 12:34:56.123456",
	}
}

func replicaRow() []driver.Value {
	return []driver.Value{
		true, int64(4242), []byte("0/3000200"), int64(2), int64(1), int64(0), int64(7412345678901234567),
		[]byte("0/3000060"), []byte("0/3000100"), nil, "2026-08-21 12:34:55.500000",
		"2026-08-21 09:00:00.000001", "2026-08-21 12:34:56.123456",
	}
}

// set replaces a value of a row.
type set struct {
	col int
	v   driver.Value
}

func rowWith(row []driver.Value, sets ...set) []driver.Value {
	for _, s := range sets {
		row[s.col] = s.v
	}
	return row
}

func TestParseRow(t *testing.T) {
	start := time.Now()
	end := start.Add(3 * time.Millisecond)
	clock := time.Date(2026, 8, 21, 12, 34, 56, 123456000, time.UTC)
	base := observation{
		start: start, end: end, clock: clock, postmasterStart: 1787302800000001, systemID: 7412345678901234567,
	}
	m := base
	m.write, m.insert, m.timeline = 0x3000060, 0x3000100, 2
	r := base
	r.standby, r.timeline, r.receiving = true, 2, true
	r.replay, r.receive, r.latestEnd = 0x3000060, 0x3000100, 0x3000200
	r.lastReplay = time.Date(2026, 8, 21, 12, 34, 55, 500000000, time.UTC)
	but := func(o observation, edit func(*observation)) observation { edit(&o); return o }
	for _, tt := range []struct {
		name string
		row  []driver.Value
		want observation
	}{
		{"master", masterRow(), m},
		{"master, values as text or bytes", rowWith(masterRow(), set{colPosition, "0/3000060"}, set{colWALFile, []byte("000000020000000000000003")},
			set{colClock, []byte("2026-08-21 12:34:56.123456")}), m},
		{"master without the control functions", rowWith(masterRow(), set{colCheckpointTLI, nil}, set{colMinRecoveryTLI, nil}, set{colSystemID, nil}),
			but(m, func(o *observation) { o.systemID = 0 })},
		{"the WAL file has the timeline, the control file an old one", rowWith(masterRow(), set{colCheckpointTLI, int64(9)}), m},
		{"timeline 10", rowWith(masterRow(), set{colWALFile, "0000000A0000000000000003"}),
			but(m, func(o *observation) { o.timeline = 10 })},
		{"identifier with the sign bit", rowWith(masterRow(), set{colSystemID, int64(-3)}),
			but(m, func(o *observation) { o.systemID = -3 })},

		{"replica", replicaRow(), r},
		{"no receiver", rowWith(replicaRow(), set{colPid, nil}, set{colLatestEnd, nil}, set{colReceivedTLI, nil}),
			but(r, func(o *observation) { o.receiving, o.latestEnd, o.timeline = false, 0, 1 })},
		{"a receiver that the role may not look into", rowWith(replicaRow(), set{colLatestEnd, nil}, set{colReceivedTLI, nil}),
			but(r, func(o *observation) { o.latestEnd, o.timeline = 0, 1 })},
		{"without the view", rowWith(replicaRow(), set{colPid, nil}, set{colLatestEnd, nil}, set{colReceivedTLI, nil},
			set{colCheckpointTLI, int64(3)}), but(r, func(o *observation) { o.receiving, o.latestEnd, o.timeline = false, 0, 3 })},
		{"nor the control functions", rowWith(replicaRow(), set{colPid, nil}, set{colLatestEnd, nil}, set{colReceivedTLI, nil},
			set{colCheckpointTLI, nil}, set{colMinRecoveryTLI, nil}, set{colSystemID, nil}),
			but(r, func(o *observation) { o.receiving, o.latestEnd, o.timeline, o.systemID = false, 0, 0, 0 })},
		{"the timeline received", rowWith(replicaRow(), set{colReceivedTLI, int64(5)}, set{colMinRecoveryTLI, int64(4)}),
			but(r, func(o *observation) { o.timeline = 5 })},
		{"the timeline of the checkpoint", rowWith(replicaRow(), set{colCheckpointTLI, int64(5)}, set{colMinRecoveryTLI, int64(4)}),
			but(r, func(o *observation) { o.timeline = 5 })},
		{"the timeline of the minimum recovery point", rowWith(replicaRow(), set{colMinRecoveryTLI, int64(5)}),
			but(r, func(o *observation) { o.timeline = 5 })},
		{"a timeline above 2^31", rowWith(replicaRow(), set{colReceivedTLI, int64(-1)}),
			but(r, func(o *observation) { o.timeline = 4294967295 })},
		{"from the archive alone", rowWith(replicaRow(), set{colPid, nil}, set{colLatestEnd, nil}, set{colReceivedTLI, nil}, set{colSecond, nil}),
			but(r, func(o *observation) { o.receiving, o.latestEnd, o.timeline, o.receive = false, 0, 1, 0 })},
		{"nothing replayed since the start", rowWith(replicaRow(), set{colLastReplay, nil}),
			but(r, func(o *observation) { o.lastReplay = time.Time{} })},
		{"nothing replayed at all", rowWith(replicaRow(), set{colLastReplay, nil}, set{colPosition, nil}),
			but(r, func(o *observation) { o.lastReplay, o.replay = time.Time{}, 0 })},
		{"promoted while the query ran", rowWith(replicaRow(), set{colWALFile, "000000030000000000000003"}), r},
		{"a moment before 2000", rowWith(replicaRow(), set{colLastReplay, "1999-12-31 23:59:59.999999"}),
			but(r, func(o *observation) { o.lastReplay = time.Date(1999, 12, 31, 23, 59, 59, 999999000, time.UTC) })},
	} {
		got, err := parseRow(tt.row, start, end)
		if err != nil || got != tt.want {
			t.Errorf("%s: parseRow = %+v, %v;\nwant %+v", tt.name, got, err, tt.want)
		}
	}
}

func TestParseRowRejects(t *testing.T) {
	for _, tt := range []struct {
		row  []driver.Value
		want string // a part of the error
	}{
		{nil, "0 columns instead of 13"},
		{masterRow()[:12], "12 columns instead of 13"},
		{append(masterRow(), "more"), "14 columns instead of 13"},
		{rowWith(masterRow(), set{colPosition, nil}), "no WAL position of the master"},
		{rowWith(masterRow(), set{colSecond, nil}), "no WAL position of the master"},
		{rowWith(masterRow(), set{colWALFile, nil}), "no WAL position of the master"},
		{rowWith(masterRow(), set{colPosition, "0/0"}), "no WAL position of the master"},
		{rowWith(masterRow(), set{colClock, nil}), "no clock_timestamp"},
		{rowWith(replicaRow(), set{colClock, nil}), "no clock_timestamp"},
		{rowWith(replicaRow(), set{colClock, ""}), "no clock_timestamp"},

		{rowWith(masterRow(), set{colStandby, nil}), "in column 1"},
		{rowWith(masterRow(), set{colStandby, "f"}), "unexpected value f of type string in column 1"},
		{rowWith(masterRow(), set{colStandby, int64(0)}), "in column 1"},
		{rowWith(replicaRow(), set{colPid, "4242"}), "unexpected value 4242 of type string in column 2"},
		{rowWith(replicaRow(), set{colLatestEnd, "3000200"}), "unexpected value 3000200 of type string in column 3"},
		{rowWith(replicaRow(), set{colLatestEnd, int64(5)}), "in column 3"},
		{rowWith(replicaRow(), set{colReceivedTLI, "2"}), "in column 4"},
		{rowWith(replicaRow(), set{colCheckpointTLI, 1.5}), "in column 5"},
		{rowWith(replicaRow(), set{colMinRecoveryTLI, true}), "in column 6"},
		{rowWith(replicaRow(), set{colSystemID, "7412345678901234567"}), "in column 7"},
		{rowWith(replicaRow(), set{colPosition, int64(1)}), "in column 8"},
		{rowWith(masterRow(), set{colPosition, "0/G"}), "in column 8"},
		{rowWith(replicaRow(), set{colSecond, "0/123456789"}), "in column 9"},
		{rowWith(masterRow(), set{colSecond, false}), "in column 9"},
		{rowWith(masterRow(), set{colWALFile, "00000002"}), "in column 10"},
		{rowWith(masterRow(), set{colWALFile, "000000000000000000000003"}), "in column 10"},
		{rowWith(replicaRow(), set{colLastReplay, "yesterday"}), "in column 11"},
		{rowWith(replicaRow(), set{colLastReplay, time.Now()}), "in column 11"},
		{rowWith(replicaRow(), set{colPostmaster, "2026-08-21T09:00:00Z"}), "in column 12"},
		{rowWith(replicaRow(), set{colClock, "infinity"}), "in column 13"},
		// The first one is told.
		{rowWith(replicaRow(), set{colPid, "4242"}, set{colClock, "infinity"}), "in column 2"},
	} {
		got, err := parseRow(tt.row, time.Now(), time.Now())
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("parseRow(%v) = %v; want an error with %q", tt.row, err, tt.want)
		}
		if got != (observation{}) {
			t.Errorf("parseRow(%v) = %+v with an error; want nothing", tt.row, got)
		}
	}
}

func TestDegrades(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string // the SQLSTATE; "" if the query stays as it is
	}{
		{&pq.Error{Code: "42501"}, "42501"}, // permission denied
		{&pq.Error{Code: "42883"}, "42883"}, // no such function
		{&pq.Error{Code: "0A000"}, "0A000"}, // not supported
		{fmt.Errorf("query: %w", &pq.Error{Code: "42501"}), "42501"},
		{&checkError{op: "query", err: &pq.Error{Code: "0A000"}}, "0A000"},
		{&pq.Error{Code: "42P01"}, ""}, // no such table
		{&pq.Error{Code: "57P01"}, ""}, // admin shutdown
		{&pq.Error{Code: "28P01"}, ""}, // wrong password
		{&pq.Error{Code: "53300"}, ""}, // too many connections
		{&pq.Error{Code: "55000"}, ""}, // recovery is in progress
		{&pq.Error{}, ""},
		{errors.New("pq: 42501"), ""},
		{driver.ErrBadConn, ""},
		{io.EOF, ""},
		{nil, ""},
	} {
		if got, ok := degrades(tt.err); got != tt.want || ok != (tt.want != "") {
			t.Errorf("degrades(%v) = %q, %v; want %q", tt.err, got, ok, tt.want)
		}
	}
}

var (
	sqlLiteral = regexp.MustCompile(`'[^']*'`)
	sqlName    = regexp.MustCompile(`[A-Za-z_][A-Za-z_0-9.]*`)
	sqlCall    = regexp.MustCompile(`([A-Za-z_][A-Za-z_0-9.]*)\s*\(`)
	sqlFrom    = regexp.MustCompile(`(?:FROM|JOIN) ([A-Za-z_][A-Za-z_0-9.]*)`)
)

// What is not qualified could be found on the search_path first, where others may
// have put their own. That holds for operators, and for types, too.
func TestQueryIsQualified(t *testing.T) {
	keywords := strings.Fields("SELECT FROM AS CASE WHEN THEN ELSE END LEFT CROSS JOIN ON NULL OFFSET 0")
	aliases := strings.Fields("s w c r y")
	for i, query := range queries {
		bare := sqlLiteral.ReplaceAllString(query, "")
		if at := strings.IndexAny(bare, "+-*/<>=~!@#%^&|`?:;\"$'[]"); at >= 0 {
			t.Errorf("form %d has an operator: %q", i, bare[at:min(len(bare), at+20)])
		}
		for _, m := range sqlCall.FindAllStringSubmatch(bare, -1) {
			if !strings.HasPrefix(m[1], "pg_catalog.") && !slices.Contains([]string{"FROM", "JOIN"}, m[1]) {
				t.Errorf("form %d calls %s", i, m[1])
			}
		}
		for _, m := range sqlFrom.FindAllStringSubmatch(bare, -1) {
			if !strings.HasPrefix(m[1], "pg_catalog.") {
				t.Errorf("form %d reads from %s", i, m[1])
			}
		}
		// Every other name is a keyword, a column of an alias, or what names one.
		named := false
		for _, name := range sqlName.FindAllString(bare, -1) {
			alias, _, column := strings.Cut(name, ".")
			switch {
			case named, strings.HasPrefix(name, "pg_catalog."), slices.Contains(keywords, name),
				slices.Contains(aliases, alias), column && slices.Contains(aliases, alias):
			default:
				t.Errorf("form %d has the name %s", i, name)
			}
			named = name == "AS"
		}
	}
}

func TestQueryForms(t *testing.T) {
	if at := strings.Index(queries[0], "pg_catalog.pg_stat_wal_receiver"); at < 0 || at+len("pg_catalog.pg_stat_wal_receiver") > 1000 {
		t.Errorf("pg_catalog.pg_stat_wal_receiver is at %d of the query; want it within the first 1000 bytes", at)
	}
	for i, query := range queries {
		for _, tt := range []struct {
			name string
			want bool
		}{
			{"pg_stat_wal_receiver", i == 0},
			{"pg_control_checkpoint()", i < 2},
			{"pg_control_recovery()", i < 2},
			{"pg_control_system()", i < 2},
			{"pg_is_in_recovery()", true},
			{"clock_timestamp()", true},
			{"pg_postmaster_start_time()", true},
		} {
			if got := strings.Contains(query, tt.name); got != tt.want {
				t.Errorf("form %d has %s: %v; want %v", i, tt.name, got, tt.want)
			}
		}
		// A promotion may fall into the query.
		if n := strings.Count(query, "pg_is_in_recovery"); n != 1 {
			t.Errorf("form %d asks for the role %d times; want 1", i, n)
		}
		// The positions that a replica's is compared with are read after it.
		bare := sqlLiteral.ReplaceAllString(query, "")
		replay, receive := strings.Index(bare, "pg_last_wal_replay_lsn"), strings.Index(bare, "pg_last_wal_receive_lsn")
		clock, commit := strings.Index(bare, "clock_timestamp"), strings.Index(bare, "pg_last_xact_replay_timestamp")
		if !(replay < receive && receive < clock && replay < commit && commit < clock) {
			t.Errorf("form %d reads replay, receive, last transaction and clock at %d, %d, %d, %d; want them in order",
				i, replay, receive, commit, clock)
		}
		// The list before FROM has the columns that parseRow wants.
		list, depth, columns := bare[:strings.Index(bare, " FROM ")], 0, 1
		for _, c := range list {
			switch {
			case c == '(':
				depth++
			case c == ')':
				depth--
			case c == ',' && depth == 0:
				columns++
			}
		}
		if columns != queryColumns {
			t.Errorf("form %d has %d columns; want %d", i, columns, queryColumns)
		}
	}
	for i, without := range withoutForm {
		if (without == "") != (i == 0) {
			t.Errorf("form %d is described as being without %q", i, without)
		}
	}
}
