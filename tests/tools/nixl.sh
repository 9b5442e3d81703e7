#!/usr/bin/env bash
# Unpack NIXL's wheel into the cache, once, and print the path of libnixl_capi.so: what WEIGHTSYNC_NIXL is set to.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

version=1.5.1
dir=$WEIGHTSYNC_CACHE/nixl-$version
tools=$("$(dirname "${BASH_SOURCE[0]}")/python.sh")

# `once` calls it where a failing command does not end the script. A wheel is a zip archive; any Python's will do, since only its libraries count.
unpack() {
  local dir=$1
  "$tools/python" -m pip download --disable-pip-version-check --no-input --no-deps --only-binary=:all: --python-version 3.11 \
    --implementation cp --abi cp311 --platform manylinux_2_28_x86_64 --dest "$dir/wheel" "nixl-cu12==$version" &&
    "$tools/python" -m zipfile -e "$dir"/wheel/*.whl "$dir" &&
    rm -r "$dir/wheel" &&
    test -e "$dir/.nixl_cu12.mesonpy.libs/libnixl_capi.so"
}

once "$dir" unpack
echo "$dir/.nixl_cu12.mesonpy.libs/libnixl_capi.so"
