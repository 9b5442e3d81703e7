#!/usr/bin/env bash
# Builds the program of an earlier commit (previous.sh COMMIT) and prints where it is. Its dependencies are shared with this build.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "no such commit here: $1 (a shallow clone has few)" >&2; exit 1; }
program=$PWD/target/previous/$commit
if [ ! -x "$program" ]; then
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    mkdir -p target/previous
    git archive "$commit" | tar -x -C "$source"
    CARGO_TARGET_DIR=$PWD/target cargo build --locked --manifest-path "$source/Cargo.toml" --bin weightsync >&2
    cp target/debug/weightsync "$program.part"
    mv "$program.part" "$program"
fi
echo "$program"
