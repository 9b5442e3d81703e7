#!/usr/bin/env bash
# Build the wheel without programs, and check it: its contents, and whether an index takes its page. `make dist-test` checks the other wheels too.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tools=$(tests/tools/dist-venv.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$tools/python" python/build_wheel.py --no-isolation "$work" >/dev/null
"$tools/twine" check --strict "$work"/*.whl
"$tools/check-wheel-contents" "$work"/*.whl
