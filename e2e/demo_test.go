package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// TestDemo runs what "make demo" shows, without waiting for a Ctrl-C.
func TestDemo(t *testing.T) {
	tmp, err := os.MkdirTemp("", "pg-status-e2e-demo-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil { // the servers have another user
		t.Fatal(err)
	}
	cmd := exec.Command("../packaging/demo.sh", "--once")
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"),
		"TMPDIR=" + tmp,
		"PG_STATUS=" + binary,
		fmt.Sprintf("pg_status__pg_port=%d", freePort(t, "127.0.0.1")),
		fmt.Sprintf("pg_status__http_port=%d", freePort(t, "127.0.0.1")),
	}
	var log strings.Builder
	cmd.Stderr = &log
	dieWithUs(cmd, syscall.SIGTERM)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("demo.sh: %v\n%s%s", err, out, &log)
	}
	for _, want := range []string{
		`/live'\nOK\n`,
		`/ready'\nOK\n`,
		`/master'\n127\.0\.0\.1\n`,
		`/replica'\n127\.0\.0\.[23]\n`,
		`/replica\?min_lsn=[0-9A-F]+/[0-9A-F]+&timeline=1&wait_ms=2000'\n127\.0\.0\.[123]\n`,
		`/sync_by_time'\n127\.0\.0\.[123]\n`,
		`/sync_by_bytes'\n127\.0\.0\.[23]\n`,
		`/most_sync_by_bytes'\n127\.0\.0\.[23]\n`,
		`/hosts'\n\[\{"host":"127\.0\.0\.1",.*"master":true,.*\},\{.*\},\{.*\}\]\n$`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("the demo does not show %s:\n%s", want, out)
		}
	}
	for _, want := range []string{"server started address=127.0.0.1", "role=master", "role=replica", "server stopped"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the demo's log lacks %q:\n%s", want, &log)
		}
	}
	if left, err := os.ReadDir(tmp); len(left) > 0 || err != nil {
		t.Errorf("the demo leaves %v, %v", left, err)
	}
}
