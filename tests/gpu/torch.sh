#!/usr/bin/env bash
# Scenarios of the GPU worker with torch as the other side.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/bench.sh
bench torch-receivers "$@"
bench bandwidth "$@"
