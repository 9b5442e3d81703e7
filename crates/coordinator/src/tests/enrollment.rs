//! Which agents get a certificate, and which may announce themselves.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::world::{OBJECT, World, assignment};
use crate::Addresses;
use crate::ProvenPod;
use crate::addresses::AddressProblem;
use crate::directory::Arrival;
use weightsync_core::protocol::{AnnounceResponse, Announcement, Incarnation, Rejection, Role};
use weightsync_net::https::{CallError, ControllerClient};
use weightsync_net::identity::{Identity, PeerIdentity};
use weightsync_testkit::fake_agent::{Pod, enroll};

const SOON: Duration = Duration::from_secs(5);

async fn claimed_world() -> (World, mpsc::Receiver<Arrival>) {
    claimed_world_with(1).await
}

/// The queue has room for `room` announcements.
async fn claimed_world_with(room: usize) -> (World, mpsc::Receiver<Arrival>) {
    let world = World::new().await;
    let (sender, announcements) = mpsc::channel(room);
    world.directory.add(OBJECT, 1, sender);
    world.directory.claim(OBJECT, HashMap::from([("uid-0".to_owned(), assignment(Role::Rollout))]), Addresses::Callers);
    world.directory.settle();
    (world, announcements)
}

fn announcement(uid: &str) -> Announcement {
    Announcement {
        namespace: "local".into(),
        pod: "actor-0".into(),
        incarnation: Incarnation { pod_uid: uid.into(), instance: "a".into() },
        role: Role::Rollout,
        engine_port: Some(8000),
        control_address: "127.0.0.1:1".into(),
        program: "fake".into(),
        speaks: weightsync_core::protocol::Protocols::OURS,
        attached: false,
    }
}

async fn announce(world: &World, identity: &Identity, uid: &str) -> Result<AnnounceResponse, CallError> {
    let client = ControllerClient::new(identity.clone(), world.controller.clone());
    client.ask(&announcement(uid), SOON).await
}

fn rejected(answer: Result<impl std::fmt::Debug, CallError>) -> Rejection {
    match answer {
        Err(CallError::Rejected { rejection, .. }) => rejection,
        other => panic!("not rejected: {other:?}"),
    }
}

#[tokio::test]
async fn a_claimed_pod_with_a_token_enrols_and_announces_itself() {
    let (world, mut announcements) = claimed_world().await;
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    let response = enroll(&identity, &world.controller, &world.pod("actor-0", "uid-0"), "a").await.unwrap();
    assert_eq!(response.assignment, assignment(Role::Rollout));
    assert_eq!(identity.own(), Some(PeerIdentity::Agent { weightsync: OBJECT.into(), pod_uid: "uid-0".into(), role: Role::Rollout }));
    assert_eq!(announce(&world, &identity, "uid-0").await.unwrap().assignment, assignment(Role::Rollout));
    assert_eq!(announcements.recv().await.unwrap(), Arrival::Accepted(announcement("uid-0")));
}

/// PrimeIntellect-ai/prime-rl#3060: a loopback address is sent to other hosts, which then wait for themselves.
/// Story F16.
#[test]
fn a_loopback_address_is_refused_across_pods() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let pod = Addresses::Known(HashMap::from([("uid-0".to_owned(), vec![ip("10.0.0.7"), ip("10.1.0.7"), ip("::ffff:10.2.0.7")])]));
    let check = |from: &str, announced: &str| pod.check("uid-0", Some(ip(from)), announced);
    for announced in ["127.0.0.1:8470", "127.1.2.3:1", "[::1]:8470", "[::ffff:127.0.0.1]:8470", "0.0.0.0:8470", "[::]:1"] {
        let refused = Rejection::from(check("10.0.0.7", announced).unwrap_err());
        assert!(refused.message.contains(announced) && refused.message.contains("POD_IP"), "{refused:?}");
        assert!(refused.retryable, "the pod stays claimed: its engine serves on");
    }
    for announced in ["10.0.0.7:8470", "10.1.0.7:1", "[::ffff:10.0.0.7]:8470", "10.2.0.7:1"] {
        assert_eq!(check("10.9.0.7", announced), Ok(()), "{announced}: a pod's own address, wherever it calls from");
    }
    for (from, announced) in [("127.0.0.1", "127.0.0.1:8470"), ("::1", "127.0.0.1:1"), ("10.77.1.10", "10.77.1.10:1")] {
        assert_eq!(Addresses::Callers.check("uid-0", Some(ip(from)), announced), Ok(()), "{from} {announced}: one host");
    }
    assert!(!Rejection::from(check("10.0.0.7", "actor-0:8470").unwrap_err()).retryable);
}

