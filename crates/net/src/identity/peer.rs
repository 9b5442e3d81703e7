//! The identity in a certificate. Reads and writes names; never decides what a peer may do.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls_pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

use super::IdentityError;
use weightsync_core::protocol::Role;

const SCHEME: &str = "weightsync://";
const DOMAIN: &str = "weightsync.internal";

/// The holder of a certificate that the authority signed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PeerIdentity {
    /// The controller, or the supervisor of `weightsync local`.
    Controller,
    /// An agent.
    Agent {
        /// UID of the `WeightSync` that claims its pod.
        weightsync: String,
        /// UID of its pod.
        pod_uid: String,
        /// The role that the object's plan gives to its pod.
        role: Role,
    },
}

impl PeerIdentity {
    /// The name that a client checks: `POD_UID.agent.weightsync.internal` or `controller.weightsync.internal`.
    pub(crate) fn dns_name(&self) -> String {
        match self {
            Self::Controller => controller_name(),
            Self::Agent { pod_uid, .. } => agent_name(pod_uid),
        }
    }

    /// The name that a server reads: `weightsync://UID/source/POD_UID`, `weightsync://UID/rollout/POD_UID` or
    /// `weightsync://controller`.
    pub fn uri(&self) -> String {
        match self {
            Self::Controller => format!("{SCHEME}controller"),
            Self::Agent { weightsync, pod_uid, role } => format!("{SCHEME}{weightsync}/{}/{pod_uid}", word(*role)),
        }
    }

    /// Refuses names that could be read as another identity or do not fit a DNS label.
    pub(super) fn check(&self) -> Result<(), IdentityError> {
        match self {
            Self::Controller => Ok(()),
            Self::Agent { weightsync, pod_uid, .. } => [weightsync, pod_uid].into_iter().try_for_each(|name| check_label(name)),
        }
    }

    /// Reads the identity from a certificate that TLS verified already.
    pub fn of_certificate(certificate: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let unnamed = |cause: &str| IdentityError::Unnamed(cause.to_owned());
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|_| unnamed("it cannot be parsed"))?;
        let names = parsed.subject_alternative_name().map_err(|_| unnamed("its names cannot be parsed"))?;
        let names = names.ok_or_else(|| unnamed("it has no alternative names"))?;
        let mut uris = names.value.general_names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => uri.strip_prefix(SCHEME),
            _ => None,
        });
        match (uris.next(), uris.next()) {
            (Some(uri), None) => Self::of_uri(uri),
            (None, _) => Err(unnamed("it has no weightsync:// name")),
            (Some(_), Some(_)) => Err(unnamed("it has two weightsync:// names")),
        }
    }

    fn of_uri(rest: &str) -> Result<Self, IdentityError> {
        let parts: Vec<&str> = rest.split('/').collect();
        let identity = match parts.as_slice() {
            ["controller"] => Self::Controller,
            [weightsync, role, pod_uid] if *role == word(Role::Source) || *role == word(Role::Rollout) => Self::Agent {
                weightsync: (*weightsync).to_owned(),
                pod_uid: (*pod_uid).to_owned(),
                role: if *role == word(Role::Source) { Role::Source } else { Role::Rollout },
            },
            _ => return Err(IdentityError::Unnamed(format!("{SCHEME}{rest} is no known form"))),
        };
        identity.check()?;
        Ok(identity)
    }
}

/// A role in a name.
fn word(role: Role) -> &'static str {
    match role {
        Role::Source => "source",
        Role::Rollout => "rollout",
    }
}

pub(super) fn end_of(certificate: &CertificateDer<'_>) -> Result<SystemTime, IdentityError> {
    let parsed = x509_parser::parse_x509_certificate(certificate);
    let (_, parsed) = parsed.map_err(|_| IdentityError::Unnamed("it cannot be parsed".into()))?;
    let seconds = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
    Ok(UNIX_EPOCH + Duration::from_secs(seconds))
}

pub(crate) fn controller_name() -> String {
    format!("controller.{DOMAIN}")
}

/// Name in the certificate of the agents of a pod.
pub fn agent_name(pod_uid: &str) -> String {
    format!("{pod_uid}.agent.{DOMAIN}")
}

fn check_label(name: &str) -> Result<(), IdentityError> {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if (1..=63).contains(&name.len()) && name.bytes().all(fits) { Ok(()) } else { Err(IdentityError::Name { name: name.to_owned() }) }
}
