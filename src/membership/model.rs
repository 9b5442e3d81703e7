//! Plays whole worlds: the real membership, abstract agents, a network that loses, delays and doubles, and a clock that jumps.
//!
//! Every single fault is done at every single step of groups of one to four rollouts (`exhaustive`), ten and more ways to break the code
//! are each noticed (`mutations`), and random sequences of faults end well (`random`).

mod agent;
mod deliver;
mod exhaustive;
mod faults;
mod law;
mod mutations;
mod names;
mod play;
mod random;
mod trace;
mod world;
