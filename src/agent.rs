//! What one member of a group does: the source leads updates, a rollout receives, verifies and installs.
