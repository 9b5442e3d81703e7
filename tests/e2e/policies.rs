//! The chart's network policies, on in every test: those of the controllers by `prepare.sh`, those of the pods that take part in the test's own
//! namespace from here.
//!
//! Where the cluster's network does not enforce them (tests/cluster/README.md), this writes what they say of the pods there are as nftables
//! rules of the node, and again whenever pods or policies change: one table for all tests that run. Part of `networking.k8s.io/v1` that the
//! chart uses: selectors of pods and namespaces, TCP and UDP ports by number and name. What it does not know fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::ObjectList;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::{Mutex, OnceCell};
use tokio::task::JoinHandle;

use crate::fixtures::ENGINE_PORT;
use crate::node::on_node;
use crate::operator::{NAMESPACE, chart, set_by_helm};

const TABLE: &str = "inet weightsync_e2e";

type Labels = BTreeMap<String, String>;

/// Policies, pods and namespaces as they are now.
struct Seen {
    policies: Vec<NetworkPolicy>,
    pods: Vec<Pod>,
    namespaces: BTreeMap<String, Labels>,
}

fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    equal
        && selector.match_expressions.iter().flatten().all(|wanted| {
            assert_eq!(wanted.operator, "In", "an operator that is not known here: {wanted:?}");
            labels.get(&wanted.key).is_some_and(|value| wanted.values.iter().flatten().any(|one| one == value))
        })
}

fn address(pod: &Pod) -> Option<&str> {
    let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
    pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).filter(|_| !on_host)
}

/// What the API server answered to the last look: lists of policies, pods and namespaces.
type Answers = [String; 3];

/// Lists the API server's objects, as it last heard of them.
async fn look(client: &Client) -> kube::Result<Answers> {
    let list = |path: &str| {
        let request = http::Request::get(format!("{path}?resourceVersion=0")).body(Vec::new()).unwrap();
        async move { client.request_text(request).await }
    };
    Ok([list("/apis/networking.k8s.io/v1/networkpolicies").await?, list("/api/v1/pods").await?, list("/api/v1/namespaces").await?])
}

fn items<K: serde::de::DeserializeOwned + Clone>(answer: &str) -> Vec<K> {
    serde_json::from_str::<ObjectList<K>>(answer).expect("a list").items
}

impl Seen {
    fn of([policies, pods, namespaces]: &Answers) -> Self {
        let namespaces = items::<Namespace>(namespaces).into_iter();
        Self {
            policies: items(policies),
            pods: items(pods),
            namespaces: namespaces.map(|one| (one.name_any(), one.metadata.labels.unwrap_or_default())).collect(),
        }
    }

    /// Addresses of the pods that a peer of a policy means.
    fn addresses(&self, policy: &NetworkPolicy, peer: &NetworkPolicyPeer) -> Vec<&str> {
        assert!(peer.ip_block.is_none(), "blocks of addresses are not known here: {peer:?}");
        let of_namespace = |namespace: &str| match &peer.namespace_selector {
            Some(selector) => self.namespaces.get(namespace).is_some_and(|labels| selects(selector, labels)),
            None => Some(namespace) == policy.namespace().as_deref(),
        };
        let meant = |pod: &&Pod| {
            let labels = pod.metadata.labels.clone().unwrap_or_default();
            of_namespace(&pod.namespace().unwrap_or_default())
                && peer.pod_selector.as_ref().is_none_or(|selector| selects(selector, &labels))
        };
        self.pods.iter().filter(meant).filter_map(address).collect()
    }

    /// Rules for one direction of one rule of a policy; `end` is how nftables calls the other end's address.
    fn rules(
        &self,
        policy: &NetworkPolicy,
        peers: &[NetworkPolicyPeer],
        ports: &[NetworkPolicyPort],
        at: Option<&Pod>,
        end: &str,
    ) -> Vec<String> {
        let addresses: Vec<&str> = peers.iter().flat_map(|peer| self.addresses(policy, peer)).collect();
        let from = match (peers.is_empty(), addresses.is_empty()) {
            (true, _) => String::new(),
            (false, true) => return Vec::new(),
            (false, false) => format!("ip {end} {{ {} }} ", addresses.join(", ")),
        };
        if ports.is_empty() {
            return vec![format!("{from}return")];
        }
        let rule = |port: &NetworkPolicyPort| {
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".into()).to_lowercase();
            let number = match port.port.as_ref().expect("a port") {
                IntOrString::Int(number) => *number,
                IntOrString::String(name) => {
                    let containers = at.and_then(|pod| pod.spec.as_ref()).into_iter().flat_map(|spec| spec.containers.iter());
                    let mut named = containers.flat_map(|container| container.ports.iter().flatten());
                    named.find(|one| one.name.as_deref() == Some(name)).unwrap_or_else(|| panic!("no port {name}")).container_port
                }
            };
            format!("{from}{protocol} dport {number} return")
        };
        ports.iter().map(rule).collect()
    }

