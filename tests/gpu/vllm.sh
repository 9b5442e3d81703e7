#!/usr/bin/env bash
# Feeds a real vLLM 0.32.0 from memory of its GPU, or in a group over NCCL on two GPUs, and compares its answers with a fresh server's.
#
#   tests/gpu/vllm.sh WEIGHTSYNC SITE.tar.xz OUT [PART...]      parts: README.md; own if none is given
#
# WEIGHTSYNC is the built program; SITE holds vLLM and what it needs next to the machine's own Python and torch (an archive that is unpacked
# into a folder of PYTHONPATH). Raw results go to OUT as lines of JSON. Exit code 1 when anything is not as it must be.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
weightsync=$(realpath "${1:?usage: vllm.sh WEIGHTSYNC SITE.tar.xz OUT [PART...]}") site=$(realpath "${2:?the archive with vLLM}")
out=$(realpath -m "${3:?where results go}")
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/site" "$out"
tar -C "$work/site" -xJf "$site"
# The package with its entry point, as pip leaves it: vLLM finds the back end by that.
cp -r python/weightsync "$work/site/"
mkdir "$work/site/weightsync-0.dist-info"
printf 'Metadata-Version: 2.1\nName: weightsync\nVersion: 0\n' >"$work/site/weightsync-0.dist-info/METADATA"
printf '[vllm.general_plugins]\nweightsync = weightsync.vllm:register\n' >"$work/site/weightsync-0.dist-info/entry_points.txt"
# Four servers start at once, and each imports thousands of files.
python3 -m compileall -q -j 0 "$work/site" >/dev/null || true
export PYTHONPATH=$work/site HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
python3 -m tests.gpu.vllm.run --weightsync "$weightsync" --work "$work" --out "$out" "${@:-own}"
