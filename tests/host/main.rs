//! Tests on one host: processes, loopback sockets, real files. One binary, because every test binary costs a link.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod agent_process;
mod backend;
mod binary;
mod chart;
mod conformance;
mod demo;
mod docs;
mod drafts;
mod external;
mod gpu;
mod ipv6;
mod layout;
mod model;
mod operate;
mod orphans;
mod plugin;
mod quickstart;
mod rotation;
mod stories;
mod strangers;
mod unenrolled;
mod upgrade;
mod world;
mod wrapped;
