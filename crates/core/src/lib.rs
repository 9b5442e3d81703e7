//! The decisions of WeightSync, without side effects: no kube, no tokio, no clock, no files except checkpoints.
//!
//! Versions ([`weights`]), the messages between members ([`protocol`]), the pods and ranks of a group ([`plan`]), and when a group is
//! formed, fenced and formed again ([`membership`]). Each takes facts and returns decisions; other crates act on them. Nothing here may
//! wait, log, or read a clock.

pub mod membership;
pub mod plan;
pub mod protocol;
pub mod weights;
