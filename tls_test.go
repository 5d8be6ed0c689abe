package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Certificates are made for each test, valid from an hour ago for an hour, unless
// the test wants others.
const certHour = time.Hour

// testCert is a certificate, its key, and what it is sent with.
type testCert struct {
	*x509.Certificate
	key  crypto.Signer
	sent [][]byte // the certificate and those above it but the root's
}

func (c testCert) tls() tls.Certificate {
	return tls.Certificate{Certificate: c.sent, PrivateKey: c.key}
}

// pem returns the certificates that are sent, as in a file.
func (c testCert) pem() string {
	var b strings.Builder
	for _, der := range c.sent {
		pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	return b.String()
}

func (c testCert) keyPEM(t *testing.T) string {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(c.key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

var nextSerial int64

// issue makes a certificate, signed by issuer, or by itself if that is nil. It is
// for servers and clients, named name and nothing else, unless change says so.
func issue(t *testing.T, issuer *testCert, name string, change func(*x509.Certificate)) *testCert {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	nextSerial++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(nextSerial),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-certHour),
		NotAfter:     time.Now().Add(certHour),
	}
	if change != nil {
		change(template)
	}
	parent, signer, above := template, crypto.Signer(key), [][]byte(nil)
	if issuer != nil {
		parent, signer = issuer.Certificate, issuer.key
		if issuer.Issuer.CommonName != issuer.Subject.CommonName {
			above = issuer.sent
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &testCert{c, key, append([][]byte{der}, above...)}
}

// authority makes issue's certificate one that can sign others and CRLs.
func authority(c *x509.Certificate) {
	c.IsCA, c.BasicConstraintsValid = true, true
	c.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
}

// dns makes issue's certificate one for the names.
func dns(names ...string) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.DNSNames = names }
}

// crl returns a list, as in a file, in which the issuer revokes certificates,
// valid from an hour ago until next hours from now, or for ever if that is 0.
func crl(t *testing.T, issuer *testCert, next int, revoked ...*testCert) string {
	t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-certHour)}
	if next != 0 {
		list.NextUpdate = time.Now().Add(time.Duration(next) * certHour)
	}
	for _, c := range revoked {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries,
			x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: time.Now()})
	}
	return signCRL(t, issuer, list)
}

func signCRL(t *testing.T, issuer *testCert, list *x509.RevocationList) string {
	t.Helper()
	if list.NextUpdate.IsZero() {
		list.NextUpdate = time.Now().Add(100 * 365 * 24 * certHour) // x509 makes none without
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, issuer.Certificate, issuer.key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}))
}

// tempPEM writes a file and returns its path.
func tempPEM(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file.pem")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// tlsTestEnv returns a getenv of NAME=value pairs, and a home without files unless
// they have one.
func tlsTestEnv(t *testing.T, pairs ...string) func(string) string {
	t.Helper()
	vars := map[string]string{"HOME": t.TempDir()}
	for _, p := range pairs {
		name, value, _ := strings.Cut(p, "=")
		vars[name] = value
	}
	return func(name string) string { return vars[name] }
}

// mustLoadTLS is loadTLS with settings that are right.
func mustLoadTLS(t *testing.T, pairs ...string) *tlsSettings {
	t.Helper()
	s, errs := loadTLS(tlsTestEnv(t, pairs...))
	if errs != nil {
		t.Fatalf("loadTLS(%q) = %v", pairs, errs)
	}
	return s
}

// tcpPair returns the two ends of a connection, for a test of 10 s at most. (On a
// net.Pipe, which buffers nothing, both sides of TLS may wait for the other.)
func tcpPair(t *testing.T) (near, far net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err = net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	near.SetDeadline(time.Now().Add(10 * time.Second))
	far.SetDeadline(time.Now().Add(10 * time.Second))
	return near, far
}

// dialTLS has s open a connection to host, which is a server with config, and
// read a byte. It returns the client's view, the server's, and the error of
// either, explained.
func dialTLS(t *testing.T, s *tlsSettings, host string, config *tls.Config) (client, server tls.ConnectionState, err error) {
	t.Helper()
	near, far := tcpPair(t)
	peer := tls.Server(far, config)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer far.Close()
		if peer.Handshake() == nil {
			peer.Write([]byte{0})
		}
	}()
	c, err := s.handshake(near, host)
	if err == nil {
		client = c.ConnectionState()
		if _, err = c.Read(make([]byte, 1)); err != nil {
			err = s.explain(err)
		}
	}
	near.Close()
	<-done
	return client, peer.ConnectionState(), err
}

// wantErr checks that err contains want, or is nil if want is empty.
func wantErr(t *testing.T, what string, err error, want string) {
	t.Helper()
	switch {
	case err == nil && want != "":
		t.Errorf("%s = nil; want %q", what, want)
	case err != nil && (want == "" || !strings.Contains(err.Error(), want)):
		t.Errorf("%s = %v; want %q", what, err, want)
	}
}

