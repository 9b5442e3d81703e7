#!/usr/bin/env bash
# Unpack the engines' group code from their wheels (tests/gpu/engine_code.sh) into a folder of the cache, once, and print it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

dir=$WEIGHTSYNC_CACHE/engine-code-$(key ../gpu/engine_code.sh ../gpu/engine_code.py)
# shellcheck disable=SC2016
once "$dir" bash -euc '"$0" "$1/code.tar.xz" && tar -C "$1" -xJf "$1/code.tar.xz"' "$here/../gpu/engine_code.sh"
echo "$dir"
