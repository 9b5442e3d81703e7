//! The rules of the CRD in code: for files that no API server has seen, and for objects that were stored before a rule came.
//!
//! Each rule has the words of its CEL twin, so that a user reads the same message wherever it is found. A test holds the two together.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{
    Delivery, KvCache, Launch, NCCL_ENV, Nccl, OrderBy, Pause, PodSelector, Pool, SelectorOperator, Sizes, TrainerOrder, TrainerOrderBy,
    Transport, WeightSyncSpec,
};

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
        trainer_order(&mut problems, order);
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

fn order(problems: &mut Problems, field: &str, by_label: bool, by_list: bool, label: Option<&String>, names: &[String]) {
    problems.expect(by_label == label.is_some(), field, "order.label must be given when order.by is Label, and only then");
    problems.expect(by_list != names.is_empty(), field, "order.names must be given when order.by is Explicit, and only then");
    let distinct: BTreeSet<_> = names.iter().collect();
    problems.expect(distinct.len() == names.len(), field, "order.names must not list a pod twice");
}

fn trainer_order(problems: &mut Problems, trainer: &TrainerOrder) {
    let field = "spec.trainer.order";
    let by = trainer.by;
    order(problems, field, by == TrainerOrderBy::Label, by == TrainerOrderBy::Explicit, trainer.label.as_ref(), &trainer.names);
    problems.expect(
        trainer.first_index.is_none() || matches!(by, TrainerOrderBy::Ordinal | TrainerOrderBy::Label),
        field,
        "order.firstIndex has a meaning only when order.by is Ordinal or Label",
    );
    problems.range("spec.trainer.order.firstIndex", trainer.first_index.unwrap_or(0).into(), 0, 1_000_000);
}

fn check_pool(problems: &mut Problems, field: &str, pool: &Pool) {
    problems.expect(is_dns_label(&pool.name), field, "a pool's name is made of a-z, 0-9 and -, at most 63 of them");
    problems.expect(
        pool.name != "trainer",
        &format!("{field}.name"),
        "the name trainer is taken by the trainer's own pods: choose another",
    );
    selector(problems, &format!("{field}.selector"), &pool.selector);
    let container = pool.container.as_deref().is_none_or(is_dns_label);
    problems.expect(container, &format!("{field}.container"), "a container's name is made of a-z, 0-9 and -, at most 63 of them");
    let server = pool.engine.server();
    problems.expect(server.is_some(), &format!("{field}.engine"), "exactly one engine must be given: vllm, sglang, lmdeploy or fastdeploy");
    if let Some(server) = server {
        let ports = format!("{field}.engine.{}.ports", server.kind);
        problems.expect((1..=16).contains(&server.ports.len()), &ports, "there must be 1 to 16 ports");
        let distinct: BTreeSet<_> = server.ports.iter().collect();
        problems.expect(distinct.len() == server.ports.len(), &ports, "a port is listed twice");
        for port in server.ports {
            problems.range(&ports, i64::from(*port), 1, 65_535);
        }
        problems.expect(
            pool.replica.pods == 1 || server.ports.len() == 1,
            field,
            "a replica of several pods has one engine port, on its head: list one port",
        );
    }
    sizes(problems, &format!("{field}.parallelism"), &pool.parallelism);
    problems.range(&format!("{field}.replica.pods"), pool.replica.pods.into(), 1, 1024);
    let by = pool.order.by;
    let at = format!("{field}.order");
    order(problems, &at, by == OrderBy::Label, by == OrderBy::Explicit, pool.order.label.as_ref(), &pool.order.names);
}

fn is_dns_label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&name.len()) && name.chars().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

