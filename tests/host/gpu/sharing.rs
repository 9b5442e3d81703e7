//! Two processes on one GPU: memory and events that one makes and the other opens.

use weightsync_core::protocol::worker::{IpcHandle, Opaque, WorkerFaultCode};
use weightsync_gpu::worker::Copy;

use super::fixture::{Machine, Member, SLOT, fault, pattern};
use crate::world::{SOON, until};

#[tokio::test(flavor = "multi_thread")]
async fn another_process_reads_a_slot_after_an_event() {
    // Late enough that a reader who does not wait for the event finds the old bytes.
    let machine = Machine::new().with("FAKEGPU_JITTER_US", 5000);
    let (writer, reader) = (Member::new(machine.worker(1).await).await, Member::new(machine.worker(1).await).await);
    let slot = writer.ring.take(SOON).await.unwrap();
    let memory = reader.worker.import(writer.ring.handle(), writer.ring.bytes(), SOON).await.unwrap();
    assert_eq!(memory.bytes(), writer.ring.bytes());
    let filled = writer.worker.new_event(SOON).await.unwrap();
    let seen = reader.worker.import_event(filled.handle().unwrap(), SOON).await.unwrap();
    let here = reader.ring.take(SOON).await.unwrap();
    for seed in 0..5 {
        let bytes = pattern(seed, SLOT as usize);
        writer.fill(&slot, &bytes).await;
        // What is shared is a copy that may not have run when the reader's own copy is asked for.
        let scratch = writer.ring.take(SOON).await.unwrap();
        let copy = Copy { from: slot.at(0), to: scratch.at(0), bytes: SLOT, after: None, then: Some(filled.clone()) };
        writer.worker.copy(copy, SOON).await.unwrap();
        let copy = Copy { from: memory.at(scratch.offset()), to: here.at(0), bytes: SLOT, after: Some(seen.clone()), then: None };
        reader.worker.copy(copy, SOON).await.unwrap();
        assert!(reader.read(&here, bytes.len()).await == bytes, "round {seed}");
    }
    // The opener closes first: memory is not freed under it.
    assert_eq!(machine.opened(), 1);
    drop(memory);
    until("the memory to be closed", || async { machine.opened() == 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_is_too_short_or_gone_is_not_opened() {
    let machine = Machine::new();
    let (owner, other) = (machine.worker(0).await, machine.worker(0).await);
    let ring = owner.ring(2, SLOT, SOON).await.unwrap();
    let Err(error) = other.import(ring.handle(), ring.bytes() + 1, SOON).await else { panic!("it is shorter") };
    assert_eq!(fault(&error), WorkerFaultCode::Invalid, "{error}");
    let handle: IpcHandle = *ring.handle();
    owner.kill("the test says so");
    owner.ended().await;
    let Err(error) = other.import(&handle, SLOT, SOON).await else { panic!("its maker is dead") };
    assert_eq!(fault(&error), WorkerFaultCode::Cuda, "{error}");
    let Err(error) = other.import(&Opaque([7; 64]), SLOT, SOON).await else { panic!("made up") };
    assert_eq!(fault(&error), WorkerFaultCode::Cuda, "{error}");
}
