//! Converts the spec into inputs of `plan`, `membership` and `protocol`. Numbers were checked before; an impossible one is cut at its
//! limit.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

use super::{
    BeforeFirstVersion, Digest, Discovery, Join, KvCache, Launch, Pause, PodSelector, Pool, Replica, SelectorOperator, Trainer, Transport,
    TransportType, WeightSync, WeightSyncSpec,
};
use weightsync_core::membership::JoinPolicy;
use weightsync_core::plan::{GroupSpec, Operator, Order, PoolSpec, Requirement, Selector, TrainerSpec, WeightSyncRef};
use weightsync_core::protocol::{
    Delivery, EngineAssignment, HealthPolicy, KvCachePolicy, PausePolicy, Preflight, TransportPolicy, TransportWish, UpdatePolicy,
};

fn count(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

fn millis(seconds: i32) -> u64 {
    u64::try_from(seconds).unwrap_or(0) * 1000
}

/// A number, or a share of `total`.
fn share(wanted: &IntOrString, total: u32, divide: fn(u64, u64) -> u64) -> u32 {
    match wanted {
        IntOrString::Int(number) => count(*number),
        IntOrString::String(text) => match text.strip_suffix('%') {
            Some(percent) => {
                let percent: u64 = percent.parse().unwrap_or(100);
                u32::try_from(divide(u64::from(total).saturating_mul(percent), 100)).unwrap_or(u32::MAX)
            }
            None => text.parse().unwrap_or(u32::MAX),
        },
    }
}

impl From<Pause> for PausePolicy {
    fn from(pause: Pause) -> Self {
        match pause {
            Pause::Keep => Self::Keep,
            Pause::Drain => Self::Drain,
            Pause::Abort => Self::Abort,
            Pause::AbortAwake => Self::AbortAwake,
            Pause::External => Self::External,
        }
    }
}

impl From<KvCache> for KvCachePolicy {
    fn from(kv_cache: KvCache) -> Self {
        match kv_cache {
            KvCache::Keep => Self::Keep,
            KvCache::Reset => Self::Reset,
        }
    }
}

impl WeightSync {
    pub fn plan_ref(&self) -> WeightSyncRef {
        let created = self.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_millisecond());
        WeightSyncRef {
            namespace: self.namespace().unwrap_or_default(),
            name: self.name_any(),
            uid: self.uid().unwrap_or_default(),
            created: u64::try_from(created).unwrap_or(0),
        }
    }
}

impl WeightSyncSpec {
    /// The pools, in the order of the spec.
    pub fn plan_pools(&self) -> Vec<PoolSpec> {
        self.rollouts.iter().map(Pool::to_plan).collect()
    }

    /// Replicas that must hold a version for it to count, of `total`: at least one.
    pub fn min_ready(&self, total: u32) -> u32 {
        share(&self.membership.min_ready, total, u64::div_ceil).max(1)
    }

    /// Replicas of `total` that may be out of service at once because of an update; 0 for all.
    pub fn max_unavailable(&self, total: u32) -> u32 {
        self.membership.max_unavailable.as_ref().map_or(0, |most| share(most, total, |count, whole| count / whole).max(1))
    }

    pub fn update_policy(&self, total: u32) -> UpdatePolicy {
        let retain_bytes = match (self.update.retain_mib, self.agent.launch) {
            (Some(mib), _) => u64::try_from(mib).unwrap_or(0).saturating_mul(1 << 20),
            (None, Launch::Ephemeral) => 0,
            // What fits: agents compare with the memory of their pod and node.
            (None, _) => u64::MAX,
        };
        UpdatePolicy {
            delivery: match self.delivery {
                super::Delivery::Agent => Delivery::Agent,
                super::Delivery::Engine => Delivery::Engine,
                super::Delivery::External => Delivery::External,
            },
            pause: self.update.pause.into(),
            kv_cache: self.update.kv_cache.into(),
            min_ready: self.min_ready(total),
            max_unavailable: self.max_unavailable(total),
            max_skew: self.membership.max_skew.and_then(|most| u64::try_from(most).ok()),
            silence_ms: millis(self.update.silence_seconds),
            update_timeout_ms: millis(self.update.timeout_seconds),
            retain_bytes,
            keep: count(self.membership.keep),
            bucket_bytes: self.transport.bucket_bytes(),
            digest: match self.update.digest {
                Digest::Blake3 => weightsync_core::protocol::Digest::Blake3,
                Digest::Xxh3 => weightsync_core::protocol::Digest::Xxh3,
            },
            data_tls: self.transport.tls.unwrap_or(true),
            transport: self.transport_policy(),
            health: HealthPolicy {
                period_ms: millis(self.health.period_seconds),
                timeout_ms: millis(self.health.timeout_seconds),
                failure_threshold: count(self.health.failure_threshold),
                success_threshold: 1,
            },
            canary: self.canary.as_ref().map(super::Canary::policy),
        }
    }

