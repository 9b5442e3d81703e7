//! What objects want, and which pods may serve.

use std::collections::HashMap;

use serde_json::json;

use super::fixtures::{changed, idle, object, plain, pod};
use crate::controller::decide::{Decided, decide, target_container};
use crate::controller::readiness::{GATE, Verdict, present, verdicts};
use crate::controller::wedged::{Wedged, wedged};
use weightsync_core::membership::{GroupStage, MemberStanding, MemberView, MembershipView};
use weightsync_core::plan::LeftOutCode;
use weightsync_core::protocol::{HeldVersion, MemberName, PodRef, Reason, Returned, Role};

#[test]
fn pods_become_members_and_agents_learn_their_engines() {
    let object = object("ws", 0);
    let pods = [plain("trainer-0"), plain("actor-0"), plain("actor-1")];
    let decided = decide(&object, &[&object], &pods.iter().collect::<Vec<_>>(), &HashMap::new());
    let names: Vec<&str> = decided.members.0.iter().map(|candidate| candidate.name.0.as_str()).collect();
    assert_eq!(names, ["trainer/trainer-0", "actors/actor-0", "actors/actor-1"]);
    assert_eq!(decided.refused, None);
    assert_eq!(decided.replicas, 2);
    assert_eq!(decided.claims["uid-trainer-0"].role, Role::Source);
    let engines = &decided.claims["uid-actor-1"].engines;
    assert_eq!((engines[0].kind.as_str(), engines[0].port), ("vllm", 8000));
}

/// A pod that had to be ready before it is fed would never be fed: its sidecar says "not ready" until it was.
#[test]
fn unready_pod_takes_part_while_its_engine_container_runs() {
    let object = object("ws", 0);
    let unready = pod("actor-0", |pod| {
        pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]);
        pod["status"]["containerStatuses"][0]["ready"] = json!(false);
    });
    let crashed = pod("actor-1", |pod| {
        pod["status"]["containerStatuses"][0]["state"] = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    });
    let decided = decide(&object, &[], &[&plain("trainer-0"), &unready, &crashed], &HashMap::new());
    assert_eq!(decided.members.0.len(), 2);
    assert!(decided.members.1[0].message.contains("CrashLoopBackOff"), "{:?}", decided.members.1);
    assert!(decided.claims.contains_key("uid-actor-1"), "its agent belongs to the object all the same");
}

