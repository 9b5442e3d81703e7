#!/usr/bin/env bash
# generate.sh [--check]: write the files that are made from the program's own types; with --check, only compare them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

cargo build --quiet --locked --bin weightsync
weightsync=${CARGO_TARGET_DIR:-target}/debug/weightsync

# generate FILE WHAT...: FILE is what `weightsync generate WHAT` prints.
stale=0
generate() {
  local file=$1
  shift
  "$weightsync" generate "$@" >"$made/file"
  if [ "${check:-}" = --check ]; then
    diff -u "$file" "$made/file" || {
      echo "$file is stale: make generate" >&2
      stale=1
    }
  else
    cp "$made/file" "$file"
  fi
}

check=${1:-}
generate crds/weightsync.yaml crds
generate docs/reference/api.md api-reference
exit $stale
