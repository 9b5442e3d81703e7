//! What the product knows of a kind of engine before it meets a server: one constant in the engine's own file.
//!
//! The resource's schema and its rules, checks of specs, lists of command lines, and the adapters' refusals are made from it. It never
//! describes a server that runs: [`Engine::probe`](super::Engine::probe) asks that.

use std::sync::Arc;

use super::{Engine, EngineConfig, EngineError};
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};

/// Makes the adapter of a server.
pub type Connect = fn(EngineConfig) -> Result<Arc<dyn Engine>, EngineError>;

/// A kind of engine.
#[derive(Debug)]
pub struct EngineDescriptor {
    /// Name in the agents' protocol, on command lines and in metrics, such as `vllm`.
    pub kind: &'static str,
    /// Value of `spec.rollouts[].engine.kind`, such as `VLLM`.
    pub api_kind: &'static str,
    /// The port on which its server listens unless it is given another one.
    pub port: u16,
    /// How its server is started and what its agent needs, for the reference: a part of a sentence.
    pub needs: &'static str,
    /// Policies that it cannot keep.
    pub limits: &'static [Limit],
    /// Makes its adapter.
    pub connect: Connect,
}

/// Policies of updates that an engine needs, because it cannot keep others.
#[derive(Debug)]
pub struct Limit {
    /// Whether it counts only where engines join the group by themselves (`delivery: Engine`).
    pub in_groups: bool,
    /// The pauses that it can keep.
    pub pauses: &'static [PausePolicy],
    /// What it can do with the KV cache.
    pub kv_caches: &'static [KvCachePolicy],
    /// Why it can keep no others.
    pub cause: &'static str,
    /// The fields to change, without `spec.`.
    pub next_step: &'static str,
}

impl Limit {
    /// Both policies of the KV cache.
    pub const ANY_KV_CACHE: &'static [KvCachePolicy] = &[KvCachePolicy::Keep, KvCachePolicy::Reset];

    /// Whether these policies keep it.
    pub fn allows(&self, pause: PausePolicy, kv_cache: KvCachePolicy) -> bool {
        self.pauses.contains(&pause) && self.kv_caches.contains(&kv_cache)
    }

    /// Cause and next step, as the resource's rule says them.
    pub fn message(&self) -> String {
        format!("{}: {}", self.cause, self.next_step)
    }
}

impl EngineDescriptor {
    /// Refuses policies that this kind of engine cannot keep where agents deliver the weights.
    pub(super) fn accepts(&self, pause: PausePolicy, kv_cache: KvCachePolicy) -> Result<(), EngineError> {
        let broken = self.limits.iter().find(|limit| !limit.in_groups && !limit.allows(pause, kv_cache));
        broken.map_or(Ok(()), |limit| Err(EngineError::Unsupported { what: limit.cause.to_owned(), next_step: limit.next_step.to_owned() }))
    }
}
