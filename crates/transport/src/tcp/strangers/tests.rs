use std::net::{IpAddr, Ipv4Addr};

use super::{Stranger, Strangers};

fn from(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn ended(stranger: &Stranger) -> bool {
    stranger.evicted().is_cancelled()
}

#[test]
fn member_takes_the_place_of_the_oldest_stranger() {
    let strangers = Strangers::new(4);
    let member = strangers.enter(from(1), true).unwrap();
    let others: Vec<Stranger> = (2..=4).map(|last| strangers.enter(from(last), false).unwrap()).collect();
    let second = strangers.enter(from(1), true).unwrap();
    assert_eq!(others.iter().map(ended).collect::<Vec<_>>(), [true, false, false]);
    assert!(!ended(&member) && !ended(&second));
    let stranger = strangers.enter(from(5), false).unwrap();
    assert_eq!(others.iter().map(ended).collect::<Vec<_>>(), [true, true, false]);
    assert!(!ended(&stranger) && !ended(&member));
}

#[test]
fn stranger_is_refused_while_members_alone_wait() {
    let strangers = Strangers::new(2);
    let members: Vec<Stranger> = (1..=2).map(|last| strangers.enter(from(last), true).unwrap()).collect();
    assert!(strangers.enter(from(9), false).is_none());
    assert!(members.iter().all(|member| !ended(member)));
    let newer = strangers.enter(from(3), true).unwrap();
    assert!(ended(&members[0]) && !ended(&members[1]) && !ended(&newer));
}

#[test]
fn address_at_its_limit_loses_its_own_oldest() {
    let strangers = Strangers::new(8);
    let other = strangers.enter(from(1), false).unwrap();
    let many: Vec<Stranger> = (0..100).map(|_| strangers.enter(from(2), false).unwrap()).collect();
    assert!(!ended(&other));
    assert_eq!(many.iter().filter(|stranger| !ended(stranger)).count(), 4);
    assert!(!ended(many.last().unwrap()));
}
