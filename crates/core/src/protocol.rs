//! The messages between controller, agents, simulated engines and the trainer's client.
//!
//! Types and their serialised form only. Decides nothing; knows no socket, no clock, no Kubernetes. Every message that acts on a group
//! carries its [`EpochId`], so that the receiver can refuse stale ones.

mod call;
mod canary;
mod client;
mod compatibility;
mod control;
mod data;
mod engine_group;
mod external;
mod fabric;
mod identity;
mod ids;
mod lent;
mod policy;
mod preflight;
mod progress;
mod proof;
mod reason;
mod roster;
mod skew;
mod statement;
mod text;
mod trainer_gpu;
mod transport;
mod update;
pub mod worker;

pub use call::*;
pub use canary::*;
pub use client::*;
pub use compatibility::*;
pub use control::*;
pub use data::*;
pub use engine_group::*;
pub use external::*;
pub use fabric::*;
pub use identity::*;
pub use ids::*;
pub use lent::*;
pub use policy::*;
pub use preflight::*;
pub use progress::*;
pub use proof::*;
pub use reason::*;
pub use roster::*;
pub use skew::*;
pub use statement::*;
pub use text::*;
pub use trainer_gpu::*;
pub use transport::*;
pub use update::*;

#[cfg(test)]
mod tests;
