//! The doctor's report as text.

use std::fmt::Write;

use super::facts::Report;
use super::found::Gpus;
use super::gdr::Check;
use super::host::Host;
use weightsync_agent::command::text::columns;
use weightsync_agent::rdma::Rdma;
use weightsync_core::plan::show_bytes;
use weightsync_core::protocol::worker::{GpuFacts, GpuLink, NcclFacts};

pub fn render(report: &Report) -> String {
    let mut text = String::new();
    let Report { gpus, host, .. } = report;
    let driver = match gpus.driver.get() {
        Ok(version) => format!("CUDA {version}"),
        Err(why) => why.to_owned(),
    };
    let nccl = match gpus.nccl.get() {
        Ok(facts) => nccl(facts),
        Err(why) => why.to_owned(),
    };
    let shared = match report.shared.get() {
        Ok(gpus) => format!("can be shared on {}", gpus.join(", ")),
        Err(why) => format!("cannot be shared: {why}"),
    };
    let module = host.kernel_module.as_ref().map_or_else(|| "not loaded".to_owned(), Clone::clone);
    let rdma = if host.rdma.is_empty() { "no device".to_owned() } else { host.rdma.iter().map(device).collect::<Vec<_>>().join("; ") };
    let rows = [
        ("weightsync", report.version.to_owned()),
        ("driver", driver),
        ("kernel module", module),
        ("NCCL", nccl),
        ("GPU memory", shared),
        ("RDMA", rdma),
        ("limits", limits(host)),
        ("PID namespace", pid_namespace(host)),
    ];
    let environment = host.environment.iter().map(|(name, value)| ("environment", format!("{name}={value}")));
    let rows: Vec<_> = rows.into_iter().chain(environment).map(|(name, value)| vec![name.to_owned(), value]).collect();
    lines(&mut text, &rows);
    if !gpus.gpus.is_empty() {
        gpu_table(&mut text, gpus);
    }
    transports(&mut text, report);
    let _ = writeln!(text, "\nwhat transport gdr needs");
    let rows: Vec<_> = report.gdr.iter().map(|check| vec![format!("  {}", check.about), said(check)]).collect();
    lines(&mut text, &rows);
    for note in &report.notes {
        let _ = writeln!(text, "\nnote: {note}");
    }
    text
}

fn said(check: &Check) -> String {
    match &check.change {
        None => check.found.clone(),
        Some(change) => format!("{}. Change: {change}", check.found),
    }
}

fn lines(text: &mut String, rows: &[Vec<String>]) {
    for line in columns(rows) {
        let _ = writeln!(text, "{line}");
    }
}

fn nccl(facts: &NcclFacts) -> String {
    let (version, path) = (facts.version, &facts.path);
    let lacks = if facts.lacks.is_empty() { String::new() } else { format!(", without {}", facts.lacks.join(", ")) };
    format!("{}.{}.{} in {path}{lacks}", version / 10_000, version / 100 % 100, version % 100)
}

fn device(device: &Rdma) -> String {
    let ports = device.ports.iter().map(|port| format!("port {} {} {}", port.number, port.link_layer, port.state));
    format!("{}: {}", device.name, ports.collect::<Vec<_>>().join(", "))
}

fn limits(host: &Host) -> String {
    let limits = &host.limits;
    let or_none = |bytes: Option<u64>| bytes.map_or_else(|| "unlimited".to_owned(), show_bytes);
    let shm = match (limits.shm_bytes, limits.shm_free_bytes) {
        (Some(all), Some(free)) => format!("{} ({} free)", show_bytes(all), show_bytes(free)),
        _ => "missing".to_owned(),
    };
    let files = limits.open_files.map_or_else(|| "unlimited".to_owned(), |files| files.to_string());
    let (locked, memory) = (or_none(limits.locked_bytes), or_none(limits.memory_bytes));
    format!("memory {memory}, locked memory {locked}, /dev/shm {shm}, open files {files}")
}

fn pid_namespace(host: &Host) -> String {
    match &host.pid_namespace {
        Some(namespace) if namespace.of_host => format!("{} (the host's)", namespace.number),
        Some(namespace) => namespace.number.to_string(),
        None => "unknown".to_owned(),
    }
}

fn gpu_table(text: &mut String, gpus: &Gpus) {
    text.push('\n');
    let mut head = ["GPU", "UUID", "NAME", "MEMORY", "PCI"].map(str::to_owned).to_vec();
    head.extend((0..gpus.gpus.len()).map(|number| format!("TO {number}")));
    let row = |(number, gpu): (usize, &GpuFacts)| {
        let mut row = vec![number.to_string(), gpu.uuid.clone(), gpu.name.clone(), show_bytes(gpu.memory_bytes), gpu.bus.clone()];
        row.extend(gpus.links.get(number).into_iter().flatten().map(|link| word(*link).to_owned()));
        row
    };
    let rows: Vec<_> = std::iter::once(head).chain(gpus.gpus.iter().enumerate().map(row)).collect();
    lines(text, &rows);
    for (number, gpu) in gpus.gpus.iter().enumerate() {
        if let Some(why) = &gpu.refused {
            let _ = writeln!(text, "GPU {number} cannot be used: {why}");
        }
    }
}

fn word(link: GpuLink) -> &'static str {
    match link {
        GpuLink::Same => "-",
        GpuLink::Nvlink => "NVLink",
        GpuLink::Pcie => "PCIe",
        GpuLink::None => "none",
    }
}

fn transports(text: &mut String, report: &Report) {
    for advice in &report.transports {
        let _ = writeln!(text, "\ntransport {}", advice.transport);
        if let Some(why) = &advice.unusable {
            let _ = writeln!(text, "  cannot be used: {why}");
        }
        for way in &advice.ways {
            let _ = writeln!(text, "  {}: {}", way.between, way.uses);
            if let Some(why) = &way.not_better {
                let _ = writeln!(text, "    not better: {why}");
            }
        }
    }
}
