use super::*;

#[test]
fn packages_of_a_prefix_are_found() {
    let prefix = tempfile::tempdir().unwrap();
    let place = prefix.path().join("lib/python3.12/dist-packages");
    std::fs::create_dir_all(&place).unwrap();
    assert_eq!(in_prefix(prefix.path()), [place]);
    assert!(in_prefix(&prefix.path().join("nothing")).is_empty());
}
