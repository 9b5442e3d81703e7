#!/usr/bin/env bash
# Check the prose of the repository (`make prose`): words and sentences of documents, words of comments, and lengths of test names.
# prose.sh FILE...: only these files.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

vale=$(tests/tools/vale.sh)
status=0
if [ $# -gt 0 ]; then
  "$vale" --output line "$@" || status=1
else
  # Of all files that git knows: a folder would bring in what was built.
  git ls-files -z '*.md' '*.rs' '*.py' | xargs -0 -P 2 -n 250 "$vale" --output line || status=1
fi

# A longer name does not fit a line of a test report. `fn` finds helpers too: they are read as often.
long=$(git grep -nE '\bfn [a-z0-9_]{61,}|^ *(async )?def [a-z0-9_]{61,}' -- '*.rs' '*.py') && {
  printf 'names of more than 60 characters:\n%s\n' "$long"
  status=1
}
exit "$status"
