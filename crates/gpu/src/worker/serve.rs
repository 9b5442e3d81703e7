//! The worker's own loop: takes requests off its socket, gives work to the GPU, polls what is under way, and answers.
//!
//! One thread owns all state and never blocks in a wait. What may block in the driver or in NCCL (allocating, registering, opening another
//! process's memory, aborting) runs in threads of its own and comes back as a message; NIXL has one thread for all its calls. When the agent's end of the socket closes the
//! process kills itself: no one is left to hear it, and exit handlers of the libraries may hang. It decides nothing about groups and
//! versions.

mod fabric;
mod groups;
mod intake;
mod joining;
mod stats;
mod tables;
mod work;

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::{Device, GpuError, Nccl, devices, links};
use weightsync_core::protocol::worker::{WorkerAnswer, WorkerCall, WorkerFault, WorkerFaultCode, WorkerReply, WorkerRequest};

use fabric::Fabric;
use groups::Groups;
use intake::Replies;
use tables::Tables;
use work::Works;

/// Shortest and longest time between two looks at what is under way. It grows with the time since something last moved, so that short
/// broadcasts are answered quickly and long waits cost no core.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// Something for the loop.
enum Heard {
    Call(Box<Incoming>),
    /// What a thread of its own left to be done with the state.
    Later(Box<dyn FnOnce(&mut Server) + Send>),
}

struct Incoming {
    id: u64,
    request: WorkerRequest,
    descriptor: Option<OwnedFd>,
    begun: Instant,
    end: Instant,
}

impl Incoming {
    fn new(call: WorkerCall, descriptor: Option<OwnedFd>) -> Self {
        let begun = Instant::now();
        // A year is as good as for ever, and can be added.
        let within = Duration::from_millis(call.within_ms).min(Duration::from_secs(31_536_000));
        Self { id: call.id, request: call.request, descriptor, begun, end: begun + within }
    }
}

struct Server {
    replies: Replies,
    heard: Receiver<Heard>,
    to_self: Sender<Heard>,
    tables: Tables,
    gpu: Option<Gpu>,
    fabric: Option<Fabric>,
}

/// Everything that there is after `Open`.
struct Gpu {
    device: Arc<Device>,
    nccl: Result<&'static Nccl, GpuError>,
    works: Works,
    groups: Groups,
    /// Requests for the GPU after a broadcast that NCCL has not put into its stream yet: they keep their order.
    waiting: VecDeque<Incoming>,
}

/// Serves the agent at the other end of `socket` until that end closes. Returns only when it cannot start.
pub fn serve(socket: OwnedFd) -> std::io::Result<()> {
    let (to_self, heard) = channel();
    let replies = Replies::new(socket.try_clone()?);
    let to_loop = to_self.clone();
    std::thread::Builder::new().name("intake".into()).spawn(move || intake::read(&socket, &to_loop))?;
    // Naps of 20 us would last 70 us. An error costs latency only.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    Server { replies, heard, to_self, tables: Tables::default(), gpu: None, fabric: None }.run();
    Ok(())
}

impl Server {
    fn run(&mut self) {
        let mut moved = Instant::now();
        loop {
            let nap = (moved.elapsed() / 16).clamp(SHORTEST_NAP, LONGEST_NAP);
            let busy = self.gpu.as_ref().is_some_and(Gpu::is_busy);
            let mut next = if busy { self.heard.recv_timeout(nap).ok() } else { self.heard.recv().ok() };
            while let Some(heard) = next {
                moved = Instant::now();
                match heard {
                    Heard::Call(incoming) => self.take(*incoming),
                    Heard::Later(act) => act(self),
                }
                next = self.heard.try_recv().ok();
            }
            if self.poll() {
                moved = Instant::now();
            }
        }
    }

    fn answer(&mut self, id: u64, result: Result<WorkerAnswer, WorkerFault>) {
        self.replies.write(&WorkerReply { id, result });
    }

