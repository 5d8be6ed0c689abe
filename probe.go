package main

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// The one query of a check. Everything is qualified with pg_catalog, because
// the search_path of a monitoring superuser would be an attack surface, and no
// operator is used, as those are looked up on it too. pg_is_in_recovery is
// evaluated once (OFFSET 0 keeps the planner from repeating it), as a promotion
// can fall into the query: the functions for a standby still answer then, those
// for a master raise an error in recovery. The name of the receiver's view stands
// near the beginning, where pg_stat_activity shows it.
//
// Timestamps are text that no setting of the server changes.
const (
	querySelect = `SELECT s.standby, w.pid, w.latest_end_lsn, w.received_tli, ` +
		`c.timeline_id, r.min_recovery_end_timeline, y.system_identifier, ` + queryValues +
		` FROM (SELECT pg_catalog.pg_is_in_recovery() AS standby OFFSET 0) s`
	queryReceiver   = ` LEFT JOIN pg_catalog.pg_stat_wal_receiver w ON s.standby`
	queryNoReceiver = ` CROSS JOIN (SELECT NULL AS pid, NULL AS latest_end_lsn, NULL AS received_tli) w`
	queryControl    = ` CROSS JOIN pg_catalog.pg_control_checkpoint() c` +
		` CROSS JOIN pg_catalog.pg_control_recovery() r` +
		` CROSS JOIN pg_catalog.pg_control_system() y`
	queryNoControl = ` CROSS JOIN (SELECT NULL AS timeline_id) c` +
		` CROSS JOIN (SELECT NULL AS min_recovery_end_timeline) r` +
		` CROSS JOIN (SELECT NULL AS system_identifier) y`

	// A replica's replay position is read before how much it has received, so that
	// the lag comes out larger rather than smaller.
	queryValues = `CASE WHEN s.standby THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_lsn() END, ` +
		`CASE WHEN s.standby THEN pg_catalog.pg_last_wal_receive_lsn() ELSE pg_catalog.pg_current_wal_insert_lsn() END, ` +
		`CASE WHEN s.standby THEN NULL ELSE pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()) END, ` +
		`CASE WHEN s.standby THEN ` + queryTimePre + `pg_catalog.pg_last_xact_replay_timestamp()` + queryTimePost + ` END, ` +
		queryTimePre + `pg_catalog.pg_postmaster_start_time()` + queryTimePost + `, ` +
		queryTimePre + `pg_catalog.clock_timestamp()` + queryTimePost
	queryTimePre  = `pg_catalog.to_char(pg_catalog.timezone('UTC', `
	queryTimePost = `), 'YYYY-MM-DD HH24:MI:SS.US')`
	timeLayout    = "2006-01-02 15:04:05.000000"

	queryColumns = 13
)

// queries are the forms of the query, from the full one to the one that every
// role may run: without the view of the WAL receiver, then also without the
// functions that read the control file.
var queries = [...]string{
	querySelect + queryReceiver + queryControl,
	querySelect + queryNoReceiver + queryControl,
	querySelect + queryNoReceiver + queryNoControl,
}

// withoutForm names for the log what each form does without.
var withoutForm = [len(queries)]string{
	"",
	"WAL receiver statistics; the upstream's WAL end and the timeline being received are unknown",
	"WAL receiver statistics and control file functions; replica timelines and the system identifier are unknown",
}

// degrades reports whether err means that the server lets us not use a view or
// function of the query: permission denied, no such function, or not supported,
// as some managed servers answer.
func degrades(err error) (sqlstate string, ok bool) {
	var e *pq.Error
	if !errors.As(err, &e) {
		return "", false
	}
	switch e.Code {
	case pqerror.InsufficientPrivilege, pqerror.UndefinedFunction, pqerror.FeatureNotSupported:
		return string(e.Code), true
	}
	return "", false
}

// parseRow reads the row of the query that ran from start to end.
func parseRow(row []driver.Value, start, end time.Time) (observation, error) {
	if len(row) != queryColumns {
		return observation{}, fmt.Errorf("%d columns instead of %d", len(row), queryColumns)
	}
	r := rowReader{row: row}
	o := observation{start: start, end: end}
	o.standby = r.bool()
	o.receiving = r.int() != 0
	o.latestEnd = r.lsn()
	received, checkpoint, minRecovery := r.timeline(), r.timeline(), r.timeline()
	o.systemID = r.int()
	if o.standby {
		o.timeline = max(received, checkpoint, minRecovery)
		o.replay, o.receive = r.lsn(), r.lsn()
		r.text()
	} else {
		o.write, o.insert = r.lsn(), r.lsn()
		o.timeline = r.walFile()
	}
	o.lastReplay = r.time()
	o.postmasterStart = r.time().UnixMicro()
	o.clock = r.time()
	switch {
	case r.err != nil:
		return observation{}, r.err
	case o.clock.IsZero():
		return observation{}, errors.New("no clock_timestamp")
	case !o.standby && (o.write == 0 || o.insert == 0 || o.timeline == 0):
		return observation{}, errors.New("no WAL position of the master")
	}
	return o, nil
}

// rowReader takes one value after the other from a row and remembers the first
// that was not as expected. NULL reads as the zero value.
type rowReader struct {
	row []driver.Value
	pos int
	err error
}

func (r *rowReader) next() driver.Value {
	v := r.row[r.pos]
	r.pos++
	return v
}

func (r *rowReader) unexpected(v driver.Value) {
	if r.err == nil {
		r.err = fmt.Errorf("unexpected value %v of type %[1]T in column %d", v, r.pos)
	}
}

func (r *rowReader) bool() bool {
	v := r.next()
	b, ok := v.(bool)
	if !ok {
		r.unexpected(v)
	}
	return b
}

func (r *rowReader) int() int64 {
	v := r.next()
	n, ok := v.(int64)
	if !ok && v != nil {
		r.unexpected(v)
	}
	return n
}

// timeline reads a timeline that PostgreSQL shows as a signed 32-bit integer.
func (r *rowReader) timeline() timeline { return timeline(uint32(r.int())) }

func (r *rowReader) text() string {
	switch v := r.next().(type) {
	case nil:
		return ""
	case string:
		return v
	case []byte:
		return string(v)
	default:
		r.unexpected(v)
		return ""
	}
}

// as reads a text value with parse, NULL and "" as the zero value.
func as[T any](r *rowReader, parse func(string) (T, error)) T {
	var zero T
	s := r.text()
	if s == "" {
		return zero
	}
	v, err := parse(s)
	if err != nil {
		r.unexpected(s)
		return zero
	}
	return v
}

func (r *rowReader) lsn() lsn          { return as(r, parseLSN) }
func (r *rowReader) walFile() timeline { return as(r, walFileTimeline) }
func (r *rowReader) time() time.Time {
	return as(r, func(s string) (time.Time, error) { return time.Parse(timeLayout, strings.TrimSpace(s)) })
}