func TestHandshakeVerifies(t *testing.T) {
	root := issue(t, nil, "Root", authority)
	other := issue(t, nil, "Other Root", authority)
	namesake := issue(t, nil, "Root", authority)
	intermediate := issue(t, root, "Intermediate", authority)
	oldIntermediate := issue(t, root, "Old Intermediate", func(c *x509.Certificate) {
		authority(c)
		c.NotAfter = time.Now().Add(-time.Minute)
	})
	noAuthority := issue(t, root, "No Authority", nil)
	limited := issue(t, root, "Limited", func(c *x509.Certificate) {
		authority(c)
		c.PermittedDNSDomains = []string{"db.example"}
	})
	unsent := issue(t, intermediate, "unsent", dns("db.example"))
	unsent.sent = unsent.sent[:1]

	const host = "db.example"
	for _, tt := range []struct {
		name   string
		server *testCert
		host   string
		chain  string // the error of every mode with a root certificate
		full   string // that of verify-full alone
	}{
		{"good", issue(t, root, "x", dns(host)), host, "", ""},
		{"good, for one of several names", issue(t, root, "x", dns("a.example", host)), host, "", ""},
		{"good, by an intermediate that is sent", issue(t, intermediate, "x", dns(host)), host, "", ""},
		{"by an intermediate that is not sent", unsent, host, `certificate verify failed: certificate signed by unknown authority: subject "CN=unsent", issuer "CN=Intermediate"`, ""},
		{"by an expired intermediate", issue(t, oldIntermediate, "x", dns(host)), host, `is after`, ""},
		{"by an expired intermediate, whose name it tells", issue(t, oldIntermediate, "x", dns(host)), host, `subject "CN=Old Intermediate", issuer "CN=Root"`, ""},
		{"by one that may not sign", issue(t, noAuthority, "x", dns(host)), host, `certificate verify failed: `, ""},
		{"wrong name", issue(t, root, "x", dns("other.example")), host, "", `server certificate for "other.example" does not match host name "db.example"`},
		{"wrong names", issue(t, root, "x", dns("a.example", "b.example")), host, "", `server certificate for "a.example, b.example" does not match host name "db.example"`},
		{"no name", issue(t, root, "", nil), host, "", `server certificate for "" does not match host name "db.example"`},
		{"common name", issue(t, root, host, nil), host, "", ""},
		{"common name beside another name", issue(t, root, host, dns("other.example")), host, "", `server certificate for "other.example" does not match host name "db.example"`},
		{"wrong common name", issue(t, root, "other.example", nil), host, "", `server certificate for "other.example" does not match host name "db.example"`},
		{"common name, by an authority limited to some names", issue(t, limited, host, nil), host, "", `does not match host name "db.example"`},
		{"name, by an authority limited to it", issue(t, limited, "x", dns(host)), host, "", ""},
		{"name, by an authority limited to others", issue(t, limited, "x", dns("other.example")), "other.example", `certificate verify failed: `, ""},
		{"address", issue(t, root, "x", func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }), "127.0.0.1", "", ""},
		{"wrong address", issue(t, root, "x", func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }), "127.0.0.2", "", `server certificate for "127.0.0.1" does not match host name "127.0.0.2"`},
		{"expired", issue(t, root, "x", func(c *x509.Certificate) {
			c.DNSNames, c.NotAfter = []string{host}, time.Now().Add(-time.Minute)
		}), host, `certificate verify failed: certificate has expired or is not yet valid: current time`, ""},
		{"not yet valid", issue(t, root, "x", func(c *x509.Certificate) {
			c.DNSNames, c.NotBefore = []string{host}, time.Now().Add(time.Minute)
		}), host, `is before`, ""},
		{"unknown authority", issue(t, other, "x", dns(host)), host, `certificate verify failed: certificate signed by unknown authority: subject "CN=x", issuer "CN=Other Root"`, ""},
		{"authority of the same name", issue(t, namesake, "x", dns(host)), host, `certificate verify failed: certificate signed by unknown authority (possibly because of`, ""},
		{"self-signed", issue(t, nil, host, dns(host)), host, `certificate verify failed: certificate signed by unknown authority`, ""},
		{"the root itself", root, host, "", `server certificate for "Root" does not match host name "db.example"`},
		{"for clients only", issue(t, root, "x", func(c *x509.Certificate) {
			c.DNSNames, c.ExtKeyUsage = []string{host}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		}), host, `certificate verify failed: certificate specifies an incompatible key usage`, ""},
	} {
		server := &tls.Config{Certificates: []tls.Certificate{tt.server.tls()}}
		for _, mode := range []string{"allow", "prefer", "require"} {
			s := mustLoadTLS(t, "PGSSLMODE="+mode)
			_, _, err := dialTLS(t, s, tt.host, server)
			wantErr(t, tt.name+", "+mode+" without root", err, "")
		}
		for _, mode := range []string{"allow", "prefer", "require", "verify-ca", "verify-full"} {
			s := mustLoadTLS(t, "PGSSLMODE="+mode, "PGSSLROOTCERT="+tempPEM(t, root.pem()))
			_, _, err := dialTLS(t, s, tt.host, server)
			want := tt.chain
			if mode == "verify-full" && want == "" {
				want = tt.full
			}
			wantErr(t, tt.name+", "+mode, err, want)
			if refused := new(certError); want != "" && !errors.As(err, refused) {
				t.Errorf("%s, %s = %T; want a certError", tt.name, mode, err)
			}
		}
	}
}

