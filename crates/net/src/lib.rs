//! The parts that every program of WeightSync needs: certificates, HTTP with identities, deadlines, health, metrics, logs.
//!
//! This crate moves bytes and keeps time; it never decides about groups, versions or engines.

pub mod backoff;
pub mod deadline;
pub mod health;
pub mod https;
pub mod identity;
pub mod listen;
pub mod logs;
pub mod memfd;
pub mod metrics;
pub mod shutdown;
