//! Epoch rules, counting, numbers, readiness and memory: tables and properties.

use proptest::prelude::*;

use super::first_status;
use crate::group::{Group, Me, Step};
use crate::lead::table::{Failure, Table, Verdict};
use crate::rollout::machine::Installed;
use crate::rollout::readiness::{Assigned, Seen, ready};
use crate::source::history::History;
use crate::source::retain::fits;
use crate::space::Cgroups;
use weightsync_core::protocol::*;
use weightsync_core::weights::{DigestAlgorithm, IgnoredTensors};
use weightsync_engine::EngineStart;

#[tokio::test]
async fn losses_read_late_are_the_newest() {
    let core = crate::core::Core::new(me(), crate::core::Facts::default());
    let id = epoch("w", 1, 0, 1);
    for number in 0..100 {
        core.peer_lost(&id, &MemberName(format!("actors/r-{number}")), "gone");
    }
    let reported: Vec<AgentEvent> = futures::StreamExt::collect(futures::StreamExt::take(core.events().stream(false), 66)).await;
    let lost = reported.iter().filter_map(|event| match event {
        AgentEvent::PeerLost { peer, .. } => Some(peer.0.clone()),
        _ => None,
    });
    let lost: Vec<String> = lost.collect();
    assert_eq!((lost.len(), lost.last()), (64, Some(&"actors/r-99".to_owned())));
}

fn view(version: Version, phase: UpdatePhase) -> UpdateView {
    UpdateView {
        id: epoch("w", 1, 0, 1),
        version,
        attempt: 1,
        phase,
        total_bytes: 1,
        members: Vec::new(),
        phases_ms: Vec::new(),
        failure: None,
        feeding: false,
    }
}

/// The next views of a stream.
async fn updates(stream: &mut (impl futures::Stream<Item = AgentEvent> + Unpin), count: usize) -> Vec<(Version, UpdatePhase)> {
    let views = futures::StreamExt::filter_map(stream, |event| {
        std::future::ready(match event {
            AgentEvent::Update { update } => Some((update.version, update.phase)),
            _ => None,
        })
    });
    let next = futures::StreamExt::collect(futures::StreamExt::take(views, count));
    tokio::time::timeout(std::time::Duration::from_secs(20), next).await.expect("all are sent")
}

/// A reader counts ends. Before they were kept, an update that began at once overwrote the end of the one before it.
#[tokio::test]
async fn end_of_an_update_is_sent_though_another_began() {
    let core = crate::core::Core::new(me(), crate::core::Facts::default());
    let events = core.events();
    events.set_update(view(1, UpdatePhase::Done));
    let mut stream = Box::pin(events.stream(false));
    assert_eq!(updates(&mut stream, 1).await, [(1, UpdatePhase::Done)]);
    for (version, phase) in [(2, UpdatePhase::Begin), (2, UpdatePhase::Failed), (2, UpdatePhase::Failed), (3, UpdatePhase::Begin)] {
        events.set_update(view(version, phase));
    }
    // The last end of version 1 comes once more: the reader knows it.
    let seen = updates(&mut stream, 3).await;
    assert_eq!(seen, [(1, UpdatePhase::Done), (2, UpdatePhase::Failed), (3, UpdatePhase::Begin)]);
    drop(stream);
    stream = Box::pin(events.stream(false));
    assert_eq!(updates(&mut stream, 1).await, [(3, UpdatePhase::Begin)], "a reader that attaches late gets the latest only");
}

#[test]
fn view_of_a_large_update_fits_a_line_of_the_stream() {
    let member = |number: usize| MemberProgress {
        member: MemberName(format!("actors/rollout-{number:05}")),
        bytes: u64::MAX,
        step: InstallStep::Receiving,
        reason: Some("ü".repeat(10_000)),
    };
    let mut view =
        UpdateView { members: (0..1_500).map(member).collect(), failure: Some("ü".repeat(100_000)), ..view(1, UpdatePhase::Failed) };
    view.shorten();
    let line = serde_json::to_string(&AgentEvent::Update { update: view }).unwrap();
    assert!(line.len() < LONGEST_EVENT, "{} bytes", line.len());
}

fn epoch(object: &str, created: u64, term: u64, epoch: u64) -> EpochId {
    EpochId { weightsync: object.into(), created, term, epoch }
}

fn me() -> Me {
    Me { incarnation: Incarnation { pod_uid: "pod".into(), instance: "life".into() }, role: Role::Rollout, port: Some(8000) }
}

