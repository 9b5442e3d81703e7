//! What one member of a group does: the source leads updates, a rollout receives, verifies and installs.

mod archive;
mod attempts;
mod checkpoint_source;
pub mod client;
pub mod command;
mod core;
pub mod edge;
pub mod enrollment;
pub mod events;
mod external;
pub mod fabric;
pub mod gpu;
mod group;
pub mod hand_over;
mod lead;
mod locks;
pub mod process;
pub mod publish_job;
pub mod rdma;
pub mod registry;
pub mod rollout;
mod roster;
mod server;
mod source;
pub mod space;
mod statements;
pub mod surroundings;
pub mod version_source;

#[cfg(test)]
mod tests;
