//! The rendezvous of torch's process groups without torch: a TCPStore server that lives as long as one epoch, and a client of it.
//!
//! Decides who may connect, what a store holds, and what is too much of it. A server is bound before its address is announced, answers
//! admitted addresses alone, and is closed when it is dropped: no port and no key outlives the group that it was made for. Its bytes are
//! those of torch 2.9 to 2.15 (`torch/csrc/distributed/c10d/TCPStore.cpp`, `TCPStoreBackend.hpp`), which speak the same way to torch's
//! classic server and to its libuv server. Invalid bytes close their connection and affect nothing else.

mod client;
mod keys;
mod server;
mod table;
#[cfg(test)]
mod tests;
mod wire;

use std::time::Duration;

pub use client::Client;
pub use keys::{HELLO, nccl_id_keys, prefixed};
pub use server::Server;

/// Longest key in bytes; torch's own limit.
const MAX_KEY: usize = 8 << 10;
/// Longest value in bytes. Torch allows 8 MiB; what a group exchanges is a few hundred bytes a rank.
const MAX_VALUE: usize = 1 << 20;
/// Longest request in bytes.
const MAX_REQUEST: usize = MAX_VALUE + (64 << 10);
/// Most keys in one request.
const MAX_LIST: usize = 4096;
/// Most keys that are set or waited for, each client counted.
const MAX_ENTRIES: usize = 64 << 10;
/// Bytes of all keys and values together.
const MAX_BYTES: usize = 64 << 20;
/// Most connections at once. A rank of torch has one to three.
const MAX_CLIENTS: usize = 1024;

/// A client that sent no complete request for this long after it connected is closed, as is one that leaves a request half sent or does not
/// take its replies. Between requests it may rest: an engine keeps its connection as long as its group.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum StoreError {
    #[error("the store cannot listen on {address}: {cause}")]
    Listen { address: std::net::SocketAddr, cause: std::io::Error },
    #[error("the store refuses {what}: {cause}")]
    Refused { what: String, cause: String },
    #[error("{seen} of {wanted} ranks came to the store within {within:?}")]
    Missing { seen: usize, wanted: usize, within: Duration },
    #[error("the store was closed")]
    Closed,
    #[error("the store at {address} cannot be reached within {within:?}: {cause}")]
    Unreachable { address: std::net::SocketAddr, within: Duration, cause: String },
    #[error("the store did not answer \"{what}\" within {within:?}")]
    Silent { what: &'static str, within: Duration },
    #[error("the store's connection broke: {0}")]
    Broken(#[from] std::io::Error),
    #[error("the store answered \"{what}\" with nonsense")]
    Nonsense { what: &'static str },
}