// The file of root certificates may hold more than one, and what is not a root
// does not become one.
func TestRootFile(t *testing.T) {
	root := issue(t, nil, "Root", authority)
	other := issue(t, nil, "Other Root", authority)
	intermediate := issue(t, root, "Intermediate", authority)
	server := issue(t, intermediate, "db.example", nil)
	server.sent = server.sent[:1]
	self := issue(t, nil, "db.example", nil)

	for _, tt := range []struct {
		name   string
		file   string
		server *testCert
		want   string
	}{
		{"two roots", other.pem() + self.pem(), self, ""},
		{"two roots, the other way round", self.pem() + other.pem(), self, ""},
		{"text between", "# ours\n" + other.pem() + "\nand\n" + self.pem(), self, ""},
		{"an intermediate that the server does not send", intermediate.pem() + root.pem(), server, ""},
		{"an intermediate and another root", intermediate.pem() + other.pem(), server, "certificate signed by unknown authority"},
		{"the server's, which is no root, and another root", server.pem() + other.pem(), server, "certificate signed by unknown authority"},
		{"a damaged one and a good one", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n" + self.pem(), self, ""},
		{"of the old type", strings.ReplaceAll(self.pem(), " CERTIFICATE", " X509 CERTIFICATE"), self, ""},
	} {
		s := mustLoadTLS(t, "PGSSLMODE=verify-full", "PGSSLROOTCERT="+tempPEM(t, tt.file))
		_, _, err := dialTLS(t, s, "db.example", &tls.Config{Certificates: []tls.Certificate{tt.server.tls()}})
		wantErr(t, tt.name, err, tt.want)
	}
}

func TestRevocation(t *testing.T) {
	root := issue(t, nil, "Root", authority)
	namesake := issue(t, nil, "Root", authority)
	intermediate := issue(t, root, "Intermediate", authority)
	noCRLs := issue(t, root, "No CRLs", func(c *x509.Certificate) {
		authority(c)
		c.KeyUsage = x509.KeyUsageCertSign
	})
	server := issue(t, root, "server", nil)
	neighbour := issue(t, root, "neighbour", nil)
	deep := issue(t, intermediate, "deep", nil)
	mute := issue(t, noCRLs, "mute", nil)
	early := signCRL(t, root, &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(certHour)})

	const (
		revoked = "certificate verify failed: certificate revoked: subject "
		noCRL   = "certificate verify failed: no CRL of its issuer (PGSSLCRL, PGSSLCRLDIR): subject "
	)
	for _, tt := range []struct {
		name   string
		crls   string
		server *testCert
		want   string
	}{
		{"nobody revoked", crl(t, root, 1), server, ""},
		{"for ever", crl(t, root, 0), server, ""},
		{"another revoked", crl(t, root, 1, neighbour), server, ""},
		{"revoked", crl(t, root, 1, neighbour, server), server, revoked + `"CN=server"`},
		{"revoked in one of two", crl(t, root, 1) + crl(t, root, 1, server), server, revoked + `"CN=server"`},
		{"revoked in an expired one", crl(t, root, -1, server) + crl(t, root, 1), server, revoked + `"CN=server"`},
		{"expired", crl(t, root, -1), server, `certificate verify failed: CRL of its issuer has expired (PGSSLCRL, PGSSLCRLDIR): subject "CN=server"`},
		{"expired, but there is a newer one", crl(t, root, 1) + crl(t, root, -1), server, ""},
		{"not yet valid", early, server, `CRL of its issuer is not yet valid`},
		{"of another issuer", crl(t, intermediate, 1), server, noCRL + `"CN=server"`},
		{"of an issuer of the same name", crl(t, namesake, 1), server, noCRL + `"CN=server"`},
		{"of an issuer of the same name, which revokes", crl(t, namesake, 1, server) + crl(t, root, 1), server, ""},
		{"intermediate: all good", crl(t, root, 1) + crl(t, intermediate, 1), deep, ""},
		{"intermediate revoked", crl(t, root, 1, intermediate) + crl(t, intermediate, 1), deep, revoked + `"CN=Intermediate"`},
		{"intermediate: server revoked", crl(t, root, 1) + crl(t, intermediate, 1, deep), deep, revoked + `"CN=deep"`},
		{"intermediate without CRL", crl(t, root, 1), deep, noCRL + `"CN=deep"`},
		{"root without CRL", crl(t, intermediate, 1), deep, noCRL + `"CN=Intermediate"`},
		{"root revoked by itself", crl(t, root, 1, root), server, revoked + `"CN=Root"`},
		{"issuer that signs no CRLs", crl(t, root, 1), mute, noCRL + `"CN=mute"`},
	} {
		config := &tls.Config{Certificates: []tls.Certificate{tt.server.tls()}}
		rootCert := "PGSSLROOTCERT=" + tempPEM(t, root.pem())
		path := tempPEM(t, tt.crls)
		for _, crls := range []string{"PGSSLCRL=" + path, "PGSSLCRLDIR=" + filepath.Dir(path)} {
			for _, mode := range []string{"require", "verify-ca"} {
				s := mustLoadTLS(t, "PGSSLMODE="+mode, rootCert, crls)
				_, _, err := dialTLS(t, s, "db.example", config)
				wantErr(t, tt.name+", "+mode, err, tt.want)
			}
		}
	}
}

// Of the two chains through a cross-signed intermediate, one has to be covered by
// CRLs.
func TestRevocationTriesEachChain(t *testing.T) {
	old := issue(t, nil, "Old Root", authority)
	root := issue(t, nil, "Root", authority)
	intermediate := issue(t, old, "Intermediate", authority)
	der, err := x509.CreateCertificate(rand.Reader, intermediate.Certificate, root.Certificate, intermediate.key.Public(), root.key)
	if err != nil {
		t.Fatal(err)
	}
	server := issue(t, intermediate, "server", nil)
	server.sent = append(server.sent, der)
	for _, tt := range []struct{ name, crls, want string }{
		{"both", crl(t, intermediate, 1) + crl(t, old, 1) + crl(t, root, 1), ""},
		{"the new root only", crl(t, intermediate, 1) + crl(t, root, 1), ""},
		{"the old root only", crl(t, intermediate, 1) + crl(t, old, 1), ""},
		{"neither", crl(t, intermediate, 1), "no CRL of its issuer"},
		{"server revoked", crl(t, intermediate, 1, server) + crl(t, old, 1) + crl(t, root, 1), "certificate revoked"},
	} {
		s := mustLoadTLS(t, "PGSSLMODE=verify-ca", "PGSSLROOTCERT="+tempPEM(t, old.pem()+root.pem()), "PGSSLCRL="+tempPEM(t, tt.crls))
		_, _, err := dialTLS(t, s, "db.example", &tls.Config{Certificates: []tls.Certificate{server.tls()}})
		wantErr(t, tt.name, err, tt.want)
	}
}

