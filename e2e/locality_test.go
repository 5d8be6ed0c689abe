package e2e

import (
	"fmt"
	"testing"
)

func TestLocality(t *testing.T) {
	c := newCluster(t, 2)
	lists := []string{"pg_status__sleep_ms=100", "pg_status__hosts_dc=fra,ams,nyc", "pg_status__hosts_geo=eu,eu,us"}
	first := []string{c.name(1), c.name(1), c.name(1), c.name(1)}
	second := []string{c.name(2), c.name(2), c.name(2), c.name(2)}
	both := []string{c.name(1), c.name(2), c.name(1), c.name(2)}
	for _, tt := range []struct {
		name        string
		env         []string
		want        []string // by four requests
		wantWarning string
	}{
		{"same dc", []string{"pg_status__current_dc=nyc"}, second, ""},
		{"dc of another variable", []string{"pg_status__current_dc_env=PLACE", "PLACE=ams"}, first, ""},
		{"a direct value wins", []string{"pg_status__current_dc=nyc", "pg_status__current_dc_env=PLACE", "PLACE=ams"}, second, ""},
		{"the master's dc", []string{"pg_status__current_dc=fra"}, both, ""},
		{"no replica in the dc, one in the geo", []string{"pg_status__current_dc=chi", "pg_status__current_geo=us"}, second, ""},
		{"the master's dc, one replica in the geo", []string{"pg_status__current_dc=fra", "pg_status__current_geo=eu"}, first, ""},
		{"dc before geo", []string{"pg_status__current_dc=nyc", "pg_status__current_geo=eu"}, second, ""},
		{"geo of another variable", []string{"pg_status__current_geo_env=PLACE", "PLACE=us"}, second, ""},
		{"nobody near", []string{"pg_status__current_dc=chi", "pg_status__current_geo=asia"}, both, ""},
		{"no current values", nil, both, "WARNING config: DC preference disabled: incomplete locality configuration"},
		{"the other variable is unset", []string{"pg_status__current_geo_env=PLACE"}, both, "WARNING config: geo preference disabled: incomplete locality configuration"},
	} {
		d := startDaemon(t, c.env(append(lists, tt.env...)...)...)
		d.waitReady()
		until(t, func() error { // the first master check may come after the replicas'
			for _, h := range d.hosts() {
				if !h.fine() || !h.SyncByBytes {
					return fmt.Errorf("%v; want it in sync", h)
				}
			}
			return nil
		})
		for _, path := range []string{"/replica", "/sync_by_bytes"} {
			var got []string
			for range 4 {
				_, body, _ := d.get(path)
				got = append(got, body)
			}
			if fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("%s: %s = %v; want %v", tt.name, path, got, tt.want)
			}
		}
		if _, body, _ := d.get("/most_sync_by_bytes"); body != c.name(1) {
			t.Errorf("%s: /most_sync_by_bytes = %q; want %s, wherever we are", tt.name, body, c.name(1))
		}
		_, body, _ := d.get("/master", acceptJSON)
		if want := fmt.Sprintf(`{"host":"%s","dc":"fra","geo":"eu","port":%d}`, c.name(0), c.port(0)); body != want {
			t.Errorf("%s: /master = %s; want %s", tt.name, body, want)
		}
		if h := d.hosts()[2]; h.DC == nil || *h.DC != "nyc" || h.Geo == nil || *h.Geo != "us" {
			t.Errorf("%s: /hosts has %v; want dc nyc, geo us", tt.name, h)
		}
		if tt.wantWarning != "" {
			d.waitLogged(tt.wantWarning)
		}
		d.stop()
	}
}

// TestLocalityYieldsToFreshness has the near replica fall behind.
func TestLocalityYieldsToFreshness(t *testing.T) {
	c := newCluster(t, 2)
	d := startDaemon(t, c.env("pg_status__sleep_ms=50", "pg_status__hosts_dc=a,b,c", "pg_status__current_dc=c")...)
	d.eventually("/replica", c.name(2))
	c.pauseReplay(2)
	c.exec(0, "CREATE TABLE t (i int)")
	c.waitReplayed(1)
	path := "/replica?min_lsn=" + c.lsn(0)
	d.eventually(path, c.name(1))
	d.eventually("/replica", c.name(2)) // which asks for no freshness
	c.resumeReplay(2)
	d.eventually(path, c.name(2))
}
