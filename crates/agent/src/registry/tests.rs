use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use super::{RegisterError, Registered, Registry};
use weightsync_core::protocol::MOST_ENGINES;

const POD: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 8));

fn at(address: Option<IpAddr>) -> Registered {
    Registered { address, api_key: None }
}

#[test]
fn registration_that_ends_takes_its_engine_with_it() {
    let registry = Registry::new(POD);
    let one = registry.register(8002, Registered::default()).unwrap();
    let two = registry.register(8001, at(Some(POD))).unwrap();
    assert_eq!((registry.ports(), registry.of(8001), registry.of(8002)), (vec![8001, 8002], Some(at(Some(POD))), Some(at(None))));
    drop(two);
    assert_eq!(registry.ports(), [8002]);
    drop(one);
    assert!(registry.ports().is_empty());
}

#[test]
fn second_registration_of_a_port_outlives_the_first() {
    let registry = Registry::new(POD);
    let first = registry.register(8001, Registered::default()).unwrap();
    let second = registry.register(8001, at(Some(IpAddr::V4(Ipv4Addr::LOCALHOST)))).unwrap();
    drop(first);
    assert_eq!(registry.ports(), [8001]);
    drop(second);
    assert!(registry.ports().is_empty());
}

#[test]
fn engine_of_another_pod_cannot_register() {
    let registry = Registry::new(POD);
    let refused = registry.register(8001, at(Some(OTHER))).err();
    assert_eq!(refused, Some(RegisterError::OtherPod { address: OTHER, pod: POD }));
    for address in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "fd00:0:0:9::9"].map(|address| address.parse().unwrap()) {
        assert_eq!(registry.register(8001, at(Some(address))).err(), Some(RegisterError::OtherPod { address, pod: POD }));
    }
    assert_eq!(registry.register(0, Registered::default()).err(), Some(RegisterError::NoPort));
    assert!(registry.ports().is_empty());
}

/// The other family's address of a pod on a dual-stack cluster.
#[test]
fn engine_at_any_own_address_may_register() {
    let routed = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr()));
    let own = routed.map_or(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3)), |address| address.ip());
    let registry = Registry::new("fd00::7".parse().unwrap());
    let _kept = registry.register(8001, at(Some(own))).unwrap();
    assert_eq!(registry.of(8001), Some(at(Some(own))));
}

#[test]
fn engine_above_the_bound_cannot_register() {
    let registry = Registry::new(POD);
    let most = u16::try_from(MOST_ENGINES).unwrap();
    let kept: Vec<_> = (1..=most).map(|port| registry.register(port, Registered::default()).unwrap()).collect();
    assert_eq!(registry.register(most + 1, Registered::default()).err(), Some(RegisterError::TooMany));
    drop(kept);
    assert!(registry.register(most + 1, Registered::default()).is_ok());
}
