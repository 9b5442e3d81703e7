#!/usr/bin/env bash
# Install the packages of trainer-requirements.txt into a folder of the cache, once (24 MB), and print its path.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

dir=$WEIGHTSYNC_CACHE/trainers-$(key trainer-requirements.txt)
venv=$("$here/vllm-venv.sh" --print)
# shellcheck disable=SC2016
once "$dir" bash -euc '"$1/bin/python" -m pip install --no-deps --target "$2/packages" --requirement "$0"' "$here/trainer-requirements.txt" "$venv"
echo "$dir/packages"
