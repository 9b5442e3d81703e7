#!/usr/bin/env bash
# product-image.sh --tree BINARY DIR: only the files of that image, into DIR.
# product-image.sh [BINARY [OTHER...]]: the from-scratch image docker.io/local/NAME:test that the e2e tests load, NAME being that of the
# first binary. Prints the archive.
#
# It holds the binaries, at /NAME, and the glibc files it is linked against. No shell, no certificate bundle: it
# trusts the cluster's own authority only.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
root=$(cd "$here/../.." && pwd)

# files TREE BINARY...
files() {
  local tree=$1 program
  shift
  chmod 755 "$tree"
  mkdir -m 1777 "$tree/tmp"
  for program in "$@"; do
    [ -x "$program" ] || die "$program is not there: cargo build --release --workspace"
    install -m755 "$program" "$tree/"
  done
  # Lines of ldd: "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", and the loader's without an arrow.
  ldd "$1" | grep -oE '/[^ ]+' | while read -r library; do
    install -D -m755 "$(realpath "$library")" "$tree$library"
  done
}

if [ "${1:-}" = --tree ]; then
  files "$3" "$2"
  exit
fi
binary=${1:-$root/target/release/weightsync}
name=$(basename "$binary")
out=$root/target/images/$name.tar
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
files "$tree" "$binary" "${@:2}"

mkdir -p "$(dirname "$out")"
"$here/image.py" "docker.io/local/$name:test" "$out" "$tree" --entrypoint "[\"/$name\"]" --user 65532:65532
echo "$out"
