//! What a worker says of a machine: no driver, one that does not work, GPUs that cannot be used, an NCCL that lacks something.

use std::fs;
use std::path::Path;
use std::process::Command;

use weightsync_core::protocol::worker::{GpuFacts, GpuLink, NcclFacts, WorkerAnswer, WorkerFaultCode};
use weightsync_gpu::worker::Worker;

use super::fixture::{Machine, fault, uuid};
use crate::world::SOON;

async fn devices(worker: &Worker, nccl: &Path) -> (Vec<GpuFacts>, Vec<Vec<GpuLink>>, Result<NcclFacts, String>) {
    match worker.devices(Some(nccl), SOON).await.unwrap() {
        WorkerAnswer::Devices { gpus, links, nccl } => (gpus, links, nccl),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_driver_the_worker_starts_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    // Not a library: found first, also on a machine with a driver.
    fs::write(folder.path().join("libcuda.so.1"), "").unwrap();
    let machine = Machine::new().with_libraries(folder.path());
    let worker = machine.start("no driver");
    let error = worker.devices(None, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::NoDriver, "{error}");
    assert!(error.to_string().contains("no NVIDIA driver"), "{error}");
    let error = worker.open(None, None, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::NoDriver, "{error}");
    assert_eq!(worker.cause(), None, "it still runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_does_not_work_is_named_with_its_own_words() {
    let cases = [(100, WorkerFaultCode::NoGpu, "no CUDA-capable device"), (34, WorkerFaultCode::NoDriver, "stub library")];
    for (answer, code, words) in cases {
        let machine = Machine::new().with("FAKEGPU_INIT_ERROR", answer);
        let error = machine.start("broken driver").open(None, None, SOON).await.unwrap_err();
        assert_eq!(fault(&error), code, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_are_listed_with_their_uuids_whatever_their_order() {
    let machine = Machine::new().with("CUDA_VISIBLE_DEVICES", format!("{},0", uuid(3)));
    let worker = machine.start("list");
    let (gpus, links, nccl) = devices(&worker, &machine.nccl()).await;
    assert_eq!(links, [[GpuLink::Same, GpuLink::Nvlink], [GpuLink::Nvlink, GpuLink::Same]]);
    let uuids: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    assert_eq!(uuids, [uuid(3), uuid(0)]);
    assert!(gpus.iter().all(|gpu| gpu.memory_bytes == 4 << 30 && gpu.driver == 13000 && gpu.refused.is_none()), "{gpus:?}");
    assert_eq!(nccl.unwrap().version, 22809);
    // By UUID, wherever it stands; one that is not visible is refused; of two, none is guessed.
    let error = worker.open(Some(&uuid(1)), None, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::NoGpu, "{error}");
    let error = machine.start("which").open(None, None, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::NoGpu, "{error}");
    let (_, gpu, _) = machine.start("by uuid").open(Some(&uuid(0)), None, SOON).await.unwrap();
    assert_eq!(gpu.uuid, uuid(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_gpu_is_refused_with_the_reason() {
    let machine = Machine::new().with("FAKEGPU_MIG", 1).with("FAKEGPU_COUNT", 1);
    let error = machine.start("mig").open(None, None, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::Mig, "{error}");
    assert!(error.to_string().contains("MIG"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_nccl_that_lacks_a_function_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("old.c"), folder.path().join("libnccl.so.2"));
    fs::write(&source, "int ncclGetVersion(int *v) { *v = 21005; return 0; }").unwrap();
    let built = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(built.success());
    let machine = Machine::new();
    let (_, _, nccl) = devices(&machine.start("old nccl"), &library).await;
    let reason = nccl.unwrap_err();
    assert!(reason.contains("nccl") && reason.contains("lacks"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_beyond_the_gpu_is_refused_and_freed_returns() {
    let machine = Machine::new().with("FAKEGPU_MEMORY_MIB", 64);
    let worker = machine.worker(0).await;
    let Err(error) = worker.ring(65, 1 << 20, SOON).await else { panic!("more than there is") };
    assert_eq!(fault(&error), WorkerFaultCode::OutOfMemory, "{error}");
    for _ in 0..4 {
        let ring = worker.ring(40, 1 << 20, SOON).await.unwrap();
        assert_eq!(ring.bytes(), 40 << 20);
        drop(ring);
    }
    // A killed worker's memory is the GPU's again.
    let ring = worker.ring(40, 1 << 20, SOON).await.unwrap();
    worker.kill("the test says so");
    worker.ended().await;
    drop((ring, worker));
    drop(machine.worker(0).await.ring(40, 1 << 20, SOON).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_without_nvlink_differ_from_gpus_without_access() {
    for (setting, link) in [("FAKEGPU_NVLINK", GpuLink::Pcie), ("FAKEGPU_PEER", GpuLink::None)] {
        let machine = Machine::new().with("FAKEGPU_COUNT", 2).with(setting, 0);
        let (_, links, _) = devices(&machine.start("links"), &machine.nccl()).await;
        assert_eq!(links, [[GpuLink::Same, link], [link, GpuLink::Same]]);
    }
}
