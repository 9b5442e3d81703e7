//! From which addresses the engines of a group may reach their store: it holds what lets a rank join, and has no TLS.
//!
//! Decides that no one else gets in. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use weightsync_core::protocol::{MemberAddress, Role, Roster};

/// Addresses of all members, and of every pod of a replica of several pods; an error names a pod whose address is not known.
pub(super) fn addresses_of_group(roster: &Roster, members: &[MemberAddress]) -> Result<BTreeSet<IpAddr>, String> {
    let control = members.iter().filter_map(|address| address.control.parse::<SocketAddr>().ok());
    let mut group: BTreeSet<IpAddr> = control.map(|address| address.ip().to_canonical()).collect();
    for member in roster.members.iter().filter(|member| member.role == Role::Rollout) {
        // The head is where the agent is, whose address is known.
        for pod in member.pods.iter().skip(1) {
            if pod.ips.is_empty() {
                return Err(format!("the address of pod {} of {} is not known: the controller did not say it", pod.name, member.name));
            }
        }
        group.extend(member.pods.iter().flat_map(|pod| &pod.ips).map(IpAddr::to_canonical));
    }
    Ok(group)
}

#[cfg(test)]
mod tests;