func TestMatchHost(t *testing.T) {
	cn := func(names ...string) (s pkix.Name) {
		for _, n := range names {
			s.Names = append(s.Names, pkix.AttributeTypeAndValue{Type: []int{2, 5, 4, 3}, Value: n})
		}
		return s
	}
	ips := func(addrs ...string) (l []net.IP) {
		for _, a := range addrs {
			ip := net.ParseIP(a)
			if v4 := ip.To4(); v4 != nil && !strings.Contains(a, ":") {
				ip = v4 // the form in certificates
			}
			l = append(l, ip)
		}
		return l
	}
	names := func(names ...string) *x509.Certificate { return &x509.Certificate{DNSNames: names} }
	for _, tt := range []struct {
		cert *x509.Certificate
		host string
		want bool
	}{
		// Case, and the final dot.
		{names("db.example"), "db.example", true},
		{names("DB.Example"), "db.eXample", true},
		{names("db.example"), "db.example.", true},
		{names("db.example."), "db.example", true},
		{names("db.example."), "db.example.", true},
		{names("db.example"), "db.example..", false},
		{names("db"), "db", true},
		{names("db.example"), "db", false},
		{names("db"), "db.example", false},
		{names("\u212a.example"), "k.example", false}, // the Kelvin sign folds to k
		{names("db.example\x00.evil"), "db.example", false},
		{names(""), "", false},
		{names("."), "", false},

		// A wildcard stands for one label.
		{names("*.example"), "db.example", true},
		{names("*.example"), "db.EXAMPLE.", true},
		{names("*.example"), "example", false},
		{names("*.example"), ".example", false},
		{names("*.example"), "a.db.example", false},
		{names("*.db.example"), "db.example", false},
		{names("d*.example"), "db.example", false},
		{names("*b.example"), "db.example", false},
		{names("*"), "db", false},
		{names("*."), "db", false},
		{names("*."), "db.", false},
		{names("db.*"), "db.example", false},
		{names("*.*"), "db.example", false},
		{names("*.0.0.1"), "127.0.0.1", false},

		// Addresses. libpq compares dNSName entries with them too.
		{&x509.Certificate{IPAddresses: ips("127.0.0.1")}, "127.0.0.1", true},
		{&x509.Certificate{IPAddresses: ips("127.0.0.1", "127.0.0.2")}, "127.0.0.2", true},
		{&x509.Certificate{IPAddresses: ips("127.0.0.1")}, "127.0.0.3", false},
		{&x509.Certificate{IPAddresses: ips("::1")}, "::1", true},
		{&x509.Certificate{IPAddresses: ips("::1")}, "0:0:0:0:0:0:0:1", true},
		{&x509.Certificate{IPAddresses: ips("fe80::1")}, "fe80::1%eth0", true},
		{&x509.Certificate{IPAddresses: ips("127.0.0.1")}, "::ffff:127.0.0.1", false},
		{&x509.Certificate{IPAddresses: ips("::ffff:127.0.0.1")}, "127.0.0.1", false},
		{&x509.Certificate{IPAddresses: ips("::ffff:127.0.0.1")}, "::ffff:127.0.0.1", true},
		{&x509.Certificate{IPAddresses: ips("127.0.0.1")}, "db.example", false},
		{names("127.0.0.1"), "127.0.0.1", true},

		// The common name counts if there is no entry of the host's kind.
		{&x509.Certificate{Subject: cn("db.example")}, "db.example", true},
		{&x509.Certificate{Subject: cn("DB.example.")}, "db.example", true},
		{&x509.Certificate{Subject: cn("*.example")}, "db.example", true},
		{&x509.Certificate{Subject: cn("other.example")}, "db.example", false},
		{&x509.Certificate{Subject: cn("db.example"), DNSNames: []string{"other.example"}}, "db.example", false},
		{&x509.Certificate{Subject: cn("db.example"), IPAddresses: ips("127.0.0.1")}, "db.example", true},
		{&x509.Certificate{Subject: cn("127.0.0.1")}, "127.0.0.1", true},
		{&x509.Certificate{Subject: cn("127.0.0.1"), DNSNames: []string{"db.example"}}, "127.0.0.1", true},
		{&x509.Certificate{Subject: cn("127.0.0.1"), IPAddresses: ips("127.0.0.2")}, "127.0.0.1", false},
		{&x509.Certificate{Subject: cn("::1")}, "::1", true},
		{&x509.Certificate{Subject: cn("a.example", "b.example")}, "a.example", true}, // the first
		{&x509.Certificate{Subject: cn("a.example", "b.example")}, "b.example", false},
		{&x509.Certificate{}, "db.example", false},
	} {
		err := matchHost(tt.cert, tt.host, true)
		if (err == nil) != tt.want {
			t.Errorf("matchHost(names %q, IPs %v, subject %v, %q) = %v; want match %t", tt.cert.DNSNames, tt.cert.IPAddresses, tt.cert.Subject.Names, tt.host, err, tt.want)
		}
	}
	if err := matchHost(&x509.Certificate{Subject: cn("db.example")}, "db.example", false); err == nil {
		t.Error("matchHost without useCN matches the common name")
	}
}

