use super::*;

#[test]
fn what_may_serve_is_told_to_everybody_and_a_version_to_whoever_hears_of_it_in_no_other_way() {
    let held = HeldVersion { version: 7, manifest: "m".into() };
    let returned = Returned { to: 6, from: 7, pinned: false };
    let table = [
        ((None, None, None), (None, None, None), News::Nothing),
        ((None, None, None), (Some(&held), None, None), News::Version),
        ((Some(&held), None, None), (Some(&held), None, None), News::Nothing),
        ((Some(&held), None, None), (Some(&held), Some(returned), None), News::Service),
        ((Some(&held), None, Some(7)), (Some(&held), None, Some(8)), News::Service),
        ((None, None, None), (Some(&held), None, Some(7)), News::Service),
    ];
    for (before, now, news) in table {
        assert_eq!(News::between(before, now), news, "{before:?} {now:?}");
    }
}
