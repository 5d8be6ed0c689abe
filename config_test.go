package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// messages is a test of what loadConfig reports for vars. Unless vars name other
// hosts, there are three.
type messages struct {
	vars               []string
	warnings, problems []string
}

func (m messages) check(t *testing.T) {
	t.Helper()
	_, warnings, problems := loadConfig(threeHosts(m.vars...))
	if !slices.Equal(warnings, m.warnings) {
		t.Errorf("loadConfig(%q) warns\n%s\nwant\n%s", m.vars, strings.Join(warnings, "\n"), strings.Join(m.warnings, "\n"))
	}
	if !slices.Equal(problems, m.problems) {
		t.Errorf("loadConfig(%q) has problems\n%s\nwant\n%s", m.vars, strings.Join(problems, "\n"), strings.Join(m.problems, "\n"))
	}
}

// warning and problem are the messages of one variable.
func warning(text string, vars ...string) messages { return messages{vars, []string{text}, nil} }
func problem(text string, vars ...string) messages { return messages{vars, nil, []string{text}} }
func silent(vars ...string) messages               { return messages{vars, nil, nil} }

func threeHosts(vars ...string) []string {
	return append(slices.Clone(vars), "pg_status__hosts=a,b,c") // the first one counts
}

// mustLoad returns the configuration of vars, which has neither problems nor
// warnings.
func mustLoad(t *testing.T, vars ...string) config {
	t.Helper()
	c, warnings, problems := loadConfig(threeHosts(vars...))
	if warnings != nil || problems != nil {
		t.Fatalf("loadConfig(%q) warns %q and has problems %q", vars, warnings, problems)
	}
	return c
}

