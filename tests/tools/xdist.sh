#!/usr/bin/env bash
# Install pytest-xdist, by which pytest runs tests in several processes, into a folder of the cache, once, and print it for PYTHONPATH.
# It goes with the pytest of tests/cluster/vllm-requirements.txt, whose environment takes minutes to make.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

venv=$("$here/vllm-venv.sh" --print)
requirements=$here/../tools/xdist-requirements.txt
dir=$WEIGHTSYNC_CACHE/xdist-$(key ../tools/xdist-requirements.txt)
# shellcheck disable=SC2016
once "$dir" bash -euc '"$1/bin/python" -m pip install --no-deps --target "$2/packages" --requirement "$0"' "$requirements" "$venv"
echo "$dir/packages"
