use super::*;
use weightsync_core::protocol::{MemberName, PublishErrorCode, UpdatePhase};

#[test]
fn outcome_names_lagging_members_and_why() {
    let outcome = PublishResult {
        version: 7,
        epoch: 4,
        attempts: 2,
        bytes: 3 << 20,
        manifest: "0123456789abcdef".into(),
        installed: vec![MemberName("actors/a".into())],
        behind: vec![(MemberName("actors/b".into()), "engine does not answer".into())],
        phases_ms: vec![("transfer".into(), 12)],
        mixed: vec![(MemberName("actors/a".into()), vec![MixedWindow { version: 7, begin_ms: 5, end_ms: Some(9) }])],
        notes: vec![(MemberName("actors/a".into()), vec!["compared with nothing".into()])],
    };
    let text = result(&outcome);
    assert!(text.starts_with("version 7: 1 replica serves it (epoch 4, 3.00 MiB, attempt 2, manifest 0123456789ab)\n"), "{text}");
    assert!(text.contains("  transfer           12 ms\n") && text.contains("  behind: actors/b: engine does not answer\n"), "{text}");
    assert!(
        text.ends_with("  served while it loaded: actors/a: from 5 to 9 (ms since 1970)\n  note: actors/a: compared with nothing\n"),
        "{text}"
    );
}

#[test]
fn an_error_names_code_phase_member_and_whether_to_try_again() {
    let failed = PublishError {
        code: PublishErrorCode::NotEnoughReplicas,
        message: "1 of 2".into(),
        retryable: true,
        phase: Some(UpdatePhase::Begin),
        member: Some(MemberName("actors/b".into())),
    };
    let text = error(&failed);
    assert_eq!(text, "NotEnoughReplicas: 1 of 2 [phase Begin] [member actors/b] (the same command may succeed later)");
}
