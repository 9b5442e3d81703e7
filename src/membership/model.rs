//! Plays whole worlds: the real membership, abstract agents, a network that loses, delays and doubles, and a clock that jumps.
//!
//! Every single fault is done at every single step of groups of one to four rollouts (`exhaustive`), and ten and more ways to break the
//! code are each noticed (`mutations`).

#![allow(clippy::cast_possible_truncation)]

mod agent;
mod deliver;
mod exhaustive;
mod faults;
mod law;
mod mutations;
mod names;
mod play;
mod trace;
mod world;
