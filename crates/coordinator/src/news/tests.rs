use super::*;

#[test]
fn what_may_serve_is_told_to_everybody_and_a_version_to_whoever_hears_of_it_in_no_other_way() {
    let held = HeldVersion { version: 7, manifest: "m".into() };
    let returned = Returned { to: 6, from: 7, pinned: false };
    let hindrance = Hindrance { message: "actors/a: AgentMissing".into(), permanent: false };
    let nothing = Common::default();
    let current = Common { current: Some(&held), ..nothing };
    let table = [
        (nothing, nothing, News::Nothing),
        (nothing, current, News::Version),
        (current, current, News::Nothing),
        (current, Common { returned: Some(returned), ..current }, News::Service),
        (Common { newest: Some(7), ..current }, Common { newest: Some(8), ..current }, News::Service),
        (nothing, Common { newest: Some(7), ..current }, News::Service),
        (current, Common { suspended: true, ..current }, News::Service),
        (Common { suspended: true, ..current }, current, News::Service),
        (current, Common { hindrance: Some(&hindrance), ..current }, News::Hindrance),
        (Common { hindrance: Some(&hindrance), ..nothing }, current, News::Version),
    ];
    for (before, now, news) in table {
        assert_eq!(News::between(before, now), news, "{before:?} {now:?}");
    }
}
