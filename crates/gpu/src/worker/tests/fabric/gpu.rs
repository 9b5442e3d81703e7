//! Reads between two processes whose memory lies on one GPU. They need a NIXL that was built for the CUDA of its driver.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use super::{AMPLE, BYTES, code, memfd, nixl, pattern, start_with};
use crate::worker::{Copy, Read};
use weightsync_core::protocol::worker::{UcxSettings, WorkerFaultCode};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a GPU, and a NIXL for its driver: tests/gpu/README.md"]
async fn a_slot_is_read_into_a_slot_of_another_process() {
    let library = nixl();
    let ucx = UcxSettings { tls: ["cuda_copy", "cuda_ipc", "tcp"].map(Into::into).into(), devices: Vec::new() };
    let mut members = Vec::new();
    for name in ["gpu-reader", "gpu-source"] {
        let worker = start_with(name, &ucx);
        let _opened = worker.open(None, None, AMPLE).await.expect("one GPU is visible");
        let facts = worker.open_fabric(Some(&library), name, &ucx, AMPLE).await.unwrap();
        assert_eq!(facts.gpu_memory, Ok(()), "{facts:?}");
        let (ring, file) = (worker.ring(2, BYTES, AMPLE).await.unwrap(), memfd(2 * BYTES));
        let host = worker.map_host(file.as_fd(), 2 * BYTES, AMPLE).await.unwrap();
        let region = worker.register_ring(&ring, AMPLE).await.unwrap();
        assert_eq!(region.at(0).unwrap().device, Some(0));
        members.push((worker, ring, file, host, region));
    }
    let [(reader, to, file, host, region), (source, from, sent, source_host, source_region)] = members.try_into().ok().unwrap();
    let peer = reader.add_peer(&region, source_region.metadata(), AMPLE).await.unwrap();
    let bytes = pattern(6, BYTES);
    sent.write_all_at(&bytes, 0).unwrap();
    let slots = [from.try_take().unwrap(), from.try_take().unwrap()];
    let copy = Copy { from: source_host.at(0), to: slots[1].at(0), bytes: BYTES, after: None, then: None };
    source.copy(copy, AMPLE).await.unwrap();
    let slot = to.try_take().unwrap();
    // What is on its way into the slot comes first.
    let zeros = reader.copy_now(Copy { from: host.at(0), to: slot.at(0), bytes: BYTES, after: None, then: None }, AMPLE);
    let read = Read { peer: peer.clone(), from: source_region.at(slots[1].offset()).unwrap(), to: slot.at(0), bytes: BYTES };
    let reading = reader.read_now(read.clone(), AMPLE);
    zeros.await.unwrap();
    reading.await.unwrap();
    let back = Copy { from: slot.at(0), to: host.at(BYTES), bytes: BYTES, after: None, then: None };
    reader.copy(back, AMPLE).await.unwrap();
    let mut here = vec![0; bytes.len()];
    file.read_exact_at(&mut here, BYTES).unwrap();
    assert!(here == bytes);
    let begun = Instant::now();
    for _ in 0..20 {
        reader.read(read.clone(), AMPLE).await.unwrap();
    }
    eprintln!("20 READs of 8 MiB, one by one: {:?}", begun.elapsed());
    source_region.close(AMPLE).await.unwrap();
    assert_eq!(code(reader.read(read, AMPLE).await), WorkerFaultCode::Fabric);
}
