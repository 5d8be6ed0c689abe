//go:build !linux

package main

import "golang.org/x/sys/unix"

func readNow(fd uintptr, b []byte) (int, error)  { return unix.Read(int(fd), b) }
func writeNow(fd uintptr, b []byte) (int, error) { return unix.Write(int(fd), b) }
