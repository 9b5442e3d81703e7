#!/usr/bin/env bash
# Install the Debian packages that the test cluster needs, those that are missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Test images, a browser for the web page, the stand-in for GPU libraries, network shaping and benchmarks.
packages=(busybox-static g++ iperf3 iproute2 jq nftables procps util-linux)
# Not every system has a package of this name; a browser that was installed in another way will do.
command -v chromium >/dev/null || packages+=(chromium)
# No docker that answers: one of our own, and a node image made here.
if ! timeout 10 docker info >/dev/null 2>&1; then
  packages+=(conntrack debootstrap docker.io gcc iptables libc6-dev libseccomp-dev pkg-config runc)
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
done
[ ${#missing[@]} = 0 ] && exit

command -v apt-get >/dev/null || die "install what these Debian packages hold: ${missing[*]}"
[ "$(id -u)" = 0 ] || die "as root: apt-get install ${missing[*]}"
say "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >"$(mktemp)" 2>&1
