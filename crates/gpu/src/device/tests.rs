use super::*;

fn gpu(uuid: &str) -> ((), GpuFacts) {
    let (name, bus) = ("NVIDIA H200".to_owned(), String::new());
    ((), GpuFacts { uuid: uuid.into(), name, bus, memory_bytes: 1, free_bytes: 0, driver: 13000, refused: None })
}

#[test]
fn a_gpu_is_chosen_by_uuid_or_because_it_is_the_only_one() {
    assert_eq!(choose(vec![gpu("GPU-a"), gpu("GPU-b")], Some("gpu-B")).unwrap().1.uuid, "GPU-b");
    assert_eq!(choose(vec![gpu("GPU-a")], None).unwrap().1.uuid, "GPU-a");
}

#[test]
fn a_gpu_is_never_guessed_and_the_visible_ones_are_named() {
    let error = choose(vec![gpu("GPU-a"), gpu("GPU-b")], None).unwrap_err().to_string();
    assert!(error.contains("GPU-a") && error.contains("GPU-b"), "{error}");
    let error = choose(vec![gpu("GPU-a")], Some("GPU-c")).unwrap_err().to_string();
    assert!(error.contains("GPU-c is not visible") && error.contains("GPU-a"), "{error}");
    assert!(choose::<()>(vec![], None).is_err());
}

#[test]
fn a_uuid_looks_as_nvidia_smi_shows_it() {
    let bytes = [0xde, 0xad, 0xbe, 0xef, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
    assert_eq!(uuid_text(Uuid(bytes)), "GPU-deadbeef-0001-0203-0405-060708090a0b");
}
