//! What one member of a group does: the source leads updates, a rollout receives, verifies and installs.

pub mod checkpoint_source;
pub mod client;
pub mod enrollment;
pub mod publish_job;
pub mod version_source;