    /// All rules, as `nft -f` reads them; none for what pods of the namespaces `lifted` get and send.
    fn script(&self, lifted: &BTreeSet<String>) -> String {
        let (mut chains, mut forward, mut input) = (String::new(), String::new(), String::new());
        let is_lifted = |pod: &&Pod| pod.namespace().is_some_and(|namespace| lifted.contains(&namespace));
        let free: Vec<&str> = self.pods.iter().filter(is_lifted).filter_map(address).collect();
        if !free.is_empty() {
            let free = free.join(", ");
            writeln!(forward, "ip saddr {{ {free} }} accept\nip daddr {{ {free} }} accept").unwrap();
            writeln!(input, "ip saddr {{ {free} }} accept").unwrap();
        }
        for (number, pod) in self.pods.iter().enumerate() {
            let Some(own) = address(pod) else { continue };
            let labels = pod.metadata.labels.clone().unwrap_or_default();
            for direction in ["Ingress", "Egress"] {
                let holds = |policy: &&NetworkPolicy| {
                    let spec = policy.spec.as_ref().unwrap();
                    policy.namespace() == pod.namespace()
                        && spec.pod_selector.as_ref().is_none_or(|selector| selects(selector, &labels))
                        && spec.policy_types.iter().flatten().any(|one| one == direction)
                };
                let policies: Vec<_> = self.policies.iter().filter(holds).collect();
                if policies.is_empty() {
                    continue;
                }
                let mut rules = Vec::new();
                for policy in policies {
                    let spec = policy.spec.as_ref().unwrap();
                    if direction == "Ingress" {
                        for rule in spec.ingress.iter().flatten() {
                            let (from, ports) = (rule.from.as_deref().unwrap_or_default(), rule.ports.as_deref().unwrap_or_default());
                            rules.extend(self.rules(policy, from, ports, Some(pod), "saddr"));
                        }
                    } else {
                        for rule in spec.egress.iter().flatten() {
                            let (to, ports) = (rule.to.as_deref().unwrap_or_default(), rule.ports.as_deref().unwrap_or_default());
                            rules.extend(self.rules(policy, to, ports, None, "daddr"));
                        }
                    }
                }
                let chain = format!("{}_{number}", direction.to_lowercase());
                writeln!(chains, "chain {chain} {{\n{}\ndrop\n}}", rules.join("\n")).unwrap();
                let end = if direction == "Ingress" { "daddr" } else { "saddr" };
                writeln!(forward, "ip {end} {own} jump {chain}").unwrap();
                if direction == "Egress" {
                    // To the node itself, where the API server is.
                    writeln!(input, "ip {end} {own} jump {chain}").unwrap();
                }
            }
        }
        let known = "ct state established,related accept";
        format!(
            "add table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n{chains}\
             chain forward {{\ntype filter hook forward priority -5; policy accept;\n{known}\n{forward}}}\n\
             chain input {{\ntype filter hook input priority -5; policy accept;\n{known}\n{input}}}\n}}\n"
        )
    }
}

/// How often it is looked for changes. Until then a new pod is no one's peer, as it is for a while in any network.
const LOOK: Duration = Duration::from_millis(300);

/// The rules that the node has, for all tests that run.
struct Rules {
    /// Tests that want policies enforced.
    users: usize,
    /// Namespaces whose pods no policy holds any more.
    lifted: BTreeSet<String>,
    /// What the node has; none where no rule of ours stands.
    script: Option<String>,
    /// When it was looked for changes, and what was seen.
    looked: Option<Instant>,
    seen: Answers,
}

