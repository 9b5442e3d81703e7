//! The engine adapters and simulators against the real server.
//!
//! `WEIGHTSYNC_VENV` names a virtual environment with vLLM 0.32 (`make engine-test` sets it): each test then plays on the simulator and on
//! the real server and compares. Where it is empty, the same steps and expectations are held against the simulator alone.
//! `WEIGHTSYNC_TEST_CPU=avx2` has the real servers compute as on a processor without AVX-512.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod adapter;
mod backend;
mod client;
mod conformance;
mod demo;
mod fastdeploy;
mod feeder;
mod forks;
mod models;
mod processor;
mod real;
mod script;
mod shape;
mod shared;
mod store;
mod wrong;
