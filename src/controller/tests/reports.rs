//! What status says.

use std::collections::HashMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::fixtures::{changed, idle, object, plain};
use crate::api::{ConditionType, EdgeVerdict, MAX_MEMBERS, WeightSync, WeightSyncStatus};
use crate::controller::decide::{Decided, decide};
use crate::controller::object::Unreadable;
use crate::controller::report::{Facts, status, unreadable};
use weightsync_core::membership::{Degradation, GroupStage, MemberStanding, MemberView, MembershipView};
use weightsync_core::protocol::{
    Arrangement, EdgeFigures, EdgeOutcome, EdgeReport, EpochId, GpuDevices, HeldVersion, MemberFabric, MemberName, PodRef, PoorMember,
    PreflightReport, Reason, Received, Returned, Role, TransportChoice, TransportKind,
};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn decided(object: &WeightSync) -> Decided {
    decide(object, &[], &[&plain("trainer-0"), &plain("actor-0"), &plain("actor-1")], &HashMap::new())
}

fn member(name: &str, standing: MemberStanding) -> MemberView {
    let source = name.starts_with("trainer");
    MemberView {
        name: MemberName(format!("{}/{name}", if source { "trainer" } else { "actors" })),
        role: if source { Role::Source } else { Role::Rollout },
        pods: vec![PodRef { name: name.into(), uid: format!("uid-{name}"), node: None, ips: Vec::new() }],
        incarnation: Some(weightsync_core::protocol::Incarnation { pod_uid: format!("uid-{name}"), instance: "a".into() }),
        rank_offset: Some(0),
        size: 1,
        standing,
        keeps: Vec::new(),
        dirty: standing == MemberStanding::Dirty,
        installed: None,
        proven_by: None,
        engine_url: None,
        wedged: false,
        paused_until: None,
        received: None,
        fabric: None,
        retry_at: None,
        reason: Reason::MemberReady,
        message: "as it should be".into(),
    }
}

fn working(object: &WeightSync) -> MembershipView {
    MembershipView {
        stage: GroupStage::Committed,
        epoch: 4,
        committed: true,
        world_size: 3,
        version: Some(HeldVersion { version: 7, manifest: "abc".into() }),
        members: vec![
            member("trainer-0", MemberStanding::Ready),
            member("actor-0", MemberStanding::Ready),
            member("actor-1", MemberStanding::Ready),
        ],
        total: 2,
        ready: 2,
        transport: Some(TransportChoice::tcp("auto: no NCCL, actor-0: it has no GPU")),
        ..idle(object)
    }
}

fn report(object: &WeightSync, view: &MembershipView, before: Option<&WeightSyncStatus>, now: Timestamp) -> WeightSyncStatus {
    let decided = decided(object);
    let before = before.map_or(&[][..], |status| status.conditions.as_slice());
    status(&Facts { object, decided: &decided, view, problems: &[], stepped_down: None }, before, now)
}

fn says(status: &WeightSyncStatus, kind: ConditionType) -> (String, String, String) {
    let condition = status.conditions.iter().find(|condition| condition.type_ == kind.as_str()).unwrap();
    (condition.status.clone(), condition.reason.clone(), condition.message.clone())
}

#[test]
fn a_working_group_is_ready_in_every_respect() {
    let object = object("ws", 0);
    let status = report(&object, &working(&object), None, at(0));
    for (kind, expected) in [
        (ConditionType::Ready, "True"),
        (ConditionType::Progressing, "False"),
        (ConditionType::Accepted, "True"),
        (ConditionType::Degraded, "False"),
    ] {
        assert_eq!(says(&status, kind).0, expected, "{kind:?}");
    }
    assert_eq!(status.replicas.as_ref().unwrap().display, "2/2");
    assert_eq!((status.version, status.world_size, status.epoch), (Some(7), Some(3), None), "the epoch is another writer's");
    assert_eq!(status.trainer.unwrap().uid, "uid-trainer-0");
}

