use super::*;

fn offer(gpus: &[&str]) -> GpuOffer {
    GpuOffer { gpus: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(), pid_namespace: Some(7), ..GpuOffer::default() }
}

#[test]
fn tensors_on_the_workers_gpu_are_written_there() {
    assert_eq!(obstacle(&offer(&["GPU-a"]), "GPU-a", Some(7)), None);
    assert_eq!(obstacle(&offer(&["GPU-b", "GPU-a"]), "GPU-a", None), None, "a model over several GPUs has a part there");
    let segments = GpuOffer { expandable_segments: true, ..offer(&["GPU-a"]) };
    assert_eq!(obstacle(&segments, "GPU-a", Some(7)), None, "torch's own allocations are not shared");
}

#[test]
fn what_cannot_work_is_named() {
    let other = obstacle(&offer(&["GPU-b"]), "GPU-a", Some(7)).unwrap();
    assert!(other.contains("GPU-a") && other.contains("GPU-b"), "{other}");
    assert!(obstacle(&offer(&["MIG-a"]), "MIG-a", Some(7)).unwrap().contains("MIG"));
    let apart = obstacle(&offer(&["GPU-a"]), "GPU-a", Some(8)).unwrap();
    assert!(apart.contains("shareProcessNamespace"), "{apart}");
}
