#!/bin/sh
# Usage: build-deb.sh BINARY ARCH VERSION FILE
#
# Packs BINARY for the Debian architecture ARCH into FILE. The result depends on
# the arguments, SOURCE_DATE_EPOCH and the files of this directory alone.
set -eu
umask 022
export LC_ALL=C
binary=$1 arch=$2 file=$4
here=$(dirname "$0")
# 1.1.0-rc1 is a version before 1.1.0, which Debian writes with a tilde.
version=$(echo "$3" | tr - '~')
dpkg --validate-version "$version"

root=$(mktemp -d)
chmod 755 "$root" # it is the root directory of the package
trap 'rm -rf "$root"' EXIT
doc=$root/usr/share/doc/pg-status
fill() { sed "s|@VERSION@|$version|g; s|@ARCH@|$arch|g; s|@SIZE@|${size-}|g; s|@DATE@|$(date -uRd "@$SOURCE_DATE_EPOCH")|g" "$1"; }

install -D -m 755 "$binary" "$root/usr/bin/pg-status"
install -D -m 644 "$here/pg-status.service" "$root/lib/systemd/system/pg-status.service"
install -D -m 640 "$here/pg-status.default" "$root/etc/default/pg-status"
install -D -m 644 "$here/deb/copyright" "$doc/copyright"
install -D -m 644 "$here/../README.md" "$doc/README.md"
install -D -m 644 "$here/password.conf" "$doc/examples/password.conf"
install -D -m 644 "$here/deb/lintian-overrides" "$root/usr/share/lintian/overrides/pg-status"
mkdir -p "$root/usr/share/man/man8"
gzip -9n <"$here/deb/pg-status.8" >"$root/usr/share/man/man8/pg-status.8.gz"
fill "$here/deb/changelog" | gzip -9n >"$doc/changelog.gz"

# Installed-Size is in KiB, of every file rounded up (deb-substvars(5)).
size=$(find "$root" -type f -printf '%s\n' | awk '{ n += int(($1 + 1023) / 1024) } END { print n }')
mkdir "$root/DEBIAN"
fill "$here/deb/control" >"$root/DEBIAN/control"
install -m 644 "$here/deb/conffiles" "$root/DEBIAN/conffiles"
install -m 755 "$here/deb/postinst" "$here/deb/prerm" "$here/deb/postrm" "$root/DEBIAN"
(cd "$root" && find etc lib usr -type f ! -path 'etc/*' -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
chmod 644 "$root/DEBIAN/md5sums"

find "$root" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group --threads-max=1 -Zxz --build "$root" "$file" >/dev/null