#[test]
fn pod_whose_addresses_are_unknown_is_asked_to_come_again() {
    let check = |addresses: Addresses, from: Option<&str>| addresses.check("uid-0", from.map(|from| from.parse().unwrap()), "10.0.0.7:1");
    for addresses in [Addresses::default(), Addresses::Known(HashMap::from([("uid-0".to_owned(), Vec::new())]))] {
        let problem = check(addresses, Some("10.0.0.7")).unwrap_err();
        assert!(problem.passes() && Rejection::from(problem).retryable);
    }
    assert_eq!(check(Addresses::Callers, None), Err(AddressProblem::NotKnown));
}

#[tokio::test]
async fn token_of_one_key_works_again_for_that_key_only() {
    let (world, _announcements) = claimed_world().await;
    let stolen = Arc::new(Mutex::new(Vec::new()));
    let seen = stolen.clone();
    world.tokens.on_theft(move |pod| seen.lock().push(pod.pod_uid.clone()));
    let pod = world.pod("actor-0", "uid-0");
    let first = Identity::new(world.ca.certificate_pem()).unwrap();
    enroll(&first, &world.controller, &pod, "a").await.unwrap();
    // The response to the first try was lost.
    let same_key = Pod { token: pod.token.clone(), ..world.pod("actor-0", "uid-0") };
    enroll(&first, &world.controller, &same_key, "a").await.unwrap();
    assert!(stolen.lock().is_empty());

    let second = Identity::new(world.ca.certificate_pem()).unwrap();
    let rejection = rejected(enroll(&second, &world.controller, &pod, "a").await);
    assert!(!rejection.retryable && rejection.message.contains("another key"), "{rejection:?}");
    assert_eq!(*stolen.lock(), ["uid-0"]);
    // It is not known which of the two is the agent.
    for refused in [rejected(announce(&world, &first, "uid-0").await), rejected(enroll(&first, &world.controller, &pod, "a").await)] {
        assert!(!refused.retryable && refused.message.contains("new agent"), "{refused:?}");
    }
    // The next agent of the pod has a token and a key of its own.
    let next = Identity::new(world.ca.certificate_pem()).unwrap();
    enroll(&next, &world.controller, &world.pod("actor-0", "uid-0"), "b").await.unwrap();
    announce(&world, &next, "uid-0").await.unwrap();
}

#[tokio::test]
async fn token_is_taken_from_the_pods_own_address_only() {
    let (world, _announcements) = claimed_world().await;
    let proven = || ProvenPod { namespace: "local".into(), pod: "actor-0".into(), pod_uid: "uid-0".into() };
    let at = |address: &str| Pod { token: world.tokens.mint(proven(), vec![address.parse().unwrap()]), ..world.pod("actor-0", "uid-0") };
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    let rejection = rejected(enroll(&identity, &world.controller, &at("10.0.0.7"), "a").await);
    assert!(!rejection.retryable && rejection.message.contains("10.0.0.7"), "{rejection:?}");
    enroll(&identity, &world.controller, &at("127.0.0.1"), "a").await.unwrap();
}

#[tokio::test]
async fn a_certificate_renews_itself_and_speaks_for_its_own_pod_only() {
    let (world, _announcements) = claimed_world().await;
    let pod = world.pod("actor-0", "uid-0");
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    enroll(&identity, &world.controller, &pod, "a").await.unwrap();
    let renewal = Pod { token: String::new(), ..pod };
    enroll(&identity, &world.controller, &renewal, "a").await.unwrap();
    world.directory.claim(OBJECT, ["uid-0", "uid-1"].map(|uid| (uid.to_owned(), assignment(Role::Rollout))).into(), Addresses::Callers);
    let other = Pod { uid: "uid-1".into(), ..renewal };
    assert!(!rejected(enroll(&identity, &world.controller, &other, "a").await).retryable, "a certificate speaks for its own pod only");
}

#[tokio::test]
async fn a_token_of_another_pod_proves_nothing() {
    let (world, _announcements) = claimed_world().await;
    let elsewhere = ProvenPod { namespace: "local".into(), pod: "actor-1".into(), pod_uid: "uid-1".into() };
    let pod = Pod { token: world.tokens.mint(elsewhere, Vec::new()), ..world.pod("actor-0", "uid-0") };
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    let rejection = rejected(enroll(&identity, &world.controller, &pod, "a").await);
    assert!(!rejection.retryable && rejection.message.contains("uid-1"), "{rejection:?}");
}

