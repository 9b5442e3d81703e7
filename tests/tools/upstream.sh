#!/usr/bin/env bash
# Run a framework's own classes against WeightSync, from its wheel or checkout, on a CPU.
#
#   tests/tools/upstream.sh trl             TRL's AsyncGRPOTrainer and GRPOTrainer, and PEFT's adapters
#   tests/tools/upstream.sh trl-grpo        examples/trl-grpo: TRL's GRPOTrainer and two vLLM servers, one of which is killed
#   tests/tools/upstream.sh verl            verl's manager and worker groups, with Ray
#   tests/tools/upstream.sh vllm            vLLM's trainer interface, and its server fed by us: the Python of a wheel for GPUs, over the kernels of
#                                           an older release for processors
#   tests/tools/upstream.sh xtuner DIR      XTuner's WeightUpdater from a checkout
#   tests/tools/upstream.sh slime DIR       slime's UpdateWeightFromDisk from a checkout
#   tests/tools/upstream.sh skyrl           SkyRL's trainer, worker groups and FSDP worker, with Ray
#   tests/tools/upstream.sh areal           AReaL's FSDPEngine and rollout engine
#   tests/tools/upstream.sh prime-rl DIR    prime-rl's sender by files, watcher and inference pool from a checkout
#
# What they need is installed over the virtual environment of vllm-venv.sh, once. The programs must be built (`make programs`).
# VERSION=V takes that release of a framework with a wheel. It prints the version that ran.
# upstream.sh --python FRAMEWORK...: print the path of that Python alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

usage="usage: upstream.sh [--python] trl | trl-grpo | verl | vllm | skyrl | areal | xtuner DIR | slime DIR | prime-rl DIR"
print=
if [ "${1:-}" = --python ]; then
  print=1
  shift
fi
framework=${1:?$usage} engine=
tests=$here/../../python/tests
venv=$("$here/vllm-venv.sh" --print)
path=$(realpath "$tests/.."):$(realpath "$tests"):$(realpath "$tests/upstream")

