//! Certificates: who may be named, who is believed, and what a renewal changes.

use std::time::Duration;

use time::OffsetDateTime;

use super::{Ca, Identity, IdentityError, PeerIdentity};

const HOUR: Duration = Duration::from_secs(3600);

fn agent(weightsync: &str, pod_uid: &str) -> PeerIdentity {
    PeerIdentity::Agent { weightsync: weightsync.into(), pod_uid: pod_uid.into() }
}

#[test]
fn an_agent_is_known_by_the_names_that_the_authority_gave_it() {
    let ca = Ca::generate().unwrap();
    let identity = Identity::new(ca.certificate_pem()).unwrap();
    assert_eq!(identity.own(), None);
    let certificate = ca.sign(&identity.csr_pem().unwrap(), &agent("ws-1", "pod-1"), HOUR).unwrap();
    assert_eq!(identity.install(&certificate).unwrap(), agent("ws-1", "pod-1"));
    assert_eq!(identity.own(), Some(agent("ws-1", "pod-1")));
    assert_eq!(agent("ws-1", "pod-1").dns_name(), "pod-1.agent.weightsync.internal");
    assert_eq!(agent("ws-1", "pod-1").uri(), "weightsync://ws-1/agent/pod-1");
}

#[test]
fn an_authority_read_back_from_pem_signs_for_the_same_trust() {
    let first = Ca::generate().unwrap();
    let again = Ca::from_pem(first.certificate_pem(), &first.key_pem()).unwrap();
    let identity = Identity::new(first.certificate_pem()).unwrap();
    let certificate = again.sign(&identity.csr_pem().unwrap(), &PeerIdentity::Controller, HOUR).unwrap();
    assert_eq!(identity.install(&certificate).unwrap(), PeerIdentity::Controller);
}

#[test]
fn an_authority_whose_key_belongs_to_another_certificate_is_refused() {
    let (one, other) = (Ca::generate().unwrap(), Ca::generate().unwrap());
    assert!(Ca::from_pem(one.certificate_pem(), &other.key_pem()).is_err());
}

#[test]
fn a_certificate_of_another_authority_another_key_or_another_time_is_not_installed() {
    let (ca, foreign) = (Ca::generate().unwrap(), Ca::generate().unwrap());
    let (identity, other) = (Identity::new(ca.certificate_pem()).unwrap(), Identity::new(ca.certificate_pem()).unwrap());
    let csr = identity.csr_pem().unwrap();
    let refused = [
        foreign.sign(&csr, &agent("w", "p"), HOUR).unwrap(),
        ca.sign(&other.csr_pem().unwrap(), &agent("w", "p"), HOUR).unwrap(),
        ca.sign_at(&csr, &agent("w", "p"), OffsetDateTime::now_utc() - 2 * HOUR, HOUR).unwrap(),
        ca.certificate_pem().to_owned(),
        "no certificate".to_owned(),
    ];
    for certificate in refused {
        assert!(identity.install(&certificate).is_err());
    }
    assert_eq!(identity.own(), None);
}

#[test]
fn a_name_that_could_read_as_another_identity_is_refused() {
    let ca = Ca::generate().unwrap();
    let csr = Identity::new(ca.certificate_pem()).unwrap().csr_pem().unwrap();
    let long = "a".repeat(64);
    for name in ["", "a/agent/b", "a.b", "UPPER", "a b", "*", long.as_str()] {
        assert!(matches!(ca.sign(&csr, &agent("w", name), HOUR), Err(IdentityError::Name { .. })), "{name}");
        assert!(matches!(ca.sign(&csr, &agent(name, "p"), HOUR), Err(IdentityError::Name { .. })), "{name}");
    }
}

#[test]
fn debug_output_shows_no_key() {
    let ca = Ca::generate().unwrap();
    let identity = ca.issue(&PeerIdentity::Controller, HOUR).unwrap();
    assert_eq!(format!("{ca:?} {identity:?}"), "Ca Identity(Some(Controller))");
}
