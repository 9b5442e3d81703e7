//! End-to-end tests on a cluster: `make e2e` makes a kind cluster, installs the chart and runs these, one after the other.
//!
//! They work on any kubeconfig whose cluster has the chart installed and the images loaded. `WEIGHTSYNC_E2E` must name the folder that
//! `tests/cluster/up.sh` prepared (virtual environment and checkpoints, as the node sees them); without it there is nothing to test
//! against and every test fails, saying so.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod cluster;
mod fixtures;
mod http;
