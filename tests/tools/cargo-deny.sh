#!/usr/bin/env bash
# Build cargo-deny into the cache, once, and print its path. Without optimisation: it checks one lock file a run, and
# building it optimised takes longer than all its runs together.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

version=0.20.2
dir=$WEIGHTSYNC_CACHE/cargo-deny-$version
CARGO_PROFILE_DEV_DEBUG=0 once "$dir" cargo install --locked --debug --version "$version" cargo-deny --root
echo "$dir/bin/cargo-deny"
