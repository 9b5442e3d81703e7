#!/usr/bin/env bash
# Packs the group code of SGLang, LMDeploy and vLLM, unmodified, from their published wheels: what `engine_groups.sh` takes.
#
#   tests/gpu/engine_code.sh OUT.tar.xz
#
# Reads 480 MB from the package index and writes less than 1 MB. Which modules: engine_code.py. Next to them goes a library of two functions,
# `ncclCommSuspend` and `ncclCommResume`, in front of the machine's own NCCL: vLLM loads no NCCL that lacks them (before 2.29.7), and its
# group code calls neither.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}") out=$(realpath -m "${1:?usage: engine_code.sh OUT.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for glibc in 2_17 2_28 2_31 2_34 2_35; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$work/wheels" \
  sglang==0.5.23 lmdeploy==0.18.0 vllm==0.33.0 pybase64==1.5.1
# Linked against an empty library of NCCL's name: the loader takes the one that torch has loaded.
echo 'int weightsync_empty;' | cc -shared -nostdlib -Wl,-soname,libnccl.so.2 -o "$work/libnccl.so.2" -x c -
printf 'int ncclCommSuspend(void *comm, int flags) { (void)comm; (void)flags; return 3; }\nint ncclCommResume(void *comm) { (void)comm; return 3; }\n' |
  cc -shared -nostdlib -fPIC -O2 -o "$work/libnccl-suspend.so" -x c - -x none -Wl,--no-as-needed "$work/libnccl.so.2"
python3 "$here/engine_code.py" pack "$out" "$work"/wheels/*.whl "$work/libnccl-suspend.so"
ls -l "$out"
