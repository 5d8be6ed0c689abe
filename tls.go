package main

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// sslMode is libpq's sslmode: whether a connection is encrypted and what of the
// server is verified.
type sslMode string

const (
	sslDisable    sslMode = "disable"
	sslAllow      sslMode = "allow"
	sslPrefer     sslMode = "prefer"
	sslRequire    sslMode = "require"
	sslVerifyCA   sslMode = "verify-ca"
	sslVerifyFull sslMode = "verify-full"
)

// tlsSettings is how connections to PostgreSQL are secured, read once at the
// start. It never changes: a handshake reads no file, and a renewed certificate
// or CRL counts from the next loadTLS. The rules are those of libpq's
// fe-secure-openssl.c and fe-secure-common.c, except where a comment differs.
type tlsSettings struct {
	mode     sslMode
	direct   bool   // TLS from the first byte on (PGSSLNEGOTIATION=direct)
	sni      bool   // the server is told the name we connect to
	min, max uint16 // TLS versions

	roots   *x509.CertPool         // nil: the server's certificate is not verified
	bundled *x509.CertPool         // certificates of the root file that are no roots
	crls    []*x509.RevocationList // none: revocation is not checked

	cert    tls.Certificate // the client's; empty: there is none
	mustAsk bool            // the server, for it (PGSSLCERTMODE=require)
}

// A certError is our refusal of the server's certificate.
type certError string

func (e certError) Error() string { return string(e) }

// handshake makes conn, on which the server has agreed to TLS, a TLS connection
// to host (a name or IP), verified as the mode demands. The caller has set
// deadlines on conn and closes conn on error.
func (s *tlsSettings) handshake(conn net.Conn, host string) (*tls.Conn, error) {
	asked := false
	config := &tls.Config{
		MinVersion:             s.min,
		MaxVersion:             s.max,
		NextProtos:             []string{"postgresql"}, // with either negotiation, as libpq 17
		SessionTicketsDisabled: true,
		// crypto/tls verifies by the rules of the web: always the name too, and
		// never the common name.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			return s.verify(cs.PeerCertificates, host, time.Now())
		},
		// Config.Certificates would send nothing when the server's list of
		// authorities lacks the issuer. libpq ignores that list.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			asked = true
			return &s.cert, nil
		},
	}
	if s.sni {
		config.ServerName = host // crypto/tls leaves out an IP, and a final dot
	}
	c := tls.Client(conn, config)
	if err := c.Handshake(); err != nil {
		if _, ok := errors.AsType[certError](err); ok {
			return nil, err
		}
		if asked && len(s.cert.Certificate) == 0 && tlsAlert(err) == "handshake failure" {
			// TLS 1.2 has no alert "certificate required".
			return nil, fmt.Errorf("server asked for a client certificate and got none (PGSSLCERT, PGSSLKEY): %w", err)
		}
		if s.direct && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) {
			return nil, fmt.Errorf("TLS handshake (PGSSLNEGOTIATION=direct needs PostgreSQL 17 or later): %w", err)
		}
		return nil, fmt.Errorf("TLS handshake: %w", s.explain(err))
	}
	if s.direct && c.ConnectionState().NegotiatedProtocol != "postgresql" {
		return nil, errors.New("direct TLS connection was established without ALPN: the server does not say that it is PostgreSQL (PGSSLNEGOTIATION)")
	}
	if s.mustAsk && !asked {
		return nil, errors.New("server did not request a client certificate (PGSSLCERTMODE=require)")
	}
	return c, nil
}

// explain returns err in an operator's words when it is a TLS alert about
// certificates or versions. In TLS 1.3 an alert about the client's certificate
// comes after the handshake: the first read of the session fails with it.
func (s *tlsSettings) explain(err error) error {
	switch alert := tlsAlert(err); {
	case alert == "certificate required":
		return fmt.Errorf("server requires a client certificate (PGSSLCERT, PGSSLKEY): %w", err)
	case strings.Contains(alert, "certificate"):
		return fmt.Errorf("server refused the client certificate (PGSSLCERT): %w", err)
	case strings.Contains(err.Error(), "protocol version"):
		return fmt.Errorf("server may support no TLS version from %s to %s: %w", tlsVersion(s.min), tlsVersion(s.max), err)
	}
	return err
}

