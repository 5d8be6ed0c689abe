#!/bin/sh
# Usage: build-tarball.sh BINARY OS-ARCH VERSION FILE
#
# Packs BINARY with what it takes to run it anywhere into FILE. The result
# depends on the arguments, SOURCE_DATE_EPOCH and the files of this directory and
# the one above alone.
set -eu
umask 022
export LC_ALL=C
binary=$1 platform=$2 version=$3 file=$4
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=pg-status-$version-$platform
root=$work/$name

install -D -m 755 "$binary" "$root/pg-status"
install -m 644 "$here/../README.md" "$here/../LICENSE" "$here/deb/copyright" "$here/deb/pg-status.8" "$root"
install -m 644 "$here/pg-status.default" "$root/pg-status.env"
case $platform in
linux-*)
	# What no package manager installed belongs into /usr/local.
	sed 's|/usr/bin/pg-status|/usr/local/bin/pg-status|' "$here/pg-status.service" >"$root/pg-status.service"
	install -m 644 "$here/password.conf" "$root"
	;;
esac
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=ustar \
	-C "$work" -cf "$work/tar" "$name"
gzip -9n <"$work/tar" >"$file"
