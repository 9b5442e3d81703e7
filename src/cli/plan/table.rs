//! The report as text.

use std::fmt::Write;

use super::Report;
use super::units::show_micros;
use weightsync_core::plan::{ExplainedMember, GpuNeed, show_bytes};
use weightsync_core::protocol::Role;

pub(super) fn render(report: &Report) -> String {
    let mut text = String::new();
    let name = format!("{}/{}", report.weightsync.namespace, report.weightsync.name);
    let explanation = &report.explanation;
    let _ = writeln!(text, "WeightSync {name}: {} replicas, world size {}", report.plan.rollouts().count(), explanation.world_size);
    for problem in &report.problems {
        let _ = writeln!(text, "invalid: {problem}");
    }
    if let Some(refusal) = &report.plan.refusal {
        let _ = writeln!(text, "refused ({}): {refusal}", refusal.reason());
    }
    if !explanation.members.is_empty() {
        text.push('\n');
        members(&mut text, &explanation.members);
    }
    if !report.plan.followers.is_empty() {
        let names: Vec<_> = report.plan.followers.iter().map(|pod| pod.name.as_str()).collect();
        let _ = writeln!(text, "\ntrainer pods that hand their parts to the source: {}", names.join(", "));
    }
    if !report.plan.left_out.is_empty() {
        text.push_str("\nleft out:\n");
        let rows = report.plan.left_out.iter().map(|left| vec![left.who.0.clone(), left.code.reason().to_string(), left.message.clone()]);
        columns(&mut text, &rows.collect::<Vec<_>>());
    }
    costs(&mut text, report);
    text
}

fn members(text: &mut String, members: &[ExplainedMember]) {
    let with_memory = members.iter().any(|member| member.memory.is_some());
    let with_gpu = members.iter().any(|member| member.memory.is_some_and(|memory| memory.gpu.is_some()));
    let mut head: Vec<String> = ["MEMBER", "RANKS", "HOP", "NODE", "PORT", "PODS"].map(str::to_owned).to_vec();
    if with_memory {
        head.push(if with_gpu { "EXTRA HOST MEMORY" } else { "EXTRA MEMORY" }.to_owned());
    }
    if with_gpu {
        head.push("EXTRA ON EACH GPU".to_owned());
    }
    let mut rows = vec![head];
    for explained in members {
        let member = &explained.member;
        let last = member.rank_offset + member.size.saturating_sub(1);
        let dash = || "-".to_owned();
        let mut row = vec![
            member.name.0.clone(),
            if last == member.rank_offset { last.to_string() } else { format!("{}-{last}", member.rank_offset) },
            explained.hop.map_or_else(|| if member.role == Role::Source { "source".to_owned() } else { dash() }, |hop| hop.to_string()),
            member.pods.first().and_then(|pod| pod.node.clone()).unwrap_or_else(dash),
            member.port.map_or_else(dash, |port| port.to_string()),
            member.pods.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>().join(","),
        ];
        row.extend(explained.memory.map(|memory| show_bytes(memory.total())));
        row.extend(explained.memory.and_then(|memory| memory.gpu).map(|gpu| show_bytes(gpu.total())));
        rows.push(row);
    }
    columns(text, &rows);
}

fn costs(text: &mut String, report: &Report) {
    let Some(model) = &report.explanation.model else { return };
    let tensors = model.tensors.map_or_else(String::new, |tensors| format!("{tensors} tensors, "));
    let _ = writeln!(
        text,
        "\nan update: {tensors}{} in {} buckets of {}",
        show_bytes(model.bytes),
        model.buckets(),
        show_bytes(model.bucket_bytes)
    );
    if let (Some(ring), Some(gpu)) = (&report.gpu_ring, model.gpu_ring.as_ref().map(GpuNeed::of)) {
        let _ = writeln!(text, "on each GPU: {ring}; and about {} for the worker (both by estimate)", show_bytes(gpu.context));
    }
    let kept = report.explanation.members.iter().filter_map(|member| member.memory).find(|memory| memory.retained > 0);
    if let Some(kept) = kept {
        let pinned = if kept.pinned { ", pinned" } else { "" };
        let _ = writeln!(text, "kept by the source to retry and to feed joiners: {}{pinned}", show_bytes(kept.retained));
    }
    let rows = report.explanation.floors.iter().map(|floor| {
        vec![
            format!("at {}", floor.bandwidth.name),
            format!("at least {} as a chain", show_micros(floor.chain_us)),
            format!("({} one by one)", show_micros(floor.one_by_one_us)),
        ]
    });
    columns(text, &rows.collect::<Vec<_>>());
}

fn columns(text: &mut String, rows: &[Vec<String>]) {
    for line in weightsync_agent::command::text::columns(rows) {
        let _ = writeln!(text, "  {line}");
    }
}
