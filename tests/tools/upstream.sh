#!/usr/bin/env bash
# Run a framework's own classes against WeightSync, from its wheel or checkout, on a CPU.
#
#   tests/tools/upstream.sh trl             TRL's AsyncGRPOTrainer and GRPOTrainer
#   tests/tools/upstream.sh verl            verl's manager and worker groups, with Ray
#   tests/tools/upstream.sh vllm            the trainer interface of vLLM 0.33, which has no wheel for CPU: its Python files alone
#   tests/tools/upstream.sh xtuner DIR      XTuner's WeightUpdater from a checkout
#   tests/tools/upstream.sh slime DIR       slime's UpdateWeightFromDisk from a checkout
#
# What they need is installed over the virtual environment of vllm-venv.sh, once. The programs must be built (`make programs`).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

usage="usage: upstream.sh trl | verl | vllm | xtuner DIR | slime DIR"
framework=${1:?$usage}
tests=$here/../../python/tests
venv=$("$here/vllm-venv.sh" --print)
path=$(realpath "$tests/.."):$(realpath "$tests")

# layer PACKAGE...: print a Python that has these packages over vLLM's virtual environment.
layer() {
  local dir
  dir=$WEIGHTSYNC_CACHE/upstream-$framework-$(echo "$framework" "$@" "$(key vllm-requirements.txt)" | sha256sum | cut -c1-12)
  # shellcheck disable=SC2016
  once "$dir" bash -euc '
    "$0/bin/python" -m venv "${@: -1}/venv"
    cd "${@: -1}"/venv
    ls -d "$0"/lib/python3*/site-packages >lib/python3.11/site-packages/layer.pth
    bin/pip install --disable-pip-version-check "${@:1:$#-1}"' "$venv" "$@"
  echo "$dir/venv/bin/python"
}

case $framework in
trl)
  python=$(layer trl==1.16.0 accelerate==1.15.0 datasets==5.2.0)
  test=upstream/trl_trainers.py
  ;;
verl)
  python=$(layer verl==0.9.1 ray==2.60.0)
  test=upstream/verl_manager.py
  ;;
vllm)
  dir=$WEIGHTSYNC_CACHE/upstream-vllm-0.33.0
  # shellcheck disable=SC2016
  once "$dir" bash -euc 'cd "$1"; "$0" -m pip download --no-deps vllm==0.33.0; "$0" -m zipfile -e vllm-*.whl .; rm vllm-*.whl; find vllm -name "*.so" -delete' \
    "$venv/bin/python"
  python=$venv/bin/python
  path=$path:$dir
  test=test_vllm_trainer.py
  ;;
xtuner)
  checkout=${2:?$usage}
  python=$(layer ray==2.60.0 cyclopts==5.5.2 mmengine==0.10.7 more-itertools datasets==5.2.0)
  path=$path:$(realpath "$checkout")
  test=upstream/xtuner_updater.py
  ;;
slime)
  checkout=${2:?$usage}
  python=$(layer ray==2.60.0)
  path=$path:$(realpath "$checkout")
  test=upstream/slime_disk.py
  ;;
*)
  die "$usage"
  ;;
esac
export PYTHONPATH=$path HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1
exec "$python" -m pytest -q "$tests/$test"
