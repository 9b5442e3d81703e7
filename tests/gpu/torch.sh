#!/usr/bin/env bash
# Scenarios of the GPU worker with torch as the other side.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/bench.sh
# As our workers have it: ranks that allocate in different ways make no communicator.
export NCCL_CUMEM_ENABLE=0
bench torch-receivers "$@"
bench bandwidth "$@"
