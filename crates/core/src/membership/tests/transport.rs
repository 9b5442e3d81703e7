//! Which transport an epoch gets, by the GPUs that prepared members report.

use super::desk::*;
use crate::membership::MembershipConfig;
use crate::protocol::*;

/// A member on a GPU of its own.
fn gpu(number: usize, nccl: u32) -> GpuReport {
    let gpu = MemberGpu { uuid: format!("GPU-{number}"), name: "H200".into(), free_bytes: 64 << 30, memory_bytes: 141 << 30 };
    GpuReport { gpus: vec![gpu], nccl: Some(nccl), ..GpuReport::default() }
}

fn formed(wish: TransportWish, gpus: &[Option<GpuReport>]) -> Desk {
    let policy = UpdatePolicy { transport: TransportPolicy { wish, ..TransportPolicy::default() }, ..policy() };
    let config = MembershipConfig { policy, ..config() };
    let rollouts = u32::try_from(gpus.len() - 1).unwrap();
    let mut desk = Desk::restored(config, rollouts, crate::membership::Restored::default());
    desk.gpus = gpus.iter().enumerate().filter_map(|(n, gpu)| Some((n, gpu.clone()?))).collect();
    desk.form(rollouts);
    desk
}

fn commits(desk: &Desk) -> Vec<TransportChoice> {
    let commits = desk.decisions.iter().filter_map(|decision| match decision {
        crate::membership::Decision::Commit { request, .. } => Some(request.transport.clone()),
        _ => None,
    });
    commits.collect()
}

#[test]
fn nccl_is_taken_when_every_member_has_a_gpu_of_its_own() {
    for wish in [TransportWish::Auto, TransportWish::Nccl] {
        let desk = formed(wish, &[Some(gpu(0, 22809)), Some(gpu(1, 22810)), Some(gpu(2, 22809))]);
        let choices = commits(&desk);
        assert_eq!(choices.len(), 3);
        assert!(choices.iter().all(|choice| choice == &choices[0]));
        let plan = choices[0].nccl.as_ref().unwrap();
        assert_eq!(plan.world(), 3);
        assert_eq!(plan.ranks_of(&plan.ranks[2].0), Some((2, &["GPU-2".to_owned()][..])));
        let view = desk.membership.view();
        assert_eq!(view.transport.as_ref().map(TransportChoice::name), Some("nccl"));
    }
}

#[test]
fn engine_without_gpu_memory_way_is_named_and_group_forms() {
    let apart = |number| GpuReport { unshared: "the engine is in another PID namespace".into(), ..gpu(number, 22809) };
    let choices = commits(&formed(TransportWish::Auto, &[Some(gpu(0, 22809)), Some(apart(1)), Some(apart(2))]));
    let reason = &choices[0].reason;
    assert!(choices[0].nccl.is_some());
    for part in ["slots of", "about 512 MiB for NCCL", "(and 1 more): the engine is in another PID namespace"] {
        assert!(reason.contains(part), "{part}: {reason}");
    }
}

#[test]
fn auto_goes_over_tcp_and_names_who_stands_in_the_way() {
    let none = GpuReport { reason: "no NVIDIA driver: libcuda.so.1 is not there".into(), ..GpuReport::default() };
    let cases = [
        ([Some(gpu(0, 22809)), Some(none)], "no NVIDIA driver"),
        ([Some(gpu(0, 22809)), None], "it has no GPU"),
        ([Some(gpu(0, 22809)), Some(gpu(1, 22707))], "its NCCL is 2.27.7, that of"),
    ];
    for (gpus, says) in cases {
        let desk = formed(TransportWish::Auto, &gpus);
        let choices = commits(&desk);
        assert!(choices.len() == 2 && choices.iter().all(|choice| choice.nccl.is_none()), "{choices:?}");
        assert!(choices[0].reason.contains(says), "{}", choices[0].reason);
        assert!(desk.membership.view().committed);
    }
}

