# Functions about copies of this workspace and about compiled dependencies. Source it after tests/cluster/lib.sh.

# share_dependencies FROM TO [-l]: put what FROM, a target's folder `debug`, holds of the packages of others into TO; with -l as links, where
# both lie on one file system. Cargo takes what fits. Our own packages are left out: cargo cannot distinguish those of two trees at one place.
share_dependencies() {
  local from=$1 to=$2 link=(-a) file
  [ -d "$from/.fingerprint" ] || return 0
  mkdir -p "$to/deps" "$to/.fingerprint" "$to/build"
  if [ "${3:-}" = -l ] && [ "$(stat -c %d "$from")" = "$(stat -c %d "$to")" ]; then link=(-a -l); fi
  for file in "$from"/.fingerprint "$from"/deps "$from"/build; do
    find "$file" -mindepth 1 -maxdepth 1 ! -name 'weightsync*' ! -name 'libweightsync*' \
      \( -path '*/.fingerprint/*' -o -path '*/build/*' -o -name '*.rlib' -o -name '*.rmeta' -o -name '*.so' -o -name '*.d' \) -print0 |
      xargs -0 --no-run-if-empty cp "${link[@]}" --target-directory="$to/${file##*/}" || return
  done
}

# dependencies_key: 12 hex digits that change with the compiler, its flags, and any manifest of the workspace in the current folder.
dependencies_key() {
  { rustc -vV && echo "${RUSTFLAGS:-}" && cat Cargo.lock Cargo.toml crates/*/Cargo.toml; } | sha256sum | cut -c1-12
}

# copy_workspace TO: make TO a copy of the workspace in the current folder, but for TO's own target folder. It is the whole workspace, so that
# packages have the features for which they were compiled here. No source file is older than the copy: cargo builds it again whatever the
# last run left.
copy_workspace() {
  mkdir -p "$1"
  find "$1" -mindepth 1 -maxdepth 1 ! -name target -exec rm -rf {} +
  git ls-files -z -- Cargo.toml Cargo.lock src crates benches examples tests '*.rs' | xargs -0 cp --parents --target-directory="$1"
}
