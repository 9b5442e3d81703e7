#!/usr/bin/env bash
# Write the files that are made from the program's own types. Unit tests say when they are stale.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# With the features that tests use, so that nothing is compiled twice.
cargo build --quiet --locked --workspace --bins --tests --examples
weightsync=${CARGO_TARGET_DIR:-target}/debug/weightsync
"$weightsync" generate crds >"$made/crds"
"$weightsync" generate api-reference >"$made/api"
"$weightsync" generate metrics >"$made/metrics"
tests/cluster/tools.sh
cp "$made/crds" crds/weightsync.dev_weightsyncs.yaml
# The same bytes, and no link: a chart that is installed from Git must be whole.
cp "$made/crds" charts/weightsync/files/crd.yaml
# The version stands in Cargo.toml.
version=$("$weightsync" --version | cut -d ' ' -f 2)
sed -i -E "s/^version = .*/version = \"$version\"/" python/pyproject.toml
sed -i -E "s/^__version__ = .*/__version__ = \"$version\"/" python/weightsync/__init__.py
sed -i -E "s/^(version|appVersion): .*/\1: $version/" charts/weightsync/Chart.yaml
cp "$made/api" docs/reference/api.md
cp "$made/metrics" docs/metrics.md
deploy/render.sh >"$made/install"
cp "$made/install" deploy/install.yaml
