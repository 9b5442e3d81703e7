use super::*;

fn said(values: &[(&str, &str, &str)]) -> Vec<(MemberName, EngineChecksum)> {
    let said = |(name, of, digest): &(&str, &str, &str)| {
        (MemberName((*name).to_owned()), EngineChecksum { of: (*of).to_owned(), digest: (*digest).to_owned(), took_ms: 1 })
    };
    values.iter().map(said).collect()
}

/// Names that agreed, and names that are wrong.
fn found(values: &[(&str, &str, &str)]) -> (Vec<String>, Vec<String>) {
    let Agreement { agreed, wrong } = compare(&said(values));
    (agreed.into_iter().map(|name| name.0).collect(), wrong.into_iter().map(|(name, _)| name.0).collect())
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn replicas_with_equal_checksums_agree() {
    assert_eq!(found(&[("a/1", "v", "x"), ("a/2", "v", "x")]), (names(&["a/1", "a/2"]), Vec::new()));
}

#[test]
fn replica_that_differs_from_most_is_wrong() {
    let values = [("a/1", "v", "x"), ("a/2", "v", "y"), ("a/3", "v", "x")];
    assert_eq!(found(&values), (names(&["a/1", "a/3"]), names(&["a/2"])));
    let why = &compare(&said(&values)).wrong[0].1;
    assert!(why.starts_with("after the load, its engine's own checksums () are those of 0 of the 2 other replicas"), "{why}");
}

/// A pool of two of which one lies was stopped as a whole.
#[test]
fn without_a_majority_one_side_goes_on_unproven() {
    assert_eq!(found(&[("a/1", "v", "x"), ("a/2", "v", "y")]), (Vec::new(), names(&["a/2"])));
    let halves = [("a/1", "v", "x"), ("a/2", "v", "y"), ("a/3", "v", "y"), ("a/4", "v", "x")];
    assert_eq!(found(&halves), (Vec::new(), names(&["a/2", "a/3"])));
    let most = [("a/1", "v", "x"), ("a/2", "v", "y"), ("a/3", "v", "y"), ("a/4", "v", "z")];
    assert_eq!(found(&most), (Vec::new(), names(&["a/1", "a/4"])));
}

#[test]
fn many_engines_of_one_pod_have_one_checksum_vote() {
    let lying = ["a/liar:1", "a/liar:2", "a/liar:3", "a/liar:4", "a/liar:5", "a/liar:6"];
    let mut values: Vec<_> = lying.iter().map(|name| (*name, "v", "y")).collect();
    values.extend([("a/1", "v", "x"), ("a/2", "v", "x")]);
    assert_eq!(found(&values), (names(&["a/1", "a/2"]), names(&lying)));
    // One whose engines differ has no vote: any of them may be wrong.
    let split = [("a/1", "v", "x"), ("a/2:1", "v", "y"), ("a/2:2", "v", "x")];
    assert_eq!(found(&split), (Vec::new(), names(&["a/2:1"])));
}

#[test]
fn only_equal_engines_of_one_pool_are_compared() {
    assert_eq!(found(&[("a/1", "v", "x"), ("b/1", "v", "y")]), (Vec::new(), Vec::new()));
    assert_eq!(found(&[("a/1", "v", "x"), ("a/2", "w", "y")]), (Vec::new(), Vec::new()));
    let members = |list: &[&str]| list.iter().map(|name| MemberName((*name).to_owned())).collect::<Vec<_>>();
    assert!(!comparable(&members(&["a/1", "b/1"])) && !comparable(&members(&["a/1"])) && comparable(&members(&["a/1", "b/1", "a/2"])));
}
