//! What was looked for on a machine, or why it is missing.

use serde::Serialize;

use weightsync_core::protocol::worker::{GpuFacts, GpuLink, NcclFacts};

/// Something that was found, or why it is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Found<T> {
    Found(T),
    Missing(String),
}

impl<T> Found<T> {
    pub fn get(&self) -> Result<&T, &str> {
        match self {
            Self::Found(thing) => Ok(thing),
            Self::Missing(why) => Err(why),
        }
    }
}

impl<T> From<Result<T, String>> for Found<T> {
    fn from(result: Result<T, String>) -> Self {
        match result {
            Ok(thing) => Self::Found(thing),
            Err(why) => Self::Missing(why),
        }
    }
}

impl Found<String> {
    /// The driver's CUDA version, e.g. `13.0`.
    pub fn driver_of(gpus: &[GpuFacts]) -> Self {
        match gpus.first() {
            Some(gpu) => Self::Found(format!("{}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10)),
            None => Self::Missing("the driver shows no GPU to this process".into()),
        }
    }
}

/// What a worker process found.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpus {
    /// CUDA version of the driver.
    pub driver: Found<String>,
    /// The GPUs that this process can see.
    pub gpus: Vec<GpuFacts>,
    /// `links[a][b]`: from GPU `a` to GPU `b`.
    pub links: Vec<Vec<GpuLink>>,
    pub nccl: Found<NcclFacts>,
}

impl Gpus {
    /// No driver, and so nothing else.
    pub fn nothing(why: &dyn std::fmt::Display) -> Self {
        let nccl = Found::Missing("not searched: it needs a driver".into());
        Self { driver: Found::Missing(why.to_string()), gpus: Vec::new(), links: Vec::new(), nccl }
    }
}
