#!/usr/bin/env bash
# Build vale into the cache, once, and print its path. (3.23 to 3.26 need a version of a module that cannot be downloaded any more.)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

version=3.22.0
dir=$WEIGHTSYNC_CACHE/vale-$version
# Its parsers of programming languages are C++.
[ -e "$dir" ] || command -v g++ >/dev/null || "$here/packages.sh" >&2
# shellcheck disable=SC2016
once "$dir" bash -euc 'GOBIN=$1/bin go install "github.com/vale-cli/vale/v3/cmd/vale@v$0"' "$version"
echo "$dir/bin/vale"
