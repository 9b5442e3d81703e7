//! The Kubernetes resource `WeightSync`: its types, its rules, and its conversion into the inputs of the other modules.
//!
//! The types are the only source of the CRD and of the API reference. `weightsync generate` writes both, and a test fails when they are out
//! of date. This module defines the fields of spec and status. It never calls an API server.
//!
//! - `spec`, `policy`, `selector`: the desired state. Each rule over two fields is a CEL rule with a message for users.
//! - `status`: the observed state. `crd`: the schema as it is installed.
//! - `validate`: the same rules in code, for objects that no API server has checked, and for objects that were stored before a rule
//!   existed.
//! - `convert`: spec into inputs of `plan` and `protocol`. `pods`: pods into inputs of `plan`.

mod canary;
mod convert;
mod crd;
mod document;
mod engine_kind;
mod pods;
mod policy;
mod pool;
mod selector;
mod spec;
mod status;
#[cfg(test)]
mod tests;
mod validate;

pub use canary::Canary;
#[cfg(test)]
pub use crd::prune;
pub use crd::{crd, crd_yaml, schema, unknown_fields};
pub use document::{DocumentError, check_version, read_document};
pub use engine_kind::EngineKind;
pub use pods::{CONTAINER_ANNOTATION, NOT_STARTED, cannot_start, container_name, not_ready, pod_facts};
pub use policy::{
    Agent, BeforeFirstVersion, Digest, Health, Join, KvCache, Launch, Membership, NCCL_ENV, OnWedged, Pause, Preflight, Readiness,
    Transport, TransportType, Update,
};
pub use pool::{Discovery, Engine, EngineTensors, Pool, Replica, SecretKey};
pub use selector::{PodSelector, SelectorOperator, SelectorRequirement};
pub use spec::{Delivery, Order, Trainer, WeightSync, WeightSyncSpec};
pub use status::{
    ConditionType, EdgeStatus, EdgeVerdict, GdrDevices, GdrStatus, LONGEST_REQUEST, LastUpdate, MAX_MEMBERS, MemberStateName, MemberStatus,
    PREFLIGHT_ANNOTATION, PhaseTime, PreflightStatus, ProofName, ReplicaCount, TrainerStatus, TransferStatus, TransportStatus,
    WeightSyncStatus,
};
pub use validate::{Problem, validate};

pub const GROUP: &str = "weightsync.dev";

pub const VERSION: &str = "v1alpha1";