func tempFile(t *testing.T, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestConfigDefaults(t *testing.T) {
	c := mustLoad(t, "pg_status__hosts=db1")
	for _, tt := range []struct {
		name      string
		got, want any
	}{
		{"hosts", c.hosts, []hostConfig{{name: "db1", addr: "db1", port: 5432}}},
		{"user", c.user, "postgres"},
		{"password", c.password, "postgres"},
		{"passwordFile", c.passwordFile, ""},
		{"passFile", c.passFile, ""},
		{"database", c.database, "postgres"},
		{"currentDC", c.currentDC, ""},
		{"currentDCEnv", c.currentDCEnv, ""},
		{"currentGeo", c.currentGeo, ""},
		{"currentGeoEnv", c.currentGeoEnv, ""},
		{"maxFails", c.maxFails, 3},
		{"sleep", c.sleep, time.Second},
		{"queryTimeout", c.queryTimeout, time.Second},
		{"connMaxAge", c.connMaxAge, time.Hour},
		{"pollErrorLogInterval", c.pollErrorLogInterval, time.Minute},
		{"syncMaxLagMS", c.syncMaxLagMS, uint64(1000)},
		{"syncMaxLagBytes", c.syncMaxLagBytes, uint64(1000000)},
		{"masterByTimeline", c.masterByTimeline, false},
		{"waitCheck", c.waitCheck, 10 * time.Millisecond},
		{"failoverCheck", c.failoverCheck, 100 * time.Millisecond},
		{"listenAddress", c.listenAddress, "0.0.0.0"},
		{"httpPort", c.httpPort, uint16(8000)},
		{"logLevel", c.logLevel, slog.LevelInfo},
		{"logJSON", c.logJSON, false},
	} {
		if !reflect.DeepEqual(tt.got, tt.want) {
			t.Errorf("by default %s = %v; want %v", tt.name, tt.got, tt.want)
		}
	}
	if c.tls == nil {
		t.Error("by default tls = nil; want what loadTLS returns")
	}
}

// An empty variable is unset: Compose files pass on variables like that.
func TestConfigEmptyIsUnset(t *testing.T) {
	var vars []string
	for _, s := range settings[1:] {
		vars = append(vars, s.name+"=")
	}
	for _, name := range []string{"PGREQUIREAUTH", "PGCHANNELBINDING", "PGGSSENCMODE", "PGSERVICE", "PGPASSFILE", "pg_status__sleep"} {
		vars = append(vars, name+"=")
	}
	if got, want := mustLoad(t, vars...), mustLoad(t); !reflect.DeepEqual(got, want) {
		t.Errorf("with empty variables loadConfig = %+v; want %+v", got, want)
	}
	blank := mustLoad(t, "pg_status__sleep_ms=  ", "pg_status__hosts_dc= ", "pg_status__log_level=\t")
	if want := mustLoad(t); !reflect.DeepEqual(blank, want) {
		t.Errorf("with blank variables loadConfig = %+v; want %+v", blank, want)
	}
}

// everySetting is an environment without defaults, but for the password file,
// which excludes the password.
var everySetting = []string{
	"pg_status__hosts=db1.example, [::1] ,fe80::1%eth0",
	"pg_status__pg_user= monitor ",
	"pg_status__pg_password= hunter2 ",
	"pg_status__pg_database=app",
	"pg_status__pg_port=5433,5434 , 5435",
	"pg_status__hosts_dc=fra, ams,nyc",
	"pg_status__current_dc=fra",
	"pg_status__current_dc_env=MY_DC",
	"pg_status__hosts_geo=eu,eu,us",
	"pg_status__current_geo_env=_my_geo2",
	"_my_geo2= us ",
	"pg_status__max_fails=5",
	"pg_status__sleep_ms=250",
	"pg_status__query_timeout_ms= 2000 ",
	"pg_status__conn_max_age_ms=60000",
	"pg_status__poll_error_log_interval_ms=0",
	"pg_status__sync_max_lag_ms=18446744073709551615",
	"pg_status__sync_max_lag_bytes=0",
	"pg_status__master_selection=timeline",
	"pg_status__wait_check_ms=20",
	"pg_status__failover_check_ms=0",
	"pg_status__http_listen_address=[::1]",
	"pg_status__http_port=0",
	"pg_status__log_level=WARN",
	"pg_status__log_format=Json",
}

func TestConfigEverySetting(t *testing.T) {
	c := mustLoad(t, everySetting...)
	want := config{
		hosts: []hostConfig{
			{name: "db1.example", addr: "db1.example", port: 5433, dc: "fra", geo: "eu"},
			{name: "[::1]", addr: "::1", port: 5434, dc: "ams", geo: "eu"},
			{name: "fe80::1%eth0", addr: "fe80::1%eth0", port: 5435, dc: "nyc", geo: "us"},
		},
		user:                 "monitor",
		password:             " hunter2 ", // spaces may be part of it
		database:             "app",
		currentDC:            "fra",
		currentDCEnv:         "MY_DC",
		currentGeo:           "us",
		currentGeoEnv:        "_my_geo2",
		maxFails:             5,
		sleep:                250 * time.Millisecond,
		queryTimeout:         2 * time.Second,
		connMaxAge:           time.Minute,
		pollErrorLogInterval: 0,
		syncMaxLagMS:         18446744073709551615,
		syncMaxLagBytes:      0,
		masterByTimeline:     true,
		waitCheck:            20 * time.Millisecond,
		failoverCheck:        0,
		listenAddress:        "::1",
		httpPort:             0,
		logLevel:             slog.LevelWarn,
		logJSON:              true,
		tls:                  c.tls,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("loadConfig(%q) = %+v; want %+v", everySetting, c, want)
	}
}

func TestEffective(t *testing.T) {
	for _, tt := range []struct {
		vars []string
		want string
	}{
		{nil, `
pg_status__hosts=a,b,c
pg_status__pg_user=postgres
pg_status__pg_password=***
pg_status__pg_password_file=
pg_status__pg_database=postgres
pg_status__pg_port=5432,5432,5432
pg_status__hosts_dc=
pg_status__current_dc=
pg_status__current_dc_env=
pg_status__hosts_geo=
pg_status__current_geo=
pg_status__current_geo_env=
pg_status__max_fails=3
pg_status__sleep_ms=1000
pg_status__query_timeout_ms=1000
pg_status__conn_max_age_ms=3600000
pg_status__poll_error_log_interval_ms=60000
pg_status__sync_max_lag_ms=1000
pg_status__sync_max_lag_bytes=1000000
pg_status__master_selection=order
pg_status__wait_check_ms=10
pg_status__failover_check_ms=100
pg_status__http_listen_address=0.0.0.0
pg_status__http_port=8000
pg_status__log_level=info
pg_status__log_format=text
`},
		{everySetting, `
pg_status__hosts=db1.example,[::1],fe80::1%eth0
pg_status__pg_user=monitor
pg_status__pg_password=***
pg_status__pg_password_file=
pg_status__pg_database=app
pg_status__pg_port=5433,5434,5435
pg_status__hosts_dc=fra,ams,nyc
pg_status__current_dc=fra
pg_status__current_dc_env=MY_DC
pg_status__hosts_geo=eu,eu,us
pg_status__current_geo=us
pg_status__current_geo_env=_my_geo2
pg_status__max_fails=5
pg_status__sleep_ms=250
pg_status__query_timeout_ms=2000
pg_status__conn_max_age_ms=60000
pg_status__poll_error_log_interval_ms=0
pg_status__sync_max_lag_ms=18446744073709551615
pg_status__sync_max_lag_bytes=0
pg_status__master_selection=timeline
pg_status__wait_check_ms=20
pg_status__failover_check_ms=0
pg_status__http_listen_address=::1
pg_status__http_port=0
pg_status__log_level=warning
pg_status__log_format=json
`},
	} {
		c := mustLoad(t, tt.vars...)
		got := c.effective()
		if want := strings.Split(strings.TrimSpace(tt.want), "\n"); !slices.Equal(got, want) {
			t.Errorf("effective of %q =\n%s\nwant\n%s", tt.vars, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		// It says the same when it is read again, except for the password.
		again := mustLoad(t, got...)
		again.password = c.password
		if !reflect.DeepEqual(again, c) {
			t.Errorf("effective of %q reads as %+v; want %+v", tt.vars, again, c)
		}
	}

	file := tempFile(t, "hunter2\n")
	lines := mustLoad(t, "pg_status__pg_password_file="+file).effective()
	for _, want := range []string{"pg_status__pg_password=", "pg_status__pg_password_file=" + file} {
		if !slices.Contains(lines, want) {
			t.Errorf("effective with a password file lacks %q:\n%s", want, strings.Join(lines, "\n"))
		}
	}
}

func TestSettings(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range settings {
		if seen[s.name] {
			t.Errorf("settings has %s twice", s.name)
		}
		seen[s.name] = true
		if !strings.HasPrefix(s.name, "pg_status__") || !strings.HasSuffix(s.doc, ".") || strings.Contains(s.doc, "\n") {
			t.Errorf("settings has %q with %q; want a name with our prefix and a line of sentences", s.name, s.doc)
		}
		if strings.HasPrefix(s.name, "pg_status__hosts") || s.def == "" {
			continue
		}
		// The default as text means the same as no value.
		if got, want := mustLoad(t, s.name+"="+s.def), mustLoad(t); !reflect.DeepEqual(got, want) {
			t.Errorf("with %s=%s loadConfig = %+v; want %+v", s.name, s.def, got, want)
		}
	}
}

func TestConfigHosts(t *testing.T) {
	for _, tt := range []struct{ value, name, addr string }{
		{"db1", "db1", "db1"},
		{"DB-1.example_net.", "DB-1.example_net.", "DB-1.example_net."},
		{" \tdb1\r\n", "db1", "db1"},
		{"192.0.2.1", "192.0.2.1", "192.0.2.1"},
		{"2001:db8::1", "2001:db8::1", "2001:db8::1"},
		{"[2001:DB8::1]", "[2001:DB8::1]", "2001:DB8::1"},
		{"::ffff:192.0.2.1", "::ffff:192.0.2.1", "::ffff:192.0.2.1"},
		{"fe80::1%eth0.100", "fe80::1%eth0.100", "fe80::1%eth0.100"},
		{"[fe80::1%br-1]", "[fe80::1%br-1]", "fe80::1%br-1"},
		{strings.Repeat("a", 253), strings.Repeat("a", 253), strings.Repeat("a", 253)},
	} {
		c := mustLoad(t, "pg_status__hosts="+tt.value)
		if want := []hostConfig{{name: tt.name, addr: tt.addr, port: 5432}}; !slices.Equal(c.hosts, want) {
			t.Errorf("with pg_status__hosts=%q hosts = %+v; want %+v", tt.value, c.hosts, want)
		}
	}

	const (
		unset = "pg_status__hosts is not set: must be one or more host names or IP addresses, separated by commas"
		port  = "pg_status__hosts: entry 1 holds ':' but is not an IPv6 address: must be without a port, which goes into pg_status__pg_port"
		other = ": must be a host name or an IP address, with a comma before the next"
		path  = "pg_status__hosts: entry 1 is a path: must be a host name or an IP address, as Unix sockets are not supported"
	)
	if _, _, problems := loadConfig(nil); !slices.Equal(problems, []string{unset}) {
		t.Errorf("loadConfig(nil) has problems %q; want %q", problems, unset)
	}
	for _, tt := range []struct{ value, want string }{
		{"", unset},
		{" ", unset},
		{"db1:5433", port},
		{"[::1]:5433", port},
		{"[::1", port},
		{"::1]", port},
		{"fe80::1%", port},
		{"1:2:3:4:5:6:7:8:9", port},
		{"/var/run/postgresql", path},
		{"db1 db2", "pg_status__hosts: entry 1 holds ' '" + other},
		{"db1\tdb2", `pg_status__hosts: entry 1 holds '\t'` + other},
		{"db1\u00a0db2", `pg_status__hosts: entry 1 holds '\u00a0'` + other},
		{"db1\x00", `pg_status__hosts: entry 1 holds '\x00'` + other},
		{"db1\x7f", `pg_status__hosts: entry 1 holds '\x7f'` + other},
		{"db1;db2", "pg_status__hosts: entry 1 holds ';'" + other},
		{"me@db1", "pg_status__hosts: entry 1 holds '@'" + other},
		{"@db1", "pg_status__hosts: entry 1 holds '@'" + other},
		{"db1/app", "pg_status__hosts: entry 1 holds '/'" + other},
		{"postgres://db1", "pg_status__hosts: entry 1 holds '/'" + other},
		{"[db1]", "pg_status__hosts: entry 1 holds '['" + other},
		{"[192.0.2.1]", "pg_status__hosts: entry 1 holds '['" + other},
		{"[]", "pg_status__hosts: entry 1 holds '['" + other},
		{`"db1"`, `pg_status__hosts: entry 1 holds '"'` + other},
		{"fe80::1%eth 0", "pg_status__hosts: entry 1 holds ' '" + other},
		{"db1%eth0", "pg_status__hosts: entry 1 holds '%'" + other},
		{"dbé", "pg_status__hosts: entry 1 holds 'é'" + other},
		{strings.Repeat("a", 254), "pg_status__hosts: entry 1 has 254 bytes: a host name has at most 253"},
		{"db1,", "pg_status__hosts: entry 2 is empty"},
		{"db1, ,db2", "pg_status__hosts: entry 2 is empty"},
		{",db1", "pg_status__hosts: entry 1 is empty"},
	} {
		problem(tt.want, "pg_status__hosts="+tt.value).check(t)
	}
	messages{[]string{"pg_status__hosts=,a b,ok"}, nil, []string{
		"pg_status__hosts: entry 1 is empty",
		"pg_status__hosts: entry 2 holds ' '" + other,
	}}.check(t)
}

func TestConfigRepeatedHosts(t *testing.T) {
	for _, m := range []messages{
		silent("pg_status__hosts=db1,db1", "pg_status__pg_port=5432,5433"),
		silent("pg_status__hosts=db1,db1.,127.0.0.1"),
		warning("pg_status__hosts: entry 3 (DB1 port 5432) is the same as entry 1", "pg_status__hosts=db1,db2,DB1"),
		warning("pg_status__hosts: entry 2 ([::A] port 5432) is the same as entry 1", "pg_status__hosts=::a,[::A]"),
		warning("pg_status__hosts: entry 3 (b port 2) is the same as entry 2", "pg_status__hosts=b,b,b", "pg_status__pg_port=1,2,2"),
		{[]string{"pg_status__hosts=a,a,a"}, []string{
			"pg_status__hosts: entry 2 (a port 5432) is the same as entry 1",
			"pg_status__hosts: entry 3 (a port 5432) is the same as entry 1",
		}, nil},
		problem(`pg_status__pg_port: entry 1 is "0": must be a whole number from 1 to 65535`, "pg_status__hosts=a,a", "pg_status__pg_port=0"),
	} {
		m.check(t)
	}
}

func TestConfigPorts(t *testing.T) {
	for _, tt := range []struct {
		value string
		want  [3]uint16
	}{
		{"", [3]uint16{5432, 5432, 5432}},
		{"1", [3]uint16{1, 1, 1}},
		{"65535", [3]uint16{65535, 65535, 65535}},
		{" 6432 , 5433,5434 ", [3]uint16{6432, 5433, 5434}},
	} {
		c := mustLoad(t, "pg_status__pg_port="+tt.value)
		if got := [3]uint16{c.hosts[0].port, c.hosts[1].port, c.hosts[2].port}; got != tt.want {
			t.Errorf("with pg_status__pg_port=%q ports are %v; want %v", tt.value, got, tt.want)
		}
	}
	for _, v := range []string{"0", "65536", "-1", "+1", "5432.0", "0x10", "1e3", "5 4", "postgres", "18446744073709551616"} {
		problem(`pg_status__pg_port: entry 1 is "`+v+`": must be a whole number from 1 to 65535`, "pg_status__pg_port="+v).check(t)
	}
	for _, m := range []messages{
		problem("pg_status__pg_port: 2 ports for 3 hosts: must be one, or one for each host", "pg_status__pg_port=1,2"),
		problem("pg_status__pg_port: 4 ports for 3 hosts: must be one, or one for each host", "pg_status__pg_port=1,2,3,4"),
		problem("pg_status__pg_port: entry 2 is empty", "pg_status__pg_port=1,,3"),
		{[]string{"pg_status__pg_port=x,"}, nil, []string{
			"pg_status__pg_port: entry 2 is empty",
			`pg_status__pg_port: entry 1 is "x": must be a whole number from 1 to 65535`,
			"pg_status__pg_port: 2 ports for 3 hosts: must be one, or one for each host",
		}},
	} {
		m.check(t)
	}
}

func TestConfigLocality(t *testing.T) {
	const dc, geo = "DC preference disabled: incomplete locality configuration; ", "geo preference disabled: incomplete locality configuration; "
	for _, tt := range []struct {
		messages
		currentDC, currentGeo string
		dcs                   [3]string
	}{
		{silent("pg_status__hosts_dc=x,y,z", "pg_status__current_dc=y"), "y", "", [3]string{"x", "y", "z"}},
		{silent("pg_status__hosts_dc=x,y,z", "pg_status__current_dc=elsewhere"), "elsewhere", "", [3]string{"x", "y", "z"}},
		{silent("pg_status__hosts_dc=x,x,x", "pg_status__current_dc_env=HERE", "HERE= x "), "x", "", [3]string{"x", "x", "x"}},
		// The direct value wins, and the lookup is not recursive.
		{silent("pg_status__hosts_dc=x,y,z", "pg_status__current_dc=y", "pg_status__current_dc_env=HERE", "HERE=z"), "y", "", [3]string{"x", "y", "z"}},
		{silent("pg_status__hosts_dc=x,y,z", "pg_status__current_dc_env=A", "A=B", "B=x"), "B", "", [3]string{"x", "y", "z"}},
		// A variable of ours that is unset has no value here, although it has a default.
		{warning(dc+"pg_status__pg_user, named by pg_status__current_dc_env, is not set",
			"pg_status__hosts_dc=x,y,z", "pg_status__current_dc_env=pg_status__pg_user"), "", "", [3]string{"x", "y", "z"}},
		// Incomplete: the hosts keep their values.
		{warning(dc+"pg_status__current_dc is not set", "pg_status__hosts_dc=x,y,z"), "", "", [3]string{"x", "y", "z"}},
		{warning(dc+"pg_status__hosts_dc is not set", "pg_status__current_dc=x"), "", "", [3]string{}},
		{warning(dc+"pg_status__hosts_dc is not set", "pg_status__current_dc_env=HERE", "HERE=x"), "", "", [3]string{}},
		{warning(dc+"HERE, named by pg_status__current_dc_env, is not set",
			"pg_status__hosts_dc=x,y,z", "pg_status__current_dc_env=HERE"), "", "", [3]string{"x", "y", "z"}},
		{warning(dc+"HERE, named by pg_status__current_dc_env, is not set",
			"pg_status__hosts_dc=x,y,z", "pg_status__current_dc_env=HERE", "HERE= "), "", "", [3]string{"x", "y", "z"}},
		{warning(dc+"pg_status__hosts_dc is not set and HERE, named by pg_status__current_dc_env, is not set",
			"pg_status__current_dc_env=HERE"), "", "", [3]string{}},
		// One dimension does not disable the other.
		{warning(geo+"pg_status__current_geo is not set",
			"pg_status__hosts_geo=e,e,u", "pg_status__hosts_dc=x,y,z", "pg_status__current_dc=x"), "x", "", [3]string{"x", "y", "z"}},
		{warning(dc+"pg_status__hosts_dc is not set",
			"pg_status__current_dc=x", "pg_status__hosts_geo=e,e,u", "pg_status__current_geo_env=HERE", "HERE=u"), "", "u", [3]string{}},
		{messages{[]string{"pg_status__hosts_geo=e,e,u", "pg_status__hosts_dc=x,y,z"}, []string{
			dc + "pg_status__current_dc is not set", geo + "pg_status__current_geo is not set",
		}, nil}, "", "", [3]string{"x", "y", "z"}},
	} {
		tt.check(t)
		c, _, _ := loadConfig(threeHosts(tt.vars...))
		if c.currentDC != tt.currentDC || c.currentGeo != tt.currentGeo {
			t.Errorf("with %q currentDC, currentGeo = %q, %q; want %q, %q", tt.vars, c.currentDC, c.currentGeo, tt.currentDC, tt.currentGeo)
		}
		if got := [3]string{c.hosts[0].dc, c.hosts[1].dc, c.hosts[2].dc}; got != tt.dcs {
			t.Errorf("with %q the hosts are in %q; want %q", tt.vars, got, tt.dcs)
		}
	}

	const name = `: must be the name of a variable: letters, digits and _, not beginning with a digit`
	for _, m := range []messages{
		problem("pg_status__hosts_dc: 2 values for 3 hosts: must be one for each host", "pg_status__hosts_dc=x,y", "pg_status__current_dc=x"),
		problem("pg_status__hosts_geo: 1 values for 3 hosts: must be one for each host", "pg_status__hosts_geo=x", "pg_status__current_geo=x"),
		problem("pg_status__hosts_dc: entry 2 is empty", "pg_status__hosts_dc=x,,z", "pg_status__current_dc=x"),
		problem(`pg_status__current_dc_env="1DC"`+name, "pg_status__current_dc_env=1DC"),
		problem(`pg_status__current_dc_env="MY-DC"`+name, "pg_status__current_dc_env=MY-DC", "pg_status__hosts_dc=x,y,z"),
		problem(`pg_status__current_dc_env="$DC"`+name, "pg_status__current_dc_env=$DC", "pg_status__hosts_dc=x,y,z", "pg_status__current_dc=x"),
		problem(`pg_status__current_geo_env="A B"`+name, "pg_status__current_geo_env=A B"),
		problem(`pg_status__current_geo_env="GÉO"`+name, "pg_status__current_geo_env=GÉO"),
	} {
		m.check(t)
	}
}

func TestConfigNumbers(t *testing.T) {
	for _, tt := range []struct{ name, want string }{
		{"pg_status__max_fails", "a whole number from 0 to 1000000"},
		{"pg_status__sleep_ms", "a whole number of milliseconds from 1 to 86400000"},
		{"pg_status__query_timeout_ms", "a whole number of milliseconds from 1 to 86400000"},
		{"pg_status__conn_max_age_ms", "a whole number of milliseconds from 1 to 31536000000"},
		{"pg_status__poll_error_log_interval_ms", "a whole number of milliseconds from 0 to 31536000000"},
		{"pg_status__sync_max_lag_ms", "a whole number of milliseconds from 0 to 18446744073709551615"},
		{"pg_status__sync_max_lag_bytes", "a whole number of bytes from 0 to 18446744073709551615"},
		{"pg_status__wait_check_ms", "a whole number of milliseconds from 1 to 86400000"},
		{"pg_status__failover_check_ms", "a whole number of milliseconds from 0 to 86400000"},
		{"pg_status__http_port", "a whole number from 0 to 65535"},
	} {
		for _, v := range []string{"-1", "+1", "1.0", "1e3", "0x10", "1 0", "1_0", "10ms", "ten", "١", "18446744073709551616"} {
			problem(tt.name+`="`+v+`": must be `+tt.want, tt.name+"="+v).check(t)
		}
		// The bounds are what the message says.
		words := strings.Fields(tt.want)
		lo, hi := words[len(words)-3], words[len(words)-1]
		silent(tt.name + "=" + lo).check(t)
		silent(tt.name + "=000" + hi).check(t)
		if lo == "1" {
			problem(tt.name+`="0": must be `+tt.want, tt.name+"=0").check(t)
		}
	}
	for _, m := range []messages{
		problem(`pg_status__max_fails="1000001": must be a whole number from 0 to 1000000`, "pg_status__max_fails=1000001"),
		problem(`pg_status__sleep_ms="86400001": must be a whole number of milliseconds from 1 to 86400000`, "pg_status__sleep_ms=86400001"),
		problem(`pg_status__conn_max_age_ms="31536000001": must be a whole number of milliseconds from 1 to 31536000000`, "pg_status__conn_max_age_ms=31536000001"),
		problem(`pg_status__http_port="65536": must be a whole number from 0 to 65535`, "pg_status__http_port=65536"),
		problem(`pg_status__sleep_ms="`+strings.Repeat("9", 200)+`...[truncated]": must be a whole number of milliseconds from 1 to 86400000`,
			"pg_status__sleep_ms="+strings.Repeat("9", 201)),
	} {
		m.check(t)
	}

	if got := mustLoad(t, "pg_status__max_fails=0").maxFails; got != 1 {
		t.Errorf("with pg_status__max_fails=0 maxFails = %d; want 1", got)
	}
	if got, want := mustLoad(t, "pg_status__conn_max_age_ms=31536000000").connMaxAge, 365*24*time.Hour; got != want {
		t.Errorf("with pg_status__conn_max_age_ms=31536000000 connMaxAge = %v; want %v", got, want)
	}
}

func TestConfigChoices(t *testing.T) {
	for _, tt := range []struct {
		value string
		want  slog.Level
	}{
		{"debug", -4},
		{"Info", 0},
		{"warning", 4},
		{"WARN", 4},
		{" error ", 8},
		{"fatal", 12},
	} {
		if got := mustLoad(t, "pg_status__log_level="+tt.value).logLevel; got != tt.want {
			t.Errorf("with pg_status__log_level=%q logLevel = %d; want %d", tt.value, got, tt.want)
		}
	}
	for value, want := range map[string]bool{"text": false, "TEXT": false, "json": true, "JSON": true} {
		if got := mustLoad(t, "pg_status__log_format="+value).logJSON; got != want {
			t.Errorf("with pg_status__log_format=%s logJSON = %v; want %v", value, got, want)
		}
	}
	for value, want := range map[string]bool{"order": false, "timeline": true} {
		if got := mustLoad(t, "pg_status__master_selection="+value).masterByTimeline; got != want {
			t.Errorf("with pg_status__master_selection=%s masterByTimeline = %v; want %v", value, got, want)
		}
	}
	for _, m := range []messages{
		problem(`pg_status__log_level="trace": must be debug, info, warning, warn, error or fatal`, "pg_status__log_level=trace"),
		problem(`pg_status__log_level="0": must be debug, info, warning, warn, error or fatal`, "pg_status__log_level=0"),
		problem(`pg_status__log_format="xml": must be text or json`, "pg_status__log_format=xml"),
		problem(`pg_status__master_selection="first": must be order or timeline`, "pg_status__master_selection=first"),
		problem(`pg_status__log_format="x\ny": must be text or json`, "pg_status__log_format=x\ny"),
		problem(`pg_status__log_format="x`+strings.Repeat("é", 99)+`...[truncated]": must be text or json`, // 1 + 198 bytes
			"pg_status__log_format=x"+strings.Repeat("é", 100)),
	} {
		m.check(t)
	}
}

func TestConfigListenAddress(t *testing.T) {
	for _, tt := range []struct{ value, want string }{
		{"127.0.0.1", "127.0.0.1"},
		{"::", "::"},
		{" [::1] ", "::1"},
		{"fe80::1%eth0", "fe80::1%eth0"},
		{"[fe80::1%eth0]", "fe80::1%eth0"},
		{"*", "*"},
	} {
		if got := mustLoad(t, "pg_status__http_listen_address="+tt.value).listenAddress; got != tt.want {
			t.Errorf("with pg_status__http_listen_address=%q listenAddress = %q; want %q", tt.value, got, tt.want)
		}
	}
	for _, v := range []string{"localhost", "127.0.0.1:8000", "[127.0.0.1]", "[*]", "[::1]:80", "127.0.0", "127.0.0.01", "256.0.0.1", "::1%", "**", "[::1"} {
		problem(`pg_status__http_listen_address="`+v+`": must be an IPv4 address, an IPv6 address or *`, "pg_status__http_listen_address="+v).check(t)
	}
}

func TestConfigPassword(t *testing.T) {
	secret, empty, dir := tempFile(t, "hunter2\r\n"), tempFile(t, "\n"), t.TempDir()
	none := filepath.Join(dir, "none")
	for _, tt := range []struct {
		vars                             []string
		password, passwordFile, passFile string
	}{
		{nil, "postgres", "", ""},
		{[]string{"pg_status__pg_password=s3"}, "s3", "", ""},
		{[]string{"pg_status__pg_password= "}, " ", "", ""},
		{[]string{"pg_status__pg_password=a=b,c"}, "a=b,c", "", ""},
		{[]string{"PGPASSWORD=s3"}, "postgres", "", ""},
		{[]string{"pg_status__pg_password_file= " + secret}, "", secret, ""},
		{[]string{"PGPASSFILE=" + secret}, "", "", secret},
		{[]string{"PGPASSFILE=" + empty}, "", "", empty},
		{[]string{"PGPASSFILE=" + secret, "pg_status__pg_password_file=" + secret}, "", secret, ""},
		{[]string{"PGPASSFILE=" + none, "pg_status__pg_password=s3"}, "s3", "", ""},
	} {
		c := mustLoad(t, tt.vars...)
		if c.password != tt.password || c.passwordFile != tt.passwordFile || c.passFile != tt.passFile {
			t.Errorf("with %q password, passwordFile, passFile = %q, %q, %q; want %q, %q, %q",
				tt.vars, c.password, c.passwordFile, c.passFile, tt.password, tt.passwordFile, tt.passFile)
		}
	}

	const both = "pg_status__pg_password and pg_status__pg_password_file are both set: must be one of them"
	wrong := func(file, why string) string {
		return `pg_status__pg_password_file="` + file + `": must be a readable file that holds the password (` + why + ")"
	}
	for _, m := range []messages{
		problem(both, "pg_status__pg_password=s3", "pg_status__pg_password_file="+secret),
		problem(wrong(none, "no such file or directory"), "pg_status__pg_password_file="+none),
		problem(wrong(dir, "is a directory"), "pg_status__pg_password_file="+dir),
		problem(wrong(empty, "it is empty"), "pg_status__pg_password_file="+empty),
		{[]string{"pg_status__pg_password=s3", "pg_status__pg_password_file=" + none}, nil,
			[]string{both, wrong(none, "no such file or directory")}},
		warning(`PGPASSFILE="`+none+`" cannot be read (no such file or directory): connecting without a password`, "PGPASSFILE="+none),
		warning(`PGPASSFILE="`+dir+`" cannot be read (is a directory): connecting without a password`, "PGPASSFILE="+dir),
	} {
		m.check(t)
	}
}

func TestReadPasswordFile(t *testing.T) {
	for _, tt := range []struct{ content, want, wantErr string }{
		{"hunter2", "hunter2", ""},
		{"hunter2\n", "hunter2", ""},
		{"hunter2\r\n\n", "hunter2", ""},
		{" hunter 2 \n", " hunter 2 ", ""},
		{"", "", "it is empty"},
		{"\r\n", "", "it is empty"},
	} {
		got, err := readPasswordFile(tempFile(t, tt.content))
		if got != tt.want || (err != nil) != (tt.wantErr != "") || err != nil && err.Error() != tt.wantErr {
			t.Errorf("readPasswordFile of %q = %q, %v; want %q, %q", tt.content, got, err, tt.want, tt.wantErr)
		}
	}
}

func TestConfigUnknownNames(t *testing.T) {
	for _, m := range []messages{
		warning("pg_status__sleep is unknown and ignored; did you mean pg_status__sleep_ms?", "pg_status__sleep=5"),
		warning("pg_status__host is unknown and ignored; did you mean pg_status__hosts?", "pg_status__host=a"),
		warning("pg_status__ is unknown and ignored; did you mean pg_status__hosts?", "pg_status__=a"),
		warning("pg_status__pg_pasword is unknown and ignored; did you mean pg_status__pg_password?", "pg_status__pg_pasword=hunter2"),
		warning("pg_status__Sleep_MS is unknown and ignored; did you mean pg_status__sleep_ms?", "pg_status__Sleep_MS=5"),
		warning("PG_STATUS__HTTP_PORT is unknown and ignored; did you mean pg_status__http_port?", "PG_STATUS__HTTP_PORT=x"),
		{[]string{"pg_status__user=b", "pg_status__database=a"}, []string{
			"pg_status__database is unknown and ignored; did you mean pg_status__pg_database?",
			"pg_status__user is unknown and ignored; did you mean pg_status__pg_user?",
		}, nil},
		// What Kubernetes sets for a service of our name, and what is no variable at all.
		silent("PG_STATUS_SERVICE_HOST=10.0.0.1", "PG_STATUS_PORT=tcp://10.0.0.1:8000", "pg_status_sleep=1", "=", "", "x"),
	} {
		m.check(t)
	}
}

func TestConfigLibpqNames(t *testing.T) {
	for _, m := range []messages{
		silent("PGHOST=x", "PGPORT=x", "PGUSER=x", "PGDATABASE=x", "PGPASSWORD=x", "PGAPPNAME=x"),
		silent("PGCHANNELBINDING=disable", "PGGSSENCMODE=disable"),
		silent("PGCHANNELBINDING=prefer", "PGGSSENCMODE=prefer"),
		problem("PGREQUIREAUTH is set: not supported, must be unset", "PGREQUIREAUTH=scram-sha-256"),
		problem(`PGCHANNELBINDING="require": not supported, must be disable, prefer or unset`, "PGCHANNELBINDING=require"),
		problem(`PGCHANNELBINDING="Prefer": not supported, must be disable, prefer or unset`, "PGCHANNELBINDING=Prefer"),
		problem(`PGGSSENCMODE="require": not supported, must be disable, prefer or unset`, "PGGSSENCMODE=require"),
		warning("PGSERVICE is set, but ignored", "PGSERVICE=x"),
		warning("PGHOSTADDR is set, but ignored", "PGHOSTADDR=x"),
		warning("PGTARGETSESSIONATTRS is set, but ignored", "PGTARGETSESSIONATTRS=any"),
		warning("PGLOADBALANCEHOSTS is set, but ignored", "PGLOADBALANCEHOSTS=disable"),
		warning("PGOPTIONS is set, but ignored", "PGOPTIONS=-c x=y"),
	} {
		m.check(t)
	}
}

// As in the C library, the first of two values counts.
func TestConfigRepeatedVariable(t *testing.T) {
	if got := mustLoad(t, "pg_status__pg_user=one", "pg_status__pg_user=two").user; got != "one" {
		t.Errorf("with two values of pg_status__pg_user user = %q; want %q", got, "one")
	}
}

// everythingWrong has a mistake of every kind; hunter2 is the password.
var everythingWrong = []string{
	"pg_status__hosts=postgres://me:hunter2@db1,db2 password=hunter2,me:hunter2,hunter2@db,",
	"pg_status__pg_password=hunter2",
	"pg_status__pg_password_file=/nonexistent",
	"pg_status__pg_port=0,1",
	"pg_status__hosts_dc=a,b",
	"pg_status__hosts_geo=a,b,c,d,",
	"pg_status__current_geo_env=-",
	"pg_status__max_fails=many",
	"pg_status__sleep_ms=0",
	"pg_status__query_timeout_ms=0",
	"pg_status__conn_max_age_ms=0",
	"pg_status__poll_error_log_interval_ms=-",
	"pg_status__sync_max_lag_ms=-1",
	"pg_status__sync_max_lag_bytes=1MB",
	"pg_status__master_selection=best",
	"pg_status__wait_check_ms=0",
	"pg_status__failover_check_ms=never",
	"pg_status__http_listen_address=here",
	"pg_status__http_port=http",
	"pg_status__log_level=all",
	"pg_status__log_format=csv",
	"pg_status__pasword=hunter2",
	"PGREQUIREAUTH=md5",
	"PGCHANNELBINDING=require",
	"PGGSSENCMODE=require",
	"PGOPTIONS=-c password=hunter2",
	"PGSSLMODE=sometimes",
}

// All that is wrong is reported at once, in the order of the settings.
func TestConfigEverythingWrong(t *testing.T) {
	const other = ": must be a host name or an IP address, with a comma before the next"
	wantProblems := []string{
		"pg_status__hosts: entry 5 is empty",
		"pg_status__hosts: entry 1 holds '/'" + other,
		"pg_status__hosts: entry 2 holds ' '" + other,
		"pg_status__hosts: entry 3 holds ':' but is not an IPv6 address: must be without a port, which goes into pg_status__pg_port",
		"pg_status__hosts: entry 4 holds '@'" + other,
		"pg_status__pg_password and pg_status__pg_password_file are both set: must be one of them",
		`pg_status__pg_password_file="/nonexistent": must be a readable file that holds the password (no such file or directory)`,
		`pg_status__pg_port: entry 1 is "0": must be a whole number from 1 to 65535`,
		"pg_status__pg_port: 2 ports for 5 hosts: must be one, or one for each host",
		"pg_status__hosts_dc: 2 values for 5 hosts: must be one for each host",
		"pg_status__hosts_geo: entry 5 is empty",
		`pg_status__current_geo_env="-": must be the name of a variable: letters, digits and _, not beginning with a digit`,
		`pg_status__max_fails="many": must be a whole number from 0 to 1000000`,
		`pg_status__sleep_ms="0": must be a whole number of milliseconds from 1 to 86400000`,
		`pg_status__query_timeout_ms="0": must be a whole number of milliseconds from 1 to 86400000`,
		`pg_status__conn_max_age_ms="0": must be a whole number of milliseconds from 1 to 31536000000`,
		`pg_status__poll_error_log_interval_ms="-": must be a whole number of milliseconds from 0 to 31536000000`,
		`pg_status__sync_max_lag_ms="-1": must be a whole number of milliseconds from 0 to 18446744073709551615`,
		`pg_status__sync_max_lag_bytes="1MB": must be a whole number of bytes from 0 to 18446744073709551615`,
		`pg_status__master_selection="best": must be order or timeline`,
		`pg_status__wait_check_ms="0": must be a whole number of milliseconds from 1 to 86400000`,
		`pg_status__failover_check_ms="never": must be a whole number of milliseconds from 0 to 86400000`,
		`pg_status__http_listen_address="here": must be an IPv4 address, an IPv6 address or *`,
		`pg_status__http_port="http": must be a whole number from 0 to 65535`,
		`pg_status__log_level="all": must be debug, info, warning, warn, error or fatal`,
		`pg_status__log_format="csv": must be text or json`,
		"PGREQUIREAUTH is set: not supported, must be unset",
		`PGCHANNELBINDING="require": not supported, must be disable, prefer or unset`,
		`PGGSSENCMODE="require": not supported, must be disable, prefer or unset`,
	}
	wantWarnings := []string{
		"DC preference disabled: incomplete locality configuration; pg_status__current_dc is not set",
		"pg_status__pasword is unknown and ignored; did you mean pg_status__pg_password?",
		"PGOPTIONS is set, but ignored",
	}
	_, warnings, problems := loadConfig(everythingWrong)
	if !slices.Equal(warnings, wantWarnings) {
		t.Errorf("loadConfig warns\n%s\nwant\n%s", strings.Join(warnings, "\n"), strings.Join(wantWarnings, "\n"))
	}
	n := len(wantProblems) // behind them are those of loadTLS
	if len(problems) <= n || !slices.Equal(problems[:n], wantProblems) {
		t.Fatalf("loadConfig has problems\n%s\nwant\n%s", strings.Join(problems, "\n"), strings.Join(wantProblems, "\n"))
	}
	if last := problems[n]; !strings.Contains(last, "PGSSLMODE") {
		t.Errorf("the problem after ours is %q; want one about PGSSLMODE", last)
	}
}

func TestConfigNeverShowsPassword(t *testing.T) {
	file := tempFile(t, "hunter2")
	for _, vars := range [][]string{
		everySetting,
		everythingWrong,
		{"pg_status__pg_password_file=" + file},
		{"pg_status__pg_password_file=" + file, "pg_status__pg_password=hunter2"},
		{"PGPASSFILE=" + file, "PGPASSWORD=hunter2"},
		{"pg_status__pg_password= hunter2\n"},
	} {
		c, warnings, problems := loadConfig(threeHosts(vars...))
		for _, lines := range [][]string{warnings, problems, effectiveOf(c, problems)} {
			if text := strings.Join(lines, "\n"); strings.Contains(text, "hunter2") {
				t.Errorf("with %q the password is shown:\n%s", vars, text)
			}
		}
	}
}

// effectiveOf returns what --check-config shows: nothing when there are problems.
func effectiveOf(c config, problems []string) []string {
	if problems != nil {
		return nil
	}
	return c.effective()
}

func TestEditDistance(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"", "abc", 3},
		{"abc", "", 3},
		{"abc", "abc", 0},
		{"sleep", "sleep_ms", 3},   // three inserted
		{"hsots", "hosts", 2},      // a swap is two replaced
		{"kitten", "sitting", 3},   // k-s, e-i, +g
		{"flaw", "lawn", 2},        // -f, +n
		{"port", "pg_port", 3},     // three inserted
		{"pasword", "password", 1}, // one inserted
	} {
		if got := editDistance(tt.a, tt.b); got != tt.want {
			t.Errorf("editDistance(%q, %q) = %d; want %d", tt.a, tt.b, got, tt.want)
		}
	}
}
