#!/usr/bin/env bash
# Make the virtual environment that holds the real vLLM (CPU) and torch, once, and print its path.
#
#   tests/cluster/vllm-venv.sh            make it if need be (3 minutes, 6 GB), print its path
#   tests/cluster/vllm-venv.sh --print    print the path it has, made or not
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

dir=$WEIGHTSYNC_CACHE/vllm-$(key recipes/vllm-venv.sh vllm-requirements.txt)
[ "${1:-}" = --print ] || once "$dir" "$here/recipes/vllm-venv.sh"
echo "$dir/venv"
