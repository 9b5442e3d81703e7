#!/usr/bin/env bash
# Install zig into the cache, once, and print the path of a linker. What it links needs no newer glibc than 2.28, on whatever system it is
# linked: images of engines and trainers have that one or a later one, and so have wheels of torch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tests/cluster/lib.sh"

zig=0.17.1 zigbuild=0.24.1 glibc=2.28
dir=$WEIGHTSYNC_CACHE/linker-$zig-$zigbuild-$glibc

# `once` calls it where a failing command does not end the script. By its name rustc knows which arguments the linker takes.
install_linker() {
  local dir=$1
  python3 -m venv "$dir/venv" &&
    "$dir/venv/bin/pip" install --disable-pip-version-check --no-input --only-binary=:all: "ziglang==$zig" "cargo-zigbuild==$zigbuild" &&
    cat >"$dir/cc" <<END && chmod +x "$dir/cc"
#!/bin/sh
PATH=$dir/venv/bin:\$PATH exec $dir/venv/bin/cargo-zigbuild zig cc -- -target $(uname -m)-linux-gnu.$glibc "\$@"
END
}

once "$dir" install_linker
echo "$dir/cc"
