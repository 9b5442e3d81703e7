//! Plays whole worlds: the real membership, abstract agents, a network that loses, delays and doubles messages, and a clock that jumps.
//!
//! Decides whether the invariants (`law`) hold in each world after each step, and whether each world heals. It never waits and never opens
//! a socket. It uses the membership only through its public interface.
//!
//! Every single fault is injected at every single step of groups with one to four rollouts (`exhaustive`), and of groups that go back,
//! refuse a version or drift apart (`acts`). Random sequences of faults end well (`random`). Each patch in `tests/mutants` breaks one rule
//! of the membership. `tests/tools/mutants.sh` checks that the test and the invariant that the patch names detect it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, clippy::cast_possible_truncation)]

mod acts;
mod agent;
mod deliver;
mod event;
mod exhaustive;
mod faults;
mod heal;
mod keep;
mod law;
mod lead;
mod names;
mod play;
mod random;
mod receive;
mod trace;
mod world;
