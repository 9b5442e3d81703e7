//! The decisions of WeightSync, without anything that happens: no kube, no tokio, no clock, no file but a checkpoint's.
//!
//! What a version is ([`weights`]), what members say to each other ([`protocol`]), which pods form a group and with which ranks
//! ([`plan`]), and when a group is formed, fenced and formed again ([`membership`]). Each takes facts and returns a decision; the crates
//! above carry it out. Nothing here may wait, log, or ask what time it is.

pub mod membership;
pub mod plan;
pub mod protocol;
pub mod weights;
