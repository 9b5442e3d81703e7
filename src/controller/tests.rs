//! The controller: its decisions by tables, and the whole of it against an API server in memory and agents that are fake.

mod api_server;
mod decisions;
mod ephemerals;
mod fixtures;
mod reports;
mod tokens;
mod whole;
