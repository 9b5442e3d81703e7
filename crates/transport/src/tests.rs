//! The guarantees of a chain, tested with one and with several connections on each hop. Each member runs on its own runtime, so that it can
//! be killed (its runtime is shut down) and frozen (its only worker is blocked) like a process.
#![allow(clippy::cast_possible_truncation)]

mod digest;
pub mod fixture;
mod suite;