// tlsAlert returns the text of the alert with which the server ended the session,
// or "". Its type is private to crypto/tls.
func tlsAlert(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" {
		return strings.TrimPrefix(op.Err.Error(), "tls: ")
	}
	return ""
}

// verify checks the certificates a server has sent, its own first: the chain in
// every mode, if there are roots to check it with, the name with verify-full. Its
// error is a certError.
func (s *tlsSettings) verify(sent []*x509.Certificate, host string, now time.Time) error {
	if s.roots == nil {
		return nil
	}
	leaf, intermediates := sent[0], s.bundled.Clone()
	for _, c := range sent[1:] {
		intermediates.AddCert(c)
	}
	chains, err := leaf.Verify(x509.VerifyOptions{Roots: s.roots, Intermediates: intermediates, CurrentTime: now})
	if err != nil {
		culprit := leaf
		if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
			culprit = e.Cert
		} else if e, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
			culprit = e.Cert
		}
		return verifyFailed(culprit, strings.TrimPrefix(err.Error(), "x509: "))
	}
	if len(s.crls) > 0 {
		// A chain passes only if CRLs cover all of it, so any that passes will do.
		chains = slices.DeleteFunc(chains, func(chain []*x509.Certificate) bool {
			e := s.checkRevoked(chain, now)
			err = cmp.Or(err, e)
			return e != nil
		})
		if len(chains) == 0 {
			return err
		}
	}
	if s.mode == sslVerifyFull {
		return matchHost(leaf, host, slices.ContainsFunc(chains, unconstrained))
	}
	return nil
}

func verifyFailed(c *x509.Certificate, reason string) error {
	return certError(fmt.Sprintf("certificate verify failed: %s: subject %q, issuer %q", reason, c.Subject, c.Issuer))
}

// checkRevoked looks each certificate of chain up in the CRLs of its issuer. As
// with OpenSSL's X509_V_FLAG_CRL_CHECK_ALL, which libpq sets once it has a CRL,
// there has to be one that the issuer has signed and that is current, the root's
// own too. A CRL that has expired still tells what is revoked; OpenSSL looks at
// one CRL of an issuer only.
func (s *tlsSettings) checkRevoked(chain []*x509.Certificate, now time.Time) error {
	for i, c := range chain {
		issuer := chain[min(i+1, len(chain)-1)]
		current, problem := false, "no CRL of its issuer"
		for _, crl := range s.crls {
			if !bytes.Equal(crl.RawIssuer, issuer.RawSubject) || crl.CheckSignatureFrom(issuer) != nil {
				continue
			}
			for _, entry := range crl.RevokedCertificateEntries {
				if entry.SerialNumber.Cmp(c.SerialNumber) == 0 {
					return verifyFailed(c, "certificate revoked")
				}
			}
			switch {
			case now.Before(crl.ThisUpdate):
				problem = "CRL of its issuer is not yet valid"
			case !crl.NextUpdate.IsZero() && now.After(crl.NextUpdate):
				problem = "CRL of its issuer has expired"
			default:
				current = true
			}
		}
		if !current {
			return verifyFailed(c, problem+" (PGSSLCRL, PGSSLCRLDIR)")
		}
	}
	return nil
}

// matchHost checks that the certificate is for host: one of its DNS names, for an
// IP one of its addresses too, or, if it has none of the host's own kind and
// useCN, its first common name. Its error is a certError.
func matchHost(c *x509.Certificate, host string, useCN bool) error {
	ip, err := netip.ParseAddr(host)
	ip, isIP := ip.WithZone(""), err == nil
	names := slices.Clone(c.DNSNames)
	if useCN && (isIP && len(c.IPAddresses) == 0 || !isIP && len(c.DNSNames) == 0) {
		cn := slices.IndexFunc(c.Subject.Names, func(a pkix.AttributeTypeAndValue) bool {
			return a.Type.Equal(asn1.ObjectIdentifier{2, 5, 4, 3})
		})
		if cn >= 0 {
			names = append(names, fmt.Sprint(c.Subject.Names[cn].Value))
		}
	}
	if slices.ContainsFunc(names, func(name string) bool { return matchName(name, host, isIP) }) {
		return nil
	}
	for _, b := range c.IPAddresses {
		addr, _ := netip.AddrFromSlice(b)
		if isIP && addr == ip {
			return nil
		}
		names = append(names, addr.String())
	}
	return certError(fmt.Sprintf("server certificate for %q does not match host name %q", strings.Join(names, ", "), host))
}

