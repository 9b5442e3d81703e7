//! The controller: its decisions by tables, and the whole of it against an API server in memory and agents that are fake.

pub(super) mod api_server;
mod browser;
mod chart;
mod decisions;
mod ephemerals;
mod fixtures;
mod many;
mod operate;
mod pods;
mod registered;
mod reports;
mod takeover;
mod tokens;
mod traces;
mod watches;
mod webhook;
mod whole;