    fn take(&mut self, incoming: Incoming) {
        let id = incoming.id;
        let result = match &incoming.request {
            WorkerRequest::Devices { nccl } => {
                let nccl = Nccl::load(nccl.as_deref()).map(Nccl::facts).map_err(|error| error.to_string());
                let found = devices().and_then(|gpus| Ok(WorkerAnswer::Devices { gpus, links: links()?, nccl }));
                found.map_err(|error| error.fault())
            }
            WorkerRequest::Stats => stats::stats(self.gpu.as_ref(), &self.tables).map_err(|error| error.fault()),
            WorkerRequest::Open { .. } => self.open(&incoming.request),
            WorkerRequest::MapHost { .. } | WorkerRequest::Release { .. } => return self.take_for_memory(incoming),
            WorkerRequest::OpenFabric { .. }
            | WorkerRequest::Register { .. }
            | WorkerRequest::AddPeer { .. }
            | WorkerRequest::Read { .. } => return self.take_for_fabric(incoming),
            _ if self.gpu.is_none() => Err(invalid("no GPU was opened")),
            _ => return self.take_for_gpu(incoming),
        };
        self.answer(id, result);
    }

    fn open(&mut self, request: &WorkerRequest) -> Result<WorkerAnswer, WorkerFault> {
        let WorkerRequest::Open { gpu, nccl: path } = request else { return Err(invalid("not a request to open")) };
        if self.gpu.is_some() {
            return Err(invalid("the GPU is open: a worker takes one in its life"));
        }
        let nccl = Nccl::load(path.as_deref());
        if let (Some(_), Err(error)) = (path, &nccl) {
            return Err(error.fault());
        }
        let open = || -> Result<(WorkerAnswer, Gpu), GpuError> {
            let device = Arc::new(Device::open(gpu.as_deref())?);
            let facts = nccl.as_ref().map(|nccl| nccl.facts()).map_err(ToString::to_string);
            let answer = WorkerAnswer::Opened { pid: std::process::id(), gpu: device.facts().clone(), nccl: facts };
            let works = Works::new(&device)?;
            let gpu = Gpu { device, nccl, works, groups: Groups::default(), waiting: VecDeque::new() };
            Ok((answer, gpu))
        };
        let (answer, gpu) = open().map_err(|error| error.fault())?;
        self.gpu = Some(gpu);
        Ok(answer)
    }

    /// Runs `work` in a thread of its own that uses the GPU, and `then` with what it gave.
    fn aside<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Device) -> Result<T, GpuError> + Send + 'static,
        then: impl FnOnce(&mut Self, Result<T, GpuError>) + Send + 'static,
    ) {
        let Some(device) = self.device() else { return };
        self.apart(move || device.bind().and_then(|()| work(&device)), then);
    }

    fn device(&self) -> Option<Arc<Device>> {
        self.gpu.as_ref().map(|gpu| Arc::clone(&gpu.device))
    }

    /// Runs `work` in a thread of its own, and `then` with what it gave.
    fn apart<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T, GpuError> + Send + 'static,
        then: impl FnOnce(&mut Self, Result<T, GpuError>) + Send + 'static,
    ) {
        let to_self = self.to_self.clone();
        let run = move || {
            let result = work();
            // The receiver lives as long as the process.
            let _ = to_self.send(Heard::Later(Box::new(move |server| then(server, result))));
        };
        if let Err(error) = std::thread::Builder::new().spawn(run) {
            // What was moved into the thread is gone: the agent's deadline for it ends this process.
            tracing::error!(%error, "no thread can be started");
        }
    }

    fn poll(&mut self) -> bool {
        let mut moved = self.poll_joins();
        moved |= self.poll_works();
        moved
    }
}

impl Gpu {
    fn is_busy(&self) -> bool {
        self.works.is_busy() || self.groups.is_busy() || !self.waiting.is_empty()
    }
}

fn invalid(what: impl Into<String>) -> WorkerFault {
    WorkerFault { code: WorkerFaultCode::Invalid, message: what.into() }
}

fn late(what: &str, begun: Instant) -> WorkerFault {
    let message = format!("{what} was not done after {:.1} s", begun.elapsed().as_secs_f64());
    WorkerFault { code: WorkerFaultCode::Late, message }
}

fn milliseconds_since(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}