fn prepare(id: &EpochId, pod_uid: &str, port: u16, role: Role) -> PrepareRequest {
    let name = MemberName("actors/a".into());
    let member = RosterMember {
        name: name.clone(),
        role,
        rank_offset: 1,
        size: 1,
        pods: vec![PodRef { name: "a".into(), uid: pod_uid.into(), node: None, ips: Vec::new() }],
        port: Some(port),
    };
    let health = HealthPolicy { period_ms: 11, timeout_ms: 12, failure_threshold: 3, success_threshold: 2 };
    let policy = UpdatePolicy {
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        min_ready: 1,
        silence_ms: 13,
        update_timeout_ms: 14,
        retain_bytes: 0,
        keep: 1,
        max_unavailable: 0,
        max_skew: None,
        bucket_bytes: 0,
        delivery: weightsync_core::protocol::Delivery::default(),
        digest: weightsync_core::protocol::Digest::Blake3,
        data_tls: false,
        transport: TransportPolicy::default(),
        health,
        canary: None,
    };
    let roster = Roster { members: vec![member], world_size: 2, chain: vec![name.clone()] };
    PrepareRequest { id: id.clone(), member: name, roster, policy, why: String::new(), deadline_ms: 15 }
}

fn commit(id: &EpochId, instance: &str) -> CommitRequest {
    let address = MemberAddress {
        member: MemberName("actors/a".into()),
        incarnation: Incarnation { pod_uid: "pod".into(), instance: instance.into() },
        control: "c".into(),
        data: "d".into(),
        engine_url: None,
    };
    CommitRequest {
        id: id.clone(),
        addresses: vec![address],
        current: None,
        returned: None,
        refused: Vec::new(),
        feeder: None,
        transport: TransportChoice::default(),
        secret: "s".into(),
        deadline_ms: 16,
    }
}

fn fence(id: &EpochId) -> FenceRequest {
    FenceRequest { id: id.clone(), reason: "test".into() }
}

#[test]
fn a_prepare_for_somebody_else_is_refused() {
    let id = epoch("o", 1, 0, 1);
    for (pod, port, role) in [("other", 8000, Role::Rollout), ("pod", 8001, Role::Rollout), ("pod", 8000, Role::Source)] {
        let refused = Group::new(me()).prepare(&prepare(&id, pod, port, role)).unwrap_err();
        assert_eq!(refused.code, RefusalCode::WrongIncarnation, "{pod} {port} {role:?}");
    }
    let mut no_one = prepare(&id, "pod", 8000, Role::Rollout);
    no_one.member = MemberName("actors/b".into());
    assert_eq!(Group::new(me()).prepare(&no_one).unwrap_err().code, RefusalCode::Invalid);
}

#[test]
fn a_commit_for_another_life_of_the_agent_is_refused() {
    let id = epoch("o", 1, 0, 1);
    let mut group = Group::new(me());
    group.prepare(&prepare(&id, "pod", 8000, Role::Rollout)).unwrap();
    assert_eq!(group.commit(&commit(&id, "earlier life")).err().unwrap().code, RefusalCode::WrongIncarnation);
    let mut nowhere = commit(&id, "life");
    nowhere.addresses.clear();
    assert_eq!(group.commit(&nowhere).err().unwrap().code, RefusalCode::Invalid);
    assert_eq!(group.commit(&commit(&id, "life")).unwrap().0, Step::Taken { ended: None });
}

#[test]
fn repeated_message_is_answered_and_changed_one_refused() {
    let id = epoch("o", 1, 0, 1);
    let mut group = Group::new(me());
    let first = prepare(&id, "pod", 8000, Role::Rollout);
    group.prepare(&first).unwrap();
    assert_eq!(group.prepare(&first), Ok(Step::Again));
    let mut other = first.clone();
    other.policy.min_ready = 2;
    assert_eq!(group.prepare(&other).unwrap_err().code, RefusalCode::Invalid);
    group.commit(&commit(&id, "life")).unwrap();
    assert!(group.acting(&id).is_err(), "committing is not committed");
    assert!(group.confirm(&id));
    assert_eq!(group.commit(&commit(&id, "life")).unwrap().0, Step::Again);
    assert_eq!(group.prepare(&first).unwrap_err().code, RefusalCode::WrongPhase);
    assert!(group.acting(&id).is_ok());
}

