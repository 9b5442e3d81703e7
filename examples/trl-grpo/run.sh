#!/usr/bin/env bash
# GRPO on this machine's processor, in one command: makes a Python with vLLM (CPU) and TRL once (5 minutes, 7 GB), and runs run.py.
#
#   examples/trl-grpo/run.sh [--steps N] [--kill-at STEP] [--folder FOLDER]
#
# WEIGHTSYNC names the program; without it, the debug build is used, and built if it is missing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

program=${WEIGHTSYNC:-$root/target/debug/weightsync}
[ -x "$program" ] || cargo build --locked --manifest-path "$root/Cargo.toml" --bin weightsync
vllm=$("$root/tests/cluster/vllm-venv.sh")
python=$("$root/tests/tools/upstream.sh" --python trl-grpo)
export PATH=$vllm/bin:$PATH PYTHONPATH=$root/python
exec "$python" "$here/run.py" --weightsync "$program" --folder "$root/target/trl-grpo" "$@"
