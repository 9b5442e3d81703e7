use std::net::{IpAddr, Ipv4Addr};

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
    assert_eq!(registry.register(0, Registered::default()).err(), Some(RegisterError::NoPort));
    assert!(registry.ports().is_empty());
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