#[test]
fn rollback_status_names_origin_and_kept_versions() {
    let object = object("ws", 0);
    let held = |version| HeldVersion { version, manifest: "abc".into() };
    let returned = Some(Returned { to: 5, from: 7, pinned: true });
    let mut view = MembershipView { wanted: Some(held(5)), returned, ..working(&object) };
    view.members[1].keeps = vec![held(7), held(5)];
    let status = report(&object, &view, None, at(0));
    let (is, reason, message) = says(&status, ConditionType::Progressing);
    assert_eq!((is.as_str(), reason.as_str()), ("True", "RolledBack"));
    assert!(message.contains("version 5"), "{message}");
    assert_eq!((status.version, status.rolled_back_from), (Some(7), None), "not before enough serve it");
    assert_eq!(status.members[1].retained, [7, 5]);
    let view = MembershipView { version: Some(held(5)), ..view };
    let status = report(&object, &view, None, at(0));
    assert_eq!((status.version, status.rolled_back_from), (Some(5), Some(7)));
    let (is, reason, message) = says(&status, ConditionType::Progressing);
    assert_eq!((is.as_str(), reason.as_str()), ("False", "RolledBack"));
    assert!(message.contains("held at version 5"), "{message}");
}

#[test]
fn equal_facts_give_equal_bytes_and_a_flip_moves_the_time() {
    let object = object("ws", 0);
    let first = report(&object, &working(&object), None, at(0));
    let second = report(&object, &working(&object), Some(&first), at(60));
    assert_eq!(serde_json::to_string(&first).unwrap(), serde_json::to_string(&second).unwrap());
    let stored: WeightSyncStatus = serde_json::from_value(serde_json::to_value(&first).unwrap()).unwrap();
    assert_eq!(stored, first, "what the API server gives back is no difference");
    let lost = MembershipView { ready: 0, committed: false, stage: GroupStage::Idle, ..working(&object) };
    let third = report(&object, &lost, Some(&second), at(120));
    let time = |status: &WeightSyncStatus, kind: &str| {
        status.conditions.iter().find(|condition| condition.type_ == kind).unwrap().last_transition_time.0
    };
    assert_eq!(time(&third, "Ready"), at(120));
    assert_eq!(time(&third, "Accepted"), at(0));
}

#[test]
fn a_lost_member_is_named_with_its_cause() {
    let object = object("ws", 0);
    let mut out = member("actor-1", MemberStanding::Out);
    (out.incarnation, out.reason, out.message) = (None, Reason::AgentLost, "the connection was closed".into());
    let mut view = working(&object);
    view.members[2] = out;
    (view.ready, view.world_size, view.min_ready) = (1, 2, 2);
    view.degraded = vec![Degradation {
        reason: Reason::AgentLost,
        member: Some(MemberName("actors/actor-1".into())),
        message: "the connection was closed".into(),
    }];
    let status = report(&object, &view, None, at(0));
    for kind in [ConditionType::Ready, ConditionType::Degraded] {
        assert!(says(&status, kind).2.contains("actors/actor-1"), "{:?}", says(&status, kind));
    }
    assert_eq!(says(&status, ConditionType::Degraded).1, "AgentLost");
    assert_eq!(status.replicas.unwrap().display, "1/2");
}

#[test]
fn a_refused_spec_says_what_to_change() {
    let wrong = changed("ws", 0, |object| object["spec"]["rollouts"][0]["name"] = json!("trainer"));
    let status = report(&wrong, &idle(&wrong), None, at(0));
    let (holds, reason, message) = says(&status, ConditionType::Accepted);
    assert_eq!((holds.as_str(), reason.as_str()), ("False", "InvalidSpec"));
    assert!(message.contains("choose another"), "{message}");
    assert_eq!(says(&status, ConditionType::Ready).1, "InvalidSpec");
}

#[test]
fn group_without_a_version_is_ready_and_says_so() {
    let object = object("ws", 0);
    let view = MembershipView { version: None, ..working(&object) };
    let status = report(&object, &view, None, at(0));
    assert_eq!(says(&status, ConditionType::Ready).0, "True");
    assert_eq!(says(&status, ConditionType::Ready).1, "NoVersion");
}