impl Rules {
    const fn none() -> Self {
        Self { users: 0, lifted: BTreeSet::new(), script: None, looked: None, seen: [String::new(), String::new(), String::new()] }
    }
}

static RULES: Mutex<Rules> = Mutex::const_new(Rules::none());

/// Keeps policies enforced until it is ended.
pub struct Enforced {
    namespace: String,
    /// None where the cluster's network enforces them.
    keeps: Option<JoinHandle<()>>,
}

/// The policy that the chart makes for the pods that take part in a namespace.
async fn policy_of_chart(namespace: &str) -> NetworkPolicy {
    static MADE: OnceCell<NetworkPolicy> = OnceCell::const_new();
    let make = || async {
        let users = json!([{"from": [{"podSelector": {"matchLabels": {"app": "asker"}}}], "ports": [{"port": ENGINE_PORT}]}]);
        let users = format!("networkPolicy.agents.ingress={users}");
        let chart = chart();
        let template = [
            "template",
            "weightsync",
            &chart,
            "--kube-version",
            "1.36.0",
            "--namespace",
            NAMESPACE,
            "--show-only",
            "templates/networkpolicy.yaml",
        ];
        let values = ["--set", "networkPolicy.agents.enabled=true", "--set", "networkPolicy.agents.namespaces={any}", "--set-json", &users];
        let reported = set_by_helm(&[template.as_slice(), &values].concat()).await;
        let policy = reported.split("---\n").find(|document| document.contains("kind: NetworkPolicy")).expect("helm makes a policy");
        serde_saphyr::from_str(policy).unwrap()
    };
    let mut policy: NetworkPolicy = MADE.get_or_init(make).await.clone();
    assert_eq!(policy.metadata.namespace.replace(namespace.to_owned()).as_deref(), Some("any"));
    policy
}

impl Enforced {
    /// Lets only who takes part, the controllers and users of engines (`app: asker`) reach the pods of a namespace that take part.
    pub async fn begin(client: &Client, namespace: &str) -> Self {
        let policy = policy_of_chart(namespace).await;
        Api::namespaced(client.clone(), namespace).create(&kube::api::PostParams::default(), &policy).await.unwrap();
        let namespace = namespace.to_owned();
        if std::env::var("WEIGHTSYNC_E2E_POLICIES").is_ok_and(|by| by == "cluster") {
            return Self { namespace, keeps: None };
        }
        RULES.lock().await.users += 1;
        Self { namespace, keeps: Some(tokio::spawn(keep(client.clone()))) }
    }

    /// The last test that ends this enforces nothing any more. Fails where enforcing failed.
    pub async fn end(self) {
        let Some(task) = self.keeps else { return };
        task.abort();
        let ended = task.await;
        let mut rules = RULES.lock().await;
        rules.lifted.remove(&self.namespace);
        rules.users -= 1;
        if rules.users == 0 {
            *rules = Rules::none();
            on_node(&["sh", "-c", &format!("nft add table {TABLE}; nft delete table {TABLE}")]).await;
        }
        drop(rules);
        assert!(ended.is_err_and(|error| error.is_cancelled()), "policies are enforced");
    }
}

/// Looks for changes and writes the rules, unless another test did just now.
async fn keep(client: Client) {
    let mut every = tokio::time::interval(LOOK);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let mut rules = RULES.lock().await;
        if rules.looked.is_some_and(|at| at.elapsed() < LOOK) {
            continue;
        }
        // Without an API server the rules stay as they are.
        let Ok(seen) = look(&client).await else { continue };
        rules.looked = Some(Instant::now());
        if rules.seen == seen {
            continue;
        }
        let script = Seen::of(&seen).script(&rules.lifted);
        if rules.script.as_ref() != Some(&script) {
            on_node(&["sh", "-c", &format!("nft -f - <<'RULES'\n{script}RULES")]).await;
            rules.script = Some(script);
        }
        rules.seen = seen;
    }
}

/// Enforces nothing for the pods of this namespace from now on, until its test ends: neither what they get nor what they send.
pub async fn lift(namespace: &str) {
    let mut rules = RULES.lock().await;
    rules.lifted.insert(namespace.to_owned());
    // The rules are other ones for what was seen already.
    rules.seen = Rules::none().seen;
}