#[test]
fn engine_on_the_sources_gpu_has_no_rank() {
    for wish in [TransportWish::Auto, TransportWish::Nccl] {
        let choices = commits(&formed(wish, &[Some(gpu(0, 22809)), Some(gpu(0, 22809)), Some(gpu(1, 22809))]));
        let plan = choices[0].nccl.as_ref().unwrap();
        assert_eq!((choices.len(), plan.world(), plan.guests.len()), (3, 2, 1));
        assert_eq!(plan.ranks_of(&plan.guests[0]), None);
        assert!(choices[0].reason.contains(&format!("on the source's GPU: {}", plan.guests[0])), "{}", choices[0].reason);
    }
    // No other member needs a rank; the free memory of the one GPU serves the rings of both.
    let alone = commits(&formed(TransportWish::Auto, &[Some(gpu(0, 22809)), Some(gpu(0, 22809))]));
    let plan = alone[0].nccl.as_ref().unwrap();
    assert_eq!((plan.world(), plan.guests.len()), (1, 1));
    assert!(alone[0].reason.contains("32 GiB of 141 GiB are free on GPU-0 of"), "{}", alone[0].reason);
    let engines = commits(&formed(TransportWish::Auto, &[Some(gpu(0, 22809)), Some(gpu(1, 22809)), Some(gpu(1, 22809))]));
    assert!(engines[0].nccl.is_none() && engines[0].reason.contains("one rank a GPU"), "{}", engines[0].reason);
}

#[test]
fn sources_own_gpu_way_is_shown_while_its_epoch_lives() {
    let mut desk = formed(TransportWish::Nccl, &[Some(gpu(0, 22809)), Some(gpu(0, 22809))]);
    let shown = |desk: &Desk| desk.membership.view().transport.as_ref().unwrap().reason.clone();
    let chosen = shown(&desk);
    desk.tell(0, |state| state.transport = Some(TransportChoice::tcp(&chosen).noted(Some("rollouts/a by CUDA IPC"))));
    assert!(shown(&desk).contains("rollouts/a by CUDA IPC"), "{}", shown(&desk));
    desk.tell(0, |state| state.epoch = None);
    assert!(!shown(&desk).contains("rollouts/a by CUDA IPC"), "{}", shown(&desk));
}

#[test]
fn tcp_is_taken_when_it_is_asked_for_whatever_gpus_there_are() {
    let desk = formed(TransportWish::Tcp, &[Some(gpu(0, 22809)), Some(gpu(1, 22809))]);
    assert!(commits(&desk).iter().all(|choice| choice.nccl.is_none()));
}

#[test]
fn a_member_without_a_gpu_is_left_out_when_nccl_is_demanded() {
    let desk = formed(TransportWish::Nccl, &[Some(gpu(0, 22809)), Some(gpu(1, 22809)), None]);
    let view = desk.membership.view();
    let out = view.members.last().unwrap();
    assert!(out.message.contains("it has no GPU"), "{}", out.message);
    let last = commits(&desk).into_iter().next_back().unwrap();
    assert_eq!(last.nccl.unwrap().world(), 2);
    assert!(view.committed);
}

#[test]
fn member_whose_worker_ended_skips_an_epoch_and_returns() {
    let mut desk = formed(TransportWish::Auto, &[Some(gpu(0, 22809)), Some(gpu(1, 22809)), Some(gpu(2, 22809))]);
    let view = desk.membership.view();
    let (id, member) = (view.id.clone().unwrap(), view.members[2].clone());
    let from = member.incarnation.clone().unwrap();
    let peer_lost = crate::membership::Observation::PeerLost { from, id: id.clone(), peer: member.name.clone(), cause: "SIGKILL".into() };
    let decisions = desk.see(peer_lost);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert!(view.committed && view.id != Some(id), "{view:?}");
    assert_eq!(commits(&desk).into_iter().next_back().unwrap().nccl.unwrap().world(), 2);
}

fn reading(wish: TransportWish, reports: &[FabricReport]) -> Desk {
    let policy = UpdatePolicy { transport: TransportPolicy { wish, ..TransportPolicy::default() }, ..policy() };
    let rollouts = u32::try_from(reports.len() - 1).unwrap();
    let mut desk = Desk::restored(MembershipConfig { policy, ..config() }, rollouts, crate::membership::Restored::default());
    desk.fabric = reports.iter().cloned().enumerate().collect();
    desk
}