#[test]
fn a_suspended_object_says_so_until_all_is_released() {
    let suspended = changed("ws", 0, |object| object["spec"]["suspend"] = json!(true));
    let view = MembershipView { released: false, ..idle(&suspended) };
    let status = report(&suspended, &view, None, at(0));
    assert_eq!(says(&status, ConditionType::Progressing).0, "True");
    assert_eq!(says(&status, ConditionType::Ready).1, "Suspended");
    let view = MembershipView { released: true, ..idle(&suspended) };
    let status = report(&suspended, &view, None, at(0));
    let (progresses, reason, _) = says(&status, ConditionType::Progressing);
    assert_eq!((progresses.as_str(), reason.as_str()), ("False", "Suspended"), "what `kubectl weightsync release` waits for");
    assert_eq!(says(&status, ConditionType::Accepted).0, "True");
}

#[test]
fn a_thousand_members_fit_into_status() {
    let object = object("ws", 0);
    let members = (0..1000).map(|number| member(&format!("actor-{number}"), MemberStanding::Behind)).collect();
    let feeder = Some(MemberName("trainer/trainer-0".into()));
    let view = MembershipView { members, feeder, ..working(&object) };
    let status = report(&object, &view, None, at(0));
    assert_eq!(status.members.len(), MAX_MEMBERS);
    let (progresses, reason, message) = says(&status, ConditionType::Progressing);
    assert_eq!((progresses.as_str(), reason.as_str()), ("True", "Updating"), "members that lag are about to be fed");
    assert!(message.contains("995 more"), "{message}");
    assert!(serde_json::to_vec(&status).unwrap().len() < 64 << 10);
}

#[test]
fn unreadable_object_keeps_all_else_of_its_status() {
    let object = object("ws", 0);
    let before = serde_json::to_value(report(&object, &working(&object), None, at(0))).unwrap();
    let mut unread = Unreadable {
        metadata: object.metadata.clone(),
        error: "missing field `trainer`".into(),
        status: before.as_object().cloned().unwrap(),
    };
    let after = unreadable(&unread, at(60));
    let typed: WeightSyncStatus = serde_json::from_value(after.clone().into()).unwrap();
    for kind in [ConditionType::Ready, ConditionType::Accepted] {
        let (is, reason, message) = says(&typed, kind);
        assert_eq!((is.as_str(), reason.as_str()), ("False", "InvalidSpec"));
        assert!(message.contains("trainer"), "{message}");
    }
    assert_eq!(says(&typed, ConditionType::Progressing).0, "False", "as it was");
    assert_eq!((after["version"].clone(), after["members"].clone()), (before["version"].clone(), before["members"].clone()));
    unread.status = after.clone();
    assert_eq!(unreadable(&unread, at(120)), after, "nothing to write");
}

#[test]
fn group_that_cannot_form_names_what_keeps_it_from_forming() {
    let object = object("ws", 0);
    let decided = decided(&object);
    let mut view = idle(&object);
    view.members = working(&object).members;
    view.members[0].incarnation = None;
    let why = "another controller (term 9) wrote epoch 7";
    let facts = Facts { object: &object, decided: &decided, view: &view, problems: &[], stepped_down: Some(why) };
    let says_why = |kind| says(&status(&facts, &[], at(0)), kind);
    for kind in [ConditionType::Ready, ConditionType::Degraded] {
        let (_, reason, message) = says_why(kind);
        assert_eq!(reason, "PersistFailed", "{kind:?}");
        assert!(message.contains(why), "{kind:?}: {message}");
    }

    view.degraded = vec![
        Degradation { reason: Reason::AgentMissing, member: Some(MemberName("actors/actor-9".into())), message: "none".into() },
        Degradation { reason: Reason::PersistFailed, member: None, message: "epoch 8 cannot be written: forbidden".into() },
    ];
    let facts = Facts { object: &object, decided: &decided, view: &view, problems: &[], stepped_down: None };
    for kind in [ConditionType::Ready, ConditionType::Degraded] {
        let (_, reason, message) = says(&status(&facts, &[], at(0)), kind);
        assert_eq!(reason, "PersistFailed", "{kind:?}");
        assert!(message.contains("forbidden"), "{kind:?}: {message}");
    }
}

