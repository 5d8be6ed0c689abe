package main

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// hostConfig is one entry of pg_status__hosts; it never changes.
type hostConfig struct {
	name    string // as written in pg_status__hosts; what answers show
	addr    string // what is dialled: name without the brackets of an IPv6 address
	port    uint16
	dc, geo string // "" when not given
}

// config is what the environment asks for. It holds the password, so it must
// never reach a formatter or a logger; effective is for showing.
type config struct {
	hosts                         []hostConfig
	user, password, database      string
	passwordFile                  string // pg_status__pg_password_file
	passFile                      string // PGPASSFILE; only when neither of the above gives a password, which is "" then
	currentDC, currentGeo         string // "" when that dimension is not used in selection
	currentDCEnv, currentGeoEnv   string // pg_status__current_*_env as given, for effective alone
	maxFails                      int    // at least 1
	sleep, queryTimeout           time.Duration
	connMaxAge                    time.Duration
	pollErrorLogInterval          time.Duration
	syncMaxLagMS, syncMaxLagBytes uint64
	masterByTimeline              bool          // pg_status__master_selection=timeline
	waitCheck, failoverCheck      time.Duration // start to start; failoverCheck 0 for off
	listenAddress                 string        // an IP address without brackets, or "*"
	httpPort                      uint16        // 0 for any free one
	logLevel                      slog.Level
	logJSON                       bool
	tls                           *tlsSettings
}

// setting describes one variable; def is its default as text, "" for none.
type setting struct{ name, def, doc string }

// settings lists every variable in the order of the README. The bounds of a
// value are where loadConfig reads it.
var settings = []setting{
	{"pg_status__hosts", "", "PostgreSQL hosts, separated by commas: names, IPv4 or IPv6 addresses. Required."},
	{"pg_status__pg_user", "postgres", "PostgreSQL user."},
	{"pg_status__pg_password", "postgres", "PostgreSQL password. The default is not used when pg_status__pg_password_file or PGPASSFILE is set."},
	{"pg_status__pg_password_file", "", "File that holds the password instead, read again for every connection."},
	{"pg_status__pg_database", "postgres", "PostgreSQL database."},
	{"pg_status__pg_port", "5432", "PostgreSQL port: one for all hosts, or one for each, separated by commas."},
	{"pg_status__hosts_dc", "", "DC of each host, separated by commas."},
	{"pg_status__current_dc", "", "DC of this pg-status: replicas there are preferred."},
	{"pg_status__current_dc_env", "", "Name of another variable that holds the current DC, when pg_status__current_dc is not set."},
	{"pg_status__hosts_geo", "", "Geo of each host, separated by commas."},
	{"pg_status__current_geo", "", "Geo of this pg-status: replicas there are preferred when none is in the current DC."},
	{"pg_status__current_geo_env", "", "Name of another variable that holds the current geo, when pg_status__current_geo is not set."},
	{"pg_status__max_fails", "3", "Consecutive failed checks after which a host is dead."},
	{"pg_status__sleep_ms", "1000", "Milliseconds from the start of one check of a host to the start of the next."},
	{"pg_status__query_timeout_ms", "1000", "Milliseconds that a check may take, connecting included."},
	{"pg_status__conn_max_age_ms", "3600000", "Age in milliseconds at which a PostgreSQL connection is replaced."},
	{"pg_status__poll_error_log_interval_ms", "60000", "Least milliseconds between error records about one failing host; 0 logs every failure."},
	{"pg_status__sync_max_lag_ms", "1000", "Largest time lag, in milliseconds, of a synchronous replica."},
	{"pg_status__sync_max_lag_bytes", "1000000", "Largest lag in bytes of WAL of a synchronous replica."},
	{"pg_status__master_selection", "order", "Which of several masters is chosen: order (the first in pg_status__hosts) or timeline (the highest)."},
	{"pg_status__wait_check_ms", "10", "Milliseconds between checks of a host that a request with wait_ms waits for."},
	{"pg_status__failover_check_ms", "100", "Milliseconds between checks of live replicas while the master is gone or does not answer; 0 for no extra checks."},
	{"pg_status__http_listen_address", "0.0.0.0", "IP address to listen on, or * for all of IPv4 and IPv6."},
	{"pg_status__http_port", "8000", "HTTP port; 0 takes a free one."},
	{"pg_status__log_level", "info", "Least severe records to log: debug, info, warning (or warn), error or fatal."},
	{"pg_status__log_format", "text", "Format of log records: text or json."},
}

