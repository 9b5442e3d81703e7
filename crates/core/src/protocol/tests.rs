//! Tests of the room: each file about one part of it.

mod compatibility;
mod fuzz;
mod skew;
mod transport;
mod worker;
