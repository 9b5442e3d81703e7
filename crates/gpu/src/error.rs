//! Why something about a GPU failed. Decides which kind of failure a code of the driver is; the libraries' own words are kept.

use weightsync_core::protocol::worker::{WorkerFault, WorkerFaultCode};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum GpuError {
    #[error("no NVIDIA driver: {cause}")]
    NoDriver { cause: String },
    #[error("{cause}")]
    NoGpu { cause: String },
    #[error(
        "{gpu} is part of a partitioned (MIG) GPU: memory of one cannot be shared between processes as the hand-over needs; use a whole GPU"
    )]
    Mig { gpu: String },
    #[error("no NCCL that can be used: {cause}")]
    NoNccl { cause: String },
    #[error("no NIXL that can be used: {cause}")]
    NoFabric { cause: String },
    #[error("{what}")]
    Fabric { what: String },
    #[error("{what}: the GPU has no {bytes} bytes left")]
    OutOfMemory { what: &'static str, bytes: u64 },
    #[error("{function}: {name} ({code}) {text}")]
    Cuda { function: &'static str, code: i32, name: String, text: String },
    #[error("{function}: {text} ({code}) {last}")]
    Nccl { function: &'static str, code: i32, text: String, last: String },
    #[error("{what}")]
    Invalid { what: String },
}

impl GpuError {
    /// What a request that failed so is answered.
    pub fn fault(&self) -> WorkerFault {
        let code = match self {
            Self::NoDriver { .. } => WorkerFaultCode::NoDriver,
            Self::NoGpu { .. } => WorkerFaultCode::NoGpu,
            Self::Mig { .. } => WorkerFaultCode::Mig,
            Self::NoNccl { .. } => WorkerFaultCode::NoNccl,
            Self::NoFabric { .. } => WorkerFaultCode::NoFabric,
            Self::Fabric { .. } => WorkerFaultCode::Fabric,
            Self::OutOfMemory { .. } => WorkerFaultCode::OutOfMemory,
            Self::Cuda { .. } => WorkerFaultCode::Cuda,
            Self::Nccl { .. } => WorkerFaultCode::Nccl,
            Self::Invalid { .. } => WorkerFaultCode::Invalid,
        };
        WorkerFault { code, message: self.to_string().trim_end().to_owned() }
    }
}
