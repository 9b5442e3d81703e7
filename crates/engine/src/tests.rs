//! The adapters against the simulators, over real sockets.

mod backend_on_gpus;
mod canary;
mod device;
mod draft;
mod external;
mod failures;
mod fastdeploy;
mod fastdeploy_memory;
mod fuzz;
mod gpu;
mod group;
mod half;
mod host;
mod install;
mod lmdeploy;
mod mixed;
mod parts;
mod sleep;
pub(crate) mod support;
mod toy;
mod unproven;
