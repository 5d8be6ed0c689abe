package e2e

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// These roles are let in by different lines of pg_hba.conf; all have the
// superuser's password.
const (
	anyRole   = "any_role"   // with TLS or without
	tlsRole   = "tls_role"   // with TLS only
	plainRole = "plain_role" // without TLS only
	certRole  = "cert_role"  // with TLS and a client certificate only
)

// newTLSCluster starts one server for the roles. It has no TLS until serve.
func newTLSCluster(t *testing.T) *cluster {
	t.Helper()
	c := newCluster(t, 0, withConf("log_connections = on"), withHBA(
		"hostssl   all "+tlsRole+"   127.0.0.0/8 scram-sha-256",
		"hostssl   all "+certRole+"  127.0.0.0/8 scram-sha-256 clientcert=verify-ca",
		"hostnossl all "+plainRole+" 127.0.0.0/8 scram-sha-256",
		"host      all "+tlsRole+","+certRole+","+plainRole+" 127.0.0.0/8 reject"))
	for _, role := range []string{anyRole, tlsRole, plainRole, certRole} {
		c.exec(0, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s'", role, password))
	}
	return c
}

// serve has node 0 speak TLS with cert, and take client certificates of clients.
func serve(c *cluster, cert, clients *testCert) {
	c.t.Helper()
	n := c.nodes[0]
	settings := []string{"ssl = on"}
	for name, content := range map[string]string{
		"ssl_cert_file": cert.pem(), "ssl_key_file": cert.keyPEM(c.t), "ssl_ca_file": clients.pem(),
	} {
		path := filepath.Join(n.dir, name+".pem")
		if err := postgres.write(path, content); err != nil {
			c.t.Fatal(err)
		}
		settings = append(settings, fmt.Sprintf("%s = '%s'", name, postgres.inside(path)))
	}
	c.conf(0, settings...)
	// The postmaster loads certificates only after it has told its children, whom
	// conf asks.
	until(c.t, func() error {
		conn, err := net.Dial("tcp", c.addr(0))
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		answer := make([]byte, 1)
		if _, err := conn.Write([]byte{0, 0, 0, 8, 4, 210, 22, 47}); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, answer); err != nil || answer[0] != 'S' {
			return fmt.Errorf("the server answers %q, %v to a request for TLS", answer, err)
		}
		client := tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
		if err := client.Handshake(); err != nil {
			return err
		}
		if got := client.ConnectionState().PeerCertificates[0]; !got.Equal(cert.Certificate) {
			return fmt.Errorf("the server still presents %v", got.Subject)
		}
		return nil
	})
}

// testCert is a certificate and its key.
type testCert struct {
	*x509.Certificate
	key crypto.Signer
}

func (c *testCert) pem() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}))
}

