use std::net::IpAddr;

use super::addresses_of_group;
use weightsync_core::protocol::{Incarnation, MemberAddress, MemberName, PodRef, Role, Roster, RosterMember};

fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn pod(name: &str, ips: Vec<IpAddr>) -> PodRef {
    PodRef { name: name.into(), uid: format!("uid-{name}"), node: None, ips }
}

fn world(pods: Vec<PodRef>) -> (Roster, Vec<MemberAddress>) {
    let member = |name: &str, role, pods| RosterMember { name: MemberName(name.into()), role, rank_offset: 0, size: 1, pods, port: None };
    let members = vec![member("trainer/t", Role::Source, vec![pod("t", Vec::new())]), member("actors/a", Role::Rollout, pods)];
    let address = |name: &str, at: &str| MemberAddress {
        member: MemberName(name.into()),
        incarnation: Incarnation { pod_uid: "uid".into(), instance: "1".into() },
        control: at.into(),
        data: at.into(),
        engine_url: None,
    };
    let addresses = vec![address("trainer/t", "10.0.0.1:5"), address("actors/a", "10.0.0.2:5")];
    (Roster { members, world_size: 2, chain: Vec::new() }, addresses)
}

#[test]
fn store_admits_only_the_pods_of_a_replica() {
    let (roster, addresses) = world(vec![pod("a-0", vec![ip(2)]), pod("a-1", vec![ip(3), "fd00::3".parse().unwrap()])]);
    let admitted = addresses_of_group(&roster, &addresses).unwrap();
    let all = [ip(1), ip(2), ip(3), "fd00::3".parse().unwrap()];
    assert_eq!(admitted, all.into());
}

#[test]
fn store_of_a_replica_with_an_unknown_pod_admits_none() {
    let (roster, addresses) = world(vec![pod("a-0", Vec::new()), pod("a-1", Vec::new())]);
    assert!(addresses_of_group(&roster, &addresses).unwrap_err().contains("pod a-1 of actors/a"));
    let (roster, addresses) = world(vec![pod("a-0", Vec::new())]);
    assert_eq!(addresses_of_group(&roster, &addresses).unwrap(), [ip(1), ip(2)].into(), "one pod is known by its agent");
}
