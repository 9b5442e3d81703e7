use super::*;

#[test]
fn assignments_reach_all_and_versions_those_without_a_source() {
    let held = HeldVersion { version: 7, manifest: "m".into() };
    let returned = Returned { to: 6, from: 7, pinned: false };
    let hindrance = Hindrance { message: "actors/a: AgentMissing".into(), permanent: false };
    let nothing = Common::default();
    let current = Common { current: Some(&held), ..nothing };
    let table = [
        (nothing, nothing, CommonChange::Nothing),
        (nothing, current, CommonChange::Version),
        (current, current, CommonChange::Nothing),
        (current, Common { returned: Some(returned), ..current }, CommonChange::Service),
        (Common { newest: Some(7), ..current }, Common { newest: Some(8), ..current }, CommonChange::Service),
        (nothing, Common { newest: Some(7), ..current }, CommonChange::Service),
        (current, Common { suspended: true, ..current }, CommonChange::Service),
        (Common { suspended: true, ..current }, current, CommonChange::Service),
        (current, Common { hindrance: Some(&hindrance), ..current }, CommonChange::Hindrance),
        (Common { hindrance: Some(&hindrance), ..nothing }, current, CommonChange::Version),
    ];
    for (before, now, common_change) in table {
        assert_eq!(CommonChange::between(before, now), common_change, "{before:?} {now:?}");
    }
}
