//! Plays whole worlds: the real membership, abstract agents, a network that loses, delays and doubles, and a clock that jumps.
//!
//! Every single fault is done at every single step of groups of one to four rollouts (`exhaustive`), and of groups that go back, refuse a
//! version or drift apart (`acts`); each of twenty-four ways to break the code is noticed (`mutations`), and random sequences of faults end
//! well (`random`).

#![allow(clippy::cast_possible_truncation)]

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
mod mutations;
mod names;
mod play;
mod random;
mod receive;
mod trace;
mod world;
