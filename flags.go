package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// healthTimeout bounds a --healthcheck, connecting included.
const healthTimeout = 2 * time.Second

const usage = `Usage: pg-status [OPTION]

Watches PostgreSQL hosts and tells over HTTP which one is the master and which
replicas are fresh enough to read from. Runs until SIGINT or SIGTERM, logs to
standard error, and is configured by environment variables.

Options:
  --check-config  print the configuration in effect, without secrets;
                  exit with 1 when it has a problem
  --healthcheck   ask the pg-status of this configuration for /ready;
                  exit with 0 when it is, else with 1
  --help          print this help
  --version       print the version

Parameters:
`

// runFlags acts on the command line. done is false without arguments, when the
// service is to run; else the process is to exit with code: 0 for success, 1 for
// a check that failed, 2 for a command line that we do not understand.
func runFlags(args, environ []string, stdout, stderr io.Writer) (code int, done bool) {
	if len(args) == 0 {
		return 0, false
	}
	if len(args) > 1 {
		fmt.Fprintf(stderr, "pg-status: unexpected argument %q after %s; see pg-status --help\n", args[1], args[0])
		return 2, true
	}
	switch args[0] {
	case "--version":
		fmt.Fprintln(stdout, "pg-status", version)
		return 0, true
	case "--help":
		printHelp(stdout)
		return 0, true
	case "--check-config":
		return checkConfig(environ, stdout, stderr), true
	case "--healthcheck":
		if err := healthcheck(environ); err != nil {
			fmt.Fprintln(stderr, "pg-status:", err)
			return 1, true
		}
		return 0, true
	}
	fmt.Fprintf(stderr, "pg-status: unknown option %q; see pg-status --help\n", args[0])
	return 2, true
}

// printHelp prints the usage and every parameter.
func printHelp(w io.Writer) {
	fmt.Fprint(w, usage)
	for _, s := range settings {
		fmt.Fprintf(w, "  %s\n", s.name)
		doc := s.doc
		if s.def != "" {
			doc += " Default: " + s.def + "."
		}
		printWrapped(w, doc, "      ", 80)
	}
}

// printWrapped prints the words of text in lines of at most width bytes that
// begin with indent. A longer word has a line to itself.
func printWrapped(w io.Writer, text, indent string, width int) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(indent)+len(line)+1+len(word) > width {
			fmt.Fprintln(w, indent+line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	if line != "" {
		fmt.Fprintln(w, indent+line)
	}
}

// checkConfig prints what the service would make of environ: warnings and
// problems to stderr, and, when nothing forbids a start, the effective
// configuration to stdout. It returns the exit status.
func checkConfig(environ []string, stdout, stderr io.Writer) int {
	c, warnings, problems := loadConfig(environ)
	for _, s := range warnings {
		fmt.Fprintln(stderr, "pg-status: warning:", s)
	}
	for _, s := range problems {
		fmt.Fprintln(stderr, "pg-status: error:", s)
	}
	if len(problems) > 0 {
		return 1
	}
	for _, s := range c.effective() {
		fmt.Fprintln(stdout, s)
	}
	return 0
}

// healthcheck asks the pg-status that runs with environ whether it is ready.
func healthcheck(environ []string) error {
	// The rest of the environment is none of its business: beside a service
	// under systemd, say, it may not be visible. loadConfig wants some host.
	own := []string{"pg_status__hosts=localhost"}
	for _, s := range environ {
		name, _, _ := strings.Cut(s, "=")
		if name == "pg_status__http_listen_address" || name == "pg_status__http_port" {
			own = append(own, s)
		}
	}
	c, _, problems := loadConfig(own)
	if len(problems) > 0 {
		return fmt.Errorf("configuration: %s", strings.Join(problems, "; "))
	}
	if c.httpPort == 0 {
		return fmt.Errorf("pg_status__http_port is 0: nobody but the log knows which port was taken")
	}
	deadline := time.Now().Add(healthTimeout)
	var err error
	for _, addr := range healthAddresses(c.listenAddress, c.httpPort) {
		if err = askReady(addr, deadline); err == nil {
			return nil
		}
	}
	return err
}

// healthAddresses returns where a server that listens on listen, an IP address
// or "*", can be reached from its own machine. A wildcard is no destination: it
// stands for loopback here, "*" for that of either family, as one may be missing.
func healthAddresses(listen string, port uint16) []string {
	hosts := []string{listen}
	if listen == "*" {
		hosts = []string{"127.0.0.1", "::1"}
	} else if ip, err := netip.ParseAddr(listen); err == nil && ip.Unmap().IsUnspecified() {
		hosts[0] = "::1"
		if ip.Unmap().Is4() {
			hosts[0] = "127.0.0.1"
		}
	}
	for i, h := range hosts {
		hosts[i] = net.JoinHostPort(h, strconv.Itoa(int(port)))
	}
	return hosts
}

// askReady asks the server at addr for /ready, and returns an error unless it
// answers 200 before the deadline. One request needs no HTTP client, which would
// make the binary larger.
func askReady(addr string, deadline time.Time) error {
	dialer := net.Dialer{Deadline: deadline}
	conn, err := dialer.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(deadline)
	if _, err := fmt.Fprintf(conn, "GET /ready HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", addr); err != nil {
		return err
	}
	line, err := bufio.NewReader(io.LimitReader(conn, 4096)).ReadString('\n')
	if err != nil {
		return fmt.Errorf("reading the answer of %s: %w", addr, err)
	}
	// "HTTP/1.1 200 OK"
	_, status, _ := strings.Cut(strings.TrimSpace(line), " ")
	if code, _, _ := strings.Cut(status, " "); code != "200" {
		return fmt.Errorf("%s is not ready: %q", addr, status)
	}
	return nil
}
