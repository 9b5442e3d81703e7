//! End-to-end tests on a cluster: `make e2e` makes a kind cluster, installs the chart and runs these, one after the other.
//!
//! They work on any kubeconfig whose cluster `tests/e2e/prepare.sh` made ready (images, checkpoints, the chart); those that send signals to
//! processes need kind's node as well. Without a cluster every test fails, saying so.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod asks;
mod cluster;
mod external;
mod faults;
mod fixtures;
mod going_back;
mod http;
mod injection;
mod invalid;
mod node;
mod operate;
mod operator;
mod service;
mod versions;
mod wrap;