#[tokio::test]
async fn unclaimed_pod_may_enrol_again_but_not_announce() {
    let (world, _announcements) = claimed_world().await;
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    assert!(rejected(enroll(&identity, &world.controller, &world.pod("actor-9", "uid-9"), "a").await).retryable);
    enroll(&identity, &world.controller, &world.pod("actor-0", "uid-0"), "a").await.unwrap();
    world.directory.claim(OBJECT, HashMap::new(), Addresses::Callers);
    let rejection = rejected(announce(&world, &identity, "uid-0").await);
    assert!(!rejection.retryable, "{rejection:?}");
}

#[tokio::test]
async fn restarted_controller_drops_no_agent_before_all_objects() {
    let (world, _announcements) = claimed_world().await;
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    enroll(&identity, &world.controller, &world.pod("actor-0", "uid-0"), "a").await.unwrap();
    world.directory.unsettle();
    assert!(rejected(announce(&world, &identity, "uid-0").await).retryable);
}

#[tokio::test]
async fn a_controller_that_does_not_lead_spends_no_token() {
    let (world, _announcements) = claimed_world().await;
    let (identity, pod) = (Identity::new(world.ca.certificate_pem()).unwrap(), world.pod("actor-0", "uid-0"));
    world.directory.unsettle();
    assert!(rejected(enroll(&identity, &world.controller, &pod, "a").await).retryable);
    let (sender, _announcements) = mpsc::channel(1);
    world.directory.add(OBJECT, 1, sender);
    world.directory.claim(OBJECT, HashMap::from([("uid-0".to_owned(), assignment(Role::Rollout))]), Addresses::Callers);
    world.directory.settle();
    enroll(&identity, &world.controller, &pod, "a").await.unwrap();
}

#[tokio::test]
async fn announcement_without_the_pods_certificate_is_rejected() {
    let (world, _announcements) = claimed_world().await;
    let hour = Duration::from_secs(3600);
    let of = |weightsync: &str, pod_uid: &str| {
        world.ca.issue(&PeerIdentity::Agent { weightsync: weightsync.into(), pod_uid: pod_uid.into(), role: Role::Rollout }, hour).unwrap()
    };
    let refused = [
        Identity::new(world.ca.certificate_pem()).unwrap(),
        of(OBJECT, "uid-1"),
        of("ws-other", "uid-0"),
        world.ca.issue(&PeerIdentity::Controller, hour).unwrap(),
    ];
    for identity in refused {
        let rejection = rejected(announce(&world, &identity, "uid-0").await);
        assert!(!rejection.retryable, "{identity:?}: {rejection:?}");
    }
    announce(&world, &of(OBJECT, "uid-0"), "uid-0").await.unwrap();
}

#[tokio::test]
async fn an_announcement_that_does_not_fit_may_come_again() {
    let (world, _announcements) = claimed_world().await;
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    enroll(&identity, &world.controller, &world.pod("actor-0", "uid-0"), "a").await.unwrap();
    announce(&world, &identity, "uid-0").await.unwrap();
    assert!(rejected(announce(&world, &identity, "uid-0").await).retryable);
}

#[tokio::test]
async fn address_that_is_not_the_pods_own_is_refused() {
    let (world, mut announcements) = claimed_world_with(4).await;
    let identity = Identity::new(world.ca.certificate_pem()).unwrap();
    enroll(&identity, &world.controller, &world.pod("actor-0", "uid-0"), "a").await.unwrap();
    let client = ControllerClient::new(identity.clone(), world.controller.clone());
    let at = async |address: &str| {
        let announcement = Announcement { control_address: address.into(), ..announcement("uid-0") };
        client.ask(&announcement, SOON).await
    };
    for foreign in ["169.254.169.254:80", "10.0.0.1:443", "[fd00::1]:6443"] {
        let rejection = rejected(at(foreign).await);
        assert!(rejection.retryable, "its engine serves on: {rejection:?}");
        assert!(rejection.message.contains(foreign), "{rejection:?}");
    }
    while let Ok(arrival) = announcements.try_recv() {
        assert!(matches!(arrival, Arrival::Refused(_, AddressProblem::Foreign { .. })), "the coordinator would connect to it: {arrival:?}");
    }
}
