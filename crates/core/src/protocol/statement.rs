//! The statement that a source signs when it announces a version, and that every holder of the version presents.
//!
//! Data only: `net` signs and checks, `membership` decides the consequences of a checked statement.

use serde::{Deserialize, Serialize};

use super::{HeldVersion, Version};

/// Most statements that one member presents.
pub const STATEMENTS: usize = 64;

/// First bytes of the signed text: signatures for other purposes with a certificate's key never begin like this.
const PURPOSE: &str = "weightsync.dev statement 1";

/// A source's claim that a version exists. It proves that while the authority is the same, even after the source is gone and its
/// certificate expired.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Statement {
    /// UID of the `WeightSync` object.
    pub weightsync: String,
    /// The version and the digest of its manifest.
    pub held: HeldVersion,
    /// Digest of its layout (blake3, hex); empty where no agent sees the bytes (`delivery: External`).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub layout: String,
    /// The epoch in which it was announced. Of two statements about one number, the one of the later epoch counts.
    pub epoch: u64,
    /// The certificate of the source's agent: DER in base64. It names the object, the pod and the role.
    pub certificate: String,
    /// Signature of [`to_sign`](Self::to_sign) by the certificate's key: ECDSA P-256 with SHA-256, DER in base64.
    pub signature: String,
}

impl Statement {
    /// The bytes that are signed: each field with its length before it.
    pub fn to_sign(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let (version, epoch) = (self.held.version.to_string(), self.epoch.to_string());
        for field in [PURPOSE, &self.weightsync, &version, &self.held.manifest, &self.layout, &epoch] {
            bytes.extend_from_slice(&(field.len() as u64).to_le_bytes());
            bytes.extend_from_slice(field.as_bytes());
        }
        bytes
    }
}

/// A version that a source announced, by a checked statement.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Announced {
    /// Its number.
    pub version: Version,
    /// The epoch in which it was announced.
    pub epoch: u64,
    /// Digest of its manifest.
    pub manifest: String,
}

impl From<&Statement> for Announced {
    fn from(statement: &Statement) -> Self {
        Self { version: statement.held.version, epoch: statement.epoch, manifest: statement.held.manifest.clone() }
    }
}
