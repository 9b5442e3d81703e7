//! GPU workers as processes, on the stand-in for the driver and NCCL (tests/fakegpu): what they do when all is well, and when it is not.
#![allow(clippy::cast_possible_truncation)]

mod agents;
mod broadcast;
mod bytes;
mod colocated;
mod deliveries;
mod demo;
mod doctor;
mod drafts;
mod engines;
mod feed;
pub mod fixture;
mod group;
mod handover;
mod joined;
mod joiner;
mod lending;
mod libraries;
mod network;
mod recovery;
mod rules;
mod sharing;
mod simulated;