# layer PACKAGE...: print a Python that has these packages over vLLM's virtual environment. `--` before packages without what they name.
layer() {
  local dir
  dir=$WEIGHTSYNC_CACHE/upstream-$framework-$(echo "$framework" "$@" "$(key vllm-requirements.txt)" | sha256sum | cut -c1-12)
  # shellcheck disable=SC2016
  once "$dir" bash -euc '
    base=$0 dir=${@: -1}
    set -- "${@:1:$#-1}"
    "$base/bin/python" -m venv "$dir/venv"
    cd "$dir"/venv
    ls -d "$base"/lib/python3*/site-packages >lib/python3.11/site-packages/layer.pth
    whole=() bare=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do whole+=("$1"); shift; done
    [ $# -gt 0 ] && shift && bare=("$@")
    [ ${#whole[@]} -eq 0 ] || bin/pip install --disable-pip-version-check "${whole[@]}"
    [ ${#bare[@]} -eq 0 ] || bin/pip install --disable-pip-version-check --no-deps "${bare[@]}"' "$venv" "$@"
  echo "$dir/venv/bin/python"
}

# checkout: put the folder of the second argument, or these of its subfolders, on the path; print nothing.
checkout() {
  local dir
  dir=$(realpath "${1:?$usage}")
  shift
  for part in "${@:-.}"; do path=$path:$dir/$part; done
  VERSION=$(git -C "$dir" log -1 --format='commit %h (%cs)' 2>/dev/null || echo "a folder without git")
}

case $framework in
trl | trl-grpo)
  test=(upstream/trl_trainers.py upstream/peft_adapters.py)
  [ "$framework" = trl ] || test=(upstream/trl_example.py)
  VERSION=${VERSION:-1.16.0}
  framework=trl
  python=$(layer trl=="$VERSION" accelerate==1.15.0 datasets==5.2.0 matplotlib==3.11.2 peft==0.21.2)
  ;;
verl)
  VERSION=${VERSION:-0.9.1}
  python=$(layer verl=="$VERSION" ray==2.60.0)
  test=(upstream/verl_manager.py)
  ;;
vllm)
  VERSION=${VERSION:-0.33.0}
  dir=$WEIGHTSYNC_CACHE/upstream-vllm-$VERSION-$(key vllm-requirements.txt)
  # The Python of that release over the kernels for processors of the release in the virtual environment. "cpu" in a version selects the
  # platform.
  # shellcheck disable=SC2016
  once "$dir" bash -euc '
    base=$0 version=$1 dir=$2
    "$base/bin/python" -m venv --without-pip "$dir/venv"
    cd "$dir/venv"
    packages=lib/python3.11/site-packages
    ls -d "$base"/lib/python3*/site-packages >$packages/layer.pth
    bin/python -m pip install --disable-pip-version-check --no-deps orjson six
    bin/python -m pip download --disable-pip-version-check --no-deps vllm=="$version"
    bin/python -m zipfile -e vllm-*.whl $packages
    rm vllm-*.whl
    find $packages/vllm -name "*.so" -delete
    ln -s "$base"/$packages/vllm/*.so $packages/vllm/
    mv $packages/vllm-"$version".dist-info $packages/vllm-"$version"+cpu.dist-info
    sed -i "s/^Version: .*/&+cpu/" $packages/vllm-"$version"+cpu.dist-info/METADATA
    printf "%s\n" "#!/bin/sh" "exec $dir/venv/bin/python -m vllm.entrypoints.cli.main \"\$@\"" >bin/vllm
    chmod 755 bin/vllm' "$venv" "$VERSION"
  python=$dir/venv/bin/python
  test=(test_vllm_trainer.py)
  engine=$dir/venv
  ;;
skyrl)
  VERSION=${VERSION:-0.3.0}
  # Its wheel asks for another torch, and for packages that are built for GPUs.
  python=$(layer ray==2.56.0 peft==0.18.1 accelerate datasets func_timeout hydra-core jaxtyping loguru omegaconf orjson polars \
    skyrl-gym==0.4.0 tensordict torchdata wandb -- skyrl=="$VERSION" vllm-router)
  # Its types are those of Python 3.12 for pydantic, though the wheel takes 3.11.
  echo 'import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict' \
    >"$(dirname "$python")/../lib/python3.11/site-packages/typeddict.pth"
  path=$path:$(realpath "$tests/upstream/stand_ins")
  test=(upstream/skyrl_trainer.py)
  ;;
areal)
  VERSION=${VERSION:-1.0.4}
  # Its wheel asks for another torch, and for the packages of all its agents.
  python=$(layer ray==2.56.0 peft aiofiles colorama colorlog datasets flask hydra-core json5 latex2sympy2_extended math-verify==0.8.0 nltk omegaconf \
    pandas pebble python-dotenv setproctitle swanboard swanlab tabulate tenacity tensorboardX torchdata trackio uvloop wandb zstandard \
    -- areal=="$VERSION")
  path=$path:$(realpath "$tests/upstream/stand_ins")
  test=(upstream/areal_engine.py)
  ;;
xtuner)
  checkout "${2:?$usage}"
  python=$(layer ray==2.60.0 cyclopts==5.5.2 mmengine==0.10.7 more-itertools datasets==5.2.0)
  test=(upstream/xtuner_updater.py)
  ;;
slime)
  checkout "${2:?$usage}"
  python=$(layer ray==2.60.0)
  test=(upstream/slime_disk.py)
  ;;
prime-rl)
  checkout "${2:?$usage}" src packages/prime-rl-configs/src
  python=$(layer verifiers==0.4.0 renderers==0.1.12 prime-pydantic-config==0.4.3 beartype datasets jaxtyping spmd-types tenacity torchdata \
    tensorboard==2.19.0 tyro "wandb>=0.26" -- modelexpress==0.3.0 torchtitan==0.1.0)
  test=(upstream/prime_rl_orchestrator.py)
  ;;
*)
  die "$usage"
  ;;
esac
[ -z "$print" ] || {
  echo "$python"
  exit
}
echo "$framework: $VERSION"
export PYTHONPATH=$path HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1
[ -n "$engine" ] || exec "$python" -m pytest -q "${test[@]/#/$tests/}"
"$python" -m pytest -q "${test[@]/#/$tests/}" "$tests/test_vllm_refused.py"
# Servers of that release, fed by the agent's own code.
cd "$here/../.."
WEIGHTSYNC_VENV=$engine WEIGHTSYNC_ENGINE_CODE=$(tests/tools/engine-code.sh) exec cargo test --locked --workspace --test engine -- --test-threads=1 \
  --include-ignored adapter:: backend:: conformance:: wrong::
