use super::*;

fn progress(attempt: u32, phase: UpdatePhase, bytes: u64) -> ClientReply {
    ClientReply::Progress { version: 3, attempt, phase, bytes, total_bytes: 4 << 20 }
}

#[test]
fn progress_prints_each_phase_once_and_then_every_ten_seconds() {
    let begun = Instant::now();
    let at = |seconds| begun + Duration::from_secs(seconds);
    let mut lines = Lines::new(3, begun);
    let table = [
        (0, ClientReply::Accepted { version: 3 }, Some("version 3: waiting for its turn and for a group (0 s)")),
        (9, ClientReply::Alive, None),
        (10, ClientReply::Alive, Some("version 3: waiting for its turn and for a group (10 s)")),
        (11, progress(1, UpdatePhase::Begin, 0), Some("version 3: attempt 1: asking replicas (11 s)")),
        (11, progress(1, UpdatePhase::Transfer, 0), Some("version 3: attempt 1: sending, 0 B of 4.00 MiB (11 s)")),
        (12, progress(1, UpdatePhase::Transfer, 1 << 20), None),
        (21, progress(1, UpdatePhase::Transfer, 2 << 20), Some("version 3: attempt 1: sending, 2.00 MiB of 4.00 MiB (21 s)")),
        (22, progress(1, UpdatePhase::Verify, 4 << 20), Some("version 3: attempt 1: checking digests (22 s)")),
        (23, ClientReply::Alive, None),
        (24, progress(2, UpdatePhase::Begin, 0), Some("version 3: attempt 2: asking replicas (24 s)")),
    ];
    for (seconds, reply, line) in table {
        assert_eq!(lines.heard(&reply, at(seconds)).as_deref(), line, "after {seconds} s: {reply:?}");
    }
}

#[test]
fn progress_names_why_the_bytes_are_sent_again() {
    let begun = Instant::now();
    let mut lines = Lines::new(3, begun);
    let again = ClientReply::Again { attempt: 2, reason: "actors/b was lost".into() };
    assert_eq!(lines.heard(&again, begun).as_deref(), Some("version 3: attempt 2 sends all bytes again: actors/b was lost"));
}