#[test]
fn remade_object_and_old_leader_do_not_mix() {
    let mut group = Group::new(me());
    let remade = epoch("new", 2, 0, 1);
    group.prepare(&prepare(&epoch("old", 1, 9, 90), "pod", 8000, Role::Rollout)).unwrap();
    group.prepare(&prepare(&remade, "pod", 8000, Role::Rollout)).unwrap();
    for late in [epoch("old", 1, 9, 91), epoch("old", 1, 10, 1), remade.clone()] {
        if late != remade {
            assert_eq!(group.prepare(&prepare(&late, "pod", 8000, Role::Rollout)).unwrap_err().code, RefusalCode::StaleEpoch);
        }
        assert_eq!(group.fence(&fence(&epoch("old", 1, 99, 99))), None, "a fence of the old object ends nothing of the new one");
    }
    assert_eq!(group.fence(&fence(&remade)), Some(remade));
}

proptest! {
    #[test]
    fn epochs_of_an_agent_only_grow_and_fenced_ones_end(story in prop::collection::vec((0..4_u8, 0..3_u64, 0..6_u64), 1..60)) {
        let mut group = Group::new(me());
        let mut fenced: Vec<EpochId> = Vec::new();
        for (what, term, number) in story {
            let id = epoch("o", 1, term, number);
            let before = group.standing().id().cloned();
            match what {
                0 => { let _ = group.prepare(&prepare(&id, "pod", 8000, Role::Rollout)); }
                1 => { let _ = group.commit(&commit(&id, "life")); }
                2 => { group.confirm(&id); }
                _ => { group.fence(&fence(&id)); fenced.push(id.clone()); }
            }
            if let (Some(before), Some(now)) = (&before, group.standing().id()) {
                prop_assert!(before == now || now.supersedes(before));
            }
            if let Some(now) = group.standing().id() {
                prop_assert!(fenced.iter().all(|fenced| now.supersedes(fenced)), "{now} stands, though fenced");
            }
            if let Some(acting) = group.standing().committed() {
                prop_assert!(group.acting(acting.id()).is_ok());
            }
            prop_assert!(fenced.iter().all(|id| group.acting(id).is_err() && group.carrying(id, true).is_err()));
        }
    }
}

fn name(number: usize) -> MemberName {
    MemberName(format!("m{number}"))
}

fn status(step: InstallStep) -> UpdateStatus {
    first_status(UpdateId { epoch: epoch("o", 1, 0, 1), version: 1, attempt: 1 }, step, 10)
}

#[test]
fn layout_that_one_member_refuses_costs_that_member_only() {
    let mut table = Table::new(&[name(0), name(1)], 1);
    table.observe(&name(0), &status(InstallStep::Receiving));
    table.refused(&name(1), &Refusal { code: RefusalCode::LayoutMismatch, message: "no".into() });
    assert_eq!(table.after_begin(), Verdict::All);
    assert_eq!(table.behind_for_good(), Some((name(1), "no".to_owned())));
}

#[test]
fn member_that_failed_is_shown_with_the_one_before_it() {
    let mut table = Table::new(&[name(0), name(1)], 1);
    table.observe(&name(0), &status(InstallStep::Delivered));
    table.refused(&name(1), &Refusal { code: RefusalCode::Invalid, message: "no".into() });
    table.passed_on(&name(1), &name(0));
    let reported = table.behind().into_iter().find(|(member, _)| *member == name(1)).map(|(_, why)| why);
    assert_eq!(reported.as_deref(), Some("no; its bytes came by way of m0"));
}

#[test]
fn layout_that_every_member_refuses_fails_for_good() {
    let mut table = Table::new(&[name(0), name(1)], 1);
    for number in [0, 1] {
        table.refused(&name(number), &Refusal { code: RefusalCode::LayoutMismatch, message: "no".into() });
    }
    let failed = |failure: &Failure| failure.code == PublishErrorCode::Invalid && !failure.again && failure.lasting;
    assert!(matches!(table.after_begin(), Verdict::Fail(failure) if failed(&failure)));
}

#[test]
fn final_refusal_fails_at_once_and_temporary_one_waits() {
    for (code, again) in [(RefusalCode::OutOfSpace, false), (RefusalCode::EngineRefused, true), (RefusalCode::WrongPhase, true)] {
        let mut table = Table::new(&[name(0)], 1);
        table.refused(&name(0), &Refusal { code, message: "no".into() });
        assert!(matches!(table.after_begin(), Verdict::Fail(failure) if failure.again == again), "{code:?}");
    }
}

