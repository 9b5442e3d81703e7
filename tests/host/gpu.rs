//! GPU workers as processes, on the stand-in for the driver and NCCL (tests/fakegpu): what they do when all is well, and when it is not.

pub mod bed;
mod broadcast;
mod bytes;
mod doctor;
mod feed;
mod libraries;
mod recovery;
mod sharing;
