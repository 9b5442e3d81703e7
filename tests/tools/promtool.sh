#!/usr/bin/env bash
# Print the path of promtool: the machine's own, or the one of Debian's package, which is unpacked into the cache and not installed, because
# nothing here wants a server that runs. (Building it takes six minutes.)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

if command -v promtool; then
  exit
fi
dir=$WEIGHTSYNC_CACHE/promtool
# shellcheck disable=SC2016
once "$dir" bash -euc '
  cd "$0"
  apt-get -o APT::Sandbox::User=root download prometheus || { apt-get update -qq; apt-get -o APT::Sandbox::User=root download prometheus; }
  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
  rm prometheus_*.deb'
echo "$dir/usr/bin/promtool"
