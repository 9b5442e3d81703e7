use std::time::Duration;

use super::*;
use crate::core::{Core, Facts};
use crate::group::Me;
use weightsync_core::protocol::{EngineFacts, Incarnation, MemberState, Role};
use weightsync_core::weights::{Dtype, TensorSpec};

/// A version of two buckets, of 512 and 64 bytes.
fn layout() -> Layout {
    let tensor = |name: &str, elements| TensorSpec::new(name.to_owned(), Dtype::F32, vec![elements]);
    Layout::new("test", vec![tensor("a", 128), tensor("b", 16)], 512).unwrap()
}

#[test]
fn next_copy_is_a_table() {
    let last = || Next::LikeLast([512, 64].into());
    // A version was laid out, copies lie in pinned memory now, and did in an earlier group; then what is expected.
    for (laid_out, now, earlier, next) in [
        (false, false, false, Next::LikeEngines),
        (false, true, false, Next::LikeEngines),
        (true, false, false, Next::Nothing),
        (true, true, false, last()),
        (true, false, true, last()),
        (true, true, true, last()),
    ] {
        let pinning = Pinning::default();
        if laid_out {
            pinning.laid_out(&layout());
        }
        if earlier {
            pinning.next(true);
        }
        assert_eq!(pinning.next(now), next, "laid out {laid_out}, kept {now}, before {earlier}");
    }
}

#[test]
fn first_version_leaves_as_much_free_as_it_takes() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("memory.max"), "3200000\n").unwrap();
    // 1/32 of the limit is never asked for: 1,000,000 bytes are free.
    std::fs::write(root.path().join("memory.current"), "2100000\n").unwrap();
    for (next, bytes, pinned) in [
        (Next::LikeEngines, 500_000, true),
        (Next::LikeEngines, 500_001, false),
        (Next::LikeEngines, u64::MAX, false),
        (Next::LikeLast([].into()), 1_000_000, true),
        (Next::LikeLast([].into()), 1_000_001, false),
    ] {
        let cgroups = Cgroups::at(root.path().to_owned(), "0::/\n".into());
        let room = next.room(&cgroups, bytes);
        assert_eq!(room.is_ok(), pinned, "{next:?}, {bytes}: {room:?}");
        // While it is being pinned, all of it is taken.
        assert_eq!(cgroups.reserve(1).is_ok(), !pinned, "{next:?}, {bytes}");
    }
}

/// A rollout's engine with a checkpoint of so many bytes; `None`: it has reported nothing yet.
fn peer(model_bytes: Option<u64>, lost: bool) -> Peer {
    let me = Me { incarnation: Incarnation { pod_uid: "pod".into(), instance: "life".into() }, role: Role::Rollout, port: None };
    let core = Core::new(me, Facts::default());
    let state = model_bytes.map(|bytes| {
        let engine = EngineFacts { model_bytes: Some(bytes), ..crate::tests::engine::facts() };
        MemberState { engine: Some(engine), ..MemberState::clone(&core.events().states().borrow()) }
    });
    Peer { state, lost: lost.then(|| "gone".to_owned()) }
}

#[tokio::test(start_paused = true)]
async fn longest_checkpoint_waits_for_all_that_are_not_lost() {
    for (peers, expected) in [
        (vec![peer(Some(7), false), peer(Some(9), false), peer(Some(8), true)], Some(Some(9))),
        (vec![peer(Some(7), false), peer(None, true)], Some(Some(7))),
        (vec![peer(Some(7), false), peer(None, false)], None),
        (vec![peer(None, true)], Some(None)),
    ] {
        let named = peers.iter().enumerate().map(|(number, peer)| (MemberName(format!("actors/r-{number}")), peer.clone()));
        let known = watch::Sender::new(named.collect());
        let found = tokio::time::timeout(Duration::from_secs(60), longest_model(known.subscribe())).await;
        assert_eq!(found.ok(), expected, "{peers:?}");
    }
}