func TestClientCertificate(t *testing.T) {
	root := issue(t, nil, "Root", authority)
	clientRoot := issue(t, nil, "Client Root", authority)
	between := issue(t, clientRoot, "Client Intermediate", authority)
	good := issue(t, between, "pg_status", nil)
	alien := issue(t, root, "pg_status", nil)
	old := issue(t, clientRoot, "pg_status", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })

	pool := x509.NewCertPool()
	pool.AddCert(clientRoot.Certificate)
	files := func(c *testCert) []string {
		return []string{"PGSSLCERT=" + tempPEM(t, c.pem()), "PGSSLKEY=" + tempPEM(t, c.keyPEM(t))}
	}
	for _, tt := range []struct {
		name     string
		auth     tls.ClientAuthType
		env      []string
		presents int // certificates that the server sees
		want     string
		want12   string // with TLS 1.2, where the alert comes within the handshake
	}{
		{"not asked, none", tls.NoClientCert, nil, 0, "", ""},
		{"not asked, one", tls.NoClientCert, files(good), 0, "", ""},
		{"not asked, but we insist", tls.NoClientCert, append(files(good), "PGSSLCERTMODE=require"), 0,
			"server did not request a client certificate (PGSSLCERTMODE=require)", "server did not request a client certificate (PGSSLCERTMODE=require)"},
		{"asked, none", tls.VerifyClientCertIfGiven, nil, 0, "", ""},
		{"asked, one, with its intermediate", tls.VerifyClientCertIfGiven, files(good), 2, "", ""},
		{"asked, and we insist", tls.VerifyClientCertIfGiven, append(files(good), "PGSSLCERTMODE=require"), 2, "", ""},
		{"asked, one that we are not to send", tls.VerifyClientCertIfGiven, append(files(good), "PGSSLCERTMODE=disable"), 0, "", ""},
		{"asked with a hint at other authorities", tls.RequestClientCert, files(alien), 1, "", ""},
		{"required, good", tls.RequireAndVerifyClientCert, files(good), 2, "", ""},
		{"required, none", tls.RequireAndVerifyClientCert, nil, 0,
			"server requires a client certificate (PGSSLCERT, PGSSLKEY): ", "server asked for a client certificate and got none (PGSSLCERT, PGSSLKEY): "},
		{"required, of an unknown authority", tls.RequireAndVerifyClientCert, files(alien), 1,
			"server refused the client certificate (PGSSLCERT): remote error: tls: unknown certificate authority",
			"server refused the client certificate (PGSSLCERT): remote error: tls: unknown certificate authority"},
		{"required, expired", tls.RequireAndVerifyClientCert, files(old), 1,
			"server refused the client certificate (PGSSLCERT): remote error: tls: expired certificate",
			"server refused the client certificate (PGSSLCERT): remote error: tls: expired certificate"},
	} {
		for version, want := range map[uint16]string{tls.VersionTLS12: tt.want12, tls.VersionTLS13: tt.want} {
			s := mustLoadTLS(t, append(tt.env, "PGSSLMODE=require")...)
			_, server, err := dialTLS(t, s, "db.example", &tls.Config{
				Certificates: []tls.Certificate{issue(t, root, "db.example", nil).tls()},
				ClientAuth:   tt.auth,
				ClientCAs:    pool,
				MaxVersion:   version,
			})
			wantErr(t, tt.name+", "+tls.VersionName(version), err, want)
			if n := len(server.PeerCertificates); want == "" && n != tt.presents {
				t.Errorf("%s: the server sees %d certificates; want %d", tt.name, n, tt.presents)
			}
		}
	}
}

func TestHandshakeOffers(t *testing.T) {
	cert := issue(t, nil, "db.example", nil).tls()
	for _, tt := range []struct {
		host, env, sni string
	}{
		{"db.example", "", "db.example"},
		{"db.example", "PGSSLSNI=1", "db.example"},
		{"db.example", "PGSSLSNI=0", ""},
		{"db.example.", "", "db.example"},
		{"127.0.0.1", "", ""},
		{"::1", "", ""},
		{"fe80::1%eth0", "", ""},
	} {
		var hello *tls.ClientHelloInfo
		_, server, err := dialTLS(t, mustLoadTLS(t, tt.env), tt.host, &tls.Config{
			Certificates: []tls.Certificate{cert},
			NextProtos:   []string{"h2", "postgresql"},
			GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
				hello = h
				return nil, nil
			},
		})
		if err != nil {
			t.Errorf("%q, %s: %v", tt.host, tt.env, err)
			continue
		}
		if hello.ServerName != tt.sni {
			t.Errorf("%q, %s: SNI is %q; want %q", tt.host, tt.env, hello.ServerName, tt.sni)
		}
		if server.NegotiatedProtocol != "postgresql" {
			t.Errorf("%q: ALPN is %q; want postgresql", tt.host, server.NegotiatedProtocol)
		}
		// session_ticket and psk_key_exchange_modes ask for tickets.
		if slices.Contains(hello.Extensions, 35) || slices.Contains(hello.Extensions, 45) {
			t.Errorf("%q: extensions %v ask for session tickets", tt.host, hello.Extensions)
		}
	}
}

func TestProtocolVersions(t *testing.T) {
	cert := issue(t, nil, "db.example", nil).tls()
	for _, tt := range []struct {
		min, max string // ours
		only     uint16 // the server's
		want     string
	}{
		{"", "", tls.VersionTLS13, ""},
		{"", "", tls.VersionTLS12, ""},
		{"", "", tls.VersionTLS11, "server may support no TLS version from TLSv1.2 to TLSv1.3: "},
		{"TLSv1", "", tls.VersionTLS10, ""},
		{"tlsv1.1", "", tls.VersionTLS11, ""},
		{"TLSv1.3", "", tls.VersionTLS12, "server may support no TLS version from TLSv1.3 to TLSv1.3: "},
		{"", "TLSv1.2", tls.VersionTLS13, "server may support no TLS version from TLSv1.2 to TLSv1.2: "},
		{"TLSv1.2", "TLSv1.2", tls.VersionTLS12, ""},
	} {
		s := mustLoadTLS(t, "PGSSLMINPROTOCOLVERSION="+tt.min, "PGSSLMAXPROTOCOLVERSION="+tt.max)
		client, _, err := dialTLS(t, s, "db.example", &tls.Config{
			Certificates: []tls.Certificate{cert}, MinVersion: tt.only, MaxVersion: tt.only,
		})
		wantErr(t, tt.min+" to "+tt.max+", server "+tls.VersionName(tt.only), err, tt.want)
		if err == nil && client.Version != tt.only {
			t.Errorf("version is %s; want %s", tls.VersionName(client.Version), tls.VersionName(tt.only))
		}
	}
}

func TestDirect(t *testing.T) {
	cert := issue(t, nil, "db.example", nil).tls()
	direct := mustLoadTLS(t, "PGSSLMODE=require", "PGSSLNEGOTIATION=direct")
	negotiated := mustLoadTLS(t, "PGSSLMODE=require", "PGSSLNEGOTIATION=postgres")
	if !direct.direct || negotiated.direct {
		t.Errorf("direct = %t and %t; want true and false", direct.direct, negotiated.direct)
	}
	for _, tt := range []struct {
		name   string
		s      *tlsSettings
		protos []string
		want   string
	}{
		{"direct, with ALPN", direct, []string{"postgresql"}, ""},
		{"direct, without", direct, nil, "direct TLS connection was established without ALPN"},
		{"negotiated, with ALPN", negotiated, []string{"postgresql"}, ""},
		{"negotiated, without", negotiated, nil, ""},
		{"direct, a web server", direct, []string{"h2"}, "TLS handshake: remote error: tls: no application protocol"},
	} {
		_, _, err := dialTLS(t, tt.s, "db.example", &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: tt.protos})
		wantErr(t, tt.name, err, tt.want)
	}
}

