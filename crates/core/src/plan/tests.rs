//! Tests of the plan: tables by topic, properties over random worlds.

mod engine_groups;
mod explained;
mod gpu_memory;
mod properties;
mod replicas;
mod seats;
mod sharing;
mod sizes;
mod sources;
mod world;