// matchName reports whether a name of a certificate, whose first label may be a
// wildcard, is host. A final dot makes no difference, here unlike in libpq.
func matchName(name, host string, isIP bool) bool {
	name, host = strings.TrimSuffix(name, "."), strings.TrimSuffix(host, ".")
	if suffix, ok := strings.CutPrefix(name, "*."); ok && !isIP {
		label, rest, _ := strings.Cut(host, ".")
		name, host = suffix, rest
		if label == "" {
			return false
		}
	}
	// The two other characters that fold to ASCII letters are longer in UTF-8.
	return host != "" && len(name) == len(host) && strings.EqualFold(name, host)
}

// unconstrained reports whether no authority in chain is limited to certain
// names. crypto/x509 does not apply the limits to a common name.
func unconstrained(chain []*x509.Certificate) bool {
	return !slices.ContainsFunc(chain, func(c *x509.Certificate) bool {
		return len(c.PermittedDNSDomains)+len(c.ExcludedDNSDomains)+len(c.PermittedIPRanges)+len(c.ExcludedIPRanges) > 0
	})
}

// loadTLS reads libpq's PGSSL* variables and the files they name; each error
// names the variable and what would be right. PGSSLMODE=disable reads no file.
func loadTLS(getenv func(string) string) (*tlsSettings, []error) {
	e := &tlsEnv{getenv: getenv}
	mode, system := sslPrefer, getenv("PGSSLROOTCERT") == "system"
	switch {
	case system:
		mode = sslVerifyFull
	case strings.HasPrefix(getenv("PGREQUIRESSL"), "1"):
		mode = sslRequire // as libpq still has it
	}
	s := &tlsSettings{
		mode:   sslMode(e.word("PGSSLMODE", string(mode), "disable", "allow", "prefer", "require", "verify-ca", "verify-full")),
		direct: e.word("PGSSLNEGOTIATION", "", "postgres", "direct") == "direct",
		sni:    e.word("PGSSLSNI", "", "0", "1") != "0",
		min:    e.version("PGSSLMINPROTOCOLVERSION", tls.VersionTLS12),
		max:    e.version("PGSSLMAXPROTOCOLVERSION", tls.VersionTLS13),
	}
	certMode := e.word("PGSSLCERTMODE", "", "disable", "allow", "require")
	s.mustAsk = certMode == "require"

	weak := s.mode == sslDisable || s.mode == sslAllow || s.mode == sslPrefer
	if system && s.mode != sslVerifyFull {
		e.fail(fmt.Errorf("PGSSLMODE is %s: must be verify-full with PGSSLROOTCERT=system", s.mode))
	}
	if s.direct && weak {
		e.fail(fmt.Errorf("PGSSLMODE is %s: must be require, verify-ca or verify-full with PGSSLNEGOTIATION=direct", s.mode))
	}
	if s.min > s.max {
		e.fail(fmt.Errorf("PGSSLMAXPROTOCOLVERSION is %s: must not be below PGSSLMINPROTOCOLVERSION, which is %s", tlsVersion(s.max), tlsVersion(s.min)))
	}
	if s.mode == sslDisable {
		if s.mustAsk {
			e.fail(fmt.Errorf("PGSSLCERTMODE is require: must be disable or allow with PGSSLMODE=disable"))
		}
		return s, e.errs
	}
	e.fail(e.loadRoots(s))
	e.fail(e.loadCRLs(s))
	if certMode != "disable" {
		e.fail(e.loadCert(s))
	}
	if s.mustAsk && weak {
		s.mode = sslRequire // without TLS the server cannot ask
	}
	return s, e.errs
}

