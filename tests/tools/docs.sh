#!/usr/bin/env bash
# Build the documentation site into site/ (`make docs`). A dead link or anchor, or a page outside the navigation, is an error.
# docs.sh serve: serve it on 127.0.0.1:8000 instead, and build it again after each change.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"

requirements=$here/../tools/docs-requirements.txt
dir=$WEIGHTSYNC_CACHE/docs-$(key ../tools/docs-requirements.txt)
# shellcheck disable=SC2016
once "$dir" bash -euc 'python3 -m venv "$1/venv" && "$1/venv/bin/pip" install --requirement "$0"' "$requirements"
cd "$here/../.."
# Without a message of the theme about a later version of mkdocs: the versions are pinned.
export NO_MKDOCS_2_WARNING=1
case ${1:-build} in
  build) exec "$dir/venv/bin/mkdocs" build --strict ;;
  serve) exec "$dir/venv/bin/mkdocs" serve ;;
  *) die "docs.sh [serve]" ;;
esac
