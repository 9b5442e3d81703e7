# Functions that put files into the guest. Source it.

# with_libraries ROOT FILE...: copy each FILE and the libraries that it needs into ROOT, to the places that they have here.
with_libraries() {
  local root=$1 file
  shift
  for file in "$@"; do
    place "$root" "$file"
    while read -r library; do
      place "$root" "$library"
    done < <(ldd "$file" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3} $1 ~ /^\// {print $1}')
  done
}

# place ROOT FILE: copy FILE into ROOT, to the place that it has here.
place() {
  local to
  to=$1$(realpath -s "$2")
  [ -e "$to" ] && return
  mkdir -p "$(dirname "$to")"
  cp -L "$2" "$to"
}

# archive ROOT: the files of ROOT as the kernel unpacks them, on standard output.
archive() {
  (cd "$1" && find . | LC_ALL=C sort | busybox cpio -o -H newc -R 0:0)
}
