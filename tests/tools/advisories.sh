#!/usr/bin/env bash
# Compare the lock file with the advisories of RustSec, where a copy of their database is there: a git clone of
# rustsec/advisory-db in the folder that WEIGHTSYNC_ADVISORY_DB names, or in the cache. Nothing is downloaded.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

database=${WEIGHTSYNC_ADVISORY_DB:-$WEIGHTSYNC_CACHE/advisory-db}
if ! [ -e "$database/crates" ]; then
  echo "advisories: not checked, there is no database in $database"
  exit 0
fi
# cargo-deny looks for the database under a name of its own below a folder that its configuration names.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
made=$folder/db/advisory-db-3157b0e258782691
mkdir -p "$folder/db"
cp -r "$database" "$made"
sed "s|^\[advisories\]|[advisories]\ndb-path = \"$folder/db\"|" deny.toml >"$folder/deny.toml"
"$(tests/tools/cargo-deny.sh)" --locked --offline --config "$folder/deny.toml" check advisories
