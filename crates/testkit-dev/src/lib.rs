//! Tools for trying WeightSync and for supporting an engine: the demo, the conformance suite, simulated engines.
//!
//! It is a separate program, `weightsync-dev`, so that nothing of it is in the image. It decides nothing about groups, versions or engines:
//! it starts the product's own parts and compares what engines serve with what was published.
#![allow(missing_docs)] // Only the program of this crate, tests and benches use it.

pub mod command;
pub mod conformance;
pub mod demo;
