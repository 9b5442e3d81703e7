//! The chart's network policies, on in every test: those of the controllers by `prepare.sh`, those of the pods that take part in the test's own
//! namespace from here.
//!
//! Where the cluster's network does not enforce them (tests/cluster/README.md), this writes what they say of the pods there are as nftables
//! rules of the node, and again whenever pods or policies change. Part of `networking.k8s.io/v1` that the chart uses: selectors of pods and
//! namespaces, TCP and UDP ports by number and name. What it does not know fails the test.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::Mutex;
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

impl Seen {
    /// What the API server last heard of; an error while there is none.
    async fn now(client: &Client) -> kube::Result<Self> {
        let all = ListParams::default().match_any();
        let namespaces = Api::<Namespace>::all(client.clone()).list(&all).await?.items;
        Ok(Self {
            policies: Api::all(client.clone()).list(&all).await?.items,
            pods: Api::all(client.clone()).list(&all).await?.items,
            namespaces: namespaces.into_iter().map(|one| (one.name_any(), one.metadata.labels.unwrap_or_default())).collect(),
        })
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

    /// All rules, as `nft -f` reads them.
    fn script(&self) -> String {
        let (mut chains, mut forward, mut input) = (String::new(), String::new(), String::new());
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

/// The rules that the node has; none while nothing is to be enforced.
static RULES: Mutex<Option<String>> = Mutex::const_new(None);

/// Keeps policies enforced until it is ended.
pub struct Enforced(Option<JoinHandle<()>>);

impl Enforced {
    /// Lets only who takes part, the controllers and users of engines (`app: asker`) reach the pods of a namespace that take part.
    pub async fn begin(client: &Client, namespace: &str) -> Self {
        let where_agents = format!("networkPolicy.agents.namespaces={{{namespace}}}");
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
        let values = ["--set", "networkPolicy.agents.enabled=true", "--set", &where_agents, "--set-json", &users];
        let reported = set_by_helm(&[template.as_slice(), &values].concat()).await;
        let policy = reported.split("---\n").find(|document| document.contains("kind: NetworkPolicy")).expect("helm makes a policy");
        let policy: NetworkPolicy = serde_saphyr::from_str(policy).unwrap();
        Api::namespaced(client.clone(), namespace).create(&kube::api::PostParams::default(), &policy).await.unwrap();
        if std::env::var("WEIGHTSYNC_E2E_POLICIES").is_ok_and(|by| by == "cluster") {
            return Self(None);
        }
        *RULES.lock().await = Some(String::new());
        Self(Some(tokio::spawn(keep(client.clone()))))
    }

    /// Enforces nothing any more. Fails where enforcing failed.
    pub async fn end(self) {
        let Some(task) = self.0 else { return };
        if task.is_finished() {
            task.await.expect("policies are enforced");
        } else {
            task.abort();
        }
        lift().await;
    }
}

async fn keep(client: Client) {
    let mut every = tokio::time::interval(LOOK);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        // Without an API server the rules stay as they are.
        let Ok(seen) = Seen::now(&client).await else { continue };
        let script = seen.script();
        let mut rules = RULES.lock().await;
        if rules.as_ref().is_some_and(|rules| *rules != script) {
            on_node(&["sh", "-c", &format!("nft -f - <<'RULES'\n{script}RULES")]).await;
            *rules = Some(script);
        }
    }
}

/// Enforces nothing from now on, in this test.
pub async fn lift() {
    let mut rules = RULES.lock().await;
    *rules = None;
    on_node(&["sh", "-c", &format!("nft add table {TABLE}; nft delete table {TABLE}")]).await;
}
