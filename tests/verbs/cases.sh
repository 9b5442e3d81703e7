# The tests themselves, for a POSIX shell: GPU, TRANSPORT and HOST name the test programs, WEIGHTSYNC_NIXL the library of NIXL.
# shellcheck shell=sh
set -eu
export WEIGHTSYNC_STORIES_OVER=verbs RUST_BACKTRACE=1
# Requests that get no answer end after seconds. A software device takes UCX's usual 7 retries as retries without end.
export UCX_RC_RETRY_COUNT=3
# Where a test wants less, it says so itself.
# shellcheck disable=SC3045
ulimit -l unlimited
# One after the other: an emulated machine is slow, and the tests count packets.
"$GPU" --include-ignored fabric::verbs:: fabric::bytes_of --test-threads=1
"$TRANSPORT" --include-ignored gdr::tests:: gdr::every_member --test-threads=1
"$HOST" --include-ignored verbs:: --test-threads=1
