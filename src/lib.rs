//! WeightSync keeps the weights that rollout engines serve equal to the weights that a trainer makes.
//!
//! The rooms of this crate, from the bottom to the top; an arrow between them only points down
//! (`tests/host/arrows.rs` reads the `use` lines and fails when one points up):
//!
//! | room | decides | may know |
//! |---|---|---|
//! | [`weights`] | what a version is: tensors, buckets, digests, coverage | nothing |
//! | [`protocol`] | what controller, agents and the trainer's client say to each other | `weights` |
//! | [`plan`] | which pods form a group, in which order, with which ranks | `protocol`, `weights` |
//! | [`membership`] | when a group is formed, fenced and formed anew | `plan`, `protocol` |
//! | [`runtime`] | certificates, HTTP, health, metrics, leases, deadlines | `protocol` |
//! | [`gpu`] | the driver, NCCL, memory, events and the digest kernel: the only room full of unsafe code | `protocol` |
//! | [`worker`] | a child process that has one GPU, and the agent's handle of it | `gpu`, `protocol`, `weights` |
//! | [`torch`] | what torch and engines built on it read: pickles, written and never read; the store where ranks of a group meet | `weights` |
//! | [`engine`], [`transport`] | how one engine is fed, how bytes travel | all above |
//! | [`agent`] | what one member does: source (leads) and rollout (installs) | all above, never `controller` |
//! | [`conformance`] | whether an engine's server keeps the protocol that its adapter relies on | `agent` and all above it |
//! | [`coordinator`] | carries out membership decisions towards agents | all above but `agent`, `engine`, `transport` |
//! | [`api`] | the Kubernetes resource | `protocol`, `plan` |
//! | [`controller`], [`local`] | the same loop on a cluster, and on one host | all above but `agent` |
//! | [`cli`] | commands and their output | everything |

pub mod agent;
pub mod api;
pub mod cli;
pub mod conformance;
pub mod controller;
pub mod coordinator;
pub mod engine;
pub mod gpu;
pub mod local;
pub mod membership;
pub mod plan;
pub mod protocol;
pub mod runtime;
pub mod torch;
pub mod transport;
pub mod weights;
pub mod worker;