    /// The transport in the agents' protocol.
    pub fn transport_policy(&self) -> TransportPolicy {
        let policy = self.transport.policy();
        match self.delivery {
            super::Delivery::Engine => policy.with_engines(self.rollouts.iter().map(|pool| pool.engine.kind.name())),
            super::Delivery::Agent | super::Delivery::External => policy,
        }
    }

    pub fn target(&self) -> Option<u64> {
        self.target_version.and_then(|version| u64::try_from(version).ok())
    }

    /// Whether pods are ready before the first version.
    pub fn serve_before_first_version(&self) -> bool {
        self.readiness.before_first_version == BeforeFirstVersion::Serve
    }

    /// The engines of a pod of `pool`, in the agents' protocol: at the ports of the spec, or at those that `registered` with its agent.
    pub fn engines(pool: &Pool, registered: &[u16]) -> Vec<EngineAssignment> {
        let kind = pool.engine.kind.name();
        let listed = pool.engine.ports().into_iter().filter_map(|port| u16::try_from(port).ok());
        let found = registered.iter().copied().filter(|_| pool.engine.discovery == Discovery::Registered);
        listed.chain(found).map(|port| EngineAssignment { kind: kind.to_owned(), port }).collect()
    }
}

impl Join {
    pub const fn policy(self) -> JoinPolicy {
        match self {
            Self::Immediate => JoinPolicy::Immediate,
            Self::NextVersion => JoinPolicy::NextVersion,
        }
    }
}

impl Transport {
    /// Length of a bucket; 0 if it is chosen.
    fn bucket_bytes(&self) -> u64 {
        u64::from(count(self.bucket_mib.unwrap_or(0))) << 20
    }

    /// The same value in the agents' protocol.
    fn policy(&self) -> TransportPolicy {
        TransportPolicy {
            wish: match self.kind {
                TransportType::Auto => TransportWish::Auto,
                TransportType::Tcp => TransportWish::Tcp,
                TransportType::Nccl => TransportWish::Nccl,
                TransportType::Gdr => TransportWish::Gdr,
            },
            slot_bytes: self.bucket_bytes(),
            allow_tcp: self.allow_tcp,
            environment: self.nccl_env.clone(),
            preflight: match self.preflight.unwrap_or_default() {
                super::Preflight::Auto => Preflight::Auto,
                super::Preflight::Off => Preflight::Off,
            },
            ..TransportPolicy::default()
        }
    }
}

impl Trainer {
    pub fn to_plan(&self) -> TrainerSpec {
        TrainerSpec { selector: self.selector.to_plan(), order: order(self.order.as_ref()), sources: 1 }
    }
}

impl Pool {
    pub fn to_plan(&self) -> PoolSpec {
        let group = (self.replica.pods != 1).then(|| GroupSpec {
            pods: count(self.replica.pods),
            label: self.replica.group_label.clone(),
            head: self.replica.head(),
        });
        PoolSpec {
            name: self.name.clone(),
            selector: self.selector.to_plan(),
            // A port that cannot be becomes 0, which the plan refuses by name.
            ports: self.engine.ports().into_iter().map(|port| u16::try_from(port).unwrap_or(0)).collect(),
            registered: self.engine.discovery == Discovery::Registered,
            max_registered: self.engine.max_registered.map(count),
            ranks: count(self.ranks),
            group,
            order: order(self.order.as_ref()),
        }
    }
}

impl Replica {
    /// Selects the head among the pods of a replica.
    pub fn head(&self) -> Selector {
        Selector { labels: self.head_labels.clone(), requirements: Vec::new() }
    }
}

fn order(order: Option<&super::Order>) -> Order {
    match order {
        None => Order::Auto,
        Some(super::Order { label: Some(label), .. }) => Order::Label(label.clone()),
        Some(super::Order { names, .. }) => Order::Explicit(names.clone()),
    }
}

impl PodSelector {
    pub fn to_plan(&self) -> Selector {
        let requirement = |requirement: &super::SelectorRequirement| Requirement {
            key: requirement.key.clone(),
            operator: match requirement.operator {
                SelectorOperator::In => Operator::In(requirement.values.iter().cloned().collect()),
                SelectorOperator::NotIn => Operator::NotIn(requirement.values.iter().cloned().collect()),
                SelectorOperator::Exists => Operator::Exists,
                SelectorOperator::DoesNotExist => Operator::DoesNotExist,
            },
        };
        Selector { labels: self.match_labels.clone(), requirements: self.match_expressions.iter().map(requirement).collect() }
    }
}
