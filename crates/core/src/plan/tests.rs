//! Tests of the plan: tables by topic, properties over random worlds.

mod engine_groups;
mod explained;
mod gpu_memory;
mod properties;
mod rank_plan;
mod replicas;
mod sharing;
mod sizes;
mod sources;
mod world;
