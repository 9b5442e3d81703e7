//! The adapters against the simulators, over real sockets.

mod failures;
mod half;
mod install;
mod parts;
mod support;
