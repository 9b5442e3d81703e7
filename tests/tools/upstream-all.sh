#!/usr/bin/env bash
# Take the newest release of every framework, run its test (upstream.sh), and write the table in docs/integrations/README.md.
#
#   tests/tools/upstream-all.sh [FRAMEWORK...]    only these; the other rows of the table stay
#
# A framework with a wheel is taken from the package registry, another from its repository, at its newest commit. Where nothing is shipped
# for a framework, it is only compared: are the lines that its page names still there? UPSTREAM_GIT=URL takes repositories from there
# instead of GitHub. The exit code is 1 when a test failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

tools=$(realpath "$here/../tools")
page=$(realpath "$here/../../docs/integrations/README.md")
pip=$("$here/vllm-venv.sh" --print)/bin/pip
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
all=(trl verl vllm skyrl areal xtuner slime prime-rl openrlhf nemo-rl)
failed=0

# newest PACKAGE: print the newest release that the registry has.
newest() { "$pip" index versions "$1" 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p'; }

# clone OWNER/NAME: print a folder with the newest commit.
clone() {
  local dir=$work/${1##*/}
  [ -d "$dir" ] || GIT_LFS_SKIP_SMUDGE=1 git clone --quiet --depth 1 "${UPSTREAM_GIT:-https://github.com}/$1" "$dir" >&2
  echo "$dir"
}

# commit DIR: print what was cloned.
commit() { git -C "$1" log -1 --format='commit %h (%cs)'; }

# row NAME PAGE VERSION HOW RESULT: put a row into the table in the place of the earlier one of this name.
row() {
  local line day
  day=$(date -u +%F)
  line="| [$1]($2) | $3 | $4 | $5 | $day |"
  say "$line"
  grep -vF "| [$1](" "$page" >"$work/page" || true
  sed '1,/^|---|---|---|---|---|$/d' "$work/page" >"$work/rest"
  sed '/^|---|---|---|---|---|$/q' "$work/page" >"$work/new"
  { sed '/^$/,$d' "$work/rest"; echo "$line"; } | LC_ALL=C sort -f >>"$work/new"
  sed -n '/^$/,$p' "$work/rest" >>"$work/new"
  cp "$work/new" "$page"
}

# ran NAME PAGE VERSION ARGUMENT...: run the framework's test.
ran() {
  local name=$1 its=$2 version=$3 log=$work/$1.log result
  shift 3
  if VERSION=$version "$tools/upstream.sh" "$@" >"$log" 2>&1; then
    result=$(sed -n 's/^\([0-9]* passed\).*/\1/p' "$log")
  else
    tail -40 "$log" >&2
    result=failed failed=1
  fi
  row "$name" "$its" "$version" ran "$result"
}

# read_only NAME PAGE VERSION DIR FILE TEXT...: look for each text in its file.
read_only() {
  local name=$1 its=$2 version=$3 dir=$4 result='as read'
  shift 4
  while [ $# -gt 0 ]; do
    grep -qF "$2" "$dir/$1" || { say "$name: $1 has no $2"; result='changed: read it again' failed=1; }
    shift 2
  done
  row "$name" "$its" "$version" read "$result"
}

for framework in "${@:-${all[@]}}"; do
  case $framework in
  trl) ran TRL trl.md "$(newest trl)" trl ;;
  verl) ran verl verl.md "$(newest verl)" verl ;;
  vllm) ran vLLM vllm.md "$(newest vllm)" vllm ;;
  skyrl) ran SkyRL skyrl.md "$(newest skyrl)" skyrl ;;
  areal) ran AReaL areal.md "$(newest areal)" areal ;;
  xtuner) dir=$(clone InternLM/xtuner) && ran XTuner xtuner.md "$(commit "$dir")" xtuner "$dir" ;;
  slime) dir=$(clone THUDM/slime) && ran slime slime.md "$(commit "$dir")" slime "$dir" ;;
  prime-rl) dir=$(clone PrimeIntellect-ai/prime-rl) && ran prime-rl prime-rl.md "$(commit "$dir")" prime-rl "$dir" ;;
  openrlhf)
    version=$(newest openrlhf)
    "$pip" download --quiet --no-deps --dest "$work/openrlhf" openrlhf=="$version"
    "$pip" --quiet install --no-deps --target "$work/openrlhf" "$work"/openrlhf/*.whl
    read_only OpenRLHF openrlhf.md "$version" "$work/openrlhf/openrlhf" \
      cli/train_ppo_ray.py '        PolicyModelActor,' \
      trainer/ray/ppo_actor.py 'self.trainer = ActorPPOTrainer(' \
      trainer/ray/vllm_engine.py '"worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"'
    ;;
  nemo-rl)
    dir=$(clone NVIDIA-NeMo/RL)
    read_only NeMo-RL nemo-rl.md "$(commit "$dir")" "$dir/nemo_rl" \
      weight_sync/checkpoint_engine_weight_synchronizer.py 'self._run_generation("update_weights_from_checkpoint_engine")' \
      weight_sync/factory.py 'Supported backends: {sorted(_SUPPORTED_BACKENDS)}'
    ;;
  *) die "no framework $framework: ${all[*]}" ;;
  esac
done
exit "$failed"