#[test]
fn status_lists_measured_edges_and_names_a_slow_one() {
    let object = object("ws", 0);
    let mut view = working(&object);
    let [source, rollout] = [view.members[0].name.clone(), view.members[1].name.clone()];
    let why = format!("the edge from {source} to {rollout} carries 1.0 MB/s, others carry 10.0 MB/s");
    let figures =
        EdgeFigures { bytes: 1_000_000, nanoseconds: 1_000_000_000, round_trip_us: Some(90), mtu: Some(1500), clock_ms: Some(-2) };
    let edge = |outcome| EdgeReport { from: source.clone(), to: rollout.clone(), places: ("n1".into(), "n2".into()), outcome };
    let poor = PoorMember { member: rollout.clone(), from: source.clone(), broken: false, why: why.clone() };
    let report_of = |edge, poor| PreflightReport {
        id: EpochId { weightsync: "u".into(), created: 1, term: 1, epoch: 1 },
        transport: "tcp".into(),
        asked: "r".into(),
        done: true,
        measured: 3,
        took_ms: 40,
        edges: vec![edge],
        arrangement: Arrangement { order: vec![rollout.clone()], poor, ..Arrangement::default() },
    };
    view.preflight = Some(Box::new(report_of(edge(EdgeOutcome::Verified(figures)), vec![poor])));
    view.degraded = vec![Degradation { reason: Reason::BadEdge, member: Some(rollout.clone()), message: why.clone() }];
    let shown = report(&object, &view, None, at(0));
    assert_eq!(says(&shown, ConditionType::Degraded), ("True".into(), "BadEdge".into(), why.clone()));
    let preflight = shown.preflight.unwrap();
    assert_eq!((preflight.state.as_str(), preflight.request.as_str(), preflight.measured), ("Done", "r", 3));
    let slow = &preflight.edges[0];
    assert_eq!((slow.verdict, slow.bytes_per_second, &slow.message), (EdgeVerdict::Slow, Some(1_000_000), &why));
    let broken = EdgeOutcome::Broken { cause: "no byte".into() };
    view.preflight = Some(Box::new(report_of(edge(broken), Vec::new())));
    let shown = report(&object, &view, None, at(0)).preflight.unwrap();
    assert_eq!((shown.edges[0].verdict, shown.edges[0].message.as_str()), (EdgeVerdict::Broken, "no byte"));
}

#[test]
fn members_show_who_sent_the_last_version_and_how_fast() {
    let object = object("ws", 0);
    let mut view = working(&object);
    view.members[1].received = Some(Received {
        version: 7,
        from: MemberName("trainer/trainer-0".into()),
        by: TransportKind::Gdr,
        bytes: 48_600_000_000,
        microseconds: 2_000_900,
    });
    let status = report(&object, &view, None, at(0));
    let transfer = serde_json::to_value(&status.members[1].last_transfer).unwrap();
    let expected = json!({
        "version": 7, "from": "trainer/trainer-0", "transport": "gdr", "bytes": 48_600_000_000_u64, "milliseconds": 2000,
        "bytesPerSecond": 24_289_069_918_u64,
    });
    assert_eq!(transfer, expected);
    assert_eq!((&status.members[0].last_transfer, &status.members[2].last_transfer), (&None, &None));
}

#[test]
fn members_that_read_show_library_and_devices() {
    let object = object("ws", 0);
    let mut view = working(&object);
    let fabric = MemberFabric {
        library: "l".repeat(5000),
        version: Some("1.5.1".into()),
        plugin: "UCX".into(),
        transports: vec!["rc".into(); 99],
        devices: vec![
            GpuDevices { gpu: Some("GPU-1".into()), names: vec!["mlx5_0:1".into()] },
            GpuDevices::default(),
            GpuDevices::default(),
        ],
    };
    view.members[2].fabric = Some(Box::new(fabric));
    let status = report(&object, &view, None, at(0));
    let gdr = status.members[2].gdr.clone().unwrap();
    assert_eq!((gdr.library.len(), gdr.version.as_deref(), gdr.plugin.as_str(), gdr.transports.len()), (512, Some("1.5.1"), "UCX", 16));
    let devices: Vec<(&str, String)> = gdr.devices.iter().map(|devices| (devices.memory.as_str(), devices.names.join(" "))).collect();
    assert_eq!(devices, [("GPU-1", "mlx5_0:1".to_owned()), ("host", String::new())], "each place once");
    assert_eq!(status.members[0].gdr, None);
}