proptest! {
    #[test]
    fn attempt_succeeds_only_with_min_ready_confirmations(
        steps in prop::collection::vec((0..5_usize, 0..6_u8), 0..40), min_ready in 0..5_u32
    ) {
        let members: Vec<MemberName> = (0..5).map(name).collect();
        let mut table = Table::new(&members, min_ready);
        let mut installed = std::collections::BTreeSet::new();
        let mut out = std::collections::BTreeSet::new();
        for (member, step) in steps {
            let over = installed.contains(&member) || out.contains(&member);
            match step {
                0 => table.observe(&name(member), &status(InstallStep::Receiving)),
                1 => table.observe(&name(member), &status(InstallStep::Delivered)),
                2 => { table.observe(&name(member), &status(InstallStep::Installed)); if !over { installed.insert(member); } }
                3 => { table.observe(&name(member), &status(InstallStep::Failed)); if !over { out.insert(member); } }
                4 => { table.lost(&name(member), "lost"); if !over { out.insert(member); } }
                _ => {}
            }
            let enough = installed.len() >= min_ready.max(1) as usize;
            match table.after_activate() {
                Verdict::All => prop_assert!(enough && installed.len() + out.len() == 5),
                Verdict::Enough => prop_assert!(enough),
                Verdict::Wait => prop_assert!(!enough),
                Verdict::Fail(_) => prop_assert!(5 - out.len() < min_ready.max(1) as usize),
            }
            prop_assert_eq!(table.installed().len(), installed.len());
            prop_assert_eq!(table.behind().len(), 5 - installed.len());
        }
    }
}

#[test]
fn numbers_grow_and_failed_one_needs_its_own_manifest() {
    let held = |version, manifest: &str| HeldVersion { version, manifest: manifest.into() };
    let mut history = History::default();
    assert_eq!(history.admit(5, None), Ok(None));
    assert!(history.admit(5, Some(&held(5, "x"))).is_err(), "the group holds it, published by an earlier life of this agent");
    history.tried(5);
    history.read(&held(5, "five"), DigestAlgorithm::Gsum64);
    assert_eq!(history.admit(5, None), Ok(Some("five".into())));
    assert!(history.admit(4, None).is_err());
    assert_eq!(history.admit(6, None), Ok(None));
    history.reached(held(5, "five"));
    assert!(history.admit(5, None).is_err());
    assert_eq!(history.admit(7, None), Ok(None));
}

/// NCCL broke in the middle, and the next try goes over TCP: members could forge the digest for GPUs.
#[test]
fn digest_of_a_broken_try_does_not_hold_for_the_next() {
    use DigestAlgorithm::{Blake3, Gsum64};
    let mut history = History::default();
    history.tried(1);
    assert_eq!(history.algorithm(1, Gsum64), Gsum64);
    assert_eq!(history.algorithm(1, Blake3), Blake3);
    // All of it was read once: members may hold it under that manifest.
    history.read(&HeldVersion { version: 1, manifest: "one".into() }, Gsum64);
    assert_eq!(history.algorithm(1, Blake3), Gsum64);
    assert_eq!(history.algorithm(2, Blake3), Blake3);
}

