use crate::protocol::TransportPolicy;

#[test]
fn rank_0_allocates_as_the_engines_do_that_join_it() {
    let of = |kinds: &[&str]| TransportPolicy::default().beside_engines(kinds.iter().copied()).defaults["NCCL_CUMEM_ENABLE"].clone();
    assert_eq!(of(&["sglang", "sglang"]), "0");
    assert_eq!(of(&["lmdeploy"]), "-2");
    assert_eq!(of(&["vllm", "sglang"]), "-2");
    assert_eq!(of(&[]), "-2");
}
