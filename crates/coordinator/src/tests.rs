//! Coordinator and enrolment against agents that are fake, over mutual TLS that is not.

mod enrollment;
pub(crate) mod fake_agent;
mod groups;
mod world;
