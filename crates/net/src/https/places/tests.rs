use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use super::{Full, Place, Places};
use crate::https::Limits;

fn places(connections: usize, per_address: usize, strangers: usize) -> Places {
    Places::new(&Limits { connections, per_address, strangers, ..Limits::default() })
}

fn from(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn ended(place: &Place) -> bool {
    place.evicted.is_cancelled()
}

#[tokio::test(start_paused = true)]
async fn newcomer_to_full_listener_ends_the_oldest_idle_stranger() {
    let places = places(3, 3, 3);
    let oldest = Arc::new(places.take(from(1)).unwrap());
    let busy = oldest.busy();
    tokio::time::advance(Duration::from_millis(1)).await;
    let idle = places.take(from(2)).unwrap();
    let member = places.take(from(3)).unwrap();
    member.known();
    let newcomer = places.take(from(4)).unwrap();
    assert!(ended(&idle) && !ended(&oldest) && !ended(&member) && !ended(&newcomer));
    drop(busy);
    drop(newcomer);
    places.take(from(5)).unwrap();
    assert!(!ended(&oldest), "a place was free");
}

#[tokio::test(start_paused = true)]
async fn listener_whose_places_are_all_in_use_lets_newcomers_wait() {
    let places = places(2, 2, 2);
    let first = Arc::new(places.take(from(1)).unwrap());
    let _served = first.busy();
    let second = places.take(from(2)).unwrap();
    second.known();
    assert_eq!(places.take(from(3)).err(), Some(Full::Listener));
    assert!(places.wait(from(3)).await.is_ok() && ended(&first), "no one is served for ever while others wait");
    assert!(!ended(&second));
}

#[tokio::test(start_paused = true)]
async fn address_at_its_limit_loses_its_own_connections_only() {
    let places = places(100, 2, 100);
    let other = places.take(from(1)).unwrap();
    tokio::time::advance(Duration::from_millis(1)).await;
    let many: Vec<Place> = (0..50).filter_map(|_| places.take(from(2)).ok()).collect();
    assert_eq!(many.iter().filter(|place| !ended(place)).count(), 2);
    assert!(!ended(&other));
    let mapped: IpAddr = "::ffff:10.0.0.2".parse().unwrap();
    let same = places.take(mapped).unwrap();
    assert_eq!(many.iter().filter(|place| !ended(place)).count(), 1, "a v4 address as a dual-stack listener shows it is the same");
    drop(same);
}

#[tokio::test(start_paused = true)]
async fn strangers_never_take_the_places_of_members() {
    let places = places(4, 4, 2);
    let members: Vec<Place> = (1..=2).filter_map(|last| places.take(from(last)).ok()).collect();
    members.iter().for_each(Place::known);
    let _strangers: Vec<Place> = (0..40).filter_map(|last| places.take(from(100 + last)).ok()).collect();
    assert!(members.iter().all(|member| !ended(member)));
}

#[tokio::test(start_paused = true)]
async fn address_with_one_connection_outlasts_those_with_many() {
    let places = places(16, 4, 16);
    let lone = places.take(from(1)).unwrap();
    for round in 0..50 {
        tokio::time::advance(Duration::from_millis(1)).await;
        let _many: Vec<Place> = (0..40).filter_map(|stranger| places.take(from(2 + stranger % 8)).ok()).collect();
        assert!(!ended(&lone), "round {round}");
    }
}
