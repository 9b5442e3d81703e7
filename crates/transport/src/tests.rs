//! The promises of a chain, asked with one and with several connections a hop; each member runs on a runtime of its own, so that it can be
//! killed (its runtime is torn down) and frozen (its only worker is blocked) like a process.
#![allow(clippy::cast_possible_truncation)]

mod digest;
pub mod fixture;
mod suite;