var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warning": slog.LevelWarn, "warn": slog.LevelWarn,
	"error": slog.LevelError, "fatal": levelFatal,
}

const dayMS, yearMS = 86_400_000, 31_536_000_000 // upper bounds, in milliseconds

// loadConfig reads the configuration from environ, in the form of os.Environ.
// problems are errors that prevent a start, warnings are not.
func loadConfig(environ []string) (c config, warnings, problems []string) {
	env := newEnvReader(environ)
	c.hosts = env.hosts("pg_status__hosts")
	c.user = env.text("pg_status__pg_user")
	env.password("pg_status__pg_password", "pg_status__pg_password_file", &c)
	c.database = env.text("pg_status__pg_database")
	env.ports("pg_status__pg_port", c.hosts)
	c.currentDC, c.currentDCEnv = env.locality("DC", "dc", c.hosts, func(h *hostConfig, v string) { h.dc = v })
	c.currentGeo, c.currentGeoEnv = env.locality("geo", "geo", c.hosts, func(h *hostConfig, v string) { h.geo = v })
	c.maxFails = max(1, int(env.number("pg_status__max_fails", "", 0, 1_000_000)))
	c.sleep = env.millis("pg_status__sleep_ms", 1, dayMS)
	c.queryTimeout = env.millis("pg_status__query_timeout_ms", 1, dayMS)
	c.connMaxAge = env.millis("pg_status__conn_max_age_ms", 1, yearMS)
	c.pollErrorLogInterval = env.millis("pg_status__poll_error_log_interval_ms", 0, yearMS)
	c.syncMaxLagMS = env.number("pg_status__sync_max_lag_ms", " of milliseconds", 0, 1<<64-1)
	c.syncMaxLagBytes = env.number("pg_status__sync_max_lag_bytes", " of bytes", 0, 1<<64-1)
	c.masterByTimeline = env.choice("pg_status__master_selection", "order", "timeline") == "timeline"
	c.waitCheck = env.millis("pg_status__wait_check_ms", 1, dayMS)
	c.failoverCheck = env.millis("pg_status__failover_check_ms", 0, dayMS)
	c.listenAddress = env.listenAddress("pg_status__http_listen_address")
	c.httpPort = uint16(env.number("pg_status__http_port", "", 0, 65535))
	c.logLevel = logLevels[env.choice("pg_status__log_level", "debug", "info", "warning", "warn", "error", "fatal")]
	c.logJSON = env.choice("pg_status__log_format", "text", "json") == "json"

	env.repeatedHosts("pg_status__hosts", c.hosts)
	env.unknownNames()
	env.libpqNames()
	var errs []error
	c.tls, errs = loadTLS(env.get)
	for _, err := range errs {
		env.problem("%v", err)
	}
	return c, env.warnings, env.problems
}

// effective returns name=value of every setting as c holds it, in the order of
// settings. The password is shown as *** when there is one.
func (c config) effective() []string {
	list := func(of func(hostConfig) string) string {
		var items []string
		for _, h := range c.hosts {
			items = append(items, of(h))
		}
		if strings.Join(items, "") == "" {
			return "" // not set, rather than its commas
		}
		return strings.Join(items, ",")
	}
	either := func(cond bool, yes, no string) string {
		if cond {
			return yes
		}
		return no
	}
	level := ""
	for name, l := range logLevels {
		if l == c.logLevel && name != "warn" {
			level = name
		}
	}
	values := []any{ // in the order of settings
		list(func(h hostConfig) string { return h.name }),
		c.user, either(c.password != "", "***", ""), c.passwordFile, c.database,
		list(func(h hostConfig) string { return strconv.Itoa(int(h.port)) }),
		list(func(h hostConfig) string { return h.dc }), c.currentDC, c.currentDCEnv,
		list(func(h hostConfig) string { return h.geo }), c.currentGeo, c.currentGeoEnv,
		c.maxFails, c.sleep.Milliseconds(), c.queryTimeout.Milliseconds(),
		c.connMaxAge.Milliseconds(), c.pollErrorLogInterval.Milliseconds(),
		c.syncMaxLagMS, c.syncMaxLagBytes, either(c.masterByTimeline, "timeline", "order"),
		c.waitCheck.Milliseconds(), c.failoverCheck.Milliseconds(),
		c.listenAddress, c.httpPort, level, either(c.logJSON, "json", "text"),
	}
	lines := make([]string, len(settings))
	for i, s := range settings {
		lines[i] = fmt.Sprintf("%s=%v", s.name, values[i])
	}
	return lines
}

