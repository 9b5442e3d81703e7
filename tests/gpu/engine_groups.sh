#!/usr/bin/env bash
# Groups of which our worker is rank 0 and SGLang's, LMDeploy's and vLLM's own code the other ranks, on a machine with two GPUs or more.
#
#   tests/gpu/engine_groups.sh CODE.tar.xz [ARGUMENT...]      --engines sglang,vllm; --rehearse: without a GPU, over gloo
#
# CODE is what `engine_code.sh` wrote on a machine with a network. The program is WEIGHTSYNC_GPU_BENCH, or it is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/bench.sh
code=$(realpath "${1:?usage: engine_groups.sh CODE.tar.xz [ARGUMENT...]}")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -C "$work" -xJf "$code"
bench engine-groups --engine-code "$work" "$@"
