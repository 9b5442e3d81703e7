//! What one member of a group does: the source leads updates, a rollout receives, verifies and installs.

pub mod attempts;
pub mod checkpoint_source;
pub mod client;
pub mod command;
pub mod core;
pub mod enrollment;
pub mod events;
pub mod external;
pub mod gpu;
pub mod group;
pub mod hand_over;
pub mod lead;
pub mod process;
pub mod publish_job;
pub mod rollout;
pub mod roster;
pub mod server;
pub mod shelf;
pub mod source;
pub mod space;
pub mod surroundings;
pub mod version_source;

#[cfg(test)]
mod tests;
