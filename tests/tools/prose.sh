#!/usr/bin/env bash
# Check the prose of the repository (`make prose`): words and sentences of documents, words of comments, and lengths of names.
# prose.sh FILE...: only these files.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

vale=$(tests/tools/vale.sh)
config=$PWD/.vale.ini
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

# check FILE...: vale, in the present folder.
check() {
  printf '%s\0' "$@" | xargs -0 -P 2 -n 250 "$vale" --config "$config" --output line
}

# Files that git knows: a folder would bring in what was built. Recipes of images are left out: any change of them, also of a comment, builds
# the images again (20 minutes).
if [ $# -eq 0 ]; then
  mapfile -d '' -t files < <(git ls-files -z '*.md' '*.rs' '*.py' '*.sh' .ci/run Makefile ':!tests/cluster/lib.sh' ':!tests/cluster/recipes' ':!tests/cluster/node' ':!tests/cluster/image.py')
else
  files=("$@")
fi

direct=() copied=()
for file in "${files[@]}"; do
  [ -e "$file" ] || continue
  case $file in
    # Vale skips the first docstring after a line that names the interpreter.
    *.py) if head -c 2 "$file" | grep -q '#!'; then
      mkdir -p "$copy/$(dirname "$file")"
      sed '1s/.*//' "$file" >"$copy/$file"
      copied+=("$file")
    else
      direct+=("$file")
    fi ;;
    *.md | *.rs) direct+=("$file") ;;
    # Vale parses no shell: its comments are checked as text, line by line.
    *)
      mkdir -p "$copy/$(dirname "$file")"
      sed -E '/^\s*# /!s/.*//; s/^\s*# //' "$file" >"$copy/$file.txt"
      copied+=("$file.txt")
      ;;
  esac
done

status=0
[ ${#direct[@]} -eq 0 ] || check "${direct[@]}" || status=1
[ ${#copied[@]} -eq 0 ] || (cd "$copy" && check "${copied[@]}") || status=1

# A longer name does not fit a line of a test report. `fn` finds helpers too: they are read as often.
long=$(git grep -nE '\bfn [a-z0-9_]{61,}|^ *(async )?def [a-z0-9_]{61,}' -- '*.rs' '*.py') && {
  printf 'names of more than 60 characters:\n%s\n' "$long"
  status=1
}
exit "$status"
