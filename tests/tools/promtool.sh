#!/usr/bin/env bash
# Build promtool into the cache, once (six minutes of one core), and print its path. Without the clients of every cloud, which it would
# find scrape targets with: they are most of its build.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

version=v0.309.1
dir=$WEIGHTSYNC_CACHE/promtool-$version
# shellcheck disable=SC2016
once "$dir" bash -euc '
  module=github.com/prometheus/prometheus
  cd "$1"
  mkdir home && cd home && go mod init weightsync.test/promtool && go mod download "$module@$0"
  cp -r "$(go env GOMODCACHE)/$module@$0" "$1/source"
  chmod -R u+w "$1/source"
  rm "$1/source/plugins/plugins.go"
  cd "$1/source"
  CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$1/promtool" ./cmd/promtool
  rm -rf "$1/source" "$1/home"' "$version"
echo "$dir/promtool"
