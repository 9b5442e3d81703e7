#!/usr/bin/env bash
# The first updates of a source that keeps copies, next to later ones; see kept.py. Two GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -z "${WEIGHTSYNC_PROGRAM:-}" ]; then
  cargo build --locked --release --workspace --bins
fi
export WEIGHTSYNC_PROGRAM=${WEIGHTSYNC_PROGRAM:-$PWD/target/release/weightsync}
export PYTHONPATH=$PWD/python:$PWD
exec python3 -m tests.gpu.kept "$@"
