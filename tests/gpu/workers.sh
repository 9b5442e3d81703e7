#!/usr/bin/env bash
# Scenarios of the GPU worker that need no torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/bench.sh
bench workers "$@"
