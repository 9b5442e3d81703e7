//! The operator and the command line of WeightSync, which keeps the weights that rollout engines serve equal to the weights that a
//! trainer makes.
//!
//! What they are built on are crates of their own, from the bottom to the top. Cargo holds the arrows: a crate sees only those above it
//! in this table, and no crate sees this one.
//!
//! | crate | decides |
//! |---|---|
//! | [`core`](weightsync_core) | versions, the protocol between members, which pods form a group, and when |
//! | [`net`](weightsync_net) | certificates, HTTPS, health, metrics, logs, deadlines |
//! | [`gpu`](weightsync_gpu) | the driver, NCCL, the digest kernel, and the worker process that has one GPU |
//! | `torch` | what torch and engines built on it read: pickles, and the store where ranks meet |
//! | [`transport`](weightsync_transport) | how bytes travel between agents |
//! | `engine` | how one inference engine is fed |
//! | [`agent`](weightsync_agent) | what one member does: the source leads, a rollout installs |
//! | [`coordinator`](weightsync_coordinator) | carries out membership decisions towards agents, on a cluster and on one host |
//! | this crate | [`api`]: the resource; `controller`: the loop on a cluster; [`cli`]: commands and their output |
//!
//! Stand-ins for tests are in `crates/testkit`, the demo and the conformance suite in `crates/testkit-dev`. Neither is shipped.
#![allow(missing_docs)] // No other crate is offered anything here but our own binaries, tests and benches.

pub mod api;
pub mod cli;
mod controller;
mod inject;
mod local_file;
mod watching;
