use super::*;

#[test]
fn a_path_that_was_given_is_the_only_candidate() {
    assert_eq!(candidates(Some(Path::new("/opt/libnccl.so.2"))), [PathBuf::from("/opt/libnccl.so.2")]);
    assert_eq!(candidates(None).last().unwrap(), Path::new("libnccl.so.2"));
}