#[test]
fn readiness_is_a_table() {
    let known = Assigned {
        known: true,
        serve_before_first_version: true,
        suspended: false,
        current: None,
        returned: None,
        newest: None,
        ignored: IgnoredTensors::default(),
    };
    let hold = Assigned { serve_before_first_version: false, ..known.clone() };
    let suspended = Assigned { suspended: true, ..known.clone() };
    let unknown = Assigned::default();
    let (one, two) = (EngineStart("1".into()), EngineStart("2".into()));
    let held = |version| HeldVersion { version, manifest: "m".into() };
    let installed = Installed { held: held(2), start: one.clone(), proven_by: None };
    let base = Seen {
        assigned: &known,
        released: false,
        current: None,
        last: None,
        installed: None,
        awaits: None,
        max_skew: None,
        left: false,
        dirty: None,
        unproven: None,
        switching: false,
        start: Some(&one),
        certain: true,
        unhealthy: false,
    };
    let (v1, v2, v3) = (held(1), held(2), held(3));
    let newer = Assigned { newest: Some(4), ..known.clone() };
    let left = Assigned { returned: Some(Returned { to: 1, from: 2, pinned: false }), ..known.clone() };
    let near = Seen { max_skew: Some(1), installed: Some(&installed), ..base };
    let other = HeldVersion { version: 2, manifest: "other".into() };
    let only_number = HeldVersion { version: 2, manifest: String::new() };
    let cases: Vec<(&str, Seen<'_>, bool)> = vec![
        ("before the first version, Serve", Seen { ..base }, true),
        ("before the first version, Hold", Seen { assigned: &hold, ..base }, false),
        ("started again before the group's version was known", Seen { last: Some(&v2), ..base }, false),
        ("nothing known yet", Seen { assigned: &unknown, ..base }, false),
        ("a joiner", Seen { current: Some(&v2), ..base }, false),
        ("no one knows what it holds", Seen { unproven: Some("the resume failed"), ..base }, false),
        ("installed", Seen { installed: Some(&installed), current: Some(&v2), ..base }, true),
        ("installed, only the number known", Seen { installed: Some(&installed), current: Some(&only_number), ..base }, true),
        ("installed, newer than the group", Seen { installed: Some(&installed), current: Some(&v1), ..base }, true),
        ("behind", Seen { installed: Some(&installed), current: Some(&v3), ..base }, false),
        ("after, and suspended", Seen { assigned: &suspended, current: Some(&v3), ..base }, true),
        ("suspended, and its engine is ill", Seen { assigned: &suspended, unhealthy: true, ..base }, false),
        ("after, and its turn to switch comes", Seen { installed: Some(&installed), current: Some(&v3), awaits: Some(&v3), ..base }, true),
        (
            "after, and another version lies here",
            Seen { installed: Some(&installed), current: Some(&v3), awaits: Some(&v1), ..base },
            false,
        ),
        ("after by as much as is allowed", Seen { current: Some(&v3), ..near }, true),
        ("after by that, and a newer one is in service", Seen { current: Some(&v3), assigned: &newer, ..near }, false),
        ("after by more, and its turn to switch comes", Seen { max_skew: Some(0), current: Some(&v3), awaits: Some(&v3), ..near }, false),
        ("ahead by as much as is allowed", Seen { current: Some(&v1), ..near }, true),
        ("ahead of what counts, as far as it was informed", Seen { max_skew: Some(0), current: Some(&v1), ..near }, true),
        ("left by the group, and not enough were taken back", Seen { max_skew: Some(0), current: Some(&v1), left: true, ..near }, true),
        ("left by the group, and enough were", Seen { current: Some(&v1), left: true, assigned: &left, ..near }, false),
        ("near enough, and other weights", Seen { current: Some(&other), ..near }, false),
        ("other weights, same number", Seen { installed: Some(&installed), current: Some(&other), ..base }, false),
        ("by another start", Seen { installed: Some(&installed), current: Some(&v2), start: Some(&two), ..base }, false),
        ("its process may be another one by now", Seen { installed: Some(&installed), certain: false, ..base }, false),
        ("the same while we switch it", Seen { installed: Some(&installed), certain: false, switching: true, ..base }, false),
        ("unhealthy", Seen { installed: Some(&installed), unhealthy: true, ..base }, false),
        ("paused by us", Seen { installed: Some(&installed), unhealthy: true, switching: true, ..base }, true),
        ("dirty", Seen { installed: Some(&installed), dirty: Some("load"), ..base }, false),
        ("released", Seen { released: true, current: Some(&v3), ..base }, true),
        ("released, and its engine is ill", Seen { released: true, unhealthy: true, ..base }, false),
        ("released but dirty", Seen { released: true, dirty: Some("load"), ..base }, false),
    ];
    for (what, seen, expected) in cases {
        assert_eq!(ready(&seen).is_ok(), expected, "{what}: {:?}", ready(&seen));
    }
}

/// A version whose publisher died is installed all the same: the source's next agent heard of the one before.
#[test]
fn replica_newer_than_the_known_version_is_ready_in_the_roster() {
    let (id, held) = (epoch("o", 1, 0, 1), |version| HeldVersion { version, manifest: "m".into() });
    let shown = |installed: u64, returned: Option<Returned>, max_skew: Option<u64>| {
        let core = crate::core::Core::new(me(), crate::core::Facts::default());
        let mut prepared = prepare(&id, "pod", 8000, Role::Rollout);
        prepared.policy.max_skew = max_skew;
        core.prepare(&prepared).unwrap();
        let (_, epoch) = core.commit(&CommitRequest { returned, ..commit(&id, "life") }).unwrap();
        let state = MemberState::clone(&core.events().states().borrow());
        let state = MemberState { phase: MemberPhase::Ready, healthy: true, installed: Some(held(installed)), ..state };
        let roster = crate::roster::view(Some(&epoch), Some(&held(4)), &std::collections::BTreeMap::new(), &state);
        roster.replicas[0].state.clone()
    };
    assert_eq!(shown(5, None, None), "ready");
    assert_eq!(shown(4, None, None), "ready");
    assert_eq!(shown(3, None, None), "behind");
    assert_eq!(shown(5, None, Some(0)), "behind", "it serves once its version counts");
    let left = Returned { to: 4, from: 5, pinned: false };
    assert_eq!(shown(6, Some(left), None), "ready");
}

