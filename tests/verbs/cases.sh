# The tests themselves, for a POSIX shell: GPU, TRANSPORT and HOST name the test programs, WEIGHTSYNC_NIXL the library of NIXL. With
# VERBS_CASES=all, all of them; else one of a worker, two of the transport, and one of a group whose receiver dies.
# shellcheck shell=sh
set -eu
export WEIGHTSYNC_STORIES_OVER=verbs RUST_BACKTRACE=1
# Requests that get no answer end after seconds. A software device takes UCX's usual 7 retries as retries without end.
export UCX_RC_RETRY_COUNT=3
# Where a test wants less, it says so itself.
# shellcheck disable=SC3045
ulimit -l unlimited
# One after the other: an emulated machine is slow, and the tests count packets.
case ${VERBS_CASES:-} in
all) of_worker='fabric::verbs:: fabric::bytes_of' of_transport='gdr::tests:: gdr::every_member' of_group=verbs:: ;;
*)
  of_worker=fabric::verbs::key_or_address of_transport='gdr::tests::bucket_with_another gdr::every_member_stores'
  of_group=verbs::receiver_killed_while_it_reads
  ;;
esac
# Several names each.
# shellcheck disable=SC2086
"$GPU" --include-ignored $of_worker --test-threads=1
# shellcheck disable=SC2086
"$TRANSPORT" --include-ignored $of_transport --test-threads=1
"$HOST" --include-ignored "$of_group" --test-threads=1
