# Functions that the test bed's scripts share. Source it after `set -euo pipefail`.

# A failing command ends the script inside $(...) too.
shopt -s inherit_errexit

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/env.sh
source "$here/env.sh"

say() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# key PATH...: 12 hex digits that change when the contents of any of these files or folders change.
key() {
  (cd "$here" && find "$@" -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12)
}

# once DIR COMMAND...: have COMMAND fill the folder DIR, once. COMMAND gets DIR as its last argument and finds it empty.
# An interrupted run is started over; of two runs at a time, the second waits for the first. Its output goes to DIR.log.
once() {
  local dir=$1 started=$SECONDS
  shift
  [ -e "$dir/.complete" ] && return
  mkdir -p "$(dirname "$dir")"
  (
    flock 9
    [ -e "$dir/.complete" ] && exit
    say "making $(basename "$dir")"
    rm -rf "$dir"
    mkdir "$dir"
    "$@" "$dir" >"$dir.log" 2>&1 9>&- || {
      tail -40 "$dir.log" >&2
      die "$(basename "$dir") was not made; all of its output: $dir.log"
    }
    touch "$dir/.complete"
    [ -z "${WEIGHTSYNC_MADE:-}" ] || basename "$dir" >>"$WEIGHTSYNC_MADE"
    say "made $(basename "$dir") in $((SECONDS - started)) s"
  ) 9>"$dir.lock"
}

# module NAME: build the programs that modules/NAME/go.mod lists as tools, once; print the folder that holds them.
module() {
  local dir
  dir=$WEIGHTSYNC_CACHE/$1-$(key recipes/go-module.sh "modules/$1")
  once "$dir" "$here/recipes/go-module.sh" "$1"
  echo "$dir"
}

# busybox_tree DIR: make DIR a root file system of busybox alone, with a link for each of its commands.
busybox_tree() {
  local command
  mkdir -p "$1"/bin "$1"/usr/bin
  mkdir -m 1777 "$1/tmp"
  cp "$(command -v busybox)" "$1/bin/busybox"
  for command in $(busybox --list); do
    [ "$command" = busybox ] || ln -s busybox "$1/bin/$command"
  done
}
