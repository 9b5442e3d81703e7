//! Coordinator and enrolment with fake agents, over real mutual TLS.

mod enrollment;
mod groups;
mod world;
