use super::*;

#[test]
fn a_refusal_names_the_cuda_that_is_needed() {
    let text = refused(4096, true, Some(12), Some(13000), "/x/libnixl_capi.so");
    assert!(text.contains("built for CUDA 12") && text.contains("install nixl-cu13"), "{text}");
}

#[test]
fn a_refusal_names_the_limit_of_locked_memory() {
    let text = refused(4096, false, Some(12), None, "/x/libnixl_capi.so");
    let limit = getrlimit(Resource::Memlock).current;
    assert_eq!(text.contains("RLIMIT_MEMLOCK") && text.contains("ulimit -l"), limit.is_some(), "{text}");
}
