#!/bin/sh
# Usage: dist.sh DIR VERSION
#
# Packs the binaries DIR/pg-status-OS-ARCH into packages beside them, and writes
# SHA256SUMS of all. SOURCE_DATE_EPOCH is the time that every file in them gets.
set -eu
dir=$1 version=$2
here=$(dirname "$0")
: "${SOURCE_DATE_EPOCH:?must be set, in seconds: the time of the commit, say}"
export SOURCE_DATE_EPOCH

rm -f "$dir"/*.deb "$dir"/*.tar.gz "$dir/SHA256SUMS" # of an earlier version
for binary in "$dir"/pg-status-*; do
	platform=${binary##*/pg-status-}
	"$here/build-tarball.sh" "$binary" "$platform" "$version" "$dir/pg-status-$version-$platform.tar.gz"
	case $platform in
	linux-*) "$here/build-deb.sh" "$binary" "${platform#linux-}" "$version" "$dir/pg-status_${version}_${platform#linux-}.deb" ;;
	esac
done
install -m 644 "$here/deb/copyright" "$dir/copyright" # for the image
cd "$dir"
sha256sum copyright pg-status* >SHA256SUMS.new
mv SHA256SUMS.new SHA256SUMS
