#!/usr/bin/env bash
# Build the programs as images and wheels hold them, into target/dist (`make build`). Equal sources and compilers give equal programs, in
# whatever folder the sources are.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

linker=$(deploy/linker.sh)
arch=$(uname -m)
export "CARGO_TARGET_${arch^^}_UNKNOWN_LINUX_GNU_LINKER=$linker"
# Flags are separated by the byte 0x1f. A panic names a file below one of these folders.
separator=$'\x1f'
export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$PWD=/weightsync$separator--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
exec cargo build --profile dist --locked --workspace --bins