// tlsEnv reads the PGSSL* variables and gathers what is wrong with them.
type tlsEnv struct {
	getenv func(string) string
	errs   []error
}

func (e *tlsEnv) fail(err error) {
	if err != nil {
		e.errs = append(e.errs, err)
	}
}

// word returns the value of a variable that takes one of words, or def.
func (e *tlsEnv) word(name, def string, words ...string) string {
	v := e.getenv(name)
	if slices.Contains(words, v) {
		return v
	}
	if v != "" {
		e.fail(fmt.Errorf("%s=%q: must be one of %s", name, shorten(v), strings.Join(words, ", ")))
	}
	return def
}

// tlsVersions are libpq's names of the TLS versions, which it takes in any case.
var tlsVersions = []string{"TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"}

func tlsVersion(v uint16) string { return tlsVersions[v-tls.VersionTLS10] }

func (e *tlsEnv) version(name string, def uint16) uint16 {
	for i, v := range tlsVersions {
		if strings.EqualFold(v, e.getenv(name)) {
			return tls.VersionTLS10 + uint16(i)
		}
	}
	e.word(name, "", tlsVersions...)
	return def
}

// path returns the file that a variable names, or else the one called base in
// ~/.postgresql, if it is there, or "".
func (e *tlsEnv) path(name, base string) string {
	if v := e.getenv(name); v != "" {
		return v
	}
	home := e.getenv("HOME")
	if u, err := user.Current(); home == "" && err == nil {
		home = u.HomeDir
	}
	path := filepath.Join(home, ".postgresql", base)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// loadRoots reads the root certificates. libpq goes without them when the file is
// missing, but for the verify modes; one that is named has to be there here.
//
// For OpenSSL only a self-signed certificate ends a chain. The others in the file
// help to build it, while crypto/x509 would trust them too.
func (e *tlsEnv) loadRoots(s *tlsSettings) error {
	s.bundled = x509.NewCertPool()
	roots, path := x509.NewCertPool(), e.path("PGSSLROOTCERT", "root.crt")
	if path == "" {
		if s.mode == sslVerifyCA || s.mode == sslVerifyFull {
			return fmt.Errorf("PGSSLROOTCERT is not set: must be a file of root certificates with PGSSLMODE=%s, unless ~/.postgresql/root.crt is there, or \"system\"", s.mode)
		}
		return nil
	}
	if path == "system" {
		system, err := x509.SystemCertPool()
		if err != nil || system.Equal(roots) {
			return errors.New("PGSSLROOTCERT=\"system\": must be a file of root certificates, as the system has none")
		}
		s.roots = system
		return nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("PGSSLROOTCERT: must be a readable file: %w", err)
	}
	for _, der := range pemBlocks(data, "CERTIFICATE", "X509 CERTIFICATE") {
		c, err := x509.ParseCertificate(der)
		switch {
		case err != nil: // public bundles hold a few that crypto/x509 does not take
		case bytes.Equal(c.RawIssuer, c.RawSubject) && (c.AuthorityKeyId == nil || bytes.Equal(c.AuthorityKeyId, c.SubjectKeyId)):
			roots.AddCert(c)
			s.roots = roots
		default:
			s.bundled.AddCert(c)
		}
	}
	if s.roots == nil {
		return fmt.Errorf("PGSSLROOTCERT: %s must hold the self-signed certificate of a root authority, in PEM", path)
	}
	return nil
}

// loadCRLs reads the lists of revoked certificates. libpq passes over what it
// cannot read or use of them; here that is an error.
func (e *tlsEnv) loadCRLs(s *tlsSettings) error {
	file, dir, root := e.getenv("PGSSLCRL"), e.getenv("PGSSLCRLDIR"), e.getenv("PGSSLROOTCERT")
	if file == "" && dir == "" && s.roots != nil && root != "system" {
		file = e.path("PGSSLCRL", "root.crl") // libpq's default goes with a root file only
	}
	if (file != "" || dir != "") && s.roots == nil && root == "" {
		return errors.New("PGSSLROOTCERT is not set: must be, as it verifies what PGSSLCRL and PGSSLCRLDIR name")
	}
	for _, v := range [][2]string{{"PGSSLCRL", file}, {"PGSSLCRLDIR", dir}} {
		name, path := v[0], v[1]
		if path == "" {
			continue
		}
		crls, err := readCRLs(path)
		if err != nil {
			return fmt.Errorf("%s: must be readable certificate revocation lists: %w", name, err)
		}
		if crls == nil {
			return fmt.Errorf("%s: %s must hold a complete certificate revocation list, in PEM", name, path)
		}
		s.crls = append(s.crls, crls...)
	}
	return nil
}

// readCRLs returns the lists in a file, or in the files of a directory. OpenSSL
// takes those whose name is a hash of the issuer; beside them there may be
// certificates. We take any name, and let other contents be.
//
// Delta and partial lists, which have a critical extension, are left out: they do
// not tell what is not revoked.
func readCRLs(path string) (crls []*x509.RevocationList, err error) {
	files := []string{path}
	if entries, err := os.ReadDir(path); err == nil {
		files = nil
		for _, entry := range entries {
			name := filepath.Join(path, entry.Name())
			if info, err := os.Stat(name); err != nil || !info.IsDir() {
				files = append(files, name)
			}
		}
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, der := range pemBlocks(data, "X509 CRL") {
			crl, err := x509.ParseRevocationList(der)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			if !slices.ContainsFunc(crl.Extensions, func(x pkix.Extension) bool { return x.Critical }) {
				crls = append(crls, crl)
			}
		}
	}
	return crls, nil
}

// loadCert reads the client's certificate, the intermediates behind it, and its
// key. libpq goes without a certificate when the file is missing; one that is
// named has to be there here.
func (e *tlsEnv) loadCert(s *tlsSettings) error {
	certPath, keyPath := e.path("PGSSLCERT", "postgresql.crt"), e.path("PGSSLKEY", "postgresql.key")
	switch {
	case certPath == "" && s.mustAsk:
		return errors.New("PGSSLCERT is not set: must be a client certificate with PGSSLCERTMODE=require, unless ~/.postgresql/postgresql.crt is there")
	case certPath == "":
		return nil
	case keyPath == "":
		return fmt.Errorf("PGSSLKEY is not set: must be the private key of %s, unless ~/.postgresql/postgresql.key is there", certPath)
	}
	certs, err := os.ReadFile(certPath)
	if err != nil {
		return fmt.Errorf("PGSSLCERT: must be a readable file: %w", err)
	}
	key, err := readKey(keyPath)
	if err != nil {
		return fmt.Errorf("PGSSLKEY: %w", err)
	}
	// Its errors tell of types and mismatches, never of contents.
	if s.cert, err = tls.X509KeyPair(certs, key); err != nil {
		return fmt.Errorf("PGSSLCERT: %s must be a certificate in PEM, and %s its private key: %w", certPath, keyPath, err)
	}
	return nil
}

// readKey returns the private key in a file, in PEM, if it is a regular file that
// only its owner has access to. Owned by root, its group may read it.
func readKey(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	forbidden := os.FileMode(0o077)
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Uid == 0 {
		forbidden = 0o037
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("private key %s must be a regular file", path)
	}
	if info.Mode()&forbidden != 0 {
		return nil, fmt.Errorf("private key %s has group or world access: must have mode 0600 or less, or 0640 or less if root owns it", path)
	}
	data, err := os.ReadFile(path)
	if bytes.Contains(data, []byte("ENCRYPTED")) { // in a PEM header
		return nil, fmt.Errorf("private key %s is encrypted: must be without a passphrase, which nobody could be asked for", path)
	}
	if block, _ := pem.Decode(data); block == nil { // DER, which libpq tries next
		data = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: data})
	}
	return data, err
}

// pemBlocks returns the contents of the PEM blocks in data that have one of types.
func pemBlocks(data []byte, types ...string) (ders [][]byte) {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if slices.Contains(types, block.Type) {
			ders = append(ders, block.Bytes)
		}
	}
	return ders
}