fn sizes(problems: &mut Problems, field: &str, sizes: &Sizes) {
    let all = [("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("data", sizes.data), ("expert", sizes.expert)];
    for (name, size) in all {
        problems.range(&format!("{field}.{name}"), size.into(), 1, 1024);
    }
    if all.iter().any(|(_, size)| *size < 1) {
        return;
    }
    let [tensor, pipeline, data, expert] = all.map(|(_, size)| i64::from(size));
    problems.expect(
        (tensor * data) % expert == 0,
        field,
        "experts are spread over tensor x data ranks: parallelism.expert must divide that product",
    );
    problems.expect(tensor * pipeline * data <= 65_536, field, "tensor x pipeline x data must not be more than 65536 ranks");
}

fn policies(problems: &mut Problems, spec: &WeightSyncSpec) {
    let lmdeploy = spec.rollouts.iter().any(|pool| pool.engine.lmdeploy.is_some());
    problems.expect(
        !lmdeploy || matches!(spec.update.pause, Pause::Abort | Pause::AbortAwake | Pause::External),
        "spec.update.pause",
        "LMDeploy has no pause that lets running requests wait or end: set update.pause to Abort, AbortAwake or External",
    );
    problems.expect(
        !lmdeploy || spec.delivery != Delivery::Engine || spec.update.pause != Pause::Abort,
        "spec.update.pause",
        "an LMDeploy that joins a group answers while it loads: set update.pause to AbortAwake or External, or delivery to Agent",
    );
    let fastdeploy = spec.rollouts.iter().any(|pool| pool.engine.fastdeploy.is_some());
    problems.expect(
        !fastdeploy || (spec.update.pause == Pause::Abort && spec.update.kv_cache == KvCache::Reset),
        "spec.update.pause",
        "FastDeploy's pause ends requests and empties caches, and it resumes by itself after an update: set update.pause to Abort and update.kvCache to Reset",
    );
    let tcp = spec.transport.as_ref().and_then(|transport| transport.tcp);
    problems.expect(
        spec.delivery != Delivery::Engine || tcp.is_none(),
        "spec.delivery",
        "delivery Engine moves weights by NCCL only: remove transport.tcp, or set delivery to Agent",
    );
    let given =
        |transport: &Transport| [transport.auto.is_some(), transport.tcp.is_some(), transport.nccl.is_some(), transport.gdr.is_some()];
    problems.expect(
        spec.transport.as_ref().is_none_or(|transport| match given(transport).into_iter().filter(|given| *given).count() {
            0 => transport.preflight.is_some(),
            count => count == 1,
        }),
        "spec.transport",
        "exactly one transport must be given: auto, tcp, nccl or gdr",
    );
    if let Some(nccl) = spec.transport.as_ref().and_then(|transport| transport.nccl.as_ref()) {
        check_nccl(problems, nccl);
    }
    let gdr = spec.transport.as_ref().and_then(|transport| transport.gdr);
    problems.expect(
        spec.delivery == Delivery::Agent || gdr.is_none(),
        "spec.delivery",
        "transport gdr works between agents only: remove transport.gdr, or set delivery to Agent",
    );
    if let Some(gdr) = gdr {
        problems.range("spec.transport.gdr.bucketMiB", gdr.bucket_mib.unwrap_or(1).into(), 1, 1024);
        problems.range("spec.transport.gdr.buffers", gdr.buffers.unwrap_or(2).into(), 2, 64);
    }
    if let Some(mib) = tcp.and_then(|tcp| tcp.bucket_mib) {
        problems.range("spec.transport.tcp.bucketMiB", mib.into(), 1, 1024);
    }
    let health = spec.health;
    problems.range("spec.health.periodSeconds", health.period_seconds.into(), 1, 300);
    problems.range("spec.health.timeoutSeconds", health.timeout_seconds.into(), 1, 300);
    problems.range("spec.health.failureThreshold", health.failure_threshold.into(), 1, 100);
    problems.range("spec.health.successThreshold", health.success_threshold.into(), 1, 100);
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
    problems.range("spec.membership.debounceSeconds", spec.membership.debounce_seconds.into(), 0, 600);
    let update = &spec.update;
    problems.range("spec.update.timeoutSeconds", update.timeout_seconds.into(), 1, 86_400);
    problems.range("spec.update.silenceSeconds", update.silence_seconds.into(), 1, 3600);
    problems.expect(
        update.silence_seconds <= update.timeout_seconds,
        "spec.update",
        "update.silenceSeconds must not be longer than update.timeoutSeconds",
    );
    if let Some(retain) = update.retain {
        problems.range("spec.update.retain.hostMiB", retain.host_mib, 0, 67_108_864);
    }
    let ephemeral = spec.agent.launch == Launch::Ephemeral;
    problems.expect(
        !ephemeral || update.retain.is_none_or(|retain| retain.host_mib == 0),
        "spec",
        "an ephemeral container's memory is the trainer's, so nothing can be retained there: remove update.retain or choose another \
         agent.launch",
    );
    let keyed = |pool: &Pool| pool.engine.server().is_some_and(|server| server.api_key.is_some());
    problems.expect(
        ephemeral || !spec.rollouts.iter().any(keyed),
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

fn check_nccl(problems: &mut Problems, nccl: &Nccl) {
    let field = "spec.transport.nccl";
    problems.range(&format!("{field}.bucketMiB"), nccl.bucket_mib.unwrap_or(1).into(), 1, 16_384);
    problems.range(&format!("{field}.buffers"), nccl.buffers.unwrap_or(2).into(), 2, 64);
    problems.expect(
        nccl.env.keys().all(|name| NCCL_ENV.contains(&name.as_str())),
        &format!("{field}.env"),
        "transport.nccl.env takes settings of NCCL from a fixed list only, none that loads code or writes files: see the reference",
    );
    let short = nccl.env.values().all(|value| value.len() <= 256 && !value.contains('\0'));
    problems.expect(short, &format!("{field}.env"), "a setting of NCCL is at most 256 bytes long");
}

/// `1` to `99999` or `1%` to `100%`, without a leading zero.
fn is_count_or_percentage(text: &str) -> bool {
    let (digits, most) = text.strip_suffix('%').map_or((text, 99_999), |digits| (digits, 100));
    !digits.starts_with(['0', '+']) && digits.parse::<u32>().is_ok_and(|number| (1..=most).contains(&number))
}
