use super::*;

#[test]
fn a_version_reads_as_nccl_writes_it() {
    assert_eq!(Version(22809).to_string(), "2.28.9");
    assert_eq!(Version(23007).to_string(), "2.30.7");
}

#[test]
fn foreign_library_is_refused_with_the_missing_function() {
    let error = Nccl::load(Some(Path::new("libm.so.6"))).err().unwrap().to_string();
    assert!(error.contains("libm.so.6: it lacks ncclGetVersion"), "{error}");
    let error = Nccl::load(Some(Path::new("/nowhere/libnccl.so.2"))).err().unwrap().to_string();
    assert!(error.contains("/nowhere/libnccl.so.2: "), "{error}");
}