#[test]
fn memory_counts_on_every_level_of_both_cgroup_versions() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("pod/memory.max", "1000000\n");
    write("pod/memory.current", "900000\n");
    write("pod/memory.stat", "anon 1\ninactive_file 200000\n");
    write("pod/agent/memory.max", "max\n");
    write("pod/agent/memory.current", "5\n");
    let v2 = Cgroups::at(root.path().to_owned(), "0::/pod/agent\n".into());
    let tightest = v2.tightest().unwrap();
    assert_eq!((tightest.limit, tightest.used), (1_000_000, 700_000));
    assert!(v2.reserve(268_000).is_ok());
    assert!(v2.reserve(270_000).unwrap_err().to_string().contains("limit of 1000000"));
    write("memory/pod/memory.limit_in_bytes", "500000\n");
    write("memory/pod/memory.usage_in_bytes", "400000\n");
    let v1 = Cgroups::at(root.path().to_owned(), "12:cpu,cpuacct:/pod\n8:memory:/pod\n".into());
    assert_eq!(v1.tightest().unwrap().limit, 500_000);
    let unlimited = Cgroups::at(root.path().to_owned(), "0::/../elsewhere\n".into());
    assert_eq!(unlimited.tightest(), None);
    assert!(fits(10, 0, 10, 0, &unlimited).is_ok());
    assert!(fits(10, 1, 10, 0, &unlimited).is_err());
    assert!(fits(300_000, 0, u64::MAX, 0, &v2).is_err());
}

#[test]
fn commit_with_an_address_of_another_pod_is_refused() {
    let id = EpochId { weightsync: "w".into(), created: 1, term: 1, epoch: 1 };
    for (control, data, taken) in [
        ("10.0.0.7:1", "10.0.0.7:2", true),
        ("[::ffff:10.0.0.7]:1", "[fd00::7]:2", true),
        ("10.0.0.8:1", "10.0.0.7:2", false),
        ("10.0.0.7:1", "127.0.0.1:2", false),
    ] {
        let mut group = Group::new(me());
        let mut prepared = prepare(&id, "pod", 8000, Role::Rollout);
        prepared.roster.members[0].pods[0].ips = vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
        group.prepare(&prepared).unwrap();
        let mut request = commit(&id, "life");
        (request.addresses[0].control, request.addresses[0].data) = (control.into(), data.into());
        let answer = group.commit(&request).map(drop);
        assert_eq!(answer.is_ok(), taken, "{control} {data}: {answer:?}");
    }
}

#[test]
fn memory_that_the_node_lacks_is_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("meminfo"), "MemTotal:       32000 kB\nMemFree:  5 kB\nMemAvailable:    3000 kB\n").unwrap();
    let node = Cgroups::at(root.path().to_owned(), "0::/\n".into());
    let refused = node.reserve(2001 << 10).unwrap_err().to_string();
    assert!(refused.contains("2048000 are available on the node"), "{refused}");
    assert!(node.reserve(2000 << 10).is_ok());
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    assert!(node.reserve_in(shm.path(), 2001 << 10).is_err());
    assert!(node.reserve_in(shm.path(), 2000 << 10).is_ok());
}

#[test]
fn room_of_one_engine_is_not_given_to_another() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("meminfo"), "MemTotal: 32 kB\nMemAvailable: 1001 kB\n").unwrap();
    let first = Cgroups::at(root.path().to_owned(), "0::/\n".into());
    let second = first.clone();
    let room = first.reserve(600 << 10).unwrap();
    assert!(second.reserve(500 << 10).is_err());
    // What was written is counted by the machine, which this file stands for.
    room.used(200 << 10);
    std::fs::write(root.path().join("meminfo"), "MemTotal: 32 kB\nMemAvailable: 801 kB\n").unwrap();
    assert!(second.reserve(500 << 10).is_err());
    assert!(second.reserve(400 << 10).is_ok());
    drop(room);
    assert!(second.reserve(500 << 10).is_ok());
    assert!(second.reserve(u64::MAX).is_err());
}
