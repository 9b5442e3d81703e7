#!/usr/bin/env bash
# Reads between workers through NIXL, against NIXL's own Python package: PYTHONPATH holds the package, WEIGHTSYNC_NIXL names its libnixl_capi.so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/bench.sh
bench reads "$@"
