//! Coordinator and enrolment against agents that are fake, over mutual TLS that is not.

mod enrollment;
mod groups;
mod world;