// TestHandshakeWithoutTLS has servers that do something else.
func TestHandshakeWithoutTLS(t *testing.T) {
	for _, tt := range []struct {
		name, env, answer, want string
	}{
		{"closes", "", "", "TLS handshake: EOF"},
		{"closes, direct", "PGSSLNEGOTIATION=direct", "", "TLS handshake (PGSSLNEGOTIATION=direct needs PostgreSQL 17 or later): EOF"},
		{"speaks plainly", "", "E\x00\x00\x00\x10SFATAL\x00", "TLS handshake: tls: first record does not look like a TLS handshake"},
	} {
		near, far := tcpPair(t)
		go func() {
			far.Read(make([]byte, 16384)) // all of the client's hello
			far.Write([]byte(tt.answer))
			far.Close()
		}()
		_, err := mustLoadTLS(t, "PGSSLMODE=require", tt.env).handshake(near, "db.example")
		wantErr(t, tt.name, err, tt.want)
		near.Close()
	}
}

// The caller tells a timeout from other errors.
func TestHandshakeTimeout(t *testing.T) {
	near, far := tcpPair(t)
	defer far.Close()
	defer near.Close()
	near.SetDeadline(time.Now())
	_, err := mustLoadTLS(t).handshake(near, "db.example")
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("handshake = %v; want os.ErrDeadlineExceeded", err)
	}
}

func TestLoadTLSMode(t *testing.T) {
	root := tempPEM(t, issue(t, nil, "Root", authority).pem())
	client := issue(t, nil, "pg_status", nil)
	cert, key := "PGSSLCERT="+tempPEM(t, client.pem()), "PGSSLKEY="+tempPEM(t, client.keyPEM(t))
	for _, tt := range []struct {
		env  []string
		want sslMode
	}{
		{nil, sslPrefer},
		{[]string{"PGSSLMODE="}, sslPrefer},
		{[]string{"PGSSLMODE=disable"}, sslDisable},
		{[]string{"PGSSLMODE=allow"}, sslAllow},
		{[]string{"PGSSLMODE=prefer"}, sslPrefer},
		{[]string{"PGSSLMODE=require"}, sslRequire},
		{[]string{"PGSSLMODE=verify-ca", "PGSSLROOTCERT=" + root}, sslVerifyCA},
		{[]string{"PGSSLMODE=verify-full", "PGSSLROOTCERT=" + root}, sslVerifyFull},
		{[]string{"PGSSLROOTCERT=" + root}, sslPrefer},
		{[]string{"PGSSLCOMPRESSION=1", "PGREQUIRESSL=0"}, sslPrefer},
		{[]string{"PGREQUIRESSL=1"}, sslRequire},
		{[]string{"PGREQUIRESSL=1", "PGSSLMODE=disable"}, sslDisable},
		// A certificate that must be asked for needs TLS.
		{[]string{cert, key, "PGSSLCERTMODE=require"}, sslRequire},
		{[]string{cert, key, "PGSSLCERTMODE=require", "PGSSLMODE=allow"}, sslRequire},
		{[]string{cert, key, "PGSSLCERTMODE=require", "PGSSLMODE=verify-ca", "PGSSLROOTCERT=" + root}, sslVerifyCA},
		// No file is looked at.
		{[]string{"PGSSLMODE=disable", "PGSSLROOTCERT=/nowhere", "PGSSLCRL=/nowhere", "PGSSLCERT=/nowhere"}, sslDisable},
	} {
		if s := mustLoadTLS(t, tt.env...); s.mode != tt.want {
			t.Errorf("loadTLS(%q).mode = %s; want %s", tt.env, s.mode, tt.want)
		}
	}
}

// TestSystemRoots does not look at which they are: the machine may have none.
func TestSystemRoots(t *testing.T) {
	getenv := tlsTestEnv(t, "PGSSLROOTCERT=system")
	s, errs := loadTLS(getenv)
	if s.mode != sslVerifyFull {
		t.Errorf("mode = %s; want verify-full", s.mode)
	}
	if (s.roots == nil) == (errs == nil) {
		t.Errorf("roots = %v, errors = %v; want one of them", s.roots, errs)
	}
	for _, err := range errs {
		wantErr(t, "loadTLS", err, `PGSSLROOTCERT="system": must be a file of root certificates, as the system has none`)
	}
}

// TestDefaultFiles puts files into ~/.postgresql.
func TestDefaultFiles(t *testing.T) {
	root := issue(t, nil, "Root", authority)
	client := issue(t, root, "pg_status", nil)
	server := issue(t, root, "db.example", nil)
	home := t.TempDir()
	dir := filepath.Join(home, ".postgresql")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	put := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load := func(pairs ...string) (*tlsSettings, []error) {
		return loadTLS(tlsTestEnv(t, append(pairs, "HOME="+home)...))
	}
	dial := func(s *tlsSettings) (sent int, err error) {
		t.Helper()
		_, state, err := dialTLS(t, s, "db.example", &tls.Config{
			Certificates: []tls.Certificate{server.tls()}, ClientAuth: tls.RequestClientCert,
		})
		return len(state.PeerCertificates), err
	}

	put("root.crt", root.pem())
	put("postgresql.crt", client.pem())
	put("postgresql.key", client.keyPEM(t))
	s, errs := load("PGSSLMODE=verify-full")
	if errs != nil {
		t.Fatal(errs)
	}
	// What has been read stays.
	if err := os.Rename(dir, dir+"-gone"); err != nil {
		t.Fatal(err)
	}
	if sent, err := dial(s); err != nil || sent != 1 {
		t.Errorf("handshake = %v with %d client certificates; want nil with 1", err, sent)
	}
	if err := os.Rename(dir+"-gone", dir); err != nil {
		t.Fatal(err)
	}

	put("root.crl", crl(t, root, 1, server))
	s, errs = load()
	if errs != nil {
		t.Fatal(errs)
	}
	_, err := dial(s)
	wantErr(t, "handshake with root.crl", err, "certificate revoked")

	// Explicit files take the place of the defaults.
	s, errs = load("PGSSLCRL=" + tempPEM(t, crl(t, root, 1)))
	if errs != nil {
		t.Fatal(errs)
	}
	_, err = dial(s)
	wantErr(t, "handshake with PGSSLCRL", err, "")

	put("root.crl", "junk")
	_, errs = load()
	wantErr(t, "loadTLS", errors.Join(errs...), "PGSSLCRL: "+dir+"/root.crl must hold a complete certificate revocation list, in PEM")
	if err := os.Remove(filepath.Join(dir, "postgresql.key")); err != nil {
		t.Fatal(err)
	}
	_, errs = load()
	wantErr(t, "loadTLS", errors.Join(errs...), "PGSSLKEY is not set: must be the private key of "+dir+"/postgresql.crt")
}