// envReader reads settings and collects what is wrong with them. A setting that
// is wrong reads as its type's zero value.
type envReader struct {
	vars               map[string]string
	warnings, problems []string
}

func newEnvReader(environ []string) *envReader {
	e := &envReader{vars: map[string]string{}}
	for _, s := range environ {
		name, value, _ := strings.Cut(s, "=")
		if _, ok := e.vars[name]; !ok { // as in getenv(3), the first one counts
			e.vars[name] = value
		}
	}
	return e
}

func (e *envReader) warning(format string, args ...any) {
	e.warnings = append(e.warnings, fmt.Sprintf(format, args...))
}

func (e *envReader) problem(format string, args ...any) {
	e.problems = append(e.problems, fmt.Sprintf(format, args...))
}

// must reports the value of name as wrong, and what it has to be.
func (e *envReader) must(name, want string) {
	e.problem("%s=%q: must be %s", name, shorten(e.text(name)), want)
}

// get returns the value of any variable as it is, "" when it is unset.
func (e *envReader) get(name string) string { return e.vars[name] }

// text returns the value of a setting without the space around it, or else its
// default.
func (e *envReader) text(name string) string {
	if v := strings.TrimSpace(e.get(name)); v != "" {
		return v
	}
	return settings[slices.IndexFunc(settings, func(s setting) bool { return s.name == name })].def
}

// list returns the items of a setting, nil when it is not set. An item that is
// empty, and reported as that, is "".
func (e *envReader) list(name string) []string {
	v := e.text(name)
	if v == "" {
		return nil
	}
	items := strings.Split(v, ",")
	for i := range items {
		items[i] = strings.TrimSpace(items[i])
		if items[i] == "" {
			e.problem("%s: entry %d is empty", name, i+1)
		}
	}
	return items
}

// number reads a whole number from lo to hi; of names its unit, such as
// " of bytes".
func (e *envReader) number(name, of string, lo, hi uint64) uint64 {
	n, ok := parseNumber(e.text(name), lo, hi)
	if !ok {
		e.must(name, fmt.Sprintf("a whole number%s from %d to %d", of, lo, hi))
	}
	return n
}

func (e *envReader) millis(name string, lo, hi uint64) time.Duration {
	return time.Duration(e.number(name, " of milliseconds", lo, hi)) * time.Millisecond
}

// choice reads one of values in any case, and returns it as it is in values.
func (e *envReader) choice(name string, values ...string) string {
	v := e.text(name)
	for _, s := range values {
		if strings.EqualFold(v, s) {
			return s
		}
	}
	last := len(values) - 1
	e.must(name, strings.Join(values[:last], ", ")+" or "+values[last])
	return ""
}

// listenAddress reads an IP address, from which it takes the brackets, or "*".
func (e *envReader) listenAddress(name string) string {
	v := e.text(name)
	addr, ok := parseIPv6(v)
	if ip, err := netip.ParseAddr(v); !ok && v != "*" && (err != nil || !ip.Is4()) {
		e.must(name, "an IPv4 address, an IPv6 address or *")
	}
	return addr
}

// hosts reads the list of hosts, as many as there are entries. Messages do not
// show an entry: a connection string put there may hold a password.
func (e *envReader) hosts(name string) []hostConfig {
	var hosts []hostConfig
	for i, item := range e.list(name) {
		addr, err := parseHost(item)
		if err != nil && item != "" {
			e.problem("%s: entry %d %v", name, i+1, err)
		}
		hosts = append(hosts, hostConfig{name: item, addr: addr})
	}
	if hosts == nil {
		e.problem("%s is not set: must be one or more host names or IP addresses, separated by commas", name)
	}
	return hosts
}

