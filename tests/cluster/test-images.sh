#!/usr/bin/env bash
# test-images.sh [FOLDER]: the images that the tests' own pods run, as archives in FOLDER. Prints their paths.
#
#   docker.io/local/toolbox:test  busybox alone
#   docker.io/local/engine:test   busybox, and links that make the folders under /host (see kind-config.sh) look like an
#                            installed Python with vLLM and torch: `python`, and `vllm serve ...`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
out=${1:-$(cd "$here/../.." && pwd)/target/images}
mkdir -p "$out"
trees=$(mktemp -d)
trap 'rm -rf "$trees"' EXIT

busybox_tree "$trees/toolbox"
chmod 755 "$trees/toolbox"
mkdir "$trees/toolbox/etc"
# Names for the user ids that the tests run as; torch asks for the user's name.
printf '%s\n' root:x:0:0:root:/tmp:/bin/sh engine:x:1000:1000:engine:/tmp:/bin/sh >"$trees/toolbox/etc/passwd"
printf '%s\n' root:x:0: engine:x:1000: >"$trees/toolbox/etc/group"
"$here/image.py" docker.io/local/toolbox:test "$out/toolbox.tar" "$trees/toolbox"

engine=$trees/engine
cp -a "$trees/toolbox" "$engine"
# The machine's libraries, where the dynamic loader looks for them.
mkdir "$engine/host"
ln -s /host/usr/lib "$engine/lib"
ln -s /host/usr/lib64 "$engine/lib64"
ln -s /host/usr/lib "$engine/usr/lib"
ln -s /host/usr/share "$engine/usr/share"
ln -s /bin/busybox "$engine/usr/bin/env"
# A virtual environment of its own, with the packages of the machine's: that one's paths do not exist in here.
venv=$engine/venv
mkdir -p "$venv/bin" "$venv/lib/python3.11"
printf '%s\n' 'home = /host/python/bin' 'include-system-site-packages = false' >"$venv/pyvenv.cfg"
ln -s /host/python/bin/python3.11 "$venv/bin/python"
ln -s /host/vllm/venv/lib/python3.11/site-packages "$venv/lib/python3.11/site-packages"
printf '%s\n' '#!/bin/sh' 'exec /venv/bin/python -m vllm.entrypoints.cli.main "$@"' >"$venv/bin/vllm"
chmod 755 "$venv/bin/vllm"
"$here/image.py" docker.io/local/engine:test "$out/engine.tar" "$engine" \
  --env PATH=/venv/bin:/bin:/usr/bin:/host/usr/bin --env LD_LIBRARY_PATH=/host/python/lib --env HOME=/tmp \
  --env TORCHDYNAMO_DISABLE=1 # torch.compile wants a C++ compiler, and a failed attempt ends vLLM's engine

echo "$out/toolbox.tar"
echo "$out/engine.tar"
