//! End-to-end tests on a cluster: `make e2e` makes a kind cluster, installs the chart and runs these, three at a time.
//!
//! They work on any kubeconfig whose cluster `tests/e2e/prepare.sh` made ready (images, checkpoints, the chart); those that send signals to
//! processes, and the network policies that are enforced in all of them, need kind's node as well
//! (`WEIGHTSYNC_E2E_POLICIES=cluster`: the cluster's network enforces policies by itself). Without a cluster every test fails, saying so.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod alone;
mod asks;
mod cluster;
mod engines;
mod external;
mod faults;
mod fence;
mod fixtures;
mod going_back;
mod gpus;
mod http;
mod injection;
mod invalid;
mod liar;
mod node;
mod operate;
mod operator;
mod policies;
mod quickstart;
mod restricted;
mod service;
mod webhook;
mod wrap;