// ports reads the ports of hosts.
func (e *envReader) ports(name string, hosts []hostConfig) {
	items := e.list(name)
	ports := make([]uint16, len(items))
	for i, item := range items {
		n, ok := parseNumber(item, 1, 65535)
		if !ok && item != "" {
			e.problem("%s: entry %d is %q: must be a whole number from 1 to 65535", name, i+1, shorten(item))
		}
		ports[i] = uint16(n)
	}
	if len(ports) != 1 && len(ports) != len(hosts) && len(hosts) > 0 {
		e.problem("%s: %d ports for %d hosts: must be one, or one for each host", name, len(ports), len(hosts))
		return
	}
	for i := range hosts {
		hosts[i].port = ports[i%len(ports)]
	}
}

// repeatedHosts warns of hosts that are the same host and port as an earlier one.
func (e *envReader) repeatedHosts(name string, hosts []hostConfig) {
	for i, h := range hosts {
		first := slices.IndexFunc(hosts, func(o hostConfig) bool {
			return o.port == h.port && strings.EqualFold(o.addr, h.addr)
		})
		if first < i && h.addr != "" && h.port != 0 {
			e.warning("%s: entry %d (%s port %d) is the same as entry %d", name, i+1, h.name, h.port, first+1)
		}
	}
}

// password reads the password, or else the file that holds it, or else
// PGPASSFILE.
func (e *envReader) password(name, fileName string, c *config) {
	given := e.get(name) // spaces may be part of it
	c.passwordFile = e.text(fileName)
	switch passFile := e.get("PGPASSFILE"); {
	case c.passwordFile != "":
		if given != "" {
			e.problem("%s and %s are both set: must be one of them", name, fileName)
		}
		if _, err := readPasswordFile(c.passwordFile); err != nil {
			e.must(fileName, fmt.Sprintf("a readable file that holds the password (%v)", err))
		}
	case given != "":
		c.password = given
	case passFile != "":
		c.passFile = passFile
		if _, err := os.ReadFile(passFile); err != nil {
			e.warning("PGPASSFILE=%q cannot be read (%v): connecting without a password", shorten(passFile), errors.Unwrap(err))
		}
	default:
		c.password = e.text(name)
	}
}

// locality reads one dimension: the value of every host, which it hands to set,
// and that of this process, with the name of the variable it is to come from. The
// latter value is "" when the dimension is not used.
func (e *envReader) locality(title, dim string, hosts []hostConfig, set func(*hostConfig, string)) (here, from string) {
	list, current, env := "pg_status__hosts_"+dim, "pg_status__current_"+dim, "pg_status__current_"+dim+"_env"
	items := e.list(list)
	if items != nil && len(hosts) > 0 && len(items) != len(hosts) {
		e.problem("%s: %d values for %d hosts: must be one for each host", list, len(items), len(hosts))
	} else {
		for i := range min(len(items), len(hosts)) {
			set(&hosts[i], items[i])
		}
	}
	here, from = e.text(current), e.text(env)
	if from != "" && (strings.Trim(from, envNameChars) != "" || '0' <= from[0] && from[0] <= '9') {
		e.must(env, "the name of a variable: letters, digits and _, not beginning with a digit")
		return "", ""
	}
	if items == nil && here == "" && from == "" {
		return "", ""
	}
	var missing []string
	if items == nil {
		missing = append(missing, list+" is not set")
	}
	if here == "" && from == "" {
		missing = append(missing, current+" is not set")
	} else if here == "" {
		if here = strings.TrimSpace(e.get(from)); here == "" {
			missing = append(missing, fmt.Sprintf("%s, named by %s, is not set", shorten(from), env))
		}
	}
	if missing != nil {
		e.warning("%s preference disabled: incomplete locality configuration; %s", title, strings.Join(missing, " and "))
		here = ""
	}
	return here, from
}

