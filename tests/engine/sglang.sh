#!/usr/bin/env bash
# Run the conformance suite on a real SGLang 0.5.23 on the CPU, and compare what it serves after updates with a fresh server.
#
#   tests/engine/sglang.sh WEIGHTSYNC_DEV      the built program; 10 minutes the first time, then 6
#
# The virtual environment (6 GB) is made once. Exit code 1 when anything is not as it must be. Servers listen on 127.0.0.1 alone.
set -euo pipefail
program=$(realpath "${1:?usage: sglang.sh WEIGHTSYNC_DEV}")
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

tests=$here/../engine
dir=$WEIGHTSYNC_CACHE/sglang-$(key ../engine/sglang-requirements.txt)
# shellcheck disable=SC2016
once "$dir" bash -euc '"${PYTHON:-python3.11}" -m venv "$1/venv"
  pip="$1/venv/bin/pip --disable-pip-version-check --no-input"
  $pip install --requirement "$0"
  $pip install --no-deps sglang==0.5.23' "$tests/sglang-requirements.txt"
python=$dir/venv/bin/python

work=$(mktemp -d)
servers=()
finish() {
  # A server ends with its children when it is asked to.
  [ "${#servers[@]}" = 0 ] || kill "${servers[@]}" 2>/dev/null || true
  wait
  rm -rf "$work"
}
trap finish EXIT

free_port() {
  "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# serve NAME PORT: a server on a checkpoint.
serve() {
  SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$tests/no_kernels HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" -m sglang.launch_server \
    --model-path "$work/$1" --device cpu --attention-backend torch_native --disable-overlap-schedule --max-total-tokens 4096 \
    --mem-fraction-static 0.1 --host 127.0.0.1 --port "$2" >"$work/$1.log" 2>&1 &
  servers+=("$!")
}

# until_ready NAME PORT
until_ready() {
  local end=$((SECONDS + 300))
  until "$python" -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$2/ready', timeout=5)" 2>/dev/null; do
    [ "$SECONDS" -lt "$end" ] || { tail -20 "$work/$1.log" >&2; die "the server on checkpoint $1 is not ready"; }
    sleep 1
  done
}

"$python" "$tests/make_checkpoint.py" "$work" --seed 1 2
one=$(free_port) two=$(free_port)
serve 1 "$one"
serve 2 "$two"
until_ready 1 "$one"
until_ready 2 "$two"
say "the servers are ready"
"$python" "$tests/sglang_compare.py" "http://127.0.0.1:$one" "http://127.0.0.1:$two" "$work/1" "$work/2"
"$program" conformance --engine sglang --url "http://127.0.0.1:$one" --destructive --model "$work/1" --other "$work/2"
