#!/usr/bin/env bash
# Build actionlint into the cache, once, and check the workflows of .github with it, their scripts too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$here/../.."

version=1.7.12
dir=$WEIGHTSYNC_CACHE/actionlint-$version
# shellcheck disable=SC2016
once "$dir" bash -euc 'GOBIN=$1/bin go install "github.com/rhysd/actionlint/cmd/actionlint@v$0"' "$version"
"$dir/bin/actionlint" -shellcheck "$(tests/tools/python.sh)/shellcheck" -pyflakes= .github/workflows/*.yml
