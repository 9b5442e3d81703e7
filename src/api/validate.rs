//! The rules of the CRD in code: for files that no API server has seen, and for objects that were stored before a rule came.
//!
//! Each rule has the words of its CEL twin, so that a user reads the same message wherever it is found. A test holds the two together. Both
//! rules of an engine are made from its description.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::engine_kind::broken;
use super::{
    Delivery, Discovery, Launch, NCCL_ENV, Order, Pause, PodSelector, Pool, SelectorOperator, Transport, TransportType, WeightSyncSpec,
};
use weightsync_core::weights::{MOST_PATTERNS, is_pattern};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Path of the field, `spec.trainer.order` for instance.
    pub field: String,
    /// What is wrong and what to change.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

#[derive(Default)]
struct Problems(Vec<Problem>);

impl Problems {
    /// Notes `message` at `field` unless the rule holds.
    fn expect(&mut self, holds: bool, field: &str, message: &str) {
        if !holds {
            self.0.push(Problem { field: field.to_owned(), message: message.to_owned() });
        }
    }

    fn range(&mut self, field: &str, number: i64, least: i64, most: i64) {
        self.expect((least..=most).contains(&number), field, &format!("{number} is not from {least} to {most}"));
    }
}

/// All violated rules of a spec that can be checked without pods. Empty when the spec is valid.
pub fn validate(spec: &WeightSyncSpec) -> Vec<Problem> {
    let mut problems = Problems::default();
    selector(&mut problems, "spec.trainer.selector", &spec.trainer.selector);
    if let Some(order) = &spec.trainer.order {
        check_order(&mut problems, "spec.trainer.order", order);
    }
    problems.expect((1..=16).contains(&spec.rollouts.len()), "spec.rollouts", "there must be 1 to 16 pools");
    let mut names = BTreeSet::new();
    for pool in &spec.rollouts {
        let field = format!("spec.rollouts[{}]", pool.name);
        problems.expect(names.insert(&pool.name), &field, "two pools have this name");
        check_pool(&mut problems, &field, pool);
    }
    policies(&mut problems, spec);
    problems.0
}

fn selector(problems: &mut Problems, field: &str, selector: &PodSelector) {
    problems.expect(
        !selector.match_labels.is_empty() || !selector.match_expressions.is_empty(),
        field,
        "an empty selector would mean every pod: name at least one label in matchLabels or matchExpressions",
    );
    for requirement in &selector.match_expressions {
        let wants = matches!(requirement.operator, SelectorOperator::In | SelectorOperator::NotIn);
        problems.expect(
            wants != requirement.values.is_empty(),
            &format!("{field}.matchExpressions[{}]", requirement.key),
            "values must be given for In and NotIn, and not for Exists and DoesNotExist",
        );
    }
}

fn check_order(problems: &mut Problems, field: &str, order: &Order) {
    problems.expect(
        order.label.is_some() == order.names.is_empty(),
        field,
        "an order goes by a label or by names: give exactly one of order.label and order.names",
    );
    let distinct: BTreeSet<_> = order.names.iter().collect();
    problems.expect(distinct.len() == order.names.len(), field, "order.names must not list a pod twice");
}

fn check_pool(problems: &mut Problems, field: &str, pool: &Pool) {
    problems.expect(is_dns_label(&pool.name), field, "a pool's name is made of a-z, 0-9 and -, at most 63 of them");
    problems.expect(
        pool.name != "trainer",
        &format!("{field}.name"),
        "the name trainer is taken by the trainer's own pods: choose another",
    );
    selector(problems, &format!("{field}.selector"), &pool.selector);
    let ports = &pool.engine.ports;
    let at = format!("{field}.engine.ports");
    problems.expect(ports.len() <= 16, &at, "there must be at most 16 ports");
    let distinct: BTreeSet<_> = ports.iter().collect();
    problems.expect(distinct.len() == ports.len(), &at, "a port is listed twice");
    for port in ports {
        problems.range(&at, i64::from(*port), 1, 65_535);
    }
    let ignored = &pool.engine.tensors.ignore;
    let at = format!("{field}.engine.tensors.ignore");
    problems.expect(ignored.len() <= MOST_PATTERNS, &at, "there must be at most 64 patterns");
    let distinct: BTreeSet<_> = ignored.iter().collect();
    problems.expect(distinct.len() == ignored.len(), &at, "a pattern is listed twice");
    for pattern in ignored {
        problems.expect(
            is_pattern(pattern),
            &at,
            "a pattern is made of printable characters without spaces, with a letter or a digit, at most 256 of them",
        );
    }
    problems.expect(
        pool.replica.pods == 1 || ports.len() <= 1,
        field,
        "a replica of several pods has one engine port, on its head: list one port",
    );
    problems.expect(
        pool.engine.discovery != Discovery::Registered || (ports.is_empty() && pool.replica.pods == 1),
        field,
        "engines that register take ports of their own, and a replica is one of them: remove engine.ports and replica.pods",
    );
    if let Some(most) = pool.engine.max_registered {
        problems.range(&format!("{field}.engine.maxRegistered"), most.into(), 1, 16);
        problems.expect(
            pool.engine.discovery == Discovery::Registered,
            field,
            "engine.maxRegistered is for engines that register: remove it, or set engine.discovery to Registered",
        );
    }
    problems.range(&format!("{field}.ranks"), pool.ranks.into(), 1, 65_536);
    problems.range(&format!("{field}.replica.pods"), pool.replica.pods.into(), 1, 1024);
    problems.expect(!pool.replica.head_labels.is_empty(), &format!("{field}.replica.headLabels"), "there must be at least one label");
    if let Some(order) = &pool.order {
        check_order(problems, &format!("{field}.order"), order);
    }
}