func (c *testCert) keyPEM(t *testing.T) string {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(c.key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// newAuthority makes a root certificate.
func newAuthority(t *testing.T, name string) *testCert {
	t.Helper()
	return newCert(t, nil, name, func(c *x509.Certificate) {
		c.IsCA, c.BasicConstraintsValid = true, true
		c.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	})
}

// newCert makes a certificate, signed by issuer, or by itself if that is nil, and
// valid for a day unless change says otherwise.
func newCert(t *testing.T, issuer *testCert, name string, change func(*x509.Certificate)) *testCert {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-24 * time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
	change(template)
	if issuer == nil {
		issuer = &testCert{template, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer.Certificate, key.Public(), issuer.key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &testCert{c, key}
}

// revoke returns the list by which issuer revokes certs.
func revoke(t *testing.T, issuer *testCert, certs ...*testCert) string {
	t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: time.Now().Add(time.Hour)}
	for _, c := range certs {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries,
			x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, issuer.Certificate, issuer.key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}))
}

// keep writes a file for pg-status to read, and returns its path.
func keep(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file.pem")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The ways a connection may be made. Any other outcome is a part of the reason
// why there is none.
const (
	withTLS    = "with TLS"
	withoutTLS = "without TLS"
)

// checkTLS runs a pg-status that connects as role with the settings env, and
// checks the outcome.
func checkTLS(t *testing.T, c *cluster, role, want string, env ...string) {
	t.Helper()
	d := startDaemon(t, c.env(append(env, "pg_status__pg_user="+role,
		"pg_status__sleep_ms=100", "pg_status__poll_error_log_interval_ms=0", "HOME=/nonexistent")...)...)
	defer d.stop()
	d.waitReady()
	if want != withTLS && want != withoutTLS {
		until(t, func() error {
			if _, ok := d.logged("ERROR monitor", "host="+c.name(0), want); !ok {
				record, _ := d.logged("ERROR")
				return fmt.Errorf("%s, %q: no error holds %q, but one is %q", role, env, want, record)
			}
			return nil
		})
		if h := d.hosts()[0]; !h.dead() {
			t.Errorf("%s, %q: host is %v; want it dead", role, env, h)
		}
		return
	}
	until(t, func() error {
		if h := d.hosts()[0]; !h.fine() || !h.Master {
			record, _ := d.logged("ERROR")
			return fmt.Errorf("%s, %q: host is %v; want it connected %s; first error: %q", role, env, h, want, record)
		}
		got := c.query(0, "SELECT CASE WHEN ssl THEN 'with' ELSE 'without' END || ' TLS' FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = '"+role+"'")
		if got != want {
			return fmt.Errorf("%s, %q: connected %q; want %s", role, env, got, want)
		}
		return nil
	})
}

var sslModes = []string{"disable", "allow", "prefer", "require", "verify-ca", "verify-full"}

// TestTLSModes has every mode connect to servers of all kinds.
func TestTLSModes(t *testing.T) {
	c := newTLSCluster(t)
	root, other := newAuthority(t, "Root"), newAuthority(t, "Other Root")
	named := func(change func(*x509.Certificate)) func(*x509.Certificate) {
		return func(x *x509.Certificate) {
			x.IPAddresses = []net.IP{net.ParseIP(c.name(0))}
			change(x)
		}
	}
	unchanged := func(*x509.Certificate) {}
	revoked := newCert(t, root, "revoked", named(unchanged))

	const (
		no      = "the server does not support TLS, but PGSSLMODE="
		failed  = "certificate verify failed: "
		expired = failed + "certificate has expired"
		unknown = failed + "certificate signed by unknown authority"
		listed  = failed + "certificate revoked"
		name    = `server certificate for "db.example" does not match host name "`
	)
	for _, tt := range []struct {
		name   string
		server *testCert // nil: one that does not speak TLS
		wants  [6]string // in the order of sslModes
	}{
		// As in libpq, prefer goes on without TLS when TLS does not come about.
		{"plain", nil, [6]string{withoutTLS, withoutTLS, withoutTLS, no + "require", no + "verify-ca", no + "verify-full"}},
		{"good", newCert(t, root, "x", named(unchanged)), [6]string{withoutTLS, withoutTLS, withTLS, withTLS, withTLS, withTLS}},
		{"wrong name", newCert(t, root, "db.example", unchanged), [6]string{withoutTLS, withoutTLS, withTLS, withTLS, withTLS, name}},
		{"wrong authority", newCert(t, other, "x", named(unchanged)), [6]string{withoutTLS, withoutTLS, withoutTLS, unknown, unknown, unknown}},
		{"expired", newCert(t, root, "x", named(func(x *x509.Certificate) { x.NotAfter = time.Now().Add(-time.Hour) })),
			[6]string{withoutTLS, withoutTLS, withoutTLS, expired, expired, expired}},
		{"revoked", revoked, [6]string{withoutTLS, withoutTLS, withoutTLS, listed, listed, listed}},
	} {
		if tt.server != nil {
			serve(c, tt.server, root)
		}
		for i, mode := range sslModes {
			t.Run(tt.name+"/"+mode, func(t *testing.T) {
				checkTLS(t, c, anyRole, tt.wants[i], "PGSSLMODE="+mode,
					"PGSSLROOTCERT="+keep(t, root.pem()), "PGSSLCRL="+keep(t, revoke(t, root, revoked)))
			})
		}
	}
}

// TestTLSSettings is about what is not the mode: the server, at first, has a
// certificate of an authority that we are not told of.
func TestTLSSettings(t *testing.T) {
	c := newTLSCluster(t)
	root := newAuthority(t, "Root")
	server := newCert(t, root, c.name(0), func(*x509.Certificate) {}) // no alternative name
	client := newCert(t, root, certRole, func(*x509.Certificate) {})
	alien := newCert(t, nil, certRole, func(*x509.Certificate) {})
	serve(c, server, root)
	file := func(name, content string) string { return name + "=" + keep(t, content) }
	crls := "PGSSLCRLDIR=" + filepath.Dir(keep(t, revoke(t, root, server)))
	for _, tt := range []struct {
		name, role, want string
		env              []string
	}{
		{"default", anyRole, withTLS, nil},
		{"server takes TLS only", tlsRole, withTLS, nil},
		{"server takes no TLS", plainRole, withoutTLS, nil},
		{"allow, server takes TLS only", tlsRole, withTLS, []string{"PGSSLMODE=allow"}},
		{"disable, server takes TLS only", tlsRole, "pg_hba.conf rejects connection", []string{"PGSSLMODE=disable"}},
		{"require, server takes no TLS", plainRole, "pg_hba.conf rejects connection", []string{"PGSSLMODE=require"}},
		{"require, unknown authority", anyRole, withTLS, []string{"PGSSLMODE=require"}},
		{"verify-full by common name", anyRole, withTLS, []string{"PGSSLMODE=verify-full", file("PGSSLROOTCERT", root.pem())}},
		{"system", anyRole, withTLS, []string{"PGSSLROOTCERT=system", file("SSL_CERT_FILE", root.pem()), "SSL_CERT_DIR=/nonexistent"}},
		{"system, unknown authority", anyRole, "certificate signed by unknown authority",
			[]string{"PGSSLROOTCERT=system", file("SSL_CERT_FILE", alien.pem()), "SSL_CERT_DIR=/nonexistent"}},
		{"directory of CRLs", anyRole, "certificate revoked", []string{"PGSSLMODE=require", file("PGSSLROOTCERT", root.pem()), crls}},
		{"client certificate", certRole, withTLS, []string{"PGSSLMODE=require", file("PGSSLCERT", client.pem()), file("PGSSLKEY", client.keyPEM(t))}},
		{"client certificate required", certRole, "connection requires a valid client certificate", []string{"PGSSLMODE=require"}},
		{"client certificate of an unknown authority", certRole, "unknown certificate authority",
			[]string{"PGSSLMODE=require", file("PGSSLCERT", alien.pem()), file("PGSSLKEY", alien.keyPEM(t))}},
		{"the same with TLS 1.2", certRole, "server refused the client certificate (PGSSLCERT): ",
			[]string{"PGSSLMODE=require", "PGSSLMAXPROTOCOLVERSION=TLSv1.2", file("PGSSLCERT", alien.pem()), file("PGSSLKEY", alien.keyPEM(t))}},
		{"client certificate that is not to be sent", certRole, "connection requires a valid client certificate",
			[]string{"PGSSLMODE=require", "PGSSLCERTMODE=disable", file("PGSSLCERT", client.pem()), file("PGSSLKEY", client.keyPEM(t))}},
	} {
		t.Run(tt.name, func(t *testing.T) { checkTLS(t, c, tt.role, tt.want, tt.env...) })
	}

	if postgres.version < 17 {
		checkTLS(t, c, anyRole, "PGSSLNEGOTIATION=direct needs PostgreSQL 17 or later", "PGSSLMODE=require", "PGSSLNEGOTIATION=direct")
	} else {
		checkTLS(t, c, anyRole, withTLS, "PGSSLMODE=require", "PGSSLNEGOTIATION=direct")
	}
	c.conf(0, "ssl_ca_file = ''")
	checkTLS(t, c, anyRole, "server did not request a client certificate", "PGSSLCERTMODE=require",
		file("PGSSLCERT", client.pem()), file("PGSSLKEY", client.keyPEM(t)))
}

// TestTLSSettingsRefused has pg-status not start, for a reason that names the
// variable.
func TestTLSSettingsRefused(t *testing.T) {
	client := newCert(t, nil, "pg_status", func(*x509.Certificate) {})
	cert, key := keep(t, client.pem()), keep(t, client.keyPEM(t))
	open := keep(t, client.keyPEM(t))
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ env, want string }{
		{"PGSSLMODE=on", "PGSSLMODE"},
		{"PGSSLMODE=verify-ca", "PGSSLROOTCERT"},
		{"PGSSLROOTCERT=/nonexistent", "PGSSLROOTCERT"},
		{"PGSSLROOTCERT=" + cert + " PGSSLCRL=/nonexistent", "PGSSLCRL"},
		{"PGSSLROOTCERT=" + cert + " PGSSLCRLDIR=/nonexistent", "PGSSLCRLDIR"},
		{"PGSSLCERT=/nonexistent PGSSLKEY=" + key, "PGSSLCERT"},
		{"PGSSLCERT=" + cert + " PGSSLKEY=" + open, "PGSSLKEY"},
	} {
		env := append(envFor("127.0.0.1:1"), "HOME=/nonexistent")
		logs := startDaemonExpectingFailure(t, append(env, strings.Fields(tt.env)...)...)
		if !strings.Contains(logs, "FATAL") || !strings.Contains(logs, tt.want) {
			t.Errorf("log with %s does not name %s:\n%s", tt.env, tt.want, logs)
		}
	}
}

// TestPreferLeavesNoSocket counts what is open while each check of a server
// without TLS asks for it anew.
func TestPreferLeavesNoSocket(t *testing.T) {
	c := newTLSCluster(t)
	d := startDaemon(t, c.env("pg_status__pg_user="+anyRole, "pg_status__sleep_ms=20", "pg_status__conn_max_age_ms=1")...)
	connections := func(n int) {
		t.Helper()
		until(t, func() error {
			if got := strings.Count(c.log(0), "connection authorized: user="+anyRole); got < n {
				return fmt.Errorf("%d connections so far", got)
			}
			return nil
		})
	}
	connections(5)
	before := d.fds()
	connections(55)
	// One connection may be open beside the one that it is to replace.
	if after := d.fds(); after > before+1 {
		t.Errorf("after 50 connections %d descriptors are open; before, %d", after, before)
	}
}
