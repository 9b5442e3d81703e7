#!/usr/bin/env bash
# Put Paddle's CPU build and one file of FastDeploy into the cache, once, and print the folder: `venv`, and `dynamic_weight_manager.py`.
#
# FastDeploy has no package for processors without a GPU, so its file comes from its repository, at the commit that is named here: git checks
# what it fetches against that name. UPSTREAM_GIT=URL takes the repository from there. The commit has #7951 as it was merged, and the handle of #8078 and #8079.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

commit=49fe57cba03cc49eb18440be1bdbd77dff0bcbc6
paddle=3.3.1
dir=$WEIGHTSYNC_CACHE/fastdeploy-${commit:0:12}-paddle-$paddle-xxhash

# `once` calls it where a failing command does not end the script.
fill() {
  local dir=$1 path=fastdeploy/rl/dynamic_weight_manager.py
  python3 -m venv "$dir/venv" &&
    "$dir/venv/bin/python" -m pip install --disable-pip-version-check --no-input --only-binary=:all: "paddlepaddle==$paddle" pyyaml==6.0.4 safetensors==0.8.0 xxhash==3.6.0 &&
    git init --quiet --bare "$dir/git" &&
    git --git-dir="$dir/git" fetch --quiet --depth=1 --filter=blob:none "${UPSTREAM_GIT:-https://github.com}"/PaddlePaddle/FastDeploy "$commit" &&
    git --git-dir="$dir/git" show "$commit:$path" >"$dir/dynamic_weight_manager.py" &&
    rm -rf "$dir/git"
}

once "$dir" fill
echo "$dir"
