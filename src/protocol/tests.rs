//! Tests of the room: each file about one part of it.

mod fuzz;
mod worker;
