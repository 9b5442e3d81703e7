#!/usr/bin/env bash
# Install dist-requirements.txt into a virtual environment of the cache, once, and print its bin folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

requirements=$here/../tools/dist-requirements.txt
dir=$WEIGHTSYNC_CACHE/dist-$(key ../tools/dist-requirements.txt)
# shellcheck disable=SC2016
once "$dir" bash -euc 'python3 -m venv "$1/venv" && "$1/venv/bin/pip" install --requirement "$0"' "$requirements"
echo "$dir/venv/bin"
