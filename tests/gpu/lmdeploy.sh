#!/usr/bin/env bash
# Feeds a real, unmodified LMDeploy 0.18.0 from GPU memory, on a machine with two GPUs, and compares what it says with fresh servers.
#
#   tests/gpu/lmdeploy.sh WEIGHTSYNC SITE.tar.xz OUT [PART...]      parts: README.md; awake if none is given
#
# WEIGHTSYNC is the built program; SITE holds LMDeploy and what it needs next to the machine's own Python 3.12 and torch (an archive that
# is unpacked into a folder of PYTHONPATH). Raw results go to OUT as lines of JSON. Exit code 1 when anything is not as it must be.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
weightsync=$(realpath "${1:?usage: lmdeploy.sh WEIGHTSYNC SITE.tar.xz OUT [PART...]}") site=$(realpath "${2:?the archive with LMDeploy}")
out=$(realpath -m "${3:?where results go}")
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/site" "$out"
tar -C "$work/site" -xJf "$site"
export PYTHONPATH=$work/site HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
python3 -m tests.gpu.lmdeploy.run --weightsync "$weightsync" --work "$work" --out "$out" "${@:-awake}"
