//! Certificates: which names they may have, which are trusted, and the effect of a renewal.

use std::time::{Duration, SystemTime};

use time::OffsetDateTime;

use super::{Ca, Identity, IdentityError, Made, PeerIdentity, StatementError, verifies};
use weightsync_core::protocol::{HeldVersion, Role, Statement};

const HOUR: Duration = Duration::from_secs(3600);

fn agent(weightsync: &str, pod_uid: &str) -> PeerIdentity {
    PeerIdentity::Agent { weightsync: weightsync.into(), pod_uid: pod_uid.into(), role: Role::Rollout }
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
    assert_eq!(agent("ws-1", "pod-1").uri(), "weightsync://ws-1/rollout/pod-1");
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
fn authority_with_a_foreign_key_is_refused() {
    let (one, other) = (Ca::generate().unwrap(), Ca::generate().unwrap());
    assert!(Ca::from_pem(one.certificate_pem(), &other.key_pem()).is_err());
}

#[test]
fn certificate_of_other_authority_key_or_time_is_refused() {
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

/// A source's certificate for that time.
fn source(ca: &Ca, weightsync: &str, role: Role, from: OffsetDateTime) -> Identity {
    let identity = Identity::new(ca.certificate_pem()).unwrap();
    let who = PeerIdentity::Agent { weightsync: weightsync.into(), pod_uid: "pod-s".into(), role };
    let pem = ca.sign_at(&identity.csr_pem().unwrap(), &who, from, HOUR).unwrap();
    identity.show(who, super::read_certificates("certificate", &pem).unwrap(), std::time::SystemTime::now()).unwrap();
    identity
}

fn held() -> HeldVersion {
    HeldVersion { version: 7, manifest: "m".into() }
}

#[test]
fn statement_of_a_source_proves_its_version_and_nothing_else() {
    let ca = Ca::generate().unwrap();
    let (signer, reader) = (source(&ca, "ws-1", Role::Source, OffsetDateTime::now_utc()), Identity::new(ca.certificate_pem()).unwrap());
    let statement = signer.state(&held(), "l", 3).unwrap();
    reader.check(&statement, "ws-1").unwrap();
    assert!(matches!(reader.check(&statement, "ws-2"), Err(StatementError::OtherObject { .. })));
    let forged = [
        Statement { weightsync: "ws-2".into(), ..statement.clone() },
        Statement { held: HeldVersion { version: 8, ..held() }, ..statement.clone() },
        Statement { held: HeldVersion { manifest: "n".into(), ..held() }, ..statement.clone() },
        Statement { layout: "k".into(), ..statement.clone() },
        Statement { epoch: 4, ..statement.clone() },
        // The same concatenated bytes, split at another place.
        Statement { held: HeldVersion { manifest: "ml".into(), ..held() }, layout: String::new(), ..statement.clone() },
        Statement { signature: statement.certificate.clone(), ..statement.clone() },
    ];
    for statement in forged {
        let weightsync = statement.weightsync.clone();
        assert!(reader.check(&statement, &weightsync).is_err(), "{statement:?}");
    }
}

#[test]
fn statement_of_an_ended_certificate_proves_what_was_announced() {
    let ca = Ca::generate().unwrap();
    let long_ago = OffsetDateTime::now_utc() - 240 * HOUR;
    let statement = source(&ca, "ws-1", Role::Source, long_ago).state(&held(), "l", 3).unwrap();
    Identity::new(ca.certificate_pem()).unwrap().check(&statement, "ws-1").unwrap();
}

#[test]
fn statement_of_a_rollout_or_a_stranger_proves_nothing() {
    let (ca, foreign) = (Ca::generate().unwrap(), Ca::generate().unwrap());
    let (now, reader) = (OffsetDateTime::now_utc(), Identity::new(ca.certificate_pem()).unwrap());
    let rollout = source(&ca, "ws-1", Role::Rollout, now).state(&held(), "l", 3).unwrap();
    assert!(matches!(reader.check(&rollout, "ws-1"), Err(StatementError::NoSource { .. })));
    let other = source(&ca, "ws-2", Role::Source, now).state(&held(), "l", 3).unwrap();
    let other = Statement { weightsync: "ws-1".into(), ..other };
    assert!(matches!(reader.check(&other, "ws-1"), Err(StatementError::NoSource { .. })));
    let stranger = source(&foreign, "ws-1", Role::Source, now).state(&held(), "l", 3).unwrap();
    assert!(matches!(reader.check(&stranger, "ws-1"), Err(StatementError::Certificate(_))));
    let genuine = source(&ca, "ws-1", Role::Source, now).state(&held(), "l", 3).unwrap();
    // The certificate of a source is public: without its key, it signs nothing.
    let borrowed = Statement { signature: rollout.signature, ..genuine };
    assert!(matches!(reader.check(&borrowed, "ws-1"), Err(StatementError::Signature)));
    assert!(ca.issue(&PeerIdentity::Controller, HOUR).unwrap().state(&held(), "l", 3).is_err());
}

#[test]
fn foreign_certificate_is_checked_as_its_clients_do() {
    let name = "weightsync.system.svc";
    let (made, other) = (Made::new(name, HOUR).unwrap(), Made::new(name, HOUR).unwrap());
    let now = SystemTime::now();
    verifies(&made.authority, &made.chain, name, now).unwrap();
    verifies(&format!("{}{}", other.authority, made.authority), &made.chain, name, now).unwrap();
    for (bundle, asked, at) in [
        (&other.authority, name, now),
        (&made.authority, "weightsync.other.svc", now),
        (&made.authority, name, now + 2 * HOUR),
        (&made.key, name, now),
    ] {
        assert!(verifies(bundle, &made.chain, asked, at).is_err(), "{asked}");
    }
    let identity = Identity::new(Ca::generate().unwrap().certificate_pem()).unwrap();
    assert!(identity.serve_as(name, &made.chain, &other.key).is_err(), "the key of another certificate");
    identity.serve_as(name, &made.chain, &made.key).unwrap();
}
