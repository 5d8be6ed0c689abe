package e2e

import (
	"os/exec"
	"syscall"
)

// dieWithUs has cmd's process get sig when this one ends without its cleanups,
// as it does when go test runs out of time.
func dieWithUs(cmd *exec.Cmd, sig syscall.Signal) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = sig
}
