//! Stand-ins for what a test does not have: inference servers ([`simulator`]), the agent of a pod
//! ([`fake_agent`]), and one that lies ([`liar`]).
//!
//! They keep the rules of what they stand in for, the traps included, and compute what they answer from the bytes that they were given.
//! Nothing that is shipped may depend on this crate.
#![allow(clippy::missing_panics_doc)] // What stands in a test fails it.
#![allow(missing_docs)] // Each thing here has the name of what it stands in for.

#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // It fails the test that it stands in.
pub mod fake_agent;
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
pub mod liar;
pub mod simulator;
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
pub mod support;

/// The file of `weightsync-dev`, which cargo builds with the tests and benches that start it.
///
/// # Panics
///
/// It was not built. `make` builds it first; by hand it is `cargo build --workspace --bins --tests`.
#[must_use]
#[allow(clippy::panic)]
pub fn dev_program() -> std::path::PathBuf {
    let program = with_tests("weightsync-dev");
    if program.is_file() {
        return program;
    }
    panic!(
        "{} is not there: cargo build --workspace --bins --tests (for a bench: cargo build --release --workspace --bins)",
        program.display()
    )
}

/// The file of the example `liar`, which cargo builds with the tests that start it.
///
/// # Panics
///
/// It was not built. `make` builds it first; by hand it is `cargo build --workspace --examples`.
#[must_use]
#[allow(clippy::panic)]
pub fn liar_program() -> std::path::PathBuf {
    let program = with_tests("examples/liar");
    if program.is_file() {
        return program;
    }
    panic!("{} is not there: cargo build --workspace --examples", program.display())
}

/// A program of this build: a test is in target/debug/deps, an example in target/debug/examples.
fn with_tests(name: &str) -> std::path::PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.parent().and_then(std::path::Path::parent).map(|folder| folder.join(name)).unwrap_or_default()
}
