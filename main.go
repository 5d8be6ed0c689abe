// Command pg-status watches a fixed list of PostgreSQL hosts that replicate by
// streaming, and tells over HTTP which one is the master, which replica is fresh
// enough to read from, and which replica has replayed a given write.
//
// It is configured by the environment variables described in README.md; see also
// pg-status --help. It logs to standard error and stops on SIGINT or SIGTERM:
// requests under way are answered, and the connections to PostgreSQL are ended
// properly. The exit status is 0 after that, 1 when it cannot start or go on, and
// 2 for a wrong command line.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
)

// version is set by the build with -X.
var version = "0.0.0-dev"

func main() {
	// A reader of the log that goes away must not take the process with it.
	signal.Ignore(syscall.SIGPIPE)
	if os.Getenv("GOGC") == "" {
		keepSmall()
	}
	code, done := runFlags(os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	if !done {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
		code = run(signals, os.Environ(), os.Stderr)
	}
	os.Exit(code)
}

// keepSmall has the process take less memory than the runtime would let it have
// when nothing is scarce: 8 instead of 10 MiB when idle, and what a crowd of
// clients took is given back when they have gone. Answers make no garbage and
// checks make little, so it costs no CPU time to speak of.
func keepSmall() {
	debug.SetGCPercent(25)
	go func() {
		for range time.Tick(30 * time.Second) {
			debug.FreeOSMemory()
		}
	}()
}

const (
	drainTimeout = 5 * time.Second // for the answers under way when we stop
	flushTimeout = time.Second     // for the log
)

// run is the daemon. It returns its exit status after a signal, or when it
// cannot start.
func run(signals <-chan os.Signal, environ []string, stderr io.Writer) int {
	c, warnings, problems := loadConfig(environ)
	out := newLogWriter(stderr)
	defer out.close(flushTimeout)
	log := newLogger(out, c.logLevel, c.logJSON)
	for _, w := range warnings {
		component(log, "config").Warn(w)
	}
	for _, p := range problems {
		component(log, "config").Log(context.Background(), levelFatal, p)
	}
	if len(problems) > 0 {
		return 1
	}
	if err := serve(signals, &c, log, newNotifier(getenvOf(environ))); err != nil {
		component(log, "http").Log(context.Background(), levelFatal, "HTTP server failed", errAttr(err))
		return 1
	}
	return 0
}

// serve listens, monitors and answers until a signal comes, then stops all of it.
func serve(signals <-chan os.Signal, c *config, log *slog.Logger, notify *notifier) error {
	listeners, warning, err := listen(c.listenAddress, c.httpPort)
	if err != nil {
		return fmt.Errorf("listening on %s: %w", net.JoinHostPort(c.listenAddress, fmt.Sprint(c.httpPort)), err)
	}
	httpLog := component(log, "http")
	if warning != "" {
		httpLog.Warn(warning)
	}
	turns := newTurns(c.sleep, len(c.hosts))
	monitorLog := component(log, "monitor")
	var probers []prober
	names := logNames(c.hosts)
	for i, h := range c.hosts {
		probers = append(probers, newLink(h, names[i], c, turns, monitorLog))
	}
	m := newMonitor(c, monitorLog, probers)
	s := newServer(m, component(log, "selection"), version)
	web := newHTTPServer(s, httpLog)
	fast := newLanes(s, httpLog)

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	failed := make(chan error, len(listeners))
	free := make(chan struct{}, maxConnections)
	for _, l := range listeners {
		wg.Go(func() {
			if err := fast.serve(&limitListener{l, free}); err != nil {
				failed <- err
			}
		})
	}
	wg.Go(func() { web.Serve(oddListener{fast, listeners[0].Addr()}) })
	httpLog.Info("server started", "address", c.listenAddress, "port", portOf(listeners[0]))
	wg.Go(func() { m.run(ctx) })
	wg.Go(func() { m.keepInformed(ctx, notify) })
	notify.ready()

	select {
	case err = <-failed:
	case sig := <-signals:
		component(log, "main").Info("received", "signal", signalName(sig))
	}
	notify.stopping()
	close(s.stopping)
	drain, cancelDrain := context.WithTimeout(context.Background(), drainTimeout)
	defer cancelDrain()
	fast.stop(drainTimeout)
	if web.Shutdown(drain) != nil {
		web.Close() // a client that does not read its answer
	}
	httpLog.Info("server stopped")
	return err
}

func signalName(sig os.Signal) string {
	switch sig {
	case os.Interrupt:
		return "SIGINT"
	case syscall.SIGTERM:
		return "SIGTERM"
	}
	return sig.String()
}

// getenvOf returns os.Getenv for environ.
func getenvOf(environ []string) func(string) string {
	return newEnvReader(environ).get
}
