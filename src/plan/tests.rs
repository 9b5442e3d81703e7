//! Tests of the plan: tables by topic, properties over random worlds.

mod explained;
mod gpu_memory;
mod seats;
mod properties;
mod replicas;
mod sharing;
mod shipped;
mod sizes;
mod sources;
mod world;
