//! How many ranks a replica takes, from the sizes that its engine was started with.
//!
//! Tensor, pipeline and data parallel ranks multiply. Expert parallelism does not: experts are spread over the tensor and data ranks that
//! exist already (vLLM: `EP = TP x DP`; SGLang: `ep_size` divides `tp_size`), so counting it again gives ranks that never come.

use serde::{Deserialize, Serialize};

/// Parallel sizes of one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Parallelism {
    /// Tensor parallel ranks.
    pub tensor: u32,
    /// Pipeline stages.
    pub pipeline: u32,
    /// Data parallel ranks that share this port. Engines with separate ports are separate replicas.
    pub data: u32,
    /// Ranks that share the experts; does not add ranks.
    pub expert: u32,
}

impl Default for Parallelism {
    fn default() -> Self {
        Self { tensor: 1, pipeline: 1, data: 1, expert: 1 }
    }
}

impl Parallelism {
    /// Most ranks of one replica.
    pub const MAX_SIZE: u32 = 1 << 16;

    /// Ranks of the replica, or what is wrong with the numbers.
    pub fn size(&self) -> Result<u32, String> {
        let Self { tensor, pipeline, data, expert } = *self;
        if [tensor, pipeline, data, expert].contains(&0) {
            return Err("parallelism: every size must be at least 1".to_owned());
        }
        let experts_over = u64::from(tensor) * u64::from(data);
        if !experts_over.is_multiple_of(u64::from(expert)) {
            return Err(format!(
                "parallelism: experts are spread over tensor x data = {tensor} x {data} = {experts_over} ranks, \
                 which expert: {expert} does not divide"
            ));
        }
        let size = u128::from(experts_over) * u128::from(pipeline);
        match u32::try_from(size) {
            Ok(size) if size <= Self::MAX_SIZE => Ok(size),
            _ => Err(format!(
                "parallelism: tensor x pipeline x data = {tensor} x {pipeline} x {data} = {size} ranks are more than {}",
                Self::MAX_SIZE
            )),
        }
    }
}
