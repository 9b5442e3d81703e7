//! Spec into inputs of the rooms below. Numbers were checked before; one that cannot be is cut at its limit rather than wrapped.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

use super::{
    BeforeFirstVersion, Digest, KvCache, Launch, OrderBy, Pause, PodSelector, Pool, PoolOrder, SelectorOperator, Sizes, Trainer,
    TrainerOrderBy, WeightSync, WeightSyncSpec,
};
use weightsync_core::plan::{GroupSpec, Operator, Order, Parallelism, PoolSpec, Requirement, Selector, TrainerSpec, WeightSyncRef};
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
        let tcp = self.transport.as_ref().and_then(|transport| transport.tcp).unwrap_or_default();
        let retain_bytes = match (self.update.retain, self.agent.launch) {
            (Some(retain), _) => u64::try_from(retain.host_mib).unwrap_or(0).saturating_mul(1 << 20),
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
            pause: match self.update.pause {
                Pause::Keep => PausePolicy::Keep,
                Pause::Drain => PausePolicy::Drain,
                Pause::Abort => PausePolicy::Abort,
                Pause::AbortAwake => PausePolicy::AbortAwake,
                Pause::External => PausePolicy::External,
            },
            kv_cache: match self.update.kv_cache {
                KvCache::Keep => KvCachePolicy::Keep,
                KvCache::Reset => KvCachePolicy::Reset,
            },
            min_ready: self.min_ready(total),
            max_unavailable: self.max_unavailable(total),
            max_skew: self.membership.max_skew.and_then(|most| u64::try_from(most).ok()),
            silence_ms: millis(self.update.silence_seconds),
            update_timeout_ms: millis(self.update.timeout_seconds),
            retain_bytes,
            keep: count(self.membership.keep),
            bucket_bytes: u64::from(count(tcp.bucket_mib.unwrap_or(0))) << 20,
            digest: match self.update.digest {
                Digest::Blake3 => weightsync_core::protocol::Digest::Blake3,
                Digest::Xxh3 => weightsync_core::protocol::Digest::Xxh3,
            },
            data_tls: tcp.tls,
            transport: self.transport_policy(),
            health: HealthPolicy {
                period_ms: millis(self.health.period_seconds),
                timeout_ms: millis(self.health.timeout_seconds),
                failure_threshold: count(self.health.failure_threshold),
                success_threshold: count(self.health.success_threshold),
            },
            canary: self.canary.as_ref().map(super::Canary::policy),
        }
    }

    /// The transport in the agents' protocol.
    pub fn transport_policy(&self) -> TransportPolicy {
        let preflight = self.transport.as_ref().and_then(|transport| transport.preflight).unwrap_or_default();
        let preflight = match preflight {
            super::Preflight::Auto => Preflight::Auto,
            super::Preflight::Off => Preflight::Off,
        };
        TransportPolicy { preflight, ..self.chosen_transport() }
    }

    fn chosen_transport(&self) -> TransportPolicy {
        let transport = self.transport.as_ref();
        let tcp = transport.and_then(|transport| transport.tcp);
        if let Some(gdr) = transport.and_then(|transport| transport.gdr) {
            return gdr.policy();
        }
        let nccl = transport.and_then(|transport| transport.nccl.as_ref());
        let wish = match (nccl, tcp) {
            (Some(_), _) => TransportWish::Nccl,
            (None, Some(_)) => TransportWish::Tcp,
            (None, None) => TransportWish::Auto,
        };
        let nccl = nccl.cloned().unwrap_or_default();
        let policy = TransportPolicy {
            wish,
            slot_bytes: u64::from(count(nccl.bucket_mib.unwrap_or(0))) << 20,
            slots: count(nccl.buffers.unwrap_or(0)),
            allow_tcp: nccl.allow_tcp.unwrap_or(false),
            environment: nccl.env,
            ..TransportPolicy::default()
        };
        match self.delivery {
            super::Delivery::Engine => policy.with_engines(self.engine_kinds()),
            super::Delivery::Agent | super::Delivery::External => policy,
        }
    }

    fn engine_kinds(&self) -> impl Iterator<Item = &'static str> {
        self.rollouts.iter().filter_map(|pool| pool.engine.server()).map(|server| server.kind)
    }

    pub fn target(&self) -> Option<u64> {
        self.target_version.and_then(|version| u64::try_from(version).ok())
    }

    /// How long a join waits for others, in ms.
    pub fn debounce_ms(&self) -> u64 {
        millis(self.membership.debounce_seconds)
    }

    /// Whether pods are ready before the first version.
    pub fn serve_before_first_version(&self) -> bool {
        self.readiness.before_first_version == BeforeFirstVersion::Serve
    }

    /// The engines of a pod of `pool`, in the agents' protocol.
    pub fn engines(pool: &Pool) -> Vec<EngineAssignment> {
        let Some(server) = pool.engine.server() else { return Vec::new() };
        let ports = server.ports.iter().filter_map(|port| u16::try_from(*port).ok());
        ports.map(|port| EngineAssignment { kind: server.kind.to_owned(), port }).collect()
    }
}

impl Trainer {
    pub fn to_plan(&self) -> TrainerSpec {
        let order = self.order.as_ref();
        TrainerSpec {
            selector: self.selector.to_plan(),
            container: self.container.clone(),
            order: order.map_or(Order::Auto, |order| match order.by {
                TrainerOrderBy::Ordinal => Order::Ordinal,
                TrainerOrderBy::Name => Order::Name,
                TrainerOrderBy::Label => Order::Label(order.label.clone().unwrap_or_default()),
                TrainerOrderBy::Explicit => Order::Explicit(order.names.clone()),
            }),
            first_index: order.and_then(|order| order.first_index).map_or(0, count),
            sources: 1,
        }
    }
}

impl Pool {
    pub fn to_plan(&self) -> PoolSpec {
        let ports = self.engine.server().map_or(&[][..], |server| server.ports);
        let group = (self.replica.pods != 1).then(|| GroupSpec {
            pods: count(self.replica.pods),
            label: self.replica.group_label.clone(),
            head_label: self.replica.head.label.clone(),
            head_value: self.replica.head.value.clone(),
        });
        PoolSpec {
            name: self.name.clone(),
            selector: self.selector.to_plan(),
            container: self.container.clone(),
            // A port that cannot be becomes 0, which the plan refuses by name.
            ports: ports.iter().map(|port| u16::try_from(*port).unwrap_or(0)).collect(),
            parallelism: self.parallelism.to_plan(),
            group,
            order: self.order.to_plan(),
        }
    }
}

impl PoolOrder {
    fn to_plan(&self) -> Order {
        match self.by {
            OrderBy::Name => Order::Name,
            OrderBy::Ordinal => Order::Ordinal,
            OrderBy::Label => Order::Label(self.label.clone().unwrap_or_default()),
            OrderBy::Explicit => Order::Explicit(self.names.clone()),
        }
    }
}

impl Sizes {
    pub fn to_plan(&self) -> Parallelism {
        Parallelism { tensor: count(self.tensor), pipeline: count(self.pipeline), data: count(self.data), expert: count(self.expert) }
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

impl super::Gdr {
    /// The same value in the agents' protocol.
    pub fn policy(&self) -> TransportPolicy {
        TransportPolicy {
            wish: TransportWish::Gdr,
            slot_bytes: u64::from(count(self.bucket_mib.unwrap_or(0))) << 20,
            slots: count(self.buffers.unwrap_or(0)),
            allow_tcp: self.allow_tcp.unwrap_or(false),
            ..TransportPolicy::default()
        }
    }
}