fn is_dns_label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&name.len()) && name.chars().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

fn policies(problems: &mut Problems, spec: &WeightSyncSpec) {
    for message in broken(spec) {
        problems.expect(false, "spec.update", &message);
    }
    problems.expect(
        spec.delivery != Delivery::Engine || matches!(spec.transport.kind, TransportType::Auto | TransportType::Nccl),
        "spec.delivery",
        "delivery Engine moves weights by NCCL only: set transport.type to Auto or NCCL, or delivery to Agent",
    );
    problems.expect(
        spec.delivery != Delivery::External || spec.transport.kind != TransportType::Gdr,
        "spec.delivery",
        "transport GDR works between agents only: set transport.type to Auto, or delivery to Agent",
    );
    check_transport(problems, &spec.transport);
    let health = spec.health;
    problems.range("spec.health.periodSeconds", health.period_seconds.into(), 1, 300);
    problems.range("spec.health.timeoutSeconds", health.timeout_seconds.into(), 1, 300);
    problems.range("spec.health.failureThreshold", health.failure_threshold.into(), 1, 100);
    problems.expect(
        match &spec.membership.min_ready {
            IntOrString::Int(number) => (1..=99_999).contains(number),
            IntOrString::String(text) => is_count_or_percentage(text),
        },
        "spec.membership.minReady",
        "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
    );
    problems.expect(
        match &spec.membership.max_unavailable {
            None => true,
            Some(IntOrString::Int(number)) => (1..=99_999).contains(number),
            Some(IntOrString::String(text)) => is_count_or_percentage(text),
        },
        "spec.membership.maxUnavailable",
        "maxUnavailable must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
    );
    problems.expect(
        spec.delivery == Delivery::Agent || spec.membership.max_unavailable.is_none(),
        "spec.delivery",
        "membership.maxUnavailable needs delivery Agent, where the whole version arrives before engines switch: remove it, or set delivery to Agent",
    );
    if let Some(most) = spec.membership.max_skew {
        problems.range("spec.membership.maxSkew", most, 0, 9_007_199_254_740_991);
    }
    problems.range("spec.membership.keep", spec.membership.keep.into(), 1, 16);
    canary(problems, spec);
    if let Some(version) = spec.target_version {
        problems.range("spec.targetVersion", version, 0, 9_007_199_254_740_991);
    }
    let update = &spec.update;
    problems.range("spec.update.timeoutSeconds", update.timeout_seconds.into(), 1, 86_400);
    problems.range("spec.update.silenceSeconds", update.silence_seconds.into(), 1, 3600);
    problems.expect(
        update.silence_seconds <= update.timeout_seconds,
        "spec.update",
        "update.silenceSeconds must not be longer than update.timeoutSeconds",
    );
    problems.range("spec.update.retainMiB", update.retain_mib.unwrap_or(0), 0, 67_108_864);
    let ephemeral = spec.agent.launch == Launch::Ephemeral;
    problems.expect(
        !ephemeral || update.retain_mib.unwrap_or(0) == 0,
        "spec",
        "an ephemeral container's memory is the trainer's, so nothing can be retained there: remove update.retainMiB or choose another \
         agent.launch",
    );
    problems.expect(
        ephemeral || spec.rollouts.iter().all(|pool| pool.engine.api_key_secret_ref.is_none()),
        "spec",
        "apiKeySecretRef works with agent.launch Ephemeral; an agent that was injected gets the key from the \
         pod's annotation weightsync.dev/api-key-secret, an external agent from its own environment",
    );
}

fn canary(problems: &mut Problems, spec: &WeightSyncSpec) {
    let Some(canary) = &spec.canary else { return };
    for (field, message) in canary.problems() {
        problems.expect(false, &format!("spec.{field}"), &message);
    }
    problems.expect(
        spec.delivery != Delivery::External && spec.update.pause != Pause::External,
        "spec.canary",
        "a canary does not work if the trainer feeds or pauses the engines: remove canary, or change delivery and update.pause from External",
    );
    problems.expect(
        spec.membership.keep >= 2,
        "spec.canary",
        "a canary needs an earlier version to go back to: set membership.keep to 2 or more",
    );
}

fn check_transport(problems: &mut Problems, transport: &Transport) {
    problems.range("spec.transport.bucketMiB", transport.bucket_mib.unwrap_or(1).into(), 1, 1024);
    let field = "spec.transport.ncclEnv";
    problems.expect(
        transport.nccl_env.keys().all(|name| NCCL_ENV.contains(&name.as_str())),
        field,
        "transport.ncclEnv takes settings of NCCL from a fixed list only, none that loads code or writes files: see the reference",
    );
    let short = transport.nccl_env.values().all(|value| value.len() <= 256 && !value.contains('\0'));
    problems.expect(short, field, "a setting of NCCL is at most 256 bytes long");
}

/// `1` to `99999` or `1%` to `100%`, without a leading zero.
fn is_count_or_percentage(text: &str) -> bool {
    let (digits, most) = text.strip_suffix('%').map_or((text, 99_999), |digits| (digits, 100));
    !digits.starts_with(['0', '+']) && digits.parse::<u32>().is_ok_and(|number| (1..=most).contains(&number))
}