func TestLoadTLSErrors(t *testing.T) {
	root := issue(t, nil, "Root", authority)
	intermediate := issue(t, root, "Intermediate", authority)
	client, other := issue(t, root, "pg_status", nil), issue(t, root, "other", nil)
	rootFile, clientFile, clientKey := tempPEM(t, root.pem()), tempPEM(t, client.pem()), tempPEM(t, client.keyPEM(t))
	missing := filepath.Join(t.TempDir(), "missing")
	emptyDir := t.TempDir()
	junk := tempPEM(t, "junk\n")
	badCRL := tempPEM(t, "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n")
	delta := tempPEM(t, signCRL(t, root, &x509.RevocationList{
		Number: big.NewInt(2), ThisUpdate: time.Now(),
		ExtraExtensions: []pkix.Extension{{Id: []int{2, 5, 29, 27}, Critical: true, Value: []byte{2, 1, 1}}},
	}))
	encrypted := tempPEM(t, strings.ReplaceAll(client.keyPEM(t), " PRIVATE", " ENCRYPTED PRIVATE"))
	encryptedOld := tempPEM(t, strings.Replace(client.keyPEM(t), "KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\n", 1))
	keyLine := strings.Split(client.keyPEM(t), "\n")[1]

	for _, tt := range []struct {
		env  string // separated by spaces
		want string // the whole error, or its beginning
	}{
		{"PGSSLMODE=on", `PGSSLMODE="on": must be one of disable, allow, prefer, require, verify-ca, verify-full`},
		{"PGSSLMODE=Require", `PGSSLMODE="Require": must be one of `},
		{"PGSSLSNI=yes", `PGSSLSNI="yes": must be one of 0, 1`},
		{"PGSSLCERTMODE=maybe", `PGSSLCERTMODE="maybe": must be one of disable, allow, require`},
		{"PGSSLNEGOTIATION=tls", `PGSSLNEGOTIATION="tls": must be one of postgres, direct`},
		{"PGSSLNEGOTIATION=direct", `PGSSLMODE is prefer: must be require, verify-ca or verify-full with PGSSLNEGOTIATION=direct`},
		{"PGSSLNEGOTIATION=direct PGSSLMODE=disable", `PGSSLMODE is disable: must be require, verify-ca or verify-full with PGSSLNEGOTIATION=direct`},
		{"PGSSLMINPROTOCOLVERSION=1.2", `PGSSLMINPROTOCOLVERSION="1.2": must be one of TLSv1, TLSv1.1, TLSv1.2, TLSv1.3`},
		{"PGSSLMAXPROTOCOLVERSION=SSLv3", `PGSSLMAXPROTOCOLVERSION="SSLv3": must be one of TLSv1, TLSv1.1, TLSv1.2, TLSv1.3`},
		{"PGSSLMINPROTOCOLVERSION=TLSv1.3 PGSSLMAXPROTOCOLVERSION=TLSv1.2", `PGSSLMAXPROTOCOLVERSION is TLSv1.2: must not be below PGSSLMINPROTOCOLVERSION, which is TLSv1.3`},
		{"PGSSLMAXPROTOCOLVERSION=TLSv1.1", `PGSSLMAXPROTOCOLVERSION is TLSv1.1: must not be below PGSSLMINPROTOCOLVERSION, which is TLSv1.2`},

		{"PGSSLMODE=verify-ca", `PGSSLROOTCERT is not set: must be a file of root certificates with PGSSLMODE=verify-ca`},
		{"PGSSLMODE=verify-full", `PGSSLROOTCERT is not set: must be a file of root certificates with PGSSLMODE=verify-full`},
		{"PGSSLMODE=verify-full PGSSLROOTCERT=" + missing, `PGSSLROOTCERT: must be a readable file: open ` + missing},
		{"PGSSLROOTCERT=" + missing, `PGSSLROOTCERT: must be a readable file: open ` + missing},
		{"PGSSLROOTCERT=" + junk, `PGSSLROOTCERT: ` + junk + ` must hold the self-signed certificate of a root authority, in PEM`},
		{"PGSSLROOTCERT=" + tempPEM(t, intermediate.pem()), `PGSSLROOTCERT: `},
		{"PGSSLROOTCERT=system PGSSLMODE=verify-ca", `PGSSLMODE is verify-ca: must be verify-full with PGSSLROOTCERT=system`},
		{"PGSSLROOTCERT=system PGSSLMODE=disable", `PGSSLMODE is disable: must be verify-full with PGSSLROOTCERT=system`},

		{"PGSSLCRL=" + junk, `PGSSLROOTCERT is not set: must be, as it verifies what PGSSLCRL and PGSSLCRLDIR name`},
		{"PGSSLCRLDIR=" + emptyDir, `PGSSLROOTCERT is not set: must be, as it verifies what PGSSLCRL and PGSSLCRLDIR name`},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRL=" + missing, `PGSSLCRL: must be readable certificate revocation lists: open ` + missing},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRL=" + junk, `PGSSLCRL: ` + junk + ` must hold a complete certificate revocation list, in PEM`},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRL=" + badCRL, `PGSSLCRL: must be readable certificate revocation lists: ` + badCRL + `: x509: `},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRL=" + delta, `PGSSLCRL: ` + delta + ` must hold a complete certificate revocation list, in PEM`},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRLDIR=" + missing, `PGSSLCRLDIR: must be readable certificate revocation lists: open ` + missing},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRLDIR=" + emptyDir, `PGSSLCRLDIR: ` + emptyDir + ` must hold a complete certificate revocation list, in PEM`},
		{"PGSSLROOTCERT=" + rootFile + " PGSSLCRLDIR=" + filepath.Dir(badCRL), `PGSSLCRLDIR: must be readable certificate revocation lists: ` + badCRL + `: x509: `},

		{"PGSSLCERT=" + missing, `PGSSLKEY is not set: must be the private key of ` + missing},
		{"PGSSLCERT=" + missing + " PGSSLKEY=" + clientKey, `PGSSLCERT: must be a readable file: open ` + missing},
		{"PGSSLCERT=" + clientFile + " PGSSLKEY=" + missing, `PGSSLKEY: stat ` + missing},
		{"PGSSLCERT=" + clientFile + " PGSSLKEY=" + emptyDir, `PGSSLKEY: private key ` + emptyDir + ` must be a regular file`},
		{"PGSSLCERT=" + clientFile + " PGSSLKEY=" + encrypted, `PGSSLKEY: private key ` + encrypted + ` is encrypted`},
		{"PGSSLCERT=" + clientFile + " PGSSLKEY=" + encryptedOld, `PGSSLKEY: private key ` + encryptedOld + ` is encrypted`},
		{"PGSSLCERT=" + clientFile + " PGSSLKEY=" + junk, `PGSSLCERT: ` + clientFile + ` must be a certificate in PEM, and ` + junk + ` its private key: tls: `},
		{"PGSSLCERT=" + clientFile + " PGSSLKEY=" + tempPEM(t, other.keyPEM(t)), `PGSSLCERT: ` + clientFile + ` must be a certificate in PEM, and `},
		{"PGSSLCERT=" + clientKey + " PGSSLKEY=" + clientFile, `PGSSLCERT: ` + clientKey + ` must be a certificate in PEM, and `},
		{"PGSSLCERT=" + clientKey + " PGSSLKEY=" + clientKey, `PGSSLCERT: ` + clientKey + ` must be a certificate in PEM, and `},
		{"PGSSLCERTMODE=require", `PGSSLCERT is not set: must be a client certificate with PGSSLCERTMODE=require`},
		{"PGSSLCERTMODE=require PGSSLMODE=disable", `PGSSLCERTMODE is require: must be disable or allow with PGSSLMODE=disable`},
		{"PGSSLCERTMODE=disable PGSSLCERT=" + missing, ""},
	} {
		_, errs := loadTLS(tlsTestEnv(t, strings.Fields(tt.env)...))
		if tt.want == "" {
			if errs != nil {
				t.Errorf("loadTLS(%s) = %v; want none", tt.env, errs)
			}
			continue
		}
		if len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), tt.want) {
			t.Errorf("loadTLS(%s) = %v; want one, %q", tt.env, errs, tt.want)
		}
		for _, err := range errs {
			if strings.Contains(err.Error(), keyLine) || strings.Contains(err.Error(), "junk\n") {
				t.Errorf("loadTLS(%s) shows what a file holds: %v", tt.env, err)
			}
		}
	}
}

