//! Plays whole worlds: the real membership, abstract agents, a network that loses, delays and doubles, and a clock that jumps.
//!
//! Every single fault is done at every single step of groups of one to four rollouts (`exhaustive`), each of seventeen ways to break the
//! code is noticed (`mutations`), and random sequences of faults end well (`random`).

#![allow(clippy::cast_possible_truncation)]

mod agent;
mod deliver;
mod event;
mod exhaustive;
mod faults;
mod law;
mod lead;
mod mutations;
mod names;
mod play;
mod random;
mod receive;
mod trace;
mod world;
