#!/usr/bin/env bash
# gdr-image.sh --tree BINARY DIR: only the files of that image, into DIR. Prints the unpacked Debian packages, as NAME=VERSION=ARCHITECTURE.
# gdr-image.sh [BINARY]: the product's image with NIXL and rdma-core, docker.io/local/weightsync:test-gdr. Prints the archive.
#
# Before the image is written, the program opens NIXL inside of its files, as their root. A user other than root needs user namespaces for it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
root=$(cd "$here/../.." && pwd)
out=$root/target/images/weightsync-gdr.tar
names=(libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200)

debian_packages() {
  # Where the lists of packages are missing or old, they are brought first.
  (cd "$1" && { apt-get -q -y -o Debug::NoLocking=1 download "${names[@]}" || { apt-get -q update && apt-get -q -y download "${names[@]}"; }; } &&
    for package in *.deb; do dpkg-deb -x "$package" . || exit; done && rm ./*.deb)
}
debian=$WEIGHTSYNC_CACHE/rdma-core
once "$debian" debian_packages
wheel=$(dirname "$(dirname "$("$here/../tools/nixl.sh")")")

if [ "${1:-}" = --tree ]; then
  binary=$2 tree=$3
else
  binary=${1:-$root/target/release/weightsync}
  tree=$(mktemp -d)
  trap 'rm -rf "$tree"' EXIT
fi
"$here/product-image.sh" --tree "$binary" "$tree"
"$root/deploy/gdr-files.sh" "$wheel" "$debian" "$tree"

capi=/opt/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
# What a container's runtime mounts: UCX looks for network devices in /sys, and a worker is this program again, by /proc/self/exe.
mapped=()
[ "$(id -u)" = 0 ] || mapped=(--map-root-user)
# shellcheck disable=SC2016
report=$(unshare "${mapped[@]}" --mount --propagation private sh -c '
  for folder in proc sys dev; do mkdir "$1/$folder" && mount --rbind "/$folder" "$1/$folder" || exit; done
  WEIGHTSYNC_NIXL=$2 exec chroot "$1" /weightsync doctor --output json' sh "$tree" "$capi")
jq -e '.nixl.found.version and .nixl.found.plugin == "UCX"' <<<"$report" >/dev/null ||
  die "the program in the image does not open NIXL: $(jq -c .nixl <<<"$report")"
say "NIXL in the image: $(jq -r '.nixl.found | "\(.version) in \(.path), \(.plugin)"' <<<"$report")"
rmdir "$tree"/{proc,sys,dev}

if [ "${1:-}" = --tree ]; then
  for name in "${names[@]}"; do
    version=$(zcat "$debian/usr/share/doc/$name/changelog.Debian.gz" | sed -nE '1s/^.*\((.*)\).*$/\1/p')
    echo "$name=$version=$(dpkg --print-architecture)"
  done
  exit
fi

mkdir -p "$(dirname "$out")"
"$here/image.py" docker.io/local/weightsync:test-gdr "$out" "$tree" --entrypoint '["/weightsync"]' --user 65532:65532 \
  --env "WEIGHTSYNC_NIXL=$capi"
echo "$out"