// All that is wrong is reported at once.
func TestLoadTLSReportsAll(t *testing.T) {
	_, errs := loadTLS(tlsTestEnv(t, "PGSSLMODE=on", "PGSSLSNI=on", "PGSSLROOTCERT=/nowhere/1", "PGSSLCRL=/nowhere/2", "PGSSLCERT=/nowhere/3", "PGSSLKEY=/nowhere/4"))
	var names []string
	for _, err := range errs {
		name, _, _ := strings.Cut(err.Error(), ":")
		names = append(names, name)
	}
	want := []string{`PGSSLMODE="on"`, `PGSSLSNI="on"`, "PGSSLROOTCERT", "PGSSLCRL", "PGSSLCERT"}
	if !slices.Equal(names, want) {
		t.Errorf("errors are about %q; want %q", names, want)
	}
}

func TestKeyPermissions(t *testing.T) {
	const refused = "has group or world access: must have mode 0600 or less, or 0640 or less if root owns it"
	client := issue(t, nil, "pg_status", nil)
	certFile := tempPEM(t, client.pem())
	der, err := x509.MarshalPKCS8PrivateKey(client.key)
	if err != nil {
		t.Fatal(err)
	}
	sec1, err := x509.MarshalECPrivateKey(client.key.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{client.keyPEM(t), string(der), string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: sec1}))} {
		for _, tt := range []struct {
			mode        os.FileMode
			ours, roots string // the error when we own the file, and when root does
		}{
			{0o600, "", ""},
			{0o400, "", ""},
			{0o640, refused, ""},
			{0o440, refused, ""},
			{0o620, refused, refused},
			{0o610, refused, refused},
			{0o604, refused, refused},
			{0o644, refused, refused},
			{0o602, refused, refused},
			{0o777, refused, refused},
		} {
			path := tempPEM(t, key)
			check := func(who, want string) {
				t.Helper()
				if err := os.Chmod(path, tt.mode); err != nil {
					t.Fatal(err)
				}
				_, errs := loadTLS(tlsTestEnv(t, "PGSSLCERT="+certFile, "PGSSLKEY="+path))
				wantErr(t, "loadTLS with a key of mode "+tt.mode.String()+" owned by "+who, errors.Join(errs...), want)
			}
			if os.Getuid() != 0 {
				check("us", tt.ours)
				continue
			}
			check("root", tt.roots)
			if err := os.Chown(path, 65534, 65534); err != nil {
				t.Fatal(err)
			}
			check("another", tt.ours)
		}
	}
}