#[test]
fn terminating_pod_keeps_its_claim_to_leave_in_order() {
    let terminating = pod("actor-0", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let ended = pod("actor-1", |pod| pod["status"]["phase"] = json!("Failed"));
    let decided = decide(&object("ws", 0), &[], &[&terminating, &ended], &HashMap::new());
    assert!(decided.claims.contains_key("uid-actor-0"));
    assert!(!decided.claims.contains_key("uid-actor-1"));
    assert!(decided.no_source.is_some(), "and no one could publish");
}

#[test]
fn younger_of_two_objects_on_one_pod_claims_nothing() {
    let (older, younger) = (object("older", 0), object("younger", 1));
    let pods = [plain("trainer-0"), plain("actor-0")];
    let pods: Vec<_> = pods.iter().collect();
    assert_eq!(decide(&older, &[&older, &younger], &pods, &HashMap::new()).refused, None);
    let refused = decide(&younger, &[&older, &younger], &pods, &HashMap::new());
    let (reason, message) = refused.refused.clone().unwrap();
    assert_eq!(reason, Reason::PodClaimed);
    assert!(message.contains("default/older"), "{message}");
    assert!(refused.claims.is_empty() && refused.members.0.is_empty());
}

#[test]
fn a_spec_that_makes_no_sense_is_refused_with_its_field() {
    let wrong = changed("ws", 0, |object| object["spec"]["rollouts"][0]["engine"]["ports"] = json!([0]));
    let (reason, message) = decide(&wrong, &[], &[], &HashMap::new()).refused.unwrap();
    assert_eq!(reason, Reason::InvalidSpec);
    assert!(message.contains("rollouts"), "{message}");
}

#[test]
fn worker_pods_of_a_replica_have_no_engine() {
    let grouped = changed("ws", 0, |object| object["spec"]["rollouts"][0]["replica"] = json!({"pods": 2}));
    let member = |name: &str, worker: &str| {
        pod(name, |pod| {
            pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-key"] = json!("g0");
            pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = json!(worker);
        })
    };
    let decided = decide(&grouped, &[], &[&plain("trainer-0"), &member("actor-0", "0"), &member("actor-0-1", "1")], &HashMap::new());
    assert_eq!(decided.members.0.len(), 2, "{:?}", decided.members);
    assert_eq!(decided.claims["uid-actor-0"].engines.len(), 1);
    assert_eq!(decided.claims["uid-actor-0-1"].engines.len(), 0);
}

#[test]
fn agents_run_next_to_engine_and_trainers_first_container() {
    let object = object("ws", 0);
    assert_eq!(target_container(&object, &plain("actor-0")).as_deref(), Some("engine"));
    assert_eq!(target_container(&object, &plain("trainer-0")).as_deref(), Some("train"));
    let stranger = pod("actor-0", |pod| pod["metadata"]["labels"]["app"] = json!("other"));
    assert_eq!(target_container(&object, &stranger), None);
}

#[test]
fn registered_engines_of_a_pod_are_members_of_their_own() {
    let registers = |status: &serde_json::Value| {
        changed("ws", 0, |object| {
            object["spec"]["rollouts"][0]["engine"] = json!({"kind": "VLLM", "discovery": "Registered"});
            object["status"] = status.clone();
        })
    };
    let pods = [plain("trainer-0"), plain("actor-0"), plain("actor-1")];
    let pods: Vec<_> = pods.iter().collect();
    let registered = HashMap::from([("uid-actor-0".to_owned(), vec![8001, 8002]), ("uid-actor-1".to_owned(), Vec::new())]);
    let names = |decided: &Decided| decided.members.0.iter().skip(1).map(|candidate| candidate.name.0.clone()).collect::<Vec<_>>();

    let decided = decide(&registers(&json!({})), &[], &pods, &registered);
    assert_eq!(names(&decided), ["actors/actor-0:8001", "actors/actor-0:8002"]);
    assert!(decided.members.1[0].message.contains("pod actor-1: no engine has registered"), "{:?}", decided.members.1);
    let ports: Vec<u16> = decided.claims["uid-actor-0"].engines.iter().map(|engine| engine.port).collect();
    assert_eq!((ports, decided.claims["uid-actor-1"].registered), (vec![8001, 8002], true));

    // A controller that just started knows no engines, which is not the same as none: the status lists the first members only.
    let member = |name: &str| json!({"name": name, "size": 1, "state": "Ready", "reason": "Serving"});
    let before = registers(&json!({"members": [member("actors/actor-1:8003")]}));
    let decided = decide(&before, &[], &pods, &HashMap::new());
    assert_eq!(names(&decided), [""; 0]);
    let codes: Vec<_> = decided.members.1.iter().map(|left_out| (left_out.who.0.as_str(), left_out.code)).collect();
    assert_eq!(codes, [("actors/actor-0", LeftOutCode::NotReported), ("actors/actor-1", LeftOutCode::NotReported)]);
}

fn held(version: u64) -> HeldVersion {
    HeldVersion { version, manifest: format!("digest of {version}") }
}

fn member(name: &str, standing: MemberStanding, installed: Option<HeldVersion>) -> MemberView {
    MemberView {
        name: MemberName(format!("actors/{name}")),
        role: Role::Rollout,
        pods: vec![PodRef { name: name.into(), uid: format!("uid-{name}"), node: None, ips: Vec::new() }],
        incarnation: None,
        rank_offset: None,
        size: 1,
        standing,
        keeps: Vec::new(),
        dirty: standing == MemberStanding::Dirty,
        installed,
        proven_by: None,
        engine_url: None,
        wedged: false,
        paused_until: None,
        received: None,
        fabric: None,
        retry_at: None,
        reason: Reason::Updating,
        message: "waits".into(),
    }
}

fn gated(name: &str) -> k8s_openapi::api::core::v1::Pod {
    pod(name, |pod| pod["spec"]["readinessGates"] = json!([{"conditionType": GATE}]))
}

fn view(stage: GroupStage, version: Option<HeldVersion>, members: Vec<MemberView>) -> MembershipView {
    MembershipView { stage, version, members, ..idle(&object("ws", 0)) }
}

fn verdict_of(view: &MembershipView, hold: bool) -> Option<Verdict> {
    let object = changed("ws", 0, |object| {
        if hold {
            object["spec"]["readiness"] = json!({"beforeFirstVersion": "Hold"});
        }
    });
    verdicts(&object, view, &[&gated("actor-0")]).remove("uid-actor-0")
}

#[test]
fn gated_pod_serves_only_what_its_engine_confirmed() {
    use MemberStanding::{Behind, Dirty, Forming, Ready, Updating, Waiting};
    let committed = |standing, installed| view(GroupStage::Committed, Some(held(2)), vec![member("actor-0", standing, installed)]);
    let cases = [
        (Ready, Some(held(2)), true),
        (Updating, Some(held(2)), true),
        (Updating, Some(held(3)), true),
        // A group is being formed again: what is served did not change by that.
        (Forming, Some(held(2)), true),
        (Waiting, Some(held(2)), true),
        (Behind, Some(held(1)), false),
        (Behind, None, false),
        (Dirty, Some(held(2)), false),
    ];
    for (standing, installed, ready) in cases {
        let verdict = verdict_of(&committed(standing, installed.clone()), false).unwrap();
        assert_eq!(verdict.ready, ready, "{standing:?} {installed:?}: {verdict:?}");
    }
}

#[test]
fn gated_pod_serves_within_the_skew_limit_only() {
    let near = |most, newest, holds| {
        let members = vec![member("actor-0", MemberStanding::Behind, Some(held(holds)))];
        MembershipView { max_skew: Some(most), newest: Some(newest), ..view(GroupStage::Committed, Some(held(2)), members) }
    };
    for (most, newest, holds, ready) in [(0, 2, 1, false), (1, 2, 1, true), (1, 3, 1, false), (0, 2, 3, false), (1, 3, 3, true)] {
        let verdict = verdict_of(&near(most, newest, holds), false).unwrap();
        assert_eq!(verdict.ready, ready, "{holds} with {newest} in service, at most {most}: {verdict:?}");
    }
    let returned = Some(Returned { to: 2, from: 3, pinned: false });
    let left = MembershipView { returned, wanted: Some(held(2)), max_skew: None, ..near(0, 2, 3) };
    let verdict = verdict_of(&left, false).unwrap();
    assert!(!verdict.ready && verdict.message.contains("went back to 2"), "{verdict:?}");
}

#[test]
fn pods_before_first_version_serve_or_wait_as_specified() {
    let view = view(GroupStage::Committed, None, vec![member("actor-0", MemberStanding::Ready, None)]);
    assert!(verdict_of(&view, false).unwrap().ready);
    assert!(!verdict_of(&view, true).unwrap().ready);
}

#[test]
fn pod_with_half_an_update_never_serves() {
    for standing in [MemberStanding::Forming, MemberStanding::Waiting, MemberStanding::Out, MemberStanding::Dirty] {
        let dirty = MemberView { dirty: true, ..member("actor-0", standing, None) };
        let verdict = verdict_of(&view(GroupStage::Preparing, None, vec![dirty]), false).unwrap();
        assert!(!verdict.ready, "{standing:?}: {verdict:?}");
    }
}

#[test]
fn unknown_pod_with_a_version_is_not_ready() {
    let of_others = |version| view(GroupStage::Committed, version, vec![member("actor-9", MemberStanding::Ready, None)]);
    let unknown = verdict_of(&of_others(Some(held(2))), false).unwrap();
    assert!(!unknown.ready && unknown.message.contains("version 2"), "{unknown:?}");
    assert!(verdict_of(&of_others(None), false).unwrap().ready, "beforeFirstVersion is Serve");
    assert!(!verdict_of(&of_others(None), true).unwrap().ready, "and here Hold");
    let trainer = pod("trainer-1", |pod| pod["spec"]["readinessGates"] = json!([{"conditionType": GATE}]));
    assert!(verdicts(&object("ws", 0), &of_others(Some(held(2))), &[&trainer])["uid-trainer-1"].ready, "a trainer serves no version");
}

#[test]
fn a_controller_that_just_started_says_nothing_about_pods() {
    let adopting = view(GroupStage::Adopting, Some(held(2)), vec![member("actor-0", MemberStanding::Out, None)]);
    assert_eq!(verdict_of(&adopting, false), None);
}

#[test]
fn a_suspended_object_leaves_its_pods_serving() {
    let suspended = changed("ws", 0, |object| object["spec"]["suspend"] = json!(true));
    let view = view(GroupStage::Suspended, Some(held(2)), vec![member("actor-0", MemberStanding::Out, None)]);
    let verdicts = verdicts(&suspended, &view, &[&gated("actor-0"), &plain("actor-1")]);
    assert!(verdicts["uid-actor-0"].ready);
    assert_eq!(verdicts.len(), 1, "a pod without the gate is not touched");
}

#[test]
fn a_pod_with_two_engines_is_as_ready_as_the_least_ready() {
    let mut second = member("actor-0", MemberStanding::Behind, Some(held(1)));
    second.name = MemberName("actors/actor-0:8001".into());
    let view = view(GroupStage::Committed, Some(held(2)), vec![member("actor-0", MemberStanding::Ready, Some(held(2))), second]);
    assert!(!verdict_of(&view, false).unwrap().ready);
}

#[test]
fn the_present_condition_is_read_from_the_pod() {
    let open = pod("actor-0", |pod| pod["status"]["conditions"] = json!([{"type": GATE, "status": "True"}]));
    assert_eq!((present(&open), present(&plain("actor-0"))), (Some(true), None));
}

#[test]
fn pod_with_wedged_engine_is_deleted_only_where_asked() {
    let restart = |object: &mut serde_json::Value| object["spec"]["update"] = json!({"onWedged": "RestartPod"});
    let owned = |name: &str| {
        let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true}]);
        pod(name, |pod| pod["metadata"]["ownerReferences"] = owner.clone())
    };
    let stuck = |name: &str| MemberView { wedged: true, message: "stuck".into(), ..member(name, MemberStanding::Out, None) };
    let members = vec![stuck("actor-0"), stuck("actor-1"), stuck("actor-2"), member("actor-3", MemberStanding::Out, None)];
    let view = view(GroupStage::Committed, None, members);
    let going = pod("actor-2", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let pods = [owned("actor-0"), plain("actor-1"), going, owned("actor-3")];
    let pods: Vec<_> = pods.iter().collect();

    assert_eq!(wedged(&object("ws", 0), &view, &pods), Wedged::default(), "the default only tells");
    let asked = wedged(&changed("ws", 0, restart), &view, &pods);
    assert_eq!(asked.delete, [(pods[0], "stuck".to_owned())]);
    assert_eq!(asked.problems.len(), 1, "{:?}", asked.problems);
    assert!(asked.problems[0].1.contains("actor-1: it has no owner"), "{:?}", asked.problems);
}

#[test]
fn request_to_measure_is_a_rule_of_the_group() {
    let asks = |annotations: serde_json::Value| {
        let object = changed("ws", 0, |object| object["metadata"]["annotations"] = annotations.clone());
        decide(&object, &[], &[], &HashMap::new()).config.policy.transport.preflight_asked
    };
    assert_eq!(asks(json!({})), "");
    assert_eq!(asks(json!({"weightsync.dev/preflight": "now"})), "now");
    assert_eq!(asks(json!({"weightsync.dev/preflight": "x".repeat(1000)})).len(), 64);
}