fn nixl(rdma: bool) -> FabricReport {
    FabricReport { nixl: Some("NIXL 1.5.1 (libnixl_capi.so), UCX over RDMA".into()), rdma, ..FabricReport::default() }
}

#[test]
fn gdr_is_taken_where_every_member_has_nixl() {
    let mut desk = reading(TransportWish::Gdr, &[nixl(true), nixl(false), nixl(true)]);
    desk.form(2);
    let choices = commits(&desk);
    assert_eq!((choices.len(), choices[0].gdr), (3, Some(FabricPlan { slots: 4, slot_bytes: 16 << 20, on_gpus: false })));
    assert!(choices[0].reason.contains("spec.transport.type is GDR; NIXL 1.5.1"), "{}", choices[0].reason);
    assert_eq!(desk.membership.view().transport.as_ref().map(TransportChoice::name), Some("gdr"));
}

#[test]
fn gdr_slots_lie_on_gpus_where_the_source_has_one() {
    let on_gpu = || FabricReport { gpu: true, ..nixl(true) };
    // Members without a GPU take part through host memory.
    for (reports, on_gpus) in [([on_gpu(), on_gpu(), nixl(true)], true), ([nixl(true), on_gpu(), on_gpu()], false)] {
        let mut desk = reading(TransportWish::Gdr, &reports);
        desk.gpus = (0..2).map(|n| (n, gpu(0, 22809))).collect();
        desk.form(2);
        let choice = commits(&desk).remove(0);
        let plan = choice.gdr.unwrap();
        assert_eq!(plan.on_gpus, on_gpus, "{}", choice.reason);
        assert_eq!(choice.reason.contains("slots on GPUs: "), on_gpus, "{}", choice.reason);
    }
}

#[test]
fn gdr_without_room_on_a_gpu_names_the_member() {
    let mut desk = reading(TransportWish::Gdr, &[FabricReport { gpu: true, ..nixl(true) }, FabricReport { gpu: true, ..nixl(true) }]);
    let full = MemberGpu { free_bytes: 1 << 20, ..gpu(1, 22809).gpus.remove(0) };
    desk.gpus = [(0, gpu(0, 22809)), (1, GpuReport { gpus: vec![full], ..gpu(1, 22809) })].into();
    let mut decisions = desk.plan(&[0, 1], Vec::new());
    for n in 0..=1 {
        decisions.extend(desk.announce(n));
    }
    desk.obey(decisions);
    let decisions = desk.wait(5_000, &[0, 1]);
    desk.obey(decisions);
    assert!(desk.member(1).message.contains("GPU-1 of"), "{:?}", desk.member(1));
}

#[test]
fn auto_takes_gdr_only_with_rdma_on_every_member() {
    for (reports, name) in
        [([nixl(true), nixl(true)], "gdr"), ([nixl(true), nixl(false)], "tcp"), ([nixl(true), FabricReport::default()], "tcp")]
    {
        let mut desk = reading(TransportWish::Auto, &reports);
        desk.form(1);
        assert_eq!(desk.membership.view().transport.as_ref().map(TransportChoice::name), Some(name));
    }
}

#[test]
fn member_without_nixl_is_left_out_of_a_gdr_group() {
    let why = "its host shows no RDMA device";
    let mut desk = reading(TransportWish::Gdr, &[nixl(true), nixl(true), FabricReport { reason: why.into(), ..FabricReport::default() }]);
    let mut decisions = desk.plan(&[0, 1, 2], Vec::new());
    for n in 0..=2 {
        decisions.extend(desk.announce(n));
    }
    desk.obey(decisions);
    let decisions = desk.wait(5_000, &[0, 1, 2]);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert!(view.committed, "{view:#?}");
    assert!(desk.member(2).message.contains(why), "{:?}", desk.member(2));
    assert_eq!(commits(&desk).last().map(|choice| choice.gdr.is_some()), Some(true));
}
