use super::*;

#[test]
fn the_library_of_a_python_prefix_is_found() {
    let prefix = tempfile::tempdir().unwrap();
    let file = prefix.path().join("lib/python3.12/dist-packages").join(IN_SITE_PACKAGES);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "").unwrap();
    assert_eq!(in_prefix(prefix.path()), [file]);
    assert!(in_prefix(&prefix.path().join("nothing")).is_empty());
}

#[test]
fn a_path_that_was_given_is_the_only_candidate() {
    assert_eq!(candidates(Some(Path::new("/opt/libnccl.so.2"))), [PathBuf::from("/opt/libnccl.so.2")]);
    assert_eq!(candidates(None).last().unwrap(), Path::new("libnccl.so.2"));
}
