//! Tests of the messages: one file for each topic.

mod compatibility;
mod fuzz;
mod skew;
mod transport;
mod worker;
