//! What people who try WeightSync, or teach it an engine, run next to the product: the demo, the conformance suite, simulated engines.
//!
//! It is a program of its own, `weightsync-dev`, so that nothing of it is in the image. It decides nothing about groups, versions or
//! engines: it starts the product's own parts and compares what engines serve with what was published.
#![allow(missing_docs)] // Only the program of this crate, tests and benches use it.

pub mod command;
pub mod conformance;
pub mod demo;