// unknownNames warns of variables that look like settings but are none. The
// prefix is found in any case, as the upper case of other services is a likely
// mistake.
func (e *envReader) unknownNames() {
	for _, name := range slices.Sorted(maps.Keys(e.vars)) {
		lower := strings.ToLower(shorten(name))
		known := slices.ContainsFunc(settings, func(s setting) bool { return s.name == name })
		if known || !strings.HasPrefix(lower, "pg_status__") || e.get(name) == "" {
			continue
		}
		nearest := slices.MinFunc(settings, func(a, b setting) int {
			return editDistance(lower, a.name) - editDistance(lower, b.name)
		})
		e.warning("%s is unknown and ignored; did you mean %s?", shorten(name), nearest.name)
	}
}

// libpqNames reports the variables of libpq that we do not act on, although to
// ignore them may be unsafe or a surprise. The PGSSL* ones are loadTLS's.
func (e *envReader) libpqNames() {
	if e.get("PGREQUIREAUTH") != "" {
		e.problem("PGREQUIREAUTH is set: not supported, must be unset")
	}
	for _, name := range []string{"PGCHANNELBINDING", "PGGSSENCMODE"} {
		if v := e.get(name); v != "" && v != "disable" && v != "prefer" {
			e.problem("%s=%q: not supported, must be disable, prefer or unset", name, shorten(v))
		}
	}
	for _, name := range []string{"PGSERVICE", "PGHOSTADDR", "PGTARGETSESSIONATTRS", "PGLOADBALANCEHOSTS", "PGOPTIONS"} {
		if e.get(name) != "" {
			e.warning("%s is set, but ignored", name)
		}
	}
}

// What the name of a variable and a host name are made of. Go's resolver looks
// up no name with other characters.
const (
	envNameChars  = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"
	hostNameChars = envNameChars + "-."
)

// parseHost returns what to dial for an entry of pg_status__hosts, or an error
// that says, after the entry's number, what is wrong with it.
func parseHost(s string) (addr string, err error) {
	if addr, ok := parseIPv6(s); ok {
		return addr, nil
	}
	if strings.HasPrefix(s, "/") {
		return "", errors.New("is a path: must be a host name or an IP address, as Unix sockets are not supported")
	}
	if len(s) > 253 { // of the 255 of RFC 1035, two are the first length byte and the root
		return "", fmt.Errorf("has %d bytes: a host name has at most 253", len(s))
	}
	chars := hostNameChars
	colon := strings.Contains(s, ":") // a port or a broken IPv6 address, if the rest is fine
	if colon {
		chars += ":[]%"
	}
	if rest := strings.TrimLeft(s, chars); rest != "" {
		r, _ := utf8.DecodeRuneInString(rest)
		return "", fmt.Errorf("holds %q: must be a host name or an IP address, with a comma before the next", r)
	}
	if colon {
		return "", errors.New("holds ':' but is not an IPv6 address: must be without a port, which goes into pg_status__pg_port")
	}
	return s, nil
}

// parseIPv6 returns s without brackets, and whether it is an IPv6 address.
func parseIPv6(s string) (string, bool) {
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		s = s[1 : len(s)-1]
	}
	ip, err := netip.ParseAddr(s)
	return s, err == nil && ip.Is6() && strings.Trim(ip.Zone(), hostNameChars) == ""
}

// parseNumber reads decimal digits, and nothing else, as a number from lo to hi.
func parseNumber(s string, lo, hi uint64) (uint64, bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n < lo || n > hi {
		return 0, false
	}
	return n, true
}

// readPasswordFile returns what the file holds, without the line ends that
// editors put behind it. The error does not name the file.
func readPasswordFile(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", errors.Unwrap(err) // of the *fs.PathError
	}
	password := strings.TrimRight(string(b), "\r\n")
	if password == "" {
		return "", errors.New("it is empty")
	}
	return password, nil
}

// shorten returns s, or its first 200 bytes when it is longer.
func shorten(s string) string {
	if len(s) <= 200 {
		return s
	}
	return strings.ToValidUTF8(s[:200], "") + logTruncated // a character may be cut
}

// editDistance returns how many bytes must be inserted, removed or replaced to
// make b of a (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1) // from a[:i] to b[:j]
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
