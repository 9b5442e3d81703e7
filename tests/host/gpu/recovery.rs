//! Members that die, hang or never come: everybody else goes on, within the deadline.

use std::time::{Duration, Instant};

use weightsync_core::protocol::worker::WorkerFaultCode;
use weightsync_gpu::worker::WorkerError;
use weightsync_testkit::support::ended_by;

use super::fixture::{Machine, Member, SLOT, abort, all, fault, form, pattern, verified_broadcast};
use crate::world::SOON;

/// A deadline that is meant to pass.
const SHORT: Duration = Duration::from_millis(700);

#[tokio::test(flavor = "multi_thread")]
async fn worker_that_dies_in_a_broadcast_skips_the_next_group() {
    let machine = Machine::new();
    let members = machine.members(4).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    verified_broadcast(1, &members, &pattern(1, SLOT as usize)).await;

    machine.order("ncclBroadcast@2 3 vanish");
    let slots = all(members.iter().map(|member| member.ring.take(SOON))).await;
    let slots: Vec<_> = slots.into_iter().map(Result::unwrap).collect();
    let broadcasts: Vec<_> = members.iter().zip(&slots).map(|(member, slot)| member.broadcast(1, slot, SLOT, SOON)).collect();
    let ends = members[2].worker.ended();
    let survivors = [members[0], members[1], members[3]];
    // NCCL notifies no rank: the end of the process shows the failure, and the others receive an abort.
    let aborted = async {
        let cause = ends.await;
        assert!(cause.contains("signal: 9"), "{cause}");
        abort(1, &survivors).await;
    };
    let (outcomes, ()) = futures::future::join(all(broadcasts), aborted).await;
    let failed = |rank: usize| outcomes[rank].as_ref().unwrap_err();
    assert_eq!(fault(failed(0)), WorkerFaultCode::Aborted, "{}", failed(0));
    assert!(matches!(failed(2), WorkerError::Gone { .. }), "{}", failed(2));
    drop(slots);

    form(2, &survivors).await;
    verified_broadcast(2, &survivors, &pattern(2, SLOT as usize)).await;

    // Its successor is a new process on the same GPU, in a new group.
    let successor = Member::new(machine.worker(2).await).await;
    abort(2, &survivors).await;
    let whole = [members[0], members[1], &successor, members[3]];
    form(3, &whole).await;
    verified_broadcast(3, &whole, &pattern(3, SLOT as usize)).await;
    abort(3, &whole).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn survivors_shrink_a_group_by_abort_or_by_revoke_and_shrink() {
    for revoke in [false, true] {
        let machine = Machine::new();
        let members = machine.members(3).await;
        let members: Vec<&Member> = members.iter().collect();
        form(1, &members).await;
        members[1].worker.kill("the test says so");
        let survivors = [members[0], members[2]];
        let shrunk = all(survivors.iter().map(|member| member.worker.shrink(1, 2, vec![1], revoke, SOON))).await;
        let ranks: Vec<_> = shrunk.into_iter().map(|joined| joined.map(|joined| (joined.rank, joined.world)).unwrap()).collect();
        assert_eq!(ranks, [(0, 2), (1, 2)], "revoke: {revoke}");
        verified_broadcast(2, &survivors, &pattern(5, 10_000)).await;
        abort(2, &survivors).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_never_comes_ends_the_others_at_their_deadline() {
    let machine = Machine::new();
    let members = machine.members(3).await;
    let members: Vec<&Member> = members.iter().collect();
    let id = members[0].worker.unique_id(SOON).await.unwrap();
    let started = Instant::now();
    let joins = ended_by(SHORT, all([0, 1].map(|rank| members[rank as usize].worker.join(1, id, rank, 3, SHORT)))).await;
    assert!(started.elapsed() >= SHORT, "{:?}", started.elapsed());
    for joined in joins {
        let error = joined.unwrap_err();
        assert_eq!(fault(&error), WorkerFaultCode::Late, "{error}");
    }
    // The same workers form the group as soon as the third is there.
    form(1, &members).await;
    verified_broadcast(1, &members, &pattern(1, 5000)).await;
    abort(1, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rank_missing_from_a_broadcast_ends_it_at_the_deadline() {
    let machine = Machine::new();
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    let slot = members[0].ring.take(SOON).await.unwrap();
    let error = members[0].broadcast(1, &slot, SLOT, SHORT).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::Late, "{error}");
    // A broadcast that ended late has aborted its group on that rank; the other one learns it from its own agent.
    abort(1, &members).await;
    form(2, &members).await;
    verified_broadcast(2, &members, &pattern(1, 5000)).await;
    abort(2, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_aborted_twice_without_harm() {
    let machine = Machine::new();
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    abort(1, &members).await;
    abort(1, &members).await;
    // Nor is one that never was.
    abort(77, &members).await;
    form(1, &members).await;
    let (first, second) = futures::future::join(abort(1, &members), abort(1, &members)).await;
    assert_eq!((first, second), ((), ()));
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_whose_call_hangs_is_killed_and_replaced() {
    let machine = Machine::new();
    let gone = machine.worker(1).await;
    machine.order("cuMemAlloc_v2 * hang");
    let Err(error) = gone.ring(4, SLOT, SHORT).await else { panic!("a hanging call gave a ring") };
    assert!(matches!(&error, WorkerError::Gone { cause } if cause.contains("killed")), "{error}");
    let cause = tokio::time::timeout(SOON, gone.ended()).await.unwrap();
    assert!(cause.contains("killed"), "{cause}");

    machine.order("");
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    verified_broadcast(1, &members, &pattern(1, 5000)).await;
    abort(1, &members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nccl_error_is_reported_and_ends_the_group() {
    let machine = Machine::new();
    let members = machine.members(2).await;
    let members: Vec<&Member> = members.iter().collect();
    form(1, &members).await;
    machine.order("ncclBroadcast@0 2 error 3");
    let slots = all(members.iter().map(|member| member.ring.take(SOON))).await;
    let slots: Vec<_> = slots.into_iter().map(Result::unwrap).collect();
    let error = members[0].broadcast(1, &slots[0], SLOT, SOON).await.unwrap_err();
    assert_eq!(fault(&error), WorkerFaultCode::Nccl, "{error}");
    assert!(error.to_string().contains("ncclBroadcast"), "{error}");
    let error = members[0].broadcast(1, &slots[0], SLOT, SOON).await.unwrap_err();
    assert!(matches!(fault(&error), WorkerFaultCode::Aborted | WorkerFaultCode::Invalid), "{error}");
    abort(1, &members).await;
}
