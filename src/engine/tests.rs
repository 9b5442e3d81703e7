//! The adapters against the simulators, over real sockets.

mod device;
mod failures;
mod gpu;
mod group;
mod half;
mod install;
mod lmdeploy;
mod parts;
mod support;
