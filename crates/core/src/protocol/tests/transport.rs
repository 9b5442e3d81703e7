use crate::protocol::{JoinResponse, TransportPolicy};

#[test]
fn rank_0_allocates_as_the_engines_do_that_join_it() {
    let of = |kinds: &[&str]| TransportPolicy::default().with_engines(kinds.iter().copied()).defaults["NCCL_CUMEM_ENABLE"].clone();
    assert_eq!(of(&["sglang", "sglang"]), "0");
    assert_eq!(of(&["lmdeploy"]), "-2");
    assert_eq!(of(&["vllm", "sglang"]), "-2");
    assert_eq!(of(&[]), "-2");
}

#[test]
fn times_with_a_fraction_are_read_as_they_were_written() {
    for init_ms in [2.5, 0.1 + 0.2, -1.924_355_060_848_211e-78, 138.077_877_000_000_02] {
        let joined = JoinResponse { init_ms, warm_up_ms: 0.0 };
        let read: JoinResponse = serde_json::from_str(&serde_json::to_string(&joined).unwrap()).unwrap();
        assert_eq!(read, joined);
    }
}
