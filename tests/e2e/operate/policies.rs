//! Network policies, enforced: where the cluster's network does not do it (tests/cluster/README.md), this writes what the policies say of
//! the pods there are as nftables rules of the node. Part of `networking.k8s.io/v1` that the chart uses: selectors of pods and namespaces,
//! TCP and UDP ports by number and name. What it does not know fails the test.

use std::collections::BTreeMap;
use std::fmt::Write;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use crate::node::on_node;

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
    async fn now(client: &Client) -> Self {
        let all = ListParams::default();
        let namespaces = Api::<Namespace>::all(client.clone()).list(&all).await.unwrap().items;
        Self {
            policies: Api::all(client.clone()).list(&all).await.unwrap().items,
            pods: Api::all(client.clone()).list(&all).await.unwrap().items,
            namespaces: namespaces.into_iter().map(|one| (one.name_any(), one.metadata.labels.unwrap_or_default())).collect(),
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

/// Enforces what the policies say of the pods that there are now; connections that stand go on.
pub async fn enforce(client: &Client) {
    let script = Seen::now(client).await.script();
    on_node(&["sh", "-c", &format!("nft -f - <<'RULES'\n{script}RULES")]).await;
}

/// Enforces nothing any more.
pub async fn lift() {
    on_node(&["sh", "-c", &format!("nft add table {TABLE}; nft delete table {TABLE}")]).await;
}
