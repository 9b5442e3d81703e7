//! The ordered list of a group's members with their ranks. `plan` fills it; this file only carries it.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::{MemberName, Role};

/// A pod of a member.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRef {
    /// Name within the namespace of the object.
    pub name: String,
    /// UID; a successor under the same name has another one.
    pub uid: String,
    /// Its node, if known: members on one node are adjacent in the chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its addresses, if known: no other address is dialled or admitted for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<IpAddr>,
}

impl PodRef {
    /// Whether that address is one of its own; `None` if its addresses are not known.
    pub fn has(&self, address: IpAddr) -> Option<bool> {
        let address = address.to_canonical();
        (!self.ips.is_empty()).then(|| self.ips.iter().any(|ip| ip.to_canonical() == address))
    }

    /// The same for `IP:PORT`; false for a text without an address.
    pub fn has_listener(&self, address: &str) -> Option<bool> {
        let ip = address.parse::<SocketAddr>().ok().map(|address| address.ip());
        ip.map_or_else(|| (!self.ips.is_empty()).then_some(false), |ip| self.has(ip))
    }
}

/// One member of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct RosterMember {
    pub name: MemberName,
    pub role: Role,
    pub rank_offset: u32,
    /// Ranks of this member; 1 for a source.
    pub size: u32,
    /// Its pods; the first is the head, where its agent runs.
    pub pods: Vec<PodRef>,
    /// Port of its engine within the head pod; none for a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

/// The members of one group. Offsets are dense, disjoint and cover `0..world_size`; sources come first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Roster {
    /// Members by rank offset.
    pub members: Vec<RosterMember>,
    /// Sum of all sizes.
    pub world_size: u32,
    /// Order in which bytes travel over TCP: rollouts in rank order, members on one node together.
    pub chain: Vec<MemberName>,
}

impl Roster {
    /// The member of that name.
    pub fn member(&self, name: &MemberName) -> Option<&RosterMember> {
        self.members.iter().find(|member| &member.name == name)
    }

    /// blake3 (hex) of everything on which members must agree: names, pods, ports, ranks and the order of the chain.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut text = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        for member in &self.members {
            text(&member.name.0);
            text(&format!("{:?} {} {} {:?} {}", member.role, member.rank_offset, member.size, member.port, member.pods.len()));
            for pod in &member.pods {
                text(&pod.uid);
            }
        }
        for name in &self.chain {
            text(&name.0);
        }
        hasher.finalize().to_hex().to_string()
    }
}
