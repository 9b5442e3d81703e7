#!/usr/bin/env bash
# Install the linters of requirements.txt into a virtual environment of the cache, once, and print its bin folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

requirements=$here/../tools/requirements.txt
dir=$WEIGHTSYNC_CACHE/lint-$(key ../tools/requirements.txt)
# shellcheck disable=SC2016
once "$dir" bash -euc 'python3 -m venv "$1/venv" && "$1/venv/bin/pip" install --requirement "$0"' "$requirements"
echo "$dir/venv/bin"
